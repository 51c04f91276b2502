"""The README's guide, run as its reader would: every file, command and block of code."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from pages import blocks, files, page, section
from processes import ROOT

import rudra
from tests import forks

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(300)]

GUIDE = section(page("README.md"), "Guide")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which everything up to the block that reads the results was done."""
    directory = tmp_path_factory.mktemp("guide")
    for name, text in files(GUIDE).items():
        (directory / name).write_text(text)
    for line in "".join(blocks("sh", GUIDE)).splitlines():
        word, *arguments = shlex.split(line, comments=True)
        assert word == "rudra"
        said(directory, *forks.rudra(), *arguments)
    return directory


def said(directory: Path, *line: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(line, cwd=directory, capture_output=True, text=True, timeout=120, check=False, env=env)
    assert done.returncode == 0, (line, done.stderr)
    return done.stdout


def test_the_first_job_learns(place: Path) -> None:
    for name, learners in (("first.h5", 2), ("eight.h5", 8)):
        with rudra.open_results(place / name) as results:
            summary = results.summary()
        assert (summary["learners"], summary["epochs"]) == (learners, 10)
        assert summary["final_test_error"] < 0.1


def test_ones_own_model_data_loss_and_protocol(place: Path) -> None:
    with rudra.open_results(place / "own.h5") as results:
        summary, gradients = results.summary(), results.gradients
    assert summary["protocol"] == "bounded:Bounded"
    assert summary["target_epoch"] is not None, "the target is reached, which ends the run"
    assert summary["epochs"] < 30
    assert summary["metrics"]["validation"]["accuracy"][-1] > 0.85
    # While a gradient is made, either of the two others goes from two pushed gradients less to three more: who has two
    # more than the slowest may still begin the third.
    assert gradients["staleness"].max() <= 2 * (2 + 3)


def test_results_are_read(place: Path) -> None:
    (reading,) = (block for block in blocks("python", GUIDE) if block.startswith("import rudra\n"))
    printed = said(place, sys.executable, "-c", reading)
    assert printed.startswith("validation accuracy >= 0.9: after ")
    (rate,) = re.findall("learning rate of the last update (.+)", printed)
    assert 0.1 / float(rate) == pytest.approx(round(0.1 / float(rate)), abs=1e-4), "α0, divided by a staleness"


def test_the_protocol_is_short() -> None:
    assert len(files(GUIDE)["bounded.py"].splitlines()) < 60
