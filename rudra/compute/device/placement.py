"""Devices of ranks, and placement of the vectors that travel."""

from collections.abc import Collection, Sequence
from typing import Literal

import torch

from rudra.compute.device.devices import DEVICES, here, wanted_kind
from rudra.compute.device.kind import CPU
from rudra.errors import ConfigError
from topologies import Plan

Placing = Literal["device", "staged", "direct"]
"""Placement of buffers. "device": on the computing device. "staged": in main memory, where MPI reads and writes, with
copies on the device (`Staging`). "direct": on the device, where MPI reads and writes, for roles that compute there, and
in main memory for others."""


def agreed(wanted: str, plan: Plan, counts: Sequence[int], hosts: Sequence[str], on_cpu: Collection[int] = ()) -> str:
    """Decides the kind of device that learners compute on. All use it, except those that must use the CPU, or none.

    Args:
        wanted: `cluster.device` of the job.
        plan: Role assignment.
        counts: Number of devices of the wanted kind that each rank sees.
        hosts: Host of each rank.
        on_cpu: Learners that need no such device.

    Raises:
        ConfigError: A kind is wanted, and some learner has no such device.
    """
    wanting = [plan.roles[learner] for learner in plan.whole.learners if learner not in on_cpu]
    without = [role for role in wanting if not counts[role.world_rank]]
    if wanted not in ("cpu", "auto") and without:
        rank = without[0].world_rank
        who = f"{without[0].title} on {hosts[rank]}"
        none = f"torch sees no {DEVICES[wanted].noun}"
        raise ConfigError(f"[cluster] device = '{wanted}': {none} for {who}; valid there: cpu")
    return "cpu" if without else wanted_kind(wanted)


def of_rank(
    kind: str,
    rank: int,
    plan: Plan,
    places: Sequence[int],
    count: int,
    on_cpu: Collection[int] = (),
    others: Collection[int] = (),
) -> torch.device:
    """Returns the device of one rank if learners compute on devices of a kind.

    The learners of a node, and then the statistics server, take its devices in turn.

    Args:
        kind: Kind of device.
        rank: Rank to place.
        plan: Role assignment.
        places: Node of every rank, any numbers.
        count: Number of such devices that the rank sees.
        on_cpu: Learners that need no such device. Roles on their ranks use none.
        others: Ranks whose servers also compute on such devices, and not in main memory.
    """
    if kind == "cpu":
        return CPU
    ranks = [plan.roles[role].world_rank for role in (*plan.whole.learners, plan.statistics)]
    without = {plan.roles[role].world_rank for role in on_cpu}
    computing = (other for other in (*ranks, *sorted(others)) if other not in without)
    near = list(dict.fromkeys(other for other in computing if places[other] == places[rank]))
    return DEVICES[kind].device(near.index(rank) % count) if count and rank in near else CPU


def virtual_kind(wanted: str, *, window: bool) -> str:
    """Returns the kind of device of a process that computes for all roles, in virtual time.

    Args:
        wanted: `cluster.device` of the job.
        window: Whether the weights are in windows.

    Raises:
        ConfigError: A kind is wanted, and no such device is there or is used.
    """
    there, needed = here(wanted), wanted not in ("cpu", "auto")
    where = f"[cluster] device = '{wanted}'"
    if needed and window:
        raise ConfigError(f"{where}: windows of virtual time are in main memory; valid: cpu, auto")
    if needed and not there:
        raise ConfigError(f"{where}: torch sees no {DEVICES[wanted].noun} here; valid: cpu, auto")
    return wanted_kind(wanted) if there and not window else "cpu"


def virtual(wanted: str, *, window: bool) -> torch.device:
    """Returns the device of such a process. Arguments and errors as for `virtual_kind`."""
    return DEVICES[virtual_kind(wanted, window=window)].device(0)


def replaying(recorded: str, *, window: bool) -> str:
    """Returns the kind of device of a replay: the kind of the run if such a device is here, else the CPU.

    Args:
        recorded: Kind of device of the run.
        window: As for `virtual_kind`.
    """
    return recorded if here(recorded) and not window else "cpu"


def placing(device: torch.device, plan: Plan, *, transport: str | None) -> Placing:
    """Returns the placement of buffers for a rank that computes on a device.

    Args:
        device: The device.
        plan: Role assignment.
        transport: Transport of the tensors that others read: "ipc" if they are copied from the device for each pair of
            ranks. None: there are none.
    """
    if device.type == "cpu" or plan.local or transport == "ipc":
        return "device"
    return "direct" if transport == "mpi" else "staged"
