"""Devices of ranks, GPUs of their nodes or the CPU, and placement of the vectors that travel."""

from collections.abc import Collection, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from rudra.errors import ConfigError
from topologies import Plan

CPU = torch.device("cpu")

Placing = Literal["device", "staged", "direct"]
"""Placement of buffers. "device": on the computing device. "staged": in main memory, where MPI reads and writes, with
copies on the device (`Staging`). "direct": on the device, where MPI reads and writes, for roles that compute there, and
in main memory for others."""


def gpus_here() -> int:
    """Returns the number of GPUs that torch sees in this process."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def agreed(
    wanted: str, plan: Plan, gpus: Sequence[int], hosts: Sequence[str], on_cpu: Collection[int] = ()
) -> Literal["cpu", "cuda"]:
    """Decides whether learners compute on GPUs. Either all do, except those that must use the CPU, or none.

    Args:
        wanted: `cluster.device` of the job.
        plan: Role assignment.
        gpus: Number of GPUs that each rank sees.
        hosts: Host of each rank.
        on_cpu: Learners that need no GPU.

    Raises:
        ConfigError: A GPU is wanted, and some learner has none.
    """
    wanting = [plan.roles[learner] for learner in plan.learners if learner not in on_cpu]
    without = [role for role in wanting if not gpus[role.world_rank]]
    if wanted == "cuda" and without:
        rank = without[0].world_rank
        who = f"{without[0].title} on {hosts[rank]}"
        raise ConfigError(f"[cluster] device = 'cuda': torch sees no GPU for {who}; valid there: cpu")
    return "cpu" if wanted == "cpu" or without else "cuda"


def of_rank(rank: int, plan: Plan, places: Sequence[int], gpus: int, on_cpu: Collection[int] = ()) -> torch.device:
    """Returns the device of one rank if learners compute on GPUs.

    The learners of a node, and then the statistics server, take its GPUs in turn. Other servers compute in main memory.

    Args:
        rank: Rank to place.
        plan: Role assignment.
        places: Node of every rank, any numbers.
        gpus: Number of GPUs that the rank sees.
        on_cpu: Learners that need no GPU. If another learner shares their rank, they use its device.
    """
    wanting = [learner for learner in plan.learners if learner not in on_cpu]
    computing = (plan.roles[role].world_rank for role in (*wanting, plan.statistics))
    here = list(dict.fromkeys(other for other in computing if places[other] == places[rank]))
    return torch.device("cuda", here.index(rank) % gpus) if gpus and rank in here else CPU


def virtual(wanted: str, *, window: bool) -> torch.device:
    """Returns the device of a process that computes for all roles, in virtual time.

    Args:
        wanted: `cluster.device` of the job.
        window: Whether the weights are in windows.

    Raises:
        ConfigError: A GPU is wanted but missing or not used.
    """
    there = torch.cuda.is_available()
    if window:
        if wanted == "cuda":
            raise ConfigError("[cluster] device = 'cuda': windows of virtual time are in main memory; valid: cpu, auto")
        return CPU
    if wanted == "cuda" and not there:
        raise ConfigError("[cluster] device = 'cuda': torch sees no GPU here; valid: cpu, auto")
    return torch.device("cuda", 0) if wanted != "cpu" and there else CPU


def placing(device: torch.device, *, gpu_aware_mpi: bool) -> Placing:
    """Returns the placement of buffers for a rank that computes on a device."""
    return "device" if device.type == "cpu" else "direct" if gpu_aware_mpi else "staged"


def finish(device: torch.device) -> None:
    """Waits until the device has finished its work: MPI does not know its streams."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def page_locked(length: int) -> npt.NDArray[np.uint8]:
    """Allocates bytes in main memory that a GPU copies at full speed and in parallel with other work."""
    return torch.zeros(length, dtype=torch.uint8, pin_memory=True).numpy()


def lock_pages(memory: npt.NDArray[np.uint8]) -> None:
    """Page-locks existing memory. Without it, copies are slower."""
    torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)  # type: ignore[no-untyped-call]
