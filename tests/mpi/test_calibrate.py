"""Measuring this machine, on real ranks: it ends with a cost file that a job can name, or finds by itself."""

import tomllib
from pathlib import Path

import pytest

from rudra.cli.main import main
from rudra.job.job import Job
from rudra.job.jobfiles import shipped_jobs
from rudra.prepare import cost_files
from rudra.simulation.predict import predict

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(600)]

MODULE = """
from rudra.compute.networks import lenet

def network(input_shape, classes):
    return lenet(input_shape, classes)
"""


def test_a_calibration_leaves_a_file_that_predicts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a job that names a module beside it, and would diverge at once."""
    (tmp_path / "beside_job.py").write_text(MODULE)
    job = tmp_path / "mine.toml"
    job.write_text(shipped_jobs()["digits"].read_text().replace('"lenet"', '"beside_job:network"'))
    monkeypatch.setattr(cost_files, "MEASURED", tmp_path / "measured")
    measure = ["calibrate", str(job), "--sizes", "8,16", "--bank", "2", "--seconds", "0.1", "--quiet"]
    assert main([*measure, "--set", "optimizer.learning_rate=1e30", "--set", "protocol.correction=dc_asgd"]) == 0
    said = capsys.readouterr()
    (path,) = (tmp_path / "measured").iterdir()
    assert (said.out, said.err) == (f"wrote {path}; predict and simulate find it there\n", "")
    file = tomllib.loads(path.read_text(encoding="utf-8"))
    (model,) = file["models"].values()
    assert 1e-11 < file["cpu_s_per_byte"] < 1e-8
    # A correction reads and writes each byte more often than an addition.
    assert model["gradient_s_per_byte"] < model["correction_s_per_byte"] < 1e-6
    assert list(model["compute_s"]) == ["8", "16"]
    assert model["bank_s"]["1"] == model["compute_s"]
    assert [*model["bank_s"]["2"]] == ["8", "16"]
    assert [layer["name"] for layer in model["layers"]] == list("01234567")
    found = predict(Job.load(job, ["cluster.learners=1"]))
    assert found.costs == str(path)
    steps = 1438 / 16
    assert found.epoch_s > 0.7 * steps * model["compute_s"]["16"], "steps vary as they were seen to"
    assert found.shares["compute"] > 0
    assert predict(Job.load(job, ["simulation.costs=defaults"])).costs is None
