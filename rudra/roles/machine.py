"""What all roles share: a table of transitions, and rows on their way to the statistics server."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, ClassVar, NamedTuple, Protocol

from rudra.core.events import Action, Event, Halt, Lost, Received
from rudra.core.messages import MESSAGES, MessageKind, Shutdown
from rudra.core.phases import Phase, Phases
from rudra.core.schedule import Schedule
from rudra.core.training_state import BEGINNING, TrainingState
from rudra.errors import ProtocolError
from rudra.job.job import Job
from topologies import Plan

Trigger = MessageKind | type[Event]


class States(Enum):
    """The states of a role; hashed by identity, because every event looks one up."""

    __hash__ = object.__hash__


class Transition:
    """Where an event leads: a method, and the states one of which follows; the state before is named if it may stay."""

    __slots__ = ("method", "states")

    def __init__(self, method: str, *states: States) -> None:
        self.method, self.states = method, states


def self_loops(states: Iterable[States], methods: Mapping[Trigger, str]) -> dict[tuple[States, Any], Transition]:
    """Rows of a table: events that are handled alike in some states, and lead to no other."""
    return {(state, trigger): Transition(method, state) for state in states for trigger, method in methods.items()}


class Setup(NamedTuple):
    """What roles are made from.

    Attributes:
        job: resolved.
        plan: who is who.
        training_samples: size of the training set, by which epochs are counted.
        schedule: the learning rates before modulation, for whoever owns weights.
        position: where training begins.
        phases: all parts of the run, where the job changes; job, plan and schedule are those of the part at hand.
    """

    job: Job
    plan: Plan
    training_samples: int
    schedule: Schedule
    position: TrainingState = BEGINNING
    phases: Phases = ()

    @property
    def all_phases(self) -> Phases:
        """All parts of the run: a single one where the job does not change."""
        return self.phases or (Phase(0, self.job, self.plan, self.schedule),)


class CoOwned(Protocol):
    """Weights that a role owns together with others, for which it decides."""

    def share(self, actions: Iterable[Action]) -> list[Action]:
        """Returns what the role itself does of what it decided; others do the rest."""


Method = Callable[[Any, Any, float], list[Action]]

HISTORY = 50
"""Events that a role remembers, to be shown with an error."""


class Machine:
    """A role. Subclasses give the table: (state, event type or message kind) -> method, and what states may follow.

    A method sets the state; that the table names it is checked by tests (`validate_step`).

    Attributes:
        id: place in the plan.
        name: as shown to people.
        state: one of the subclass's enum.
    """

    __slots__ = ("_co_owned", "_dead", "_history", "_methods", "id", "name", "plan", "state")

    TRANSITIONS: ClassVar[Mapping[tuple[States, Any], Transition]] = {}
    _METHODS: ClassVar[dict[tuple[States, type], Method]]  # by the type of an event, or of the message that it brings
    state: States

    def __init_subclass__(cls) -> None:
        for (state, _), to in cls.TRANSITIONS.items():
            if not to.states or any(type(following) is not type(state) for following in to.states):
                raise TypeError(
                    f"{cls.__name__}.{to.method} leads from {state} to {to.states}, which are no such states"
                )
        cls._METHODS = {
            (state, MESSAGES[trigger] if isinstance(trigger, MessageKind) else trigger): getattr(cls, to.method)
            for (state, trigger), to in cls.TRANSITIONS.items()
        }

    def __init__(self, role: int, plan: Plan) -> None:
        self.id = role
        self.plan = plan
        self.name = plan.roles[role].name
        self._methods = self._METHODS
        self._co_owned: tuple[CoOwned, ...] = ()
        self._dead: set[int] = set()  # roles
        # The events themselves would keep the memory of messages in use: the next ones then find it in no cache, and a
        # simulation takes a tenth longer.
        self._history: deque[Any] = deque(maxlen=HISTORY)

    def handle(self, event: Event, now: float) -> list[Action]:
        """Takes one event and returns what to do, in order.

        Args:
            event: what happened.
            now: seconds on the driver's clock.

        Raises:
            ProtocolError: the state does not allow the event; nothing has changed. As any error, it has the last
                events of the role in a note.
        """
        trigger: Any = type(event)
        sender = None
        if trigger is Received:
            message = event.message  # type: ignore[union-attr]
            trigger, sender = type(message), message.sender
        elif trigger is Lost:
            if event.role in self.plan.gone or event.role in self._dead:  # type: ignore[union-attr]
                return []
            self._dead.add(event.role)  # type: ignore[union-attr]
        key = (self.state, trigger)
        method = self._methods.get(key)
        if method is None:
            if trigger is Shutdown and self._dead:  # what this role still waits for was with the dead
                return [halt(event)]  # type: ignore[arg-type]
            if sender in self._dead:
                return []  # said before it died, and of no use now
            if trigger is Lost:
                return []  # this role can do without it
            refused = ProtocolError(f"{self.name} cannot take {_name_of(trigger)} while {self.state.name}")
            refused.add_note(self.story)
            raise refused
        self._history.append((key, now, sender))
        try:
            actions = method(self, event, now)
            if self._co_owned:
                for weights in self._co_owned:
                    actions = weights.share(actions)
            return actions
        except Exception as error:
            error.add_note(self.story)
            raise

    @property
    def story(self) -> str:
        """The last events of this role, for people, one a line: when, in which state, what, and from whom."""
        names = [role.name for role in self.plan.roles]
        lines = [f"The last events of {self.name}:" if self._history else f"{self.name} had no event before."]
        for (state, trigger), now, sender in self._history:
            source = "" if sender is None else f" from {names[sender]}"
            lines.append(f"  {now:.6f} s  {state.name:12}  {_name_of(trigger)}{source}")
        return "\n".join(lines)

    def _ignore(self, event: Any, now: float) -> list[Action]:
        """What comes too late to matter."""
        return []

    def inherit(self, before: Any) -> None:
        """Takes over what outlasts it from who played this role until everybody regrouped: one of the same class."""

    def validate(self) -> None:
        """Raises AssertionError unless the invariants hold; tests call it after every event."""

    def validate_step(self, before: States, event: Event) -> None:
        """Raises AssertionError unless the table says that an event leads from a state to that of now; for tests."""
        trigger: Any = event.message.kind if isinstance(event, Received) else type(event)
        to = self.TRANSITIONS.get((before, trigger))
        assert self.state in (to.states if to else {before}), (self.name, before, trigger, self.state)

    @property
    def tick_s(self) -> float | None:
        """How often this role wants a `Tick` now while nothing happens."""
        return None

    @property
    def waiting_for(self) -> str:
        """For whom and what this role waits now, for people; empty if it does not wait."""
        return ""


def _name_of(trigger: type) -> str:
    kind: MessageKind | None = getattr(trigger, "kind", None)
    return trigger.__name__ if kind is None else kind.name


def halt(event: Received[Shutdown]) -> Halt:
    """What to do when the statistics server says that all is done."""
    return Halt(event.message.exit_code, event.message.apart)


def short_digest(digest: str) -> int:
    """63 bits of a hexadecimal digest, for the number in a message; 0 where there is none."""
    return int(digest[:16] or "0", 16) >> 1


def listed(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
