"""The coordinator: a parameter server that also deals the samples out, to whoever asks for work.

Source: Hogbatch (Ma and Rusu 2020), §5.1, Algorithms 1 and 2: `ScheduleWork` is the last gradient of a batch, or the
beginning; `ExecuteWork` is `AssignWork`, which newer weights follow. An epoch ends when no sample is left and all
workers are done, which is when the last gradient is applied; until then who asks for work waits. A gradient of a worker
that has died counts if it is applied by then, else its samples are served again.

Workers may test the weights of each epoch's end, too (§5.2, "loss computation"). All of them are free then, and until
the test is over nothing else happens: no work is given, whoever dies is missed afterwards, a wish to stop waits, and
the clock of the training stands still.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from rudra.core import records
from rudra.core.events import WEIGHTS, Action, Lost, Received, Send, Stopped
from rudra.core.messages import AssignWork, EpochEvaluated, EvaluatePart, MessageKind, PartEvaluated, in_pieces_or_none
from rudra.core.training_state import TrainingState
from rudra.roles.distributed_evaluation import DistributedEvaluation
from rudra.roles.machine import States, Transition, listed
from rudra.roles.server import TRAINING, ParameterServer, ServerState
from topologies import Plan


class Coordinator(ParameterServer):
    """The owner of the weights, and of the order of the samples."""

    TRANSITIONS: ClassVar[Mapping[tuple[States, Any], Transition]] = {
        **ParameterServer.TRANSITIONS,
        (TRAINING, MessageKind.PART_EVALUATED): Transition("_assessed", TRAINING, ServerState.DRAINING),
        (TRAINING, Stopped): Transition("_stop", TRAINING, ServerState.DRAINING),
    }

    def _reset_for_plan(self, plan: Plan, position: TrainingState) -> None:
        super()._reset_for_plan(plan, position)
        self._examination: DistributedEvaluation | None = None
        self._examines = self.ledger.rules.job.training.evaluate == "workers"
        self._tested = position.epoch  # the last epoch whose weights need no test any more

    @property
    def waiting_for(self) -> str:
        if self._examination is not None:
            names = [self.plan.roles[role].name for role in self._examination.testing]
            return f"{listed(names)} to test the weights of epoch {self._examination.epoch}"
        return super().waiting_for

    def _begin(self, now: float) -> list[Action]:
        waited = self.state is ServerState.INITIALISING
        actions = super()._begin(now)
        if waited and self.state is ServerState.TRAINING:
            timestamp = self.ledger.timestamp
            self._pulls = dict.fromkeys(self.membership.children, (timestamp, timestamp))
            actions += self._answer_all()
        return actions

    def _answer_all(self) -> list[Action]:
        return super()._answer_all() if self._examination is None else []

    def _answer(self, child: int) -> list[Action]:
        """Gives who asks work, if any is left and no update is due; else it waits."""
        ledger = self.ledger
        assert ledger.dealer is not None
        work = None if self._update_due else ledger.dealer.deal(self.plan.roles[child].index)
        if work is None:
            return []
        _, held = self._pulls.pop(child)
        execute = self._execute(child, [(work.first, work.count)])
        if not self._lacks_weights(held):
            return [execute]
        self._lent += 1
        return [execute, Send(child, self._stamp.weights, WEIGHTS)]

    def _lacks_weights(self, held: int) -> bool:
        """Whether who holds the weights of a timestamp is to get newer ones."""
        return held not in (self.ledger.timestamp, NO_WEIGHTS)

    def _execute(self, child: int, given: list[tuple[int, int]]) -> Send:
        """Gives a worker batches, each its first sample and how many."""
        ledger, rows = self.ledger, np.array(given, records.WORK)
        rate = ledger.rate_for(given[0][1])
        return Send(child, AssignWork(self.id, ledger.timestamp, round(ledger.clock.start_time * 1e9), rate, rows))

    def hold_back(self) -> None:
        """Gives no work to those who wait, until `deal_anew`."""
        self._pulls.clear()

    def deal_anew(self) -> list[Action]:
        """Gives all workers work as if training began here; what they had is served again."""
        assert self.ledger.dealer is not None
        for learner in self.plan.learners:
            self.ledger.dealer.recall(self.plan.roles[learner].index)
        self._pulls = dict.fromkeys(self.membership.children, (self.ledger.timestamp, NO_WEIGHTS))
        return self._answer_all()

    # Tests by workers.

    def _after_update(self, now: float) -> list[Action]:
        if not self._examines or self.ledger.epoch == self._tested:
            return self._drain() if self.ledger.stopped else super()._after_update(now)
        alive = self._alive
        if not alive:
            return []  # which is told next
        self._tested = self.ledger.epoch
        self._examination = DistributedEvaluation(self._tested, now)
        return [action for child in alive for action in self._examine(child)]

    @property
    def _alive(self) -> list[int]:
        return [child for child in self.membership.worker if child not in self._dead]

    def _examine(self, child: int) -> list[Action]:
        """Gives who is free a part of the test."""
        assert self._examination is not None
        part = self._examination.deal(child)
        if part is None:
            return []
        timestamp = self.ledger.timestamp
        asked, held = self._pulls.get(child, (timestamp, NO_WEIGHTS))
        told: list[Action] = [Send(child, EvaluatePart(self.id, timestamp, part))]
        if self._lacks_weights(held):
            self._pulls[child] = (asked, timestamp)
            self._lent += 1
            told.append(Send(child, self._stamp.weights, WEIGHTS))
        return told

    def _assessed(self, event: Received[PartEvaluated], now: float) -> list[Action]:
        examination, message = self._examination, event.message
        if examination is None or message.sender in self._dead or not examination.take(message):
            return []
        return self._examine(event.message.sender) + self._examined(now)

    def _examined(self, now: float) -> list[Action]:
        """Goes on with the training once all is tested."""
        examination = self._examination
        assert examination is not None
        if not examination.complete:
            return []
        self._examination = None
        seconds, ledger = now - examination.began, self.ledger
        ledger.pause(seconds, f"epoch {examination.epoch}: workers tested its weights in {seconds:.3f} s", now)
        self._stragglers.begin(now, self.received)
        actions: list[Action] = [
            Send(self.plan.statistics, EpochEvaluated(self.id, examination.epoch, seconds, last, rows))
            for rows, last in in_pieces_or_none(examination.rows)
        ]
        actions += self._after_update(now)
        return actions + self._lose_deferred(now) + self._answer_all()

    def _stop(self, event: Stopped, now: float) -> list[Action]:
        if self._examination is None:
            return super()._stop(event, now)
        self.ledger.stopped = True
        return []

    # Workers that die.

    def _lose(self, event: Lost, now: float) -> list[Action]:
        """The same, but after a test, as if it had died then; others have its part of that."""
        examination, role = self._examination, event.role
        if examination is None or not self.plan.traits(role).trains:
            return super()._lose(event, now)
        self._deferred.append(role)
        examination.lose(role)
        alive = self._alive
        if not alive:
            self._examination = None
            return self._lose_deferred(now)
        free = [child for child in alive if child not in examination.testing]
        return [action for child in free for action in self._examine(child)] + self._examined(now)

    def _lose_deferred(self, now: float) -> list[Action]:
        return super()._lose_deferred(now) if self._examination is None else []

    def _go_on_without(self, role: int, name: str, now: float) -> list[Action]:
        """The same; first who waits gets work, so that a loss comes between two gradients, as in a replay."""
        if self._examination is not None:
            self._deferred.append(role)
            return []
        free = self.state is ServerState.TRAINING and not self._update_due
        return (self._answer_all() if free else []) + super()._go_on_without(role, name, now)

    def _forget(self, role: int, child: int) -> list[Action]:
        assert self.ledger.dealer is not None
        self.lost += self.buffers.ignore_later(child)
        self.ledger.dealer.recall(self.plan.roles[role].index, dead=True)
        return super()._forget(role, child)


NO_WEIGHTS = -1
"""In the value of a gradient: whoever asks for work with it needs no weights."""
