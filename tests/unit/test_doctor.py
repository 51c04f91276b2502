"""What `rudra doctor` finds of SLURM and of GPUs, by stand-ins for both."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rudra.cli import examination

GIB = 2**30
LIST = "echo 'MPI plugin types are...\n\tpmix\n\tnone\n\tpmi2\nspecific pmix plugin versions available: pmix_v4' >&2"


@pytest.mark.parametrize(
    ("programs", "open_mpi", "state", "found"),
    [
        ({}, True, "ok", "not here; only batch jobs need it"),
        (
            {"sbatch": "", "sinfo": "echo main; echo main; echo gpu", "srun": LIST},
            True,
            "ok",
            "partitions main, gpu; srun --mpi offers pmi2, pmix; this MPI needs pmix",
        ),
        ({"sbatch": "", "sinfo": "echo main", "srun": LIST}, False, "ok", "offers pmi2, pmix; this MPI needs pmi2"),
        (
            {"sbatch": "", "sinfo": "echo main", "srun": "echo none"},
            True,
            "warn",
            "srun --mpi offers nothing, not pmix",
        ),
        ({"sbatch": "", "sinfo": "echo no address >&2; exit 1"}, True, "warn", "no controller answers: no address"),
        ({"sbatch": "", "sinfo": "echo main"}, True, "warn", "No such file or directory: 'srun', not pmix"),
    ],
)
def test_slurm(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    programs: dict[str, str],
    open_mpi: bool,
    state: str,
    found: str,
) -> None:
    for name, body in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(examination, "find_mpirun", lambda: Path("mpirun"))
    monkeypatch.setattr(examination, "is_open_mpi", lambda mpirun: open_mpi)
    said = examination._slurm()
    assert said.state == state
    assert found in said.found
    assert bool(said.advice) == (state == "warn")


def test_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    assert examination._gpus().found == "torch sees none; learners compute on the CPU"
    gpus = [SimpleNamespace(name="NVIDIA A", total_memory=80 * GIB), SimpleNamespace(name="B", total_memory=24 * GIB)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_properties", gpus.__getitem__)
    assert examination._gpus().found == "0: NVIDIA A, 80 GiB; 1: B, 24 GiB"
