"""Searches in virtual time with a budget in minutes, and with code that is not deterministic."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rudra
from rudra.errors import ConfigError
from rudra.job.job import Job
from rudra.tuning.journal import NAME

JOB = Job(
    name="small",
    model={"name": "mlp"},
    data={"train_limit": 160},
    training={"epochs": 4, "minibatch_size": 8},
    optimizer={"learning_rate": 0.1, "momentum": 0.9},
    cluster={"learners": 2, "threads_per_rank": 1},
)
ABOUT: dict[str, Any] = {
    "target": "loss <= 0.9",
    "given": {"protocol.name": ["hardsync"], "topology.name": ["base"], "training.minibatch_size": [8]},
    "quiet": True,
}


@pytest.fixture(autouse=True)
def _undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages have no figures, at which nobody looks."""
    monkeypatch.setattr("rudra.report.page.inline", lambda figure, prefix, *, narrow: "")


class Noisy(nn.Module):
    """Multiplies its outputs by noise that no seed decides."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Flatten(), nn.Linear(64, classes))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.inner(inputs)
        return outputs * random.SystemRandom().uniform(0.9, 1.1)


def entries(directory: Path, kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (directory / NAME).read_text().splitlines())
    return [entry for entry in lines if entry.get("kind") == kind]


def test_a_time_limits_a_search_by_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fixed = {**ABOUT["given"], "optimizer.learning_rate": [0.3], "optimizer.momentum": [0.9]}
    for _ in range(2):
        found = rudra.tune(JOB, output=tmp_path, budget="2m", **{**ABOUT, "given": fixed})
        (entry,) = entries(tmp_path, "budget")
        assert entry["samples"] == round(2 * 60 * entry["samples_per_s"]) > 0
        assert found.winner is not None
    said = capsys.readouterr().err
    assert said.count("rudra: small: --budget 2m means ") == 1


def test_too_short_a_time_is_refused_after_one_probe(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(
            ConfigError, match=r"--budget 0\.00001m: is less than one reference run, which needs"
        ) as caught:
            rudra.tune(JOB, output=tmp_path, budget="0.00001m", **ABOUT)
        assert caught.value.exit_code == 2
        assert len(entries(tmp_path, "budget")) == 1
        assert not entries(tmp_path, "probe")


def test_code_that_is_not_deterministic_is_found_before_the_search(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = set()
    for _ in range(2):
        found = rudra.tune(JOB.with_(model={"name": Noisy}), output=tmp_path, budget=1, **ABOUT)
        (line,) = [line for line in capsys.readouterr().err.splitlines() if "deterministic" in line]
        (note,) = [note for note in found.notes if "deterministic" in note]
        assert line == f"rudra: small: {note}"
        assert "differences below cannot be trusted" in note
        said.add(note)
    assert len(said) == 1, "a search that continues has no other opinion"
    (entry,) = entries(tmp_path, "repeat")
    assert entry["percent"] > 0


def test_a_job_that_diverges_at_once_is_no_mistake(tmp_path: Path) -> None:
    """Neither for the runs that identify code and data, nor for the search."""
    found = rudra.tune(JOB.with_(optimizer={"learning_rate": 1e12}), output=tmp_path, budget=1, **ABOUT)
    assert found.winner is None
    assert not any("deterministic" in note for note in found.notes)
