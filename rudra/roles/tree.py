"""Tree server: averages the gradients of its children for its parent, and sends weights down.

Source: rudra.txt §3.3. The tree server acts as a server for its children and as a learner for its parent.

An average includes one gradient of each learner below this server. If an update takes fewer gradients, it includes an
even part of them. The server sends an average only after the previous one is delivered.

A child's request travels up with the average that includes its gradient. It is answered after the root has handled this
average. So, as in topology base, the root has a learner's last gradient before the learner continues. The learner also
waits for the other learners in its average.

The server sends one request to its parent for all requests that wait. Newer weights are received into a second buffer,
because older weights may still be on their way to a child.

    WAITING   first weights, and every child ready -> READY     notify the parent
    READY     training starts                      -> TRAINING  start the children
    TRAINING  stop                                 -> STOPPING  stop the children
    STOPPING  every child left, everything sent    -> STOPPED   send the remaining gradients, and leave
    STOPPED   everything is recorded               -> DONE
"""

from collections.abc import Mapping
from contextlib import suppress
from enum import auto
from typing import Any, ClassVar

from protocols import Clock
from rudra.core.actions import Action, DeclareLost, Fail, Hash, Receive, Send
from rudra.core.events import Hashed, Lost, ReceiveCancelled, Received, Sent, Started, Tick
from rudra.core.messages import (
    NOT_PULLING,
    ChildDone,
    LearnerDropped,
    LearnerLate,
    MessageKind,
    Pull,
    PullAnswer,
    PushedGradient,
    Ready,
    Shutdown,
    Stop,
    TrainingStarted,
    Weights,
)
from rudra.core.records import Gradient
from rudra.roles.gradient_buffers import GradientBuffers
from rudra.roles.machine import Machine, Setup, States, Transition, halt, listed, self_loops, short_digest
from rudra.roles.readiness import Readiness
from rudra.roles.stragglers import overdue_s, tick_s
from rudra.roles.tree_weights import Questions, WeightBuffers


class TreeServerState(States):
    WAITING = auto()
    READY = auto()
    TRAINING = auto()
    STOPPING = auto()
    STOPPED = auto()
    DONE = auto()


ALIVE = [state for state in TreeServerState if state is not TreeServerState.DONE]


class TreeServer(Machine):
    """Server between the root and the learners. It holds no weights if the weights have a separate tree.

    Args:
        role: id of the server in the plan.
        setup: arguments of the role.
    """

    TRANSITIONS: ClassVar[Mapping[tuple[States, Any], Transition]] = {
        **self_loops(ALIVE, {Tick: "_look_for_late"}),
        **self_loops(
            [TreeServerState.WAITING, TreeServerState.READY, TreeServerState.STOPPED], {MessageKind.DROP: "_drop"}
        ),
        (TreeServerState.WAITING, Started): Transition("_start", TreeServerState.WAITING),
        (TreeServerState.WAITING, MessageKind.WEIGHTS): Transition("_first_weights", TreeServerState.WAITING),
        (TreeServerState.WAITING, Hashed): Transition("_hashed", TreeServerState.WAITING),
        (TreeServerState.WAITING, Sent): Transition("_first_returned", TreeServerState.WAITING, TreeServerState.READY),
        (TreeServerState.WAITING, MessageKind.READY): Transition(
            "_child_ready", TreeServerState.WAITING, TreeServerState.READY
        ),
        (TreeServerState.READY, MessageKind.START): Transition("_begin", TreeServerState.TRAINING),
        (TreeServerState.TRAINING, MessageKind.GRADIENT): Transition("_gradient", TreeServerState.TRAINING),
        (TreeServerState.TRAINING, MessageKind.PULL): Transition("_pull", TreeServerState.TRAINING),
        (TreeServerState.TRAINING, MessageKind.TIMESTAMP): Transition("_answered", TreeServerState.TRAINING),
        (TreeServerState.TRAINING, MessageKind.WEIGHTS): Transition("_pulled", TreeServerState.TRAINING),
        (TreeServerState.TRAINING, Sent): Transition("_returned", TreeServerState.TRAINING),
        (TreeServerState.TRAINING, ReceiveCancelled): Transition("_withdrawn", TreeServerState.TRAINING),
        (TreeServerState.TRAINING, MessageKind.STOP): Transition(
            "_stop", TreeServerState.STOPPING, TreeServerState.STOPPED
        ),
        (TreeServerState.TRAINING, MessageKind.DROP): Transition("_drop", TreeServerState.TRAINING),
        (TreeServerState.STOPPING, MessageKind.GRADIENT): Transition(
            "_late_gradient", TreeServerState.STOPPING, TreeServerState.STOPPED
        ),
        (TreeServerState.STOPPING, ReceiveCancelled): Transition("_withdrawn", TreeServerState.STOPPING),
        (TreeServerState.STOPPING, MessageKind.PULL): Transition(
            "_ignore", TreeServerState.STOPPING
        ),  # stop is the answer
        (TreeServerState.STOPPING, MessageKind.WEIGHTS): Transition(
            "_late_weights", TreeServerState.STOPPING, TreeServerState.STOPPED
        ),
        (TreeServerState.STOPPING, Sent): Transition("_returned", TreeServerState.STOPPING, TreeServerState.STOPPED),
        (TreeServerState.STOPPING, MessageKind.CHILD_DONE): Transition(
            "_bye", TreeServerState.STOPPING, TreeServerState.STOPPED
        ),
        (TreeServerState.STOPPING, MessageKind.DROP): Transition(
            "_drop", TreeServerState.STOPPING, TreeServerState.STOPPED
        ),
        **self_loops([TreeServerState.WAITING, TreeServerState.READY, TreeServerState.TRAINING], {Lost: "_lose"}),
        (TreeServerState.STOPPING, Lost): Transition("_lose", TreeServerState.STOPPING, TreeServerState.STOPPED),
        (TreeServerState.STOPPED, Started): Transition("_ignore", TreeServerState.STOPPED),
        (TreeServerState.STOPPED, ReceiveCancelled): Transition("_withdrawn", TreeServerState.STOPPED),
        (TreeServerState.STOPPED, MessageKind.SHUTDOWN): Transition("_finish", TreeServerState.DONE),
    }

    def __init__(self, role: int, setup: Setup) -> None:
        job, plan, position = setup.job, setup.plan, setup.position
        super().__init__(role, plan)
        parent = plan.roles[role].parent
        self.parent = role if parent is None else parent
        # A server without children has no learner below it.
        self.state = TreeServerState.WAITING if plan.children[role] else TreeServerState.STOPPED
        self._job = job
        self._children = list(plan.children[role])
        self._protocol = job.make_protocol(plan)
        self._together = self._share(plan.learners_below(role))
        self._below = {child: plan.learners_below(child) for child in plan.children[role]}
        self._lost = 0  # number of lost learners in the whole run
        self.buffers = GradientBuffers(self._children, 3, self._protocol.ordered)
        self._pending: list[Gradient] = []
        self.timestamp = 0
        self.received = self.relayed = position.below(plan, role)
        self._received = {child: position.below(plan, child) for child in plan.children[role]}
        self._last_message = dict.fromkeys(
            self._children, 0.0
        )  # by child: time of its last gradient or of our last answer
        self._readiness = Readiness()
        self._weights = WeightBuffers()
        self._questions = Questions()
        self._left: dict[int, int] = {}

    @property
    def waiting_for(self) -> str:
        parent = self.plan.roles[self.parent].name
        if self.state is TreeServerState.WAITING:
            missing = [self.plan.roles[i].name for i in self._children if i not in self._readiness.roles]
            return f"the first weights from the {parent}" if len(missing) == len(self._children) else listed(missing)
        if self.state is TreeServerState.STOPPING:
            return listed([self.plan.roles[i].name for i in self._children if i not in self._left])
        if self.state is TreeServerState.TRAINING:
            if self.buffers.lent is not None:
                return f"the {parent} to take a gradient"
            return f"a gradient from {listed([self.plan.roles[i].name for i in self._children])}"
        return (
            f"the {parent} to start training"
            if self.state is TreeServerState.READY
            else "the statistics server to finish"
        )

    def validate(self) -> None:
        self.buffers.validate()
        assert self.received == self.relayed + len(self._pending) + self.buffers.waiting
        assert bool(self._pending) == (self.buffers.accumulator is not None)
        self._weights.validate()

    # Start: all roles hold the same weights.

    def _start(self, event: Started, now: float) -> list[Action]:
        return [Receive(self._weights.current, self.parent)] if self.plan.receivers[self.id] else []

    def _first_weights(self, event: Received[Weights], now: float) -> list[Action]:
        self.timestamp = event.message.timestamp
        return [Hash(self._weights.current)]

    def _hashed(self, event: Hashed, now: float) -> list[Action]:
        self._readiness.digest = short_digest(event.digest)
        message = Weights(self.id, self.timestamp)
        return [self._weights.send(to, message) for to in self.plan.receivers[self.id]]

    def _child_ready(self, event: Received[Ready], now: float) -> list[Action]:
        # A server without weights compares the digests of its children.
        if not self._readiness.enter(event.message.sender, event.message.digest):
            name = self.plan.roles[event.message.sender].name
            return [Fail(f"{name} received other initial weights than its neighbours (digests differ)")]
        return self._report_ready()

    def _first_returned(self, event: Sent, now: float) -> list[Action]:
        self._weights.returned(event.buffer)
        return self._report_ready()

    def _report_ready(self) -> list[Action]:
        digest = self._readiness.digest
        if len(self._readiness.roles) < len(self._children) or not self._weights.idle:
            return []
        assert digest is not None
        self.state = TreeServerState.READY
        return [Send(self.parent, Ready(self.id, digest))]

    def _begin(self, event: Received[TrainingStarted], now: float) -> list[Action]:
        self.state = TreeServerState.TRAINING
        self._last_message = dict.fromkeys(self._last_message, now)
        return [*(Send(to, event.message) for to in self._children), *self.buffers.post(True)]

    # Gradients up.

    def _gradient(self, event: Received[PushedGradient], now: float) -> list[Action]:
        self._take(event)
        self._last_message[event.message.sender] = now
        return self._process_arrived()

    def _take(self, event: Received[PushedGradient]) -> None:
        self.received += len(event.message.gradients) - self.buffers.take(event)
        self._received[event.message.sender] += len(event.message.gradients)

    def _process_arrived(self) -> list[Action]:
        """Averages arrived gradients. Sends the average when it is complete and the previous one is delivered."""
        actions: list[Action] = []
        buffers = self.buffers
        while True:
            if self._complete():
                if buffers.lent is not None:
                    break
                actions.append(self._relay())
            elif buffers.arrived and self._may_add():
                actions += self._add()
            else:
                break
        return actions + buffers.post(self.state is TreeServerState.TRAINING)

    def _complete(self) -> bool:
        """Returns whether the average has all gradients that are sent together."""
        if self.buffers.ordered:
            return self.buffers.complete and bool(self._pending)
        return len(self._pending) >= self._together

    def _share(self, learners: int) -> int:
        """Returns the number of gradients in an average: one of each learner below, or of an even part of them.

        Learners in one average wait for each other. With uneven parts, some would wait for a whole mini-batch.
        """
        parts = -(-learners // self._protocol.gradients_per_update)  # fewest parts that each fit into one update
        return max(1, learners // max(1, parts))

    def _may_add(self) -> bool:
        """Returns whether an arrived gradient can be added: it is its turn, or training has ended."""
        if not self.buffers.ordered or self.state is TreeServerState.STOPPING:
            return True
        return self.buffers.rotate_to_turn()

    def _add(self) -> list[Action]:
        buffer, message = self.buffers.arrived.popleft()
        self._pending += message.gradients
        if message.held >= 0:
            self._questions.with_gradients[message.sender] = (message.timestamp, message.held)
        return self.buffers.average(buffer, sum(g.samples for g in message.gradients), 1.0)

    def _relay(self) -> Action:
        """Sends the average to the parent, with a request for weights if children wait for weights."""
        gradients, self._pending = tuple(self._pending), []
        self.relayed += len(gradients)
        buffer = self.buffers.lent = self.buffers.take_average()
        self._questions.pass_on()
        may_ask = self._may_ask()
        asked = self._questions.ask() if may_ask else self.timestamp
        held = self.timestamp if may_ask else NOT_PULLING
        return Send(self.parent, PushedGradient(self.id, asked, held, gradients), buffer)

    # Weights down.

    def _may_ask(self) -> bool:
        questions = self._questions
        return bool(questions.waiting) and not questions.asked and self.state is TreeServerState.TRAINING

    def _pull(self, event: Received[Pull], now: float) -> list[Action]:
        self._questions.waiting[event.message.sender] = (event.message.timestamp, event.message.held)
        return self._ask()

    def _ask(self) -> list[Action]:
        """Requests weights from the parent, unless a request is under way or can go with a waiting average."""
        if not self._may_ask() or self._complete():
            return []
        return [Send(self.parent, Pull(self.id, self._questions.ask(), self.timestamp))]

    def _answered(self, event: Received[PullAnswer], now: float) -> list[Action]:
        if event.message.timestamp == self.timestamp:
            return self._answer_all(now)
        self._weights.awaited = True
        return self._fetch()

    def _fetch(self) -> list[Action]:
        """Receives newer weights if all transfers of the spare buffer have ended."""
        return [Receive(self._weights.spare, self.parent)] if self._weights.can_receive else []

    def _pulled(self, event: Received[Weights], now: float) -> list[Action]:
        self._weights.received()
        self.timestamp = event.message.timestamp
        return self._answer_all(now)

    def _answer_all(self, now: float) -> list[Action]:
        """Answers the requests that the protocol grants, and repeats the request for the others."""
        clock = Clock(self.timestamp, ())
        stamp = PullAnswer(self.id, self.timestamp)
        actions: list[Action] = []
        for child, (asked, held) in self._questions.answer().items():
            if child not in self._children:  # the child has died
                continue
            if not self._protocol.pull_granted(-1, asked, clock):
                self._questions.waiting[child] = (asked, held)
            else:
                self._last_message[child] = now
                actions.append(Send(child, stamp))
                if held < self.timestamp:
                    actions.append(self._weights.send(child, Weights(self.id, self.timestamp)))
        return actions + self._ask()

    def _returned(self, event: Sent, now: float) -> list[Action]:
        if event.buffer == self.buffers.lent:
            self.buffers.lent = None
            self.buffers.free.append(event.buffer)
            actions = self._process_arrived() + self._ask()
        else:
            self._weights.returned(event.buffer)
            actions = self._fetch() if self._weights.awaited and event.buffer == self._weights.spare else []
        return actions + self._leave() if self.state is TreeServerState.STOPPING else actions

    # Learners that die.

    def _lose(self, event: Lost, now: float) -> list[Action]:
        role, plan = event.role, self.plan
        if not plan.expendable(role):
            return []
        self._lost += 1
        with suppress(ValueError):  # the root reports the error and ends the run
            self._protocol = self._job.make_protocol(plan, self._lost)
        actions: list[Action] = []
        child = plan.child_towards(role, self.id)
        if child is not None:
            self._below[child] -= 1
            if child != role and not self._below[child]:
                dropped, actions = self.buffers.detach(child)
                self.received -= dropped
        self._together = self._share(sum(self._below.values()))
        if child == role:
            dropped = self.buffers.remove(role)
            self.received -= dropped
            self._children.remove(role)
            self._questions.lose(role)
            self._left.pop(role, None)
        if self.state is TreeServerState.TRAINING:
            return actions + self._process_arrived() + self._ask()
        return actions + self.buffers.post(False) + self._leave() if self.state is TreeServerState.STOPPING else []

    # Learners that are too slow.

    @property
    def tick_s(self) -> float | None:
        return tick_s(self._job)

    def _look_for_late(self, event: Tick, now: float) -> list[Action]:
        """Reports a learner that all others wait for too long to the root, at every check. The root decides."""
        child = self.buffers.turn
        silence_s = overdue_s(self._job, self.plan, child, self._last_message, now)
        if self.state is not TreeServerState.TRAINING or child is None or silence_s is None:
            return []
        if child in self._questions.waiting or child in self._questions.asked:  # the child itself waits for weights
            return []
        return [Send(self.plan.server, LearnerLate(self.id, child, silence_s))]

    def _drop(self, event: Received[LearnerDropped], now: float) -> list[Action]:
        """Handles the root's decision to drop a learner."""
        role = event.message.learner
        return [DeclareLost(role)] if role in self._children else self.handle(Lost(role), now)

    # The end: the remaining gradients of the children are sent to the root, which counts them.

    def _stop(self, event: Received[Stop], now: float) -> list[Action]:
        self.state = TreeServerState.STOPPING
        self._questions.waiting.clear()
        stop = Stop(self.id)
        actions = [*(Send(to, stop) for to in self._children), *self.buffers.withdraw(), *self._process_arrived()]
        return actions + self._leave()  # without children there is nothing to wait for

    def _withdrawn(self, event: ReceiveCancelled, now: float) -> list[Action]:
        self.buffers.withdrawn(event.buffer)
        return self._process_arrived()

    def _late_gradient(self, event: Received[PushedGradient], now: float) -> list[Action]:
        self._take(event)
        return self._process_arrived() + self._leave()

    def _late_weights(self, event: Received[Weights], now: float) -> list[Action]:
        self._weights.awaited = False
        return self._leave()

    def _bye(self, event: Received[ChildDone], now: float) -> list[Action]:
        self._left[event.message.sender] = event.message.pushed
        return self._leave()

    def _leave(self) -> list[Action]:
        here = all(self._left.get(child) == self._received[child] for child in self._children)
        if not here or self._weights.awaited or self.buffers.lent is not None or not self._weights.idle:
            return []
        if self._pending:
            return [self._relay()]
        self.state = TreeServerState.STOPPED
        return [Send(self.parent, ChildDone(self.id, self.relayed))]

    def _finish(self, event: Received[Shutdown], now: float) -> list[Action]:
        self.state = TreeServerState.DONE
        return [halt(event)]
