"""Bursts that a device repeats from recorded graphs: the host names no operation, and waits for none in between.

A graph makes several rounds: updates, or local steps. Learners have lanes: gradient, correction and step, next
gradient. The averages have lane 0. The last step of an update waits for the average before it, and an average waits for
the steps before it. So an average is made while the next gradients are computed. Without replicas, gradients wait for
the update before them. Mini-batches are gathered by a counter of the device. Losses, distances and samples of the
weights are noted by it.

Source: crossbow.txt §4.2, Figure 8.
"""

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise, takewhile
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from msgspec import structs

from rudra.compute.device.devices import kind_of
from rudra.compute.device.faults import memory_text
from rudra.compute.device.graphs import Graph, NotRecordedError
from rudra.compute.device.streams import Number, Pending, until_done
from rudra.compute.learners import OwningLearnerExecutor
from rudra.compute.optim import Rates, UpdateRule
from rudra.compute.rates import ODD, rounds_alike
from rudra.compute.weight_samples import CountedSamples
from rudra.core.actions import StepReplica
from rudra.core.buffer_names import GRADIENT, REPLICA, WEIGHTS
from rudra.core.bursts import MOST_ROUNDS, Burst, BurstMade
from rudra.core.digest import digest_of
from rudra.log import log
from rudra.memory import bytes_text

WARM = 2
"""Bursts at the same rates that are made as usual before one is recorded: libraries try their kernels."""

SEEN = 100
"""Most rates that are counted."""

KEPT = 8
"""Most graphs. Each belongs to learning rates, and to the memory of its vectors."""

STEPS = 32
"""Most gradients of a graph that makes several rounds."""

AHEAD = 2
"""Bursts that are queued at most: the device makes one while the host records the other."""


@dataclass(slots=True)
class _Slot:
    """Main memory for one burst.

    Attributes:
        rows: (K·τ, Σμ, 1 or 4) int64, which samples the learners take in each step.
        rates: (K·τ, …) float32, rates of each step of the replicas.
        weight_rates: (K, …) float32, rates of each update of the weights.
        losses: (K·τ, m, 2) float64, loss and wrong samples.
        squares: (K, m) float64, square of the distance of each replica in each update.
        samples: (K, …) float32, samples of the weights.
    """

    rows: torch.Tensor
    rates: torch.Tensor
    weight_rates: torch.Tensor
    losses: torch.Tensor
    squares: torch.Tensor
    samples: torch.Tensor


class Notes:
    """Memory of a device for one burst: which samples the learners take, and what is noted of each step and round.

    Args:
        period: Mini-batches of each learner in a round, τ.
        counts: Samples of a mini-batch of each learner.
        groups: Number of optimiser groups of a replica, and of the weights. Without replicas both are the same.
        width: Numbers that identify a sample.
        size: Number of elements of the weights.
        device: The device.

    Attributes:
        rows: (K·τ, Σμ, width) int64.
        rates, weight_rates: (K·τ, groups) and (K, groups) float32, rates of steps of the replicas, and of updates.
        keeps_rates: Whether the work reads its rates there. If not, they are part of a graph.
        losses: (K·τ, m, 2) float64, loss and wrong samples.
        squares: (K, m) float64, square of the distance of each replica in each update.
        samples: Samples of the weights.
        number: (1,) int64, number of rounds that the work before has made.
        places: Place of each learner's samples in a row.
    """

    def __init__(
        self,
        period: int,
        counts: Sequence[int],
        groups: tuple[int, int],
        width: int,
        size: int,
        device: torch.device,
    ) -> None:
        steps, m = MOST_ROUNDS * period, len(counts)
        self.rates = torch.zeros(steps, groups[0], device=device)
        self.weight_rates = torch.zeros(MOST_ROUNDS, groups[1], device=device)
        self.keeps_rates = False
        self.rows = torch.zeros(steps, sum(counts), width, dtype=torch.int64, device=device)
        self.losses = torch.zeros(steps, m, 2, dtype=torch.float64, device=device)
        self.squares = torch.zeros(MOST_ROUNDS, m, dtype=torch.float64, device=device)
        self.samples = CountedSamples(size, MOST_ROUNDS, device)
        self.number = torch.zeros(1, dtype=torch.int64, device=device)
        self.places = [slice(*ends) for ends in pairwise(accumulate(counts, initial=0))]
        self._period = period
        self._unknown = torch.full((), math.nan, dtype=torch.float64, device=device)

    def step(self, step: int) -> torch.Tensor:
        """Returns the number of a step of the work in the burst, (1,) int64."""
        return self.number * self._period + step

    def round_of(self, step: int) -> torch.Tensor:
        """Returns the number of the round of such a step, (1,) int64."""
        return self.number + step // self._period

    def rates_of(self, step: int) -> Rates:
        """Returns the memory with the rates of the replicas' step, as for `UpdateRule.step`."""
        return self.rates.index_select(0, self.step(step))[0].unbind() if self.keeps_rates else ()

    def weight_rates_of(self, number: int) -> Rates:
        """Returns the memory with the rates of the weights in a round of the work, as for `UpdateRule.step`."""
        return self.weight_rates.index_select(0, self.number + number)[0].unbind() if self.keeps_rates else ()

    def row_of(self, loss: Number, wrong: npt.NDArray[Any] | Number | None) -> torch.Tensor:
        """Returns loss and wrong samples of a mini-batch as a row, (2,) float64.

        Raises:
            RuntimeError: They are counted in main memory.
        """
        if isinstance(wrong, np.ndarray) or not isinstance(loss, torch.Tensor):
            raise RuntimeError("the task counts errors in main memory")
        counted = wrong.double().reshape(()) if isinstance(wrong, torch.Tensor) else self._unknown
        return torch.stack([loss.double().reshape(()), counted])


Do = Callable[[int, Callable[[], object], Sequence[int]], None]
"""(lane, work, lanes whose earlier work must be done before) -> None. Appends work to a lane, as `Lanes.do`."""


class Updates(Protocol):
    """Rounds by all learners of a bank: each learner by itself (`lanes`), or all at once (`matrices`).

    Attributes:
        lanes: Lanes of the learners, without lane 0.
    """

    lanes: range

    def gradients(self, do: Do, notes: Notes, step: int) -> None:
        """Appends the gradients of a step of the work: at the replicas, or else at the weights after lane 0."""

    def steps(self, do: Do, notes: Notes, action: StepReplica, step: int) -> None:
        """Appends a step of all replicas of the work. Its rates may be in the notes."""

    def average(self, name: str, samples: Sequence[int]) -> None:
        """Averages the vectors of all learners in a buffer, weighted by samples, into the first of them."""

    def approach(self, do: Do, elasticity: float) -> None:
        """Appends the moves of all replicas towards the central model."""


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


class _Memory(NamedTuple):
    """Memory for bursts of one period. A burst keeps it until its results are read.

    Attributes:
        notes: Memory of the device.
        slots: Main memory for bursts that are not under way.
    """

    notes: Notes
    slots: deque[_Slot]


class RecordedBursts:
    """Bursts from graphs, for learners whose vectors and training set are on one device.

    Args:
        learners: Executors of the learners, in learner order. In updates the first one owns the weights.
        ways: Returns how the learners make a round. It is called when their optimisers have their states.

    Attributes:
        refusal: Why bursts are not recorded. Empty: they may be.
    """

    def __init__(self, learners: Sequence[OwningLearnerExecutor], ways: Callable[[], Updates]) -> None:
        self._learners, self._first, self._ways = learners, learners[0], ways
        self._device = self._first.device
        self._kind = kind_of(self._device)
        self._stream = self._kind.stream(self._device)
        self._graphs: dict[tuple[object, ...], Graph] = {}
        self._counts: tuple[int, ...] = ()  # samples of the mini-batches that the memory is for
        self._memory: dict[int, _Memory] = {}  # by period
        self._seen: Counter[tuple[float, ...]] = Counter()
        self._begun = 0
        self._keeps: dict[tuple[object, ...], bool] = {}  # whether rates may be in memory
        self.refusal = ""

    def begin(self, burst: Burst) -> Made | None:
        """Begins a burst, or only its first rounds. None: it must be made as usual."""
        if self.refusal or (burst.averages and self._first.is_read):
            return None
        count, rates = _alike(burst)
        if len(self._seen) > SEEN:  # a rate of its own for each update, for instance
            self._seen.clear()
        self._seen[rates] += 1
        self._begun += 1
        if self._begun <= WARM:
            return None
        keeps = False
        try:
            if keeps := self._keeps_rates(burst):
                count, rates = burst.rounds, ()
            elif self._seen[rates] <= WARM:
                return None
            notes, slots = memory = self._memory_for(burst)
            notes.keeps_rates = keeps
            graphs = self._graphs_for(burst, count, rates, notes)
        except Exception as error:
            reason = memory_text(error) or (str(error) if isinstance(error, NotRecordedError) else None)
            if reason is None:
                raise
            if keeps and isinstance(error, NotRecordedError):  # perhaps because the optimiser's rates are in memory
                self._keeps[self._about(burst)] = False
                return None
            self.refusal = reason
            log.info(f"updates of the bank are not recorded: {error}")
            return None
        slot, began = slots.popleft(), time.perf_counter()
        self._draw(slot, burst, count, notes.places)
        if keeps:
            self._enter_rates(slot, burst)
        pending = self._stream.submit(partial(self._do, notes, slot, burst, count, graphs, takes_rates=keeps))
        for executor, name in self._stepped(burst):
            executor.buffer(name).version += count
        return Made(count, burst.averages, self._results(memory, slot, burst, count, pending, began), queued=True)

    def _results(
        self, memory: _Memory, slot: _Slot, burst: Burst, count: int, pending: Pending, began: float
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
        self._blame(burst, noted[..., 0])
        yield BurstMade(burst, noted[..., 0], noted[..., 1], distances, digests, time.perf_counter() - began, 0.0, 0.0)

    def _blame(self, burst: Burst, losses: npt.NDArray[np.float64]) -> None:
        """Raises DataError if a loss is not finite because of a sample."""
        for at, inner, place in np.argwhere(~np.isfinite(losses)).tolist():
            (step, work), source = burst.learners[place], self._learners[place].source
            number = at * burst.period + inner
            batch = partial(source.minibatch, step + number, work.after(number))
            source.confirmed((losses[at, inner, place], math.nan), work, batch)

    # Memory.

    def _memory_for(self, burst: Burst) -> _Memory:
        """Returns the memory for bursts of this period, with mini-batches of these sizes."""
        counts = tuple(work.count for _, work in burst.learners)
        if counts != self._counts:
            self._counts, self._memory, self._graphs = counts, {}, {}
        if burst.period not in self._memory:
            width = self._first.source.indices_of(*burst.learners[0], 1).shape[1]
            groups = len(self._rules[0].rates(0.0)), len(self._rules[1].rates(0.0))
            notes = Notes(burst.period, counts, groups, width, self._first.size, self._device)
            there = notes.rows, notes.rates, notes.weight_rates, notes.losses, notes.squares, notes.samples.taken
            slots = deque(_Slot(*map(self._main_memory, there)) for _ in range(AHEAD))
            self._memory[burst.period] = _Memory(notes, slots)
        return self._memory[burst.period]

    @property
    def _rules(self) -> tuple[UpdateRule, UpdateRule]:
        """Update rules of the replicas and of the weights. Without replicas both are the same."""
        rules = [*self._first.rules.values()]
        return rules[0], rules[-1]

    def _stepped(self, burst: Burst) -> list[tuple[OwningLearnerExecutor, str]]:
        """Returns the vectors that a round steps: the replicas, and the weights by an average."""
        replicas = [(each, name) for each in self._learners for name in each.rules if name != WEIGHTS]
        return [*replicas, *([(self._first, WEIGHTS)] if burst.averages else ())]

    def _about(self, burst: Burst) -> tuple[object, ...]:
        return burst.averages, self._first.settings

    def _keeps_rates(self, burst: Burst) -> bool:
        """Returns whether all rates of a burst may be in memory. Then a graph serves any of them.

        Local steps do not try it with the weights, of which an average may be under way.
        """
        about = self._about(burst)
        if about not in self._keeps:
            rate, rules = (burst.rates or burst.weight_rates)[0] * ODD, self._first.rules
            own = [(rules[name], name) for each, name in self._stepped(burst) if each is self._first]
            self._keeps[about] = all(
                rule.takes_rates
                and rounds_alike(partial(self._try, rule), self._state(rule, name), rule.rates(rate), rate)
                for rule, name in own
            )
        return self._keeps[about]

    def _state(self, rule: UpdateRule, name: str) -> list[torch.Tensor]:
        return [self._first.buffer(name).vector, *rule.state().values()]

    def _try(self, rule: UpdateRule, rate: float, rates: Rates) -> None:
        rule.step(self._first.buffer(GRADIENT).vector[: self._first.parameters], rate, rates=rates)

    def _enter_rates(self, slot: _Slot, burst: Burst) -> None:
        """Enters the rates of all steps and updates."""
        inner, outer = self._rules
        for rule, rates, into in (inner, burst.rates, slot.rates), (outer, burst.weight_rates, slot.weight_rates):
            if rates:
                into[: len(rates)] = torch.tensor([rule.rates(rate) for rate in rates], dtype=torch.float64)

    def _main_memory(self, like: torch.Tensor) -> torch.Tensor:
        return self._kind.main_memory(like.nbytes).view(like.dtype).view(like.shape)

    def _draw(self, slot: _Slot, burst: Burst, count: int, places: Sequence[slice]) -> None:
        """Draws the samples of all mini-batches."""
        steps = count * burst.period
        for executor, (step, work), place in zip(self._learners, burst.learners, places, strict=True):
            drawn = executor.source.indices_of(step, work, steps)
            slot.rows[:steps, place] = drawn.view(steps, work.count, -1)

    # Work of the device.

    def _do(
        self, notes: Notes, slot: _Slot, burst: Burst, count: int, graphs: Sequence[Graph], *, takes_rates: bool
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
        about = burst.averages, rates, burst.step, burst.elasticity, self._first.settings
        key = rounds, burst.period, *about, *(each.data_ptr() for each in self._written(burst))
        found = self._graphs.get(key)
        if found is None or not found.is_valid():
            while len(self._graphs) >= KEPT:
                del self._graphs[next(iter(self._graphs))]
            found = self._graphs[key] = self._recorded(burst, rounds, notes)
        return found

    def _written(self, burst: Burst) -> list[torch.Tensor]:
        """Returns all tensors that a round changes, in memory without other readers.

        A restart or a change of the job may replace those of the optimisers. Local steps do not change weights and
        differences, because an average of the period before may be under way.
        """
        found = []
        for executor, name in self._stepped(burst):
            found += [executor.buffer(name).vector, *executor.rules[name].state().values()]
        filled = {GRADIENT, burst.averaged} if burst.averages else {GRADIENT}
        return found + [executor.renew(name).vector for executor in self._learners for name in sorted(filled)]

    def _recorded(self, burst: Burst, rounds: int, notes: Notes) -> Graph:
        """Records rounds. Nothing has changed afterwards.

        Raises:
            NotRecordedError: They cannot be recorded.
        """
        generator, ways = self._kind.generator(self._device), self._ways()
        written = [*self._written(burst), notes.number, notes.samples.timestamp]
        needed, free = sum(each.nbytes for each in written), self._kind.free_bytes(self._device)
        if free is not None and needed > free / 2:
            raise NotRecordedError(
                f"copies of what they change take {bytes_text(needed)}, and {bytes_text(free)} are free"
            )
        before, drawn = [each.clone() for each in written], generator.get_state()
        notes.number.zero_()
        notes.rows.zero_()
        try:
            graph, _ = self._kind.record(self._device, partial(self._work, ways, burst, rounds, notes))
        finally:
            for tensor, value in zip(written, before, strict=True):
                tensor.copy_(value)
        if not torch.equal(drawn, generator.get_state()):
            raise NotRecordedError("the model draws random numbers")
        return graph

    def _work(self, ways: Updates, burst: Burst, rounds: int, notes: Notes) -> None:
        """Makes rounds."""
        lanes = self._kind.lanes(self._device, 1 + len(ways.lanes))
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


def _alike(burst: Burst) -> tuple[int, tuple[float, ...]]:
    """Returns the number of the first rounds with the same rates, and these: of each step, and of the update."""
    period = burst.period
    rates = [
        (*burst.rates[at * period : (at + 1) * period], *burst.weight_rates[at : at + 1]) for at in range(burst.rounds)
    ]
    return sum(1 for _ in takewhile(rates[0].__eq__, rates)), rates[0]
