"""Snapshots and rows of epochs at the statistics server, from arrival to recording."""

from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

import numpy as np

from rudra.core import records
from rudra.core.actions import Action, Hash, Receive, ReorderParts
from rudra.core.events import Evaluated
from rudra.core.messages import EpochEvaluated, Rows
from rudra.roles.snapshots import CREDITS
from topologies import Plan

BUFFERS = tuple(f"snapshot {i}" for i in range(CREDITS))


class ReceivedSnapshots:
    """Snapshots of the weights: the one in work, and those that wait.

    Args:
        plan: roles of the run and their connections.

    Attributes:
        working: buffer and epoch of the snapshot in work, or None if there is none.
    """

    def __init__(self, plan: Plan) -> None:
        self._owners, self._arranges = plan.owners, plan.stage is not None
        self._rooms: deque[str] = deque()  # buffers for the next snapshots
        self._parts: Counter[str] = Counter()  # buffer -> number of parts that have arrived
        self._waiting: deque[tuple[str, int]] = deque()  # buffers and epochs
        self.working: tuple[str, int] | None = None

    def validate(self) -> None:
        assert len(self._waiting) <= CREDITS

    def receive(self, buffer: str) -> list[Action]:
        """Receives a snapshot, or all its parts."""
        self._rooms.append(buffer)
        return [Receive(buffer, owner) for owner in self._owners]

    def enter(self, buffer: str | None, epoch: int) -> str:
        """Takes an epoch's snapshot, or its announcement if no buffer is given, and returns its buffer."""
        found = buffer or self._rooms[0]  # parts arrive in the order of the receives
        self._rooms.remove(found)
        self._waiting.append((found, epoch))
        self._parts[found] += len(self._owners) if buffer else 0
        return found

    def enter_part(self, buffer: str) -> None:
        """Counts a part of a snapshot that has arrived."""
        self._parts[buffer] += 1

    def begin(self) -> list[Action]:
        """Begins with the next snapshot if none is in work and all parts of the next one have arrived."""
        if self.working is not None or not self._waiting:
            return []
        if self._parts[self._waiting[0][0]] < len(self._owners):
            return []
        self.working = self._waiting.popleft()
        buffer = self.working[0]
        del self._parts[buffer]
        arranges = [ReorderParts(buffer)] if self._arranges else []
        return [*arranges, Hash(buffer)]

    @property
    def in_work(self) -> tuple[str, int]:
        """Buffer and epoch of the snapshot in work, which must exist."""
        assert self.working is not None
        return self.working

    @property
    def epochs(self) -> set[int]:
        """Epochs whose snapshots wait or are in work."""
        return {epoch for _, epoch in (*self._waiting, self.working or ("", 0))}


class WorkersEvaluations:
    """Evaluations by workers, added up by the statistics server."""

    def __init__(self) -> None:
        self._sums: dict[int, list[Rows]] = {}  # epoch -> rows of its parts, in order
        self._seconds: dict[int, float] = {}  # epoch -> duration of its evaluation, once complete
        self._digested = 0  # last epoch whose weights are digested

    def enter(self, message: EpochEvaluated) -> bool:
        """Takes rows of an evaluation and returns whether they complete it."""
        found = self._sums.setdefault(message.epoch, [])
        if message.rows is not None:
            found.append(message.rows)
        if message.last:
            self._seconds[message.epoch] = message.seconds
        return message.last

    def digested(self, epoch: int) -> None:
        """Notes that the weights of an epoch are digested."""
        self._digested = epoch

    def sums(self, epoch: int) -> Rows | None:
        """Returns an epoch's rows of `records.SUM` once: when its weights are digested and all rows have arrived."""
        if epoch not in self._seconds or epoch != self._digested or epoch not in self._sums:
            return None
        return np.concatenate([*self._sums.pop(epoch), np.empty(0, records.SUM)])

    def seconds(self, epoch: int, otherwise: float = 0.0) -> float:
        """Returns the duration of an epoch's evaluation by workers, or `otherwise`. NaN: no worker was left."""
        return self._seconds.get(epoch, otherwise)


class EpochTable:
    """Rows and metrics of epochs, until all earlier epochs are recorded.

    Args:
        recorded: last epoch that is recorded.

    Attributes:
        recorded: last epoch that is recorded.
        last: last epoch of the run.
    """

    def __init__(self, recorded: int, last: int) -> None:
        self.recorded, self.last = recorded, last
        self._rows: dict[int, Rows] = {}
        self._metrics: dict[int, list[tuple[Any, ...]]] = {}

    def enter(self, rows: Rows) -> int:
        """Takes the row of an epoch and returns the epoch."""
        epoch = int(rows[0]["epoch"])
        self._rows[epoch] = rows
        return epoch

    def of(self, epoch: int) -> Rows:
        """Returns the row of an epoch, which the caller may change."""
        return self._rows[epoch]

    def measure(self, epoch: int, event: Evaluated, seconds: float) -> list[tuple[Any, ...]]:
        """Enters an evaluation into the row of its epoch and returns the rows of its metrics."""
        rows = self._rows[epoch]
        rows["evaluated"], rows["evaluation_s"] = 1, seconds
        for score in event.scores:
            if score.split != "train":  # these columns come from the gradients
                rows[f"{score.split}_loss"], rows[f"{score.split}_error"] = score.loss, score.error
        self._metrics[epoch] = [
            (epoch, 0, score.split, name, value) for score in event.scores for name, value in score.metrics
        ]
        return self._metrics[epoch]

    def complete(self, later: set[int]) -> Iterator[tuple[int, Rows, list[tuple[Any, ...]]]]:
        """Yields the epochs that can be recorded, in order, with row and metrics, up to the first one in `later`."""
        while (following := self.recorded + 1) in self._rows and following not in later:
            yield following, self._rows.pop(following), self._metrics.pop(following, [])
            self.recorded = following
