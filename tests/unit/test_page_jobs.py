"""The jobs and tables that the pages on training, data and clusters show: each can be run as it stands."""

import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from pages import ROOT, blocks, files, page

from rudra.cli.main import main
from rudra.compute import models
from rudra.compute.flat import FlatModel
from rudra.compute.optim import UpdateRule
from rudra.compute.schedule import schedule_of
from rudra.data.augmentation import Augmentation
from rudra.data.load import load
from rudra.job.job import Job

PAGES = ("training.md", "data.md", "gpus.md", "cluster.md", "faults.md", "export.md")
TABLES = [(name, block) for name in PAGES for block in blocks("toml", page(name))]
JOBS = [(name, file) for name in PAGES for file in files(page(name)) if file.endswith(".toml")]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with all files that the pages show, in which a reader works."""
    for name in PAGES:
        for file, text in files(page(name)).items():
            (tmp_path / file).write_text(text)
    (houses,) = blocks("csv", page("data.md"))
    (tmp_path / "houses.csv").write_text(houses)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("name", "block"), TABLES)
def test_tables_are_parts_of_a_valid_job(name: str, block: str) -> None:
    Job.of(Path(name), tomllib.loads(block))


@pytest.mark.parametrize(("name", "file"), JOBS)
def test_jobs_are_valid_and_their_parts_fit(
    name: str, file: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if name == "data.md":
        subprocess.run([sys.executable, "make_data.py"], cwd=place, check=True, timeout=60)
    assert main(["validate", "--syntax", file]) == 0
    assert capsys.readouterr().out.startswith(f"{file}: valid\n")
    job = Job.load(file).resolved()
    data = load(job.data, seed=job.training.seed)
    schedule_of(job, job.plan(), data.info.training_samples)
    flat = FlatModel(models.build(job.model, data.info, 0))
    UpdateRule(job.optimizer, torch.zeros(flat.size), flat.layout)


def test_functions_that_pages_show_do_what_they_say(place: Path) -> None:
    optimizer = {"learning_rate": 0.1, "schedule": "halving:halving", "schedule_options": {"every": 3}}
    job = Job(optimizer=optimizer, training={"epochs": 7}).resolved()
    rates = schedule_of(job, job.plan(), 100).rates
    assert rates == pytest.approx([0.1] * 3 + [0.05] * 3 + [0.025])
    (table,) = (tomllib.loads(b)["augment"] for b in blocks("toml", page("data.md")) if "noise:noise" in b)
    change, inputs = Augmentation(Job(augment=table).augment), torch.zeros(100, 4)
    assert torch.equal(change(inputs, 5), change(inputs, 5))
    assert float(change(inputs, 5).std()) == pytest.approx(0.05, rel=0.2)


def test_houses_are_learned(place: Path) -> None:
    import rudra

    with rudra.simulate(Job.load("houses.toml"), output=place / "houses.h5", progress="quiet") as results:
        losses = results.epochs["test_loss"]
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0] / 50


def test_the_pointer_has_the_commands_of_the_page() -> None:
    pointer = (ROOT / ".github" / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert "(../docs/contributing.md)" in pointer
    assert len(blocks("", pointer)[0].splitlines()) == 3
