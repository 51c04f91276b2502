"""Learner that does not take part now: it waits until a regrouping makes it a learner, or until training ends.

    DORMANT   training has ended      -> STOPPED  report the closing account
    STOPPED   everything is recorded  -> DONE

It has a place in the plan, a rank and memory like every learner, so that a regrouping only replaces its state machine.
It neither computes nor exchanges anything. The owner of the weights notifies it of the end of training directly.
"""

from collections.abc import Mapping
from enum import auto
from typing import Any, ClassVar, Protocol

from rudra.core.actions import Action
from rudra.core.events import Received, Started
from rudra.core.messages import MessageKind, Shutdown, Stop
from rudra.roles.machine import Machine, Setup, States, Transition, halt, self_loops
from rudra.roles.minibatch_log import MinibatchLog


class DormantState(States):
    DORMANT = auto()
    STOPPED = auto()
    DONE = auto()


class Logging(Protocol):
    """Learner of any kind."""

    log: MinibatchLog


class DormantLearner(Machine):
    """Learner that does not take part now.

    Args:
        role: id of the learner in the plan.
        setup: arguments of the role.

    Attributes:
        log: log of the mini-batches that it computed while it took part.
    """

    TRANSITIONS: ClassVar[Mapping[tuple[States, Any], Transition]] = {
        **self_loops([DormantState.DORMANT], {Started: "_ignore"}),
        (DormantState.DORMANT, MessageKind.STOP): Transition("_stop", DormantState.STOPPED),
        **self_loops([DormantState.STOPPED], {MessageKind.STOP: "_ignore"}),
        **{
            (state, MessageKind.SHUTDOWN): Transition("_finish", DormantState.DONE)
            for state in (DormantState.DORMANT, DormantState.STOPPED)
        },
    }

    def __init__(self, role: int, setup: Setup) -> None:
        super().__init__(role, setup.plan)
        self.state: States = DormantState.DORMANT
        self.log = MinibatchLog(role, setup)
        served, position = setup.plan.served, setup.position
        self._pushed = self.log.step if served else position.updates_with(self.log.learner)

    def inherit(self, before: Logging) -> None:
        self.log.inherit(before.log)

    @property
    def waiting_for(self) -> str:
        # A dormant learner may wait as long as the training takes, so its wait is not reported.
        return "the statistics server to finish" if self.state is DormantState.STOPPED else ""

    def _stop(self, event: Received[Stop], now: float) -> list[Action]:
        self.state = DormantState.STOPPED
        return self.log.close(now, self._pushed)

    def _finish(self, event: Received[Shutdown], now: float) -> list[Action]:
        self.state = DormantState.DONE
        return [halt(event)]
