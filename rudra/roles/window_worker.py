"""Worker with weights in a shared-memory window: it applies its gradients directly and reports to the coordinator.

Source: Hogbatch (Ma and Rusu 2020), §5.1, "asynchronous" update policy, and Algorithm 1. In a racing window a worker
requests enough batches in advance for `AHEAD_S` seconds of work. It reports several updates at a time and does not
wait.
"""

from collections import deque
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from msgspec import structs

from protocols import Hogbatch
from rudra.core.actions import Action, ReadShared, Send, TrainInPlace, WriteShared
from rudra.core.buffer_names import WEIGHTS
from rudra.core.events import (
    AppliedGradient,
    Computed,
    EvaluationPartComputed,
    Received,
    Sent,
    SharedRead,
    TrainedInPlace,
)
from rudra.core.messages import (
    AppliedInPlace,
    AssignWork,
    CollectWindow,
    EvaluatePart,
    MessageKind,
    Stop,
    TrainingStarted,
    Weights,
    WindowUpdated,
    WindowWeights,
)
from rudra.core.records import Gradient
from rudra.core.wire import CONTROL_GRADIENTS
from rudra.core.work import Work
from rudra.roles.learner import Learner, LearnerState
from rudra.roles.machine import Setup, States, Transition, self_loops
from rudra.roles.minibatch_log import MinibatchLog
from rudra.roles.worker import EvaluationPause, WorkLog, evaluated_part, works

AHEAD_S = 10e-3
"""Seconds of work that a worker has in advance, if it may request work in advance. This is longer than the answer of a
coordinator on the same core takes, and short enough that other workers do not wait for it at the end of an epoch."""

LONG_S = 0.1
"""Longest batch time in seconds for requests in advance. A slower worker requests a batch only after the previous one.
Its wait for the answer is short in comparison, and the others do not wait for a queued batch at the end of an epoch."""

BATCHES_AHEAD, UPDATES_AHEAD = 64, 8192
"""Largest numbers of batches and updates in advance, except that one batch is always allowed. The window's log has room
for twice `UPDATES_AHEAD` unreported updates."""

COMPUTING, EXCHANGING = LearnerState.COMPUTING, LearnerState.EXCHANGING


def on_its_way(made: AppliedGradient, *, numbered: bool) -> Gradient:
    """Returns a gradient as a worker reports it.

    `scale` is its learning rate. If updates are not numbered, `timestamp` is the largest possible staleness σ.
    """
    timestamp = made.gradient.timestamp if numbered else made.most
    return structs.replace(made.gradient, scale=made.rate, timestamp=timestamp)


class Batch(NamedTuple):
    """Batch of gradients that are computed together, or one after another without a message to the coordinator."""

    works: tuple[Work, ...]
    rates: tuple[float, ...]


class WindowLog(WorkLog):
    """Record of the mini-batches of a worker with a window.

    Attributes:
        batches: batches that have not begun.
    """

    __slots__ = ("_alone", "_protocol", "batches")

    def __init__(self, role: int, setup: Setup) -> None:
        self.batches: deque[Batch] = deque()
        self._alone = setup.job.hogbatch.locking
        self._protocol = Hogbatch.of(setup.job.make_protocol(setup.plan))
        super().__init__(role, setup)

    @property
    def threads(self) -> int:
        """Number of parts in a batch."""
        return self._threads

    def take_at(self, first: int, count: int, rate: float) -> None:
        """Adds assigned work at a learning rate, which the rule scales by the samples of each gradient."""
        parts = works(first, count, self._threads)
        for some in [(part,) for part in parts] if self._alone else [tuple(parts)]:
            self.batches.append(Batch(some, tuple(rate * self._protocol.rate_scale(work.count) for work in some)))

    def begin_batch(self, now: float) -> TrainInPlace:
        self._since = now
        batch = self.batches.popleft()
        return TrainInPlace(self.step, batch.works, batch.rates)

    def enter_made(self, made: tuple[AppliedGradient, ...], wait_s: float, now: float) -> tuple[list[Action], bool]:
        """Records applied gradients. Returns the resulting actions, and whether the run fails.

        Gradients that threads computed together are recorded as if computed one after another, each in an equal share
        of the time.
        """
        each_s = (now - self._since) / len(made)
        compute_s = max(0.0, each_s - sum(each.seconds for each in made) / len(made))
        actions: list[Action] = []
        for later, each in zip(range(len(made) - 1, -1, -1), made, strict=True):
            gradient, ended = each.gradient, now - later * each_s
            self._since = ended - compute_s
            computed = Computed(gradient.step, gradient.loss, gradient.errors, gradient.samples)
            found, fails = self.enter(computed, gradient.timestamp, ended)
            if fails:
                return actions + found, True
            self._samples += gradient.samples
            self.spend(0.0, 0.0, wait_s, 0.0, each.seconds)
            actions += found
            wait_s = 0.0
        return actions, False


class WindowWorker(Learner):
    """Worker with weights in a window. It has the same arguments as `Learner`."""

    __slots__ = (
        "_ahead",
        "_asked",
        "_batch_began",
        "_batch_s",
        "_leads",
        "_pause",
        "_reported_at",
        "_takes",
        "_untold",
        "_wait_s",
        "_waits_since",
    )

    log: WindowLog

    TRANSITIONS: ClassVar[Mapping[tuple[States, Any], Transition]] = {
        **{key: to for key, to in Learner.TRANSITIONS.items() if key[0] not in (COMPUTING, EXCHANGING)},
        (LearnerState.READY, MessageKind.START): Transition("_begin", EXCHANGING),
        **self_loops([LearnerState.STOPPED], {MessageKind.ASSIGN_WORK: "_ignore"}),
        (LearnerState.TESTING, EvaluationPartComputed): Transition("_assessed", EXCHANGING),
        (LearnerState.TESTING, Sent): Transition("_ignore", LearnerState.TESTING),
        (LearnerState.TESTING, MessageKind.SHUTDOWN): Transition("_finish", LearnerState.DONE),
        (EXCHANGING, MessageKind.ASSIGN_WORK): Transition("_execute", COMPUTING),
        (EXCHANGING, MessageKind.STOP): Transition("_stop_soon", LearnerState.STOPPED),
        **self_loops([EXCHANGING, LearnerState.STOPPED], {MessageKind.COLLECT_WINDOW: "_join", SharedRead: "_give"}),
        **self_loops([EXCHANGING], {Sent: "_given", MessageKind.WEIGHTS: "_adopt"}),
        (EXCHANGING, MessageKind.EVALUATE_PART): Transition("_assess", LearnerState.TESTING),
        (COMPUTING, MessageKind.ASSIGN_WORK): Transition("_execute", COMPUTING),
        (COMPUTING, MessageKind.STOP): Transition("_stop_soon", COMPUTING),
        (COMPUTING, TrainedInPlace): Transition("_report", COMPUTING, EXCHANGING, LearnerState.STOPPED),
        **{
            (state, MessageKind.SHUTDOWN): Transition("_finish", LearnerState.DONE) for state in (COMPUTING, EXCHANGING)
        },
    }

    def __init__(self, role: int, setup: Setup) -> None:
        super().__init__(role, setup)
        self._pause = EvaluationPause()
        self._ahead = not setup.job.hogbatch.locking
        self._asked = 1  # requested batches; every worker gets one when training begins
        self._untold: list[AppliedGradient] = []
        self._leads = role in setup.plan.window_leaders
        self._takes = False  # whether the average of the nodes' weights will come
        self._wait_s = self._waits_since = self._reported_at = self._batch_began = self._batch_s = 0.0

    def _make_log(self, role: int, setup: Setup) -> MinibatchLog:
        return WindowLog(role, setup)

    @property
    def waiting_for(self) -> str:
        if self.state is EXCHANGING:
            return f"the {self.plan.roles[self.server].name} to give it work"
        return super().waiting_for

    # The weights of this worker's node, if there are several nodes.

    def _first_weights(self, event: Received[Weights], now: float) -> list[Action]:
        publish = [WriteShared(WEIGHTS, event.message.timestamp)] if self._leads else []
        return [*publish, *super()._first_weights(event, now)]

    def _join(self, event: Received[CollectWindow], now: float) -> list[Action]:
        self._takes = event.message.average_follows
        return [ReadShared(WEIGHTS)]

    def _give(self, event: SharedRead, now: float) -> list[Action]:
        return [Send(self.server, WindowWeights(self.id, event.surviving), WEIGHTS)]

    def _given(self, event: Sent, now: float) -> list[Action]:
        return [self._receive] if self._takes else []

    def _adopt(self, event: Received[Weights], now: float) -> list[Action]:
        self.timestamp = event.message.timestamp
        return [WriteShared(WEIGHTS, self.timestamp), Send(self.server, WindowUpdated(self.id, self.timestamp))]

    # Evaluations of the weights in the window, while training is paused.

    def _assess(self, event: Received[EvaluatePart], now: float) -> list[Action]:
        self._pause.begin(event.message.part, now)
        self.state = LearnerState.TESTING
        return [self._pause.evaluate()]

    def _assessed(self, event: EvaluationPartComputed, now: float) -> list[Action]:
        self.state = EXCHANGING
        return evaluated_part(self.id, self.server, event)

    # Work.

    def _begin(self, event: Received[TrainingStarted], now: float) -> list[Action]:
        self.state = EXCHANGING
        self.log.began = event.message.began_ns * 1e-9
        self._waits_since = now
        return []

    def _execute(self, event: Received[AssignWork], now: float) -> list[Action]:
        rows = event.message.rows
        self._asked -= len(rows)
        self.log.began = event.message.began_ns * 1e-9
        pause_s = self._pause.end(now)
        for first, count in rows.tolist():
            self.log.take_at(first, count, event.message.learning_rate)
        if self.state is COMPUTING:
            return []
        self._wait_s = now - self._waits_since - pause_s
        train = self._next_batch(now)
        return [train, *(self._tell() if self._ahead else [])]

    @property
    def _depth(self) -> int:
        """Wanted number of batches that are here or requested, in addition to the one under way."""
        if not self._ahead or not 0 < self._batch_s < LONG_S:
            return 0 if self.log.batches or self.state is COMPUTING else 1
        most = min(BATCHES_AHEAD, UPDATES_AHEAD // self.log.threads)
        return max(1, min(1 + int(AHEAD_S / self._batch_s), most))

    def _next_batch(self, now: float) -> Action:
        self.state, self._batch_began = COMPUTING, now
        return self.log.begin_batch(now)

    def _report(self, event: TrainedInPlace, now: float) -> list[Action]:
        actions, fails = self.log.enter_made(event.made, self._wait_s, now)
        if fails:
            return actions
        self._wait_s = 0.0
        self.pushed += len(event.made)
        self._untold += event.made
        self._batch_s = now - self._batch_began
        if not self._stopping and self.log.batches:
            actions.append(self._next_batch(now))
            if self._ahead and now - self._reported_at < AHEAD_S / 4 and len(self.log.batches) > 1:
                return actions
        elif not self._stopping:
            self.state, self._waits_since = EXCHANGING, now
        self._reported_at = now
        actions += [*self._tell(), *self.log.due(now)]
        return actions + self._leave(now) if self._stopping else actions

    def _tell(self) -> list[Action]:
        """Reports applied gradients to the coordinator, in one or more messages, and requests work."""
        asks = 0 if self._stopping else max(0, self._depth - self._asked - len(self.log.batches))
        self._asked += asks
        made, self._untold = self._untold, []
        if not made:
            return [Send(self.server, AppliedInPlace(self.id, wanted=asks))] if asks else []
        told: list[Action] = []
        for place in range(0, len(made), CONTROL_GRADIENTS):
            some = made[place : place + CONTROL_GRADIENTS]
            gradients = tuple(on_its_way(each, numbered=not self._ahead) for each in some)
            seconds, last = sum(each.seconds for each in some), place + len(some) == len(made)
            wanted, digest = asks if last else 0, _signed(some[0].digest)
            told.append(Send(self.server, AppliedInPlace(self.id, digest, wanted, seconds, gradients)))
        return told

    def _stop_soon(self, event: Received[Stop], now: float) -> list[Action]:
        self._stopping = True
        return [] if self.state is COMPUTING else self._leave(now)


_UNSIGNED = (1 << 64) - 1


def _signed(digest: int) -> int:
    """Returns a digest as a signed 64-bit integer, for a message."""
    return digest - (1 << 64) if digest >> 63 else digest


def unsigned(number: int) -> int:
    """Returns the digest for a signed 64-bit integer from a message."""
    return number & _UNSIGNED
