"""`rudra tune --mpi`: searches whose probes train on real ranks."""

import json
from pathlib import Path
from typing import Any

import pytest
from processes import finish, mpirun, start

from rudra.cli.main import main
from rudra.job.job import Job
from rudra.mpi.failures import ULFM

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(300)]

JOB = """
[model]
name = "mortal:Mortal"
[data]
train_limit = 320
[training]
epochs = 6
minibatch_size = 8
[optimizer]
learning_rate = 0.5
momentum = 0.9
[cluster]
learners = 2
threads_per_rank = 1
[simulation]
compute_s = 0.01
"""

UNDRAWN = "import rudra.tuning.tune as tune; tune.write_page = lambda *_: None"
"""For each process: nobody looks at the figures of these searches."""

MODEL = '''
"""A linear model. Learner 1 dies in the second probe of a search while a file `die` lies beside this module."""

import os
import signal
from pathlib import Path

from torch import nn

class Mortal(nn.Module):
    def __init__(self, input_shape, classes):
        super().__init__()
        self.inner = nn.Sequential(nn.Flatten(), nn.Linear(64, classes))

    def forward(self, inputs):
        here = Path(__file__).parent
        if self.training and os.environ.get("OMPI_COMM_WORLD_RANK") == "3" and (here / "die").exists():
            if '"probe"' in (here / "out" / "journal.jsonl").read_text():
                os.kill(os.getpid(), signal.SIGKILL)
        return self.inner(inputs)
'''


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "mortal.py").write_text(MODEL)
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    return path


def command(job: Path, protocols: str, budget: str, *more: str) -> list[str]:
    """A search of one rate and one momentum, because each probe may start its ranks."""
    fixed = ["--set", "topology.name=base", "--set", "training.minibatch_size=8"]
    fixed += ["--space", "optimizer.learning_rate=0.5", "--space", "optimizer.momentum=0.9"]
    goal = ["--target", "loss <= 0.4", "--space", f"protocol.name={protocols}", "--budget", budget]
    return ["tune", str(job), *goal, *fixed, "-o", str(job.parent / "out"), *more]


def journal(job: Path) -> Path:
    return job.parent / "out" / "journal.jsonl"


def entries(job: Path) -> list[dict[str, Any]]:
    return [*map(json.loads, journal(job).read_text().splitlines())]


def probes(job: Path) -> list[dict[str, Any]]:
    return [entry for entry in entries(job) if entry.get("kind") == "probe"]


def check_answer(job: Path, out: str) -> None:
    """The answer is complete, and its times are of the clock."""
    lines = out.splitlines()
    assert lines[0].startswith("job: the soonest to validation loss <= 0.4 is ")
    assert lines[-1].startswith("wrote ")
    assert out.count("the soonest") == 1
    found = probes(job)
    assert {entry["settings"].get("protocol.name") for entry in found} == {"hardsync", "async", None}
    marks = [mark for entry in found for mark in entry["marks"]]
    assert len({samples / time_s for samples, _, _, time_s in marks}) > len(found) / 2, "a prediction has one rate"
    assert entries(job)[0]["mpi"] is True
    best = Job.load(job.parent / "out" / "best.toml")
    assert (best.cluster.learners, best.cluster.threads_per_rank) == (2, 1)


@pytest.mark.campaign
def test_each_probe_starts_its_ranks(job: Path) -> None:
    code, out, err = finish(start(*command(job, "hardsync,async", "8x", "--mpi"), before=UNDRAWN), 120)
    assert code == 0, err
    check_answer(job, out)


def test_all_probes_train_in_one_launch(job: Path) -> None:
    code, out, err = mpirun(4, *command(job, "hardsync,async", "6x", "--mpi"), before=UNDRAWN)
    assert code == 0, err
    check_answer(job, out)
    code, out, err = mpirun(4, *command(job, "hardsync,async", "7x", "--mpi"), before=UNDRAWN)
    assert (code, out) == (2, "")
    said = [line for line in err.splitlines() if line.startswith("rudra: ")]
    assert [line.partition(": its ")[2] for line in said] == ['budget is "6x", not "7x"; give another --output']


def test_a_rank_that_dies_twice_stops_a_search_that_continues(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (job.parent / "die").touch()
    code, out, err = finish(start(*command(job, "hardsync", "2x", "--mpi"), before=UNDRAWN), 120)
    assert (code, out) == (3, ""), err
    assert [line for line in err.splitlines() if " died " in line] == [
        "rudra: job: learner 1 (rank 3) died in a probe, which is started again",
        "rudra: job: learner 1 (rank 3) died in a probe; the same command continues the search",
    ]
    before = left(job)
    code, _, err = finish(start(*command(job, "hardsync", "2x", "--mpi"), before=UNDRAWN), 120)
    assert code == 0, err
    check_continued(job, before)
    assert main(command(job, "hardsync", "2x")) == 2
    assert "is of another search: its mpi is true, not false; give another --output" in capsys.readouterr().err


def test_a_rank_that_dies_in_a_common_launch_ends_it_and_the_search_continues(job: Path) -> None:
    (job.parent / "die").touch()
    code, out, err = mpirun(4, *command(job, "hardsync", "2x", "--mpi"), options=ULFM, before=UNDRAWN)
    assert (code, out) == (3, ""), err
    said = [line for line in err.splitlines() if line.startswith("rudra: ")]
    assert said == ["rudra: rank 3 (learner 1) died; the same command continues"]
    before = left(job)
    code, _, err = mpirun(4, *command(job, "hardsync", "2x", "--mpi"), before=UNDRAWN)
    assert code == 0, err
    check_continued(job, before)


def left(job: Path) -> bytes:
    """The journal of a search that was stopped in its second probe. From now on nobody dies."""
    (job.parent / "die").unlink()
    assert len(probes(job)) == 1
    return journal(job).read_bytes()


def check_continued(job: Path, before: bytes) -> None:
    assert journal(job).read_bytes().startswith(before)
    assert len(probes(job)) > 1
