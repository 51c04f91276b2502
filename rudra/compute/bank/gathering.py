"""A bank: the learners of a rank whose gradients are computed together when all of them are ready."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from typing import NamedTuple

import torch

from rudra.compute.bank.fused import fused_gradients
from rudra.compute.device.streams import Pending
from rudra.compute.feed import Given
from rudra.compute.gradients import BatchFigures, GradientSource
from rudra.compute.together import put_together
from rudra.core.actions import Compute
from rudra.job.job import Job
from topologies import Plan


class ReadyLearner(NamedTuple):
    """A learner that can compute its next gradient.

    Attributes:
        source: Source of its gradients. All learners of a bank share a model.
        action: Step and samples of the gradient, and the timestamp of its weights.
        vectors: Returns the weights, (size,) float32, and the place of the gradient, (size,) float32, on the device.
        given: Mini-batch that is on its way to the device. None: it is drawn in main memory.
    """

    source: GradientSource
    action: Compute
    vectors: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    given: Given | None = None


class _Waiting(Pending):
    """A learner waits for the others of its bank, and the device does nothing for it."""

    gathers = True

    def done(self) -> bool:
        return False

    def numbers(self) -> list[float]:
        return []


_WAITING = _Waiting()


class Bank:
    """Learners of a rank that compute their gradients together.

    Args:
        learners: All learners of the bank, in learner order.
        in_step: Whether no learner can be a step ahead of another one (`learn_in_step`). The bank then waits until all
            that take part are ready, so that a gradient is always computed with the same others. If not, it computes
            the gradients of the learners that are ready now.
        joint: Whether the mean gradient of learners at the same weights may replace the gradient of each.
    """

    def __init__(self, learners: Sequence[Hashable], *, in_step: bool, joint: bool) -> None:
        self._order = {learner: place for place, learner in enumerate(learners)}
        self._in_step, self._joint = in_step, joint
        self._taking_part = set(learners)
        self._ready: dict[Hashable, ReadyLearner] = {}
        self._asked: set[Hashable] = set()
        self._figures: dict[Hashable, BatchFigures] = {}

    def follow(self, learners: Collection[Hashable]) -> None:
        """Waits only for these learners from now on. The others have left, or are dormant."""
        self._taking_part = self._order.keys() & set(learners)

    def gather(self, learner: Hashable, ready: ReadyLearner) -> Iterator[Pending]:
        """Waits for the other learners. If the caller drops this iterator, the learner no longer counts as ready.

        Args:
            learner: Learner that is ready.
            ready: Its next gradient.
        """
        self._ready[learner] = ready
        try:
            while not self._begins(learner):
                yield _WAITING
        except GeneratorExit:
            self._ready.pop(learner, None)
            self._figures.pop(learner, None)
            self._asked.discard(learner)
            raise

    def _begins(self, learner: Hashable) -> bool:
        """Returns whether the gradient of a ready learner is known, or can be computed now."""
        if learner in self._figures:
            return True
        if self._in_step:
            return self._taking_part <= self._ready.keys()
        if learner in self._asked:  # since then all others that are ready have said so
            return True
        self._asked.add(learner)
        return False

    @property
    def copies(self) -> list[Pending]:
        """Copies of mini-batches to the device that must be done before the next gradients are computed."""
        return [ready.given.copied for ready in self._ready.values() if ready.given is not None]

    def gradient(self, learner: Hashable) -> BatchFigures:
        """Returns the figures of a learner after `gather`. Computes the gradients of all ready learners if necessary.

        Raises:
            Exception: As `GradientSource.compute`.
        """
        if learner not in self._figures:
            team = sorted(self._ready, key=self._order.__getitem__)
            ready = [self._ready.pop(member) for member in team]
            self._asked.clear()
            self._figures |= zip(team, bank_gradients(ready, joint=self._joint), strict=True)
        return self._figures.pop(learner)


def bank_gradients(ready: Sequence[ReadyLearner], *, joint: bool) -> list[BatchFigures]:
    """Computes the gradients of several learners at once, or the gradient of a single one as usual.

    Args:
        ready: Learners with mini-batches of the same size.
        joint: As for `Bank`.

    Raises:
        ConfigError: The mini-batches have samples of different sizes.
        Exception: Exceptions of the user's data set.
    """
    batches = []
    for learner in ready:
        learner.source.given = learner.given
        batches.append(learner.source.minibatch(learner.action.step, learner.action.work))
        learner.source.given = None
    weights, outs = (list(vectors) for vectors in zip(*(learner.vectors() for learner in ready), strict=True))
    if len(ready) == 1:
        source, action = ready[0].source, ready[0].action
        return [source.of_batch(action.step, action.work, batches[0], weights[0], outs[0])]
    inputs, target = put_together(torch.stack, batches, "[cluster] bank = 'fused'", "loop")
    shared = len({learner.action.timestamp for learner in ready}) == 1
    if joint and shared and all(torch.equal(weights[0], other) for other in weights[1:]):
        weights, outs, others = weights[:1], outs[:1], outs[1:]
    else:
        others = []
    seeds = [learner.source.seed(learner.action.step) for learner in ready]
    found = fused_gradients(ready[0].source.model, weights, inputs, target, outs, seeds)
    for other in others:
        other.copy_(outs[0])
    return [
        BatchFigures(*figures, learner.action.work, batch)
        for learner, figures, batch in zip(ready, found, batches, strict=True)
    ]


def bank_of(job: Job, plan: Plan, learners: Sequence[Hashable]) -> Bank:
    """Returns the bank of some learners of a rank.

    Args:
        job: Settled job, whose bank is fused.
        plan: Role assignment.
        learners: Keys of the learners, in learner order.
    """
    in_step, joint = throughout(job, plan, learn_in_step), throughout(job, plan, gradients_are_summed)
    return Bank(learners, in_step=in_step, joint=joint)


def throughout(job: Job, plan: Plan, holds: Callable[[Job, Plan], bool]) -> bool:
    """Whether a property of the learners holds in the whole run, whatever `[[changes]]` and `[decisions]` change.

    Decisions may change the protocol of a parameter server, so they are unknown before training.
    """
    if job.decisions.given and plan.served:
        return False
    return all(holds(its, its_plan) for _, its, its_plan in job.parts(plan))


def learn_in_step(job: Job, plan: Plan) -> bool:
    """Whether no learner of a rank can be a step ahead of another: each step needs the latest step of all others."""
    protocol = job.make_protocol(plan)
    if plan.groups or plan.averaging:
        return bool(plan.groups) or not plan.served
    return protocol.ordered and protocol.gradients_per_update == plan.workers


def gradients_are_summed(job: Job, plan: Plan) -> bool:
    """Whether only the sum of the gradients of a bank matters, and all are computed at the same weights."""
    alone = plan.averaging and plan.sharing != "replica"
    return learn_in_step(job, plan) and not alone and job.results.norms_every is None
