"""Tensors under way that a rank's own thread carries, and what becomes of them when a rank dies."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from rudra.compute.executor import Buffer, Executor
from rudra.mpi.failures import Losses, outcome


@dataclass(slots=True)
class Wanted:
    """A receive.

    Attributes:
        role: who receives.
        name: of the buffer.
        source: rank; None: anybody.
        tag: of the message.
        halves: it comes as float16.
        or_tags: under which it may come as well, from anybody.
        part_of: it is part of a tensor, of or for this role, and comes bare; None: it is a whole one.
    """

    role: int
    name: str
    source: int | None
    tag: int
    halves: bool
    or_tags: Sequence[int] = ()
    part_of: int | None = None


@dataclass(slots=True)
class Going:
    """A send.

    Attributes:
        role: who sends.
        name: of the buffer.
        to: role that receives.
    """

    role: int
    name: str
    to: int


@dataclass(slots=True)
class _Coming:
    """A receive that MPI knows of."""

    request: MPI.Request
    wanted: Wanted
    buffer: Buffer


class Transfers:
    """Sends and receives, polled.

    As long as all ranks live, a receive from anybody is one request that is posted ahead. When one has died, such
    requests are taken back. One that cannot be has matched a tensor: that of a living rank, which will come, or that
    of the dead, which will not, and nothing tells which. So its memory is set aside, and used if the tensor comes;
    meanwhile the role's buffer has other memory. From then on tensors from anybody are looked for and received of
    whoever sent them, because a dead rank's may still be announced. So they are from the first where ranks have several
    roles, whose tensors have tags of their own.

    Args:
        comm: of all ranks.
        losses: which of them have died.
        executors: by role; hold the buffers.
        received: is told when a tensor has come.
        sent: is told of a send when its buffer is free again, delivered or not.
    """

    def __init__(
        self,
        comm: MPI.Comm,
        losses: Losses,
        executors: Mapping[int, Executor],
        received: Callable[[Wanted], None],
        sent: Callable[[Going], None],
    ) -> None:
        self._comm, self._losses, self._executors = comm, losses, executors
        self._received, self._sent = received, sent
        self._sends: list[tuple[MPI.Request, Going]] = []
        self._forgotten: list[MPI.Request] = []  # of which nobody wants to know; their memory stays
        self._ending: list[_Coming] = []  # as well, but into memory that is to be used again when they are over
        self._coming: list[_Coming] = []
        self._aside: list[_Coming] = []
        self._wanted: list[Wanted] = []
        self._turn = 0  # which tag is looked for first, so that none waits for the others

    def send(self, request: MPI.Request, going: Going) -> None:
        """Takes over a send."""
        self._sends.append((request, going))

    def receive(self, wanted: Wanted) -> None:
        """Lets a tensor in."""
        if wanted.source is None and (self._losses.dead or wanted.or_tags):
            self._wanted.append(wanted)
        else:
            self._post(wanted)

    def _post(self, wanted: Wanted) -> None:
        buffer = self._executors[wanted.role].buffer(wanted.name)
        source = MPI.ANY_SOURCE if wanted.source is None else wanted.source
        wire = _wire(buffer, wanted) if wanted.part_of is None else self._bare(wanted)
        request = self._comm.Irecv(wire, source, wanted.tag)
        self._coming.append(_Coming(request, wanted, buffer))

    def _bare(self, wanted: Wanted) -> npt.NDArray[np.float32]:
        assert wanted.part_of is not None
        return self._executors[wanted.role].bare(wanted.name, wanted.part_of)

    def poll(self) -> None:
        """Reports what is over."""
        if self._sends:
            self._poll_sends()
        if self._coming:
            self._poll_receives()
        if self._wanted:
            self._look_for_wanted()
        if self._ending:
            self._ending = [coming for coming in self._ending if outcome(coming.request) == "no"]

    def _poll_sends(self) -> None:
        requests = [request for request, _ in self._sends]
        try:
            finished = MPI.Request.Testsome(requests)
        except MPI.Exception:
            if not self._losses.active:
                raise
            finished = [place for place, request in enumerate(requests) if request == MPI.REQUEST_NULL]
        if finished:
            gone = set(finished)
            over = [self._sends[place][1] for place in finished]
            self._sends = [send for place, send in enumerate(self._sends) if place not in gone]
            for going in over:
                self._sent(going)

    def _poll_receives(self) -> None:
        for coming, what in [(coming, outcome(coming.request)) for coming in self._coming]:
            if what == "no":
                continue
            self._coming.remove(coming)
            if what == "done":
                self._received(coming.wanted)
            elif coming.wanted.source is None:  # what it holds is void
                self._wanted.append(coming.wanted)

    def _look_for_wanted(self) -> None:
        for wanted in list(self._wanted):
            if self._served_aside(wanted):
                continue
            try:
                message = self._matched(wanted)
            except MPI.Exception:  # a loss that is not acknowledged yet
                return
            if message is not None:
                self._wanted.remove(wanted)
                buffer = self._executors[wanted.role].buffer(wanted.name)
                self._coming.append(_Coming(message.Irecv(_wire(buffer, wanted)), wanted, buffer))

    def _matched(self, wanted: Wanted) -> MPI.Message | None:
        """A tensor that has come, of whichever tag; those take turns."""
        tags = (wanted.tag, *wanted.or_tags)
        for turn in range(self._turn, self._turn + len(tags)):
            message = self._comm.Improbe(MPI.ANY_SOURCE, tags[turn % len(tags)])
            if message is not None:
                self._turn = turn + 1
                return message
        return None

    def _served_aside(self, wanted: Wanted) -> bool:
        """Gives the role a tensor that has come into memory which was set aside, if there is one."""
        for coming in self._aside:
            if coming.wanted.tag == wanted.tag and outcome(coming.request) == "done":
                self._aside.remove(coming)
                self._wanted.remove(wanted)
                self._executors[wanted.role].put(wanted.name, coming.buffer)
                self._received(wanted)
                return True
        return False

    def withdraw(self, role: int, name: str) -> bool:
        """Takes a receive back; False: something is coming, or has come already."""
        for wanted in self._wanted:
            if (wanted.role, wanted.name) == (role, name):
                self._wanted.remove(wanted)
                return True
        for coming in self._coming:
            if (coming.wanted.role, coming.wanted.name) == (role, name):
                return self._cancelled(coming)
        return False

    def drop(self, to: int, rank: int) -> None:
        """Forgets what is under way to a role and from its rank alone; what is half here has memory of its own."""
        for coming in [coming for coming in self._coming if coming.wanted.source == rank]:
            coming.request.Cancel()
            self._coming.remove(coming)
            self._forget(coming)
        sends, self._sends = self._sends, [send for send in self._sends if send[1].to != to]
        for request, going in sends:
            if going.to == to:
                self._forgotten.append(request)
                self._sent(going)

    def _forget(self, coming: _Coming) -> None:
        self._forgotten.append(coming.request)
        self._renew(coming.wanted)

    def _renew(self, wanted: Wanted) -> None:
        """Gives a buffer other memory: MPI may still write to what it has."""
        executor = self._executors[wanted.role]
        executor.put(wanted.name, executor.new_buffer())

    def _cancelled(self, coming: _Coming) -> bool:
        """Cancels a receive; False: it has matched. One that is over then is reported."""
        coming.request.Cancel()
        status = MPI.Status()
        what = outcome(coming.request, status)
        if what == "no":
            return False
        self._coming.remove(coming)
        if what == "failed" or status.Is_cancelled():
            return True
        self._received(coming.wanted)
        return False

    def lose(self, ranks: Collection[int]) -> None:
        """Ranks have died: drops what was to come from them, and makes sure that nothing waits for it."""
        for coming in list(self._coming):
            wanted = coming.wanted
            if wanted.source is None:
                if self._cancelled(coming):
                    self._wanted.append(wanted)
                elif coming in self._coming:
                    self._coming.remove(coming)
                    self._aside.append(coming)
                    self._renew(wanted)
                    self._wanted.append(wanted)
            elif wanted.source in ranks:
                self._coming.remove(coming)
                coming.request.Cancel()
        for coming in [coming for coming in self._ending if coming.wanted.source in {None, *ranks}]:
            self._ending.remove(coming)
            self._forget(coming)

    def abandon(self, roles: Collection[int], but_to: int) -> list[Going]:
        """Forgets what is under way to and from roles, but for what they send to one other; `quiet` says when nothing
        of it writes any more.

        Returns:
            The sends that go on.
        """
        self._wanted = [wanted for wanted in self._wanted if wanted.role not in roles]
        self._ending += [coming for coming in self._coming if coming.wanted.role in roles]
        self._coming = [coming for coming in self._coming if coming.wanted.role not in roles]
        for coming in self._ending:
            coming.request.Cancel()
        self._forgotten += [request for request, going in self._sends if going.to != but_to]
        self._sends = [(request, going) for request, going in self._sends if going.to == but_to]
        return [going for _, going in self._sends]

    @property
    def quiet(self) -> bool:
        return not self._ending

    def close(self) -> None:
        """Leaves nothing posted."""
        for coming in self._coming:
            coming.request.Cancel()
            self._losses.wait(coming.request)


def _wire(buffer: Buffer, wanted: Wanted) -> npt.NDArray[np.uint8]:
    return buffer.half if wanted.halves else buffer.wire
