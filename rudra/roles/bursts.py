"""Records of a bank whose learners make several mini-batches at once, without being asked in between.

Usually a learner is asked after its gradient, its step and each average. A small device computes all of them in less
time. So a rank makes a *burst* of rounds while nothing else is due. One object then keeps the records of its learners,
in columns, and the learners sleep. They are woken up for everything else: a message, a stop, or work that is not in the
burst. There are two kinds of rounds (`rudra.core.bursts.Burst`):

* Updates, if all learners of the run are on one rank. Replicas are averaged, or the gradients at the same weights
  (hardsync). Learners make an update by themselves if it ends an epoch, makes a checkpoint or changes the job.
* Local steps, if the averaging period τ is longer than one mini-batch. No other rank waits for them. Learners compute
  the last mini-batch of a period by themselves, and the average follows as usual.

A burst gives bitwise the same weights, and the same rows, as learners that are asked.
"""

from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from rudra.core import records
from rudra.core.actions import Action
from rudra.core.bursts import MOST_ROUNDS, Burst, BurstMade
from rudra.core.messages import MessageKind
from rudra.roles.replica import Replica

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


class BankRecords:
    """Records of all learners of a rank, begun when each of them waits for the same mini-batch.

    Args:
        learners: The learners that take part, in learner order. The first one reports, and decides for all.
        alone: Whether all learners of the run are here, so that a burst may make updates.
    """

    def __init__(self, learners: Sequence[Replica], *, alone: bool) -> None:
        self._learners, self._leader = learners, learners[0]
        self._updating = alone and all(learner.may_sleep for learner in learners)
        self._protocol = self._leader.ledger.rules.protocol
        self._starts = [learner.log.upcoming for learner in learners]  # the mini-batch that each computes first
        self._recorded = 0  # mini-batches of each learner since then
        self._spent = [0.0, 0.0, 0.0]  # seconds of gradients, waits and steps
        self._made = self._computed = 0  # updates, and mini-batches of each learner, that the learners do not know of
        self._rates: deque[list[float]] = deque()  # of the updates of each burst under way, for the records
        works = [work for _, work in self._starts]
        self._steps = np.array([step for step, _ in self._starts])
        self._firsts, self._strides = np.array([(work.first, work.stride) for work in works]).T
        self._samples = np.array([work.count for work in works])
        self._together = sum(work.count for work in works)  # samples of a mini-batch of all learners
        self._numbers = [learner.log.learner for learner in learners]
        self._reports_minibatches = self._leader.ledger.rules.job.results.minibatches
        self._make_room(MOST_ROUNDS)
        if self._updating:
            self._prepare_updates([work.stream for work in works])

    # Tables with room for the longest burst. They already hold the numbers that never change.

    def _make_room(self, steps: int) -> None:
        """Makes the table of mini-batches."""
        self._minibatches = np.zeros((steps, len(self._learners)), records.MINIBATCH)
        self._minibatches["learner"], self._minibatches["samples"] = self._numbers, self._samples
        self._place = np.arange(steps)

    def _prepare_updates(self, streams: Sequence[int]) -> None:
        """Makes the tables of updates."""
        period, m = self._protocol.period, len(self._learners)
        self._gradients = np.zeros((MOST_ROUNDS, m), records.GRADIENT)
        self._gradients["learner"], self._gradients["scale"] = self._numbers, 1.0
        self._gradients["samples"], self._gradients["stream"] = self._samples * period, streams
        self._averages = np.zeros((MOST_ROUNDS, m), records.AVERAGE)
        self._averages["learner"] = self._numbers
        self._updates = np.zeros(MOST_ROUNDS, records.UPDATE)
        self._updates["gradients"], self._updates["samples"] = m, self._together * period

    def burst(self, most: int, now: float, begun: int = 0, *, begun_averages: bool = False) -> Burst | None:
        """Returns the next burst. None: the learners must compute the next mini-batch by themselves.

        Args:
            most: Largest number of mini-batches of each learner. An update is made as a whole.
            now: Seconds on the driver's clock.
            begun: Number of rounds before them that are under way.
            begun_averages: Whether each of these ends with an average.
        """
        leader, period = self._leader, self._protocol.period
        if self._updating and not leader.made.count and (begun_averages or not begun):
            samples, updates = self._together * period, min(max(1, most // period), MOST_ROUNDS)
            if count := leader.quiet_updates(samples, updates, now, begun):
                return self._updates_ahead(count, samples, begun)
        count = min(most, leader.local_steps - begun, MOST_ROUNDS)
        if count <= 0 or (begun and begun_averages):
            return None
        return self._ahead(count, leader.place[0], leader.rates_ahead(count, begun), (), begun)

    def _updates_ahead(self, count: int, samples: int, begun: int) -> Burst:
        ledger, period, outer = self._leader.ledger, self._protocol.period, self._protocol.outer_rate
        before, rates = begun * period, ledger.rates_ahead(count, samples, begun)
        self._rates.append(rates)
        weight_rates = tuple(rates) if outer is None else (outer,) * count
        steps = self._leader.rates_ahead(count * period, before)
        return self._ahead(count, ledger.timestamp + begun, steps, weight_rates, before)

    def _ahead(
        self, count: int, timestamp: int, rates: list[float], weight_rates: tuple[float, ...], before: int
    ) -> Burst:
        """Returns a burst that follows `before` mini-batches of each learner."""
        rule, passed = self._leader.rule, self._recorded + before
        return Burst(
            count,
            tuple([(step + passed, work.after(passed)) for step, work in self._starts]),
            timestamp,
            tuple(rates),
            weight_rates,
            self._leader.step_ahead,
            None if rule is None or rule.early else rule.elasticity,
        )

    def enter(self, event: BurstMade, now: float) -> Iterator[tuple[int, list[Action]]]:
        """Records the rounds of a burst.

        Args:
            event: Results of the burst.
            now: Seconds on the driver's clock.

        Yields:
            Roles and their actions.
        """
        last, losses, leader = len(event.losses), event.losses, self._leader
        if not np.isfinite(losses).all():
            period = event.burst.period
            for number, inner, place in np.argwhere(~np.isfinite(losses)).tolist():
                timestamp = event.burst.timestamp + number * event.burst.averages
                step = self._starts[place][0] + self._recorded + number * period + inner
                about = step, float(losses[number, inner, place]), timestamp
                actions, fails = self._learners[place].log.judge(*about)
                if fails:
                    last = number
                    break
                yield self._learners[place].id, actions
        if last:
            self._record(event.first(last), now)
            yield leader.id, [*leader.ledger.outbox.due(now), *leader.log.due(now)]
        if last < len(losses):
            yield leader.id, [*leader.ledger.outbox.flush(now), *leader.log.diary.flush(now)]
            yield self._learners[place].id, actions

    def _record(self, event: BurstMade, now: float) -> None:
        """Enters rounds whose losses count."""
        count, period, _ = event.losses.shape
        steps, round_s = count * period, event.seconds / count
        if steps > len(self._place):
            self._make_room(steps)
        ends = now - self._leader.ledger.clock.start_time - round_s * self._place[:count][::-1]  # of rounds, evenly
        before = event.burst.timestamp + self._place[:count] * event.burst.averages
        if self._reports_minibatches:
            self._report_minibatches(event, before, ends, round_s)
        if event.burst.averages:
            self._record_updates(event, before, ends)
        else:
            self._record_steps(event)
        self._recorded += steps
        self._computed += steps
        for place, taken in enumerate((event.gradient_s, event.average_s, event.step_s)):
            self._spent[place] += taken

    def _record_updates(self, event: BurstMade, before: Integers, ends: Floats) -> None:
        """Enters updates.

        Args:
            event: Results of the burst.
            before: Timestamp of the weights before each update, (k,).
            ends: Training time of the end of each update, (k,).
        """
        ledger, count = self._leader.ledger, len(event.losses)
        gradients = self._fill_gradients(event, before)
        updates = self._updates[:count]
        updates["timestamp"], updates["epoch"] = before + 1, ledger.epoch + 1
        updates["learning_rate"], updates["digest"] = self._rates.popleft()[:count], event.digests
        updates["time_s"], updates["update_s"] = ends - event.average_s / count, event.average_s / count
        ledger.enter_burst(gradients.reshape(-1), updates)
        if (rule := self._leader.rule) is not None:
            averages = self._averages[:count]
            averages["timestamp"], averages["distance"] = before[:, None] + 1, event.distances
            averages["correction"] = rule.elasticity * event.distances
            ledger.outbox.extend_by(MessageKind.AVERAGES, averages.reshape(-1))
        self._leader.enter_burst(count, int(event.digests[-1]))
        self._made += count

    def _record_steps(self, event: BurstMade) -> None:
        """Enters local steps. Sums are added one by one, as learners do it."""
        count, made = len(event.losses), [learner.made for learner in self._learners]
        losses = np.concatenate([[[each.loss for each in made]], event.losses[:, 0] * self._samples]).cumsum(0)[-1]
        errors = np.concatenate([[[each.errors for each in made]], event.errors[:, 0]]).cumsum(0)[-1]
        samples, firsts = self._samples * count, self._firsts + self._recorded * self._strides
        for each, *about in zip(made, *map(np.ndarray.tolist, (samples, firsts, losses, errors)), strict=True):
            each.extend(count, *about)

    def _fill_gradients(self, event: BurstMade, before: Integers) -> npt.NDArray[np.void]:
        """Returns a row for each learner and update, (k, m) of `records.GRADIENT`.

        Args:
            event: Results of the burst.
            before: Timestamp of the weights before each update, (k,).
        """
        count, period, _ = event.losses.shape
        rows, passed, timestamp = self._gradients[:count], self._place[:count, None] * period, before[:, None]
        passed += self._recorded
        rows["update"], rows["timestamp"] = timestamp + 1, timestamp
        rows["step"] = self._steps + (passed + (period - 1))
        rows["first"] = self._firsts + passed * self._strides
        if self._leader.rule is None:
            rows["loss"], rows["errors"] = event.losses[:, 0], event.errors[:, 0]
            return rows
        losses, errors = event.losses * self._samples, event.errors
        if period > 1:
            losses, errors = losses.cumsum(1), errors.cumsum(1)
        rows["loss"], rows["errors"] = losses[:, -1] / rows["samples"], errors[:, -1]
        return rows

    def _report_minibatches(self, event: BurstMade, before: Integers, ends: Floats, round_s: float) -> None:
        """Reports a row for each mini-batch.

        Args:
            event: Results of the burst.
            before: Timestamp of the weights before each round, (k,).
            ends: Training time of the end of each round, (k,).
            round_s: Seconds of each round.
        """
        count, period, m = event.losses.shape
        steps, inner = count * period, self._place[:period]
        rows = self._minibatches[:steps]
        rows["step"] = self._steps + (self._place[:steps, None] + self._recorded)
        rows["timestamp"] = before.repeat(period)[:, None]
        rows["loss"], rows["errors"] = event.losses.reshape(steps, m), event.errors.reshape(steps, m)
        rows["time_s"] = (ends[:, None] - round_s * (1 - (inner + 1) / period)).reshape(steps, 1)
        rows["compute_s"], rows["reduce_s"] = event.gradient_s / steps, event.average_s / steps
        rows["update_s"] = event.step_s / steps
        self._leader.log.diary.extend_by(MessageKind.MINIBATCHES, rows.reshape(-1))

    def wake_up(self) -> None:
        """Tells the learners what has been recorded. Each of them can then continue by itself."""
        compute_s, wait_s, step_s = self._spent
        for learner in self._learners:
            if self._made:
                learner.follow_burst(self._leader, self._made)
            learner.log.enter_others(self._computed, compute_s, wait_s, step_s)
        self._made = self._computed = 0
        self._spent = [0.0, 0.0, 0.0]

    def resume(self, now: float) -> Iterator[tuple[int, list[Action]]]:
        """Yields the actions of each learner that begin its next mini-batch, after `wake_up`."""
        for learner in self._learners:
            yield learner.id, learner.begin_minibatch(now)
