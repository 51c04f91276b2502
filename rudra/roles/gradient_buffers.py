"""Gradients on their way into an average, for parameter servers and tree servers.

A gradient buffer is in one place at a time: free, posted, arrived, accumulator or lent. A transfer may write into a
posted buffer. An arrived buffer waits to be handled. The accumulator has the first gradient of an average, and the
others are averaged into it, weighted by their samples. A lent buffer is in use by the transfer of an average.
"""

from collections import deque
from collections.abc import Sequence

from rudra.core.actions import Accumulate, Action, CancelReceive, Receive
from rudra.core.buffer_names import GRADIENT
from rudra.core.events import Received
from rudra.core.messages import PushedGradient


class GradientBuffers:
    """The gradient buffers of one server.

    Args:
        sources: ids of the roles that push to the server, in learner order.
        buffers: number of buffers. Two serve any number of sources. A third one is needed while an average is sent.
        ordered: whether gradients are received and added in the order of the sources.

    Attributes:
        ordered: whether gradients are received and added in the order of the sources.
    """

    def __init__(self, sources: Sequence[int], buffers: int, ordered: bool) -> None:
        self.pool = tuple(f"{GRADIENT} {i}" for i in range(buffers))
        self.free = deque(self.pool)
        self.posted: dict[str, int | None] = {}  # buffer -> the only source that may use it, or None
        self.arrived: deque[tuple[str, PushedGradient]] = deque()  # buffers and their messages
        self.accumulator: str | None = None
        self.samples = 0
        self.lent: str | None = None
        self.ordered = ordered
        self._sources, self._next_source = list(sources), 0
        self._silent: set[int] = set()  # sources whose later gradients are dropped
        self._turns = deque(self._sources if ordered else ())  # sources that this average still waits for, in order
        self._receives = {buffer: Receive(buffer, gradient=True) for buffer in self.pool}

    def validate(self) -> None:
        places = [*self.free, *self.posted, *(buffer for buffer, _ in self.arrived)]
        places += [buffer for buffer in (self.accumulator, self.lent) if buffer is not None]
        assert sorted(places) == sorted(self.pool), places

    @property
    def waiting(self) -> int:
        """Number of gradients that have arrived and are not added yet."""
        return sum(len(message.gradients) for _, message in self.arrived)

    def post(self, training: bool) -> list[Action]:
        """Posts receives for the free buffers, in the order of the sources during training if the protocol needs it."""
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
        """Cancels receives for single sources at the end of training, because these may push nothing more."""
        return [CancelReceive(buffer) for buffer in sorted(self.posted)] if self.ordered else []

    def withdrawn(self, buffer: str) -> None:
        """Takes back the buffer of a cancelled receive."""
        del self.posted[buffer]
        self.free.append(buffer)

    def take(self, event: Received[PushedGradient]) -> int:
        """Takes a received message and returns how many of its gradients are dropped because their source is silent."""
        buffer, message = event.buffer or "", event.message
        self.posted.pop(buffer, None)
        if self._silent and message.sender in self._silent:
            self.free.append(buffer)
            return len(message.gradients)
        self.arrived.append((buffer, message))
        return 0

    def rotate_to_turn(self) -> bool:
        """Moves the arrived gradient whose turn it is to the front. Returns False if it has not arrived."""
        for place, (_, message) in enumerate(self.arrived):
            if self._turns and message.sender == self._turns[0]:
                self.arrived.rotate(-place)
                return True
        return False

    @property
    def turn(self) -> int | None:
        """Source whose gradient is next in the order, or None if there is none."""
        return self._turns[0] if self._turns else None

    @property
    def complete(self) -> bool:
        """Whether this average waits for no further source in the order."""
        return not self._turns

    def remove(self, source: int) -> int:
        """Removes a source that is gone and returns the number of its arrived gradients that are dropped."""
        dropped = self._forget(source)
        for buffer in [buffer for buffer, of in self.posted.items() if of == source]:
            self.withdrawn(buffer)
        return dropped

    def detach(self, source: int) -> tuple[int, list[Action]]:
        """Detaches a source that lives but has no learner left. Its later gradients have no turn.

        Returns:
            Number of its gradients that are dropped, and the actions to take.
        """
        if not self.ordered:
            return 0, []
        self._silent.add(source)
        dropped = self._forget(source)
        return dropped, [CancelReceive(buffer) for buffer, of in self.posted.items() if of == source]

    def ignore_later(self, source: int) -> int:
        """Ignores all gradients of a source that are not added yet, and returns how many had arrived."""
        self._silent.add(source)
        return self._drop(source)

    def _forget(self, source: int) -> int:
        """Removes a source from the order and returns the number of its arrived gradients that are dropped."""
        place = self._sources.index(source)
        del self._sources[place]
        self._next_source = (self._next_source - (place < self._next_source)) % max(1, len(self._sources))
        if not self.ordered:
            return 0
        if source in self._turns:
            self._turns.remove(source)
        return self._drop(source)

    def _drop(self, source: int) -> int:
        """Drops the arrived gradients of a source and returns their number."""
        gone = [entry for entry in self.arrived if entry[1].sender == source]
        for entry in gone:
            self.arrived.remove(entry)
            self.free.append(entry[0])
        return sum(len(message.gradients) for _, message in gone)

    def average(self, buffer: str, samples: int, scale: float) -> list[Action]:
        """Adds a gradient to the average, weighted by its samples."""
        if self._turns:
            self._turns.popleft()
        self.samples += samples
        if self.accumulator is None:
            self.accumulator = buffer
            return [] if scale == 1.0 else [Accumulate(buffer, buffer, 1.0, scale)]
        self.free.append(buffer)
        return [Accumulate(self.accumulator, buffer, samples / self.samples, scale)]

    def take_average(self) -> str:
        """Returns the buffer of the average. The caller puts the buffer back later."""
        buffer = self.accumulator
        assert buffer is not None
        self.accumulator, self.samples = None, 0
        if self.ordered:
            self._turns = deque(self._sources)
        return buffer

    def discard(self) -> int:
        """Drops all arrived gradients and returns their number."""
        dropped = self.waiting
        self.free.extend(buffer for buffer, _ in self.arrived)
        self.arrived.clear()
        return dropped
