"""What every role that computes gradients does beside: keep account of its mini-batches, and report them."""

from math import isfinite

from rudra.core.events import Action, Computed, Fail, Warn
from rudra.core.messages import Kind
from rudra.core.records import Gradient
from rudra.core.training_state import TrainingState
from rudra.job.tables import FaultToleranceTable, ResultsTable
from rudra.roles.machine import Machine, Outbox


class MinibatchLog(Machine):
    """The books of one learner.

    Attributes:
        learner: its number.
        step: of the next mini-batch.
        timestamp: of the weights that it is computed with.
    """

    # A simulation has thousands of learners, each in fewer lines of the cache without a dictionary.
    __slots__ = (
        "_began",
        "_compute_s",
        "_diary",
        "_first",
        "_last_samples",
        "_minibatch",
        "_non_finite_stops",
        "_pull_s",
        "_push_s",
        "_reports_minibatches",
        "_samples",
        "_since",
        "_wait_s",
        "_warned",
        "learner",
        "step",
        "timestamp",
    )

    timestamp: int

    def _open_books(self, tolerance: FaultToleranceTable, results: ResultsTable, position: TrainingState) -> None:
        self.learner = self.plan.roles[self.id].index
        self.step = self._first = position.step(self.learner)
        self._non_finite_stops = tolerance.non_finite_loss == "stop"
        self._warned = False
        self._reports_minibatches = results.minibatches
        self._diary = Outbox(self.id, self.plan.statistics, results.report_s)
        self._minibatch: tuple[float, ...] = ()
        self._began = self._since = 0.0  # the training, and the mini-batch at hand
        self._samples = self._last_samples = 0
        self._compute_s = self._push_s = self._wait_s = self._pull_s = 0.0

    def inherit(self, before: Machine) -> None:
        """Takes over the books; what was computed in vain since counts as time, not as samples."""
        assert isinstance(before, MinibatchLog)
        self._diary, self._warned = before._diary, before._warned
        self._first, self._last_samples = before._first, before._last_samples
        self._samples = (self.step - self._first) * self._last_samples
        self._compute_s, self._push_s = before._compute_s, before._push_s
        self._wait_s, self._pull_s = before._wait_s, before._pull_s

    def _enter(self, event: Computed, now: float) -> tuple[list[Action], bool]:
        """Takes a mini-batch into the books; what to do about it, and whether that is all because the run fails."""
        step, loss = event.step, event.loss
        compute_s = now - self._since
        self._compute_s += compute_s
        if self._reports_minibatches:
            about = (self.learner, event.samples, step, self.timestamp, loss, event.errors, 0)
            self._minibatch = (*about, now - self._began, compute_s)
        self.step = step + 1
        if isfinite(loss):
            return [], False
        late, early = "a smaller learning_rate may help", "at the initial weights; do model, loss and data fit?"
        hint = late if self.timestamp else early
        text = f"the loss of mini-batch {step} is {loss}: {hint}"
        if self._non_finite_stops:
            self._report(0.0, 0.0, 0.0)
            return [*self._diary.flush(now), Fail(text)], True
        if self._warned:
            return [], False
        self._warned = True
        return [Warn(f"{text} (training goes on, as [fault_tolerance] non_finite_loss says)")], False

    def _describe(self, event: Computed, pad: int = 0) -> Gradient:
        """Counts the samples of a gradient that is on its way now, and describes it."""
        samples, loss, errors = event.samples, event.loss, event.errors
        self._samples += samples
        self._last_samples = samples
        return Gradient(-1, self.learner, samples, event.step, self.timestamp, -1, 1.0, loss, errors, pad)

    def _spent(self, push_s: float, wait_s: float, pull_s: float) -> None:
        """How long a mini-batch took beside the computation."""
        self._push_s += push_s
        self._wait_s += wait_s
        self._pull_s += pull_s
        self._report(push_s, wait_s, pull_s)

    def _report(self, push_s: float, wait_s: float, pull_s: float) -> None:
        if self._reports_minibatches:
            self._diary.add(Kind.MINIBATCHES, *self._minibatch, push_s, wait_s, pull_s)

    def _close_books(self, now: float, pushed: int, pulls: int, skipped_pulls: int) -> list[Action]:
        """The closing account."""
        row = (self.learner, self.plan.roles[self.id].world_rank, pushed, self._samples, pulls, skipped_pulls)
        self._diary.add(Kind.LEARNERS, *row, self._compute_s, self._push_s, self._wait_s, self._pull_s)
        return self._diary.flush(now)
