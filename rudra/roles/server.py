"""The parameter server: sum gradients, update the weights when the protocol says so, answer pulls.

Source: rudra.txt §2, §3.1, §3.2 and, for the tree that weights come down, §3.3. The server is serial: one message
after the other: a gradient is added, and what its sender asked is answered, before the next is. Weights that are being
sent are lent out, and an update waits until they are back. Where learners overlap communication, nobody asks for
weights: a copy goes down the weights' tree, on each edge as soon as it is idle and there are newer ones; updates do
not wait for that.

    INITIALISING  weights sent, digests compared      -> TRAINING  start everybody
    TRAINING      the last epoch's samples applied    -> DRAINING  stop the learners
    TRAINING      somebody asks the run to stop       -> DRAINING  the same, before its time
    DRAINING      every child left, and every gradient that it pushed came -> CLOSING  account; if it was stopped,
                  a last checkpoint
    CLOSING       everything is recorded              -> DONE
"""

from collections import deque
from collections.abc import Mapping
from enum import auto
from typing import Any, ClassVar, NamedTuple

from protocols import Clock
from rudra.core.events import (
    Action,
    Committed,
    Copy,
    Drop,
    Fail,
    Hash,
    Hashed,
    Received,
    Saved,
    Send,
    Sent,
    Started,
    Stopped,
    Tick,
    Updated,
    Warn,
    Withdrawn,
)
from rudra.core.messages import Kind, Message
from rudra.core.schedule import Schedule
from rudra.core.training_state import BEGINNING, TrainingState
from rudra.job.job import Job
from rudra.roles.gradient_buffers import GradientBuffers
from rudra.roles.learner import DROPPED
from rudra.roles.machine import States, halt, listed, short
from rudra.roles.owner import WEIGHTS, Owner, left_over
from rudra.roles.stragglers import Stragglers, overdue_s, tick_s
from topologies import Plan
from topologies.plan import STATISTICS_SERVER


class End(NamedTuple):
    """How a learner is no more, for `/events` and for people."""

    kind: str
    text: str


DOWNCAST = ("downcast 0", "downcast 1")
"""Copies of the weights on their way down the weights' tree; two, so that one slow edge holds up no other."""


class State(States):
    INITIALISING = auto()
    TRAINING = auto()
    DRAINING = auto()
    CLOSING = auto()
    DONE = auto()


TRAINING = State.TRAINING
"""A name for what is looked up all the time: an enum's attributes are slow."""


class ParameterServer(Owner):
    """The owner of the weights.

    Args:
        role: id in the plan.
        plan: who is who.
        job: resolved.
        training_samples: samples of one epoch.
        schedule: the learning rates, before modulation.
        position: where training begins.
    """

    TRANSITIONS: ClassVar[Mapping[tuple[States, Any], str]] = {
        (State.INITIALISING, Started): "_start",
        (State.INITIALISING, Hashed): "_send_first_weights",
        (State.INITIALISING, Sent): "_returned",
        (State.INITIALISING, Kind.READY): "_child_ready",
        (State.INITIALISING, Kind.CREDIT): "_credit",
        (State.INITIALISING, Updated): "_updated",
        (State.TRAINING, Kind.GRADIENT): "_gradient",
        (State.TRAINING, Kind.PULL): "_pull",
        (State.TRAINING, Kind.CREDIT): "_credit",
        (State.TRAINING, Sent): "_returned",
        (State.TRAINING, Updated): "_updated",
        **{(state, Tick): "_look_for_late" for state in State if state is not State.DONE},
        **{(state, Kind.LATE): "_hear_of_late" for state in State if state is not State.DONE},
        (State.DRAINING, Kind.GRADIENT): "_late_gradient",
        (State.TRAINING, Withdrawn): "_withdrawn",
        (State.DRAINING, Withdrawn): "_withdrawn",
        (State.CLOSING, Withdrawn): "_withdrawn",
        (State.DRAINING, Kind.PULL): "_late_pull",
        (State.DRAINING, Kind.BYE): "_bye",
        (State.DRAINING, Kind.CREDIT): "_credit",
        (State.DRAINING, Sent): "_returned",
        (State.DRAINING, Updated): "_updated",
        (State.CLOSING, Kind.CREDIT): "_credit",
        (State.CLOSING, Sent): "_returned",
        (State.CLOSING, Kind.DONE): "_finish",
        **{(state, Saved): "_saved" for state in State if state is not State.DONE},
        **{(state, Kind.SAFE): "_safe" for state in State if state is not State.DONE},
        **{(state, Committed): "_committed" for state in State if state is not State.DONE},
        **{(state, Kind.ENOUGH): "_enough" for state in State if state is not State.DONE},
        **{(state, Kind.PLATEAU): "_plateau" for state in State if state is not State.DONE},
        (State.INITIALISING, Stopped): "_stop_first",
        (State.TRAINING, Stopped): "_stop",
        **{(state, Stopped): "_stop_again" for state in (State.DRAINING, State.CLOSING)},
    }

    def __init__(
        self,
        role: int,
        plan: Plan,
        job: Job,
        training_samples: int,
        schedule: Schedule,
        position: TrainingState = BEGINNING,
    ) -> None:
        super().__init__(role, plan, job, training_samples, schedule, position)
        self.state = State.INITIALISING
        self._warnings = _warnings(job, plan)

    def _follow(self, plan: Plan, position: TrainingState) -> None:
        super()._follow(plan, position)
        role = self.id
        self.state = State.INITIALISING
        self.timestamp = position.timestamp
        self._ordered, self._grants_on_push = self.protocol.ordered, self.protocol.grants_on_push
        self.discarded = self.lost = 0
        self.received = position.applied
        self._received = {child: position.below(plan, child) for child in plan.children[role]}
        workers = [members[0] for members in plan.groups] or plan.learners
        self.pushed = [position.step(plan.roles[worker].index) for worker in workers]
        self._below = {child: plan.learners_below(child) for child in plan.children[role]}
        self._places = [-1] * plan.learner_numbers  # learner -> its place there; -1: it is no more
        for place, learner in enumerate(plan.learners):
            self._places[plan.roles[learner].index] = place
        self._late: tuple[int, str] | None = None  # a learner that is being dropped, and why
        self._deferred: deque[int] = deque()  # roles that died while an update was due
        self._from_lost = position.applied - sum(self.pushed)  # gradients of learners that are no more
        self._children = list(plan.children[role])
        self._receivers = plan.receivers[role]
        self._worker = {child: worker for worker, child in enumerate(self._children)}
        self._grouped = bool(plan.groups)
        self.intake = GradientBuffers(self._children, 2, self._ordered)
        self._stragglers = Stragglers(self._children, self._job.fault_tolerance.stall_warning_s)
        self._units = 0  # gradients that are pending as the protocol counts them: a group's is one
        self._digest: int | None = None
        self._ready: set[int] = set()
        self._lent = 0  # transfers of the weights under way
        self._update_due = False
        self._pulls: dict[int, tuple[int, int]] = {}  # not answered yet: child -> timestamp asked about, and held
        self._left: dict[int, int] = {}
        self._overlapped = plan.overlapped
        self._to_tell: list[int] = []  # learners whose gradients are pending, where they want to hear of the update
        self._downcast = dict.fromkeys(DOWNCAST, (-1, 0))  # timestamp, transfers under way
        self._given = dict.fromkeys(self._receivers, position.timestamp)  # down the weights' tree
        self._edges_busy: set[int] = set()
        self._weights_changed()

    @property
    def pending(self) -> int:
        """Gradients that are here but not applied."""
        return len(self._pending) + self.intake.waiting

    @property
    def waiting_for(self) -> str:
        names = [self.plan.roles[i].name for i in self._children]
        if self.state is State.INITIALISING:
            return listed([name for i, name in zip(self._children, names, strict=True) if i not in self._ready])
        if self.state is State.DRAINING:
            return listed([name for i, name in zip(self._children, names, strict=True) if i not in self._left])
        if self.state is State.TRAINING and self._update_due and self._is_ahead:
            return "the statistics server to test the weights"
        if self.state is State.TRAINING:
            return f"a gradient from {listed(names[self._units if self._ordered else 0 :])}"
        return "the statistics server to finish"

    def validate(self) -> None:
        super().validate()
        self.intake.validate()
        assert self._grouped or self.received == sum(self.pushed) + self._from_lost
        assert self.received == self.applied + self.pending + self.discarded + self.lost
        assert self._lent >= 0
        assert bool(self._pending) == (self.intake.accumulator is not None)
        assert all(lent >= 0 for _, lent in self._downcast.values())

    # Start: everybody holds the same weights.

    def _start(self, event: Started, now: float) -> list[Action]:
        warnings, self._warnings = self._warnings, []
        return [*warnings, Hash(WEIGHTS)]

    def _send_first_weights(self, event: Hashed, now: float) -> list[Action]:
        self._digest = short(event.digest)
        self._lent = len(self._receivers)
        return [Send(to, self._weights, WEIGHTS) for to in self._receivers]

    def _child_ready(self, event: Received, now: float) -> list[Action]:
        if event.message.value != self._digest:
            name = self.plan.roles[event.message.sender].name
            return [Fail(f"{name} received other initial weights than were sent (digests differ)")]
        self._ready.add(event.message.sender)
        return self._begin(now)

    def _begin(self, now: float) -> list[Action]:
        if self.state is not State.INITIALISING or len(self._ready) < len(self._children) or self._lent:
            return []
        self.state = State.TRAINING
        start = self._start_clock(now)
        self._stragglers.begin(now, self.received)
        told = [Send(to, start) for to in (self.plan.statistics, *self._children)]
        over = self._stopped or self.epoch == self.epochs
        return [*told, *(self._drain() if over else self.intake.post(True))]

    # Gradients in.

    def _gradient(self, event: Received, now: float) -> list[Action]:
        self._take(event, now)
        return self._work(now)

    def _take(self, event: Received, now: float) -> None:
        """Counts the gradients that arrived."""
        self.lost += self.intake.take(event)
        gradients, pushed = event.message.gradients, self.pushed
        self.received += len(gradients)
        sender = event.message.sender
        self._received[sender] += len(gradients)
        if sender in self._stragglers.heard:
            self._stragglers.heard[sender] = now
        if self._grouped:
            pushed[self._worker[sender]] += 1
        else:
            for gradient in gradients:
                place = self._places[gradient.learner]
                if place >= 0:
                    pushed[place] += 1
                else:
                    self._from_lost += 1

    def _work(self, now: float) -> list[Action]:
        """Handles what has arrived, one gradient after the other, as far as the leases allow."""
        actions: list[Action] = []
        intake = self.intake
        while self.state is TRAINING:
            if self._update_due:
                if self._lent or self._is_ahead:
                    break
                actions += self._update(now)
                actions += self._lose_deferred(now)
                actions += self._answer_all()
            elif intake.arrived and (not self._ordered or intake.bring()):
                actions += self._add(*intake.arrived.popleft())
            else:
                break
        if intake.free:
            actions += intake.post(self.state is TRAINING)
        return actions

    def _add(self, buffer: str, message: Message) -> list[Action]:
        """Adds a gradient to the average, and answers what was asked with it, or lets it wait for the update."""
        gradients = message.gradients
        scale = self._gradient_weight(self.timestamp - gradients[0].timestamp)
        samples = self._count(gradients, scale)
        self._units += 1 if self._grouped else len(gradients)
        if self.plan.outstanding is not None:
            self._to_tell += [self.plan.learners[self._places[gradient.learner]] for gradient in gradients]
        actions = self.intake.average(buffer, samples, scale)
        self._update_due = self.intake.complete if self._ordered else self.protocol.update_due(self._units)
        if message.value >= 0 and message.sender in self._worker:  # else it has died since
            self._pulls[message.sender] = (message.timestamp, message.value)
            actions += self._answer_all() if self._grants_on_push else self._answer(message.sender)
        return actions

    # Updates out.

    def _update(self, now: float) -> list[Action]:
        gradient = self.intake.give()
        actions, ended = self._update_by(gradient, now)
        for child, silence_s in self._stragglers.found(now, self.received):
            actions += self._report_straggler(child, silence_s, now)
        self._weights_changed()
        self.intake.free.append(gradient)
        self._units, self._update_due = 0, False
        if ended:
            return actions + self._drain()
        return actions + self._tell_learners() + self._publish() if self._overlapped else actions

    def _tell_learners(self) -> list[Action]:
        """Tells learners, where these bound their outstanding gradients, which weights hold them."""
        told, self._to_tell = self._to_tell, []
        applied = Message(Kind.APPLIED, self.id, self.timestamp)
        return [Send(learner, applied) for learner in told]

    def _report_straggler(self, child: int, silence_s: float, now: float) -> list[Action]:
        role = self.plan.roles[child]
        behind = max(self._received.values()) - self._received[child]
        text = f"silent for {silence_s:.0f} s, {behind} gradients behind the fastest"
        self._tell("straggler", self.timestamp, now - self._began, text, child)
        return [Warn(f"{role.name} (rank {role.world_rank}) is a straggler: {text}")]

    def _go_on(self, now: float) -> list[Action]:
        return self._work(now) if self._update_due else []

    def _updated(self, event: Updated, now: float) -> list[Action]:
        due = self._note(event, now)
        return due + self._close(now) if self.state is State.DRAINING else due

    # Weights to learners.

    def _weights_changed(self) -> None:
        """Prepares what learners and the protocol are told at this timestamp."""
        self._clock = Clock(self.timestamp, self.pushed)
        self._stamp = Message(Kind.TIMESTAMP, self.id, self.timestamp)
        self._weights = Message(Kind.WEIGHTS, self.id, self.timestamp)

    def _pull(self, event: Received, now: float) -> list[Action]:
        message = event.message
        self._pulls[message.sender] = (message.timestamp, message.value)
        return self._answer(message.sender)

    def _answer(self, child: int) -> list[Action]:
        """Answers who asks for newer weights if no update is due, and the protocol agrees; else it waits.

        Weights themselves are sent if they are newer than what is held there.
        """
        asked, held = self._pulls[child]
        if self._update_due or not self.protocol.pull_granted(self._worker[child], asked, self._clock):
            return []
        del self._pulls[child]
        if held == self.timestamp:
            return [Send(child, self._stamp)]
        self._lent += 1
        return [Send(child, self._stamp), Send(child, self._weights, WEIGHTS)]

    def _answer_all(self) -> list[Action]:
        """Answers those that wait, if training goes on."""
        if self.state is not TRAINING:
            return []
        return [action for child in list(self._pulls) for action in self._answer(child)]

    def _publish(self) -> list[Action]:
        """Sends the newest weights down every edge of the weights' tree that is idle."""
        actions: list[Action] = []
        for to in self._receivers:
            if to in self._edges_busy or self._given[to] == self.timestamp:
                continue
            ready = [b for b, (timestamp, _) in self._downcast.items() if timestamp == self.timestamp]
            if not ready:
                ready = [b for b, (_, lent) in self._downcast.items() if not lent][:1]
                if not ready:
                    break  # all copies are under way; the first that is back carries the newest weights then
                actions.append(Copy(WEIGHTS, ready[0]))
            self._downcast[ready[0]] = (self.timestamp, self._downcast[ready[0]][1] + 1)
            self._given[to] = self.timestamp
            self._edges_busy.add(to)
            actions.append(Send(to, self._weights, ready[0]))
        return actions

    def _returned(self, event: Sent, now: float) -> list[Action]:
        if event.to == self.plan.statistics:
            self._snapshot_returned(event.buffer)
            return self._lose_deferred(now) + self._go_on(now)
        if event.buffer in self._downcast:
            timestamp, lent = self._downcast[event.buffer]
            self._downcast[event.buffer] = (timestamp, lent - 1)
            self._edges_busy.discard(event.to)
            return self._publish() if self.state is TRAINING else self._close(now)
        self._lent -= 1
        if self._update_due and not self._lent:
            return self._work(now)
        return [] if self.state is TRAINING else self._begin(now)

    # Learners that die. What they pushed completely counts as ever, unless its turn cannot come any more.

    def lose(self, role: int, now: float) -> list[Action]:
        plan = self.plan
        name = f"{plan.roles[role].name} (rank {plan.roles[role].world_rank})"
        if plan.roles[role].kind == STATISTICS_SERVER:
            return [] if self.state is State.DONE else [Fail(f"the {name} died", lost=True)]
        if self.state is State.DONE or role in self._buried:
            return []
        if self.state is State.CLOSING:
            return self._lose_late(role, now)
        if self._start_message is None:
            return [Fail(f"{name} died before training began", lost=True)]
        if self.state is State.INITIALISING or not plan.expendable(role):
            return self._begin_anew(role, now)
        return self._go_on_without(role, name, now)

    def _lose_deferred(self, now: float) -> list[Action]:
        """Who died while weights were under way, once they are not."""
        actions: list[Action] = []
        while self._deferred and not self._update_due and not self._final_lent:
            actions += self.lose(self._deferred.popleft(), now)
        return actions

    def _begin_anew(self, role: int, now: float) -> list[Action]:
        """Lets everybody begin by a plan without a role; what is pending is computed again."""
        if self._final_lent:  # to the statistics server
            self._deferred.append(role)
            return []
        return self._regroup(self._position(now), now)

    def _go_on_without(self, role: int, name: str, now: float) -> list[Action]:
        """Waits no more for a learner, while all others go on as they are."""
        plan, training = self.plan, self.state is TRAINING
        if training and self._update_due:  # and waits for leases: it is still one of before
            self._deferred.append(role)
            return []
        end = self._how(role, now)
        learner = plan.roles[role].index
        place = self._places[learner]
        pushed = self.pushed.pop(place)
        self._from_lost += pushed
        self._places = [i - 1 if i > place else -1 if i == place else i for i in self._places]
        actions, left = self._drop(role), "training had ended"
        if training:
            if not self.pushed:
                return [Fail(f"{name} {end.text}, and no learner is left", lost=True)]
            try:
                self.protocol = self._job.make_protocol(plan, plan.workers - len(self.pushed))
            except ValueError as error:
                text = f"{name} {end.text}, and with {len(self.pushed)} learners the protocol cannot go on: {error}"
                return [Fail(text)]
            self._gradient_weight = self.protocol.modulation.gradient_weight
            self._weights_changed()
            c = self.protocol.gradients_per_update
            left = f"{left_over(len(self.pushed))}, {c} gradient{'s make' if c > 1 else ' makes'} an update"
        actions.append(Warn(f"{name} {end.text}; {left}"))
        text = f"{end.text} when {self._steps[learner]} of its gradients had been applied, with the next under way"
        self._record_loss(role, text, pushed, now, end.kind)
        if not training:
            return actions + self.intake.post(False) + self._close(now)
        if self._job.fault_tolerance.on_learner_loss == "stop":
            self._stopped = True
            return actions + self._drain()
        complete = self.intake.complete if self._ordered else self.protocol.update_due(self._units)
        self._update_due = bool(self._pending) and complete
        return actions + self._work(now) + self._answer_all()

    # Learners that are too slow.

    @property
    def tick_s(self) -> float | None:
        return tick_s(self._job)

    def _look_for_late(self, event: Tick, now: float) -> list[Action]:
        """Drops the learner that all wait for, if that takes too long."""
        child = self.intake.turn
        silence_s = overdue_s(self._job, self.plan, child, self._stragglers.heard, now)
        return [] if child is None or silence_s is None else self._drop_straggler(child, silence_s)

    def _hear_of_late(self, event: Received, now: float) -> list[Action]:
        """The same, of a learner that a server of the tree waits for."""
        return self._drop_straggler(event.message.value, event.message.timestamp)

    def _drop_straggler(self, learner: int, silence_s: float) -> list[Action]:
        """Drops a learner, one at a time, and never the last one."""
        roles = self.plan.roles
        if self.state is not TRAINING or self._late is not None or learner in self._dead or len(self.pushed) == 1:
            return []
        self._late = learner, f"was dropped, because nothing came of it for {silence_s:.0f} s"
        told, above = [Send(learner, Message(Kind.STOP, self.id, value=DROPPED))], roles[learner].parent
        while above != self.id:
            assert above is not None
            told.append(Send(above, Message(Kind.DROP, self.id, value=learner)))
            above = roles[above].parent
        return [*told, Drop(learner)]

    def _how(self, role: int, now: float) -> End:
        """How a learner is no more."""
        if self._late is None or role != self._late[0]:
            return End("lost", "died")
        (_, why), self._late = self._late, None
        self._stragglers.begin(now, self.received)  # the others could not be heard meanwhile
        return End("dropped", why)

    def _drop(self, role: int) -> list[Action]:
        """Forgets a learner; a server of the tree that has none left stays, and is waited for no more."""
        child = self.plan.child_towards(role, self.id)
        assert child is not None
        self._below[child] -= 1
        if child != role:
            if self._below[child]:
                return []
            dropped, actions = self.intake.silence(child)
            self.lost += dropped
            return actions
        self.lost += self.intake.lose(child)
        self._children.remove(child)
        self._stragglers.forget(child)
        self._worker = {child: worker for worker, child in enumerate(self._children)}
        self._pulls.pop(child, None)
        self._left.pop(child, None)
        return []

    # The end: what is under way is let in, counted and dropped.

    def _drain(self) -> list[Action]:
        self.state, self._update_due = State.DRAINING, False
        self.discarded += self.intake.discard()
        self._pulls.clear()
        stop = Message(Kind.STOP, self.id)
        told = [Send(child, stop) for child in self._children]
        return [*told, *self.intake.withdraw(), *self.intake.post(False)]

    def _withdrawn(self, event: Withdrawn, now: float) -> list[Action]:
        self.intake.withdrawn(event.buffer)
        return self.intake.post(self.state is TRAINING)

    def _stop_first(self, event: Stopped, now: float) -> list[Action]:
        self._stopped = True  # as soon as training begins
        return []

    def _stop(self, event: Stopped, now: float) -> list[Action]:
        self._stopped = True
        return self._drain() + self._lose_deferred(now)  # the update will not come for which they waited

    def _stop_again(self, event: Stopped, now: float) -> list[Action]:
        return []  # it is ending

    def _late_gradient(self, event: Received, now: float) -> list[Action]:
        self._take(event, now)
        self.discarded += self.intake.discard()
        return self.intake.post(False) + self._close(now)

    def _late_pull(self, event: Received, now: float) -> list[Action]:
        return []  # stop is the answer

    def _bye(self, event: Received, now: float) -> list[Action]:
        self._left[event.message.sender] = event.message.value
        return self._close(now)

    def _close(self, now: float) -> list[Action]:
        here = all(self._left.get(child) == self._received[child] for child in self._children)
        if self.state is not State.DRAINING or not here or self._update_rows or self._edges_busy:
            return []
        self.state = State.CLOSING
        self._closing = self._stopped
        return self._totals(now, self.received, self.pending, self.discarded, self.lost) + self._end(now)

    def _finish(self, event: Received, now: float) -> list[Action]:
        self.state = State.DONE
        return [halt(event)]


def _warnings(job: Job, plan: Plan) -> list[Warn]:
    """What to know before training starts."""
    wanted = job.optimizer.momentum
    if not wanted or job.explicit_momentum(plan):
        return []
    text = f"[optimizer] momentum_correction leaves nothing of momentum = {wanted:g}: asynchrony acts like that or more"
    return [Warn(f"{text}, by rule of thumb; fewer groups, or more gradients in an update, would leave some")]
