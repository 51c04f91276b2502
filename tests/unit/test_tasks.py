"""Losses, errors and metrics against torch and counting by hand; what does not fit is refused in one line."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from rudra.compute import tasks
from rudra.compute.models import check_model_output
from rudra.data.load import DataInfo
from rudra.errors import ConfigError
from rudra.job.tables import TaskTable

SEED = torch.Generator().manual_seed(5)
LOGITS = torch.randn(6, 8, generator=SEED)
LABELS = torch.tensor([0, 1, 2, 3, 7, 7])
FLAGS = (torch.rand(6, 8, generator=SEED) < 0.4).float()
WORDS, NEXT = torch.randn(3, 4, 8, generator=SEED), torch.randint(0, 8, (3, 4), generator=SEED)
MASKED = NEXT.clone()
MASKED[0, 2], MASKED[0, 3:] = -1, -100
NUMBERS, TRUTH = torch.randn(6, 2, generator=SEED), torch.randn(6, 2, generator=SEED)

CASES: list[tuple[dict[str, Any], Any, Any, float]] = [
    ({}, LOGITS, LABELS, functional.cross_entropy(LOGITS, LABELS).item()),
    (
        {"options": {"label_smoothing": 0.1}},
        LOGITS,
        LABELS,
        functional.cross_entropy(LOGITS, LABELS, label_smoothing=0.1).item(),
    ),
    (
        {"options": {"weight": [1.0, 2, 0.5, 3, 1, 1, 1, 4], "label_smoothing": 0.2}},
        LOGITS,
        LABELS,
        nn.CrossEntropyLoss(torch.tensor([1.0, 2, 0.5, 3, 1, 1, 1, 4]), label_smoothing=0.2)(LOGITS, LABELS).item(),
    ),
    ({"name": "multi-label"}, LOGITS, FLAGS, nn.BCEWithLogitsLoss()(LOGITS, FLAGS).item()),
    ({"name": "language"}, WORDS, NEXT, functional.cross_entropy(WORDS.flatten(0, 1), NEXT.flatten()).item()),
    ({"name": "regression"}, NUMBERS, TRUTH, functional.mse_loss(NUMBERS, TRUTH).item()),
    ({"name": "regression", "options": {"loss": "l1"}}, NUMBERS, TRUTH, functional.l1_loss(NUMBERS, TRUTH).item()),
]


@pytest.mark.parametrize(("table", "output", "target", "expected"), CASES)
def test_losses_are_torchs_and_the_mean_of_those_of_single_samples(
    table: dict[str, Any], output: torch.Tensor, target: torch.Tensor, expected: float
) -> None:
    task = tasks.make(TaskTable(**table), 8)
    assert task.loss(output, target).item() == pytest.approx(expected, rel=1e-6)
    each = task.loss(output, target, "none")
    assert each.shape == (len(target),)
    assert each.mean().item() == pytest.approx(expected, rel=1e-6)
    assert task.fits(target)
    assert task.output_shape(target) == tuple(output.shape)


def seen(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    assert output.shape == target.shape
    return (output - target).max()


def test_regression_with_one_output_fits_targets_of_one_number() -> None:
    """As a network of `classes` outputs gives for a column of a table; broadcast they would be (6, 6) differences."""
    task = tasks.make(TaskTable(name="regression", metrics=[seen]), 1)
    output, target = NUMBERS[:, :1], TRUTH[:, 0]
    assert task.loss(output, target).item() == functional.mse_loss(NUMBERS[:, 0], target).item()
    assert (
        task.loss(output, target, "none").tolist()
        == functional.mse_loss(NUMBERS[:, 0], target, reduction="none").tolist()
    )
    assert task.measure(output, target) == {
        "mean_absolute_error": (NUMBERS[:, 0] - target).abs().mean().item(),
        "seen": (NUMBERS[:, 0] - target).max().item(),
    }
    info = DataInfo("x", 10, 5, (3,), 1, (torch.zeros(1, 3), torch.zeros(1)))
    check_model_output(nn.Linear(3, 1), task, info)
    with pytest.raises(ConfigError, match=r"gives shape \(1, 2\) for one sample; x needs \(1,\)"):
        check_model_output(nn.Linear(3, 2), task, info)


def test_errors_and_metrics_of_labels() -> None:
    task = tasks.make(TaskTable(), 8)
    best = LOGITS.topk(5, dim=1).indices.tolist()
    assert task.wrong(LOGITS, LABELS).tolist() == [b[0] != y for b, y in zip(best, LABELS.tolist(), strict=True)]  # type: ignore[union-attr]
    missed = [y not in b for b, y in zip(best, LABELS.tolist(), strict=True)]
    exact = pytest.approx(np.mean(missed), abs=1e-15)  # not rounded to float32
    assert task.measure(LOGITS, LABELS) == {"top5_error": exact}
    assert task.measure(LOGITS[:, :5], LABELS.clamp(max=4)) == {}, "the five most probable are all there are"


def test_class_weights_and_smoothing_keep_errors_and_metrics() -> None:
    plain = tasks.make(TaskTable(), 8)
    task = tasks.make(TaskTable(options={"weight": [float(w) for w in range(1, 9)], "label_smoothing": 0.1}), 8)
    assert task.loss(LOGITS, LABELS) != plain.loss(LOGITS, LABELS)
    assert task.wrong(LOGITS, LABELS).tolist() == plain.wrong(LOGITS, LABELS).tolist()  # type: ignore[union-attr]
    assert task.measure(LOGITS, LABELS) == plain.measure(LOGITS, LABELS) != {}


def test_lists_in_options_are_tensors_for_a_loss_of_ones_own() -> None:
    weight = [1.0, 2, 0.5, 3, 1, 1, 1, 4]
    table = TaskTable(name="torch.nn.functional:cross_entropy", options={"weight": weight, "ignore_index": 7})
    expected = functional.cross_entropy(LOGITS, LABELS, torch.tensor(weight), ignore_index=7)
    assert tasks.make(table, 8).loss(LOGITS, LABELS).item() == pytest.approx(expected.item())


def test_precision_of_several_labels() -> None:
    task = tasks.make(TaskTable(name="multi-label", options={"k": [1, 3]}), 8)
    ranked = LOGITS.argsort(dim=1, descending=True).tolist()
    hits = [[FLAGS[i, label].item() for label in labels] for i, labels in enumerate(ranked)]
    expected = {"precision@1": np.mean([h[0] for h in hits]), "precision@3": np.mean([np.mean(h[:3]) for h in hits])}
    assert task.measure(LOGITS, FLAGS) == pytest.approx(expected, abs=1e-15), "not rounded to float32"
    assert task.wrong(LOGITS, FLAGS).tolist() == [h[0] == 0 for h in hits]  # type: ignore[union-attr]


def test_tokens_that_are_masked_count_nowhere() -> None:
    task = tasks.make(TaskTable(name="language"), 8)
    first = functional.cross_entropy(WORDS[0, :2], NEXT[0, :2])
    assert task.loss(WORDS, MASKED, "none")[0].item() == pytest.approx(first.item())
    wrong = WORDS.argmax(2) != NEXT
    expected = [wrong[0, :2].float().mean().item(), *wrong[1:].float().mean(1).tolist()]
    assert task.wrong(WORDS, MASKED) == pytest.approx(expected)
    assert task.derived(math.log(20)) == {"perplexity": pytest.approx(20)}


def absolute(output: Any, target: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    return scale * (output - target).abs().mean()


def largest(output: Any, target: torch.Tensor) -> torch.Tensor:
    return (output - target).abs().max()


def each(output: Any, target: torch.Tensor) -> torch.Tensor:
    return (output - target).abs().mean(1)


NOT_A_LOSS = 3


def test_a_metric_that_is_no_number_is_named() -> None:
    def hits(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output == target).float()

    task = tasks.make(TaskTable(name="regression", metrics=[hits]), 1)
    with pytest.raises(ConfigError, match=r"\[task\] metrics: hits gave shape \(4, 1\); a metric is one number"):
        task.measure(torch.ones(4, 1), torch.ones(4, 1))


def test_a_loss_and_metrics_of_ones_own() -> None:
    task = tasks.make(TaskTable(name=f"{__name__}:absolute", metrics=[largest], options={"scale": 2.0}), 2)
    assert task.loss(NUMBERS, TRUTH).item() == pytest.approx(2 * (NUMBERS - TRUTH).abs().mean().item())
    assert task.wrong(NUMBERS, TRUTH) is None
    assert task.measure(NUMBERS, TRUTH) == {"largest": pytest.approx((NUMBERS - TRUTH).abs().max().item())}
    beside = tasks.make(TaskTable(name="regression", metrics=[f"{__name__}:largest"]), 2)
    assert set(beside.measure(NUMBERS, TRUTH)) == {"mean_absolute_error", "largest"}


class Ranking(tasks.Task):
    """A task of one's own, with an error."""

    name = "ranking"

    def __init__(self, classes: int, margin: float = 1.0) -> None:
        super().__init__(classes)
        self.margin = margin


def test_a_task_of_ones_own() -> None:
    task = tasks.make(TaskTable(name=f"{__name__}:Ranking", options={"margin": 0.5}), 2)
    assert (task.name, task.classes, task.margin) == ("ranking", 2, 0.5)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"name": "clasification"}, r"\[task\] name: 'clasification' is unknown; valid: classification, multi-label, "),
        ({"options": {"smoothing": 1}}, r"\[task\] classification: .*'smoothing'; its parameters: classes, label_smo"),
        ({"options": {"label_smoothing": 1.5}}, r"\[task\] options.label_smoothing: 1.5; valid: 0 to 1"),
        ({"options": {"label_smoothing": "much"}}, r"\[task\] options.label_smoothing: 'much'; valid: 0 to 1"),
        ({"options": {"weight": [1.0, 2.0]}}, r"\[task\] options.weight: \[1.0, 2.0\]; valid: a list of 8 numbers"),
        ({"options": {"weight": 2.0}}, r"\[task\] options.weight: 2.0; valid: a list of 8 numbers, one for each class"),
        ({"options": {"weight": [1.0] * 7 + ["x"]}}, r"\[task\] options.weight: .*; valid: a list of 8 numbers"),
        ({"options": {"weight": [1.0] * 7 + [0]}}, r"\[task\] options.weight: .*; valid: numbers > 0"),
        (
            {"name": "regression", "options": {"loss": "l3"}},
            r"\[task\] options.loss: 'l3' is unknown; valid: mse, l1, h",
        ),
        ({"name": "multi-label", "options": {"k": [0]}}, r"\[task\] options.k: \[0\]; valid: one or more numbers"),
        (
            {"name": f"{__name__}:absolute", "options": {"size": 1}},
            r"is called as loss\(output, target, \*\*options\): ",
        ),
        ({"name": f"{__name__}:NOT_A_LOSS"}, r"\[task\] name: .*NOT_A_LOSS is a int, and cannot be called"),
        ({"metrics": ["accuracy"]}, r"\[task\] metrics: 'accuracy' is unknown; valid: package.module:callable"),
        ({"metrics": [f"{__name__}:missing"]}, "has no attribute 'missing'"),
    ],
)
def test_what_is_no_task_is_refused_in_one_line(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        tasks.make(TaskTable(**table), 8)
    assert "\n" not in str(error.value)


def test_a_loss_must_be_one_number() -> None:
    task = tasks.make(TaskTable(name=each), 2)
    with pytest.raises(ConfigError, match=r"\[task\] each gave shape \(6,\); a loss is one number"):
        task.loss(NUMBERS, TRUTH)
    with pytest.raises(ConfigError, match="batching: the loss absolute gives no values of single samples"):
        tasks.make(TaskTable(name=absolute), 2).loss(NUMBERS, TRUTH, "none")


@pytest.mark.parametrize(
    ("table", "target", "message"),
    [
        ({}, FLAGS, r"classification needs one whole number for each sample; x has targets float32 of shape \(8,\)"),
        ({}, NEXT, r"classification needs .*; x has targets int64 of shape \(4,\)"),
        ({"name": "multi-label"}, LABELS, r"multi-label needs 0 or 1 for each label, as float32; x has targets int64"),
        ({"name": "language"}, LABELS, "language needs a sequence of whole numbers for each sample"),
        ({"name": "regression"}, LABELS, "regression needs numbers, as float32"),
        ({"name": "regression"}, TRUTH[:, :1], r"\[model\] has 8 outputs, and x has 1 classes"),
        ({"name": "language"}, NEXT, r"\[model\] gives shape \(1, 8\) for one sample; x needs \(1, 4, 8\)"),
    ],
)
def test_targets_that_do_not_fit_the_task(table: dict[str, Any], target: torch.Tensor, message: str) -> None:
    info = DataInfo("x", 10, 5, (3,), 8, (torch.zeros(1, 3), torch.zeros_like(target[:1])))
    with pytest.raises(ConfigError, match=message):
        check_model_output(nn.Linear(3, 8), tasks.make(TaskTable(**table), 8), info)
