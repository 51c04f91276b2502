"""The page about replays, done as its reader would: a run that fails, and what is found out about it."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from pages import blocks, files, page, section
from processes import ROOT

import rudra
from tests import forks

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(600)]

WALK = section(page("replay.md"), "Walk through a failed run")


def done(directory: Path, *line: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(line, cwd=directory, capture_output=True, text=True, timeout=250, check=False, env=env)


def test_a_failed_run_is_looked_into(tmp_path: Path) -> None:
    for name, text in files(WALK).items():
        (tmp_path / name).write_text(text)
    wild = WALK.replace("learning_rate=0.05 \\", "learning_rate=0.1 \\", 1)  # fails on any machine, after some updates
    wild = wild.replace("epochs=5 --output tame-simulated", "epochs=1 --output tame-simulated")
    wild = wild.replace("epochs=5 --output tame.h5", "epochs=2 --output tame.h5")
    first, *then = [line for block in blocks("sh", wild) for line in block.replace("\\\n", "").splitlines()]
    for _ in range(5):  # on a busy machine a run may fail before its first updates are recorded
        (tmp_path / "wild.h5").unlink(missing_ok=True)
        failed = done(tmp_path, *forks.rudra(), *shlex.split(first)[1:])
        assert failed.returncode == 1
        with rudra.open_results(tmp_path / "wild.h5") as results:
            if len(results.gradients):
                break
    assert re.search("is (nan|inf): a smaller learning_rate may help", failed.stderr), failed.stderr
    where = done(tmp_path, *forks.script("where.py")).stdout
    told = re.fullmatch(
        r"update \d+: learner \d, its gradient \d+, loss .+,\ncomputed from weights (\d+), \d+ .+\n", where
    )
    assert told, where
    later = str(max(1, int(told[1])))  # it may go wrong at once
    assert any("--until 20" in line for line in then)
    for line in then:
        word, *arguments = shlex.split(line.replace("--until 20", f"--until {later}"))
        assert word == "rudra"
        assert done(tmp_path, *forks.rudra(), *arguments).returncode == 0, line
    script = tmp_path / "layers.py"
    script.write_text(script.read_text().replace("20", later))
    layers = done(tmp_path, *forks.script("layers.py")).stdout
    assert [line.partition(":")[0] for line in layers.splitlines()] == ["0.weight", "2.weight", "5.weight", "7.weight"]
    with rudra.open_results(tmp_path / "tame.h5") as results:
        assert results.summary()["final_test_error"] < 0.4, "the remedy"
