"""Survival of rank failures with ULFM, if mpirun was started with it.

Observed behaviour of Open MPI's requests, and consequences: a request for a dead rank raises an error at its next test,
once, and is void afterwards. A request for any source raises another error until the loss is acknowledged, and then
continues. If such a request has matched a tensor and the sender dies before delivery, the request hangs for ever. So
after a loss tensors from any source are received by matched probes, which know the sender. If the request has raised
the error and completes before its next test, every later test raises the error although the tensor has arrived. Only
`Get_status` then reports the completion. `Testsome` hides which requests failed. Collectives fail on a communicator
with a dead rank, whether the loss is acknowledged or not.
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
"""Options of mpirun that enable ULFM."""

WATCH_S, APPEAR_S = 0.5, 5.0
"""Interval of checks of a node's ranks while MPI starts, and time that all of them may take to appear."""

PAUSE_S = 50e-6
"""Interval of polls of a request that should complete now."""

SPEAKS_S = 2.0
"""Time that a surviving rank leaves to the one before it to report the dead ranks and to end the job."""

LEARNS_S = 10.0
"""Time that a rank with an error may take to learn that another rank has died."""

AGAIN_S = 0.2
"""Interval of two checks of the ranks: a missing process may return, and ranks that die together are named together."""

HEARD_S = 2.0
"""Time that the launcher may take to read a rank's last output before it is asked to end."""

RequestState = Literal["done", "no", "failed"]


def survivable() -> bool:
    """Returns whether this rank survives the death of other ranks."""
    return os.environ.get("OMPI_MCA_mpi_ft_enable") == "1"  # noqa: SIM112


class Losses:
    """The ranks of a communicator that have died.

    Args:
        comm: communicator to watch.
    """

    def __init__(self, comm: "MPI.Comm") -> None:
        self._comm = comm
        self.active = survivable()
        self.dead: set[int] = set()

    def look(self) -> list[int]:
        """Returns ranks newly found dead, and acknowledges them. It costs a microsecond. Other calls must poll MPI."""
        from mpi4py import MPI

        group = self._comm.Get_failed()
        count = group.Get_size()
        if count == len(self.dead):
            group.Free()
            return []
        mine = self._comm.Get_group()
        ranks = MPI.Group.Translate_ranks(group, list(range(count)), mine)
        self._comm.Ack_failed(count)  # acknowledge no more than were seen here
        mine.Free()
        group.Free()
        found = [rank for rank in ranks if rank not in self.dead]
        self.dead.update(found)
        return found

    def wait(self, request: "MPI.Request") -> None:
        """Waits until a request is complete or a rank has died, because then the request may never complete."""
        while outcome(request) == "no" and not self.dead:
            time.sleep(PAUSE_S)
            if self.active:
                self.look()


def outcome(request: "MPI.Request", status: "MPI.Status | None" = None) -> RequestState:
    """Returns the state of a request. "failed" means that its other end has died, and the request is void."""
    try:
        return "done" if request.Test(status) else "no"
    except Exception as error:
        from mpi4py import MPI

        if not isinstance(error, MPI.Exception):
            raise
        kind = error.Get_error_class()
        if kind == MPI.ERR_PROC_FAILED_PENDING:
            # It continues after the loss is acknowledged. If it is complete, Open MPI repeats the error at every test.
            if not request.Get_status(status):
                return "no"
            with suppress(MPI.Exception):
                request.Test()  # so that a persistent request that has completed since can be started again
            return "done"
        if kind in {MPI.ERR_PROC_FAILED, MPI.ERR_REVOKED}:
            return "failed"
        raise


@contextmanager
def watched_start() -> Iterator[None]:
    """Watches the ranks of this node while MPI starts, because its C code waits for ever for a rank that dies.

    The first two ranks of each node each fork a process that checks the node's ranks, and ends the job if one is
    missing.
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
    """Ends the job, with one line, if a rank that a launcher started here ends before MPI has started.

    Another process may report it first, within `patience_s`.
    """
    own, ranks = int(os.environ["OMPI_COMM_WORLD_RANK"]), int(os.environ["OMPI_COMM_WORLD_SIZE"])
    here = int(os.environ["OMPI_COMM_WORLD_LOCAL_SIZE"])
    if _rank_of(launched_by) is not None:  # a wrapper around this rank, which has no neighbours below it
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
    """Returns whether MPI starts in time, as the watched rank reports. A dead rank reports nothing."""
    if not select.select([started], [], [], within_s)[0]:
        return False
    if os.read(started, 1):
        return True
    end = time.monotonic() + within_s
    while time.monotonic() < end and launcher_lives(launched_by):
        time.sleep(min(within_s, 0.1))
    return False


class RollCall:
    """Living and dead ranks of this node, as seen from their processes.

    A proxy process may outlive its rank. A rank counts as dead if two consecutive looks miss it, because the kernel may
    omit a child of a process while another child ends. After the time for all ranks to appear, a rank that was never
    seen also counts.

    Args:
        launched_by: process that starts the ranks.
        ranks: number of ranks of the whole run.
        here: number of ranks that should be on this node. None: it is read from a rank's process.
        seen: ranks that are known to have appeared.
        come: whether all ranks have appeared.

    Attributes:
        seen: ranks that have appeared.
        alive: ranks that are running.
        stopped: running ranks whose process or proxy is stopped.
        dead: ranks that no longer run.
        first: ranks that were missed first, and have not reappeared.
        here: number of ranks that should be on this node, or None if not known yet.
    """

    def __init__(
        self, launched_by: int, ranks: int, *, here: int | None = None, seen: Iterable[int] = (), come: bool = False
    ) -> None:
        self._launched_by, self._ranks = launched_by, ranks
        self.here = here
        self.seen, self.alive, self.dead, self.stopped = set(seen), set[int](), set[int](), set[int]()
        self.first, self._missed = set[int](), set[int]()
        self._come_at = -math.inf if come else math.inf  # deadline for all ranks to appear

    def look(self) -> None:
        """Updates all attributes from the processes of this node."""
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
        """Looks twice, so that the result is certain."""
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
        """Number of ranks that never appeared here and no longer can. With several nodes their numbers are unknown."""
        return self.here - len(self.seen) if self.here is not None and self._all_come else 0


def ranks_below(pid: int) -> dict[int, int]:
    """Returns world rank -> process of the rank, for the ranks on this node that descend from a process."""
    return {rank: process_of(started) for rank, started in started_below(pid).items()}


def started_below(pid: int) -> dict[int, int]:
    """Returns world rank -> process that was started for it (rank or proxy), for all descendants of a process.

    Children of a rank are left out, because they look like that rank. This reads /proc directly, because psutil looks
    through all processes of the node for the children of one.
    """
    found: dict[int, int] = {}
    for child in _children(pid):
        rank = _rank_of(child)
        found |= started_below(child) if rank is None else {rank: child}
    return found


def _children(pid: int) -> set[int]:
    """Returns the children of a process. Reads twice, because a list may omit a child while another one ends."""
    found: set[int] = set()
    for _ in range(2):
        with suppress(OSError):  # it has ended
            for thread in os.listdir(f"/proc/{pid}/task"):
                with suppress(OSError):  # children of an ended thread now belong to another thread
                    found.update(map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split()))
    return found


def lives(process: int) -> bool:
    """Returns whether a process runs and is no zombie."""
    return _state(process) not in {"", "Z", "X"}


def launcher_lives(launched_by: int) -> bool:
    """Returns whether the process found by `launcher` still runs, and is not an init that adopted orphaned ranks."""
    found = re.fullmatch(r"prterun-(.+)-(\d+)@\d+", os.environ.get("PMIX_NAMESPACE", ""))
    if found and found[1] == socket.gethostname():
        return lives(int(found[2]))
    return launched_by > 1 and lives(launched_by)


def is_stopped(process: int) -> bool:
    """Returns whether a process is stopped, as by SIGSTOP or a debugger."""
    return _state(process) in {"T", "t"}


def _state(process: int) -> str:
    """Returns the kernel's letter for the state of a process, or an empty text if there is no process."""
    with suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def _rank_of(pid: int) -> int | None:
    """Returns the world rank of a process, or None if it is no rank or has ended."""
    return _environment_number(pid, b"OMPI_COMM_WORLD_RANK")


def neighbours(pid: int) -> int | None:
    """Returns the number of ranks on the node of a rank's process or proxy, or None if the process has ended."""
    return _environment_number(pid, b"OMPI_COMM_WORLD_LOCAL_SIZE")


def _environment_number(pid: int, name: bytes) -> int | None:
    """Returns a number from the environment of a process."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if line.startswith(name + b"="):
                return int(line.partition(b"=")[2])
    return None


def named_ranks(ranks: Iterable[int]) -> str:
    """Formats ranks for people, with their roles if `roles` has them."""
    return ", ".join(f"rank {rank} ({roles[rank]})" if rank < len(roles) else f"rank {rank}" for rank in sorted(ranks))


@contextmanager
def known(names: Sequence[str]) -> Iterator[None]:
    """Has messages of this process name ranks with their roles inside the context."""
    global roles
    before, roles = roles, names
    try:
        yield
    finally:
        roles = before


def stopped_neighbours(ranks: int) -> set[int]:
    """Returns the ranks on this rank's node whose processes are stopped."""
    roll = RollCall(launcher(), ranks)
    roll.look()
    return roll.stopped


@contextmanager
def abort_on_dead_rank(how: str = DIED) -> Iterator[None]:
    """Ends all ranks, with one line, if a rank dies during common set-up or at the end.

    A collective call with a dying rank may raise no error and return an incomplete object, which can then cause any
    exception.

    Args:
        how: end of the line, after the names of the ranks.
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
        time.sleep(SPEAKS_S * min(place, 3))  # the first rank reports it and ends the others; it may be busy elsewhere
        if not place or code_if_lost is None:
            log.error(f"{named_ranks(dead)} {how}")
        end_everybody(MPI.COMM_WORLD, 1, lost=True)


def failed_classes() -> set[int]:
    """Returns the error classes of calls that end because a rank died."""
    from mpi4py import MPI

    return {MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED}


def _learned(comm: "MPI.Comm") -> set[int]:
    """Returns dead ranks, found by MPI within a time limit, or by the kernel on this node. Empty if there are none."""
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
    """Records that this rank has outlived another one, because MPI's finalisation might wait for dead ranks."""
    global outlived
    if not outlived:
        outlived = True
        atexit.register(leave, 0)


def leave(code: int) -> int:
    """Finalises MPI and returns the code. A process that has outlived other ranks exits at once with the code."""
    if outlived:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    if "mpi4py.MPI" in sys.modules:
        from mpi4py import MPI

        if MPI.Is_initialized() and not MPI.Is_finalized():
            MPI.Finalize()
    return code


def end_everybody(comm: "MPI.Comm", code: int, *, lost: bool = False) -> NoReturn:
    """Ends all ranks, including this one. Under ULFM an abort ends only the caller, so the launcher must end them.

    Args:
        comm: communicator of the ranks.
        code: exit code.
        lost: whether the death of a rank is the reason.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    heard()
    if lost and code_if_lost is not None and survivable():
        os._exit(code_if_lost)  # then mpirun ends the other ranks, and exits with this code
    if survivable() and launcher_lives(launched_by := launcher()):
        with suppress(OSError):  # it is ending
            os.kill(launched_by, signal.SIGTERM)
        time.sleep(2.0)
    comm.Abort(code)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def heard() -> None:
    """Waits until the launcher has read this rank's output, because the launcher may lose unread output at its end."""
    unread = array.array("i", [0])
    deadline = time.monotonic() + HEARD_S
    with suppress(OSError):  # no pipe: there is no reader
        while not fcntl.ioctl(2, termios.FIONREAD, unread) and unread[0] and time.monotonic() < deadline:
            time.sleep(0.01)
    time.sleep(0.1)  # the launcher writes this output in its next turn


roles: Sequence[str] = ()
"""Role names of each world rank of this process's run, for messages, or empty if not known yet."""

code_if_lost: int | None = None
"""Exit code of ranks that end because another one died. None: the code of a failure. `rudra.mpi.followers` sets it."""

outlived = False
"""Whether this rank has outlived another one, so that MPI must not be finalised."""
