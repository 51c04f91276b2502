"""Parameter server: sums gradients, updates the weights when the protocol requires it, and answers pulls.

Source: rudra.txt §2, §3.1, §3.2, and §3.3 for the weights' tree.

The server handles one message after the other. It adds a gradient and answers its sender's request before it handles
the next gradient. An update waits until all transfers of the weights have ended, because they read the weights.

If learners overlap communication with computation, they do not request weights. A copy of the weights goes down the
weights' tree, on each edge as soon as the edge is idle and there are newer weights. Updates do not wait for these
copies.

    INITIALISING  weights sent, digests compared      -> TRAINING  start all roles
    TRAINING      the job changes, or a role died and the others must regroup
                                                      -> INITIALISING  all roles restart from these weights
    TRAINING      the last epoch's samples applied    -> DRAINING  stop the learners
    TRAINING      the run is asked to stop            -> DRAINING  stop the learners early
    DRAINING      all children left, and all their gradients arrived -> CLOSING  report totals; make a last
                  checkpoint if the run was stopped
    CLOSING       everything is recorded              -> DONE
"""

from collections import deque
from collections.abc import Mapping, Sequence
from enum import auto
from typing import Any, ClassVar

from protocols import Clock
from rudra.core.actions import Action, DeclareLost, Fail, Hash, Send, Warn
from rudra.core.buffer_names import WEIGHTS
from rudra.core.decisions import text_of
from rudra.core.events import (
    Committed,
    Hashed,
    Lost,
    NormsComputed,
    ReceiveCancelled,
    Received,
    Saved,
    Sent,
    Started,
    Stopped,
    Tick,
    Updated,
)
from rudra.core.messages import (
    ChangeDecided,
    ChildDone,
    EpochEvaluated,
    EvaluatePart,
    GradientNorms,
    LearnerDropped,
    LearnerLate,
    MessageKind,
    OwnerStepped,
    PartEvaluated,
    PlateauReached,
    Pull,
    PushedGradient,
    Ready,
    RoleExhausted,
    RowsFlushed,
    Shutdown,
    SnapshotCredit,
    Stop,
    TargetReached,
)
from rudra.core.training_state import TrainingState
from rudra.core.wire import in_pieces_or_none
from rudra.job.job import Job
from rudra.roles.correcting import correction_of
from rudra.roles.distributed_evaluation import DistributedEvaluation, WorkersEvaluation
from rudra.roles.gradient_buffers import GradientBuffers
from rudra.roles.learner import DROPPED
from rudra.roles.ledger import left_over
from rudra.roles.machine import Machine, Setup, States, Transition, halt, listed, self_loops, short_digest
from rudra.roles.membership import Membership
from rudra.roles.owner_duties import MAINTENANCE, WISHES, OwnerDuties
from rudra.roles.readiness import Readiness
from rudra.roles.stragglers import Stragglers, overdue_s, tick_s
from rudra.roles.weight_broadcast import WeightBroadcast
from rudra.roles.weight_requests import NO_WEIGHTS, WeightRequests
from topologies import Plan


class ServerState(States):
    INITIALISING = auto()
    TRAINING = auto()
    DRAINING = auto()
    CLOSING = auto()
    DONE = auto()


ALIVE = [state for state in ServerState if state is not ServerState.DONE]
TRAINING = ServerState.TRAINING
"""State that is looked up very often. A global name is faster than an attribute of an enum."""


class ParameterServer(Machine):
    """Owner of the weights.

    Args:
        role: id of the server in the plan.
        setup: arguments of the role.

    Attributes:
        duties: duties of an owner of weights.
        ledger: counters and records of the weights.
        buffers: receive buffers for gradients.
        membership: roles that push gradients.
        received: number of received gradients.
        discarded: number of gradients that arrived after the last update.
        lost: number of gradients that were lost with a rank.
    """

    TRANSITIONS: ClassVar[Mapping[tuple[States, Any], Transition]] = {
        **self_loops(ALIVE, {**MAINTENANCE, **WISHES}),
        **self_loops(ALIVE, {Tick: "_look_for_late", MessageKind.LATE: "_hear_of_late"}),
        **self_loops(ALIVE, {NormsComputed: "_measured", MessageKind.NORMS: "_hear_norms"}),
        **self_loops(
            [ServerState.TRAINING, ServerState.DRAINING, ServerState.CLOSING], {ReceiveCancelled: "_withdrawn"}
        ),
        (ServerState.INITIALISING, Started): Transition("_start", ServerState.INITIALISING),
        (ServerState.INITIALISING, Hashed): Transition("_send_first_weights", ServerState.INITIALISING),
        (ServerState.INITIALISING, Sent): Transition(
            "_returned", ServerState.INITIALISING, ServerState.TRAINING, ServerState.DRAINING
        ),
        (ServerState.INITIALISING, MessageKind.READY): Transition(
            "_child_ready", ServerState.INITIALISING, ServerState.TRAINING, ServerState.DRAINING
        ),
        **{
            (before, what): Transition("_updated", *after)
            for before, after in {
                ServerState.INITIALISING: (ServerState.INITIALISING,),
                ServerState.TRAINING: (ServerState.TRAINING,),
                ServerState.DRAINING: (ServerState.DRAINING, ServerState.CLOSING),
            }.items()
            for what in (Updated, MessageKind.STEPPED)
        },
        (ServerState.INITIALISING, Stopped): Transition("_stop_first", ServerState.INITIALISING),
        (ServerState.INITIALISING, Lost): Transition("_lose", ServerState.INITIALISING),
        **{
            (ServerState.TRAINING, what): Transition(
                method, ServerState.TRAINING, ServerState.DRAINING, ServerState.INITIALISING
            )
            for what, method in MAINTENANCE.items()
        },
        (ServerState.TRAINING, MessageKind.GRADIENT): Transition(
            "_gradient", ServerState.TRAINING, ServerState.DRAINING, ServerState.INITIALISING
        ),
        (ServerState.TRAINING, MessageKind.PULL): Transition("_pull", ServerState.TRAINING),
        (ServerState.TRAINING, Sent): Transition(
            "_returned", ServerState.TRAINING, ServerState.DRAINING, ServerState.INITIALISING
        ),
        **{
            (ServerState.TRAINING, what): Transition(
                method, ServerState.TRAINING, ServerState.DRAINING, ServerState.INITIALISING
            )
            for what, method in {Stopped: "_stop", MessageKind.EXHAUSTED: "_end_with_checkpoint"}.items()
        },
        (ServerState.TRAINING, MessageKind.PART_EVALUATED): Transition(
            "_part_evaluated", ServerState.TRAINING, ServerState.DRAINING
        ),
        (ServerState.TRAINING, Lost): Transition(
            "_lose", ServerState.TRAINING, ServerState.DRAINING, ServerState.INITIALISING
        ),
        (ServerState.DRAINING, MessageKind.GRADIENT): Transition(
            "_late_gradient", ServerState.DRAINING, ServerState.CLOSING
        ),
        (ServerState.DRAINING, MessageKind.PULL): Transition("_ignore", ServerState.DRAINING),  # stop is the answer
        (ServerState.DRAINING, MessageKind.CHILD_DONE): Transition("_bye", ServerState.DRAINING, ServerState.CLOSING),
        (ServerState.DRAINING, Sent): Transition(
            "_returned", ServerState.DRAINING, ServerState.CLOSING, ServerState.INITIALISING
        ),
        (ServerState.DRAINING, Stopped): Transition("_ignore", ServerState.DRAINING),
        (ServerState.DRAINING, Lost): Transition(
            "_lose", ServerState.DRAINING, ServerState.CLOSING, ServerState.INITIALISING
        ),
        (ServerState.CLOSING, Sent): Transition("_returned", ServerState.CLOSING),
        (ServerState.CLOSING, Stopped): Transition("_ignore", ServerState.CLOSING),
        (ServerState.CLOSING, Lost): Transition("_lose", ServerState.CLOSING),
        (ServerState.CLOSING, MessageKind.SHUTDOWN): Transition("_finish", ServerState.DONE),
    }

    def __init__(self, role: int, setup: Setup) -> None:
        super().__init__(role, setup.plan)
        self.duties = OwnerDuties(role, setup)
        self.ledger = self.duties.ledger
        self._co_owned = (self.duties.stages,) if setup.plan.stages else ()
        self._reset_for_plan(setup.plan, setup.position)

    def _reset_for_plan(self, plan: Plan, position: TrainingState) -> None:
        """Resets the role's state. All roles begin with this plan at this position, and nothing is under way."""
        role, protocol = self.id, self.ledger.rules.protocol
        self.plan = plan
        self.state = ServerState.INITIALISING
        self._gradient_weight = protocol.modulation.gradient_weight
        self.discarded = self.lost = 0
        self.received = position.applied
        self.membership = Membership(plan, role, position)
        self._deferred: deque[int] = deque()  # dead roles whose loss is handled later
        # A gradient for several servers loads a learner's link as much as one for a single server. So several servers
        # receive more gradients at a time.
        at_a_time = max(2, min(2 * len(plan.owners), len(plan.children[role])))
        self.buffers = GradientBuffers(plan.children[role], at_a_time, protocol.ordered)
        self._stragglers = Stragglers(plan.children[role], self.ledger.rules.job.fault_tolerance.stall_warning_s)
        self._units = 0  # pending gradients as the protocol counts them: one for each group
        self._readiness = Readiness()
        self._update_due = False
        self._downcast = WeightBroadcast(plan, role, position.timestamp)
        self._correction = correction_of(self.ledger.rules.job, plan)
        self._requests = WeightRequests(role, self._correction)
        wanted = plan.scheduled and self.ledger.rules.job.training.evaluate == "workers"
        self._evaluation = WorkersEvaluation(wanted=wanted, epoch=position.epoch)
        self._weights_changed()

    @property
    def pending(self) -> int:
        """Number of gradients that have arrived and are not applied."""
        return self.ledger.pending + self.buffers.waiting

    def rate_after(self, samples: int, updates: int) -> float | None:
        return self.ledger.predicted_rate(samples, updates)

    @property
    def waiting_for(self) -> str:
        if self._evaluation.under_way is not None:
            evaluation = self._evaluation.under_way
            names = [self.plan.roles[role].name for role in evaluation.testing]
            return f"{listed(names)} to evaluate the weights of epoch {evaluation.epoch}"
        if self.state is ServerState.INITIALISING:
            return listed(self.membership.names(but=self._readiness.roles))
        if self.state is ServerState.DRAINING:
            return listed(self.membership.names(but=self.membership.left))
        if self.state is ServerState.TRAINING and self._update_due and self.duties.are_ahead:
            return self.duties.waiting_for
        if self.state is ServerState.TRAINING:
            return f"a gradient from {listed(self.membership.names()[self._units if self.buffers.ordered else 0 :])}"
        return "the statistics server to finish"

    def validate(self) -> None:
        self.ledger.validate()
        self.buffers.validate()
        self._downcast.validate()
        self.membership.validate(self.received)
        assert self.received == self.ledger.applied + self.pending + self.discarded + self.lost
        assert self._requests.lent >= 0
        assert bool(self.ledger.pending) == (self.buffers.accumulator is not None)

    # Start: all roles hold the same weights.

    def _start(self, event: Started, now: float) -> list[Action]:
        warnings = [] if self.ledger.clock.started else _warnings(self.ledger.rules.job, self.plan)
        return [*self.ledger.rules.settings(self.id), *warnings, Hash(WEIGHTS)]

    def _send_first_weights(self, event: Hashed, now: float) -> list[Action]:
        self._readiness.digest = short_digest(event.digest)
        return self._send_to_all()

    def _send_to_all(self) -> list[Action]:
        """Sends the weights to all roles that get them from here."""
        return self._requests.send_first(self.plan.receivers[self.id], self.membership.children)

    def _child_ready(self, event: Received[Ready], now: float) -> list[Action]:
        if not self._readiness.enter(event.message.sender, event.message.digest):
            name = self.plan.roles[event.message.sender].name
            return [Fail(f"{name} received other initial weights than were sent (digests differ)")]
        return self._begin(now)

    def _begin(self, now: float) -> list[Action]:
        missing = len(self._readiness.roles) < len(self.membership.children)
        if self.state is not ServerState.INITIALISING or missing or self._requests.lent:
            return []
        self.state = ServerState.TRAINING
        start = self.ledger.start(now)
        self._stragglers.begin(now, self.received)
        told = [Send(to, start) for to in (self.plan.statistics, *self.membership.children)]
        if self.ledger.stopped or self.ledger.over:
            return [*told, *self._drain()]
        actions = [*told, *self.buffers.post(True)]
        if self.plan.scheduled:  # all workers request work
            now_held = self.ledger.timestamp, self.ledger.timestamp
            self._requests.waiting = dict.fromkeys(self.membership.children, now_held)
            actions += self._answer_all()
        return actions

    # Gradients in.

    def _gradient(self, event: Received[PushedGradient], now: float) -> list[Action]:
        self._take(event, now)
        return self._process_arrived(now)

    def _take(self, event: Received[PushedGradient], now: float) -> None:
        """Counts the gradients of a message."""
        message, last_message = event.message, self._stragglers.last_message
        self.lost += self.buffers.take(event)
        self.received += len(message.gradients)
        if message.sender in last_message:
            last_message[message.sender] = now
        self.membership.count(message)

    def _process_arrived(self, now: float) -> list[Action]:
        """Handles arrived gradients one after the other, until an update must wait."""
        actions: list[Action] = []
        buffers = self.buffers
        while self.state is TRAINING:
            if self._update_due:
                if self._requests.lent or self.duties.are_ahead:
                    break
                actions += self._update(now)
                actions += self._lose_deferred(now)
                actions += self._answer_all()
            elif buffers.arrived and (not buffers.ordered or buffers.rotate_to_turn()):
                buffer, message = buffers.arrived.popleft()
                actions += self._add(buffer, message)
            else:
                break
        if buffers.free and self.buffers is buffers:  # else all roles restart
            actions += buffers.post(self.state is TRAINING)
        return actions

    def _add(self, buffer: str, message: PushedGradient) -> list[Action]:
        """Adds a gradient to the average. Answers the request that came with it, or keeps it until the update."""
        gradients, ledger, plan = message.gradients, self.ledger, self.plan
        scale = self._gradient_weight(ledger.timestamp - gradients[0].timestamp)
        samples = ledger.count(gradients, scale)
        if plan.stages:
            self.duties.stages.add(gradients, scale)
        self._units += 1 if plan.groups else len(gradients)
        if plan.overlapped:
            self._downcast.await_update(gradients)
        buffers, protocol = self.buffers, ledger.rules.protocol
        actions, correction = buffers.average(buffer, samples, scale), self._correction
        if correction is not None:
            actions = [*correction.correct(buffer, message, ledger.timestamp), *actions]
        self._update_due = buffers.complete if buffers.ordered else protocol.update_due(self._units)
        asks = message.held >= 0 or message.asks
        if asks and message.sender in self.membership.worker:  # else it has since died
            self._requests.waiting[message.sender] = (message.timestamp, message.held)
            if correction is not None:
                correction.forget(message.sender)
            actions += self._answer_all() if protocol.grants_on_push else self._answer(message.sender)
        return actions

    def _is_update_due(self) -> bool:
        if self.buffers.ordered:
            return self.buffers.complete
        return self.ledger.rules.protocol.update_due(self._units)

    # Updates out.

    def _update(self, now: float) -> list[Action]:
        gradient = self.buffers.take_average()
        actions = self.duties.update(gradient, now)
        if self._correction is not None:
            actions = [*self._correction.keep(), *actions]
        for child, silence_s in self._stragglers.found(now, self.received):
            actions += self._report_straggler(child, silence_s, now)
        self._weights_changed()
        self.buffers.free.append(gradient)
        self._units, self._update_due = 0, False
        return actions + self._after_update(now)

    def _after_update(self, now: float) -> list[Action]:
        """Continues after an update: with an evaluation, the end, another job, or a broadcast of the weights."""
        if self.plan.scheduled and self._evaluation.is_due(self.ledger.epoch):
            return self._evaluate(now)
        if self.ledger.over or self.ledger.stopped:
            return self._drain()
        if self.ledger.is_to_change:
            return self._change(now)
        return self._downcast.updated(self._requests.weights) if self.plan.overlapped else []

    def _report_straggler(self, child: int, silence_s: float, now: float) -> list[Action]:
        role = self.plan.roles[child]
        behind = max(self.membership.received.values()) - self.membership.received[child]
        text = f"silent for {silence_s:.0f} s, {behind} gradients behind the fastest"
        self.ledger.tell("straggler", self.ledger.timestamp, now - self.ledger.clock.start_time, text, child)
        return [Warn(f"{role.title} is a straggler: {text}")]

    def _retry_update(self, now: float) -> list[Action]:
        """Makes the update that waited for an evaluation or a checkpoint, if there is one."""
        return self._process_arrived(now) if self._update_due else []

    def _maintain(
        self, event: Saved | Received[RowsFlushed] | Committed | Received[SnapshotCredit], now: float
    ) -> list[Action]:
        return self.duties.maintain(event, now) + self._retry_update(now)

    def _end_with_epoch(self, event: Received[TargetReached], now: float) -> list[Action]:
        self.ledger.enough()
        return []

    def _lower_rate(self, event: Received[PlateauReached], now: float) -> list[Action]:
        self.ledger.lower(event.message.times, now)
        return []

    def _end_with_checkpoint(self, event: Received[RoleExhausted], now: float) -> list[Action]:
        if event.message.role != self.plan.statistics:
            return self.duties.cycle.fail(event.message, now, alone=False)
        if self.state is TRAINING:  # all roles can stop in order
            return self._stop(Stopped(), now)
        self.ledger.stopped |= self.state is ServerState.INITIALISING
        return []

    def _decide(self, event: Received[ChangeDecided], now: float) -> list[Action]:
        self.ledger.decide(event.message.number, text_of(event.message.rows))
        return []

    def _updated(self, event: Updated | Received[OwnerStepped], now: float) -> list[Action]:
        due = self.duties.note(event.message if isinstance(event, Received) else event, now)
        if due is None:
            return []
        return due + self._close(now) if self.state is ServerState.DRAINING else due

    def _measured(self, event: NormsComputed, now: float) -> list[Action]:
        return self.duties.stages.measured(event)

    def _hear_norms(self, event: Received[GradientNorms], now: float) -> list[Action]:
        self.duties.stages.hear_norms(event.message)
        return []

    # Weights to learners.

    def _weights_changed(self) -> None:
        """Prepares the messages to learners and the protocol's clock for this timestamp."""
        self._requests.renew(Clock(self.ledger.timestamp, self.membership.pushed))

    def _pull(self, event: Received[Pull], now: float) -> list[Action]:
        message = event.message
        self._requests.waiting[message.sender] = (message.timestamp, message.held)
        return self._answer(message.sender)

    def _answer(self, child: int) -> list[Action]:
        """Answers a child's request for newer weights if no update is due and the protocol grants it.

        Otherwise the request waits. The answer includes the weights if they are newer than the child's weights.
        """
        requests, protocol = self._requests, self.ledger.rules.protocol
        asked, _ = requests.waiting[child]
        if self._update_due or not protocol.pull_granted(self.membership.worker[child], asked, requests.clock):
            return []
        return requests.answer(child)

    def _answer_all(self) -> list[Action]:
        """Answers waiting requests, unless training has ended or is paused."""
        if self.state is not TRAINING or self._evaluation.under_way is not None:
            return []
        return [action for child in list(self._requests.waiting) for action in self._answer(child)]

    def _returned(self, event: Sent, now: float) -> list[Action]:
        if event.to == self.plan.statistics:
            self.ledger.returned(event.buffer)
            return self._lose_deferred(now) + self._retry_update(now)
        if self.plan.overlapped and self._downcast.returned(event):
            return self._downcast.publish(self._requests.weights) if self.state is TRAINING else self._close(now)
        self._requests.lent -= 1
        if self._update_due and not self._requests.lent:
            return self._process_arrived(now)
        return [] if self.state is TRAINING else self._begin(now)

    def _lacks_weights(self, held: int) -> bool:
        """Returns whether a worker with the weights of timestamp `held` needs newer weights."""
        return held not in (self.ledger.timestamp, NO_WEIGHTS)

    # Evaluations by workers. Training is paused until they end.

    @property
    def _alive(self) -> list[int]:
        return [child for child in self.membership.worker if child not in self._dead]

    def _evaluate(self, now: float) -> list[Action]:
        """Begins an evaluation of the weights by the workers. Training continues after it."""
        alive = self._alive
        if not alive:
            return []  # the loss of the last worker is handled next
        self._evaluation.begin(self.ledger.epoch, now)
        return self._assign_parts(alive)

    def _assign_parts(self, children: Sequence[int]) -> list[Action]:
        """Assigns parts of the evaluation to workers without one."""
        evaluation, timestamp, requests = self._evaluation.under_way, self.ledger.timestamp, self._requests
        actions: list[Action] = []
        for child in children:
            part = None if evaluation is None else evaluation.deal(child)
            if part is None:
                continue
            asked, held = requests.waiting.get(child, (timestamp, NO_WEIGHTS))
            actions.append(Send(child, EvaluatePart(self.id, timestamp, part)))
            if self._lacks_weights(held):
                requests.waiting[child] = (asked, timestamp)
                actions.append(requests.send(child))
        return actions

    def _part_evaluated(self, event: Received[PartEvaluated], now: float) -> list[Action]:
        evaluation, message = self._evaluation.under_way, event.message
        if evaluation is None or message.sender in self._dead or not evaluation.take(message):
            return []
        return self._assign_parts([message.sender]) + self._end_evaluation(now)

    def _end_evaluation(self, now: float) -> list[Action]:
        """Continues the training if all parts are evaluated."""
        evaluation = self._evaluation.end()
        if evaluation is None:
            return []
        seconds = now - evaluation.began
        self.ledger.pause(seconds, f"epoch {evaluation.epoch}: workers evaluated its weights in {seconds:.3f} s", now)
        self._stragglers.begin(now, self.received)
        actions: list[Action] = [
            Send(self.plan.statistics, EpochEvaluated(self.id, evaluation.epoch, seconds, last, rows))
            for rows, last in in_pieces_or_none(evaluation.rows)
        ]
        actions += self._after_update(now)
        return actions + self._lose_deferred(now) + self._answer_all()

    # Learners that die. Their complete gradients count as usual, unless the turn of a gradient can no longer come.

    def _lose(self, event: Lost, now: float) -> list[Action]:
        role, plan, evaluation = event.role, self.plan, self._evaluation.under_way
        if evaluation is not None and plan.traits(role).trains:
            return self._lose_while_evaluating(role, evaluation, now)
        follows = self.duties.lose(role, now, ended=self.state is ServerState.CLOSING)
        if follows is not None:
            return follows
        if self.state is ServerState.INITIALISING or not plan.expendable(role):
            return self._regroup(role, now)
        return self._go_on_without(role, plan.roles[role].title, now)

    def _lose_while_evaluating(self, role: int, evaluation: DistributedEvaluation, now: float) -> list[Action]:
        """Assigns a dead worker's part of the evaluation to others. The loss itself is handled after the evaluation."""
        self._deferred.append(role)
        evaluation.lose(role)
        alive = self._alive
        if not alive:
            self._evaluation.under_way = None
            return self._lose_deferred(now)
        free = [child for child in alive if child not in evaluation.testing]
        return self._assign_parts(free) + self._end_evaluation(now)

    def _lose_deferred(self, now: float) -> list[Action]:
        """Handles losses that were deferred during a transfer or evaluation of the weights, once it has ended."""
        if self._evaluation.under_way is not None:
            return []
        actions: list[Action] = []
        while self._deferred and not self._update_due and not self.ledger.final_lent:
            actions += self._lose(Lost(self._deferred.popleft()), now)
        return actions

    def _regroup(self, role: int, now: float) -> list[Action]:
        """Restarts all other roles without a dead one. Pending gradients are computed again."""
        if self.ledger.final_lent:  # the final weights are on their way to the statistics server
            self._deferred.append(role)
            return []
        return self._begin_anew(now)

    def _begin_anew(self, now: float) -> list[Action]:
        """Restarts all remaining roles from the present weights, with the present job."""
        position = self.ledger.position(now)
        actions = self.ledger.regroup(self._dead, position, now)
        if self.ledger.rules.plan is not self.plan:
            self._reset_for_plan(self.ledger.rules.plan, position)
        return actions

    def _change(self, now: float) -> list[Action]:
        """Continues with the next job. If no worker of a coordinator has work, the same workers continue without a
        restart.
        """
        dealer, rules = self.ledger.dealer, self.ledger.rules
        if dealer is None or not dealer.idle or self.ledger.learners_change:
            return self._begin_anew(now)
        self.ledger.follow(now)
        if lost := self.plan.workers - len(self.membership.pushed):
            rules.replace_protocol(rules.job.make_protocol(self.plan, lost))
        self._gradient_weight = rules.protocol.modulation.gradient_weight
        self._weights_changed()
        return [*rules.settings(self.id)]

    def _go_on_without(self, role: int, name: str, now: float) -> list[Action]:
        """Continues without a lost learner. The other roles do not restart."""
        plan, training = self.plan, self.state is TRAINING
        waits = training and self._update_due  # for transfers: the due update includes the lost learner's gradient
        if waits or self._evaluation.under_way is not None:
            self._deferred.append(role)
            return []
        # Waiting workers get work first, so that the loss comes between two gradients, as in a replay.
        answers = self._answer_all() if training and plan.scheduled else []
        end, members = self._stragglers.end_of(role, now, self.received), self.membership
        child = plan.child_towards(role, self.id)
        assert child is not None
        pushed = members.lose(role, child)
        actions, left = answers + self._forget(role, child), "training had ended"
        if training:
            if not members.pushed:
                return [Fail(f"{name} {end.text}, and no learner is left", lost=True)]
            try:
                protocol = self.ledger.rules.job.make_protocol(plan, plan.workers - len(members.pushed))
                self.ledger.rules.replace_protocol(protocol)
            except ValueError as error:
                text = (
                    f"{name} {end.text}, and with {len(members.pushed)} learners the protocol cannot continue: {error}"
                )
                return [Fail(text)]
            self._gradient_weight = protocol.modulation.gradient_weight
            self._weights_changed()
            c = protocol.gradients_per_update
            left = f"{left_over(len(members.pushed))}, {c} gradient{'s make' if c > 1 else ' makes'} an update"
        actions.append(Warn(f"{name} {end.text}; {left}"))
        steps = self.ledger.counts.steps[plan.roles[role].index]
        text = f"{end.text} when {steps} of its gradients had been applied, with the next under way"
        self.ledger.record_loss(role, text, pushed, now, end.kind)
        if not training:
            return actions + self.buffers.post(False) + self._close(now)
        if self.ledger.rules.job.fault_tolerance.on_learner_loss == "stop":
            self.ledger.stopped = True
            return actions + self._drain()
        self._update_due = bool(self.ledger.pending) and self._is_update_due()
        return actions + self._process_arrived(now) + self._answer_all()

    def _forget(self, role: int, child: int) -> list[Action]:
        """Forgets a lost learner. A tree server without learners stays, but the root no longer waits for it."""
        if self.ledger.dealer is not None:
            self.lost += self.buffers.ignore_later(child)
            self.ledger.dealer.recall(self.plan.roles[role].index, dead=True)
        if child != role:
            if self.membership.below[child]:
                return []
            dropped, actions = self.buffers.detach(child)
            self.lost += dropped
            return actions
        self.lost += self.buffers.remove(child)
        self._stragglers.forget(child)
        self._requests.waiting.pop(child, None)
        return []

    # Learners that are too slow.

    @property
    def tick_s(self) -> float | None:
        return tick_s(self.ledger.rules.job)

    def _look_for_late(self, event: Tick, now: float) -> list[Action]:
        """Drops the learner that all others wait for, if the wait takes too long."""
        child = self.buffers.turn
        silence_s = overdue_s(self.ledger.rules.job, self.plan, child, self._stragglers.last_message, now)
        return [] if child is None or silence_s is None else self._drop_straggler(child, silence_s)

    def _hear_of_late(self, event: Received[LearnerLate], now: float) -> list[Action]:
        """Drops a learner that a tree server waits for."""
        return self._drop_straggler(event.message.learner, event.message.silence_s)

    def _drop_straggler(self, learner: int, silence_s: float) -> list[Action]:
        """Drops a learner, unless another drop is under way or it is the last learner."""
        roles = self.plan.roles
        may_drop = not self._stragglers.dropping and learner not in self._dead and len(self.membership.pushed) > 1
        if self.state is not TRAINING or not may_drop:
            return []
        self._stragglers.drop(learner, silence_s)
        told, above = [Send(learner, Stop(self.id, DROPPED))], roles[learner].parent
        while above != self.id:
            assert above is not None
            told.append(Send(above, LearnerDropped(self.id, learner)))
            above = roles[above].parent
        return [*told, DeclareLost(learner)]

    # The end: gradients under way are received, counted and dropped.

    def _drain(self) -> list[Action]:
        self.state, self._update_due = ServerState.DRAINING, False
        self.discarded += self.buffers.discard()
        self._requests.waiting.clear()
        stop = Stop(self.id)
        told = [Send(child, stop) for child in self.membership.children]
        return [*told, *self.buffers.withdraw(), *self.buffers.post(False)]

    def _withdrawn(self, event: ReceiveCancelled, now: float) -> list[Action]:
        self.buffers.withdrawn(event.buffer)
        return self.buffers.post(self.state is TRAINING)

    def _stop_first(self, event: Stopped, now: float) -> list[Action]:
        self.ledger.stopped = True  # takes effect when training begins
        return []

    def _stop(self, event: Stopped, now: float) -> list[Action]:
        self.ledger.stopped = True
        if self._evaluation.under_way is not None:
            return []
        return self._drain() + self._lose_deferred(now)  # the update that these losses waited for is dropped

    def _late_gradient(self, event: Received[PushedGradient], now: float) -> list[Action]:
        self._take(event, now)
        self.discarded += self.buffers.discard()
        return self.buffers.post(False) + self._close(now)

    def _bye(self, event: Received[ChildDone], now: float) -> list[Action]:
        self.membership.left[event.message.sender] = event.message.pushed
        return self._close(now)

    def _close(self, now: float) -> list[Action]:
        waits = not self.membership.complete or self.ledger.updating or self._downcast.under_way
        if self.state is not ServerState.DRAINING or waits:
            return []
        self.state = ServerState.CLOSING
        counts = {"pending": self.pending, "discarded": self.discarded, "lost": self.lost}
        return self.duties.account(now, pushed=self.received, **counts, stopped=self.ledger.stopped)

    def _finish(self, event: Received[Shutdown], now: float) -> list[Action]:
        self.state = ServerState.DONE
        return [halt(event)]


def _warnings(job: Job, plan: Plan) -> list[Warn]:
    """Returns warnings about the job, for the start of training."""
    wanted = job.optimizer.momentum
    if not wanted or job.explicit_momentum(plan):
        return []
    text = f"[optimizer] momentum_correction leaves no explicit momentum of {wanted:g}"
    why = "by rule of thumb asynchrony acts like as much or more; use fewer groups, or more gradients per update"
    return [Warn(f"{text}: {why}")]
