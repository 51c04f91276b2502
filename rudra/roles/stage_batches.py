"""Mini-batches at a stage server, from the arrival of their activations to the update by their gradients."""

from collections import deque
from collections.abc import Callable, Collection
from typing import NamedTuple

from rudra.core.actions import Action, Send
from rudra.core.buffer_names import GRADIENT
from rudra.core.digest import digest_of
from rudra.core.events import Updated
from rudra.core.messages import Activations, MessageKind, StageReported
from rudra.core.records import Gradient
from rudra.roles.outbox import Outbox
from topologies import Plan


class ShippedBatch(NamedTuple):
    """Mini-batch with received activations.

    Attributes:
        message: message that came with the activations.
        buffer: name of the buffer with the activations.
        at: time of arrival in seconds on the driver's clock.
    """

    message: Activations
    buffer: str
    at: float


class ConcludedBatch(NamedTuple):
    """Mini-batch with a gradient that waits for an update.

    Attributes:
        gradient: description of the gradient.
        timestamp: timestamp of the weights that the gradient was computed with.
        began: start of the computation in seconds on the driver's clock.
        wait_s: time in seconds that the activations had waited before the computation.
        compute_s: duration of the computation in seconds.
    """

    gradient: Gradient
    timestamp: int
    began: float
    wait_s: float
    compute_s: float


class BatchQueue:
    """Queue of mini-batches that wait for their turn.

    Args:
        plan: roles of the run and their connections.
        merged: whether the placement rule is `merged`.
    """

    def __init__(self, plan: Plan, *, merged: bool) -> None:
        self._plan, self._merged = plan, merged
        self._alone = plan.workers == 1
        self._shipped: deque[ShippedBatch] = deque()
        self._open: set[int] = set()  # learners of a group with unfinished parts of its batch

    def enter(self, shipped: ShippedBatch) -> None:
        self._shipped.append(shipped)

    def next(self, timestamp: int, may: Callable[[int], bool]) -> ShippedBatch | None:
        """Returns the first mini-batch that can be computed now, or None.

        Args:
            timestamp: timestamp of the stage server's weights.
            may: function that returns whether the buffers for a learner's mini-batch are free.
        """
        for shipped in self._shipped:
            if may(shipped.message.sender) and self._has_turn(shipped.message, timestamp):
                self._shipped.remove(shipped)
                return shipped
        return None

    def _has_turn(self, message: Activations, timestamp: int) -> bool:
        """Returns whether a mini-batch may use the present weights. They stay until its whole batch is done."""
        if not self._merged:
            return message.timestamp == timestamp
        if not self._open:
            members = {*self._plan.group_of(message.sender)}
            if self._alone or members <= {shipped.message.sender for shipped in self._shipped}:
                self._open = members
        return message.sender in self._open

    def conclude(self, learner: int) -> bool:
        """Notes that a learner's part is done. Returns whether the batch is complete."""
        self._open.discard(learner)
        return not self._open

    def lose(self, role: int) -> None:
        """Drops the mini-batches of a dead learner."""
        self._shipped = deque(shipped for shipped in self._shipped if shipped.message.sender != role)


class StageUpdates:
    """Updates of a stage server, and the mini-batches in them.

    Attributes:
        waiting: mini-batches by learner, with gradients that wait for an update.
        counted: learners with a gradient in the next update.
    """

    def __init__(self) -> None:
        self.waiting: dict[int, ConcludedBatch] = {}
        self.counted: list[int] = []
        self._making: deque[tuple[list[ConcludedBatch], float]] = deque()  # mini-batches and rate of each update

    @property
    def making(self) -> int:
        """Number of updates that have begun and not ended."""
        return len(self._making)

    def count(self, gradient: str) -> None:
        """Counts the gradient in a buffer for the next update, if it is a learner's gradient."""
        if gradient.startswith(f"{GRADIENT} "):
            learner = learner_of(gradient)
            if learner not in self.counted:
                self.counted.append(learner)

    def begin(self, rate: float) -> None:
        """Begins an update with all counted gradients, at a learning rate."""
        taken = [self.waiting.pop(learner) for learner in self.counted if learner in self.waiting]
        self.counted = []
        self._making.append((taken, rate))

    def end(self) -> tuple[list[ConcludedBatch], float]:
        """Ends the earliest update. Returns its mini-batches and its learning rate."""
        return self._making.popleft()


class StageReports:
    """Rows that a stage server reports, and the checkpoints that wait for them.

    Args:
        outbox: outbox of the stage server.
        statistics: id of the statistics server.
        merged: whether the placement rule is `merged`.
    """

    def __init__(self, outbox: Outbox, statistics: int, *, merged: bool) -> None:
        self._outbox, self._statistics, self._merged = outbox, statistics, merged
        self.began = self.now = 0.0  # start of training and present event, in seconds on the driver's clock
        self._saved: deque[tuple[int, int]] = deque()  # checkpoints: update of the first layers, and of the last layers

    def save(self, front: int, timestamp: int) -> None:
        """Notes a checkpoint with the first layers of update `front` and the last layers of update `timestamp`."""
        self._saved.append((front, timestamp))

    def tell_snapshot(self, front: int, timestamp: int) -> None:
        """Records a snapshot with the first layers of update `front` and the last layers of update `timestamp`."""
        if self._merged:
            text = f"a snapshot has the first layers of update {front}, and the last ones of {timestamp}"
            about = (b"stages", self._outbox.role, 0, front, timestamp, self.now - self.began, 0.0, text.encode())
            self._outbox.add(MessageKind.EVENTS, *about)

    def enter(self, event: Updated, taken: Collection[ConcludedBatch], rate: float) -> None:
        """Adds a row for each mini-batch in an update."""
        digest = digest_of(b"".join(event.sampled)) if event.sampled else 0
        for batch in taken:
            gradient = batch.gradient
            about = (gradient.learner, gradient.samples, gradient.step, gradient.timestamp)
            staleness = event.timestamp - 1 - batch.timestamp
            times = (batch.began - self.began, batch.wait_s, batch.compute_s, event.seconds)
            self._outbox.add(MessageKind.STAGES, event.timestamp, *about, staleness, rate, *times, digest)

    def due(self, now: float) -> list[Action]:
        """Returns messages with the collected rows if they are due."""
        return self._outbox.due(now)

    def flush(self, now: float) -> list[Action]:
        """Returns messages with all collected rows."""
        return self._outbox.flush(now)

    def report(self, done: int, now: float) -> list[Action]:
        """Sends the rows that belong to a checkpoint, once its last update is made."""
        actions: list[Action] = []
        while self._saved and self._saved[0][1] <= done:
            front, _ = self._saved.popleft()
            reported = StageReported(self._outbox.role, front)
            actions += [*self._outbox.flush(now), Send(self._statistics, reported)]
        return actions


def learner_of(gradient: str) -> int:
    """Returns the id of the learner that a gradient buffer belongs to."""
    return int(gradient.rpartition(" ")[2])
