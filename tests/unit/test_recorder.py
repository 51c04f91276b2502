"""What the statistics server records reaches the file and the screen."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from results_files import LAYOUT, SIZE, WEIGHTS, rows, sha256

from protocols import Protocol
from rudra import records
from rudra.config import Job
from rudra.events import Finish, Record
from rudra.progress import Progress
from rudra.recorder import VERSIONED, Recorder, attributes, make_writer
from rudra.results import open_results


class Mine(Protocol):
    """A user's own."""


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
    found = attributes(job, driver="mpi", training_samples=9, classes=5, hosts=["a", "b"])
    assert found["protocol"] == f"{__name__}:Mine"
    assert json.loads(found["job"])["cluster"] == json.loads(job.to_json())["cluster"]
    expected = {"driver": "mpi", "training_samples": 9, "classes": 5, "hosts": ["a", "b"], "topology": "base"}
    expected |= {"learners": 3, "n": 3, "gradients_per_update": 1, "threads_per_rank": 2, "seed": 0}
    assert found.items() >= expected.items()
    assert all(found[f"{name}_version"] for name in VERSIONED)
