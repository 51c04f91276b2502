"""`rudra sweep --mpi`: the same sweep on real ranks."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from rudra.results.reader import open_results
from tests import forks

ROOT = Path(__file__).resolve().parents[2]
JOB = """
[model]
name = "mlp"
[data]
train_limit = 200
test_limit = 50
[training]
epochs = 1
[cluster]
learners = 1
"""


@pytest.mark.mpi
@pytest.mark.timeout(600)
def test_points_run_one_after_the_other_and_are_found_again(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    command = [*forks.rudra(), "sweep", "job.toml", "--mpi", "--grid", "training.minibatch_size=5,20"]
    for count in (2, 0):
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=250, check=False)
        assert done.returncode == 0, done.stderr
        assert f"{count} of 2 points run now" in done.stdout
    directory = tmp_path / "job-sweep"
    assert json.loads((directory / "sweep.json").read_text())["driver"] == "mpi"
    for size in (5, 20):
        with open_results(directory / f"minibatch_size={size}.h5") as results:
            assert (results.status, results.attributes["driver"]) == ("finished", "mpi")
            assert results.job["training"]["minibatch_size"] == size
