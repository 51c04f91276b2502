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


class _Arriving:
    """State of one owner that has not been received completely."""

    def __init__(self, rank: int, tag: int) -> None:
        self.rank, self.tag = rank, tag
        self.tensors: dict[str, NDArray[np.float32]] | None = None
        self.requests: list[MPI.Request] = []

    @property
    def complete(self) -> bool:
        return self.tensors is not None and not self.requests


class StateTransfer:
    """Transfer of the states of all `Plan.keepers` to the rank of the first one. Nothing blocks: `poll` advances it.

    Args:
        comm: communicator of all ranks of the job.
        plan: role assignment.
        tag: returns the tag for the state of a role.
    """

    def __init__(self, comm: MPI.Comm, plan: Plan, tag: Callable[[int], int]) -> None:
        self._comm, self._plan, self._tag = comm, plan, tag
        self._sends: list[tuple[MPI.Request, object]] = []  # with the memory that they read
        self._arriving: list[_Arriving] = []
        self._done: Callable[[list[NamedVectors] | None], None] | None = None

    @property
    def busy(self) -> bool:
        return bool(self._sends) or self._done is not None

    def give(self, role: int, state: NamedVectors) -> None:
        """Begins to send the state of an owner, which must not change until the next state is requested."""
        to, tag = self._plan.roles[self._plan.server].world_rank, self._tag(role)
        about = msgspec.msgpack.encode([(name, len(tensor)) for name, tensor in state.items()])
        for what in (about, *state.values()):
            # Completes when the receiver has matched it. A rank that ends earlier counts as dead, and its messages are
            # lost.
            self._sends.append((self._comm.Issend(what, to, tag), what))

    def gather(self, done: Callable[[list[NamedVectors] | None], None]) -> None:
        """Begins to receive the states of the other owners. Calls `done` with them, in the order of the parts.

        If one of them dies first, calls `done` with None.
        """
        others = self._plan.keepers[1:]
        self._arriving = [_Arriving(self._plan.roles[role].world_rank, self._tag(role)) for role in others]
        self._done = done
        self.poll()

    def poll(self) -> None:
        """Advances the transfer as far as possible without blocking."""
        self._sends = [(request, what) for request, what in self._sends if outcome(request) == "no"]
        if self._done is None:
            return
        for arriving in self._arriving:
            self._take(arriving)
        if all(arriving.complete for arriving in self._arriving):
            done, self._done = self._done, None
            done([arriving.tensors or {} for arriving in self._arriving])

    def _take(self, arriving: _Arriving) -> None:
        if arriving.tensors is not None:
            arriving.requests = [request for request in arriving.requests if outcome(request) == "no"]
            return
        status = MPI.Status()
        try:
            if not self._comm.Iprobe(arriving.rank, arriving.tag, status):
                return
        except MPI.Exception:  # a loss that is not acknowledged yet
            return
        data = bytearray(status.Get_count(MPI.BYTE))
        self._comm.Recv(data, arriving.rank, arriving.tag)
        sizes = msgspec.msgpack.decode(data, type=list[tuple[str, int]])
        arriving.tensors = {name: np.full(size, 0, np.float32) for name, size in sizes}
        receive = self._comm.Irecv
        arriving.requests = [receive(tensor, arriving.rank, arriving.tag) for tensor in arriving.tensors.values()]

    def lose(self, ranks: Collection[int]) -> None:
        """Handles dead ranks. After the death of a sender the gathering fails, because other senders may never send."""
        done = self._done
        if done is not None and any(each.rank in ranks for each in self._arriving):
            self._done = None
            done(None)

    def finish(self) -> None:
        """Waits for all pending transfers."""
        while self.busy:
            self.poll()
            time.sleep(1e-3)
