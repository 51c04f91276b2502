"""Recording of what a bank does: graphs that a device repeats, and memory for what they read and note.

`recorded` makes bursts of them, and `recorded_actions` single actions of all learners in lockstep.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from rudra.compute.device.devices import kind_of
from rudra.compute.device.faults import memory_text
from rudra.compute.device.graphs import Graph, Lanes, NotRecordedError
from rudra.compute.device.streams import Number, Pending
from rudra.compute.learners import OwningLearnerExecutor
from rudra.compute.optim import Rates, UpdateRule
from rudra.compute.rates import ODD, rounds_alike
from rudra.compute.weight_samples import CountedSamples
from rudra.core.actions import StepReplica
from rudra.core.buffer_names import GRADIENT, WEIGHTS
from rudra.core.bursts import MOST_ROUNDS
from rudra.core.work import Work
from rudra.log import log
from rudra.memory import bytes_text

WARM = 2
"""How often the same is made as usual before it is recorded: libraries try their kernels."""

SEEN = 100
"""Most rates that are counted."""

KEPT = 8
"""Most graphs. Each belongs to learning rates, and to the memory of its vectors."""

AHEAD = 2
"""Bursts that are queued at most: the device makes one while the host records the other."""

Batches = Sequence[tuple[int, Work]]
"""Step and samples of the next mini-batch of each learner."""


@dataclass(slots=True)
class HostNotes:
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


class Memory(NamedTuple):
    """Memory for bursts of one period. A burst keeps it until its results are read.

    Attributes:
        notes: Memory of the device.
        slots: Main memory for bursts that are not under way.
    """

    notes: Notes
    slots: deque[HostNotes]


class BankRecorder:
    """Graphs of a bank whose vectors and training set are on one device.

    Args:
        learners: Executors of the learners, in learner order. In updates the first one owns the weights.
        ways: Returns how the learners make a round. It is called when their optimisers have their states.

    Attributes:
        learners: The executors.
        refusal: Why nothing is recorded. Empty: it may be.
    """

    def __init__(self, learners: Sequence[OwningLearnerExecutor], ways: Callable[[], Updates]) -> None:
        self.learners, self._first, self._ways = learners, learners[0], ways
        self._device = self._first.device
        self._kind = kind_of(self._device)
        self._stream = self._kind.stream(self._device)
        self._graphs: dict[tuple[object, ...], Graph] = {}
        self._counts: tuple[int, ...] = ()  # samples of the mini-batches that the memory is for
        self._memory: dict[int, Memory] = {}  # by period
        self._begun: Counter[str] = Counter()
        self._seen: Counter[tuple[float, ...]] = Counter()
        self._keeps: dict[object, bool] = {}  # whether rates may be in memory
        self.refusal = ""

    def is_warm(self, what: str) -> bool:
        """Counts how often something is asked for. Returns whether it was made often enough to be recorded."""
        self._begun[what] += 1
        return self._begun[what] > WARM

    def is_frequent(self, rates: tuple[float, ...]) -> bool:
        """Counts how often rates are asked for. Returns whether they may be part of a graph."""
        if len(self._seen) > SEEN:  # a rate of its own for each update, for instance
            self._seen.clear()
        self._seen[rates] += 1
        return self._seen[rates] > WARM

    def note(self, error: Exception, rates_of: object = None) -> None:
        """Notes that something cannot be recorded.

        Args:
            error: Error of the attempt. It is raised again if it has another meaning.
            rates_of: Steps whose rates were in memory, which may be the reason. They are tried without.
        """
        reason = memory_text(error) or (str(error) if isinstance(error, NotRecordedError) else None)
        if reason is None:
            raise error
        if rates_of is not None and isinstance(error, NotRecordedError):
            self._keeps[rates_of] = False
            return
        self.refusal = reason
        log.info(f"updates of the bank are not recorded: {error}")

    def submit(self, work: Callable[[], tuple[()]]) -> Pending:
        """Appends work of the device, behind all that was submitted before."""
        return self._stream.submit(work)

    def lanes(self, ways: Updates) -> Lanes:
        """Returns lanes for work that is recorded."""
        return self._kind.lanes(self._device, 1 + len(ways.lanes))

    def blame(self, place: int, step: int, work: Work, loss: float) -> None:
        """Raises DataError if the loss of a learner's mini-batch is not finite because of a sample."""
        source = self.learners[place].source
        source.confirmed((loss, math.nan), work, partial(source.minibatch, step, work))

    # Memory.

    def memory(self, batches: Batches, period: int) -> Memory:
        """Returns the memory for rounds of this period, with mini-batches of these sizes."""
        counts = tuple(work.count for _, work in batches)
        if counts != self._counts:
            self._counts, self._memory, self._graphs = counts, {}, {}
        if period not in self._memory:
            width = self._first.source.indices_of(*batches[0], 1).shape[1]
            groups = len(self._rules[0].rates(0.0)), len(self._rules[1].rates(0.0))
            notes = Notes(period, counts, groups, width, self._first.size, self._device)
            there = notes.rows, notes.rates, notes.weight_rates, notes.losses, notes.squares, notes.samples.taken
            slots = deque(HostNotes(*map(self._main_memory, there)) for _ in range(AHEAD))
            self._memory[period] = Memory(notes, slots)
        return self._memory[period]

    def _main_memory(self, like: torch.Tensor) -> torch.Tensor:
        return self._kind.main_memory(like.nbytes).view(like.dtype).view(like.shape)

    def draw(self, memory: Memory, slot: HostNotes, batches: Batches, steps: int) -> None:
        """Draws the samples of the next mini-batches of each learner."""
        for executor, (step, work), place in zip(self.learners, batches, memory.notes.places, strict=True):
            drawn = executor.source.indices_of(step, work, steps)
            slot.rows[:steps, place] = drawn.view(steps, work.count, -1)

    # Learning rates.

    @property
    def settings(self) -> tuple[str, ...]:
        """Settings of the optimisers."""
        return self._first.settings

    @property
    def _rules(self) -> tuple[UpdateRule, UpdateRule]:
        """Update rules of the replicas and of the weights. Without replicas both are the same."""
        rules = [*self._first.rules.values()]
        return rules[0], rules[-1]

    def stepped(self, *, averages: bool) -> list[tuple[OwningLearnerExecutor, str]]:
        """Returns the vectors that a round steps: the replicas, and the weights by an average."""
        replicas = [(each, name) for each in self.learners for name in each.rules if name != WEIGHTS]
        return [*replicas, *([(self._first, WEIGHTS)] if averages else ())]

    def keeps_rates(self, about: object, rate: float, *, averages: bool) -> bool:
        """Returns whether all rates of a round may be in memory. Then a graph serves any of them.

        Local steps do not try it with the weights, because an average of the weights may be under way.

        Args:
            about: Key of the answer, which does not change.
            rate: One of the rates.
            averages: Whether the rounds end with averages.
        """
        if about not in self._keeps:
            odd, rules = rate * ODD, self._first.rules
            own = [(rules[name], name) for each, name in self.stepped(averages=averages) if each is self._first]
            self._keeps[about] = all(
                rule.takes_rates
                and rounds_alike(partial(self._try, rule), self._state(rule, name), rule.rates(odd), odd)
                for rule, name in own
            )
        return self._keeps[about]

    def _state(self, rule: UpdateRule, name: str) -> list[torch.Tensor]:
        return [self._first.buffer(name).vector, *rule.state().values()]

    def _try(self, rule: UpdateRule, rate: float, rates: Rates) -> None:
        rule.step(self._first.buffer(GRADIENT).vector[: self._first.parameters], rate, rates=rates)

    def enter_rates(self, slot: HostNotes, rates: Sequence[float], weight_rates: Sequence[float]) -> None:
        """Enters the rates of all steps of the replicas, and of all updates."""
        inner, outer = self._rules
        for rule, given, into in (inner, rates, slot.rates), (outer, weight_rates, slot.weight_rates):
            if given:
                into[: len(given)] = torch.tensor([rule.rates(rate) for rate in given], dtype=torch.float64)

    # Graphs.

    def written(self, *fresh: str, averages: bool) -> list[torch.Tensor]:
        """Returns all tensors that a round changes. A restart, or another job, may replace the optimisers' tensors.

        Args:
            fresh: Buffers of the learners that it fills, in memory without other readers.
            averages: Whether it ends with an average.
        """
        found = []
        for executor, name in self.stepped(averages=averages):
            found += [executor.buffer(name).vector, *executor.rules[name].state().values()]
        return found + [executor.renew(name).vector for executor in self.learners for name in fresh]

    def graph(
        self,
        about: tuple[object, ...],
        written: Sequence[torch.Tensor],
        work: Callable[[Updates, Notes], None],
        notes: Notes,
    ) -> Graph:
        """Returns the graph of some work. If it must be recorded, nothing has changed afterwards.

        Args:
            about: All numbers that the graph repeats.
            written: All tensors that the work changes, except the tensors of the notes.
            work: The work.
            notes: Memory for it.

        Raises:
            NotRecordedError: It cannot be recorded.
        """
        key = *about, *(each.data_ptr() for each in written)
        found = self._graphs.get(key)
        if found is None or not found.is_valid():
            while len(self._graphs) >= KEPT:
                del self._graphs[next(iter(self._graphs))]
            found = self._graphs[key] = self._recorded(written, work, notes)
        return found

    def _recorded(self, written: Sequence[torch.Tensor], work: Callable[[Updates, Notes], None], notes: Notes) -> Graph:
        generator, ways = self._kind.generator(self._device), self._ways()
        written = [*written, notes.number, notes.samples.timestamp]
        needed, free = sum(each.nbytes for each in written), self._kind.free_bytes(self._device)
        if free is not None and needed > free / 2:
            raise NotRecordedError(
                f"copies of what they change take {bytes_text(needed)}, and {bytes_text(free)} are free"
            )
        before, drawn = [each.clone() for each in written], generator.get_state()
        notes.number.zero_()
        notes.rows.zero_()
        try:
            graph, _ = self._kind.record(self._device, partial(work, ways, notes))
        finally:
            for tensor, value in zip(written, before, strict=True):
                tensor.copy_(value)
        if not torch.equal(drawn, generator.get_state()):
            raise NotRecordedError("the model draws random numbers")
        return graph
