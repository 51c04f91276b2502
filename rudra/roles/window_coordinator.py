"""Coordinator of workers that apply their gradients directly to weights in a shared-memory window.

Source: Hogbatch (Ma and Rusu 2020), §5.1, "asynchronous" update policy, and Algorithm 1. A worker reports its gradients
in messages without a tensor, because they are already in the weights. The coordinator keeps the counters and records.
It copies the weights from the window only while no worker computes: at the end of an epoch, and when the run was
stopped. So checkpoints are made only at these times.

In a locked window updates are numbered. The coordinator processes them in the order of their numbers, whatever their
order of arrival, and assigns work in that order. So a replay assigns the same work. In a racing window the order of
updates is unknown. The coordinator uses the order of the reports. The staleness σ is then an interval, and the rows
record its upper end.

If there are several nodes, each has a window, and the windows are averaged at the end of each epoch
(`rudra.roles.node_windows`).

A worker may die after applying updates but before reporting them. The coordinator finds these updates in the window and
counts them. The worker's remaining samples are assigned again.
"""

import math
from collections import deque
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from msgspec import structs

from rudra.core.actions import Action, Fail, FindUpdates, ReadShared, Send, WriteShared
from rudra.core.buffer_names import WEIGHTS
from rudra.core.events import Lost, Received, SharedRead, Started, Stopped, Updated, UpdatesFound
from rudra.core.messages import AppliedInPlace, EpochEvaluated, MessageKind, WindowUpdated, WindowWeights
from rudra.core.records import Gradient
from rudra.core.training_state import TrainingState
from rudra.roles.coordinator import work_for
from rudra.roles.gradient_buffers import GradientBuffers
from rudra.roles.machine import States, Transition, self_loops
from rudra.roles.node_windows import NodeWindows
from rudra.roles.server import ParameterServer, ServerState
from rudra.roles.weight_requests import NO_WEIGHTS
from rudra.roles.window_worker import on_its_way, unsigned
from topologies import Plan

TRAINING, DRAINING = ServerState.TRAINING, ServerState.DRAINING


class UpdateReport(NamedTuple):
    """Report of an update in the window.

    Attributes:
        gradient: gradient that the update applied, as returned by `on_its_way`.
        digest: digest of a sample of the weights.
        seconds: duration of the update.
        sender: id of the worker that made the update.
        asks: number of batches requested with the report.
    """

    gradient: Gradient
    digest: int
    seconds: float
    sender: int
    asks: int


class WindowCoordinator(ParameterServer):
    """Owner of the order of the samples, and of the counters and records of the weights in the window."""

    TRANSITIONS: ClassVar[Mapping[tuple[States, Any], Transition]] = {
        **ParameterServer.TRANSITIONS,
        (TRAINING, MessageKind.APPLIED_IN_PLACE): Transition("_made", TRAINING, DRAINING),
        (TRAINING, UpdatesFound): Transition("_found", TRAINING, DRAINING),
        (DRAINING, MessageKind.APPLIED_IN_PLACE): Transition("_made", DRAINING, ServerState.CLOSING),
        (DRAINING, UpdatesFound): Transition("_found", DRAINING, ServerState.CLOSING),
        **self_loops([TRAINING, DRAINING], {SharedRead: "_fetched"}),
        (TRAINING, MessageKind.WINDOW_WEIGHTS): Transition("_joined", TRAINING),
        (DRAINING, MessageKind.WINDOW_WEIGHTS): Transition("_joined", DRAINING, ServerState.CLOSING),
        (TRAINING, MessageKind.WINDOW_UPDATED): Transition("_shared", TRAINING, DRAINING),
        **self_loops([ServerState.CLOSING], {SharedRead: "_ignore"}),  # the run was stopped during an epoch
    }

    def _reset_for_plan(self, plan: Plan, position: TrainingState) -> None:
        super()._reset_for_plan(plan, position)
        self.buffers = GradientBuffers(plan.children[self.id], 0, False)
        self._numbered = self.ledger.rules.job.hogbatch.locking
        self._reports: deque[UpdateReport] = deque()
        self._early: dict[int, UpdateReport] = {}  # by number: reports that arrived before an earlier update's
        self._at_hand: UpdateReport | None = None  # counted update that has not been entered yet
        self._reported = dict.fromkeys(plan.children[self.id], 0)  # number of updates that each worker reported
        self._wanted = dict.fromkeys(plan.children[self.id], 1)  # number of batches that each worker still waits for
        self._fewest = self._most = self._epoch_updates = 0  # bounds of the epoch's sum of σ; its updates
        self._leaving: list[int] = []  # dead workers with updates that are not entered yet
        self._looked: set[int] = set()  # dead workers whose updates were looked up in the window
        self._nodes = NodeWindows(plan, self.id, self.ledger.counts.samples_applied)

    @property
    def _stopping(self) -> bool:
        return self.state is DRAINING and self.ledger.stopped

    @property
    def pending(self) -> int:
        return self.ledger.pending + len(self._reports) + len(self._early)

    def validate(self) -> None:
        self.ledger.validate()
        self.membership.validate(self.received)
        assert self.received == self.ledger.applied + self.pending + self.discarded + self.lost
        assert (self.ledger.pending == 1) == (self._at_hand is not None)

    def _start(self, event: Started, now: float) -> list[Action]:
        publish = [] if self._nodes.several else [WriteShared(WEIGHTS, self.ledger.timestamp)]
        return [*publish, *super()._start(event, now)]

    # Updates in.

    def _made(self, event: Received[AppliedInPlace], now: float) -> list[Action]:
        message = event.message
        if message.sender in self._dead:  # its updates are looked up in the window
            return []
        waits = self._numbered or self._at_hand is not None or self._reports or self.state is DRAINING
        if waits or sum(g.samples for g in message.gradients) >= self.ledger.left_of_epoch:
            self._take_in(message, unsigned(message.digest))
            return self._advance(now)
        return self._enter_all(message, now)

    def _enter_all(self, message: AppliedInPlace, now: float) -> list[Action]:
        """Enters all updates of a message immediately. Only for updates without an effect beyond the records."""
        gradients, actions = message.gradients, []
        if gradients:
            self._note_arrival(message)
            self._fewest += sum(g.staleness for g in gradients)
            self._most += sum(g.timestamp for g in gradients)
            self._epoch_updates += len(gradients)
            actions = self.ledger.enter_each(gradients, message.seconds / len(gradients), now)
        self._ask_for(message.sender, message.wanted)
        return actions + self._answer_all()

    def _note_arrival(self, message: AppliedInPlace) -> None:
        self.received += len(message.gradients)
        self._reported[message.sender] += len(message.gradients)
        self.membership.count(message)

    def _take_in(self, message: AppliedInPlace, digest: int = 0) -> None:
        sender, gradients = message.sender, message.gradients
        self._note_arrival(message)
        asks = message.wanted
        if not gradients:
            self._ask_for(sender, asks)
        for place, gradient in enumerate(gradients, 1):
            last = place == len(gradients)
            report = UpdateReport(gradient, digest, message.seconds / len(gradients), sender, asks if last else 0)
            if self._numbered:
                self._early[gradient.update] = report
            else:
                self._reports.append(report)

    def _ask_for(self, child: int, batches: int) -> None:
        if batches and child in self.membership.worker:  # else it has since died
            self._wanted[child] += batches
            self._requests.waiting[child] = (self.ledger.timestamp, NO_WEIGHTS)

    def _answer_all(self) -> list[Action]:
        """Answers waiting requests. If the run is stopped, work is assigned but not sent.

        A replay does not know when the run was stopped. In this way it computes the same batch sizes.
        """
        if self._stopping:
            for child in list(self._requests.waiting):
                self._answer(child)
            return []
        return super()._answer_all()

    def _answer(self, child: int) -> list[Action]:
        """Assigns a worker the requested number of batches, or fewer if too few are left now."""
        dealer = self.ledger.dealer
        assert dealer is not None
        given: list[tuple[int, int]] = []
        while self._wanted[child] and not self._update_due and (work := dealer.deal(self.plan.roles[child].index)):
            given.append((work.first, work.count))
            self._wanted[child] -= 1
        if not self._wanted[child]:
            del self._requests.waiting[child]
        if not given:
            return []
        return [work_for(child, given, self.ledger)]

    def _lacks_weights(self, held: int) -> bool:
        return False  # the weights are in the window

    def _next_report(self) -> UpdateReport | None:
        if self._numbered:
            return self._early.pop(self.ledger.timestamp + 1, None)
        return self._reports.popleft() if self._reports else None

    def _process_arrived(self, now: float) -> list[Action]:
        """Enters updates in order, until an evaluation or a checkpoint must end first. Assigns work."""
        actions: list[Action] = []
        ledger = self.ledger
        while self.state in (TRAINING, DRAINING):
            if self._at_hand is not None:
                if self.duties.are_ahead or self._nodes.busy or self._requests.lent:
                    break
                if ledger.ends_epoch and self._nodes.is_due(ledger.counts.samples_applied):
                    self._update_due = True
                    actions += self._nodes.join(ledger.counts.samples_applied, last=self.state is DRAINING)
                    break
                actions += self._enter(self._at_hand, now)
                actions += self._lose_deferred(now)
                actions += self._answer_all()
                for role in [role for role in self._leaving if not self._unentered(role)]:
                    self._leaving.remove(role)
                    actions += self._go_on_without(role, self.plan.roles[role].title, now)
            elif (report := self._next_report()) is not None:
                gradient = report.gradient
                self._fewest += gradient.staleness
                self._most += ledger.timestamp - gradient.timestamp if self._numbered else gradient.timestamp
                self._epoch_updates += 1
                if not self._numbered:
                    gradient = structs.replace(gradient, timestamp=max(0, ledger.timestamp - gradient.timestamp))
                ledger.count((gradient,), 1.0)
                self._at_hand, self._update_due = report, self.duties.are_ahead
            else:
                break
        return actions + self._answer_all()

    def _enter(self, report: UpdateReport, now: float) -> list[Action]:
        """Enters an update into the records. At the end of an epoch no worker computes, and the weights are copied."""
        ledger, ends = self.ledger, self.ledger.ends_epoch
        self._at_hand, self._update_due = None, False
        actions = ledger.enter(report.gradient.scale, now)
        actions += ledger.note(Updated(ledger.timestamp, report.digest, report.seconds), now)
        dealer = ledger.dealer
        assert dealer is not None
        worker = self.plan.roles[report.sender].index
        done = self._stopping and not dealer.held(worker)  # the worker would have requested a batch
        self._ask_for(report.sender, report.asks or done)
        if not ends:
            return actions
        if self._nodes.several:
            self._tell_of_races(self._nodes.surviving, now)
        else:
            actions.insert(0, ReadShared(WEIGHTS))
        actions += self.duties.cycle.updated(now)
        if self.state is TRAINING:
            return actions + self._after_update(now)
        if self._evaluation.is_due(ledger.epoch):  # the workers are leaving
            actions.append(Send(self.plan.statistics, EpochEvaluated(self.id, ledger.epoch, math.nan, True, None)))
        return actions

    def _advance(self, now: float) -> list[Action]:
        actions = self._process_arrived(now)
        return actions + self._close(now)

    def _retry_update(self, now: float) -> list[Action]:
        return self._advance(now) if self._at_hand is not None else []

    def _drain(self) -> list[Action]:
        asked = self._requests.waiting.copy()
        actions = super()._drain()
        self._update_due, self._requests.waiting = self._at_hand is not None, asked
        return actions

    def _close(self, now: float) -> list[Action]:
        """Closes the training once all remaining workers have reported all their updates."""
        unknown = self._leaving or (self._dead - self._looked) & self._reported.keys()
        if self._at_hand is not None or self._reports or self._early or unknown:
            return []
        stopped = self._stopping
        if stopped and self.membership.complete and self._nodes.is_due(self.ledger.counts.samples_applied):
            return self._nodes.join(self.ledger.counts.samples_applied, last=True)
        if self._nodes.busy:
            return []
        actions = super()._close(now)
        return [ReadShared(WEIGHTS), *actions] if actions and stopped and not self._nodes.several else actions

    def _fetched(self, event: SharedRead, now: float) -> list[Action]:
        self._tell_of_races(event.surviving, now)
        return []

    def _tell_of_races(self, surviving: float, now: float) -> None:
        """Records bounds of the staleness and the fraction of surviving updates, for an epoch of a racing window."""
        ledger, count = self.ledger, self._epoch_updates
        if count and not self._numbered:
            between = f"{self._fewest / count:.2f} to {self._most / count:.2f}"
            text = f"epoch {ledger.epoch}: staleness {between}; of all updates {surviving:.6f} were not overwritten (β)"
            ledger.tell("window", ledger.timestamp, now - ledger.clock.start_time, text)
        self._fewest = self._most = self._epoch_updates = 0

    # Windows of several nodes.

    def _joined(self, event: Received[WindowWeights], now: float) -> list[Action]:
        actions = self._nodes.take(event)
        if self._nodes.busy:
            return actions
        if self.state is DRAINING:
            return actions + self._advance(now)
        given = self._nodes.give(self.ledger.timestamp + 1)
        self._requests.lent += len(given)
        return actions + given

    def _shared(self, event: Received[WindowUpdated], now: float) -> list[Action]:
        self._nodes.shared(event.message.sender)
        return self._advance(now)

    def _stop(self, event: Stopped, now: float) -> list[Action]:
        if not self._nodes.busy:
            return super()._stop(event, now)
        self.ledger.stopped = True  # takes effect when all nodes have the average
        return []

    # Workers that die.

    def _lose(self, event: Lost, now: float) -> list[Action]:
        nodes, state = self._nodes, self.state
        unsafe = (
            state is TRAINING or nodes.busy or (state is DRAINING and nodes.is_due(self.ledger.counts.samples_applied))
        )
        if nodes.several and unsafe and self.plan.traits(event.role).trains:
            title = self.plan.roles[event.role].title
            return [Fail(f"{title} died, and perhaps its node's progress in this epoch is lost", lost=True)]
        return super()._lose(event, now)

    def _go_on_without(self, role: int, name: str, now: float) -> list[Action]:
        if role not in self._looked:
            return [FindUpdates(role, self.ledger.timestamp if self._numbered else self._reported[role])]
        if self._unentered(role):
            self._leaving.append(role)
            return []
        return super()._go_on_without(role, name, now)

    def _unentered(self, role: int) -> int:
        """Returns the number of a worker's updates that are known but not entered."""
        at_hand = [] if self._at_hand is None else [self._at_hand]
        return sum(report.sender == role for report in (*self._early.values(), *self._reports, *at_hand))

    def _found(self, event: UpdatesFound, now: float) -> list[Action]:
        """Enters the updates of a dead worker. They are in the weights, whether the worker reported them or not."""
        role, dealer = event.role, self.ledger.dealer
        assert dealer is not None
        self._looked.add(role)
        last = self.ledger.timestamp + (self._at_hand is not None)
        new = [
            made
            for made in event.made
            if not self._numbered or (made.gradient.update > last and made.gradient.update not in self._early)
        ]
        early = sum(report.sender == role for report in self._early.values())
        done = early + len(new) == dealer.held(self.plan.roles[role].index)
        for place, made in enumerate(new, 1):
            asks = int(self._numbered and done and place == len(new))  # as the worker does in a replay
            gradients = (on_its_way(made, numbered=self._numbered),)
            self._take_in(AppliedInPlace(role, 0, asks, made.seconds, gradients), made.digest)
        actions = self._process_arrived(now)
        return actions + self._go_on_without(role, self.plan.roles[role].title, now) + self._close(now)
