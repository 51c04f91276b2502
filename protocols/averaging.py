"""Averaging of replicas: each learner trains a replica of its own, and all replicas are averaged into a central model
z.

Source: crossbow.txt §3.2 (Algorithm 1: SMA); Zhang et al. 2015 (elastic averaging); McMahan et al. 2017, Stich 2019
(averaging after local steps); Douillard et al. 2023 (DiLoCo). One scheme contains all of them. Every `period`
mini-batches the outer optimiser steps z by a pseudo-gradient, the mean of z - w_j over the replicas w_j. Each replica
moves towards z by its `elasticity`:

* `early`: by α (z - w_j), with w_j before the step of the mini-batch and z before its own step. The outer rate is αk by
default, so that z moves by the sum of the replicas' corrections. Only the next correction needs the new z. * not
`early`: towards the new z. With elasticity 1 all replicas continue from z.

In blocks (crossbow.txt §3.3) both levels are early. In every iteration a replica moves towards the reference of its
block, and the reference moves by the sum of its replicas' corrections. Every `period` the references are averaged in
the same way as the replicas above, after the correction in their block.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from protocols.base import Clock, Protocol

Row = npt.NDArray[np.float64]


class Outer(NamedTuple):
    """Optimiser of the central model: a name known to `[optimizer]`, its momentum and further options."""

    optimizer: str
    momentum: float
    options: dict[str, Any]


class Elasticity(NamedTuple):
    """Default of α: a formula as text, and as a function of k, the number of averaged replicas."""

    text: str
    of: Callable[[int], float]


WHOLE = Elasticity("1", lambda k: 1.0)
SHARED = Elasticity("1/k", lambda k: 1 / k)
SHARED_WITH_CENTRE = Elasticity("1/(k + 1)", lambda k: 1 / (k + 1))


class Averaging(Protocol):
    """Base class of all rules that average replicas. A subclass sets its defaults.

    Its keyword arguments are the job's table `[averaging]`.

    Args:
        learners: k, the number of replicas, or of references.
        period: τ, number of mini-batches of each learner between two averages.
        elasticity: α. None: for an early rule 1/k, or 1/(k + 1) without outer momentum; for all other rules 1.
        outer: Keys of the outer optimiser: `name`, `learning_rate`, `momentum`, and `options` with further keyword
            arguments. The default of `learning_rate` is αk for an early rule, else the rule's own.
        restart: Whether all replicas continue from z, without momentum, when the learning rate drops.
        keep_momentum: Whether replicas keep the momentum of their own optimiser at a restart.
        local_elasticity: α of replicas towards the reference of their block. None: 1/(m + 1) in a block of m, because
            there is no momentum.
        served: Whether each learner exchanges separately with z at a parameter server, in any order.
        blocks: Number of learners in each block. Empty: there are no blocks.

    Attributes:
        early: Class attribute. Whether replicas are corrected before they step, by the previous z (CROSSBOW). Otherwise
            they are corrected after their step.
        served_too: Class attribute. Whether each learner may also exchange separately with z at a parameter server.
        elasticity: α.
        outer: Optimiser of z.
        outer_rate: Learning rate of the outer optimiser.

    Raises:
        ValueError: A value is out of range, or would let replicas and z diverge from each other.
    """

    averages = True
    table = "averaging"
    topology = "replicas"
    early: ClassVar[bool] = False
    served_too: ClassVar[bool] = False
    default_modulation = "none"
    modulations = ("none",)
    grants_on_push = False

    PERIOD: ClassVar[int] = 1
    OPTIMIZER: ClassVar[str] = "sgd"
    LEARNING_RATE: ClassVar[float] = 1.0
    MOMENTUM: ClassVar[float] = 0.0
    OPTIONS: ClassVar[dict[str, Any]] = {}
    RESTART: ClassVar[bool] = False

    def __init__(
        self,
        learners: int,
        period: int | None = None,
        elasticity: float | None = None,
        outer: Mapping[str, Any] | None = None,
        restart: bool | None = None,
        keep_momentum: bool = False,
        local_elasticity: float | None = None,
        served: bool = False,
        blocks: Sequence[int] = (),
    ) -> None:
        super().__init__(learners)
        self.period = self.PERIOD if period is None else period
        self.served = served
        self.gradients_per_update = 1 if served else learners
        self.outer = self._outer(outer or {})
        self.restart = self.RESTART if restart is None else restart
        self.keep_momentum = keep_momentum
        usual = self.usual_elasticity(self.outer.momentum)
        self._usual = usual.text if elasticity is None else ""
        self.elasticity = α = usual.of(learners) if elasticity is None else elasticity
        rate = α * self.gradients_per_update if self.early else self.LEARNING_RATE
        self.outer_rate: float = (outer or {}).get("learning_rate", rate)
        self._local, self._blocks = local_elasticity, sorted(set(blocks))
        if served:
            self._check_served(plain="learning_rate" not in (outer or {}) and self.outer == Outer("sgd", 0.0, {}))
        self._check_stable()
        self._check_blocks()

    def _outer(self, given: Mapping[str, Any]) -> Outer:
        """Returns the optimiser of z. An optimiser of another name ignores the rule's momentum and options."""
        own = given.get("name", self.OPTIMIZER) == self.OPTIMIZER
        momentum = given.get("momentum", self.MOMENTUM if own else 0.0)
        options = given.get("options") or (self.OPTIONS if own and momentum else {})
        return Outer(given.get("name", self.OPTIMIZER), momentum, dict(options))

    @classmethod
    def usual_elasticity(cls, momentum: float | None = None) -> Elasticity:
        """Returns the default of α. A subclass may have a formula of its own.

        Args:
            momentum: Momentum of the outer optimiser. None: the rule's own.
        """
        if not cls.early:
            return WHOLE
        return SHARED if (cls.MOMENTUM if momentum is None else momentum) else SHARED_WITH_CENTRE

    def _check_stable(self) -> None:
        """Raises ValueError if the gap between z and the replicas' mean would grow (crossbow-facts, ambiguity 2)."""
        α, k, μ, rate = self.elasticity, self.learners, self.outer.momentum, self.outer_rate
        if not self.early and not 0 <= α <= 1:
            raise ValueError(f"[averaging] elasticity = {α:g} is not supported; use 0 to 1")
        if self.early and not 0 <= α < 2:
            raise ValueError(f"[averaging] elasticity = {α:g} is not supported; use 0 to less than 2")
        if self.outer.optimizer != "sgd" or self._blocks:
            return  # the steps of others do not grow with the gap; of blocks `_check_blocks` takes care
        if self.served and α <= 0.5:
            return  # z and replica move at most to each other, even if other replicas have moved z in between
        gap, velocity = np.eye(2)
        gap, _, velocity = self._averaged(gap, velocity)
        if _runs_away(np.array([gap, velocity]), neutral=not (α or rate)):
            if self.served:
                raise ValueError(
                    f"[averaging] elasticity = {α:g} diverges with {k} replicas and a server; "
                    f"use {f'less than {2 / (k + 1):.4g}' if k < 3 else '0 to 0.5'}"
                )
            most = (
                f" (with the default outer.learning_rate less than {2 * (1 + μ) / (k + 1 + μ):.4g})"
                if self.early
                else ""
            )
            raise ValueError(
                f"[averaging] elasticity = {α:g} and outer.learning_rate = {rate:g} diverge with {k} replicas and "
                f"outer.momentum = {μ:g}; use a smaller elasticity{most} or outer.learning_rate"
            )

    def _averaged(self, gap: Row, velocity: Row) -> tuple[Row, Row, Row]:
        """Returns the effect of one average with the outer optimiser sgd, as rows of a linear map.

        Args:
            gap: Gap from z to the mean of the averaged replicas, before the average.
            velocity: Velocity of the outer optimiser (torch's momentum buffer).

        Returns:
            The gap afterwards, the move of z, and the velocity afterwards.
        """
        α, (_, μ, options) = self.elasticity, self.outer
        given = options.get("dampening", 0.0) if μ else 0.0
        dampening = given if isinstance(given, int | float) else 0.0  # torch says what is wrong with it
        velocity = μ * velocity + (1 - dampening) * gap
        direction = gap + μ * velocity if options.get("nesterov") else velocity
        # A server meets all replicas one by one; together they move z as far as one average does.
        moved = self.outer_rate * self.learners / self.gradients_per_update * direction
        return (1 - α) * gap - moved if self.early else (1 - α) * (gap - moved), moved, velocity

    def local_elasticity(self, block: int) -> float:
        """Returns α towards the reference of a block, given its number of learners."""
        return 1 / (block + 1) if self._local is None else self._local

    def _check_blocks(self) -> None:
        """Raises ValueError for keys that blocks do not support, or that would let replicas and references diverge."""
        if self._local is not None and not self._blocks:
            raise ValueError("[averaging] local_elasticity is not supported without blocks; use topology hierarchical")
        if self._blocks and not self.early:
            raise ValueError(
                f"[topology] name = 'hierarchical' is not supported with protocol {type(self).__name__.lower()}; "
                "use protocol easgd or sma"
            )
        for block in self._blocks:
            local = self.local_elasticity(block)
            if local and not 0 < local * (block + 1) < 2:
                raise ValueError(
                    f"[averaging] local_elasticity = {local:g} is not supported with blocks of {block} learners; "
                    f"use 0 to less than {2 / (block + 1):.4g}"
                )
            neutral = not local or not (self.elasticity or self.outer_rate)
            if self.outer.optimizer == "sgd" and _runs_away(self._period_in(block), neutral=neutral):
                raise ValueError(
                    f"[averaging] local_elasticity = {local:g}, elasticity = {self.elasticity:g} and "
                    f"outer.learning_rate = {self.outer_rate:g} diverge with {self.learners} blocks of {block}; "
                    "use smaller values"
                )

    def _period_in(self, block: int) -> Row:
        """Returns the effect of a period on the gaps from z to replica and reference, and on the velocity, for equal
        blocks."""
        a = self.local_elasticity(block)
        replica, reference, velocity = np.eye(3)
        replica, reference = replica + a * (reference - replica), reference + a * block * (replica - reference)
        local = np.array([replica, reference, velocity])
        reference, moved, velocity = self._averaged(reference, velocity)
        both = np.array([replica - moved, reference, velocity])
        period: Row = both @ np.linalg.matrix_power(np.array(local), self.period - 1)
        return period

    def _check_served(self, *, plain: bool) -> None:
        """Raises ValueError for keys that need all replicas at once."""
        where = "[topology] options.parameter_server = true is not supported with"
        if not self.served_too:
            raise ValueError(f"{where} protocol {type(self).__name__.lower()}; use protocol easgd")
        if not plain or self.restart:
            key = "[averaging] restart = true" if plain else "[averaging.outer]"
            raise ValueError(f"{where} {key}; remove {key.partition(' = ')[0]}")

    @property
    def answered_elasticity(self) -> float:
        """Returns the equivalent α towards weights that have already moved by α towards the replica."""
        return self.elasticity / (1 - self.elasticity)

    @property
    def waits(self) -> bool:
        return not self.served

    @property
    def text(self) -> str:
        """Returns the rule in words, with the resulting values of its defaults."""
        often = f"every {self.period} mini-batches" if self.period > 1 else "every mini-batch"
        beside = "each learner separately with the server" if self.served else "in parallel with the next one"
        towards = f"before the step, {beside}" if self.early else "after the step"
        synchronous = "synchronous" if self.waits else "asynchronous"
        usual = f"{self._usual} = " if self._usual not in ("", WHOLE.text) else ""
        name, momentum, options = self.outer
        more = f", momentum {momentum:g}" if momentum else ""
        more += "".join(f", {key} = {value}" for key, value in options.items())
        restart = "; replicas restart when the rate drops" if self.restart else ""
        outer = f"outer {name}, rate {self.outer_rate:.4g}{more}{restart}"
        if not self._blocks:
            return f"{synchronous}, {often}: α = {usual}{self.elasticity:.4g}, {towards}; {outer}"
        local = " to ".join(f"{α:.4g}" for α in sorted({self.local_elasticity(block) for block in self._blocks}))
        return (
            f"{synchronous}, every mini-batch: α = {local} in each block, before the step, "
            f"in parallel with the next one; {often}: references by α = {usual}{self.elasticity:.4g}; {outer}"
        )

    @property
    def expected_staleness(self) -> float:
        return super().expected_staleness if self.served else 0.0

    def pull_granted(self, learner: int, timestamp: int, clock: Clock) -> bool:
        return self.served or clock.timestamp > timestamp


def _runs_away(step: Row, *, neutral: bool) -> bool:
    """Returns whether repeated application of a linear map grows, or does not decay.

    Args:
        step: The map, a square matrix.
        neutral: Whether one component is meant to stay constant, such as the gap of replicas that are not moved.
    """
    growth = float(abs(np.linalg.eigvals(step)).max())
    return growth > 1 + _ROUNDING if neutral else growth >= 1 - _ROUNDING


_ROUNDING = 1e-9


SHAPES: dict[str, dict[str, Any]] = {
    "replicas": {},
    "replicas, options.groups": {},
    "replicas, options.parameter_server": {"served": True},
    "hierarchical": {"blocks": (2, 2)},
}
"""Keys of `[topology]` for averaging, with the arguments that a rule gets for them."""


class Pair(NamedTuple):
    """Combination of a rule and a shape of topology, for the code, `rudra validate` and the documentation.

    Attributes:
        protocol: Name of the rule.
        shape: Key of `SHAPES`.
        synchronous: Whether every average takes one difference of each learner.
        elasticity: Default of α. k is the number of averaged replicas or references.
    """

    protocol: str
    shape: str
    synchronous: bool
    elasticity: str


def pairs(rules: Mapping[str, type[Protocol]]) -> list[Pair]:
    """Returns all shapes of topologies that each averaging rule supports, according to the rules themselves."""
    found = []
    averaging = {name: rule for name, rule in rules.items() if issubclass(rule, Averaging)}
    for name, rule in averaging.items():
        for shape, told in SHAPES.items():
            try:
                made = rule(2, **told)
            except ValueError:
                continue
            found.append(Pair(name, shape, made.waits, rule.usual_elasticity().text))
    return found
