"""Hooks in virtual time: when they are called, and that what they see is what the result file has."""

import csv
import hashlib
import signal
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import rudra
from rudra.errors import ConfigError, HookError
from rudra.results import logging_hooks

ANY = torch.Generator().manual_seed(3)
INPUTS = torch.randn(96, 6, generator=ANY)
LABELS = (INPUTS @ torch.randn(6, 3, generator=ANY)).argmax(1)
DATA = (TensorDataset(INPUTS[:80], LABELS[:80]), TensorDataset(INPUTS[80:], LABELS[80:]))


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3))


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def share_of_first(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.argmax(1) == 0).float().mean()


class Seen(NamedTuple):
    moment: rudra.Moment
    floats: npt.NDArray[np.float32]


class Notebook:
    """A hook that keeps what it sees, with a copy of the weights, and makes a mess of the generators."""

    def __init__(self) -> None:
        self.seen: defaultdict[tuple[str, str], list[Seen]] = defaultdict(list)

    def __call__(self, moment: rudra.Moment) -> None:
        torch.manual_seed(len(self.seen))
        np.random.seed(1)
        weights = [array.ravel() for array in moment.weights().values()]
        self.seen[moment.at, moment.role].append(Seen(moment, np.concatenate(weights or [np.zeros(0, np.float32)])))

    def of(self, at: str, role: str) -> list[rudra.Moment]:
        return [seen.moment for seen in self.seen[at, role]]


def digest(floats: npt.NDArray[np.float32]) -> str:
    return hashlib.sha256(floats.tobytes()).hexdigest()


def job(*hooks: dict[str, Any], model: Any = network, **tables: Any) -> rudra.Job:
    about = {
        "model": {"name": model},
        "data": {"name": DATA, "classes": 3},
        "task": {"metrics": [share_of_first]},
        "training": {"epochs": 3, "minibatch_size": 4, "seed": 5},
        "optimizer": {"learning_rate": 0.1, "momentum": 0.9, "milestones": [1]},
        "protocol": {"name": "async"},
        "cluster": {"learners": 4, "threads_per_rank": 1, "device": "cpu"},
    }
    merged = {name: {**about.get(name, {}), **tables.get(name, {})} for name in about | tables}
    return rudra.Job(name="hooked", hooks=hooks, **merged)


def every_moment(hook: Any, *roles: str) -> list[dict[str, Any]]:
    """Updates of these roles (and the default one), epochs, and the end of all of them."""
    updates = [{"at": "update", "call": hook, "role": role} for role in roles]
    ends = [{"at": "end", "call": hook, "role": role} for role in (None, *roles)]
    return [{"at": "update", "call": hook}, {"at": "epoch", "call": hook}, *updates, *ends]


SERVER = "parameter server"
HARDSYNC = {"name": "hardsync"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "async": (SERVER, {}),
    "hardsync": (SERVER, {"protocol": HARDSYNC}),
    "adv": (SERVER, {"topology": {"name": "adv", "options": {"fan_out": 2}}, "protocol": {"name": "softsync"}}),
    "adv*": (SERVER, {"topology": {"name": "adv*", "options": {"fan_out": 2}}}),
    "groups": (SERVER, {"topology": {"name": "groups", "options": {"groups": 2}}}),
    "one group": ("learner 0", {"topology": {"name": "groups", "options": {"groups": 1}}, "protocol": HARDSYNC}),
    "vmap": (SERVER, {"simulation": {"batching": "vmap"}}),
    "big-batch": (SERVER, {"simulation": {"batching": "big-batch"}, "protocol": HARDSYNC}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_hooks_see_what_the_file_has_and_change_no_bit(case: str, tmp_path: Path) -> None:
    owner, tables = CASES[case]
    notes = Notebook()
    made = job(*every_moment(notes, "learner 2"), model=plain if "batch" in str(tables) else network, **tables)
    with rudra.simulate(made.with_(hooks=()), output=tmp_path / "bare.h5", progress="quiet") as bare:
        expected = bare.summary()["weights_sha256"]
    with rudra.simulate(made, output=tmp_path / "run.h5", progress="quiet") as results:
        assert results.summary()["weights_sha256"] == expected is not None
        check_owner(notes, results, owner)
        check_learner(notes, results, owner)
        check_statistics(notes, results)
        assert {role: len(notes.of("end", role)) for role in ("statistics server", "learner 2")} == {
            "statistics server": 1,
            "learner 2": 1,
        }
    assert set(notes.seen) == {
        ("update", owner),
        ("update", "learner 2"),
        ("epoch", "statistics server"),
        ("end", "statistics server"),
        ("end", "learner 2"),
    }
    if "batch" not in str(tables):
        calls = sum(map(len, notes.seen.values()))
        assert rudra.replay(tmp_path / "run.h5", job=made, quiet=True).identical
        assert sum(map(len, notes.seen.values())) == calls, "a replay calls no hooks"


def versions(notes: Notebook, results: rudra.Results, owner: str) -> dict[int | None, str]:
    """Timestamp -> SHA-256 of the weights, as their owner's hook saw them."""
    seen = {seen.moment.timestamp: digest(seen.floats) for seen in notes.seen["update", owner]}
    return {0: results.attributes["initial_weights_sha256"], **seen}


def check_owner(notes: Notebook, results: rudra.Results, owner: str) -> None:
    assert len(results.updates) >= 15
    for moment, row in zip(notes.of("update", owner), results.updates, strict=True):
        for name in ("timestamp", "epoch", "samples", "learning_rate", "time_s"):
            assert getattr(moment, name) == row[name], name
        assert (moment.row, moment.metrics, moment.job) == ({}, {}, "hooked")
    assert versions(notes, results, owner)[len(results.updates)] == digest(results.weights)


def check_learner(notes: Notebook, results: rudra.Results, owner: str) -> None:
    """Those of a server see the weights that they computed from, those of one group what they have made of them."""
    rows = results.minibatches[results.minibatches["learner"] == 2]
    replicas, known = owner != SERVER, versions(notes, results, owner)
    assert len(rows) >= 15
    for (moment, floats), row in zip(notes.seen["update", "learner 2"], rows, strict=True):
        assert (moment.step, moment.loss, moment.errors) == (row["step"], row["loss"], row["errors"])
        assert moment.timestamp == row["timestamp"] + replicas
        assert known[moment.timestamp] == digest(floats)
        assert (moment.learning_rate is None) is not replicas
        assert moment.samples == 4 * (4 if replicas else 1)
        if not replicas:
            assert moment.time_s == pytest.approx(row["time_s"] - row["compute_s"], abs=1e-6)


def check_statistics(notes: Notebook, results: rudra.Results) -> None:
    metrics = results.summary()["metrics"]["test"]["share_of_first"]
    for (moment, floats), row, metric in zip(
        notes.seen["epoch", "statistics server"], results.epochs, metrics, strict=True
    ):
        assert list(moment.row) == list(row.dtype.names)
        for name, value in moment.row.items():
            then = row[name].decode() if name == "weights_sha256" else row[name]
            assert value == then or np.isnan(value), name
        assert row["weights_sha256"].decode() == digest(floats)
        assert (moment.epoch, moment.timestamp, moment.time_s) == row[["epoch", "timestamp", "time_s"]].item()
        assert moment.metrics["test"]["share_of_first"] == metric
    ((moment, floats),) = notes.seen["end", "statistics server"]
    assert moment.row == dict(zip(results.totals.dtype.names, results.totals[0].item(), strict=True))
    assert (moment.epoch, moment.timestamp) == (3, len(results.updates))
    assert digest(floats) == results.summary()["weights_sha256"]


def test_every_nth_is_counted_by_updates_epochs_and_mini_batches(tmp_path: Path) -> None:
    notes = Notebook()
    hooks = [
        {"at": "update", "call": notes, "every": 7},
        {"at": "update", "role": "learner 1", "call": notes, "every": 5},
        {"at": "epoch", "call": notes, "every": 2},
    ]
    with rudra.simulate(job(*hooks), output=tmp_path / "run.h5", progress="quiet") as results:
        updates, steps = len(results.updates), (results.minibatches["learner"] == 1).sum()
    assert [m.timestamp for m in notes.of("update", SERVER)] == list(range(7, updates + 1, 7))
    assert [m.step for m in notes.of("update", "learner 1")] == list(range(4, steps, 5))
    assert [m.epoch for m in notes.of("epoch", "statistics server")] == [2]


def test_an_epoch_that_is_not_tested_has_a_row_and_no_weights(tmp_path: Path) -> None:
    """Tests take so long that the statistics server skips epochs."""
    notes = Notebook()
    slow = {"evaluation_s": 30.0}
    made = job({"at": "epoch", "call": notes}, training={"epochs": 12}, simulation=slow)
    with rudra.simulate(made, output=tmp_path / "run.h5", progress="quiet") as results:
        tested = results.epochs["evaluated"].astype(bool).tolist()
    assert [m.row["evaluated"] for m in notes.of("epoch", "statistics server")] == tested
    assert [bool(len(seen.floats)) for seen in notes.seen["epoch", "statistics server"]] == tested
    assert [bool(m.metrics) for m in notes.of("epoch", "statistics server")] == tested
    assert 2 <= sum(tested) < 12


def test_who_dies_has_no_end_and_a_run_that_a_loss_stops_has_one(tmp_path: Path) -> None:
    notes = Notebook()
    hooks = [{"at": "end", "call": notes, "role": role} for role in (None, "learners", SERVER)]
    lost = {"faults": [{"learner": 1, "dies_at_s": 0.5}]}
    made = job(*hooks, simulation=lost, fault_tolerance={"on_learner_loss": "stop"})
    with rudra.simulate(made, output=tmp_path / "run.h5", progress="quiet") as results:
        assert results.status == "interrupted"
        stopped = int(results.totals["timestamp"][0])
    assert {role for _, role in notes.seen} == {"statistics server", SERVER, *(f"learner {i}" for i in (0, 2, 3))}
    ((moment, floats),) = notes.seen["end", "statistics server"]
    assert (moment.timestamp, moment.row["timestamp"], len(floats)) == (stopped, stopped, 0), "no final weights"
    assert len(notes.seen["end", SERVER][0].floats)


LEARNER_1 = {"at": "update", "role": "learner 1"}


def quits(moment: rudra.Moment, error: BaseException, at: int) -> None:
    """The user's own bug."""
    if (moment.epoch if moment.at == "epoch" else moment.timestamp) == at or moment.at == "end":
        raise error


@pytest.mark.parametrize(
    ("hook", "error", "said", "kept"),
    [
        ({"at": "epoch"}, ValueError("a\nb"), "statistics server (rank 1): {} epoch 2: ValueError: a\\nb", 2),
        ({"at": "update"}, SystemExit(0), "parameter server (rank 0): {} update 2: SystemExit: 0", 0),
        (LEARNER_1, KeyboardInterrupt(), "learner 1 (rank 3): {} mini-batch 1: KeyboardInterrupt", 0),
        ({"at": "end"}, HookError("nested"), "statistics server (rank 1): {} the end: HookError: nested", 3),
    ],
)
def test_what_a_hook_raises_ends_the_run_as_the_users(
    hook: dict[str, Any], error: BaseException, said: str, kept: int, tmp_path: Path
) -> None:
    made = job({**hook, "call": quits, "options": {"error": error, "at": 2}})
    with pytest.raises(HookError) as raised:
        rudra.simulate(made, output=tmp_path / "run.h5", progress="quiet")
    line = said.format("hook quits, which is the user's own code, failed at")
    assert str(raised.value) == line
    assert raised.value.__cause__ is error
    assert raised.value.exit_code == 1
    first, *rest = raised.value.report.splitlines()
    assert first == f"rudra: {line}"
    assert rest[0] == "Traceback (most recent call last):"
    assert "in quits" in rest[1], "the traceback begins in the user's code"
    with rudra.open_results(tmp_path / "run.h5") as results:
        assert len(results.epochs) == kept
        expected = ("finished", "") if hook["at"] == "end" else ("failed", line)
        assert (results.status, results.state["reason"]) == expected


def test_a_hook_of_rudras_own_that_cannot_write_is_one_line(tmp_path: Path) -> None:
    """And makes the directories that it writes into."""
    made = job({"at": "epoch", "call": "csv", "options": {"file": str(tmp_path / "new" / "place" / "{at}.csv")}})
    rudra.simulate(made, output=tmp_path / "run.h5", progress="quiet").close()
    assert len(lines_of(tmp_path / "new" / "place" / "epoch.csv")) == 3
    (tmp_path / "file").write_text("")
    made = job({"at": "epoch", "call": "csv", "options": {"file": str(tmp_path / "file" / "{at}.csv")}})
    with pytest.raises(HookError) as raised:
        rudra.simulate(made, output=tmp_path / "run.h5", force=True, progress="quiet")
    assert raised.value.report == (
        f"rudra: statistics server (rank 1): hook csv failed at epoch 1: ResultsError: {tmp_path}/file/epoch.csv: "
        "cannot write: Not a directory"
    )


def test_ctrl_c_in_a_hook_is_no_fault_of_the_hook(tmp_path: Path) -> None:
    def slow(moment: rudra.Moment) -> None:
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        rudra.simulate(job({"at": "epoch", "call": slow}), output=tmp_path / "run.h5", progress="quiet")
    with rudra.open_results(tmp_path / "run.h5") as results:
        assert (results.status, results.state["reason"]) == ("interrupted", "stopped on request")


def test_without_tensors_there_is_nothing_to_be_called_at(tmp_path: Path) -> None:
    made = job({"at": "epoch", "call": print}, simulation={"tensors": False})
    with pytest.raises(ConfigError, match=r"^\[hooks\]: \[simulation\] tensors = false trains nothing"):
        rudra.simulate(made, output=tmp_path / "run.h5", progress="quiet")


def lines_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_csv_hook_writes_what_the_result_file_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name = "csv"
    made = job(
        {"at": "epoch", "call": name},
        {"at": "update", "call": name, "options": {"file": "updates.csv"}, "every": 3},
        {"at": "update", "call": name, "role": "learner 2"},
        {"at": "end", "call": name},
    )
    for again in range(2):  # the second run in the same place begins anew
        with rudra.simulate(made, output=f"run{again}.h5", progress="quiet") as results:
            epochs, updates, totals = results.epochs, results.updates, results.totals
            minibatches = results.minibatches[results.minibatches["learner"] == 2]
            metrics = results.metrics
    rows = lines_of(Path("hooked-statistics-server-epoch.csv"))
    assert [int(row["epoch"]) for row in rows] == [1, 2, 3]
    for column in ("time_s", "test_loss", "test_error", "train_error", "learning_rate"):
        assert [float(row[column]) for row in rows] == epochs[column].tolist()
    assert [float(row["test_share_of_first"]) for row in rows] == metrics["value"].tolist()
    assert [row["weights_sha256"] for row in rows] == [digest.decode() for digest in epochs["weights_sha256"]]
    rows = lines_of(Path("updates.csv"))
    assert [int(row["timestamp"]) for row in rows] == updates["timestamp"][2::3].tolist()
    assert [float(row["learning_rate"]) for row in rows] == updates["learning_rate"][2::3].tolist()
    rows = lines_of(Path("hooked-learner-2-update.csv"))
    steps = [int(row["step"]) for row in rows]
    assert steps == list(range(len(steps)))
    assert [float(row["loss"]) for row in rows[: len(minibatches)]] == minibatches["loss"].tolist()
    (end,) = lines_of(Path("hooked-statistics-server-end.csv"))
    assert int(end["pushed"]) == totals["pushed"][0]


def test_the_csv_hook_goes_on_with_its_file(tmp_path: Path) -> None:
    """After a resume: later lines and one that was cut give way, others stay; new columns find room."""
    path = tmp_path / "a.csv"
    path.write_text("epoch,old\n1,x\n2,y\n3,z\n4")
    for number in (3, 4):
        metrics = {"test": {"a, b": 0.5}} if number == 4 else {}
        logging_hooks.csv(
            rudra.Moment("epoch", "r", 0, "j", epoch=number, row={"loss": 0.25}, metrics=metrics), str(path)
        )
    assert lines_of(path) == [
        {"epoch": "1", "old": "x", "loss": "", "test_a, b": ""},
        {"epoch": "2", "old": "y", "loss": "", "test_a, b": ""},
        {"epoch": "3", "old": "", "loss": "0.25", "test_a, b": ""},
        {"epoch": "4", "old": "", "loss": "0.25", "test_a, b": "0.5"},
    ]


def test_the_tensorboard_hook_writes_what_the_result_file_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.chdir(tmp_path)
    name = "tensorboard"
    made = job(
        {"at": "epoch", "call": name},
        {"at": "update", "call": name, "options": {"directory": "logs/{output}"}, "every": 5},
    )
    for again in range(2):
        with rudra.simulate(made, output=f"run{again}.h5", progress="quiet") as results:
            epochs, updates = results.epochs, results.updates

    def scalars(directory: str, tag: str) -> tuple[list[int], list[float]]:
        read = EventAccumulator(directory)
        read.Reload()
        return tuple(map(list, zip(*((event.step, event.value) for event in read.Scalars(tag)), strict=True)))  # type: ignore[return-value]

    steps, errors = scalars("tensorboard/hooked-statistics-server/epoch", "epoch/test_error")
    assert steps == [1, 2, 3]
    assert errors == pytest.approx(epochs["test_error"].tolist())
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["run0", "run1"]
    steps, rates = scalars("logs/run1/update", "update/learning_rate")
    assert steps == updates["timestamp"][4::5].tolist()
    assert rates == pytest.approx(updates["learning_rate"][4::5].tolist())


def test_a_hook_whose_library_is_missing_is_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rudra.core.hooks.find_spec", lambda name: None)
    said = r"^\[hooks\] 0.call: tensorboard needs tensorboard: pip install 'rudra\[tensorboard\]'$"
    with pytest.raises(ConfigError, match=said):
        rudra.simulate(job({"at": "epoch", "call": "tensorboard"}), output=tmp_path / "run.h5")
    assert not (tmp_path / "run.h5").exists()
