"""Log of the mini-batches of a role that computes gradients, reported to the statistics server."""

from collections.abc import Sequence
from math import isfinite, isnan

from rudra.core.actions import Action, Compute, Fail, Warn
from rudra.core.events import Computed
from rudra.core.messages import MessageKind
from rudra.core.records import TIMES, Gradient
from rudra.core.training_state import TrainingState
from rudra.core.work import Work, portion
from rudra.job.job import Job
from rudra.roles.machine import Setup
from rudra.roles.outbox import Outbox
from topologies import Plan

UNUSED = (0.0,) * (len(TIMES) - 1)


class MinibatchLog:
    """Counts, times and rows of the mini-batches of one learner.

    Args:
        role: id of the learner.
        setup: arguments of the role.

    Attributes:
        learner: number of the learner.
        step: number of the next mini-batch.
        began: beginning of training, in seconds on the driver's clock.
        diary: rows on their way to the statistics server.
    """

    # A simulation has thousands of learners. Without a dictionary each of them needs fewer cache lines.
    __slots__ = (
        "_before",
        "_count",
        "_minibatch",
        "_non_finite_stops",
        "_origin",
        "_reports",
        "_reports_minibatches",
        "_reports_norms",
        "_samples",
        "_since",
        "_steps_replica",
        "_stream",
        "_stride",
        "_times",
        "_warned",
        "_world_rank",
        "began",
        "diary",
        "learner",
        "step",
    )

    def __init__(self, role: int, setup: Setup) -> None:
        about, results = setup.plan.roles[role], setup.job.results
        self.learner, self._world_rank = about.index, about.world_rank
        self._before = setup.position.learned_by(self.learner)
        self._non_finite_stops = setup.job.fault_tolerance.non_finite_loss == "stop"
        self._warned = False
        self._steps_replica = setup.plan.averaging
        self._reports_minibatches = results.minibatches
        self._reports_norms = results.norms_every is not None
        self._reports = results.minibatches or self._reports_norms
        self.diary = Outbox(role, setup.plan, results.report_s)
        self._minibatch: tuple[float, ...] = ()
        self.began = self._since = 0.0  # of training, and of the present mini-batch
        self._times = [0.0] * len(TIMES)
        self.follow(setup.job, setup.plan, setup.position)

    def inherit(self, before: "MinibatchLog") -> None:
        """Takes over the rows and times of an earlier log. Unused mini-batches count as time, but not as samples."""
        self.diary, self._warned = before.diary, before._warned
        self._samples += self._before - before._before
        self._before, self._times = before._before, before._times

    def follow(self, job: Job, plan: Plan, position: TrainingState) -> None:
        """Begins with the first mini-batch that was not applied at a position, for a job and a plan."""
        self.step = position.step(self.learner)
        mine = portion(plan, self.diary.role, job.training.minibatch_size, job.cluster.parts)
        work = mine.work(position.drawn_from(mine.stream))
        self._stream, self._count, self._stride = work.stream, work.count, work.stride
        self._origin = work.first - self.step * work.stride
        self._samples = position.learned_by(self.learner) - self._before

    @property
    def upcoming(self) -> tuple[int, Work]:
        """Step and samples of the next mini-batch, or of the one that is being computed."""
        step, stride = self.step, self._stride
        return step, Work(self._stream, self._origin + step * stride, self._count, stride)

    def begin(self, weights: str, gradient: str, timestamp: int, now: float) -> Compute:
        """Begins the next mini-batch with the weights of a timestamp."""
        self._since = now
        step, stride = self.step, self._stride  # as `upcoming`, without a call
        work = Work(self._stream, self._origin + step * stride, self._count, stride)
        return Compute(step, work, weights, gradient, timestamp, now - self.began)

    def enter(self, event: Computed, timestamp: int, now: float) -> tuple[list[Action], bool]:
        """Notes a computed mini-batch, and returns actions and whether the run fails with them."""
        step, loss = event.step, event.loss
        compute_s = now - self._since
        self._times[0] += compute_s
        if self._reports_minibatches:
            about = (self.learner, event.samples, step, timestamp, loss, event.errors, 0)
            self._minibatch = (*about, now - self.began, compute_s)
        if self._reports_norms and not isnan(event.norm):
            self.diary.add(MessageKind.GRADIENT_NORMS, self.learner, event.samples, step, event.norm)
        self.step = step + 1
        actions, fails = self.judge(step, loss, timestamp)
        if not fails:
            return actions, False
        self.report_unused()
        return [*self.diary.flush(now), *actions], True

    def judge(self, step: int, loss: float, timestamp: int) -> tuple[list[Action], bool]:
        """Returns actions if the loss of a mini-batch is not finite, and whether the run fails with them."""
        if isfinite(loss):
            return [], False
        late, early = "a smaller learning_rate may help", "at the initial weights; do model, loss and data fit?"
        hint = late if timestamp or (step and self._steps_replica) else early
        text = f"the loss of mini-batch {step} is {loss}: {hint}"
        if self._non_finite_stops:
            return [Fail(text)], True
        if self._warned:
            return [], False
        self._warned = True
        return [Warn(f"{text} (training continues, as [fault_tolerance] non_finite_loss says)")], False

    def enter_others(self, count: int, compute_s: float, wait_s: float, update_s: float) -> None:
        """Counts mini-batches that were computed, and whose gradients were sent, without this log.

        Args:
            count: number of mini-batches.
            compute_s, wait_s, update_s: seconds of all of them together.
        """
        self.step += count
        self._samples += count * self._count
        self._times[0] += compute_s
        self._times[1] += wait_s
        self._times[5] += update_s

    @property
    def times(self) -> tuple[float, ...]:
        """Seconds of all mini-batches together, for each of `TIMES`."""
        return tuple(self._times)

    def catch_up(self, other: "MinibatchLog", count: int, spent: Sequence[float], last: Gradient) -> None:
        """Takes over mini-batches that were made together with another learner, at the same time.

        Args:
            other: log of that learner.
            count: number of mini-batches.
            spent: seconds of all of them together, for each of `TIMES`.
            last: the last one.
        """
        self.step += count
        self._samples += count * self._count
        self._times = [own + more for own, more in zip(self._times, spent, strict=True)]
        self._since = other._since
        if count and other._minibatch:
            about = (self.learner, last.samples, last.step, last.timestamp, last.loss, last.errors)
            self._minibatch = (*about, *other._minibatch[len(about) :])

    def describe(self, event: Computed, timestamp: int) -> Gradient:
        """Counts the samples of a gradient that is sent now, and describes the gradient."""
        samples, loss, errors = event.samples, event.loss, event.errors
        step, stream = event.step, self._stream
        self._samples += samples
        first = self._origin + step * self._stride
        return Gradient(-1, self.learner, samples, step, first, timestamp, -1, 1.0, loss, errors, stream)

    def take_back(self) -> None:
        """Takes the samples of the last gradient back, because it does not count after all."""
        self._samples -= self._count

    def spend(self, reduce_s: float, push_s: float, wait_s: float, pull_s: float, update_s: float = 0.0) -> None:
        """Adds the times of a mini-batch other than its computation, in seconds."""
        times = self._times
        times[1] += reduce_s
        times[2] += push_s
        times[3] += wait_s
        times[4] += pull_s
        if update_s:
            times[5] += update_s
        if self._minibatch:
            self.diary.add(MessageKind.MINIBATCHES, *self._minibatch, reduce_s, push_s, wait_s, pull_s, update_s)

    def report_unused(self) -> None:
        """Reports a mini-batch whose gradient is not pushed."""
        if self._reports_minibatches:
            self.diary.add(MessageKind.MINIBATCHES, *self._minibatch, *UNUSED)

    def due(self, now: float) -> list[Action]:
        """Returns the actions that send rows, if it is time to send."""
        return self.diary.due(now) if self._reports else []

    def close(self, now: float, pushed: int, pulls: int = 0, skipped_pulls: int = 0) -> list[Action]:
        """Reports the closing account."""
        row = (self.learner, self._world_rank, pushed, self._samples, pulls, skipped_pulls)
        self.diary.add(MessageKind.LEARNERS, *row, *self._times)
        return self.diary.flush(now)
