"""What `rudra doctor` finds of SLURM, GPUs and memory, by stand-ins for all three."""

import os
import resource
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rudra import doctor
from rudra.compute.device.cuda import Cuda
from rudra.machine import free_memory, memory_limit

GIB = 2**30
LIST = "echo 'MPI plugin types are...\n\tpmix\n\tnone\n\tpmi2\nspecific pmix plugin versions available: pmix_v4' >&2"


@pytest.mark.parametrize(
    ("programs", "open_mpi", "state", "found"),
    [
        ({}, True, "ok", "not installed; only batch jobs need it"),
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, programs: dict[str, str], open_mpi: bool, state: str, found: str
) -> None:
    for name, body in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(doctor, "find_mpirun", lambda: Path("mpirun"))
    monkeypatch.setattr(doctor, "is_open_mpi", lambda mpirun: open_mpi)
    said = doctor._slurm()
    assert said.state == state
    assert found in said.found
    assert bool(said.advice) == (state == "warn")


def test_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor._gpus().found == "torch sees none; learners compute on the CPU"
    gpus = [SimpleNamespace(name="NVIDIA A", total_memory=80 * GIB), SimpleNamespace(name="B", total_memory=24 * GIB)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_properties", gpus.__getitem__)
    assert doctor._gpus().found == "0: NVIDIA A, 80 GiB; 1: B, 24 GiB"


@pytest.mark.parametrize(
    ("ranks", "failure", "limit", "state", "found", "advice"),
    [
        (2, "", -1, "ok", "ranks read each other's; 8.0 GiB are free", ""),
        (2, "", 9 * GIB, "ok", "ranks read each other's; 8.0 GiB are free", ""),
        (2, "", GIB, "warn", "8.0 GiB are free, but a rank may share at most 1.0 GiB", "ulimit -f unlimited"),
        (1, "", -1, "ok", "not tried: the two ranks met on two nodes", ""),
        (
            2,
            "rank 0: [Errno 27] File too large",
            4096,
            "warn",
            "cannot read each other's: rank 0",
            "ulimit -f unlimited",
        ),
        (2, f"rank 1: [Errno 13] {os.strerror(13)}: '/proc/9/fd/7'", -1, "warn", "rank 1: [Errno 13]", "in /proc"),
        (2, "module 'os' has no attribute 'memfd_create'", -1, "warn", "memfd_create", "messages, which is slower"),
    ],
)
def test_node_memory(
    monkeypatch: pytest.MonkeyPatch, ranks: int, failure: str, limit: int, state: str, found: str, advice: str
) -> None:
    monkeypatch.setattr(doctor, "free_memory", lambda: 8 * GIB)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    said = doctor._node_memory(ranks, failure)
    assert said.state == state
    assert found in said.found
    assert advice in said.advice
    assert bool(said.advice) == (state == "warn")


def test_free_memory_is_some() -> None:
    assert 0 < free_memory() <= memory_limit() < 2**50


@pytest.mark.parametrize(("load", "state"), [(30.0, "warn"), (0.1, "fail")])
def test_ranks_that_are_late_on_a_busy_machine_are_no_failure(
    monkeypatch: pytest.MonkeyPatch, load: float, state: str
) -> None:
    monkeypatch.setattr(doctor, "world_size", lambda: None)
    monkeypatch.setattr(doctor, "find_mpirun", lambda: Path("mpirun"))
    monkeypatch.setattr(doctor, "is_open_mpi", lambda _: True)
    monkeypatch.setattr(doctor, "_probe", lambda *_: (None, doctor.LATE))
    monkeypatch.setattr(doctor, "cores", lambda: 2)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    _, mpi = doctor._mpi()
    assert (mpi.subject, mpi.state) == ("mpi", state)
    assert ("a load of 30.0 on 2 cores" in mpi.found) == (state == "warn")


@pytest.mark.parametrize(
    ("failure", "aware", "library", "found"),
    [
        ("", True, "NCCL 2.27.3", "ipc within a node, mpi between nodes; NCCL 2.27.3 for groups with"),
        (None, False, "", "ipc within a node (a run tries it), staged between nodes; no NCCL"),
        ("no such device", False, "", "staged within a node, staged between nodes; no NCCL"),
    ],
)
def test_transports_that_a_run_would_choose(
    monkeypatch: pytest.MonkeyPatch, failure: str | None, aware: bool, library: str, found: str
) -> None:
    monkeypatch.setattr(Cuda, "count", lambda _: 2)
    monkeypatch.setattr(Cuda, "library", lambda _: library)
    assert doctor._transports(failure, gpu_aware=aware).found.startswith(found)
    monkeypatch.setattr(Cuda, "count", lambda _: 0)
    assert doctor._transports(failure, gpu_aware=aware).found == "only ranks that compute on GPUs have some"
