"""Records of the learners of a rank that follow its first learner in lockstep (`rudra.mpi.lockstep`), in columns.

All learners of the rank do the same at the same time, so only the first one, the leader, is asked. These records hold
only what differs for each follower: samples, losses, errors, and what it brings into averages. Everything else is as
for the leader, times included. When the lockstep ends, the followers take over both.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import structs

from rudra.core import records
from rudra.core.actions import Compute, Reduce
from rudra.core.buffer_names import CORRECTION, DIFFERENCE
from rudra.core.events import Computed, ReplicaStepped
from rudra.core.messages import MessageKind, Rows
from rudra.core.records import Gradient
from rudra.core.wire import MEMBER
from rudra.roles.periods import MadeMinibatches
from rudra.roles.replica import Followed, Replica

GRADIENT_FIELDS = list(Gradient.__struct_fields__)
SPENT = ("compute_s", "reduce_s", "update_s")
"""Times of learners that update weights by themselves. They neither push nor pull."""


class Followers:
    """Records of the learners of a rank that follow its first one, begun when all of them compute.

    Args:
        leader: The first learner.
        learners: The others, in learner order.
        timestamp: Timestamp of the weights that all of them compute with.
    """

    def __init__(self, leader: Replica, learners: Sequence[Replica], timestamp: int) -> None:
        self._leader, self._learners, self._timestamp = leader, learners, timestamp
        self._begun = [each.log.upcoming for each in learners]  # step and samples of the mini-batch under way
        self._count = 0  # mini-batches of each since then
        works = [work for _, work in self._begun]
        self._strides, self._samples = np.array([(work.stride, work.count) for work in works]).T
        # Of the last mini-batch of each:
        self._steps = np.array([step for step, _ in self._begun]) - 1
        self._firsts = np.array([work.first for work in works]) - self._strides
        self._losses = self._errors = np.zeros(len(learners))
        self._ready_s = 0.0
        self._made = _Period([each.made for each in learners])
        self._distances: list[float] = []
        self._starts = self._times = leader.log.times
        self._reports = leader.ledger.rules.job.results.minibatches
        self._make_tables([each.log.learner for each in learners], [work.stream for work in works])

    def _make_tables(self, numbers: Sequence[int], streams: Sequence[int]) -> None:
        """Makes tables that already hold the numbers that never change."""
        self._minibatches = np.zeros(len(numbers), records.MINIBATCH)
        self._minibatches["learner"], self._minibatches["samples"] = numbers, self._samples
        self._corrections = np.zeros(len(numbers) + 1, MEMBER)  # the leader's row is the first one
        mine = self._corrections[1:]
        mine["update"] = mine["staleness"] = -1
        mine["learner"], mine["samples"], mine["stream"], mine["scale"] = numbers, self._samples, streams, 1.0
        self._members = self._corrections.copy()  # of everything else, with flags
        for row, each in zip(self._members[1:], self._learners, strict=True):
            for about in (each.flags, each.brings):
                for name, value in structs.asdict(about).items() if about is not None else ():
                    row[name] = value

    @property
    def share_reference(self) -> bool:
        """Whether the learners are in one block, whose reference is averaged for all of them."""
        return self._leader.plan.sharing == "reference"

    def computed(self, events: Sequence[Computed], now: float) -> None:
        """Notes a mini-batch of each, before the leader does. Its loss is finite."""
        self._losses = np.array([event.loss for event in events])
        self._errors = np.array([event.errors for event in events])
        self._steps, self._firsts = self._steps + 1, self._firsts + self._strides
        self._ready_s = now - self._leader.log.began
        self._count += 1
        if self._leader.rule is not None:
            self._made.add(self._samples, self._firsts, self._losses, self._errors)

    def stepped(self, events: Sequence[ReplicaStepped]) -> None:
        """Notes a step of each replica, before the leader does."""
        self._distances = [event.distance for event in events]
        if self._leader.completes_period:
            made, rows = self._made, self._members[1:]
            rows["samples"], rows["first"], rows["timestamp"] = made.samples, made.first, self._leader.place[0]
            rows["step"], rows["loss"], rows["errors"] = self._steps, made.loss / made.samples, made.errors
            made.count = 0

    def contributions(self, action: Reduce) -> Rows:
        """Returns what all learners of the rank bring into a reduction.

        Args:
            action: Contribution of the leader.

        Returns:
            (m,) `MEMBER` in learner order, without offsets, valid until the next call.
        """
        table = self._corrections if action.buffer == CORRECTION else self._members
        table[0] = (0, *structs.astuple(action.word), *structs.astuple(action.gradient))
        rows = table[1:]
        if action.buffer != DIFFERENCE:
            self._fill(rows, action.gradient.timestamp)
        if action.buffer != CORRECTION:
            rows["digest"], rows["distance"] = action.word.digest, action.word.distance
        if action.buffer == DIFFERENCE and not self.share_reference:
            rows["distance"] = self._distances
        return table

    def _fill(self, rows: Rows, timestamp: int) -> None:
        """Describes the last mini-batches, from weights of a timestamp, in rows of `MEMBER`."""
        rows["step"], rows["first"], rows["timestamp"] = self._steps, self._firsts, timestamp
        rows["loss"], rows["errors"] = self._losses, self._errors

    def next(self, action: Compute) -> list[Compute]:
        """Begins the next mini-batch of each, when the leader begins its own. Reports the last one."""
        times = self._leader.log.times
        if self._reports:
            rows = self._minibatches
            rows["step"], rows["timestamp"], rows["time_s"] = self._steps, self._timestamp, self._ready_s
            rows["loss"], rows["errors"] = self._losses, self._errors
            for name, after, before in zip(records.TIMES, times, self._times, strict=True):
                if name in SPENT:
                    rows[name] = after - before
            self._leader.log.diary.extend_by(MessageKind.MINIBATCHES, rows)
        self._times, self._timestamp = times, action.timestamp
        same = action.weights, action.gradient, action.timestamp, action.time_s
        return [Compute(step + self._count, work.after(self._count), *same) for step, work in self._begun]

    def catch_up(self) -> None:
        """Ends following: each learner continues from where the leader is."""
        spent = [after - before for after, before in zip(self._leader.log.times, self._starts, strict=True)]
        self._fill(last := self._corrections[1:], self._timestamp)
        about = zip(self._learners, self._made.of_each(), _gradients(last), _gradients(self._members[1:]), strict=True)
        for each, made, final, brings in about:
            made.last = final
            each.catch_up(self._leader, Followed(self._count, spent, final, made, brings))


def _gradients(rows: Rows) -> list[Gradient]:
    """Returns the gradients in rows of `MEMBER`."""
    return [Gradient(*row) for row in rows[GRADIENT_FIELDS].tolist()]


class _Period:
    """Mini-batches of the present period of each learner, in columns (`MadeMinibatches`).

    Args:
        made: Mini-batches of each.
    """

    def __init__(self, made: Sequence[MadeMinibatches]) -> None:
        self.count = made[0].count
        self.samples = np.array([each.samples for each in made])
        self.first = np.array([each.first for each in made])
        self.loss, self.errors = np.array([(each.loss, each.errors) for each in made]).T

    def add(self, samples: Any, first: Any, losses: Any, errors: Any) -> None:
        """Adds the next mini-batch of each. If `count` is 0, it is the first one of a period."""
        self.count += 1
        if self.count == 1:
            self.samples, self.first, self.loss, self.errors = samples, first, losses * samples, errors
        else:
            self.samples, self.errors = self.samples + samples, self.errors + errors
            self.loss = self.loss + losses * samples

    def of_each(self) -> list[MadeMinibatches]:
        """Returns the mini-batches of each learner."""
        found = [MadeMinibatches() for _ in self.samples]
        columns = self.samples, self.first, self.loss, self.errors
        for each, *about in zip(found, *(column.tolist() for column in columns), strict=True) if self.count else ():
            each.extend(self.count, *about)
        return found
