"""Bursts that a device repeats from recorded graphs: the host names no operation, and waits for none in between.

A graph makes several updates. Each learner has a lane: gradient, correction and step, next gradient. The averages have
lane 0. A step waits for the average before it, and an average waits for the steps before it. So an average is made
while the next gradients are computed. Mini-batches are gathered by a counter of the device, and losses, distances and
samples of the weights are noted by it.

Source: crossbow.txt §4.2, Figure 8.
"""

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise, takewhile
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from msgspec import structs

from rudra.compute.averaging import average
from rudra.compute.bank.fused import Operations, fused_gradients
from rudra.compute.device.devices import kind_of
from rudra.compute.device.graphs import Graph, NotRecordedError
from rudra.compute.device.streams import Pending, until_done
from rudra.compute.replicas import AveragerExecutor
from rudra.compute.together import put_together
from rudra.compute.weight_samples import CountedSamples
from rudra.core.actions import MOST_UPDATES, Burst, StepReplica
from rudra.core.buffer_names import DIFFERENCE, GRADIENT, REPLICA, WEIGHTS
from rudra.core.digest import digest_of
from rudra.core.events import BurstMade
from rudra.log import log

WARM = 2
"""Bursts at the same rates that are made as usual before one is recorded: libraries try their kernels."""

SEEN = 100
"""Most rates that are counted."""

KEPT = 8
"""Most graphs. Each belongs to learning rates, and to the memory of all vectors."""

STEPS = 32
"""Most gradients of a graph that makes several updates."""

AHEAD = 2
"""Bursts that are queued at most: the device makes one while the host records the other."""


@dataclass(slots=True)
class _Slot:
    """Main memory for one burst.

    Attributes:
        rows: (K·τ, Σμ, 1 or 4) int64, which samples the learners take in each step.
        losses: (K·τ, m, 2) float64, loss and wrong samples.
        squares: (K, m) float64, square of the distance of each replica.
        samples: (K, …) float32, samples of the weights.
    """

    rows: torch.Tensor
    losses: torch.Tensor
    squares: torch.Tensor
    samples: torch.Tensor


class Made(NamedTuple):
    """Burst that is being made.

    Attributes:
        updates: Number of its updates.
        work: Yields work of the device as long as it is not done, then the results.
        queued: Whether the device makes it without the host, so that another one may be queued behind it.
    """

    updates: int
    work: Iterator[BurstMade | Pending | None]
    queued: bool = False


class RecordedBursts:
    """Bursts from graphs, for learners whose vectors and training set are on one device.

    Args:
        learners: Executors of the learners, in learner order. The first one owns the central model.
        sums: Order of addition (`Plan.partial_sums`).
        lanes: Number of lanes of learners: how many may compute at the same time.
        fused: Whether the gradients of all learners are computed by the same operations.

    Attributes:
        refusal: Why bursts are not recorded. Empty: they may be.
    """

    def __init__(
        self, learners: Sequence[AveragerExecutor], sums: Sequence[Sequence[int]], *, lanes: int, fused: bool
    ) -> None:
        self._learners, self._first, self._sums = learners, learners[0], sums
        self._device = self._first.device
        self._kind = kind_of(self._device)
        self._stream = self._kind.stream(self._device)
        self._lanes, self._fused = 1 if fused else lanes, fused
        self._graphs: dict[tuple[object, ...], Graph] = {}
        self._slots: deque[_Slot] = deque()
        self._burst: Burst | None = None  # whose shapes the memory has
        self._seen: Counter[tuple[float, ...]] = Counter()
        self.refusal = ""

    def begin(self, burst: Burst) -> Made | None:
        """Begins a burst, or only its first updates. None: it must be made as usual."""
        if self.refusal or self._first.is_read:
            return None
        count, rates = _alike(burst)
        if len(self._seen) > SEEN:  # a rate of its own for each update, for instance
            self._seen.clear()
        self._seen[rates] += 1
        if self._seen[rates] <= WARM:
            return None
        self._allocate(burst)
        try:
            graphs = self._graphs_for(burst, count)
        except NotRecordedError as error:
            self.refusal = str(error)
            log.info(f"updates of the bank are not recorded: {error}")
            return None
        slot, began = self._slots.popleft(), time.perf_counter()
        self._draw(slot, burst, count)
        pending = self._stream.submit(partial(self._do, slot, burst, count, graphs))
        for executor in self._learners:
            executor.buffer(REPLICA).version += count
        self._first.buffer(WEIGHTS).version += count
        return Made(count, self._results(slot, burst, count, pending, began), queued=True)

    def _results(
        self, slot: _Slot, burst: Burst, count: int, pending: Pending, began: float
    ) -> Iterator[BurstMade | Pending]:
        yield from until_done(pending)
        pending.numbers()
        period, m = burst.period, len(self._learners)
        noted = slot.losses[: count * period].view(count, period, m, 2).numpy()
        distances = np.sqrt(slot.squares[:count].numpy())  # torch's is not rounded correctly
        digests = [
            digest_of(self._samples.of(slot.samples, place, burst.timestamp + place + 1)) for place in range(count)
        ]
        self._blame(burst, noted[..., 0])
        about = burst, noted[..., 0].copy(), noted[..., 1].copy(), distances, np.array(digests, np.uint64)
        self._slots.append(slot)
        yield BurstMade(*about, time.perf_counter() - began, 0.0, 0.0)

    def _blame(self, burst: Burst, losses: npt.NDArray[np.float64]) -> None:
        """Raises DataError if a loss is not finite because of a sample."""
        for update, inner, place in np.argwhere(~np.isfinite(losses)).tolist():
            (step, work), source = burst.learners[place], self._learners[place].source
            number = update * burst.period + inner
            batch = partial(source.minibatch, step + number, work.after(number))
            source.confirmed((losses[update, inner, place], math.nan), work, batch)

    # Memory.

    def _allocate(self, burst: Burst) -> None:
        """Allocates the memory for bursts with mini-batches of these sizes."""
        about = burst.period, [work.count for _, work in burst.learners]
        before = self._burst
        if before is not None and about == (before.period, [work.count for _, work in before.learners]):
            return
        self._burst, self._graphs = burst, {}
        counts, m = about[1], len(self._learners)
        step, work = burst.learners[0]
        width = self._first.source.indices_of(step, work, 1).shape[1]
        steps, device = MOST_UPDATES * burst.period, self._device
        self._rows = torch.zeros(steps, sum(counts), width, dtype=torch.int64, device=device)
        self._losses = torch.zeros(steps, m, 2, dtype=torch.float64, device=device)
        self._squares = torch.zeros(MOST_UPDATES, m, dtype=torch.float64, device=device)
        self._samples = CountedSamples(self._first.size, MOST_UPDATES, device)
        self._number = torch.zeros(1, dtype=torch.int64, device=device)  # of updates
        self._places = [slice(*ends) for ends in pairwise(accumulate(counts, initial=0))]
        there = self._rows, self._losses, self._squares, self._samples.taken
        self._slots = deque(_Slot(*(self._main_memory(each) for each in there)) for _ in range(AHEAD))

    def _main_memory(self, like: torch.Tensor) -> torch.Tensor:
        return self._kind.main_memory(like.nbytes).view(like.dtype).view(like.shape)

    def _draw(self, slot: _Slot, burst: Burst, count: int) -> None:
        """Draws the samples of all mini-batches."""
        steps = count * burst.period
        for executor, (step, work), place in zip(self._learners, burst.learners, self._places, strict=True):
            drawn = executor.source.indices_of(step, work, steps)
            slot.rows[:steps, place] = drawn.view(steps, work.count, -1)

    # Work of the device.

    def _do(self, slot: _Slot, burst: Burst, count: int, graphs: Sequence[Graph]) -> tuple[()]:
        """Makes updates, and brings back what is noted."""
        steps = count * burst.period
        self._rows[:steps].copy_(slot.rows[:steps], non_blocking=True)
        self._number.zero_()
        self._samples.begin(burst.timestamp + 1)
        for graph in graphs:
            graph.replay()
        for here, there in (
            (slot.losses[:steps], self._losses[:steps]),
            (slot.squares[:count], self._squares[:count]),
            (slot.samples[:count], self._samples.taken[:count]),
        ):
            here.copy_(there, non_blocking=True)
        return ()

    def _graphs_for(self, burst: Burst, count: int) -> list[Graph]:
        """Returns the graphs that make these updates one after another.

        Raises:
            NotRecordedError: They cannot be recorded.
        """
        most = max(1, STEPS // (len(self._learners) * burst.period))
        many, single = divmod(count, most)
        sizes = ((most, many), (1, single)) if most > 1 else ((1, count),)
        return [graph for size, times in sizes if times for graph in [self._graph(burst, size)] * times]

    def _graph(self, burst: Burst, updates: int) -> Graph:
        vectors = [each.data_ptr() for each in self._vectors()]
        about = _alike(burst)[1], burst.step, burst.elasticity
        key = updates, *about, *vectors
        found = self._graphs.get(key)
        if found is None or not found.is_valid():
            while len(self._graphs) >= KEPT:
                del self._graphs[next(iter(self._graphs))]
            found = self._graphs[key] = self._recorded(burst, updates)
        return found

    def _vectors(self) -> list[torch.Tensor]:
        """Returns all vectors that an update reads or writes, in memory that nobody else reads."""
        found = [self._first.buffer(WEIGHTS).vector]
        for executor in self._learners:
            found.append(executor.buffer(REPLICA).vector)
            found += (executor.renew(name).vector for name in (GRADIENT, DIFFERENCE))
        return found

    def _state(self) -> list[torch.Tensor]:
        """Returns the tensors of all optimisers."""
        return [each for executor in self._learners for each in executor.states(central=executor is self._first)]

    def _recorded(self, burst: Burst, updates: int) -> Graph:
        """Records updates. Nothing has changed afterwards.

        Raises:
            NotRecordedError: They cannot be recorded.
        """
        generator = self._kind.generator(self._device)
        written = [*self._vectors(), *self._state(), self._number, self._samples.timestamp]
        before, drawn = [each.clone() for each in written], generator.get_state()
        self._number.zero_()
        self._rows.zero_()
        try:
            graph, draws = self._kind.record(self._device, partial(self._updates, burst, updates))
        finally:
            for tensor, value in zip(written, before, strict=True):
                tensor.copy_(value)
        if draws or not torch.equal(drawn, generator.get_state()):
            raise NotRecordedError("the model draws random numbers")
        return graph

    def _updates(self, burst: Burst, updates: int) -> bool:
        """Makes updates. Returns whether learners have drawn random numbers."""
        lanes = self._kind.lanes(self._device, 1 + self._lanes)
        owner, average_all = self._first.in_place(), self._average(burst)
        own = Operations([0] * len(self._learners), self._device)
        learning = sorted({self._lane(place) for place in range(len(self._learners))})
        for update in range(updates):
            for inner in range(burst.period):
                ends = inner + 1 == burst.period
                self._compute(lanes.do, update * burst.period + inner, burst.period, own)
                for place in range(len(self._learners)):
                    step = self._step(burst, place, update, inner)
                    lanes.do(self._lane(place), step, after=(0,) if ends else ())
            lanes.do(0, average_all, after=learning)
            lanes.do(0, partial(owner.apply, self._difference, burst.weight_rates[0], ()))
            lanes.do(0, partial(self._samples.take, self._first.buffer(WEIGHTS).vector, update))
            if burst.elasticity is not None:
                for place in range(len(self._learners)):
                    lanes.do(self._lane(place), partial(self._approach, place, burst.elasticity), after=(0,))
        lanes.join()
        self._number.add_(updates)
        self._samples.go_on(updates)
        return own.drew

    def _lane(self, place: int) -> int:
        return 1 + place % self._lanes

    @property
    def _difference(self) -> torch.Tensor:
        return self._first.buffer(DIFFERENCE).vector

    def _average(self, burst: Burst) -> Callable[[], None]:
        """Returns the work that averages the differences, into the first of them."""
        vectors = [executor.buffer(DIFFERENCE).vector for executor in self._learners]
        samples = [work.count for _, work in burst.learners]
        return partial(average, vectors[0], vectors, samples, sums=self._sums)

    def _compute(self, do: Callable[[int, Callable[[], None]], None], step: int, period: int, own: Operations) -> None:
        """Computes the gradients of all learners for a step of the graph."""
        if self._fused:
            do(1, partial(self._fused_gradients, step, period, own))
            return
        for place in range(len(self._learners)):
            do(self._lane(place), partial(self._gradient, place, step, period))

    def _batch(self, place: int, step: int, period: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the mini-batch of a learner, and the number of its step in the burst."""
        number = self._number * period + step
        rows = self._rows[:, self._places[place]].index_select(0, number)[0]
        inputs, target = self._learners[place].source.gathered(rows)
        return inputs, target, number

    def _gradient(self, place: int, step: int, period: int) -> None:
        inputs, target, number = self._batch(place, step, period)
        executor = self._learners[place]
        model = executor.source.model
        model.bind(executor.buffer(REPLICA).vector)
        loss, wrong, _ = model.pass_to_record(inputs, target, executor.buffer(GRADIENT).vector)
        if wrong is not None and not isinstance(wrong, torch.Tensor):
            raise RuntimeError("the task counts errors in main memory")
        self._note(place, number, loss, math.nan if wrong is None else wrong)

    def _fused_gradients(self, step: int, period: int, own: Operations) -> None:
        found = [self._batch(place, step, period) for place in range(len(self._learners))]
        inputs, target = put_together(torch.stack, [batch[:2] for batch in found], "[cluster] bank = 'fused'", "loop")
        vectors = [[executor.buffer(name).vector for executor in self._learners] for name in (REPLICA, GRADIENT)]
        model, seeds = self._first.source.model, [0] * len(self._learners)
        noted = fused_gradients(model, vectors[0], inputs, target, vectors[1], seeds, own)
        for place, (loss, wrong) in enumerate(noted):
            self._note(place, found[place][2], loss, wrong)

    def _note(self, place: int, number: torch.Tensor, *noted: float | torch.Tensor) -> None:
        """Notes loss and wrong samples of a mini-batch."""
        row = torch.empty(1, 2, dtype=torch.float64, device=self._device)
        for column, value in enumerate(noted):
            row[0, column] = value if isinstance(value, torch.Tensor) else torch.full_like(row[0, 0], value)
        self._losses[:, place].index_copy_(0, number, row)

    def _step(self, burst: Burst, place: int, update: int, inner: int) -> Callable[[], None]:
        executor, ends = self._learners[place], inner + 1 == burst.period
        rate = burst.rates[inner]
        action = structs.replace(burst.step, learning_rate=rate) if ends else StepReplica(GRADIENT, REPLICA, rate)
        work = executor.stepping(action, self._first.buffer(WEIGHTS).vector)

        def step() -> None:
            (squares,) = work()
            if ends:
                assert isinstance(squares, torch.Tensor)
                self._squares[:, place].index_copy_(0, self._number + update, squares.reshape(1))

        return step

    def _approach(self, place: int, elasticity: float) -> None:
        self._learners[place].approach_to(self._first.buffer(WEIGHTS).vector, REPLICA, elasticity)


def _alike(burst: Burst) -> tuple[int, tuple[float, ...]]:
    """Returns the number of the first updates with the same rates, and these: of each step, and of the update."""
    period = burst.period
    rates = [(*burst.rates[at * period : (at + 1) * period], burst.weight_rates[at]) for at in range(burst.updates)]
    return sum(1 for _ in takewhile(rates[0].__eq__, rates)), rates[0]
