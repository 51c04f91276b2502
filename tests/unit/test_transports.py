"""How tensors travel between ranks that compute on GPUs, and what is said about it."""

import os
import signal
import subprocess
from typing import Any

import pytest
import torch

from rudra.compute.device.kind import CPU
from rudra.job.job import Job
from rudra.job.transports import transport_of, transport_text
from rudra.mpi.device_arena import DeviceArena

SHARED, MESSAGES = "copies in memory that the ranks share", "copies in main memory, and messages"
ON_GPU = "MPI reads and writes GPU memory"


@pytest.mark.parametrize(
    ("tables", "nodes", "transport", "text"),
    [
        ({}, 1, "ipc", "ipc: ranks read each other's GPU memory"),
        ({}, 2, "staged", f"staged: {SHARED} within a node; {MESSAGES} between nodes"),
        ({"topology": {"name": "groups"}}, 1, "staged", f"staged: {SHARED}"),
        ({"topology": {"name": "sharded"}}, 1, "staged", f"staged: {SHARED}"),
        ({"cluster": {"gradient_format": "float16"}}, 1, "staged", f"staged: {SHARED}"),
        ({"cluster": {"node_memory": False}}, 1, "staged", f"staged: {MESSAGES}"),
        ({"cluster": {"transport": "staged"}}, 1, "staged", f"staged: {SHARED}"),
        ({"cluster": {"transport": "mpi"}}, 2, "mpi", f"mpi: {ON_GPU}"),
        ({"cluster": {"one_rank": True}}, 1, None, ""),
        ({"cluster": {"device": "cpu"}}, 1, None, ""),
        ({"cluster": {"device": "auto"}}, 1, None, ""),  # the ranks decide
    ],
)
def test_a_job_has_one_transport(tables: dict[str, Any], nodes: int, transport: str | None, text: str) -> None:
    cluster = {"learners": 2, "device": "cuda", **tables.get("cluster", {})}
    job = Job(**{**tables, "cluster": cluster})
    plan = job.plan()
    places = [role % nodes for role in range(len(plan.roles))]
    assert transport_of(job, plan, places) == transport
    assert transport_text(job, plan, places) == text


def test_the_memory_of_a_process_is_intact_until_it_begins_to_end() -> None:
    arena, process = DeviceArena(CPU), subprocess.Popen(["sleep", "60"])
    arena._pids = {1: process.pid, 2: os.getpid()}
    assert arena.intact(1)
    process.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie
    assert not arena.intact(1)
    process.wait()
    assert not arena.intact(1)
    assert arena.intact(2)


def test_slots_are_free_as_long_as_they_have_no_readers() -> None:
    arena = DeviceArena(CPU)
    arena.make_slots(2, 100)
    assert not arena.failure
    one = arena.free_slot()
    assert one is not None
    one.readers += 1
    other = arena.free_slot()
    assert other is not None
    other.readers += 1
    assert arena.free_slot() is None
    one.memory.fill_(1)
    assert torch.count_nonzero(other.memory) == 0
    one.readers -= 1
    assert arena.free_slot() is one
    arena._met(failed=False)
