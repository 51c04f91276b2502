"""Libraries that add the vectors of a compute group in an order of their own: the MPI library, and NCCL on GPUs."""

import socket
import time
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import Any, Protocol

import torch
from mpi4py import MPI
from torch import distributed

from rudra.compute.device import devices
from rudra.compute.device.streams import Pending
from rudra.errors import RunError
from rudra.mpi.failures import LEARNS_S
from topologies import Plan

MEETS_S = 120.0
"""Time that the ranks of a group may take to meet."""


class Sum(Protocol):
    """Sum of vectors that is under way. Test it like a request."""

    def Test(self, status: MPI.Status | None = None) -> bool:
        """Returns whether it is complete.

        Raises:
            MPI.Exception: A rank of the group has died.
        """


class Library(Protocol):
    """Library that adds vectors of the ranks of a group."""

    def begin(self, vector: torch.Tensor) -> Sum:
        """Begins to add the vectors of all ranks, in place. All ranks begin the same sums in the same order.

        Args:
            vector: (size,) float32.
        """

    def lose(self, ranks: Collection[int]) -> None:
        """Ends pending sums if the group has lost some of these ranks."""

    def close(self) -> None:
        """Frees what the library holds."""


class MpiLibrary:
    """The MPI library, which adds vectors in main memory.

    Args:
        comm: communicator of the group.
    """

    def __init__(self, comm: MPI.Comm) -> None:
        self._comm = comm

    def begin(self, vector: torch.Tensor) -> Sum:
        return self._comm.Iallreduce(MPI.IN_PLACE, vector.numpy(), MPI.SUM)

    def lose(self, ranks: Collection[int]) -> None:
        """MPI itself ends its sums."""

    def close(self) -> None:
        self._comm.Free()


class DeviceLibrary:
    """Library that adds vectors on the devices of a group's ranks. All ranks of the group create theirs together.

    Args:
        comm: communicator of the group.
        ranks: the ranks of the group in the communicator of all ranks.
        device: device of this rank.

    Raises:
        RuntimeError: The library does not work.
    """

    def __init__(self, comm: MPI.Comm, ranks: Collection[int], device: torch.device) -> None:
        self._ranks, self._lost = ranks, False
        self._store = _store(comm)
        self._collective = devices.kind_of(device).collective(device, self._store, comm.rank, comm.size)
        first = self._collective.sum(torch.ones(1, device=device))  # the library connects the ranks in its first sum
        first.numbers()

    def begin(self, vector: torch.Tensor) -> Sum:
        return _DeviceSum(self._collective.sum(vector), lambda: self._lost)

    def lose(self, ranks: Collection[int]) -> None:
        if not self._lost and not {*ranks}.isdisjoint(self._ranks):
            self._lost = True
            self._collective.abort()

    def close(self) -> None:
        if not self._lost:
            self._collective.close()


class _DeviceSum:
    """Sum of a device's library.

    The library may notice a death before MPI reports it. If MPI does not report one in time, the run ends.

    Args:
        work: the sum.
        lost: returns whether MPI has reported a death.
    """

    def __init__(self, work: Pending, lost: Callable[[], bool]) -> None:
        self._work, self._lost = work, lost
        self._error: RuntimeError | None = None
        self._since = 0.0

    def Test(self, status: MPI.Status | None = None) -> bool:
        if self._lost():
            raise MPI.Exception(MPI.ERR_PROC_FAILED)
        if self._error is None:
            try:
                return self._work.done()
            except RuntimeError as error:
                self._error, self._since = error, time.monotonic()
        if time.monotonic() > self._since + LEARNS_S:
            reason = str(self._error).partition("\n")[0]
            raise RunError(f"the library that adds gradients on devices has failed: {reason}") from self._error
        return False


def _store(comm: MPI.Comm) -> Any:
    """Returns a store of the ranks of a group. Its address travels over MPI."""
    names = comm.allgather(socket.gethostname())
    host, limit = "127.0.0.1" if len({*names}) == 1 else names[0], timedelta(seconds=MEETS_S)
    about: dict[str, Any] = {"world_size": comm.size, "wait_for_workers": False, "timeout": limit}
    store: Any = distributed.TCPStore  # type: ignore[attr-defined]
    mine = store(host, 0, is_master=True, **about) if not comm.rank else None
    port = comm.bcast(mine.port if mine is not None else 0)
    return mine if mine is not None else store(host, port, is_master=False, **about)


def library_of(comm: MPI.Comm, plan: Plan, roles: Collection[int], device: torch.device | None) -> Library | None:
    """Returns the library that adds for these roles' group. None: the ranks add. All ranks call this together.

    Args:
        comm: communicator of all ranks.
        plan: role assignment.
        roles: ids of this rank's roles.
        device: device of this rank if a library of devices adds. None: the MPI library does.

    Raises:
        RuntimeError: The library does not work.
    """
    if not plan.groups or plan.reduction != "mpi":
        return None
    places = ((group, place) for group, of in enumerate(plan.groups) for place, role in enumerate(of) if role in roles)
    group, place = next(places, (MPI.UNDEFINED, 0))
    mine = comm.Split(group, place)
    if mine == MPI.COMM_NULL:
        return None
    if device is None:
        return MpiLibrary(mine)
    try:
        return DeviceLibrary(mine, {plan.roles[role].world_rank for role in plan.groups[group]}, device)
    finally:
        mine.Free()
