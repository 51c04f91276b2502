"""Worker: a learner that requests work from the coordinator and computes the assigned batches.

Source: Hogbatch (Ma and Rusu 2020), §5.1, §6.1-6.3. A small worker splits its batch into one part per thread. It
computes all parts with the weights that it had at the beginning, as threads that begin together do. Each part gives a
separate gradient, which is pushed when it is ready. The parts are computed one after another, so that runs can be
replayed.

    READY       training starts                                   -> EXCHANGING  the coordinator assigns work
    EXCHANGING  work and newer weights received                   -> COMPUTING   first part of the batch
    COMPUTING   a part is ready                                   -> EXCHANGING  push; the last part requests work
    EXCHANGING  delivered, and parts are left                     -> COMPUTING
    EXCHANGING  part of an evaluation and newer weights received  -> TESTING     evaluate the part
    TESTING     the part is evaluated                             -> EXCHANGING  report to the coordinator
"""

from collections import deque
from collections.abc import Mapping
from typing import Any, ClassVar

from protocols.hogbatch import parts
from rudra.core.actions import Action, Compute, ComputeEvaluationPart, Send
from rudra.core.buffer_names import GRADIENT, WEIGHTS
from rudra.core.events import Computed, EvaluationPartComputed, Received, Sent
from rudra.core.messages import (
    AssignWork,
    EvaluatePart,
    MessageKind,
    PartEvaluated,
    PushedGradient,
    Stop,
    TrainingStarted,
    Weights,
)
from rudra.core.records import Gradient
from rudra.core.training_state import TrainingState
from rudra.core.wire import in_pieces_or_none
from rudra.core.work import DEALT, Work
from rudra.job.job import Job
from rudra.roles.distributed_evaluation import PARTS
from rudra.roles.learner import Learner, LearnerState
from rudra.roles.machine import Setup, States, Transition, self_loops
from rudra.roles.minibatch_log import MinibatchLog
from rudra.roles.weight_requests import NO_WEIGHTS
from topologies import Plan


def works(first: int, count: int, threads: int) -> list[Work]:
    """Returns the parts of a batch. `first` is the stream position of its first sample."""
    found = []
    for samples in parts(count, threads):
        found.append(Work(DEALT, first, samples, 0))
        first += samples
    return found


class WorkLog(MinibatchLog):
    """Record of a worker's mini-batches, which are the parts of its assigned batches.

    Attributes:
        left: parts that have not begun.
    """

    __slots__ = ("_at_hand", "_threads", "left")

    def __init__(self, role: int, setup: Setup) -> None:
        self.left: deque[Work] = deque()
        self._at_hand = Work(DEALT, 0, 0, 0)
        super().__init__(role, setup)

    def follow(self, job: Job, plan: Plan, position: TrainingState) -> None:
        self._threads = job.hogbatch.team(plan.learner_numbers)[self.learner].threads
        self.step = position.step(self.learner)
        self._samples = position.learned_by(self.learner) - self._before

    def take(self, first: int, count: int) -> None:
        """Adds an assigned batch."""
        self.left.extend(works(first, count, self._threads))

    def begin(self, weights: str, gradient: str, timestamp: int, now: float) -> Compute:
        self._since, self._at_hand = now, self.left.popleft()
        return Compute(self.step, self._at_hand, weights, gradient, timestamp, now - self.began)

    def describe(self, event: Computed, timestamp: int) -> Gradient:
        self._samples += event.samples
        about = (event.step, self._at_hand.first, timestamp, -1, 1.0, event.loss, event.errors, DEALT)
        return Gradient(-1, self.learner, event.samples, *about)


class EvaluationPause:
    """Pause of a worker's training, in which it evaluates parts of the data.

    Attributes:
        part: number of the part to evaluate next, or None.
    """

    __slots__ = ("_began", "part")

    def __init__(self) -> None:
        self.part: int | None = None
        self._began: float | None = None

    def begin(self, part: int, now: float) -> None:
        """Notes an assigned part. The first part begins the pause."""
        self.part = part
        if self._began is None:
            self._began = now

    def evaluate(self) -> Action:
        """Evaluates the assigned part."""
        part, self.part = self.part, None
        assert part is not None
        return ComputeEvaluationPart(WEIGHTS, part, PARTS)

    def end(self, now: float) -> float:
        """Ends the pause and returns its length in seconds, or 0 without a pause."""
        pause_s = 0.0 if self._began is None else now - self._began
        self._began = None
        return pause_s


def evaluated_part(role: int, server: int, event: EvaluationPartComputed) -> list[Action]:
    """Reports a part of an evaluation to the coordinator."""
    pieces = in_pieces_or_none(event.rows)
    return [Send(server, PartEvaluated(role, event.part, last, rows)) for rows, last in pieces]


class Worker(Learner):
    """Worker of a run with a coordinator. It has the same arguments as `Learner`."""

    __slots__ = ("_pause",)

    log: WorkLog

    TRANSITIONS: ClassVar[Mapping[tuple[States, Any], Transition]] = {
        **Learner.TRANSITIONS,
        (LearnerState.READY, MessageKind.START): Transition("_begin", LearnerState.EXCHANGING),
        (LearnerState.EXCHANGING, MessageKind.ASSIGN_WORK): Transition(
            "_execute", LearnerState.EXCHANGING, LearnerState.COMPUTING
        ),
        **self_loops([LearnerState.STOPPED], {MessageKind.ASSIGN_WORK: "_ignore"}),
        (LearnerState.EXCHANGING, MessageKind.EVALUATE_PART): Transition(
            "_assess", LearnerState.EXCHANGING, LearnerState.TESTING
        ),
        (LearnerState.EXCHANGING, MessageKind.WEIGHTS): Transition(
            "_pulled", LearnerState.EXCHANGING, LearnerState.COMPUTING, LearnerState.TESTING, LearnerState.STOPPED
        ),
        (LearnerState.TESTING, EvaluationPartComputed): Transition("_assessed", LearnerState.EXCHANGING),
        (LearnerState.TESTING, Sent): Transition("_delivered_meanwhile", LearnerState.TESTING),
        (LearnerState.TESTING, MessageKind.SHUTDOWN): Transition("_finish", LearnerState.DONE),
    }

    def __init__(self, role: int, setup: Setup) -> None:
        super().__init__(role, setup)
        self._pause = EvaluationPause()

    def _make_log(self, role: int, setup: Setup) -> MinibatchLog:
        return WorkLog(role, setup)

    @property
    def waiting_for(self) -> str:
        if self.state is LearnerState.EXCHANGING and self._delivered_at is not None:
            return f"the {self.plan.roles[self.server].name} to give it work"
        return super().waiting_for

    def _begin(self, event: Received[TrainingStarted], now: float) -> list[Action]:
        self.state = LearnerState.EXCHANGING
        self.log.began = event.message.began_ns * 1e-9
        self._computed_at = self._pushed_at = self._delivered_at = now  # as if a gradient had been pushed
        return []

    def _execute(self, event: Received[AssignWork], now: float) -> list[Action]:
        self.log.take(*event.message.rows[0].item())
        self.log.began = event.message.began_ns * 1e-9
        self._leave_out_tests(now)
        return self._continue_with(event.message.timestamp, now)

    def _push(self, event: Computed, now: float) -> list[Action]:
        warnings, ends = self._computed(event, now)
        if ends:
            return warnings
        self.state = LearnerState.EXCHANGING
        timestamp, gradient, asks = self.timestamp, self._gradient(event, now), not self.log.left
        if not asks:
            self._answered_at = now  # there is no request to answer
        held = timestamp if asks else NO_WEIGHTS
        message = PushedGradient(self.id, timestamp, held, (gradient,), asks)
        return [Send(self.server, message, GRADIENT), *warnings]

    # Evaluations of the weights, while training is paused.

    def _assess(self, event: Received[EvaluatePart], now: float) -> list[Action]:
        self._pause.begin(event.message.part, now)
        if event.message.timestamp <= self.timestamp:
            return self._test()
        self._expects_weights = True
        self._pulls += 1
        return [self._receive]

    def _test(self) -> list[Action]:
        self.state = LearnerState.TESTING
        return [self._pause.evaluate()]

    def _pulled(self, event: Received[Weights], now: float) -> list[Action]:
        if self._pause.part is None:
            return super()._pulled(event, now)
        self._expects_weights = False
        self.timestamp = event.message.timestamp
        return self._test()

    def _assessed(self, event: EvaluationPartComputed, now: float) -> list[Action]:
        self.state = LearnerState.EXCHANGING
        return evaluated_part(self.id, self.server, event)

    def _stop_soon(self, event: Received[Stop], now: float) -> list[Action]:
        self._leave_out_tests(now)
        return super()._stop_soon(event, now)

    def _leave_out_tests(self, now: float) -> None:
        """Continues to measure times after an evaluation as if it had taken no time."""
        pause_s = self._pause.end(now)
        self._computed_at, self._pushed_at = self._computed_at + pause_s, self._pushed_at + pause_s
        if self._delivered_at is not None:
            self._delivered_at = min(now, self._delivered_at + pause_s)

    def _delivered_meanwhile(self, event: Sent, now: float) -> list[Action]:
        self._delivered_at = now
        return []
