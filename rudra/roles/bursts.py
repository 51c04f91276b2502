"""Records of a bank whose learners make several updates at once, without being asked in between.

Usually a learner is asked after its gradient, its step and each average. A small device computes all of them in less
time. So if all learners of the run are on one rank, and only further updates are due, the rank makes a *burst* of
updates. One object then keeps the records of all learners, in columns, and the learners sleep. They are woken up for
everything else: an update that ends an epoch, makes a checkpoint or changes the job, a message, a stop.

A burst gives bitwise the same weights, and the same rows, as learners that are asked.
"""

from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from rudra.core import records
from rudra.core.actions import Action
from rudra.core.bursts import MOST_UPDATES, Burst, BurstMade
from rudra.core.messages import MessageKind
from rudra.roles.averaging import Averager

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


class BankRecords:
    """Records of all learners of the run, begun when each of them waits for its next mini-batch.

    Args:
        learners: The learners that take part, in learner order. The first one reports, and decides for all.
    """

    def __init__(self, learners: Sequence[Averager]) -> None:
        self._learners, self._leader = learners, learners[0]
        self._rule = rule = self._leader.rule
        self._next = [learner.log.upcoming for learner in learners]  # the mini-batch that each computes next
        self._spent = [0.0, 0.0, 0.0]  # seconds of gradients, waits and steps
        self._made = 0  # updates that the learners do not know of
        self._rates: deque[list[float]] = deque()  # of the updates of each burst under way, for the records
        works = [work for _, work in self._next]
        self._steps = np.array([step for step, _ in self._next])
        self._firsts, self._strides = np.array([(work.first, work.stride) for work in works]).T
        self._samples = np.array([work.count for work in works])
        self._reports_minibatches = self._leader.ledger.rules.job.results.minibatches
        # Tables with room for the longest burst. They already hold the numbers that never change.
        numbers, m = [learner.log.learner for learner in learners], len(learners)
        self._gradients = np.zeros((MOST_UPDATES, m), records.GRADIENT)
        self._gradients["learner"], self._gradients["scale"] = numbers, 1.0
        self._gradients["samples"] = self._samples * rule.period
        self._gradients["stream"] = [work.stream for work in works]
        self._averages = np.zeros((MOST_UPDATES, m), records.AVERAGE)
        self._averages["learner"] = numbers
        self._minibatches = np.zeros((MOST_UPDATES, rule.period, m), records.MINIBATCH)
        self._minibatches["learner"], self._minibatches["samples"] = numbers, self._samples
        self._updates = np.zeros(MOST_UPDATES, records.UPDATE)
        self._updates["gradients"], self._updates["samples"] = m, self._samples.sum() * rule.period
        self._place = np.arange(max(MOST_UPDATES, rule.period))

    def burst(self, most: int, now: float, begun: int = 0) -> Burst | None:
        """Returns the next updates. None: the learners must make the next one by themselves.

        Args:
            most: Largest number of updates.
            now: Seconds on the driver's clock.
            begun: Number of updates before them that are under way.
        """
        leader, period = self._leader, self._rule.period
        count = leader.quiet_updates(min(most, MOST_UPDATES), now, begun)
        if not count:
            return None
        ledger, samples = leader.ledger, int(self._samples.sum()) * period
        rates, outer, before = ledger.rates_ahead(count, samples, begun), self._rule.outer_rate, begun * period
        self._rates.append(rates)
        return Burst(
            count,
            tuple((step + before, work.after(before)) for step, work in self._next),
            ledger.timestamp + begun,
            tuple(leader.rates_ahead(count, begun)),
            (outer,) * count if outer is not None else tuple(rates),
            leader.step_ahead,
            None if self._rule.early else self._rule.elasticity,
        )

    def enter(self, event: BurstMade, now: float) -> Iterator[tuple[int, list[Action]]]:
        """Records the updates of a burst.

        Args:
            event: Results of the burst.
            now: Seconds on the driver's clock.

        Yields:
            Roles and their actions.
        """
        last, losses = len(event.losses), event.losses
        if not np.isfinite(losses).all():
            for update, inner, place in np.argwhere(~np.isfinite(losses)).tolist():
                step, timestamp = self._next[place][0], self._leader.ledger.timestamp + update
                about = step + update * self._rule.period + inner, float(losses[update, inner, place]), timestamp
                actions, fails = self._learners[place].log.judge(*about)
                if fails:
                    last = update
                    break
                yield self._learners[place].id, actions
        if last:
            yield self._leader.id, self._record(event.first(last), now)
        if last < len(losses):
            yield self._leader.id, self._leader.ledger.outbox.flush(now)
            yield self._learners[place].id, actions

    def _record(self, event: BurstMade, now: float) -> list[Action]:
        """Enters updates whose losses count, and returns the actions of the learner that reports."""
        ledger, (count, period, _) = self._leader.ledger, event.losses.shape
        seconds = event.gradient_s + event.step_s + event.average_s
        update_s, before = seconds / count, self._place[:count] + ledger.timestamp
        ends = now - ledger.clock.start_time - update_s * self._place[:count][::-1]  # of the updates, evenly
        gradients = self._fill_gradients(event, before)
        if self._reports_minibatches:
            self._report_minibatches(event, before, ends, update_s)
        averages = self._averages[:count]
        averages["timestamp"], averages["distance"] = before[:, None] + 1, event.distances
        averages["correction"] = self._rule.elasticity * event.distances
        updates = self._updates[:count]
        updates["timestamp"], updates["epoch"] = before + 1, ledger.epoch + 1
        updates["learning_rate"], updates["digest"] = self._rates.popleft()[:count], event.digests
        updates["time_s"], updates["update_s"] = ends - event.average_s / count, event.average_s / count
        ledger.enter_burst(gradients.reshape(-1), updates)
        ledger.outbox.extend_by(MessageKind.AVERAGES, averages.reshape(-1))
        self._leader.enter_burst(count, int(event.digests[-1]))
        steps = count * period
        self._next = [(step + steps, work.after(steps)) for step, work in self._next]
        self._steps += steps
        self._firsts += steps * self._strides
        self._made += count
        for place, taken in enumerate((event.gradient_s, event.average_s, event.step_s)):
            self._spent[place] += taken
        return ledger.outbox.due(now)

    def _fill_gradients(self, event: BurstMade, before: Integers) -> npt.NDArray[np.void]:
        """Returns a row for each learner and update, (k, m) of `records.GRADIENT`.

        Args:
            event: Results of the burst.
            before: Timestamp of the weights before each update, (k,).
        """
        count, period, _ = event.losses.shape
        rows, place, timestamp = self._gradients[:count], self._place[:count, None], before[:, None]
        rows["update"], rows["timestamp"] = timestamp + 1, timestamp
        rows["step"] = self._steps + (place + 1) * period - 1
        rows["first"] = self._firsts + place * period * self._strides
        rows["loss"] = (event.losses * self._samples).cumsum(1)[:, -1] / rows["samples"]
        rows["errors"] = event.errors.cumsum(1)[:, -1]
        return rows

    def _report_minibatches(self, event: BurstMade, before: Integers, ends: Floats, update_s: float) -> None:
        """Reports a row for each mini-batch.

        Args:
            event: Results of the burst.
            before: Timestamp of the weights before each update, (k,).
            ends: Training time of the end of each update, (k,).
            update_s: Seconds of each update.
        """
        count, period, _ = event.losses.shape
        rows, inner, each = self._minibatches[:count], self._place[:period], count * period
        rows["step"] = (self._place[:count, None] * period + inner)[..., None] + self._steps
        rows["timestamp"] = before[:, None, None]
        rows["loss"], rows["errors"] = event.losses, event.errors
        rows["time_s"] = (ends[:, None] - update_s * (1 - (inner + 1) / period))[..., None]
        rows["compute_s"], rows["reduce_s"] = event.gradient_s / each, event.average_s / each
        rows["update_s"] = event.step_s / each
        self._leader.ledger.outbox.extend_by(MessageKind.MINIBATCHES, rows.reshape(-1))

    def wake_up(self) -> None:
        """Tells the learners what has been recorded. Each of them can then continue by itself."""
        compute_s, wait_s, step_s = self._spent
        for learner in self._learners:
            learner.follow_burst(self._leader, self._made)
            learner.log.enter_others(self._made * self._rule.period, compute_s, wait_s, step_s)
        self._made = 0
        self._spent = [0.0, 0.0, 0.0]

    def resume(self, now: float) -> Iterator[tuple[int, list[Action]]]:
        """Yields the actions of each learner that begin its next mini-batch, after `wake_up`."""
        for learner in self._learners:
            yield learner.id, learner.begin_minibatch(now)
