"""Evaluations that do not fit into memory: the run says what to use instead, and loses no finished work."""

from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, SYNCHRONOUS, small

import rudra
from rudra.compute.flat import FlatModel
from rudra.errors import RunError
from rudra.results import checkpoint
from rudra.results.progress import summary_table

EPOCHS = 4
JOBS = {f"synchronous {name}": tables for name, tables in SYNCHRONOUS.items()} | {
    name: tables for name, tables in FAMILIES.items() if tables["protocol"]["name"] in ("softsync", "async", "hogbatch")
}


def make_job(tables: dict[str, Any]) -> rudra.Job:
    training = {"evaluate": "always", "epochs": EPOCHS}
    return small(
        tables,
        training=training,
        data={"test_limit": 40},
        results={"keep_checkpoints": "never", "checkpoint_every": "100 epochs"},
    )


def exhaust(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """A device without memory for an evaluation, and for all that follow. Each has one batch."""
    evaluate, calls = FlatModel.evaluate_batch, []

    def evaluate_if_it_fits(model: FlatModel, *batch: Any) -> Any:
        calls.append(batch)
        if len(calls) >= number:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has no more.")
        return evaluate(model, *batch)

    monkeypatch.setattr(FlatModel, "evaluate_batch", evaluate_if_it_fits)


@pytest.mark.parametrize("name", JOBS)
def test_an_evaluation_without_memory_ends_the_run_with_a_checkpoint(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, path = make_job(JOBS[name]), tmp_path / "run.h5"
    why = r"too little memory: CUDA out .* 2.00 GiB; use a smaller training.evaluation_batch_size"
    with monkeypatch.context() as patch:
        exhaust(patch, 2)
        with pytest.raises(RunError, match=f"^statistics server: {why}$"):
            rudra.simulate(job, output=path, progress="quiet")
    with rudra.open_results(path) as results:
        assert results.status == "failed"
        assert results.epochs["evaluated"].tolist()[:2] == [1, 0]
        (memory,) = results.events[results.events["kind"] == b"memory"]
        assert memory["role"] == results.plan().statistics
        updates = len(results.updates)
        assert "epochs: too little memory" in summary_table(results.summary())
    saved = checkpoint.path_of(path)
    assert 0 < checkpoint.read(saved)[0].position.timestamp <= updates
    onward = tmp_path / "on.h5"
    with rudra.simulate(job, output=onward, from_=saved, carry="all", progress="quiet") as results:
        assert results.status == "finished"
        assert results.epochs["evaluated"][-1]
        if name.startswith("synchronous"):
            with rudra.simulate(job, output=tmp_path / "whole.h5", progress="quiet") as whole:
                assert results.summary()["weights_sha256"] == whole.summary()["weights_sha256"]


@pytest.mark.parametrize("name", JOBS)
def test_the_last_evaluation_without_memory_is_left_out(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job, path = make_job(JOBS[name]), tmp_path / "run.h5"
    exhaust(monkeypatch, EPOCHS)
    with rudra.simulate(job, output=path, progress="quiet") as results:
        assert results.status == "finished"
        assert results.epochs["evaluated"].tolist() == [1] * (EPOCHS - 1) + [0]
        assert results.weights is not None
        assert f"1 of {EPOCHS} epochs: too little memory" in summary_table(results.summary())
    assert f"epoch {EPOCHS} is not evaluated: too little memory: CUDA out" in capsys.readouterr().err
