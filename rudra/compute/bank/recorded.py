"""Bursts that a device repeats from recorded graphs: the host names no operation, and waits for none in between.

A graph makes several rounds: updates, or local steps. Learners have lanes: gradient, correction and step, next
gradient. The averages have lane 0. The last step of an update waits for the average before it, and an average waits for
the steps before it. So an average is made while the next gradients are computed. Without replicas, gradients wait for
the update before them. Mini-batches are gathered by a counter of the device. Losses, distances and samples of the
weights are noted by it.

Source: crossbow.txt §4.2, Figure 8.
"""

import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import takewhile
from typing import NamedTuple

import numpy as np
from msgspec import structs

from rudra.compute.bank.recording import BankRecorder, HostNotes, Memory, Notes, Updates
from rudra.compute.device.graphs import Graph
from rudra.compute.device.streams import Pending, until_done
from rudra.core.actions import StepReplica
from rudra.core.buffer_names import GRADIENT, REPLICA, WEIGHTS
from rudra.core.bursts import Burst, BurstMade
from rudra.core.digest import digest_of

STEPS = 32
"""Most gradients of a graph that makes several rounds."""


class Made(NamedTuple):
    """Burst that is being made.

    Attributes:
        rounds: Number of its rounds.
        averages: Whether each of them ends with an average.
        work: Yields work of the device as long as it is not done, then the results.
        queued: Whether the device makes it without the host, so that another one may be queued behind it.
    """

    rounds: int
    averages: bool
    work: Iterator[BurstMade | Pending | None]
    queued: bool = False


class RecordedBursts:
    """Bursts from graphs.

    Args:
        recorder: Graphs of the bank.
    """

    def __init__(self, recorder: BankRecorder) -> None:
        self._recorder = recorder
        self._learners, self._first = recorder.learners, recorder.learners[0]

    @property
    def refusal(self) -> str:
        """Why bursts are not recorded. Empty: they may be."""
        return self._recorder.refusal

    def begin(self, burst: Burst) -> Made | None:
        """Begins a burst, or only its first rounds. None: it must be made as usual."""
        recorder = self._recorder
        if recorder.refusal or (burst.averages and self._first.is_read):
            return None
        count, rates = _alike(burst)
        frequent, warm = recorder.is_frequent(rates), recorder.is_warm("bursts")
        if not warm:
            return None
        about, keeps = (burst.averages, recorder.settings), False
        try:
            rate = (burst.rates or burst.weight_rates)[0]
            if keeps := recorder.keeps_rates(about, rate, averages=burst.averages):
                count, rates = burst.rounds, ()
            elif not frequent:
                return None
            memory = recorder.memory(burst.learners, burst.period)
            memory.notes.keeps_rates = keeps
            graphs = self._graphs_for(burst, count, rates, memory.notes)
        except Exception as error:
            recorder.note(error, about if keeps else None)
            return None
        slot, began = memory.slots.popleft(), time.perf_counter()
        recorder.draw(memory, slot, burst.learners, count * burst.period)
        if keeps:
            recorder.enter_rates(slot, burst.rates, burst.weight_rates)
        pending = recorder.submit(partial(_do, memory.notes, slot, burst, count, graphs, takes_rates=keeps))
        for executor, name in recorder.stepped(averages=burst.averages):
            executor.buffer(name).version += count
        return Made(count, burst.averages, self._results(memory, slot, burst, count, pending, began), queued=True)

    def _results(
        self, memory: Memory, slot: HostNotes, burst: Burst, count: int, pending: Pending, began: float
    ) -> Iterator[BurstMade | Pending]:
        yield from until_done(pending)
        pending.numbers()
        period, m = burst.period, len(self._learners)
        noted = slot.losses[: count * period].view(count, period, m, 2).numpy().copy()
        updates = count * burst.averages
        distances = np.sqrt(slot.squares[:updates].numpy())  # torch's is not rounded correctly
        sampled = (memory.notes.samples.of(slot.samples, at, burst.timestamp + at + 1) for at in range(updates))
        digests = np.array([digest_of(each) for each in sampled], np.uint64)
        memory.slots.append(slot)
        losses = noted[..., 0]
        for at, inner, place in np.argwhere(~np.isfinite(losses)).tolist():
            (step, work), number = burst.learners[place], at * period + inner
            self._recorder.blame(place, step + number, work.after(number), losses[at, inner, place])
        yield BurstMade(burst, losses, noted[..., 1], distances, digests, time.perf_counter() - began, 0.0, 0.0)

    def _graphs_for(self, burst: Burst, count: int, rates: tuple[float, ...], notes: Notes) -> list[Graph]:
        """Returns the graphs that make these rounds one after another.

        Args:
            burst: The burst.
            count: Number of rounds.
            rates: Rates that are part of the graphs.
            notes: Memory that they use.

        Raises:
            NotRecordedError: They cannot be recorded.
        """
        most = max(1, STEPS // (len(self._learners) * burst.period))
        many, single = divmod(count, most)
        sizes = ((most, many), (1, single)) if most > 1 else ((1, count),)
        return [graph for size, times in sizes if times for graph in [self._graph(burst, size, rates, notes)] * times]

    def _graph(self, burst: Burst, rounds: int, rates: tuple[float, ...], notes: Notes) -> Graph:
        # Local steps do not change weights and differences, because an average of the period before may be under way.
        filled = sorted({GRADIENT, burst.averaged}) if burst.averages else [GRADIENT]
        written = self._recorder.written(*filled, averages=burst.averages)
        about = rounds, burst.period, burst.averages, rates, burst.step, burst.elasticity, self._recorder.settings
        return self._recorder.graph(about, written, partial(self._work, burst, rounds), notes)

    def _work(self, burst: Burst, rounds: int, ways: Updates, notes: Notes) -> None:
        """Makes rounds."""
        lanes = self._recorder.lanes(ways)
        for number in range(rounds):
            for inner in range(burst.period):
                place = number * burst.period + inner
                ways.gradients(lanes.do, notes, place)
                if burst.step is not None:
                    ends, rate = burst.averages and inner + 1 == burst.period, burst.rates[inner]
                    usual = StepReplica(GRADIENT, REPLICA, rate)
                    step = structs.replace(burst.step, learning_rate=rate) if ends else usual
                    ways.steps(lanes.do, notes, step, place)
            if burst.averages:
                lanes.do(0, partial(self._average, ways, burst, number, notes), ways.lanes)
            if burst.averages and burst.elasticity is not None:
                ways.approach(lanes.do, burst.elasticity)
        lanes.join()
        notes.number.add_(rounds)
        notes.samples.go_on(rounds)

    def _average(self, ways: Updates, burst: Burst, number: int, notes: Notes) -> None:
        """Averages, steps the weights and notes a sample of them, in an update of the work."""
        owner, name = self._first, burst.averaged
        mean, weights = owner.buffer(name).vector, owner.buffer(WEIGHTS).vector
        ways.average(name, [work.count for _, work in burst.learners])
        owner.in_place().apply(mean, burst.weight_rates[0], notes.weight_rates_of(number))
        notes.samples.take(weights, number)


def _do(
    notes: Notes, slot: HostNotes, burst: Burst, count: int, graphs: Sequence[Graph], *, takes_rates: bool
) -> tuple[()]:
    """Makes rounds, and brings back what is noted."""
    steps, updates = count * burst.period, count * burst.averages
    notes.rows[:steps].copy_(slot.rows[:steps], non_blocking=True)
    if takes_rates:
        notes.rates[:steps].copy_(slot.rates[:steps], non_blocking=True)
        notes.weight_rates[:updates].copy_(slot.weight_rates[:updates], non_blocking=True)
    notes.number.zero_()
    notes.samples.begin(burst.timestamp + 1)
    for graph in graphs:
        graph.replay()
    slot.losses[:steps].copy_(notes.losses[:steps], non_blocking=True)
    slot.squares[:updates].copy_(notes.squares[:updates], non_blocking=True)
    slot.samples[:updates].copy_(notes.samples.taken[:updates], non_blocking=True)
    return ()


def _alike(burst: Burst) -> tuple[int, tuple[float, ...]]:
    """Returns the number of the first rounds with the same rates, and these: of each step, and of the update."""
    period = burst.period
    rates = [
        (*burst.rates[at * period : (at + 1) * period], *burst.weight_rates[at : at + 1]) for at in range(burst.rounds)
    ]
    return sum(1 for _ in takewhile(rates[0].__eq__, rates)), rates[0]
