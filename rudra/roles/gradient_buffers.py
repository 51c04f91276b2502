"""Gradients on their way into an average: what a parameter server and a tree server have in common.

A gradient buffer is in one place at a time: free, posted (a transfer may land in it), arrived (to be handled), the
accumulator (the first gradient of an average; the others are averaged into it, weighted by their samples), or lent.
"""

from collections import deque
from collections.abc import Sequence

from rudra.core.events import GRADIENT, Accumulate, Action, CancelReceive, Receive, Received
from rudra.core.messages import PushedGradient


class GradientBuffers:
    """The gradient buffers of one server.

    Args:
        sources: ids of the roles that push to it, in learner order.
        buffers: how many there are; two serve any number of sources, a third while an average is passed on.
        ordered: tensors are received and added in the order of the sources.

    Attributes:
        ordered: as given.
    """

    def __init__(self, sources: Sequence[int], buffers: int, ordered: bool) -> None:
        self.pool = tuple(f"{GRADIENT} {i}" for i in range(buffers))
        self.free = deque(self.pool)
        self.posted: dict[str, int | None] = {}  # buffer -> for which source alone
        self.arrived: deque[tuple[str, PushedGradient]] = deque()  # buffers, and what came with them
        self.accumulator: str | None = None
        self.samples = 0
        self.lent: str | None = None
        self.ordered = ordered
        self._sources, self._next_source = list(sources), 0
        self._silent: set[int] = set()  # sources that have nothing to push any more
        self._turns = deque(self._sources if ordered else ())  # whom this average still waits for, in order
        self._receives = {buffer: Receive(buffer, gradient=True) for buffer in self.pool}

    def validate(self) -> None:
        places = [*self.free, *self.posted, *(buffer for buffer, _ in self.arrived)]
        places += [buffer for buffer in (self.accumulator, self.lent) if buffer is not None]
        assert sorted(places) == sorted(self.pool), places

    @property
    def waiting(self) -> int:
        """Gradients that have arrived and are not added yet."""
        return sum(len(message.gradients) for _, message in self.arrived)

    def post(self, training: bool) -> list[Action]:
        """Lets gradients into the free buffers; in order while the training goes on, if the protocol asks for it."""
        actions: list[Action] = []
        in_order = self.ordered and training
        while self.free and (self._sources or not in_order):
            buffer = self.free.popleft()
            receive = self._receives[buffer]
            if in_order:
                receive = Receive(buffer, self._sources[self._next_source], gradient=True)
                self._next_source = (self._next_source + 1) % len(self._sources)
            self.posted[buffer] = receive.source
            actions.append(receive)
        return actions

    def withdraw(self) -> list[Action]:
        """Training ends: receives that are meant for one source are no use any more, it may push nothing."""
        return [CancelReceive(buffer) for buffer in sorted(self.posted)] if self.ordered else []

    def withdrawn(self, buffer: str) -> None:
        """A receive was taken back."""
        del self.posted[buffer]
        self.free.append(buffer)

    def take(self, event: Received[PushedGradient]) -> int:
        """A transfer has landed; how many gradients are dropped, because nobody waits for them any more."""
        buffer, message = event.buffer or "", event.message
        self.posted.pop(buffer, None)
        if self._silent and message.sender in self._silent:
            self.free.append(buffer)
            return len(message.gradients)
        self.arrived.append((buffer, message))
        return 0

    def rotate_to_turn(self) -> bool:
        """Brings the arrived gradient whose turn it is to the front; False if it is not here."""
        for place, (_, message) in enumerate(self.arrived):
            if self._turns and message.sender == self._turns[0]:
                self.arrived.rotate(-place)
                return True
        return False

    @property
    def turn(self) -> int | None:
        """In order: the source whose gradient is waited for."""
        return self._turns[0] if self._turns else None

    @property
    def complete(self) -> bool:
        """In order: whether all sources are in this average."""
        return not self._turns

    def remove(self, source: int) -> int:
        """A source is no more; how many gradients of its, which had arrived but have no turn any more, are dropped."""
        dropped = self._forget(source)
        for buffer in [buffer for buffer, of in self.posted.items() if of == source]:
            self.withdrawn(buffer)
        return dropped

    def detach(self, source: int) -> tuple[int, list[Action]]:
        """A source lives, but all learners behind it are no more, and what is still to come of it has no turn.

        Returns:
            How many gradients of its are dropped, and what to do.
        """
        if not self.ordered:
            return 0, []
        self._silent.add(source)
        dropped = self._forget(source)
        return dropped, [CancelReceive(buffer) for buffer, of in self.posted.items() if of == source]

    def ignore_later(self, source: int) -> int:
        """What a source has pushed counts only if it is added by now; how many gradients are dropped with it."""
        self._silent.add(source)
        return self._drop(source)

    def _forget(self, source: int) -> int:
        """Takes a source out of the order; how many gradients that had arrived are dropped with it."""
        place = self._sources.index(source)
        del self._sources[place]
        self._next_source = (self._next_source - (place < self._next_source)) % max(1, len(self._sources))
        if not self.ordered:
            return 0
        if source in self._turns:
            self._turns.remove(source)
        return self._drop(source)

    def _drop(self, source: int) -> int:
        """Drops what has arrived of a source; how many gradients that is."""
        gone = [entry for entry in self.arrived if entry[1].sender == source]
        for entry in gone:
            self.arrived.remove(entry)
            self.free.append(entry[0])
        return sum(len(message.gradients) for _, message in gone)

    def average(self, buffer: str, samples: int, scale: float) -> list[Action]:
        """Adds a gradient to the average, in which it counts by its samples."""
        if self._turns:
            self._turns.popleft()
        self.samples += samples
        if self.accumulator is None:
            self.accumulator = buffer
            return [] if scale == 1.0 else [Accumulate(buffer, buffer, 1.0, scale)]
        self.free.append(buffer)
        return [Accumulate(self.accumulator, buffer, samples / self.samples, scale)]

    def take_average(self) -> str:
        """The average; whoever takes it puts the buffer back."""
        buffer = self.accumulator
        assert buffer is not None
        self.accumulator, self.samples = None, 0
        if self.ordered:
            self._turns = deque(self._sources)
        return buffer

    def discard(self) -> int:
        """Drops what has arrived; how many gradients that was."""
        dropped = self.waiting
        self.free.extend(buffer for buffer, _ in self.arrived)
        self.arrived.clear()
        return dropped
