"""What all roles share: a table of transitions, and rows on their way to the statistics server."""

from collections.abc import Mapping
from enum import Enum
from typing import Any, ClassVar

import numpy as np

from rudra.errors import ProtocolError
from rudra.events import Action, Event, Received, Send
from rudra.messages import ROWS, Kind, split
from topologies import Plan

Trigger = Kind | type[Event]


class Machine:
    """A role. Subclasses give the table: (state, event type or message kind) -> name of the method.

    Attributes:
        id: place in the plan.
        name: as shown to people.
        state: one of the subclass's enum.
    """

    TRANSITIONS: ClassVar[Mapping[tuple[Enum, Any], str]]
    state: Enum

    def __init__(self, role: int, plan: Plan) -> None:
        self.id = role
        self.plan = plan
        self.name = plan.roles[role].name

    def handle(self, event: Event, now: float) -> list[Action]:
        """Takes one event and returns what to do, in order.

        Args:
            event: what happened.
            now: seconds on the driver's clock.

        Raises:
            ProtocolError: the state does not allow the event; nothing has changed.
        """
        trigger: Any = event.message.kind if isinstance(event, Received) else type(event)
        method = self.TRANSITIONS.get((self.state, trigger))
        if method is None:
            what = trigger.name if isinstance(trigger, Kind) else trigger.__name__
            raise ProtocolError(f"{self.name} cannot take {what} while {self.state.name}")
        actions: list[Action] = getattr(self, method)(event, now)
        return actions

    def validate(self) -> None:
        """Raises AssertionError unless the invariants hold; tests call it after every event."""

    @property
    def waiting_for(self) -> str:
        """For whom and what this role waits now, for people; empty if it does not wait."""
        return ""


class Outbox:
    """Rows that a role gathers and sends to the statistics server now and then.

    Args:
        role: id of the sender.
        to: id of the statistics server.
        interval_s: how long rows may wait.
    """

    ROWS_AT_MOST = 48

    def __init__(self, role: int, to: int, interval_s: float) -> None:
        self._role, self._to, self._interval_s = role, to, interval_s
        self._rows: dict[Kind, list[tuple[Any, ...]]] = {}
        self._count = 0
        self._since = 0.0

    def add(self, kind: Kind, row: tuple[Any, ...]) -> None:
        self._rows.setdefault(kind, []).append(row)
        self._count += 1

    def due(self, now: float) -> list[Action]:
        """What to send now, if it is time."""
        if self._count < self.ROWS_AT_MOST and now - self._since < self._interval_s:
            return []
        return self.flush(now)

    def flush(self, now: float) -> list[Action]:
        """Everything that was gathered."""
        self._since = now
        if not self._count:
            return []
        gathered, self._rows, self._count = self._rows, {}, 0
        messages = (m for kind, rows in gathered.items() for m in split(kind, self._role, np.array(rows, ROWS[kind])))
        return [Send(self._to, message) for message in messages]
