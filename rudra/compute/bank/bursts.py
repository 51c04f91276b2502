"""Bursts: updates or local steps that a rank makes without asking its learners in between.

All learners compute as usual, in the usual order, so the results are bitwise the same. But while a burst makes updates,
there is one copy of the weights: the central model, if replicas are averaged. The learners get it back when they are
asked again. So it is in lockstep.
"""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from msgspec import structs

from rudra.compute.averaging import average
from rudra.compute.bank.gathering import gradients_are_summed, throughout
from rudra.compute.bank.graphs import streams_of
from rudra.compute.bank.lanes import LaneUpdates
from rudra.compute.bank.matrices import MatrixUpdates
from rudra.compute.bank.recorded import Made, RecordedBursts
from rudra.compute.bank.recorded_actions import RecordedActions
from rudra.compute.bank.recording import BankRecorder, Updates
from rudra.compute.device.devices import kind_of
from rudra.compute.device.faults import memory_text
from rudra.compute.device.streams import Pending
from rudra.compute.learners import OwningLearnerExecutor
from rudra.compute.replicas import AveragerExecutor
from rudra.core.actions import Compute, PullReplica, StepReplica, Update
from rudra.core.buffer_names import DIFFERENCE, GRADIENT, REPLICA, WEIGHTS
from rudra.core.bursts import BankDone, Burst, BurstMade
from rudra.core.events import Event, Updated
from rudra.job.job import Job
from rudra.probe import probed
from topologies import Plan

CENTRAL = "central"
"""Name of the weights that the first learner updates, among the buffers of the other learners."""

Work = Iterator[Event | Pending | None]
_Events = Generator[Pending | None, None, list[Any]]


class BankBursts:
    """Maker of the bursts of a bank.

    Args:
        learners: Executors of the learners of this rank that take part in the run, in learner order. If they are all
            learners of the run, the first one updates the weights for all.
        sums: Order of addition (`Plan.partial_sums`).
        recorder: Graphs of the bank. None: the device has none.

    Attributes:
        hurries: Whether a burst ends after the round under way, because a learner is asked for something else.
        apart: Whether only the first learner has the weights, and the reference of its block.
    """

    def __init__(
        self,
        learners: Sequence[OwningLearnerExecutor],
        sums: Sequence[Sequence[int]],
        recorder: BankRecorder | None = None,
    ) -> None:
        self._learners, self._sums = learners, sums
        self._recorded = None if recorder is None else RecordedBursts(recorder)
        self._actions = None if recorder is None else RecordedActions(recorder)
        self.apart = self.hurries = False

    @probed
    def begin(self, burst: Burst) -> Made:
        """Begins a burst, or only its first rounds."""
        self.hurries = False
        self.apart |= burst.averages
        if self._recorded is not None and (made := self._recorded.begin(burst)) is not None:
            return made
        self._await_moves()
        return Made(burst.rounds, burst.averages, self._make(burst))

    def _make(self, burst: Burst) -> Iterator[BurstMade | Pending | None]:
        """Makes the rounds of a burst.

        It ends early if memory does not suffice for the first gradients of a round. The learners then compute them
        again, and what happens is as without a burst.

        Yields:
            None after each round, work of a device as long as it is not done, then the results.
        """
        period, m, averages = burst.period, len(self._learners), len(burst.weight_rates)
        losses, errors = np.empty((2, burst.rounds, period, m))
        distances = np.empty((averages, 0 if burst.step is None else m))
        digests = np.empty(averages, np.uint64)
        figures = losses, errors, distances, digests
        gradient_s = step_s = average_s = 0.0
        made = 0
        while made < burst.rounds and not (self.hurries and made):
            if averages:
                self._share_central()
            for inner in range(period):
                number, began = made * period + inner, time.perf_counter()
                try:
                    computed = yield from self._computed(burst, number)
                except Exception as error:
                    if inner or memory_text(error) is None:
                        raise
                    yield BurstMade(burst, *figures, gradient_s, step_s, average_s).first(made)
                    return
                there = time.perf_counter()
                losses[made, inner] = [each.loss for each in computed]
                errors[made, inner] = [each.errors for each in computed]
                stepped = yield from self._stepped(burst, number)
                gradient_s, step_s = gradient_s + there - began, step_s + time.perf_counter() - there
            if averages:
                distances[made] = [each.distance for each in stepped]
                began = time.perf_counter()
                (updated,) = yield from _together([self._update(burst, made)])
                assert isinstance(updated, Updated)
                digests[made] = updated.digest
                if burst.elasticity is not None:
                    self.approach(burst.elasticity)
                average_s += time.perf_counter() - began
            made += 1
            if made < burst.rounds:
                yield None
        yield BurstMade(burst, *figures, gradient_s, step_s, average_s).first(made)

    def _share_central(self, name: str = WEIGHTS) -> None:
        """Lets all learners read the first one's weights, which may be in other memory after an update.

        Args:
            name: `REFERENCE`, if they are corrected by the reference of their block instead.
        """
        first, *others = self._learners
        central = first.buffer(name)
        for other in others:
            other.put(CENTRAL, central)

    def _computed(self, burst: Burst, number: int) -> _Events:
        timestamp = burst.timestamp + (number // burst.period) * burst.averages
        actions = [
            Compute(
                step + number,
                work.after(number),
                _shared_weights(place) if burst.step is None else REPLICA,
                GRADIENT,
                timestamp,
            )
            for place, (step, work) in enumerate(burst.learners)
        ]
        works = [executor.compute(action) for executor, action in self._prepared(actions)]
        return (yield from _together(works))

    def _prepared(self, actions: Sequence[Compute]) -> Iterator[tuple[OwningLearnerExecutor, Compute]]:
        """Yields each learner and its mini-batch, ready to begin."""
        for executor, action in zip(self._learners, actions, strict=True):
            executor.make_room(action)
            executor.ready = None  # nobody waits for parts of this gradient
            yield executor, action

    def _stepped(self, burst: Burst, number: int) -> _Events:
        """Steps all replicas, if there are any. The last steps before an average also compute differences."""
        if burst.step is None:
            return []
        rate, ends = burst.rates[number], burst.averages and (number + 1) % burst.period == 0
        action = structs.replace(burst.step, learning_rate=rate) if ends else StepReplica(GRADIENT, REPLICA, rate)
        works = [executor.perform(action) for executor, action in self._with_central(action)]
        return (yield from _together(works))

    def _with_central(self, action: StepReplica) -> Iterator[tuple[OwningLearnerExecutor, StepReplica]]:
        """Yields each learner and its step, which names the central model where the learner has it."""
        for place, executor in enumerate(self._learners):
            differs = place and action.difference
            yield executor, structs.replace(action, weights=CENTRAL) if differs else action

    def _update(self, burst: Burst, update: int) -> Work:
        """Updates the weights by the mean of all differences or gradients."""
        first, name = self._learners[0], burst.averaged
        vectors = [executor.buffer(name).vector for executor in self._learners]
        samples = [work.count for _, work in burst.learners]
        average(vectors[0], vectors, samples, sums=self._sums)
        about = burst.weight_rates[update], burst.timestamp + update + 1
        return first.perform(Update(name, WEIGHTS, *about))

    def approach(self, elasticity: float) -> None:
        """Moves all replicas towards the central model, by a fraction of the distance."""
        if self._actions is not None and self._actions.approach(elasticity):
            return
        self._share_central()
        for place, executor in enumerate(self._learners):
            executor.perform(PullReplica(REPLICA, _shared_weights(place), elasticity))

    def compute(self, actions: Sequence[Compute]) -> Iterator[BankDone | Pending | None]:
        """Computes a gradient of each learner, in lockstep. There are no events if the memory does not suffice."""
        if self._actions is not None and (work := self._actions.compute(actions)) is not None:
            yield from work
            return
        self._await_moves()
        if actions[0].weights == WEIGHTS:
            self._share_central()
            actions = [structs.replace(each, weights=_shared_weights(place)) for place, each in enumerate(actions)]
        done: list[Event] = []
        try:
            done = yield from _together([executor.compute(action) for executor, action in self._prepared(actions)])
        except Exception as error:
            if memory_text(error) is None:
                raise
        yield BankDone(tuple(done))

    def step(self, action: StepReplica) -> Iterator[BankDone | Pending | None]:
        """Steps the replica of each learner, in lockstep."""
        if self._actions is not None and (work := self._actions.step(action)) is not None:
            yield from work
            return
        if action.difference:
            self._share_central(action.weights)
        works = [executor.attempt(action) for executor, action in self._with_central(action)]
        yield BankDone(tuple((yield from _together(works))))

    def _await_moves(self) -> None:
        if self._actions is not None:
            self._actions.settle()

    def share_difference(self) -> None:
        """Lets all learners bring the difference of their block's reference into an average."""
        first, *others = self._learners
        shared = first.buffer(DIFFERENCE)
        for other in others:
            other.borrow(DIFFERENCE, shared)

    def share_average(self, name: str) -> None:
        """Gives all learners an average that only the first one has."""
        first, *others = self._learners
        for other in others:
            other.copy_from(first, name)

    def settle(self) -> None:
        """Gives all learners the weights, and the state of their optimiser."""
        self._await_moves()
        if not self.apart:
            return
        first, *others = self._learners
        for other in others:
            other.follow(first)
            other.forget(CENTRAL)
        self.apart = False


def _shared_weights(place: int) -> str:
    """Returns the name that the first learner's weights have among the buffers of a learner."""
    return CENTRAL if place else WEIGHTS


def _together(works: Sequence[Work]) -> _Events:
    """Does several actions at the same time.

    Yields:
        None after a piece of work, and work of a device as long as all actions wait for devices.

    Returns:
        The event of each action.
    """
    found: dict[int, Event] = {}
    left = dict(enumerate(works))
    while left:
        waits: Pending | None = None
        for place, work in [*left.items()]:
            got = next(work)
            if isinstance(got, Pending):
                waits = got
            elif got is not None:
                found[place] = got
                del left[place]
                waits = None
        if left:
            yield waits
    return [found[place] for place in range(len(works))]


def bursts_of(job: Job, plan: Plan, learners: Sequence[OwningLearnerExecutor]) -> BankBursts:
    """Returns the maker of bursts of a rank.

    Args:
        job: Resolved job.
        plan: Role assignment.
        learners: Executors of the learners of the rank that take part, in learner order.
    """
    sums, first = plan.partial_sums(plan.learners), learners[0]
    records = kind_of(first.device).records and job.cluster.graphs != "off" and job.training.microbatches == 1
    if not records or any(not each.steps_repeat or each.source.resident is None for each in learners):
        return BankBursts(learners, sums)
    replicas = [each for each in learners if isinstance(each, AveragerExecutor)]
    joint = throughout(job, plan, gradients_are_summed)
    ways: Callable[[], Updates] = partial(MatrixUpdates, learners, replicas, sums, joint=joint)
    if not (job.cluster.fused and len(learners) > 1 and all(each.rules[REPLICA].joins for each in replicas)):
        lanes = streams_of(job, first.device) if job.cluster.graphed else 1
        ways = partial(LaneUpdates, learners, replicas, sums, lanes)
    return BankBursts(learners, sums, BankRecorder(learners, ways))
