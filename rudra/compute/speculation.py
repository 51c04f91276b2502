"""Steps that a device does before the roles ask for them.

A GPU does a small step in less time than the roles need to decide on the next one. If the only learner and the owner of
the weights share a rank, the next steps are known: the learner computes its next mini-batch at the newest weights, and
the owner applies the gradient at the same rate. So the device does many steps at once. Each of them is one graph:
gather the mini-batch, forward, backward, update, and note the loss, the errors and a sample of the weights.

The roles ask as usual, and get what was noted. They may also ask for something else, or use a buffer, for example
because the run stops. Then the device goes back: it restores the state from before these steps, and repeats the steps
that the roles have seen.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch

from rudra.compute.device.devices import kind_of
from rudra.compute.device.graphs import Graph, NotRecordedError
from rudra.compute.device.streams import Done, Pending
from rudra.compute.executor import Executor
from rudra.compute.gradients import GradientSource
from rudra.compute.rates import ODD, rounds_alike
from rudra.compute.weight_samples import CountedSamples
from rudra.core.actions import Compute, Update
from rudra.core.work import Work
from rudra.log import log
from rudra.memory import bytes_text

MOST = 32
"""Most steps that are queued at once."""

BURSTS = 2
"""Most bursts that are queued: the device does one while the roles go through the other."""

WARM = 4
"""Steps that are computed as usual first. Libraries try their kernels, and the optimiser allocates its state."""

KEPT = 4
"""Most recorded steps, each for a learning rate, if rates are not in the memory of the device."""

VAIN = 3
"""Times in a row that the roles ask for another step at once, after which no more steps are done ahead."""

LARGEST = 1 << 26
"""Most bytes of weights and optimiser. A step of a larger model takes a device longer than the roles need."""

_Key = tuple[int, int, float | None]

RateAfter = Callable[[int, int], float | None]
"""(samples of an update, number of updates before it) -> predicted rate of that update. None: it is not known."""


class Step(NamedTuple):
    """Update by the owner of the weights.

    Attributes:
        apply: (gradient, learning rate, memory with the rates, or nothing). Updates the weights where they are.
        state: Returns the tensors of the optimiser's state.
        rates: Returns the numbers for that memory at a learning rate. Empty: rates cannot be in memory.
    """

    apply: Callable[[torch.Tensor, float, Sequence[torch.Tensor]], None]
    state: Callable[[], Sequence[torch.Tensor]]
    rates: Callable[[float], Sequence[float]]


class Noted(NamedTuple):
    """Figures of a step that a device notes.

    Attributes:
        pending: Work after which the figures are there.
        figures: (2,) float64, mean loss and wrong samples.
    """

    pending: Pending
    figures: torch.Tensor


@dataclass(slots=True)
class _Slot:
    """Memory for one burst.

    Attributes:
        saved: Copy of the state before the burst, on the device.
        rows: (MOST * μ, 1 or 4) int64 in main memory, what `GradientSource.indices_of` draws.
        figures: (MOST, 2) float64 in main memory.
        samples: (MOST, …) float32 in main memory, samples of the weights.
    """

    saved: list[torch.Tensor]
    rows: torch.Tensor
    figures: torch.Tensor
    samples: torch.Tensor


@dataclass(slots=True)
class _Burst:
    """Steps that the device does one after another.

    Attributes:
        slot: Its memory.
        first: Number of the first step.
        work: Samples of the first step.
        timestamp: Timestamp of the weights before the first step.
        rates: Learning rate of each step.
        pending: Work that does them.
    """

    slot: _Slot
    first: int
    work: Work
    timestamp: int
    rates: Sequence[float]
    pending: Pending = field(default_factory=lambda: Done([]))

    @property
    def count(self) -> int:
        """Number of steps."""
        return len(self.rates)


class SpeculativeSteps:
    """Steps of the only learner of a rank, and the updates by the owner of the weights on the same rank.

    Both executors ask it first, and call `roll_back` before they use a buffer or the optimiser.

    Args:
        learner: Executor of the learner.
        owner: Executor of the owner of the weights.
        source: The learner's source of gradients, whose training set is on the device.
        step: Update by the owner.
        rate_after: Predicts rates of updates. None: another rate than the last one is never predicted.

    Attributes:
        refusal: Why no steps are done ahead any more. Empty: they may be.
        committed: Number of steps that were done ahead and that the roles have seen.
    """

    def __init__(
        self,
        learner: Executor,
        owner: Executor,
        source: GradientSource,
        step: Step,
        rate_after: RateAfter | None = None,
    ) -> None:
        self._learner, self._owner, self._source, self._step = learner, owner, source, step
        self._rate_after = rate_after or self._same_rate
        self._model = source.model
        self._device = self._model.device
        self._kind = kind_of(self._device)
        self._stream = self._kind.stream(self._device)
        self._graphs: dict[_Key, Graph] = {}
        self._graph: Graph | None = None
        self._rates: Sequence[torch.Tensor] = []  # memory of the device with the rates
        self._slots: deque[_Slot] = deque()
        self._computed: Compute | None = None  # the last computation and the last update of the roles
        self._updated: Update | None = None
        self._seen = self._vain = 0
        self._steady = False  # whether the last two updates had the same rate
        self._bursts: deque[_Burst] = deque()
        self._place = 0  # the roles have seen this many steps of the first burst,
        self._half = False  # and the gradient of the next one,
        self._into = ""  # which is in this buffer of the owner
        self.refusal, self.committed = "", 0

    def compute(self, action: Compute) -> Noted | None:
        """Returns what was noted about a gradient. None: it must be computed as usual."""
        if self._bursts and not self.expects(action):
            self.roll_back()
        last, self._computed = self._computed, action
        if not self._bursts:
            self._seen += 1
            if last is None or not self._follows(action, last) or not self._begin(action):
                return None
        self._extend()
        self._half = True
        burst = self._bursts[0]
        return Noted(burst.pending, burst.slot.figures[self._place])

    def expects(self, action: Compute) -> bool:
        """Whether the device does this computation ahead."""
        if not self._bursts or self._half:
            return False
        burst, last = self._bursts[0], self._computed
        assert last is not None
        known = (action.weights, action.gradient, action.then) == (last.weights, last.gradient, None)
        step = burst.first + self._place, burst.work.after(self._place), burst.timestamp + self._place
        return known and (action.step, action.work, action.timestamp) == step

    def update(self, action: Update) -> bytes | None:
        """Returns a sample of the weights after an update. None: the update must be done as usual."""
        last, self._updated = self._updated, action
        if self._bursts and not self._expects_update(action, last):
            self.roll_back()
        self._steady = last is not None and last.learning_rate == action.learning_rate
        if not self._bursts:
            return None
        burst = self._bursts[0]
        sampled = self._samples.of(burst.slot.samples, self._place, action.timestamp)
        self._half, self._into = False, ""
        self._place += 1
        self.committed, self._vain = self.committed + 1, 0
        if self._place == burst.count:
            self._place = 0
            self._slots.append(self._bursts.popleft().slot)
        return sampled

    def _expects_update(self, action: Update, last: Update | None) -> bool:
        if not self._half or last is None:
            return False
        plain, burst = not any(action.norms) and not action.average, self._bursts[0]
        about = action.weights, action.gradient, action.learning_rate, action.timestamp
        wanted = last.weights, self._into, burst.rates[self._place], burst.timestamp + self._place + 1
        return plain and about == wanted

    def _same_rate(self, samples: int, updates: int) -> float | None:
        """Predicts the rate of the last two updates, if it was the same."""
        return self._updated.learning_rate if self._updated is not None and self._steady else None

    def carries(self, giver: Executor, name: str, taker: Executor, into: str) -> bool:
        """Returns whether a tensor need not be copied from one executor to the other, because the device is ahead."""
        if not self._bursts:
            return False
        assert self._computed is not None
        assert self._updated is not None
        if self._half:
            pushes = giver is self._learner and taker is self._owner and name == self._computed.gradient
            self._into = into if pushes else self._into
            return pushes
        ours = (name, into) == (self._updated.weights, self._computed.weights)
        return ours and giver is self._owner and taker is self._learner

    def roll_back(self) -> None:
        """Goes back to the step that the roles have reached. Buffers and optimiser then hold what the roles expect."""
        if not self._bursts:
            return
        burst, place, half, into = self._bursts[0], self._place, self._half, self._into
        for each in self._bursts:
            each.pending.numbers()
            self._slots.append(each.slot)
        self._bursts.clear()
        self._place, self._half, self._into = 0, False, ""
        self._vain += place == 0
        if self._vain >= VAIN:
            self._refuse("the steps of this run cannot be predicted")
        assert self._computed is not None
        self._copy_state(burst.slot, back=True)
        self._repeat(burst, place)
        (weights, gradient), own = self._vectors, self._learner.buffer(self._computed.weights).vector
        own.copy_(weights)
        if half:
            self._source.compute(burst.first + place, burst.work.after(place), own, gradient)
            if into:
                self._owner.buffer(into).vector.copy_(gradient)
        self._kind.finish(self._device)

    def forget(self) -> None:
        """Rolls back, and records steps again later: the optimiser gets other settings, or another state."""
        self.roll_back()
        self._graphs.clear()
        self._slots.clear()
        self._seen, self._steady, self._rates = 0, False, []

    def _follows(self, action: Compute, last: Compute) -> bool:
        """Whether the steps from this computation on are likely to be like the last one."""
        updated = self._updated
        if self.refusal or updated is None or self._seen <= WARM:
            return False
        plain = action.then is None and not any(updated.norms) and not updated.average
        follows = (action.step, action.work) == (last.step + 1, last.work.after(1)) and action.work.stride > 0
        return plain and follows and action.timestamp == updated.timestamp

    def _begin(self, action: Compute) -> bool:
        """Queues the first burst, from a computation on. Returns whether that is possible."""
        assert self._updated is not None
        weights = self._owner.buffer(self._updated.weights).vector
        gradient = self._learner.buffer(action.gradient).vector
        self._vectors = weights, gradient
        if not self._slots and not self._allocate(action.work, self._updated.learning_rate):
            return False
        if not (rates := self._rates_from(action.work, action.timestamp)):
            return False
        try:
            self._graph = self._recorded(rates[0])
        except NotRecordedError as error:
            self._refuse(str(error))
            return False
        rates = self._rates_from(action.work, action.timestamp)  # a record may have shown that rates stay here
        if not rates:
            return False
        self._burst(action.step, action.work, action.timestamp, rates)
        return True

    def _rates_from(self, work: Work, timestamp: int) -> Sequence[float]:
        """Returns the rates of the next steps, at most to the end of a pass, where the roles may evaluate or save.

        A rate that is part of the record must serve for several steps.
        """
        assert self._computed is not None
        found: list[float] = []
        for number in range(MOST):
            rate = self._rate_after(work.count, timestamp - self._computed.timestamp + number)
            if rate is None or (found and not self._rates and rate != found[0]):
                break
            found.append(rate)
            if self._source.ends_pass(work.after(number)):
                break
        return found if self._rates or len(found) > 1 else ()

    def _recorded(self, rate: float) -> Graph:
        """Returns the record of a step for a learning rate.

        Raises:
            NotRecordedError: The step cannot be recorded.
        """
        weights, gradient = self._vectors
        key = weights.data_ptr(), gradient.data_ptr(), None if self._rates else rate
        if key in self._graphs and self._graphs[key].is_valid():
            return self._graphs[key]
        while len(self._graphs) >= KEPT:
            del self._graphs[next(iter(self._graphs))]
        try:
            self._graphs[key] = self._record(rate)
        except NotRecordedError:
            if not self._rates:
                raise
            self._rates = []  # an optimiser may need them in main memory
            return self._recorded(rate)
        return self._graphs[key]

    def _refuse(self, reason: str) -> None:
        self.refusal = reason
        log.info(f"no steps are done ahead: {reason}")

    def _extend(self) -> None:
        """Queues another burst if there is room, and if the last one does not end a pass through the training set."""
        burst = self._bursts[-1]
        if len(self._bursts) == BURSTS or self._source.ends_pass(burst.work.after(burst.count - 1)):
            return
        work, timestamp = burst.work.after(burst.count), burst.timestamp + burst.count
        rates = self._rates_from(work, timestamp)
        if rates and (self._rates or rates[0] == burst.rates[0]):  # the other record can be made later
            self._burst(burst.first + burst.count, work, timestamp, rates)

    def _burst(self, first: int, work: Work, timestamp: int, rates: Sequence[float]) -> None:
        """Queues steps."""
        burst = _Burst(self._slots.popleft(), first, work, timestamp, rates)
        rows = self._source.indices_of(first, work, burst.count)
        burst.slot.rows[: len(rows)].copy_(rows)
        burst.pending = self._stream.submit(partial(self._do, burst))
        self._bursts.append(burst)

    # Work of the device.

    def _do(self, burst: _Burst) -> tuple[()]:
        """Does the steps of a burst, after a copy of the state, and brings back what was noted."""
        self._copy_state(burst.slot)
        self._repeat(burst, burst.count)
        burst.slot.figures.copy_(self._figures, non_blocking=True)
        burst.slot.samples.copy_(self._samples.taken, non_blocking=True)
        return ()

    def _repeat(self, burst: _Burst, count: int) -> None:
        """Does the first steps of a burst."""
        assert self._graph is not None
        self._rows.copy_(burst.slot.rows, non_blocking=True)
        self._number.zero_()
        self._samples.begin(burst.timestamp + 1)
        for number in range(count):
            if not number or burst.rates[number] != burst.rates[number - 1]:
                self._set_rates(burst.rates[number])
            self._model.seed(self._source.seed(burst.first + number))
            self._graph.replay()

    @property
    def _all_state(self) -> tuple[torch.Tensor, ...]:
        """Weights and optimiser."""
        return self._vectors[0], *self._step.state()

    def _copy_state(self, slot: _Slot, *, back: bool = False) -> None:
        """Copies weights and optimiser to a slot, or back."""
        for now, saved in zip(self._all_state, slot.saved, strict=True):
            (now if back else saved).copy_(saved if back else now)

    def _allocate(self, work: Work, rate: float) -> bool:
        """Allocates the memory of all bursts. Returns whether the model is small enough."""
        state = self._all_state
        if (needed := sum(each.nbytes for each in state)) > LARGEST:
            self._refuse(f"weights and optimiser have {bytes_text(needed)}, more than {bytes_text(LARGEST)}")
            return False
        there = self._device
        self._samples = CountedSamples(len(state[0]), MOST, there)
        width = self._source.indices_of(0, work, 1).shape[1]
        shapes = ((MOST * work.count, width), torch.int64), ((MOST, 2), torch.float64)
        self._rows, self._figures = (torch.zeros(s, dtype=d, device=there) for s, d in shapes)
        self._number = torch.zeros(1, dtype=torch.int64, device=there)
        self._of_batch = torch.arange(work.count, device=there)
        for _ in range(BURSTS):
            here = (self._main_memory(each) for each in (self._rows, self._figures, self._samples.taken))
            self._slots.append(_Slot([torch.empty_like(each) for each in state], *here))
        rates = self._step.rates(odd := rate * ODD)
        if rounds_alike(partial(self._step.apply, self._vectors[1]), self._all_state, rates, odd):
            self._rates = [torch.zeros((), device=there) for _ in rates]
        return True

    def _main_memory(self, like: torch.Tensor) -> torch.Tensor:
        return self._kind.main_memory(like.nbytes).view(like.dtype).view(like.shape)

    def _set_rates(self, rate: float) -> None:
        for memory, value in zip(self._rates, self._step.rates(rate), strict=False):
            memory.fill_(value)

    def _record(self, rate: float) -> Graph:
        """Records a step. A rate is part of the record if it is not in memory.

        Raises:
            NotRecordedError: The step cannot be recorded.
        """
        self._copy_state(self._slots[0])
        self._samples.begin(0)
        for memory in (self._rows, self._number):
            memory.zero_()
        self._model.bind(self._vectors[0])
        try:
            return self._kind.record(self._device, partial(self._one_step, rate))[0]
        finally:
            self._copy_state(self._slots[0], back=True)

    def _one_step(self, rate: float) -> None:
        """Does a step. The device counts the steps, so that each one finds its mini-batch and its place for figures."""
        weights, gradient = self._vectors
        rows = self._rows.index_select(0, self._of_batch + self._number * len(self._of_batch))
        loss, wrong, _ = self._model.pass_to_record(*self._source.gathered(rows), gradient)
        if wrong is None:
            wrong = torch.full_like(loss, math.nan)
        if not isinstance(wrong, torch.Tensor):
            raise RuntimeError("the task counts errors in main memory")
        self._step.apply(gradient, rate, self._rates)
        figures = torch.stack([loss.double().reshape(()), wrong.double().reshape(())])
        self._figures.index_copy_(0, self._number, figures[None])
        self._samples.take(weights)
        self._number += 1
        self._samples.go_on(1)
