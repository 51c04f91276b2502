"""What the statistics server records reaches the file and the screen."""

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from results_files import LAYOUT, SIZE, WEIGHTS, rows, sha256

from protocols import Protocol
from rudra.core import records
from rudra.core.actions import Finish, Record
from rudra.job.job import Job
from rudra.results.progress import Progress
from rudra.results.reader import open_results
from rudra.results.recorder import VERSIONED, Recorder, arithmetic, attributes, make_writer
from topologies import Plan, base


class Mine(Protocol):
    """A user's own."""


class Racing(Protocol):
    """A user's own, in which learners write over each other's weights."""

    replayable = False


class Unordered:
    """A topology whose sums the MPI library forms."""

    @staticmethod
    def plan(nodes: Sequence[int]) -> Plan:
        return replace(base.plan(nodes), replayable=False)


def test_a_run_as_recorded_is_a_run_as_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = Job(name="demo", training={"epochs": 1}, protocol={"n": 2}).resolved(learners=4, threads_per_rank=1)
    path = tmp_path / "run.h5"
    shown = io.StringIO()
    about = {"driver": "simulation", "training_samples": 32, "classes": 10, "hosts": ["here"]}
    with make_writer(path, job, LAYOUT, SIZE, "abc", False, **about) as writer:
        progress = Progress(job, 32, mode="lines", file=shown)
        asked = []

        def weights(role: int, buffer: str) -> np.ndarray:
            asked.append((role, buffer))
            return WEIGHTS

        recorder = Recorder(writer, progress, weights)
        recorder.warn("learner 3", "beware")
        recorder.record(Record("updates", rows(records.UPDATE, timestamp=1, gradients=2, samples=32)))
        recorder.record(Record("gradients", rows(records.GRADIENT, 2, learner=[2, 1], update=1)))
        recorder.record(Record("minibatches", rows(records.MINIBATCH, 2, learner=[2, 1])))
        recorder.record(Record("epochs", rows(records.EPOCH, epoch=1, evaluated=1, test_error=0.25)))
        recorder.idle()
        totals = rows(records.TOTALS, timestamp=1, samples=32, pushed=2, applied=2, time_s=2.0)
        learners = rows(records.LEARNER, 4, learner=range(4), pushed=[0, 1, 1, 0])
        recorder.finish(1, Finish(totals, learners, "snapshot 1"))
    assert asked == [(1, "snapshot 1")]
    assert capsys.readouterr().err == "rudra: learner 3: beware\n"
    assert "25.0" in shown.getvalue()
    with open_results(path) as results:
        summary = results.summary()
        assert np.array_equal(results.weights, WEIGHTS)
        assert list(results.gradients["learner"]) == list(results.minibatches["learner"]) == [2, 1]
    assert summary["weights_sha256"] == sha256(WEIGHTS)
    assert (summary["status"], summary["updates"], summary["pushed"]) == ("finished", 1, 2)
    assert (summary["protocol"], summary["n"], summary["final_test_error"]) == ("softsync", 2, 0.25)


def test_attributes_describe_the_job_as_resolved() -> None:
    job = Job(protocol={"name": Mine}, cluster={"learners": 3, "threads_per_rank": 2}).resolved()
    found = attributes(job, plan=job.plan(), driver="mpi", training_samples=9, classes=5, hosts=["a", "b"])
    assert found["protocol"] == f"{__name__}:Mine"
    assert json.loads(found["job"])["cluster"] == json.loads(job.to_json())["cluster"]
    expected = {"driver": "mpi", "training_samples": 9, "classes": 5, "hosts": ["a", "b"], "topology": "base"}
    expected |= {"learners": 3, "n": 3, "gradients_per_update": 1, "threads_per_rank": 2, "seed": 0}
    assert found.items() >= expected.items()
    assert all(found[f"{name}_version"] for name in VERSIONED)


def described(driver: str = "mpi", **tables: Any) -> dict[str, Any]:
    cluster = {"learners": 3, "threads_per_rank": 1, "device": "cpu", **tables.pop("cluster", {})}
    job = Job(cluster=cluster, **tables).resolved()
    return attributes(job, plan=job.plan(), driver=driver, training_samples=9, classes=5)


@pytest.mark.parametrize(
    ("tables", "reason"),
    [
        ({}, ""),
        ({"protocol": {"name": Mine}}, ""),
        ({"protocol": {"name": Racing}}, f"protocol {__name__}:Racing declares that it is not replayable"),
        ({"topology": {"name": Unordered}}, f"topology {__name__}:Unordered declares that it is not replayable"),
        ({"cluster": {"device": "cuda"}}, "device cuda, whose kernels may add in another order each time"),
        ({"simulation": {"batching": "vmap"}}, ""),
        ({"simulation": {"batching": "vmap"}, "driver": "simulation"}, "gradients were batched together"),
        ({"simulation": {"tensors": False}, "driver": "simulation"}, "the simulation had no tensors"),
    ],
)
def test_the_file_says_whether_the_run_can_be_repeated(tables: dict[str, Any], reason: str) -> None:
    found = described(**tables)
    assert found["replayable"] is (reason == "")
    assert reason in found["not_replayable"]
    assert bool(reason) == bool(found["not_replayable"])


def module_data() -> None:
    """Can be found by its name."""


@pytest.mark.parametrize(
    ("tables", "expected"),
    [
        ({}, ""),
        ({"data": {"name": module_data}, "model": {"name": "package.module:network"}}, ""),
        ({"data": {"name": ([1], [2])}}, "data.name"),
        ({"data": {"name": partial(module_data)}}, "data.name"),
        (
            {"model": {"name": lambda: None, "options": {"layers": [1, 2], "act": object()}}},
            "model.name, model.options",
        ),
        ({"protocol": {"name": Mine}, "data": {"options": {"path": Path()}}}, "data.options"),
        ({"optimizer": {"schedule": module_data}}, ""),
        (
            {"optimizer": {"schedule": lambda optimizer: None, "schedule_options": {"lr_lambda": len}}},
            "optimizer.schedule, optimizer.schedule_options",
        ),
    ],
)
def test_python_objects_that_have_no_name_are_listed(tables: dict[str, Any], expected: str) -> None:
    assert described(**tables)["python_objects"] == expected


def test_the_file_says_what_may_decide_the_last_bit() -> None:
    found = described()
    assert arithmetic().items() <= found.items()
    assert set(arithmetic()) == {"rudra_version", "torch_version", "numpy_version", "processor", "cpu_capability"}
    assert all(arithmetic().values())
    assert found["device"] == "cpu"


def test_a_run_without_tensors_has_no_final_weights(tmp_path: Path) -> None:
    job = Job(name="timing").resolved(learners=4, threads_per_rank=1)
    path = tmp_path / "run.h5"
    about = {"driver": "simulation", "training_samples": 32, "classes": 10}
    with make_writer(path, job, LAYOUT, SIZE, "abc", False, **about) as writer:
        recorder = Recorder(writer, Progress(job, 32, mode="quiet"), lambda role, buffer: None)
        recorder.finish(1, Finish(rows(records.TOTALS, timestamp=1), rows(records.LEARNER, 4), "snapshot 1"))
    with open_results(path) as results:
        assert results.status == "finished"
        assert results.weights is None
        assert results.summary()["weights_sha256"] is None
