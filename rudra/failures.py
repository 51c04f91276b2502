"""Ranks that die while others go on: ULFM, of an mpirun that was started with it.

What was found of Open MPI's requests, and what follows: a request for a rank that has died raises an error when it is
tested, once, and is void then. One that anybody may answer raises another error until the loss is acknowledged, and
then goes on; but if it has matched a tensor of a rank that dies before it is delivered, it hangs for ever. So after a
loss tensors from anybody are received by matched probes, which know the sender. `Testsome` hides which requests
failed. Collectives fail on a communicator with a dead rank, whether the loss is acknowledged or not.
"""

import atexit
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, NoReturn

if TYPE_CHECKING:
    from mpi4py import MPI

ULFM = ("--with-ft", "ulfm")
"""Options of mpirun."""

TCP_FLAGS = ("--mca", "btl_tcp_flags", "send,inplace,need-ack,need-csum,hetero-rdma")
"""Open MPI's defaults without `put`, in which it deadlocks when a connection breaks."""

Outcome = Literal["done", "no", "failed"]


def survivable() -> bool:
    """Whether this rank outlives others."""
    return os.environ.get("OMPI_MCA_mpi_ft_enable") == "1"  # noqa: SIM112


class Losses:
    """Which ranks of a communicator have died.

    Args:
        comm: in question.
    """

    def __init__(self, comm: "MPI.Comm") -> None:
        self._comm = comm
        self.active = survivable()
        self.dead: set[int] = set()

    def look(self) -> list[int]:
        """Ranks that are found dead now; MPI goes on without them. Costs a microsecond, and somebody must poll MPI."""
        from mpi4py import MPI

        group = self._comm.Get_failed()
        count = group.Get_size()
        if count == len(self.dead):
            group.Free()
            return []
        mine = self._comm.Get_group()
        ranks = MPI.Group.Translate_ranks(group, list(range(count)), mine)
        self._comm.Ack_failed(count)  # no more than were seen here
        mine.Free()
        group.Free()
        found = [rank for rank in ranks if rank not in self.dead]
        self.dead.update(found)
        return found


def outcome(request: "MPI.Request", status: "MPI.Status | None" = None) -> Outcome:
    """What has become of a request; "failed": its other end has died, and the request is void."""
    from mpi4py import MPI

    try:
        return "done" if request.Test(status) else "no"
    except MPI.Exception as error:
        kind = error.Get_error_class()
        if kind == MPI.ERR_PROC_FAILED_PENDING:  # goes on when the loss is acknowledged
            return "no"
        if kind in {MPI.ERR_PROC_FAILED, MPI.ERR_REVOKED}:
            return "failed"
        raise


@contextmanager
def end_with_the_dead() -> Iterator[None]:
    """Ends all ranks, with one line, where one has died while they set up together, or part."""
    from mpi4py import MPI

    try:
        yield
    except MPI.Exception as error:
        if error.Get_error_class() != MPI.ERR_PROC_FAILED:
            raise
        losses = Losses(MPI.COMM_WORLD)
        losses.look()
        if MPI.COMM_WORLD.rank == min(set(range(MPI.COMM_WORLD.size)) - losses.dead):
            dead = ", ".join(f"rank {rank}" for rank in sorted(losses.dead))
            print(f"rudra: {dead} died before training began", file=sys.stderr, flush=True)
        end_everybody(MPI.COMM_WORLD, 1)


def outlive() -> None:
    """Remembers that this rank has outlived another: MPI's own end might wait for the dead."""
    global outlived
    if not outlived:
        outlived = True
        atexit.register(leave, 0)


def leave(code: int) -> int:
    """The end of a process; a rank that has outlived others goes at once. Else the code is for the caller."""
    if outlived:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def end_everybody(comm: "MPI.Comm", code: int) -> NoReturn:
    """Ends all ranks, this one among them. Under ULFM an abort ends the rank that calls it, so its launcher is told."""
    sys.stdout.flush()
    sys.stderr.flush()
    if survivable():
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(2.0)
    comm.Abort(code)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


outlived = False
"""Whether this rank has outlived another one, so that MPI must not be left by its own door."""
