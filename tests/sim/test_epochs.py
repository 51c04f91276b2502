"""What an epoch says of its gradients, also where it has none because one update ended several epochs."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clusters import check_epochs, train

import rudra
from rudra.cli.main import main
from rudra.errors import ConfigError
from rudra.job.job import Job

LEARNERS, EPOCHS = 8, 6
BASE: dict[str, Any] = {"name": "base"}
TOPOLOGIES: list[dict[str, Any]] = [
    BASE,
    {"name": "adv", "options": {"fan_out": 3}},
    {"name": "groups", "options": {"groups": 1}},
    {"name": "groups", "options": {"groups": 4}},
]


def job(samples: int, **tables: Any) -> Job:
    return Job(
        model={"name": "mlp", "options": {"hidden": [8]}},
        data={"train_limit": samples},
        training={"epochs": EPOCHS, "minibatch_size": 16, "seed": 1, **tables.pop("training", {})},
        cluster={"learners": LEARNERS, "threads_per_rank": 1},
        **tables,
    )


@pytest.mark.each_value
@pytest.mark.parametrize("samples", [50, 128, 200, 700], ids=lambda samples: f"{samples / 128:.1f} updates an epoch")
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_means_are_over_the_gradients_of_the_epoch(topology: dict[str, Any], samples: int) -> None:
    """An update is made of 128 samples, and 128 of 50 end two or three epochs."""
    rows = train(job(samples, topology=topology)).rows
    check_epochs(rows)
    empty = np.isnan(rows["epochs"]["train_loss"])
    assert empty.any() == (samples < 128)
    assert not empty[0]
    assert (rows["epochs"]["mean_staleness"][~empty] >= 0).all()


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three updates and six epochs; the mini-batches are not in it, so that watchers look at epochs."""
    path = tmp_path_factory.mktemp("crowded") / "run.h5"
    with rudra.simulate(job(50, results={"minibatches": False}), output=path, progress="quiet") as results:
        assert len(results.updates) == 3
    return path


EMPTY = [False, True, False, True, True, False]
"""Epochs 2, 4 and 5 were ended by an update that ended one before, too."""


def test_in_the_file_they_are_nan(crowded: Path) -> None:
    with rudra.open_results(crowded) as results:
        for name in ("mean_staleness", "train_loss", "train_error"):
            assert np.isnan(results.epochs[name]).tolist() == EMPTY
        assert np.isfinite(results.epochs["learning_rate"]).all()


def test_for_json_they_are_null(crowded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(crowded), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    for name in ("epoch_mean_staleness", "train_loss", "train_error"):
        assert [value is None for value in shown[name]] == EMPTY


def test_for_people_they_are_a_dash(crowded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(crowded)]) == 0
    text = capsys.readouterr().out
    lines = text[text.index("  epoch  ") :].splitlines()[1 : 1 + EPOCHS]
    assert [line.count("–") for line in lines] == [5 * empty for empty in EMPTY]
    assert "nan" not in text


@pytest.mark.parametrize(
    ("size", "learners", "said"),
    [(16, 4, "an update is made of 64 samples, 4 mini-batches, and an epoch has 50"), (12, 4, None)],
)
def test_updates_that_are_larger_than_epochs_are_told_at_the_start(
    size: int, learners: int, said: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = rudra.Job.load(
        "digits",
        [
            "data.train_limit=50",
            "training.epochs=2",
            "protocol.name=hardsync",
            f"training.minibatch_size={size}",
            f"cluster.learners={learners}",
        ],
    )
    rudra.simulate(made, output=tmp_path / "run.h5", progress="lines").close()
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("rudra: ")]
    assert [line.removeprefix("rudra: digits: ").partition(":")[0] for line in told] == ([] if said is None else [said])


def test_a_minibatch_larger_than_the_training_set_is_refused(tmp_path: Path) -> None:
    made = rudra.Job.load("digits", ["data.train_limit=50", "training.minibatch_size=51"])
    with pytest.raises(ConfigError, match=r"minibatch_size = 51 \(μ\) exceeds the training set; use 1 to 50"):
        rudra.simulate(made, output=tmp_path / "run.h5")
    assert list(tmp_path.iterdir()) == []


def test_lines_while_it_runs_have_a_dash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rudra.simulate(job(50), output=tmp_path / "run.h5", progress="lines").close()
    head, *rest = capsys.readouterr().err.splitlines()
    lines = [line for line in rest if not line.startswith("rudra: ")]
    assert "staleness" not in head
    assert ["staleness –, " in line for line in lines] == EMPTY
    assert not any("nan" in line for line in rest)


@pytest.mark.parametrize(
    ("command", "written"),
    [
        (["watch", "--once"], ""),
        (["plot", "--output"], "out.svg"),
        (["report", "-o"], "out.html"),
        (["timeline", "-o"], "out.json"),
        (["show", "--target", "error <= 1"], ""),
        (["replay"], ""),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_nothing_that_reads_epochs_says_nan(
    command: list[str], written: str, crowded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *options = command
    given = [str(tmp_path / written)] if written else []
    assert main([name, str(crowded), *options, *given]) == 0
    text = capsys.readouterr().out + ((tmp_path / written).read_text(encoding="utf-8") if written else "")
    assert not any(word in text.replace(">", " ").replace("<", " ").split() for word in ("nan", "NaN", "nan,", "nan%"))
    if name == "watch":
        assert "training loss: 2." in text


def test_tests_that_there_were_count_for_the_target(crowded: Path) -> None:
    """Three of six epochs were tested, and five are wanted; of an epoch without test there is no word."""
    with rudra.open_results(crowded) as results:
        tested = [error is not None for error in results.summary()["test_error"]]
        assert tested == [not empty for empty in EMPTY]
        assert results.summary(target="error <= 1")["target_epoch"] is None


def test_a_sweep_weighs_the_epochs_that_have_gradients(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["training.epochs=6", "training.minibatch_size=16", "data.train_limit=50", "training.evaluate=false"]
    given = [word for text in words for word in ("--set", text)]
    arguments = ["sweep", "digits", "--learners", "8", *given, "--grid", "training.seed=1", "--workers", "1"]
    assert main([*arguments, "--output", str(tmp_path / "sweep")]) == 0
    (file,) = (tmp_path / "sweep").glob("*.h5")
    with rudra.open_results(file) as results:
        mean = results.gradients["staleness"].mean()
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  seed 1")]
    assert not math.isnan(mean)
    assert line.split()[2:5] == ["–", f"{mean:.2f}", line.split()[4]]
