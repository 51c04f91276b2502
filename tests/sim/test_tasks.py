"""Whole runs with what users bring: other tasks, several inputs, a target that ends the run."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fuzzing import in_turn
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

import rudra
from rudra.data.load import load
from rudra.errors import ConfigError, RudraError
from rudra.results.progress import summary_table
from tests.selection import CAMPAIGN

ANY = torch.Generator().manual_seed(1)
POINTS = torch.rand(240, 3, generator=ANY)
SLOPES = torch.tensor([[2.0, -1.0], [0.5, 1.0], [-1.0, 3.0]])
NUMBERS = POINTS @ SLOPES
FLAGS = (NUMBERS.median(0).values < NUMBERS).float()
LETTERS = torch.arange(241) % 5


def linear() -> nn.Module:
    return nn.Linear(3, 2)


class Letters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 5)

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        table: torch.Tensor = self.table(letters)
        return table


class Pairs(Dataset[dict[str, torch.Tensor]]):
    """Items with two inputs, as Hugging Face's datasets give them."""

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"left": POINTS[index, :1], "right": POINTS[index, 1:], "labels": FLAGS[index, 0].long()}


class Two(nn.Module):
    """Two inputs and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(1, 2), nn.Linear(2, 2)

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.left(left) + self.right(right), left.mean()


def first_output(output: Any, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output[0], target)


def hits(output: Any, target: torch.Tensor) -> torch.Tensor:
    return (output[0].argmax(1) == target).float().mean()


def pair(*tensors: torch.Tensor) -> tuple[Any, Any]:
    return TensorDataset(*(t[:200] for t in tensors)), TensorDataset(*(t[200:240] for t in tensors))


RAGGED = [{"letters": LETTERS[i : i + 3 + i % 5], "label": int(LETTERS[i])} for i in range(200)]


class Summed(nn.Module):
    """Of the letters of a sequence, but for some that are masked at random."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 8, padding_idx=5)
        self.last = nn.Linear(8, 5)

    def forward(self, letters: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last((self.table(letters) * seen[:, :, None]).sum(1))
        return result


def padded(items: list[Any]) -> dict[str, torch.Tensor]:
    letters = nn.utils.rnn.pad_sequence([item["letters"] for item in items], batch_first=True, padding_value=5)
    seen = torch.rand(letters.shape) < 0.9
    return {"letters": letters, "seen": seen, "labels": torch.tensor([item["label"] for item in items])}


WINDOWS = torch.stack([LETTERS[i : i + 8] for i in range(0, 200, 4)])
SEQUENCES = TensorDataset(WINDOWS, torch.stack([LETTERS[i + 1 : i + 9] for i in range(0, 200, 4)]))
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], Any, float]] = {
    "regression": ({"name": "regression"}, {"name": pair(POINTS, NUMBERS)}, linear, 0.5),
    "multi-label": ({"name": "multi-label", "options": {"k": [1]}}, {"name": pair(POINTS, FLAGS)}, linear, 20.0),
    "language": ({"name": "language"}, {"name": (SEQUENCES, SEQUENCES), "classes": 5}, Letters, 20.0),
    "padded": ({}, {"name": (RAGGED, RAGGED), "classes": 5, "collate": padded}, Summed, 0.5),
    "own": ({"name": first_output, "metrics": [hits]}, {"name": (Pairs(), Pairs()), "classes": 2}, Two, 5.0),
}


def job(case: str, **tables: Any) -> rudra.Job:
    task, data, model, rate = CASES[case]
    about: dict[str, dict[str, Any]] = {
        "model": {"name": model},
        "data": data,
        "task": task,
        "training": {"epochs": 12, "minibatch_size": 10},
        "optimizer": {"learning_rate": rate},
        "protocol": {"name": "async", "modulation": "none"},
        "cluster": {"learners": 2, "threads_per_rank": 1},
    }
    return rudra.Job(name=case, **{name: {**about.get(name, {}), **tables.get(name, {})} for name in about | tables})


@pytest.mark.parametrize("case", CASES)
def test_a_run_learns_records_and_replays(case: str, tmp_path: Path) -> None:
    made = job(case)
    with rudra.simulate(made, output=tmp_path / "run.h5", progress="quiet") as results:
        losses, metrics = results.epochs["test_loss"], results.summary()["metrics"].get("test", {})
        errors = results.gradients["errors"]
    assert losses[-1] < 0.5 * losses[0] or losses[-1] < 0.2
    expected = {
        "regression": {"mean_absolute_error"},
        "multi-label": {"precision@1"},
        "language": {"perplexity"},
        "padded": set(),
        "own": {"hits"},
    }
    assert set(metrics) == expected[case]
    assert np.isnan(errors).all() == (case in {"regression", "own"}), "a task that knows no error records none"
    if case == "language":
        assert metrics["perplexity"] == pytest.approx(np.exp(losses).tolist())
        assert 0 < errors[0] < 10
        assert errors[0] != round(float(errors[0])), "a part of a sequence is wrong"
    if case == "own":
        assert metrics["hits"][-1] > 0.75
    assert rudra.replay(tmp_path / "run.h5", job=made).difference is None


def test_language_of_the_simulator_is_plain_torch(tmp_path: Path) -> None:
    """One learner under hardsync, against a loop by hand."""
    made = job("language", protocol={"name": "hardsync"}, cluster={"learners": 1})
    made = made.with_(training={"epochs": 2}, optimizer={"learning_rate": 1.0})
    with rudra.simulate(made, output=tmp_path / "run.h5", progress="quiet") as results:
        ours, order = results.state_dict(), results.gradients["step"]
    from rudra.data.sampling import Sampler

    torch.manual_seed(0)
    model = Letters()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    sampler = Sampler(0, 0, len(SEQUENCES))
    for step in order.tolist():
        inputs, target = SEQUENCES[sampler.indices(step * 10, 10)]
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs).transpose(1, 2), target).backward()
        optimizer.step()
    np.testing.assert_allclose(ours["table.weight"], model.table.weight.detach().numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.each_value
@pytest.mark.parametrize("batching", ["big-batch", "vmap"])
@pytest.mark.parametrize("case", ["regression", "multi-label", "language"])
def test_gradients_computed_together_learn_as_well(case: str, batching: str, tmp_path: Path) -> None:
    made = job(case, protocol={"name": "hardsync"}, simulation={"batching": batching})
    with rudra.simulate(made, output=tmp_path / "together.h5", progress="quiet") as results:
        together, errors = results.epochs["test_loss"], results.epochs["train_error"]
    alone = made.with_(simulation={"batching": "none"})
    with rudra.simulate(alone, output=tmp_path / "alone.h5", progress="quiet") as results:
        np.testing.assert_allclose(together, results.epochs["test_loss"], rtol=1e-3)
        np.testing.assert_allclose(errors, results.epochs["train_error"], atol=1e-3)


class Cropped(Dataset[tuple[torch.Tensor, int]]):
    """A set that draws random numbers, as torchvision's transforms do."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return POINTS[index] + torch.rand(3) + float(np.random.rand()), int(FLAGS[index, 0])


@pytest.mark.parametrize(("batching", "protocol"), [("big-batch", "hardsync"), ("vmap", "async")])
def test_mini_batches_of_different_sizes_are_not_computed_together(
    batching: str, protocol: str, tmp_path: Path
) -> None:
    made = job("padded", protocol={"name": protocol}, simulation={"batching": batching})
    with pytest.raises(RudraError, match=r"\[simulation\] batching: mini-batches of different sizes cannot be"):
        rudra.simulate(made, output=tmp_path / "run.h5", progress="quiet")


def test_sets_that_draw_random_numbers_draw_the_same_again(tmp_path: Path) -> None:
    made = job("regression", task={"name": "classification"}, data={"name": (Cropped(), Cropped()), "classes": 2})
    digests = []
    for name in ("a.h5", "b.h5"):
        with rudra.simulate(made, output=tmp_path / name, progress="quiet") as results:
            digests.append((results.summary()["weights_sha256"], results.epochs["test_loss"].tolist()))
    assert digests[0] == digests[1]
    assert rudra.replay(tmp_path / "a.h5", job=made).difference is None


TOPOLOGIES: list[dict[str, Any]] = [
    {"name": "base"},
    {"name": "adv", "options": {"fan_out": 2}},
    {"name": "adv*"},
    {"name": "groups", "options": {"groups": 1}},
    {"name": "groups", "options": {"groups": 2}},
]


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_a_run_ends_with_the_epoch_after_which_its_target_is_reached(topology: dict[str, Any], tmp_path: Path) -> None:
    target = {"target": "loss <= 0.15", "stop_at_target": True, "epochs": 40}
    more = {"optimizer": {"learning_rate": 0.1}, "cluster": {"learners": 4, "threads_per_rank": 1}}
    made = job("regression", topology=topology, training=target, **more)
    with rudra.simulate(made, output=tmp_path / "run.h5", progress="quiet") as results:
        summary, epochs = results.summary(), results.epochs
        (event,) = results.events[results.events["kind"] == b"target"]
    assert summary["status"] == "finished"
    reached = summary["target_epoch"]
    assert float(np.median(epochs["test_loss"][reached - 5 : reached])) <= 0.15
    assert reached == 5 or float(np.median(epochs["test_loss"][reached - 6 : reached - 1])) > 0.15
    assert reached <= len(epochs) <= reached + 2 < 40, "the epoch under way is the last"
    assert summary["time_to_target_s"] == epochs["time_s"][reached - 1] == event["time_s"]
    assert epochs["evaluated"][-1] == 1
    assert summary["pushed"] == summary["applied"] + summary["pending"] + summary["discarded"] + summary["lost"]
    assert rudra.replay(tmp_path / "run.h5", job=made).difference is None


@pytest.mark.parametrize(
    ("topology", "faults"), in_turn(TOPOLOGIES, [[], [{"learner": 1, "dies_at_s": 2.0}]], each=1), ids=str
)
def test_training_waits_for_tests_if_it_is_to(
    topology: dict[str, Any], faults: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Tests take as long as ten epochs; whoever dies does so while all wait for one."""
    made = {}
    for evaluate in (True, "always"):
        slow = {"evaluation_s": 1.0, "compute_s": 0.002, "faults": faults}
        about = job(
            "regression",
            topology=topology,
            training={"evaluate": evaluate, "epochs": 6},
            simulation=slow,
            cluster={"learners": 4, "threads_per_rank": 1},
        )
        with rudra.simulate(about, output=tmp_path / f"{evaluate}.h5", progress="quiet") as results:
            summary, made[evaluate] = results.summary(), results.epochs["evaluated"].tolist()
            assert summary["status"] == "finished"
            assert summary["pushed"] == sum(summary[name] for name in ("applied", "pending", "discarded", "lost"))
            text = summary_table(summary)
        assert ("epochs: evaluations took too long (training.evaluate = 'always' waits for them)" in text) is (
            evaluate is True
        )
        assert rudra.replay(tmp_path / f"{evaluate}.h5", job=about).difference is None
    assert 0 in made[True]
    assert made["always"] == [1] * 6


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_a_run_ends_when_its_tests_are_no_better_for_too_long(topology: dict[str, Any], tmp_path: Path) -> None:
    """At so high a rate that the loss soon rises; a replay ends there, too."""
    training = {"patience": 3, "epochs": 40}
    more = {
        "optimizer": {"learning_rate": 1.5},
        "protocol": {"name": "async", "modulation": "none"},
        "cluster": {"learners": 4, "threads_per_rank": 1},
    }
    made = job("regression", topology=topology, training=training, **more)
    with rudra.simulate(made, output=tmp_path / "run.h5", progress="quiet") as results:
        summary, epochs = results.summary(), results.epochs
        (event,) = results.events[results.events["kind"] == b"patience"]
        best = results.best_epoch
    losses = epochs["test_loss"][epochs["evaluated"] == 1]
    places = np.flatnonzero(epochs["evaluated"] == 1) + 1
    since = [place - int(np.argmin(losses[: place + 1])) for place in range(len(losses))]
    last = int(places[since.index(3)])
    assert summary["status"] == "finished"
    assert event["text"].decode() == f"patience = 3: the last 3 evaluations, up to epoch {last}, brought no new best"
    assert event["time_s"] == epochs["time_s"][last - 1]
    assert last <= len(epochs) <= last + 2 < 40, "the epoch under way is the last"
    assert best is not None
    assert summary["pushed"] == summary["applied"] + summary["pending"] + summary["discarded"] + summary["lost"]
    assert rudra.replay(tmp_path / "run.h5", job=made).difference is None


PLATEAUS = in_turn(TOPOLOGIES, [0.0, 1.5], each=1)
KEPT = [PLATEAUS[0], PLATEAUS[1], PLATEAUS[-1]]
"""Tests end a run on the other topologies, too: see above."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "warm_up"),
    [pytest.param(*case, marks=() if case in KEPT else CAMPAIGN) for case in PLATEAUS],
    ids=str,
)
def test_at_a_plateau_the_rate_falls_with_an_epoch(topology: dict[str, Any], warm_up: float, tmp_path: Path) -> None:
    """When the tests say so, and never in between; alike in a second run, and bit for bit in a replay."""
    high = {1: 2.5, 2: 0.9}.get(topology.get("options", {}).get("groups", 0), 0.5)  # so that the loss rises
    rule = {"schedule": "plateau", "decay_factor": 0.5, "schedule_options": {"patience": 2}, "warm_up": warm_up}
    made = job(
        "regression",
        topology=topology,
        training={"epochs": 24},
        optimizer={"learning_rate": high, **rule},
        cluster={"learners": 4, "threads_per_rank": 1},
    )
    runs = []
    for name in ("a.h5", "b.h5"):
        with rudra.simulate(made, output=tmp_path / name, progress="quiet") as results:
            runs.append((results.updates[["epoch", "learning_rate", "digest"]].tolist(), results.summary()))
            updates, epochs, events = results.updates, results.epochs, results.events
    assert runs[0][0] == runs[1][0]
    plateaus = events[events["kind"] == b"plateau"]
    assert len(plateaus) >= 2
    fell = [int(row["text"].split()[-1]) for row in plateaus]
    rates = [high * 0.5 ** sum(epoch > at for at in fell) for epoch in updates["epoch"].tolist()]
    warm = updates["epoch"] > 2
    assert updates["learning_rate"][warm].tolist() == [
        rate for rate, is_warm in zip(rates, warm, strict=True) if is_warm
    ]
    worse, told, best = 0, [], np.inf
    for row in epochs[epochs["evaluated"] == 1]:
        worse = 0 if row["test_loss"] < best else worse + 1
        best = min(best, row["test_loss"])
        if worse == 2:
            worse = 0
            told.append(int(row["epoch"]))
    assert all(0 < at - epoch <= 2 for at, epoch in zip(fell, told, strict=False)), "with the epoch under way"
    assert len(told) - len(fell) in {0, 1}, "the last may come after the end"
    assert rudra.replay(tmp_path / "a.h5", job=made).difference is None


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (
            {"schedule_options": {"patients": 3}},
            r"schedule_options has an unknown option 'patients' of schedule 'plateau'; use patience",
        ),
        ({"schedule_options": {"patience": 0}}, r"schedule_options patience must be a whole number >= 1, not 0"),
        ({"milestones": [3]}, r"milestones = \[3\] is not supported with schedule = 'plateau'; use 'step'"),
        (
            {"schedule_every": "update"},
            r"schedule_every = 'update' is not supported with schedule = 'plateau'; use 'epoch'",
        ),
    ],
)
def test_what_a_plateau_does_not_take(optimizer: dict[str, Any], said: str) -> None:
    with pytest.raises(RudraError, match=rf"^\[optimizer\] {said}"):
        job("regression", optimizer={"schedule": "plateau", **optimizer})
    with pytest.raises(
        RudraError,
        match=r"\[optimizer\] schedule = 'plateau' is not supported with .* evaluate = false; use evaluate = true",
    ):
        job("regression", optimizer={"schedule": "plateau"}, training={"evaluate": False})


def test_patience_needs_tests() -> None:
    with pytest.raises(
        RudraError, match=r"patience = 3 is not supported with \[training\] evaluate = false; use evaluate = true"
    ):
        job("regression", training={"patience": 3, "evaluate": False})


def test_class_weights_change_what_is_learned_and_keep_what_is_measured(tmp_path: Path) -> None:
    """A weight makes its class come out more often; the error and the top-5 error are there, and a replay agrees."""
    counts = []
    for name, options in {"plain": {}, "weighted": {"weight": [30.0] + [1.0] * 9, "label_smoothing": 0.1}}.items():
        made = rudra.Job(
            model={"name": "mlp", "options": {"hidden": [16]}},
            task={"options": options},
            training={"epochs": 2, "minibatch_size": 16},
            optimizer={"learning_rate": 0.1},
            cluster={"learners": 2, "threads_per_rank": 1},
        )
        with rudra.simulate(made, output=tmp_path / f"{name}.h5", progress="quiet") as results:
            assert np.isfinite(results.epochs["test_error"]).all()
            assert results.summary()["metrics"]["test"]["top5_error"][-1] < 0.5
            state = results.state_dict()
        assert rudra.replay(tmp_path / f"{name}.h5").difference is None
        images = load(made.data).test.batch(np.arange(355))[0].flatten(1)
        first, second = (key.removesuffix(".weight") for key in state if key.endswith(".weight"))
        hidden = functional.linear(images, state[f"{first}.weight"], state[f"{first}.bias"]).relu()
        output = functional.linear(hidden, state[f"{second}.weight"], state[f"{second}.bias"])
        counts.append(int((output.argmax(1) == 0).sum()))
    assert counts[1] > counts[0] + 10


def test_a_target_alone_ends_nothing(tmp_path: Path) -> None:
    made = job("regression", training={"target": "loss <= 0.05"})
    with rudra.simulate(made, output=tmp_path / "run.h5", progress="quiet") as results:
        assert results.summary()["epochs"] == 12
        assert results.summary()["target_epoch"] is not None
        assert results.summary("loss <= 0")["target_epoch"] is None
        with pytest.raises(ConfigError, match=r"no evaluation measures 'lost'; use loss, .*; did you mean loss"):
            results.summary("lost >= 1")
        assert results.summary("loss <= 0.2", window=1)["target_epoch"] < results.summary("loss <= 0.2")["target_epoch"]


@pytest.mark.parametrize(
    ("case", "target", "message"),
    [
        ("regression", "accuracy >= 0.9", "'accuracy'; use loss, mean_absolute_error"),
        ("multi-label", "precision@2 >= 0.9", "'precision@2'; use loss, error, precision@1, accuracy; did you mean"),
        ("language", "perplexty <= 6", "'perplexty'; use loss, error, perplexity, accuracy; did you mean perplexity?"),
        ("own", "hit >= 0.5", "'hit'; use loss, hits; did you mean hits?"),
    ],
)
def test_a_target_that_no_test_tells_is_refused_at_the_start(
    case: str, target: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as error:
        rudra.simulate(job(case, training={"target": target}), output=tmp_path / "run.h5", progress="quiet")
    assert str(error.value).startswith(f"[training] target: no evaluation measures {message}")
    assert not (tmp_path / "run.h5").exists()


def test_too_few_tests_for_a_target_are_said(tmp_path: Path) -> None:
    made = job("regression", training={"target": "loss <= 9", "epochs": 3})
    with rudra.simulate(made, output=tmp_path / "run.h5", progress="quiet") as results:
        text = summary_table(results.summary())
    assert "loss <= 9: not reached: that takes the median of 5 tests, and there were 3\n" in text


def unlucky(output: Any, target: torch.Tensor) -> torch.Tensor:
    raise KeyError("my own mistake")


@pytest.mark.parametrize("where", ["name", "metrics"])
def test_what_the_users_own_code_raises_comes_through(where: str, tmp_path: Path) -> None:
    task = {"name": unlucky} if where == "name" else {"name": "regression", "metrics": [unlucky]}
    with pytest.raises(KeyError, match="my own mistake"):
        rudra.simulate(job("regression", task=task), output=tmp_path / "run.h5", progress="quiet")


def test_a_task_that_does_not_fit_the_data_is_refused_before_training(tmp_path: Path) -> None:
    made = functools.partial(rudra.simulate, output=tmp_path / "run.h5", progress="quiet")
    with pytest.raises(RudraError, match=r"classification needs one whole number .*float32 of shape \(2,\)"):
        made(job("regression", task={"name": "classification"}))


@pytest.mark.parametrize("protocol", ["hardsync", "softsync", "async"])
@pytest.mark.parametrize(
    ("samples", "learners", "size"),
    [(1, 3, 1), (3, 6, 3), (7, 2, 5), (240, 7, 50)],
    ids=["one sample", "more learners than samples", "a short last batch", "mini-batches larger than shares"],
)
def test_any_number_of_samples_will_do(protocol: str, samples: int, learners: int, size: int, tmp_path: Path) -> None:
    data = {"train_limit": samples}
    training, cluster = {"minibatch_size": size, "epochs": 3}, {"learners": learners, "threads_per_rank": 1}
    made = job("regression", data=data, training=training, cluster=cluster, protocol={"name": protocol})
    made = made.with_(optimizer={"learning_rate": 0.01}, data={"train_limit": min(samples, 200)})
    with rudra.simulate(made, output=tmp_path / "run.h5", progress="quiet") as results:
        summary, gradients = results.summary(), results.gradients
    assert (summary["status"], summary["epochs"]) == ("finished", 3)
    assert (gradients["samples"] == size).all(), "a walk goes on with the next pass where the last one ends"
    assert summary["samples"] >= 3 * min(samples, 200)


def test_changed_images_are_the_same_in_a_replay(tmp_path: Path) -> None:
    about: dict[str, Any] = {
        "model": {"name": "lenet", "options": {"channels": [4, 8], "hidden": 16}},
        "data": {"name": "digits", "train_limit": 200, "validation_split": 0.25},
        "augment": {"crop": 1, "flip": True},
        "training": {"epochs": 2, "minibatch_size": 10},
        "protocol": {"name": "async"},
        "cluster": {"learners": 3, "threads_per_rank": 1},
    }
    with rudra.simulate(rudra.Job(**about), output=tmp_path / "run.h5", progress="quiet") as results:
        changed, epochs = results.weights, results.epochs
        assert results.attributes["training_samples"] == 150
    assert np.isfinite(epochs["validation_error"]).all()
    assert not np.array_equal(epochs["validation_loss"], epochs["test_loss"])
    assert rudra.replay(tmp_path / "run.h5").difference is None
    with rudra.simulate(rudra.Job(**about | {"augment": {}}), output=tmp_path / "b.h5", progress="quiet") as results:
        assert not np.array_equal(results.weights, changed)


@pytest.mark.parametrize(("policy", "ends"), [("stop", True), ("warn", False)])
def test_a_sample_that_is_not_finite_is_named_and_no_learning_rate_blamed(
    policy: str, ends: bool, tmp_path: Path
) -> None:
    points = POINTS.clone()
    points[123, 1] = torch.nan
    broken = {"name": pair(points, NUMBERS)}
    made = job(
        "regression",
        data=broken,
        fault_tolerance={"non_finite_loss": policy},
        training={"epochs": 2, "evaluate": False},
    )
    if ends:
        with pytest.raises(RudraError, match=r"\[data\] training sample 123 has a value that is not finite"):
            rudra.simulate(made, output=tmp_path / "run.h5", progress="quiet")
    else:
        rudra.simulate(made, output=tmp_path / "run.h5", progress="quiet").close()
