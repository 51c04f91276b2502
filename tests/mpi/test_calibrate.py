"""Measuring this machine, on real ranks: it ends with a cost file that a job can name."""

import tomllib
from pathlib import Path

import pytest

from rudra import cli
from rudra.config import Job
from rudra.predict import predict

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(150)]


def test_a_calibration_leaves_a_file_that_predicts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "costs.toml"
    assert cli.main(["calibrate", "digits", "-o", str(path), "--sizes", "8,16", "--seconds", "0.1", "--quiet"]) == 0
    said = capsys.readouterr()
    assert (said.out, said.err) == (f"wrote {path}\n", "")
    lenet = tomllib.loads(path.read_text(encoding="utf-8"))["models"]["lenet"]
    assert list(lenet["compute_s"]) == ["8", "16"]
    found = predict(Job.load("digits", [f"simulation.costs={path}", "cluster.learners=1"]))
    steps = 1438 / 16
    assert found.epoch_s > steps * lenet["compute_s"]["16"]
    assert found.shares["compute"] > 0.1
    assert list(tmp_path.iterdir()) == [path]
