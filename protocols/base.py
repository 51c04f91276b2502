"""The interface of a protocol, and how one is made from its name."""

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from protocols.modulation import MODULATIONS, Modulation


class Clock(NamedTuple):
    """What a protocol may know of the server's progress.

    Attributes:
        timestamp: timestamp of the server's weights: the number of updates so far.
        pushed: number of gradients received so far from each learner (or compute group), in learner order; empty on a
            server of a tree, which does not know them.
    """

    timestamp: int
    pushed: Sequence[int]


class Protocol:
    """Base class of all protocols: when the server updates the weights, and which learners wait for it.

    As it stands it is fully asynchronous: each gradient makes an update, and no learner waits. A subclass changes
    `gradients_per_update`, `update_due` or `pull_granted`. Its keyword arguments are the job's `protocol.options`.
    Compute groups count as one learner each.

    Args:
        learners: λ, the number of learners.

    Attributes:
        learners: λ, the number of learners.
        gradients_per_update: c, the number of gradients that make an update; at least 1.
        n: splitting parameter, by which modulation `n` divides the learning rate; λ unless a subclass sets it.
        outer_rate: rate at which the weights are updated by the mean of replicas' differences; None: gradients make
            updates, at the rate of the schedule.
        period: mini-batches of a learner that make one of its gradients; more than 1 only under `Averaging`.
        modulation: how the learning rate depends on staleness and learners; set when the job makes the protocol.
        ordered: class attribute. True: the server takes one gradient of each learner for an update, and adds them in
            learner order; `gradients_per_update` must then be λ.
        grants_on_push: class attribute. True: any gradient that arrives may let `pull_granted` say yes to a waiting
            learner, so the server asks again after each. False: only an update may, as where the rule looks at
            timestamps alone. This costs less, and a tree of servers needs it.
        replayable: class attribute. Whether the record of the applied gradients determines the weights bit for bit.
        default_modulation: class attribute. Name of the modulation that `modulation = "auto"` stands for.
        modulations: class attribute. Names of the modulations that the protocol allows.
    """

    ordered: ClassVar[bool] = False
    grants_on_push: ClassVar[bool] = True
    replayable: ClassVar[bool] = True
    default_modulation: ClassVar[str] = "n"
    modulations: ClassVar[tuple[str, ...]] = tuple(MODULATIONS)
    modulation: Modulation
    period: int = 1
    outer_rate: float | None = None

    def __init__(self, learners: int) -> None:
        self.learners = learners
        self.n = learners
        self.gradients_per_update = 1

    @classmethod
    def label(cls, name: str, n: int | None) -> str:
        """What people call a run under it, of the job's name for it and n."""
        return name

    @classmethod
    def family(cls, name: str, n: int | None, learners: int) -> str:
        """What people call the runs that make one curve over λ."""
        return cls.label(name, n)

    @property
    def waits(self) -> bool:
        """Whether a learner may have to wait: a subclass has a `pull_granted` of its own."""
        return type(self).pull_granted is not Protocol.pull_granted

    @property
    def expected_staleness(self) -> float:
        """⟨σ⟩, the mean staleness to expect of all gradients where no learner waits, however fast each learner is.

        Every update makes the gradients staler that are under way, λ - 1 of them, and applies c. Where c = ⌊λ/n⌋ was
        rounded down that is more than n.
        """
        return (self.learners - 1) / self.gradients_per_update

    def update_due(self, pending: int) -> bool:
        """Whether the server updates the weights now.

        Args:
            pending: number of gradients that the server has received since its last update.
        """
        return pending >= self.gradients_per_update

    def rate_scale(self, samples: int) -> float:
        """Factor on the learning rate of an update that applies so many samples."""
        return 1.0

    def pull_granted(self, learner: int, timestamp: int, clock: Clock) -> bool:
        """Whether a learner that asks for weights is answered now. If not, it waits, and the server asks again later.

        Args:
            learner: number of the learner that asks, from 0.
            timestamp: timestamp of the weights that the learner has.
            clock: the server's progress.
        """
        return True


def make(
    protocol: str | Callable[..., Protocol],
    *,
    learners: int,
    minibatch_size: float,
    n: int | None = None,
    modulation: str = "auto",
    reference_batch_size: int = 128,
    scale_invariant_optimizer: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Protocol:
    """Makes a protocol ready for use.

    Args:
        protocol: a class (or callable) that gives a `Protocol`, or the name of a shipped one.
        learners: λ.
        minibatch_size: μ; of a compute group kμ.
        n: the splitting parameter, for protocols that take one.
        modulation: a key of `MODULATIONS`, or "auto" for the protocol's own.
        reference_batch_size: B.
        scale_invariant_optimizer: name of the job's optimiser if its step ignores the gradient's scale.
        options: further keyword arguments of the class.

    Raises:
        KeyError: unknown name.
        ValueError: n out of range, a modulation that does not fit, or a class that breaks the rules of
            `Protocol`; one line.
    """
    factory: Callable[..., Protocol] = shipped()[protocol] if isinstance(protocol, str) else protocol
    own = {id(of): known for known, of in shipped().items()}
    name = str(own.get(id(factory)) or getattr(factory, "__qualname__", repr(factory)))
    arguments = dict(options or {})
    if "n" in arguments:
        raise ValueError("[protocol] options.n is not possible; n is a key of [protocol] itself")
    if n is not None:
        arguments["n"] = n
    _check_arguments(name, factory, learners, arguments)
    try:
        made = factory(learners, **arguments)
        _check(made)
    except ValueError as error:
        raise ValueError(f"[protocol] {error if name in shipped() else f'{name}: {error}'}") from None
    key = made.default_modulation if modulation == "auto" else modulation
    if key not in made.modulations:
        raise ValueError(f"[protocol] modulation '{key}' does not fit {name}; valid: {', '.join(made.modulations)}")
    if key == "gradient_staleness" and scale_invariant_optimizer:
        raise ValueError(
            f"[protocol] modulation 'gradient_staleness' has no effect with {scale_invariant_optimizer}, "
            "whose step ignores the gradient's scale; use sgd, or modulation 'mean_staleness'"
        )
    made.modulation = MODULATIONS[key](learners, minibatch_size, made.n, reference_batch_size)
    return made


def _check_arguments(name: str, factory: object, learners: int, arguments: Mapping[str, Any]) -> None:
    """Raises ValueError where the factory does not take these; what it raises itself is its own affair."""
    try:
        signature = inspect.signature(factory)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise ValueError(f"[protocol] name: {name} is not a class or function that makes a protocol") from None
    try:
        signature.bind(learners, **arguments)
    except TypeError as error:
        takes = list(signature.parameters)[1:]
        unknown = sorted(set(arguments) - set(takes))
        valid = f"; valid: {', '.join(takes)}" if takes else ""
        if name in shipped() and unknown == ["n"]:
            valid = "; leave it out, or reset it with --set protocol.n="
        text = f" takes no {', '.join(unknown)}{valid}" if unknown else f": {error}"
        raise ValueError(f"[protocol] {name}{text}") from None


def _check(protocol: object) -> None:
    """Raises ValueError where a user's protocol could only fail, or wait forever, later on."""
    if not isinstance(protocol, Protocol):
        raise ValueError(f"gives a {type(protocol).__name__}, which is not a protocols.Protocol")
    if not hasattr(protocol, "gradients_per_update"):
        raise ValueError("its __init__ must call super().__init__(learners)")
    c = protocol.gradients_per_update
    if c < 1:
        raise ValueError(f"gradients_per_update = {c}; valid: 1 or more")
    if protocol.ordered and c != protocol.learners:
        raise ValueError(f"gradients_per_update = {c}; an ordered protocol takes one of each, so {protocol.learners}")


def rule_of(name: str) -> type[Protocol]:
    """The class of a shipped protocol; of another one's name, what all have in common."""
    return shipped().get(name, Protocol)


@cache
def shipped() -> dict[str, type[Protocol]]:
    """Name -> class of every protocol in this package ("async" is a keyword, so its module is async_)."""
    names = (
        m.name
        for m in pkgutil.iter_modules([str(Path(__file__).parent)])
        if m.name not in {"base", "modulation", "averaging"}
    )
    return {name.rstrip("_"): importlib.import_module(f"protocols.{name}").PROTOCOL for name in sorted(names)}
