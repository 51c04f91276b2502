"""Base class of all roles: a table of transitions, and a history of events."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, ClassVar, NamedTuple, Protocol

from rudra.core.actions import Action, Fail, Halt, Send
from rudra.core.decisions import LONGEST, in_texts
from rudra.core.events import Event, Lost, MemoryExhausted, Received
from rudra.core.messages import MESSAGES, MessageKind, RoleExhausted, Shutdown
from rudra.core.phases import Phase, Phases
from rudra.core.schedule import Schedule
from rudra.core.training_state import BEGINNING, TrainingState
from rudra.errors import ProtocolError
from rudra.job.boundary import START
from rudra.job.job import Job
from topologies import Plan

Trigger = MessageKind | type[Event]


class States(Enum):
    """States of a role, hashed by identity for speed, because every event looks up a state."""

    __hash__ = object.__hash__


class Transition:
    """Effect of an event: its method and the possible next states, with the present one if the role may stay in it."""

    __slots__ = ("method", "states")

    def __init__(self, method: str, *states: States) -> None:
        self.method, self.states = method, states


def self_loops(states: Iterable[States], methods: Mapping[Trigger, str]) -> dict[tuple[States, Any], Transition]:
    """Returns rows of a table for events that leave a state unchanged, with the same method in each of the states."""
    return {(state, trigger): Transition(method, state) for state in states for trigger, method in methods.items()}


class Setup(NamedTuple):
    """Arguments of a role.

    Attributes:
        job: resolved job.
        plan: roles of the run and their connections.
        training_samples: number of samples in the training set, and so in an epoch.
        schedule: learning rates before modulation, for roles that own weights.
        position: state of training at the start.
        phases: all phases of the run, if the job changes. `job`, `plan` and `schedule` belong to the present phase.
    """

    job: Job
    plan: Plan
    training_samples: int
    schedule: Schedule
    position: TrainingState = BEGINNING
    phases: Phases = Phases()

    @property
    def all_phases(self) -> Phases:
        """All phases of the run, or a single one if the job does not change."""
        return self.phases or Phases([Phase(START, self.job, self.plan, self.schedule)])

    @property
    def phases_in_effect(self) -> Phases:
        """All phases of the run, with the decided changes that have taken effect."""
        return self.all_phases.having(self.position.in_effect)


class CoOwned(Protocol):
    """Weights that a role owns together with others. This role decides for all owners."""

    def share(self, actions: Iterable[Action]) -> list[Action]:
        """Returns the decided actions that the role itself carries out. The other owners do the rest."""


_Method = Callable[[Any, Any, float], list[Action]]
_Past = tuple[States, type, float, int | None]  # an event: state before it, type, time, and sender if it is a message

HISTORY = 50
"""Number of events that a role remembers, to show them with an error."""


class Machine:
    """State machine of a role. Each subclass defines a table of transitions.

    The table maps (state, event type or message kind) to a method and the possible next states. The method sets the
    next state. Tests check that the table lists it (`validate_step`).

    Attributes:
        id: id of the role in the plan.
        name: name of the role in messages to people.
        state: present state, from the subclass's enum.
    """

    __slots__ = ("_dead", "_handling", "id", "name", "plan", "state")

    TRANSITIONS: ClassVar[Mapping[tuple[States, Any], Transition]] = {}
    _METHODS: ClassVar[dict[States, dict[type, _Method]]]
    state: States

    def __init_subclass__(cls) -> None:
        for (state, _), to in cls.TRANSITIONS.items():
            if not to.states or any(type(following) is not type(state) for following in to.states):
                raise TypeError(
                    f"{cls.__name__}.{to.method} leads from {state} to {to.states}, which are no such states"
                )
        cls._METHODS = {other: {} for state, _ in cls.TRANSITIONS for other in type(state)}
        for (state, trigger), to in cls.TRANSITIONS.items():  # by types: the kind of a message takes longer to look up
            type_ = MESSAGES[trigger] if isinstance(trigger, MessageKind) else trigger
            cls._METHODS[state][type_] = getattr(cls, to.method)

    def __init__(self, role: int, plan: Plan) -> None:
        self.id = role
        self.plan = plan
        self.name = plan.roles[role].name
        self._dead: set[int] = set()  # ids of roles
        # Whole events in the history would keep the memory of their messages in use. New messages would then miss the
        # cache, and a simulation would take a tenth longer.
        history: deque[_Past] = deque(maxlen=HISTORY)
        co_owned: tuple[CoOwned, ...] = ()
        self._handling = self._METHODS, history, co_owned  # one attribute: slow to look up, as `self` has many types

    def rate_after(self, samples: int, updates: int) -> float | None:
        """Predicts the learning rate of an update of this role's weights. None: it is not known.

        Args:
            samples: number of samples of the update.
            updates: number of updates like it that come before.
        """
        return None

    def handle(self, event: Event, now: float) -> list[Action]:
        """Takes one event and returns what to do, in order.

        Args:
            event: event to handle.
            now: seconds on the driver's clock.

        Raises:
            ProtocolError: the state does not allow the event. Nothing has changed. As for all errors, a note lists the
                last events of the role.
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
        methods, history, co_owned = self._handling
        state = self.state
        method = methods[state].get(trigger)
        if method is None:
            if trigger is Shutdown and self._dead:  # this role waits for something that only dead roles had
                return [halt(event)]  # type: ignore[arg-type]
            if sender in self._dead:
                return []  # sent before the sender died, and not needed now
            if trigger is Lost:
                return []  # this role does not need the lost role
            if trigger is MemoryExhausted:
                return self._exhausted(event)  # type: ignore[arg-type]
            refused = ProtocolError(f"{self.name} cannot take {_name_of(trigger)} while {state.name}")
            refused.add_note(self.story)
            raise refused
        history.append((state, trigger, now, sender))
        try:
            if not co_owned:
                return method(self, event, now)
            actions = method(self, event, now)
            for weights in co_owned:
                actions = weights.share(actions)
            return actions
        except Exception as error:
            error.add_note(self.story)
            raise

    @property
    def story(self) -> str:
        """Last events of this role as text for people, one a line: time, state, event and sender."""
        names = [role.name for role in self.plan.roles]
        _, history, _ = self._handling
        lines = [f"The last events of {self.name}:" if history else f"{self.name} had no event before."]
        for state, trigger, now, sender in history:
            source = "" if sender is None else f" from {names[sender]}"
            lines.append(f"  {now:.6f} s  {state.name:12}  {_name_of(trigger)}{source}")
        return "\n".join(lines)

    @property
    def _co_owned(self) -> tuple[CoOwned, ...]:
        """Weights that this role owns together with others."""
        return self._handling[2]

    @_co_owned.setter
    def _co_owned(self, weights: tuple[CoOwned, ...]) -> None:
        self._handling = (*self._handling[:2], weights)

    def _exhausted(self, event: MemoryExhausted) -> list[Action]:
        """Tells the statistics server that an action of this role has no result. It decides how the run continues."""
        if event.harms and self.id in self.plan.owners:
            return [Fail(event.text, cause=self.id)]
        return [Send(self.plan.statistics, self.exhaustion(event))]

    def exhaustion(self, event: MemoryExhausted) -> RoleExhausted:
        """Returns the message about an action of this role without a result."""
        text = event.text.encode("ascii", "replace")[:LONGEST].decode()
        return RoleExhausted(self.id, self.id, len(self.plan.learners), in_texts(text))

    def _ignore(self, event: Any, now: float) -> list[Action]:
        """Ignores an event that comes too late to matter."""
        return []

    def inherit(self, before: Any) -> None:
        """Takes over lasting records from `before`, the machine of this role before a regrouping, of the same class."""

    def validate(self) -> None:
        """Raises AssertionError unless the invariants hold. Tests call it after every event."""

    def validate_step(self, before: States, event: Event) -> None:
        """Raises AssertionError unless the table allows the step from `before` to the present state. For tests."""
        trigger: Any = event.message.kind if isinstance(event, Received) else type(event)
        to = self.TRANSITIONS.get((before, trigger))
        assert self.state in (to.states if to else {before}), (self.name, before, trigger, self.state)

    @property
    def tick_s(self) -> float | None:
        """Interval in seconds between the `Tick` events that this role wants while nothing else happens, or None."""
        return None

    @property
    def waiting_for(self) -> str:
        """Text for people: the role and the event that this role waits for now, or an empty string."""
        return ""


def _name_of(trigger: type) -> str:
    kind: MessageKind | None = getattr(trigger, "kind", None)
    return trigger.__name__ if kind is None else kind.name


def halt(event: Received[Shutdown]) -> Halt:
    """Returns the action that ends a role when the statistics server shuts the run down."""
    return Halt(event.message.exit_code, event.message.apart)


def short_digest(digest: str) -> int:
    """Returns 63 bits of a hexadecimal digest as a number for a message, or 0 without a digest."""
    return int(digest[:16] or "0", 16) >> 1


def listed(names: Sequence[str]) -> str:
    """Returns text with the first few names and the number of the others."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
