"""How tensors travel between ranks that compute on GPUs, and what is said about it."""

import os
import signal
import subprocess
from typing import Any

import pytest
import torch

from rudra.compute.device.kind import CPU
from rudra.job.job import Job
from rudra.job.transports import Transports, on_devices, parsed, transport_text, transports_of
from rudra.mpi.device_arena import DeviceArena
from topologies import Plan

SHARED, MESSAGES = "copies in memory that the ranks share", "copies in main memory, and messages"
READ, ON_GPU = "ranks read each other's GPU memory", "MPI reads and writes GPU memory"
NCCL = "nccl in groups: NCCL adds gradients in its own order"
GROUPS: dict[str, Any] = {"topology": {"name": "groups"}}


def placed(nodes: int, **tables: Any) -> tuple[Job, Plan, list[int]]:
    """A job of two learners on GPUs, and its plan on these nodes, in turn."""
    job = Job(**{**tables, "cluster": {"learners": 2, "device": "cuda", **tables.get("cluster", {})}})
    plan = job.plan()
    return job, plan, [role % nodes for role in range(len(plan.roles))]


@pytest.mark.parametrize(
    ("tables", "nodes", "names", "text"),
    [
        ({}, 1, "ipc", f"ipc: {READ}"),
        ({}, 2, "ipc, staged", f"ipc within a node: {READ}; staged between nodes: {MESSAGES}"),
        (GROUPS, 1, "ipc", f"ipc: {READ}"),
        ({"topology": {"name": "sharded"}}, 1, "ipc", f"ipc: {READ}"),
        ({"cluster": {"gradient_format": "float16"}}, 1, "ipc", f"ipc: {READ}"),
        ({"cluster": {"node_memory": False}}, 1, "staged", f"staged: {MESSAGES}"),
        ({"cluster": {"transport": "staged"}}, 1, "staged", f"staged: {SHARED}"),
        (
            {"cluster": {"transport": "staged"}},
            2,
            "staged",
            f"staged within a node: {SHARED}; staged between nodes: {MESSAGES}",
        ),
        ({"cluster": {"transport": "mpi"}}, 2, "mpi", f"mpi: {ON_GPU}"),
        ({**GROUPS, "cluster": {"transport": "nccl"}}, 1, "nccl, ipc", f"ipc: {READ}; {NCCL}"),
        (
            {**GROUPS, "cluster": {"transport": "nccl", "node_memory": False}},
            2,
            "nccl, staged",
            f"staged: {MESSAGES}; {NCCL}",
        ),
        ({"cluster": {"one_rank": True}}, 1, "", ""),
        ({"cluster": {"device": "cpu"}}, 1, "", ""),
        ({"cluster": {"device": "auto"}}, 1, "", ""),  # the ranks decide
    ],
)
def test_a_job_has_transports_within_and_between_nodes(
    tables: dict[str, Any], nodes: int, names: str, text: str
) -> None:
    job, plan, places = placed(nodes, **tables)
    found = transports_of(job, plan)
    assert ("" if found is None else found.names(places)) == names
    assert transport_text(job, plan, places) == text
    again = parsed(names)
    assert ("" if again is None else again.names(places)) == names


def test_ranks_of_two_nodes_use_a_library_that_knows_gpus() -> None:
    job, plan, _ = placed(2)
    found = transports_of(job, plan, gpu_aware=True)
    assert found is not None
    assert [found.of_pair(*pair) for pair in ((0, 0), (0, 1), (1, 1))] == ["ipc", "mpi", "ipc"]
    assert found._replace(excluded=frozenset({1})).of_pair(1, 1) == "staged"
    sharded = transports_of(*placed(2, topology={"name": "sharded"})[:2], gpu_aware=True)
    assert sharded is not None
    assert sharded.between == "staged"


@pytest.mark.parametrize(
    ("topology", "learners", "excluded", "nccl", "ranks"),
    [
        ({"name": "base"}, [0, 0, 1, 1], (), False, {0, 1, 2, 3}),  # those on node 1 have no pair there
        ({"name": "base"}, [0, 0, 1, 1], (0,), False, set()),
        ({"name": "adv"}, [0, 0, 1, 1], (), False, set(range(8))),  # each node has a leaf server
        ({"name": "adv"}, [0, 0, 1, 1], (1,), False, {0, 1, 2, 4, 5}),
        ({"name": "groups"}, [0, 0, 1, 1], (), False, set()),  # the group is on two nodes
        ({"name": "groups"}, [0, 0, 1, 1], (), True, {1, 2, 3, 4, 0}),
        ({"name": "groups", "options": {"groups": 2}}, [0, 0, 1, 1], (), False, set(range(6))),
        ({"name": "groups", "options": {"groups": 2}}, [0, 1, 1, 1], (), False, {0, 1, 4, 5}),
    ],
)
def test_vectors_are_on_devices_where_a_pair_reads_them(
    topology: dict[str, Any], learners: list[int], excluded: tuple[int, ...], nccl: bool, ranks: set[int]
) -> None:
    tables: dict[str, Any] = {"topology": topology, "cluster": {"learners": 4, "device": "cuda"}}
    if topology.get("options"):
        tables["protocol"] = {"name": "async"}
    plan = Job(**tables).plan(learners)
    found = Transports("ipc", "staged", nccl, frozenset(excluded))
    assert on_devices(plan, plan.nodes(near=True), found) == ranks


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
