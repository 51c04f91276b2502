"""Ranks that die while others go on: ULFM, of an mpirun that was started with it.

What was found of Open MPI's requests, and what follows: a request for a rank that has died raises an error when it is
tested, once, and is void then. One that anybody may answer raises another error until the loss is acknowledged, and
then continues. If it has matched a tensor of a rank that dies before it is delivered, it hangs for ever. So after a
loss tensors from anybody are received by matched probes, which know the sender. If it has raised the error and is
complete before it is tested again, every later test raises the error, although the tensor is here, and `Get_status`
alone tells. `Testsome` hides which requests failed. Collectives fail on a communicator with a dead rank, whether the
loss is acknowledged or not.
"""

import array
import atexit
import fcntl
import math
import os
import re
import select
import signal
import socket
import sys
import termios
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn

from rudra.errors import RudraError
from rudra.log import log
from rudra.mpi.forkserver import launcher, process_of
from rudra.mpi.relay import DIED

if TYPE_CHECKING:
    from mpi4py import MPI

ULFM = ("--with-ft", "ulfm")
"""Options of mpirun."""

TCP_FLAGS = ("--mca", "btl_tcp_flags", "send,inplace,need-ack,need-csum,hetero-rdma")
"""Open MPI's defaults without `put`, in which it deadlocks when a connection breaks."""

WATCH_S, APPEAR_S = 0.5, 5.0
"""How often the ranks of a node are looked after while MPI starts, and how long all of them may take to appear."""

PAUSE_S = 50e-6
"""Between two looks at a request that is to end now."""

SPEAKS_S = 2.0
"""How long a rank leaves it to the one before it to say who has died, and to end the job."""

LEARNS_S = 10.0
"""How long a rank that something went wrong on may take to learn that another has died."""

AGAIN_S = 0.2
"""Between two looks at who is there: what seems to be gone may be back, and who dies together is named together."""

HEARD_S = 2.0
"""How long the launcher may take to read what a rank has said last, before it is told to end."""

RequestState = Literal["done", "no", "failed"]


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

    def wait(self, request: "MPI.Request") -> None:
        """Until a request is over, or a rank has died, with whom it may wait for ever."""
        while outcome(request) == "no" and not self.dead:
            time.sleep(PAUSE_S)
            if self.active:
                self.look()


def outcome(request: "MPI.Request", status: "MPI.Status | None" = None) -> RequestState:
    """What has become of a request; "failed": its other end has died, and the request is void."""
    try:
        return "done" if request.Test(status) else "no"
    except Exception as error:
        from mpi4py import MPI

        if not isinstance(error, MPI.Exception):
            raise
        kind = error.Get_error_class()
        if kind == MPI.ERR_PROC_FAILED_PENDING:
            # It continues when the loss is acknowledged. If it is complete, Open MPI reports the error again and again.
            if not request.Get_status(status):
                return "no"
            with suppress(MPI.Exception):
                request.Test()  # so that a persistent request that has ended since can be started again
            return "done"
        if kind in {MPI.ERR_PROC_FAILED, MPI.ERR_REVOKED}:
            return "failed"
        raise


@contextmanager
def watched_start() -> Iterator[None]:
    """For MPI's start, in which ranks would wait for ever, in C, for one that dies meanwhile.

    So the first two ranks of each node have a process beside them that looks after those there, and ends the job.
    """
    place = int(os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", "0"))
    if not survivable() or place > 1:
        yield
        return
    launched_by = launcher()
    started, end = os.pipe()
    watcher = os.fork()
    if not watcher:
        os.close(end)
        with suppress(BaseException):
            _watch(launched_by, started, patience_s=WATCH_S + place * APPEAR_S)
        os._exit(0)
    os.close(started)
    try:
        yield
    finally:
        with suppress(OSError):  # it has ended already
            os.write(end, b"!")
            os.waitpid(watcher, 0)
        os.close(end)


def _watch(launched_by: int, started: int, patience_s: float) -> None:
    """Ends the job, with one line, if a rank that a launcher has started here ends before MPI has started.

    Others may do so before; they have this much time.
    """
    own, ranks = int(os.environ["OMPI_COMM_WORLD_RANK"]), int(os.environ["OMPI_COMM_WORLD_SIZE"])
    here = int(os.environ["OMPI_COMM_WORLD_LOCAL_SIZE"])
    if _rank_of(launched_by) is not None:  # a wrapper around this rank, below which it has no neighbours
        here = 1
    roll = RollCall(launched_by, ranks, here=here, seen={own})
    while not _begins(started, WATCH_S, launched_by):
        if not launcher_lives(launched_by):  # the job has ended
            return
        roll.look()
        if not (roll.dead or roll.unseen):
            continue
        if _begins(started, patience_s, launched_by):  # it died afterwards
            return
        roll.look_again()
        if launcher_lives(launched_by) and (roll.dead or roll.unseen):
            unseen = f"{roll.unseen} of the {here} ranks on {socket.gethostname()}"
            log.error(f"{named_ranks(roll.dead) or unseen} {DIED}")
            heard()
            os.kill(launched_by, signal.SIGTERM)
            return


def _begins(started: int, within_s: float, launched_by: int) -> bool:
    """Whether MPI starts in time, as the rank beside says; it says nothing if it dies."""
    if not select.select([started], [], [], within_s)[0]:
        return False
    if os.read(started, 1):
        return True
    end = time.monotonic() + within_s
    while time.monotonic() < end and launcher_lives(launched_by):
        time.sleep(min(within_s, 0.1))
    return False


class RollCall:
    """Which ranks of this node are there, and which are no more, by their own processes.

    What stands for a rank may be there longer. Dead is who is missed by two looks, one after the other: the kernel may
    leave out a child of a process that another child leaves. Who was never seen counts, too, once all must have come.

    Args:
        launched_by: the process that starts them.
        ranks: of the whole run.
        here: how many of them are to be on this node; None: that is found out.
        seen: those that are known to have come.
        come: all have.

    Attributes:
        seen: those that have come.
        alive: those that are there.
        stopped: those of them whose process, or the one that stands for it, is stopped.
        dead: those that are no more.
        first: those that were missed first, and have not come back.
        here: how many are to be on this node; None: nobody has told yet.
    """

    def __init__(
        self, launched_by: int, ranks: int, *, here: int | None = None, seen: Iterable[int] = (), come: bool = False
    ) -> None:
        self._launched_by, self._ranks = launched_by, ranks
        self.here = here
        self.seen, self.alive, self.dead, self.stopped = set(seen), set[int](), set[int](), set[int]()
        self.first, self._missed = set[int](), set[int]()
        self._come_at = -math.inf if come else math.inf  # when all must have

    def look(self) -> None:
        """Looks once."""
        started = started_below(self._launched_by)
        if started and self._come_at == math.inf:
            self._come_at = time.monotonic() + APPEAR_S
        processes = {rank: process_of(process) for rank, process in started.items()}
        self.alive = {rank for rank, process in processes.items() if lives(process)}
        self.stopped = {rank for rank in self.alive if is_stopped(processes[rank]) or is_stopped(started[rank])}
        self.seen |= started.keys()
        if self.here is None:
            self.here = next(filter(None, map(neighbours, started.values())), None)
        before, self._missed = self._missed, self._expected - self.alive
        self.dead = self._missed & before
        self.first = self.first & self._missed or set(self._missed)

    def look_again(self) -> None:
        """Looks until it is certain who is there now."""
        self.look()
        time.sleep(AGAIN_S)
        self.look()

    @property
    def _all_come(self) -> bool:
        return self.here is not None and time.monotonic() > self._come_at

    @property
    def _expected(self) -> set[int]:
        return set(range(self._ranks)) if self._all_come and self.here == self._ranks else self.seen

    @property
    def unseen(self) -> int:
        """How many have never been seen here and can no longer come; of a run on several nodes nobody knows which."""
        return self.here - len(self.seen) if self.here is not None and self._all_come else 0


def ranks_below(pid: int) -> dict[int, int]:
    """World rank -> process in which it runs, of the ranks on this node that come from a process."""
    return {rank: process_of(started) for rank, started in started_below(pid).items()}


def started_below(pid: int) -> dict[int, int]:
    """World rank -> process that a process, or one that it started, has started for it: the rank, or its proxy.

    What a rank itself has started is not looked at, because it seems to be that rank. Read from /proc by hand: psutil
    looks through all processes of the node for the children of one.
    """
    found: dict[int, int] = {}
    for child in _children(pid):
        rank = _rank_of(child)
        found |= started_below(child) if rank is None else {rank: child}
    return found


def _children(pid: int) -> set[int]:
    """Of a process; read twice, for a list misses one that stays when another leaves meanwhile."""
    found: set[int] = set()
    for _ in range(2):
        with suppress(OSError):  # it has ended
            for thread in os.listdir(f"/proc/{pid}/task"):
                with suppress(OSError):  # and what a thread had started that has ended is another's now
                    found.update(map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split()))
    return found


def lives(process: int) -> bool:
    """Whether a process runs, and is not only waited for."""
    return _state(process) not in {"", "Z", "X"}


def launcher_lives(launched_by: int) -> bool:
    """Whether what `launcher` found still runs, and is no init that took in the ranks of one that ended before."""
    found = re.fullmatch(r"prterun-(.+)-(\d+)@\d+", os.environ.get("PMIX_NAMESPACE", ""))
    if found and found[1] == socket.gethostname():
        return lives(int(found[2]))
    return launched_by > 1 and lives(launched_by)


def is_stopped(process: int) -> bool:
    """Whether a process is stopped, as by SIGSTOP or a debugger."""
    return _state(process) in {"T", "t"}


def _state(process: int) -> str:
    """The letter by which the kernel tells the state of a process; empty: there is no such process."""
    with suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def _rank_of(pid: int) -> int | None:
    """Which rank a process is; None: none, or it has ended."""
    return _told(pid, b"OMPI_COMM_WORLD_RANK")


def neighbours(pid: int) -> int | None:
    """How many ranks there are on the node of a process that was started for one; None: it has ended."""
    return _told(pid, b"OMPI_COMM_WORLD_LOCAL_SIZE")


def _told(pid: int, name: bytes) -> int | None:
    """A number in a process's environment."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if line.startswith(name + b"="):
                return int(line.partition(b"=")[2])
    return None


def named_ranks(ranks: Iterable[int]) -> str:
    """Ranks, for people, with their roles as far as `roles` tells them."""
    return ", ".join(f"rank {rank} ({roles[rank]})" if rank < len(roles) else f"rank {rank}" for rank in sorted(ranks))


@contextmanager
def known(names: Sequence[str]) -> Iterator[None]:
    """Has messages of this process name ranks with their roles, meanwhile."""
    global roles
    before, roles = roles, names
    try:
        yield
    finally:
        roles = before


def stopped_neighbours(ranks: int) -> set[int]:
    """The ranks on this rank's node whose processes are stopped."""
    roll = RollCall(launcher(), ranks)
    roll.look()
    return roll.stopped


@contextmanager
def abort_on_dead_rank() -> Iterator[None]:
    """Ends all ranks, with one line, where one has died while they set up together, or part.

    A collective call with a dying rank may raise nothing and leave an object half received, which then raises whatever
    comes of it.
    """
    from mpi4py import MPI

    try:
        yield
    except RudraError:
        raise
    except Exception as error:
        if isinstance(error, MPI.Exception) and error.Get_error_class() not in failed_classes():
            raise
        dead = _learned(MPI.COMM_WORLD)
        if not dead:
            raise
        place = sorted(set(range(MPI.COMM_WORLD.size)) - dead).index(MPI.COMM_WORLD.rank)
        time.sleep(SPEAKS_S * min(place, 3))  # the first says it, and ends the others; it may be busy elsewhere
        log.error(f"{named_ranks(dead)} {DIED}")
        end_everybody(MPI.COMM_WORLD, 1)


def failed_classes() -> set[int]:
    """Errors that the death of a rank may end a call with."""
    from mpi4py import MPI

    return {MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED}


def _learned(comm: "MPI.Comm") -> set[int]:
    """Ranks that have died, as MPI finds out in time, or the kernel knows of those on this node; none: nobody has."""
    losses = Losses(comm)
    if not losses.active:
        return set()
    launched_by, here = launcher(), int(os.environ["OMPI_COMM_WORLD_LOCAL_SIZE"])
    if _rank_of(launched_by) is not None:  # a wrapper around this rank
        here = 0
    roll = RollCall(launched_by, comm.size, here=here, come=True)
    deadline = time.monotonic() + LEARNS_S
    while not (losses.look() or losses.dead or roll.dead) and time.monotonic() < deadline:
        time.sleep(AGAIN_S / 4)
        roll.look()
    if losses.dead or roll.dead:
        roll.look_again()  # others may have died with them
        losses.look()
    return losses.dead | roll.dead - {comm.rank}


def outlive() -> None:
    """Remembers that this rank has outlived another: MPI's own end might wait for the dead."""
    global outlived
    if not outlived:
        outlived = True
        atexit.register(leave, 0)


def leave(code: int) -> int:
    """The end of MPI in a process; one that has outlived other ranks goes at once. Else the code is for the caller."""
    if outlived:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    if "mpi4py.MPI" in sys.modules:
        from mpi4py import MPI

        if MPI.Is_initialized() and not MPI.Is_finalized():
            MPI.Finalize()
    return code


def end_everybody(comm: "MPI.Comm", code: int) -> NoReturn:
    """Ends all ranks, this one among them. Under ULFM an abort ends the rank that calls it, so its launcher is told."""
    sys.stdout.flush()
    sys.stderr.flush()
    heard()
    if survivable() and launcher_lives(launched_by := launcher()):
        with suppress(OSError):  # it ends
            os.kill(launched_by, signal.SIGTERM)
        time.sleep(2.0)
    comm.Abort(code)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def heard() -> None:
    """Waits until the launcher has read what this rank has said: what it has not when it is told to end may be lost."""
    unread = array.array("i", [0])
    deadline = time.monotonic() + HEARD_S
    with suppress(OSError):  # no pipe: nobody has to pass it on
        while not fcntl.ioctl(2, termios.FIONREAD, unread) and unread[0] and time.monotonic() < deadline:
            time.sleep(0.01)
    time.sleep(0.1)  # it writes what it has read in its next turn


roles: Sequence[str] = ()
"""What each world rank of this process's run is, for messages; empty: not known yet."""

outlived = False
"""Whether this rank has outlived another one, so that MPI must not be left by its own door."""
