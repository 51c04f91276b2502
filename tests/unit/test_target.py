"""When a target counts as reached."""

import math
from typing import Any

import pytest

from rudra.errors import ConfigError
from rudra.job.job import Job
from rudra.job.target import Best, Target, Watch


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("accuracy >= 0.98", Target("test", "accuracy", True, 0.98)),
        ("test error<=2e-2", Target("test", "error", False, 0.02)),
        ("validation  perplexity <= 6", Target("validation", "perplexity", False, 6.0)),
        ("precision@3 >= .5", Target("test", "precision@3", True, 0.5)),
        ("Validation Accuracy >= 1", Target("validation", "Accuracy", True, 1.0)),
        ("f1@9 >= 95", Target("test", "f1@9", True, 95.0)),  # somebody's own may be anything
    ],
)
def test_targets_are_read(text: str, expected: Target) -> None:
    assert Target.parse(text) == expected


@pytest.mark.parametrize(
    "text", ["", "0.98", "accuracy", "accuracy > 0.98", "accuracy >= much", "a b c >= 1", "a >= nan"]
)
def test_what_is_no_target_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is no target; use the form 'accuracy >= 0"):
        Target.parse(text)


@pytest.mark.parametrize(
    ("text", "hint"),
    [("accuracy >= 95", "; 95 % is 0.95"), ("Error <= -0.1", ""), ("validation top5_error <= 2", "; 2 % is 0.02")],
)
def test_a_share_that_cannot_be_is_refused(text: str, hint: str) -> None:
    with pytest.raises(ConfigError) as error:
        Target.parse(text)
    assert str(error.value).startswith(f"'{text}' is out of range: ")
    assert str(error.value).endswith(f" is a fraction of the samples; use 0 to 1{hint}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("accuracy >= 0.9", None),
        ("ACCURACY >= 0.9", None),
        ("F1 >= 3", None),
        ("acuracy >= 0.9", "no evaluation measures 'acuracy'; use loss, error, f1, accuracy; did you mean accuracy?"),
        ("perplexity <= 6", "no evaluation measures 'perplexity'; use loss, error, f1, accuracy"),
        ("validation loss <= 6", "there is no validation set; use test"),
    ],
)
def test_what_no_test_tells_is_refused(text: str, message: str | None) -> None:
    target = Target.parse(text)
    if message is None:
        target.check(["loss", "error", "f1"], ["test"])
    else:
        with pytest.raises(ConfigError) as error:
            target.check(["loss", "error", "f1"], ["test"])
        assert str(error.value) == f"target: {message}"


def test_case_does_not_matter() -> None:
    assert Target.parse("ACCURACY >= 0.9").of({"error": 0.25}) == 0.75
    assert Target.parse("mymetric >= 0.9").of({"MyMetric": 2.0}) == 2.0


@pytest.mark.parametrize(("window", "epoch"), [(1, 1), (2, 4), (3, 3), (5, None)])
def test_a_window_says_how_many_tests_count(window: int, epoch: int | None) -> None:
    watch = Watch(Target.parse("error <= 0.2"), window)
    reached = [place for place, error in enumerate([0.1, 0.9, 0.1, 0.2], 1) if watch.reached(error)]
    assert (reached[0] if reached else None) == epoch


@pytest.mark.parametrize(
    ("errors", "epoch"),
    [
        ([0.1, 0.1, 0.1, 0.1, 0.1], 5),
        ([0.9, 0.9, 0.1, 0.1, 0.1], 5),  # the median of the last five
        ([0.9, 0.9, 0.9, 0.1, 0.1, 0.9, 0.1], 7),
        ([0.1, 0.1, 0.1, 0.1], None),  # five there must be
        ([0.1, None, 0.1, math.nan, 0.1, 0.1, 0.1], 7),  # what was not tested does not count
        ([0.3] * 9, None),
    ],
)
def test_the_median_of_five_tests_decides(errors: list[float | None], epoch: int | None) -> None:
    for text in ("accuracy >= 0.8", "error <= 0.2"):
        watch = Watch(Target.parse(text))
        scores: list[dict[str, Any]] = [{"error": error} for error in errors]
        reached = [place for place, score in enumerate(scores, 1) if watch.reached(watch.target.of(score))]
        assert (reached[0] if reached else None) == epoch


@pytest.mark.parametrize("samples", [10, 100, 1000])
@pytest.mark.parametrize("window", [1, 2, 5])
def test_a_share_that_equals_the_target_reaches_it(samples: int, window: int) -> None:
    """However `1 - error`, a mean over batches and a median of two are rounded; one more wrong sample does not."""
    for wrong in range(samples):
        errors = [wrong / samples, 49 * (wrong / 49) / samples]
        for text in (f"error <= {wrong / samples}", f"accuracy >= {(samples - wrong) / samples}"):
            watch = Watch(Target.parse(text), window)
            found = [watch.reached(watch.target.of({"error": errors[test % 2]})) for test in range(window)]
            assert found[-1], text
            missed = Watch(watch.target, window)
            assert not any(missed.reached(watch.target.of({"error": (wrong + 1) / samples})) for _ in range(window))


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({"target": "good"}, r"\[training\] target 'good' is no target; use the form"),
        ({"stop_at_target": True}, r"\[training\] stop_at_target = true needs a target; set target"),
    ],
)
def test_a_stop_needs_a_target(training: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Job(training=training)


@pytest.mark.parametrize(
    ("target", "tests", "better"),
    [
        (
            None,
            [{"error": 0.5, "loss": 1}, {"error": 0.5, "loss": 0.1}, {"error": 0.4, "loss": 9}],
            [True, False, True],
        ),
        (None, [{"error": math.nan, "loss": 2.0}, {"error": None, "loss": 1.0}, {"loss": 1.5}], [True, True, False]),
        (
            None,
            [{"loss": math.nan}, {"loss": math.inf}, {"loss": 3.0}, {"loss": math.nan}],
            [False, False, True, False],
        ),
        ("accuracy >= 0.9", [{"error": 0.5}, {"error": 0.6}, {"error": 0.4}], [True, False, True]),
        ("perplexity <= 3", [{"perplexity": 9.0, "loss": 1}, {"loss": 0.1}, {"perplexity": 8.0}], [True, False, True]),
        ("precision@1 >= 0", [{"precision@1": 0.2}, {"precision@1": 0.3}, {"precision@1": 0.3}], [True, True, False]),
    ],
)
def test_which_tests_are_the_best_so_far(target: str | None, tests: list[Any], better: list[bool]) -> None:
    best, since = Best(target), 0
    for scores, expected in zip(tests, better, strict=True):
        assert best.improved(scores) == expected
        since = 0 if expected else since + 1
        assert best.since == since
