"""Construction of a protocol from its name."""

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from protocols import probe
from protocols.averaging import Pair, pairs
from protocols.base import Protocol
from protocols.correction import Correction
from protocols.modulation import MODULATIONS, Modulation


def make(
    protocol: str | Callable[..., Protocol],
    *,
    learners: int,
    minibatch_size: float,
    n: int | None = None,
    modulation: str | Callable[..., Modulation] | None = None,
    reference_batch_size: int = 128,
    scale_invariant_optimizer: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Protocol:
    """Makes a protocol ready for use.

    Args:
        protocol: Class (or callable) that returns a `Protocol`, or the name of a shipped one.
        learners: λ.
        minibatch_size: μ, or kμ for a compute group.
        n: Splitting parameter, for protocols that have one.
        modulation: Class (or callable) that returns a `Modulation`, or a key of `MODULATIONS`. None or "auto": the
            protocol's own.
        reference_batch_size: B.
        scale_invariant_optimizer: Name of the job's optimiser if its step ignores the gradient's scale.
        options: Further keyword arguments of the class.

    Raises:
        KeyError: The name is unknown.
        ValueError: n is out of range, the modulation does not fit, or the class breaks the rules of `Protocol`. The
            text is one line.
    """
    factory: Callable[..., Protocol] = shipped()[protocol] if isinstance(protocol, str) else protocol
    own = {id(of): known for known, of in shipped().items()}
    name = str(own.get(id(factory)) or getattr(factory, "__qualname__", repr(factory)))
    arguments = dict(options or {})
    if "n" in arguments:
        raise ValueError("[protocol] options.n is not supported; use [protocol] n")
    if n is not None:
        arguments["n"] = n
    _check_arguments(name, factory, learners, arguments)
    try:
        made = factory(learners, **arguments)
        _check(made)
        if type(made) not in shipped().values():
            probe.check(lambda: factory(learners, **arguments))
    except ValueError as error:
        if str(error).startswith("["):  # names its table itself
            raise
        raise ValueError(f"[protocol] {error if name in shipped() else f'{name}: {error}'}") from None
    key = made.default_modulation if modulation in (None, "auto") else modulation
    rule = MODULATIONS[key] if isinstance(key, str) else key
    shown = key if isinstance(key, str) else next((k for k, of in MODULATIONS.items() if of is key), "")
    if shown not in made.modulations and (shown or made.modulations == ("none",)):
        shown = shown or str(getattr(rule, "__qualname__", rule))
        valid = ", ".join(made.modulations)
        raise ValueError(f"[protocol] modulation = '{shown}' is not supported with protocol {name}; use {valid}")
    try:
        made.modulation = rule(learners, minibatch_size, made.n, reference_batch_size)
        if not shown:
            probe.check_modulation(made.modulation)
    except (TypeError, ValueError) as error:
        raise ValueError(f"[protocol] modulation: {getattr(rule, '__qualname__', rule)}: {error}") from None
    if made.modulation.weighs and scale_invariant_optimizer:
        raise ValueError(
            f"[protocol] modulation = '{made.modulation.name}' has no effect with [optimizer] name = "
            f"'{scale_invariant_optimizer}'; use sgd, or modulation = 'mean_staleness'"
        )
    return made


def make_correction(correction: str | Callable[..., Correction], options: Mapping[str, Any]) -> Correction:
    """Makes a correction ready for use.

    Args:
        correction: Class (or callable) that returns a `Correction`, or the name of a shipped one.
        options: Keyword arguments of the class.

    Raises:
        KeyError: The name is unknown.
        ValueError: The class does not accept the options, or makes no correction. The text is one line.
    """
    factory: Any = corrections()[correction] if isinstance(correction, str) else correction
    name = next((known for known, of in corrections().items() if of is factory), None)
    name = name or str(getattr(factory, "__qualname__", repr(factory)))
    text = f"[protocol] correction: {name} makes no correction; use a class of protocols.Correction"
    if not callable(factory) or (isinstance(factory, type) and not issubclass(factory, Correction)):
        raise ValueError(text)
    signature = inspect.signature(factory)
    try:
        signature.bind(**options)
    except TypeError as error:
        takes = ", ".join(signature.parameters) or "none"
        raise ValueError(f"[protocol] correction_options: {name}: {error}; its parameters: {takes}") from None
    try:
        made = factory(**options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"[protocol] correction_options: {name}: {error}") from None
    if not isinstance(made, Correction):
        raise ValueError(text)
    return made


def _check_arguments(name: str, factory: object, learners: int, arguments: Mapping[str, Any]) -> None:
    """Raises ValueError if the factory does not accept these arguments. Its own exceptions are passed on."""
    try:
        read = _signature if isinstance(factory, type) else inspect.signature
        signature = read(factory)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise ValueError(f"[protocol] name: {name} makes no protocol; use a class of protocols.Protocol") from None
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


_signature = lru_cache(maxsize=64)(inspect.signature)  # a job makes its protocol many times


def _check(protocol: object) -> None:
    """Raises ValueError if a user's protocol would fail or wait forever later."""
    if not isinstance(protocol, Protocol):
        raise ValueError(f"makes a {type(protocol).__name__}; use a class of protocols.Protocol")
    if not hasattr(protocol, "gradients_per_update"):
        raise ValueError("its __init__ must call super().__init__(learners)")
    c = protocol.gradients_per_update
    if c < 1:
        raise ValueError(f"gradients_per_update = {c} is not supported; use 1 or more")
    if protocol.ordered and c != protocol.learners:
        raise ValueError(f"gradients_per_update = {c} is not supported with ordered = True; use {protocol.learners}")


def rule_of(name: str) -> type[Protocol]:
    """Returns the class of a shipped protocol, or the base class for any other name."""
    return shipped().get(name, Protocol)


def averaging_pairs() -> list[Pair]:
    """Returns all pairs of topology and shipped protocol that average replicas."""
    return pairs(shipped())


def averaging_names(on: str = "replicas") -> str:
    """Returns the names of the shipped protocols that average replicas on a topology."""
    return ", ".join(pair.protocol for pair in averaging_pairs() if pair.shape == on)


@cache
def shipped() -> dict[str, type[Protocol]]:
    """Returns name -> class of every protocol in this package ("async" is a keyword, so its module is async_)."""
    return {name: module.PROTOCOL for name, module in _modules().items() if hasattr(module, "PROTOCOL")}


@cache
def corrections() -> dict[str, type[Correction]]:
    """Returns name -> class of every correction in this package."""
    return {name: module.CORRECTION for name, module in _modules().items() if hasattr(module, "CORRECTION")}


def _modules() -> dict[str, ModuleType]:
    names = sorted(module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)]))
    return {name.rstrip("_"): importlib.import_module(f"protocols.{name}") for name in names}
