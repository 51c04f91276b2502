"""Transfer of the roles' states for a checkpoint to the rank that writes it."""

import time
from collections.abc import Callable, Collection

import msgspec
import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from rudra.core.layout import NamedVectors
from rudra.mpi.failures import outcome
from topologies import Plan

FINAL = -1
"""Stands for the update of the states at the end of a run, which only the first owner knows."""


class _Arriving:
    """State of one owner that has not been received completely."""

    def __init__(self, rank: int, tag: int) -> None:
        self.rank, self.tag = rank, tag
        self.forget()

    def forget(self) -> None:
        self.timestamp = FINAL
        self.tensors: dict[str, NDArray[np.float32]] | None = None
        self.requests: list[MPI.Request] = []


class StateTransfer:
    """Transfer of the states of all `Plan.keepers` to the rank of the first one. Nothing blocks: `poll` advances it.

    Owners survive a regrouping, and so does a transfer: the checkpoint of the last update before a change is complete
    after it. A state names its update, so that states of a checkpoint that was given up are dropped.

    Args:
        comm: communicator of all ranks of the job.
        plan: role assignment.
        tag: returns the tag for the state of a role.
    """

    def __init__(self, comm: MPI.Comm, plan: Plan, tag: Callable[[int], int]) -> None:
        self._comm, self._plan, self._tag = comm, plan, tag
        self._sends: list[tuple[MPI.Request, object]] = []  # with the memory that they read
        self._arriving: dict[int, _Arriving] = {}  # by role
        self._wanted = FINAL
        self._done: Callable[[list[NamedVectors] | None], None] | None = None

    @property
    def busy(self) -> bool:
        return bool(self._sends) or self._done is not None

    def follow(self, plan: Plan) -> None:
        """Follows another plan."""
        self._plan = plan

    def give(self, role: int, timestamp: int, state: NamedVectors) -> None:
        """Begins to send an owner's state of an update. It must not change until the next state is requested."""
        to, tag = self._plan.roles[self._plan.server].world_rank, self._tag(role)
        about = msgspec.msgpack.encode((timestamp, [(name, len(tensor)) for name, tensor in state.items()]))
        for what in (about, *state.values()):
            # Completes when the receiver has matched it. A rank that ends earlier counts as dead, and its messages are
            # lost.
            self._sends.append((self._comm.Issend(what, to, tag), what))

    def gather(self, timestamp: int, done: Callable[[list[NamedVectors] | None], None]) -> None:
        """Begins to receive the other owners' states of an update. Calls `done` with them, in the order of the parts.

        If one of them dies first, calls `done` with None.
        """
        self._wanted, self._done = timestamp, done
        self.poll()

    def poll(self) -> None:
        """Advances the transfer as far as possible without blocking."""
        self._sends = [(request, what) for request, what in self._sends if outcome(request) == "no"]
        if self._done is None:
            return
        found = [self._take(role) for role in self._plan.keepers[1:]]
        if all(tensors is not None for tensors in found):
            done, self._done = self._done, None
            self._arriving.clear()
            done([tensors or {} for tensors in found])

    def _take(self, role: int) -> NamedVectors | None:
        """Receives more of an owner's state. Returns the wanted state if it is complete."""
        if role not in self._arriving:
            self._arriving[role] = _Arriving(self._plan.roles[role].world_rank, self._tag(role))
        arriving = self._arriving[role]
        arriving.requests = [request for request in arriving.requests if outcome(request) == "no"]
        if arriving.tensors is not None and not arriving.requests:
            if arriving.timestamp == self._wanted:
                return arriving.tensors
            arriving.forget()
        if arriving.tensors is None:
            self._begin(arriving)
        return None

    def _begin(self, arriving: _Arriving) -> None:
        """Begins to receive a state if one is coming."""
        status = MPI.Status()
        try:
            if not self._comm.Iprobe(arriving.rank, arriving.tag, status):
                return
        except MPI.Exception:  # a loss that is not acknowledged yet
            return
        data = bytearray(status.Get_count(MPI.BYTE))
        self._comm.Recv(data, arriving.rank, arriving.tag)
        arriving.timestamp, sizes = msgspec.msgpack.decode(data, type=tuple[int, list[tuple[str, int]]])
        arriving.tensors = {name: np.full(size, 0, np.float32) for name, size in sizes}
        receive = self._comm.Irecv
        arriving.requests = [receive(tensor, arriving.rank, arriving.tag) for tensor in arriving.tensors.values()]

    def lose(self, ranks: Collection[int]) -> None:
        """Handles dead ranks. After the death of a sender the gathering fails, because other senders may never send."""
        self._arriving = {role: each for role, each in self._arriving.items() if each.rank not in ranks}
        done = self._done
        if done is not None and any(self._plan.roles[role].world_rank in ranks for role in self._plan.keepers[1:]):
            self._done = None
            done(None)

    def finish(self) -> None:
        """Waits for all pending transfers."""
        while self.busy:
            self.poll()
            time.sleep(1e-3)
