"""Every job that comes with Rudra can be run as it stands, given its data."""

import tomllib
from pathlib import Path

import pytest
import torch

from rudra import models
from rudra.config import Job, shipped_jobs
from rudra.data import DataInfo
from rudra.optim import UpdateRule

ROOT = Path(__file__).parents[2]
DATA = {
    "digits": DataInfo("digits", 1437, 360, (1, 8, 8), 10),
    "idx": DataInfo("idx", 60_000, 10_000, (1, 28, 28), 10),
    "cifar10": DataInfo("cifar10", 50_000, 10_000, (3, 32, 32), 10),
}
JOBS = sorted((ROOT / "jobs").glob("*.toml"))


def test_every_file_is_shipped() -> None:
    assert {file.stem: file for file in JOBS} == shipped_jobs()
    assert "digits" in shipped_jobs()


@pytest.mark.parametrize("file", JOBS, ids=lambda f: f.stem)
def test_a_shipped_job_can_be_run(file: Path) -> None:
    job = Job.load(file.stem)
    assert job == Job.load(file)
    assert job.name == file.stem
    job = job.resolved()
    info = DATA[job.data.name]
    assert (job.data.path is None) == (job.data.name == "digits")
    assert job.data.path is None or not job.data.path.is_absolute(), "users keep data where they like"
    protocol = job.make_protocol()
    samples = min(job.data.train_limit or info.training_samples, info.training_samples)
    assert protocol.gradients_per_update * job.training.minibatch_size <= samples, "an epoch is at least one update"
    assert all(m < job.training.epochs for m in job.optimizer.milestones), "every milestone is reached"
    module = models.build(job.model, info, job.training.seed)
    models.check_output(module, info)
    UpdateRule(job.optimizer, torch.zeros(100))


@pytest.mark.parametrize("file", JOBS, ids=lambda f: f.stem)
def test_a_shipped_job_says_what_it_is_for(file: Path) -> None:
    first = file.read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith("# ")
    assert len(first) > 20


@pytest.mark.parametrize("file", JOBS, ids=lambda f: f.stem)
def test_a_shipped_job_names_what_decides_its_result(file: Path) -> None:
    """Whoever reads or copies it must not have to know the defaults."""
    tables = tomllib.loads(file.read_text(encoding="utf-8"))
    for table, key in [
        ("model", "name"),
        ("data", "name"),
        ("training", "epochs"),
        ("training", "minibatch_size"),
        ("training", "seed"),
        ("optimizer", "learning_rate"),
        ("protocol", "name"),
    ]:
        assert key in tables[table]


def test_the_paper_reproduction_has_the_papers_setting() -> None:
    """Figure 5 (rudra.txt §5.1): λ = 30, 30-softsync, μ = 128, α0 = 0.001, momentum 0.9, drops after 120 and 130."""
    for name, epochs in (("figure5", 140), ("figure5-quick", None)):
        job = Job.load(name)
        protocol = job.make_protocol()
        assert (job.learners, protocol.n, protocol.gradients_per_update) == (30, 30, 1)
        assert (job.training.minibatch_size, job.optimizer.learning_rate, job.optimizer.momentum) == (128, 0.001, 0.9)
        assert protocol.modulation.rate_factor(30.0) == 1 / 30
        if epochs:
            assert (job.training.epochs, job.optimizer.milestones) == (epochs, (120, 130))
