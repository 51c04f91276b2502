"""Where ranks compute: on the GPUs of their nodes or on the CPU, and where the vectors are that travel."""

from collections.abc import Collection, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from rudra.errors import ConfigError
from topologies import Plan

CPU = torch.device("cpu")

Placing = Literal["device", "staged", "direct"]
"""Where buffers are: all on the device that computes; all in main memory, where MPI reads and writes, while those who
compute do so on copies (`Staging`); those of roles that compute on the device, which MPI reads and writes, and others
in main memory."""


def gpus_here() -> int:
    """GPUs that torch sees in this process."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def agreed(
    wanted: str, plan: Plan, gpus: Sequence[int], hosts: Sequence[str], on_cpu: Collection[int] = ()
) -> Literal["cpu", "cuda"]:
    """Where learners compute: on GPUs, but for those that are to compute on the CPU; or none of them.

    Args:
        wanted: `cluster.device` of the job.
        plan: who is who.
        gpus: that each rank sees.
        hosts: on which each rank is.
        on_cpu: learners that need no GPU.

    Raises:
        ConfigError: a GPU is wanted, and some learner has none.
    """
    wanting = [plan.roles[learner] for learner in plan.learners if learner not in on_cpu]
    without = [role for role in wanting if not gpus[role.world_rank]]
    if wanted == "cuda" and without:
        rank = without[0].world_rank
        who = f"{without[0].title} on {hosts[rank]}"
        raise ConfigError(f"[cluster] device = 'cuda': torch sees no GPU for {who}; valid there: cpu")
    return "cpu" if wanted == "cpu" or without else "cuda"


def of_rank(rank: int, plan: Plan, places: Sequence[int], gpus: int, on_cpu: Collection[int] = ()) -> torch.device:
    """The device of one rank where learners compute on GPUs.

    Learners of a node, and then the statistics server, take its GPUs in turn; other servers compute in main memory.

    Args:
        rank: in question.
        plan: who is who.
        places: node of every rank, any numbers.
        gpus: that the rank sees.
        on_cpu: learners that need no GPU; one that is on a rank with another computes where that does.
    """
    wanting = [learner for learner in plan.learners if learner not in on_cpu]
    computing = (plan.roles[role].world_rank for role in (*wanting, plan.statistics))
    here = list(dict.fromkeys(other for other in computing if places[other] == places[rank]))
    return torch.device("cuda", here.index(rank) % gpus) if gpus and rank in here else CPU


def virtual(wanted: str, *, window: bool) -> torch.device:
    """The device on which a process computes that does so for all roles, in virtual time.

    Args:
        wanted: `cluster.device` of the job.
        window: whether the weights are in windows.

    Raises:
        ConfigError: a GPU is wanted, and there is none, or none is used.
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
    """Where the buffers of a rank are that computes on a device."""
    return "device" if device.type == "cpu" else "direct" if gpu_aware_mpi else "staged"


def finish(device: torch.device) -> None:
    """Waits until the device has done what it was given: MPI knows nothing of its streams."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def page_locked(length: int) -> npt.NDArray[np.uint8]:
    """Bytes in main memory that a GPU copies at full speed and beside other work."""
    return torch.zeros(length, dtype=torch.uint8, pin_memory=True).numpy()


def lock_pages(memory: npt.NDArray[np.uint8]) -> None:
    """The same of memory that is there already; without it, copies are slower."""
    torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)  # type: ignore[no-untyped-call]
