"""What campaigns take for wrong, and how they show how far they are."""

import signal
from dataclasses import replace
from pathlib import Path

import pytest

import rudra
from tests.campaigns.ends import End, Outcome, at_end
from tests.campaigns.jobs import FAULTS
from tests.campaigns.progress import side_by_side

GOOD = End(0, "", 1.0, (), struck=True)
DIED = "rudra: parameter server (rank 0): learner 1 (rank 3) died; 2 learners are left, 2 gradients make an update\n"
EARLY = "rudra: rank 3 (learner 1), rank 4 (learner 2) died before training began\n"
STOPPED = "rudra: job: stopped on request; to resume from its last checkpoint: rudra resume out.h5\n"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("home") / "out.h5"
    job = rudra.Job(model={"name": "mlp"}, data={"name": "digits", "train_limit": 64}, training={"epochs": 1})
    rudra.simulate(job, output=path, progress="quiet").close()
    return path


@pytest.mark.parametrize(
    ("kind", "end", "is_finished", "wrong"),
    [
        ("a rank killed", GOOD, True, ""),
        ("a rank killed", replace(GOOD, said=DIED), True, ""),
        ("a rank killed", replace(GOOD, said=DIED.replace("rank 3", "rank 2")), True, "{2} are said to have died"),
        ("a rank killed", replace(GOOD, code=1, said=EARLY), False, "{4} are said to have died"),
        ("a rank killed", replace(GOOD, code=None), False, "it hung"),
        ("a rank killed", replace(GOOD, left=("7 S rudra",)), True, "left over: 7 S rudra"),
        ("a rank stopped", replace(GOOD, seconds=99.0), True, "it took 99 s"),
        ("a rank stopped", replace(GOOD, code=1, said=DIED + "Traceback (most"), False, "a traceback"),
        ("a rank paused", replace(GOOD, code=3, said=STOPPED), False, "code 3 after a pause"),
        ("a rank terminated", replace(GOOD, code=3, said=STOPPED), False, ""),
        ("a rank terminated", replace(GOOD, code=3, said="stopped"), False, "code 3 without a word"),
        ("mpirun terminated", replace(GOOD, code=3, said=STOPPED), True, "code 3, but the file is finished"),
        ("mpirun killed", replace(GOOD, code=-9), False, "code -9"),
        ("mpirun killed", GOOD, False, "code 0, but the file is not finished"),
        ("rudra killed", replace(GOOD, code=-signal.SIGKILL), True, ""),
    ],
)
def test_what_is_wrong_about_an_end(
    finished: Path, tmp_path: Path, kind: str, end: End, *, is_finished: bool, wrong: str
) -> None:
    output = finished if is_finished else tmp_path / "out.h5"
    found = at_end(output, FAULTS[kind], 3 if kind.startswith("a rank") else None, end)
    assert (wrong in found) if wrong else not found


def test_files_that_are_left_over_are_wrong(tmp_path: Path) -> None:
    (tmp_path / ".out.ckpt.saved").touch()
    end = replace(GOOD, code=1, said=DIED)
    assert at_end(tmp_path / "out.h5", FAULTS["mpirun killed"], None, end) == "files were left over"
    assert not at_end(tmp_path / "out.h5", FAULTS["rudra killed"], None, replace(end, code=-signal.SIGKILL))


def test_a_log_has_a_line_for_each_fault(capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = [Outcome(GOOD), Outcome(GOOD, wrong="it hung")]
    found = side_by_side(outcomes.__getitem__, [1, 0], lambda place, outcome: f"{place}, {outcome.told}")
    assert [place for place, _ in found] == [1, 0]
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "campaign: 1 of 2 faults, 0.0 min: 1, it hung",
        "campaign: 2 of 2 faults, 0.0 min: 0, code 0 after 1.0 s",
    ]
