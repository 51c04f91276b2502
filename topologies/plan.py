"""The plan that a topology draws up, and how a topology is found by name."""

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

PARAMETER_SERVER = "parameter server"
STATISTICS_SERVER = "statistics server"
LEARNER = "learner"


@dataclass(frozen=True, slots=True)
class Role:
    """One role: its place in `Plan.roles` is its id, by which messages are addressed.

    Attributes:
        kind: parameter server, statistics server or learner.
        index: counts the roles of one kind from 0.
        world_rank: the rank that hosts it; a rank may host several.
        parent: id of the role that takes this one's gradients and gives it weights; None at the root.
    """

    kind: str
    index: int
    world_rank: int
    parent: int | None = None

    @property
    def name(self) -> str:
        return f"{self.kind} {self.index}" if self.kind == LEARNER else self.kind


@dataclass(frozen=True)
class Plan:
    """Roles by id.

    Attributes:
        roles: every role of the job.
        records: gradients that one message may stand for (1 unless servers aggregate).
        replayable: the order of everything that is added is recorded, so that a replay reaches the same bits.
    """

    roles: tuple[Role, ...]
    records: int = 1
    replayable: bool = True

    @property
    def ranks(self) -> int:
        """World size that the plan needs."""
        return 1 + max(role.world_rank for role in self.roles)

    @cached_property
    def server(self) -> int:
        """Id of the role that owns the weights."""
        return self._ids(PARAMETER_SERVER)[0]

    @cached_property
    def statistics(self) -> int:
        return self._ids(STATISTICS_SERVER)[0]

    @cached_property
    def learners(self) -> tuple[int, ...]:
        """Ids of the learners, in learner order."""
        return self._ids(LEARNER)

    def on_rank(self, world_rank: int) -> tuple[int, ...]:
        """Ids of the roles that a rank hosts."""
        return tuple(i for i, role in enumerate(self.roles) if role.world_rank == world_rank)

    def _ids(self, kind: str) -> tuple[int, ...]:
        return tuple(i for i, role in enumerate(self.roles) if role.kind == kind)


@dataclass(frozen=True, slots=True)
class Topology:
    """A topology's two functions, with the user's options bound."""

    name: str
    plan: Callable[[int], Plan]
    learners_for: Callable[[int], int]


def load(name: Any, options: Mapping[str, Any] | None = None) -> Topology:
    """Finds a topology.

    Args:
        name: a module of this package, or an object with the functions `plan` and `learners_for`.
        options: keyword arguments for both.

    Raises:
        ValueError: unknown name, an object without the two functions, or options that these do not take.
    """
    source: Any = name
    if isinstance(name, str):
        if name not in shipped():
            raise ValueError(
                f"[topology] name: '{name}' is unknown; valid: {', '.join(shipped())} or package.module:object"
            )
        source = importlib.import_module(f"topologies.{name}")
    bound = dict(options or {})
    text = name if isinstance(name, str) else getattr(name, "__name__", type(name).__name__)
    for function in ("plan", "learners_for"):
        if not callable(getattr(source, function, None)):
            raise ValueError(f"[topology] name: {text} has no function {function}")
        try:
            inspect.signature(getattr(source, function)).bind(1, **bound)
        except TypeError as error:
            raise ValueError(f"[topology] options: {text}.{function}: {error}") from None
    return Topology(text, partial(source.plan, **bound), partial(source.learners_for, **bound))


def shipped() -> tuple[str, ...]:
    """Names of the topologies in this package."""
    modules = (m.name for m in pkgutil.iter_modules([str(Path(__file__).parent)]))
    return tuple(sorted(m for m in modules if m != "plan"))
