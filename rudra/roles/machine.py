"""What all roles share: a table of transitions, and rows on their way to the statistics server."""

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, ClassVar

import numpy as np

from rudra.core.events import Action, Event, Halt, Lost, Received, Send
from rudra.core.messages import PACK, ROWS, Kind, split
from rudra.errors import ProtocolError
from topologies import Plan

Trigger = Kind | type[Event]


class States(Enum):
    """The states of a role; hashed by identity, because every event looks one up."""

    __hash__ = object.__hash__


class Machine:
    """A role. Subclasses give the table: (state, event type or message kind) -> name of the method.

    Attributes:
        id: place in the plan.
        name: as shown to people.
        state: one of the subclass's enum.
    """

    __slots__ = ("_dead", "_methods", "id", "name", "plan", "state")

    TRANSITIONS: ClassVar[Mapping[tuple[States, Any], str]] = {}
    _METHODS: ClassVar[dict[tuple[States, Any], Callable[[Any, Any, float], list[Action]]]]
    state: States

    def __init_subclass__(cls) -> None:
        cls._METHODS = {key: getattr(cls, name) for key, name in cls.TRANSITIONS.items()}

    def __init__(self, role: int, plan: Plan) -> None:
        self.id = role
        self.plan = plan
        self.name = plan.roles[role].name
        self._methods = self._METHODS
        self._dead: set[int] = set()  # roles

    def handle(self, event: Event, now: float) -> list[Action]:
        """Takes one event and returns what to do, in order.

        Args:
            event: what happened.
            now: seconds on the driver's clock.

        Raises:
            ProtocolError: the state does not allow the event; nothing has changed.
        """
        kind = type(event)
        if kind is Lost:
            if event.role in self.plan.gone or event.role in self._dead:  # type: ignore[union-attr]
                return []
            self._dead.add(event.role)  # type: ignore[union-attr]
            return self.lose(event.role, now)  # type: ignore[union-attr]
        trigger: Any = event.message.kind if kind is Received else kind  # type: ignore[union-attr]
        method = self._methods.get((self.state, trigger))
        if method is None:
            if trigger is Kind.DONE and self._dead:  # what this role still waits for was with the dead
                return [halt(event)]  # type: ignore[arg-type]
            if kind is Received and event.message.sender in self._dead:  # type: ignore[union-attr]
                return []  # said before it died, and of no use now
            what = trigger.name if isinstance(trigger, Kind) else trigger.__name__
            raise ProtocolError(f"{self.name} cannot take {what} while {self.state.name}")
        return method(self, event, now)

    def lose(self, role: int, now: float) -> list[Action]:
        """The rank of another role has died; whoever cannot do without it says so."""
        return []

    def inherit(self, before: "Machine") -> None:
        """Takes over what outlasts it from who played this role until everybody began anew."""

    def validate(self) -> None:
        """Raises AssertionError unless the invariants hold; tests call it after every event."""

    @property
    def tick_s(self) -> float | None:
        """How often this role wants a `Tick` now while nothing happens."""
        return None

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
        self._rows: dict[Kind, list[bytes]] = {}
        self._count = 0
        self._since = 0.0

    def add(self, kind: Kind, *row: Any) -> None:
        self.extend(kind, [PACK[kind](*row)])

    def extend(self, kind: Kind, rows: Sequence[bytes]) -> None:
        """Adds rows that are packed already."""
        self._rows.setdefault(kind, []).extend(rows)
        self._count += len(rows)

    def due(self, now: float) -> list[Action]:
        """What to send now, if it is time."""
        if not self._count or (self._count < self.ROWS_AT_MOST and now - self._since < self._interval_s):
            return []
        return self.flush(now)

    def flush(self, now: float) -> list[Action]:
        """Everything that was gathered."""
        self._since = now
        if not self._count:
            return []
        gathered, self._rows, self._count = self._rows, {}, 0
        joined = ((kind, np.frombuffer(b"".join(rows), ROWS[kind])) for kind, rows in gathered.items())
        return [Send(self._to, message) for kind, rows in joined for message in split(kind, self._role, rows)]


class Silent(Outbox):
    """Of a role that has nothing to report."""

    def add(self, kind: Kind, *row: Any) -> None: ...
    def extend(self, kind: Kind, rows: Sequence[bytes]) -> None: ...


def halt(event: Received) -> Halt:
    """What to do when the statistics server says that all is done."""
    return Halt(event.message.value, apart=bool(event.message.timestamp))


def short(digest: str) -> int:
    """63 bits of a hexadecimal digest, for the number in a message; 0 where there is none."""
    return int(digest[:16] or "0", 16) >> 1


def listed(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
