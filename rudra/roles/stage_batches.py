"""Mini-batches at a stage server: in the order in which their turn comes, and until an update has taken them."""

from collections import deque
from collections.abc import Callable, Collection
from typing import NamedTuple

from rudra.core.digest import digest_of
from rudra.core.events import GRADIENT, Action, Send, Updated
from rudra.core.messages import Activations, MessageKind, StageReported
from rudra.core.records import Gradient
from rudra.roles.outbox import Outbox
from topologies import Plan


class ShippedBatch(NamedTuple):
    """A mini-batch whose activations are here.

    Attributes:
        message: that came with them.
        buffer: of the activations.
        at: seconds on the driver's clock.
    """

    message: Activations
    buffer: str
    at: float


class ConcludedBatch(NamedTuple):
    """A mini-batch whose gradient waits for an update.

    Attributes:
        gradient: describes it.
        timestamp: of the weights with which it was computed.
        began: seconds on the driver's clock.
        wait_s: how long its activations had waited by then.
        compute_s: how long its computation took.
    """

    gradient: Gradient
    timestamp: int
    began: float
    wait_s: float
    compute_s: float


class BatchQueue:
    """Mini-batches that wait for their turn.

    Args:
        plan: who is who.
        merged: whether the rule is `merged`.
    """

    def __init__(self, plan: Plan, *, merged: bool) -> None:
        self._plan, self._merged = plan, merged
        self._alone = plan.workers == 1
        self._shipped: deque[ShippedBatch] = deque()
        self._open: set[int] = set()  # learners of a group whose parts of its batch are not concluded

    def enter(self, shipped: ShippedBatch) -> None:
        self._shipped.append(shipped)

    def next(self, timestamp: int, may: Callable[[int], bool]) -> ShippedBatch | None:
        """Returns the first mini-batch whose turn it is.

        Args:
            timestamp: of the weights.
            may: whether a learner's mini-batch can be computed now.
        """
        for shipped in self._shipped:
            if may(shipped.message.sender) and self._has_turn(shipped.message, timestamp):
                self._shipped.remove(shipped)
                return shipped
        return None

    def _has_turn(self, message: Activations, timestamp: int) -> bool:
        """Whether the weights are right for a mini-batch, now and until all parts of its batch are concluded."""
        if not self._merged:
            return message.timestamp == timestamp
        if not self._open:
            members = {*self._plan.group_of(message.sender)}
            if self._alone or members <= {shipped.message.sender for shipped in self._shipped}:
                self._open = members
        return message.sender in self._open

    def conclude(self, learner: int) -> bool:
        """The part of a learner is concluded; returns whether that completes the batch."""
        self._open.discard(learner)
        return not self._open

    def lose(self, role: int) -> None:
        """A learner died."""
        self._shipped = deque(shipped for shipped in self._shipped if shipped.message.sender != role)


class StageUpdates:
    """Updates of a stage server, and the mini-batches whose gradients they take.

    Attributes:
        waiting: mini-batches whose gradients wait for an update, by learner.
        counted: learners whose gradients are in the next update.
    """

    def __init__(self) -> None:
        self.waiting: dict[int, ConcludedBatch] = {}
        self.counted: list[int] = []
        self._making: deque[tuple[list[ConcludedBatch], float]] = deque()  # and their rate

    @property
    def making(self) -> int:
        """Number of updates whose end is not known yet."""
        return len(self._making)

    def count(self, gradient: str) -> None:
        """The gradient in a buffer is part of the next update, if it is a learner's."""
        if gradient.startswith(f"{GRADIENT} "):
            learner = learner_of(gradient)
            if learner not in self.counted:
                self.counted.append(learner)

    def begin(self, rate: float) -> None:
        """An update takes the gradients that are counted, at a rate."""
        taken = [self.waiting.pop(learner) for learner in self.counted if learner in self.waiting]
        self.counted = []
        self._making.append((taken, rate))

    def end(self) -> tuple[list[ConcludedBatch], float]:
        """The first update is made; returns its mini-batches and its rate."""
        return self._making.popleft()


class StageReports:
    """Rows that a stage server reports, and the checkpoints that need them.

    Args:
        outbox: of the role.
        merged: whether the rule is `merged`.
    """

    def __init__(self, outbox: Outbox, statistics: int, *, merged: bool) -> None:
        self._outbox, self._statistics, self._merged = outbox, statistics, merged
        self.began = self.now = 0.0  # seconds on the driver's clock: of the training, and of the event at hand
        self._saved: deque[tuple[int, int]] = deque()  # checkpoints: update of the first layers, and of these

    def save(self, front: int, timestamp: int) -> None:
        """A checkpoint has the first layers of one update and the last layers of another."""
        self._saved.append((front, timestamp))

    def tell_snapshot(self, front: int, timestamp: int) -> None:
        """Adds an event: a snapshot has the first layers of one update and the last layers of another."""
        if self._merged:
            text = f"a snapshot has the first layers of update {front}, and the last ones of {timestamp}"
            about = (b"stages", self._outbox.role, 0, front, timestamp, self.now - self.began, 0.0, text.encode())
            self._outbox.add(MessageKind.EVENTS, *about)

    def enter(self, event: Updated, taken: Collection[ConcludedBatch], rate: float) -> None:
        """Adds a row for each mini-batch that an update has taken."""
        digest = digest_of(b"".join(event.sampled)) if event.sampled else 0
        for batch in taken:
            gradient = batch.gradient
            about = (gradient.learner, gradient.samples, gradient.step, gradient.timestamp)
            staleness = event.timestamp - 1 - batch.timestamp
            times = (batch.began - self.began, batch.wait_s, batch.compute_s, event.seconds)
            self._outbox.add(MessageKind.STAGES, event.timestamp, *about, staleness, rate, *times, digest)

    def due(self, now: float) -> list[Action]:
        """Returns what to send now, if it is time."""
        return self._outbox.due(now)

    def flush(self, now: float) -> list[Action]:
        """Returns all rows."""
        return self._outbox.flush(now)

    def report(self, done: int, now: float) -> list[Action]:
        """Sends the rows that belong to checkpoints, once the updates are made that these have."""
        actions: list[Action] = []
        while self._saved and self._saved[0][1] <= done:
            front, _ = self._saved.popleft()
            reported = StageReported(self._outbox.role, front)
            actions += [*self._outbox.flush(now), Send(self._statistics, reported)]
        return actions


def learner_of(gradient: str) -> int:
    """Returns the learner whose gradient is in a buffer."""
    return int(gradient.rpartition(" ")[2])
