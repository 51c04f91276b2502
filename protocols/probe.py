"""State of a protocol: saving, restoring, and detection of undeclared state.

A resumed run and a replay make a protocol again and call `update_due` for the same gradients in the same order. They
agree with the run under two conditions: all changing attributes are part of the state, and only `update_due` changes
them. `check` asks a protocol a few questions, and refuses a protocol that breaks a condition.
"""

import json
import math
import pickle
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from protocols.base import Clock, Protocol
from protocols.modulation import Modulation

_UPDATES, _GRADIENTS = 3, 1000
"""Number of updates, or of gradients, that a protocol is asked about."""


def has_state(protocol: Protocol) -> bool:
    """Returns whether a protocol has a state of its own."""
    return type(protocol).state is not Protocol.state


def saved(protocol: Protocol) -> str:
    """Returns the state of a protocol as JSON. Empty: it has none.

    Raises:
        ValueError: JSON cannot hold the state.
    """
    if not has_state(protocol):
        return ""
    state = protocol.state()
    try:
        if not isinstance(state, dict):
            raise TypeError(f"a {type(state).__name__}")
        return json.dumps(state)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"state() returns a value that JSON cannot hold ({error}); use a dict of numbers, texts, lists and dicts"
        ) from None


def restored(protocol: Protocol, text: str) -> None:
    """Restores the state of a protocol from the result of `saved`.

    Raises:
        ValueError: The protocol does not accept the state.
    """
    try:
        protocol.restore(json.loads(text))
    except Exception as error:  # the user's own code raises what it likes
        raise ValueError(f"restore() does not accept {text[:80]} of state(); correct it ({_text_of(error)})") from error


def check(make: Callable[[], Protocol]) -> None:
    """Asks a protocol about a few gradients, and detects changes of its attributes.

    Args:
        make: Function that makes the protocol.

    Raises:
        ValueError: An attribute changes that is not part of the state, or changes outside `update_due`.
    """
    first, second = make(), make()
    made = _contents(first)
    if own_update_due(first):
        _drive(first, second)
    else:
        _look(first, 0)
    changed = _different(made, _contents(first))
    if changed and not has_state(first):
        raise ValueError(
            f"update_due changes {changed}, which a resumed run would lose; define state() and restore(), or change "
            "nothing"
        )
    text = saved(first)
    third = make()
    if text:
        restored(third, text)
    if lacking := _different(_contents(first), _contents(third)):
        raise ValueError(f"restore() does not restore {lacking}; restore everything that update_due changes")


def check_modulation(modulation: object) -> None:
    """Asks a modulation for a few rates and weights.

    Raises:
        ValueError: It returns invalid numbers, or changes its attributes.
    """
    if not isinstance(modulation, Modulation):
        raise ValueError(f"makes a {type(modulation).__name__}; use a class of protocols.Modulation")
    before = _frozen(modulation)
    for staleness in (0, 1, 7):
        for name in ("rate_factor", "gradient_weight"):
            values = []
            try:
                values = [float(getattr(modulation, name)(staleness)) for _ in range(2)]
            except Exception as error:
                raise ValueError(f"{name}({staleness}) fails ({_text_of(error)})") from error
            if values[0] != values[1] or not 0 <= values[0] < math.inf:
                raise ValueError(f"{name}({staleness}) is {values[0]}, then {values[1]}; return the same number >= 0")
    if _frozen(modulation) != before:
        raise ValueError("it changes its attributes, which a resumed run would lose; use only arguments")


def own_update_due(protocol: Protocol) -> bool:
    """Returns whether a protocol decides otherwise than by `gradients_per_update`."""
    return type(protocol).update_due is not Protocol.update_due


def _drive(first: Protocol, second: Protocol) -> None:
    """Asks two protocols the same questions for a few updates."""
    pending = updates = 0
    for _ in range(_GRADIENTS):
        pending += 1
        answers = [_asked(protocol, pending) for protocol in (first, second)]
        if answers[0] != answers[1]:
            raise ValueError(
                f"update_due({pending}) is {answers[0]}, then {answers[1]}, after the same gradients; use only its "
                "argument and the protocol's state"
            )
        if answers[0]:
            pending, updates = 0, updates + 1
            _look(first, updates)
            if updates == _UPDATES:
                return


def _asked(protocol: Protocol, pending: int) -> bool:
    try:
        return bool(protocol.update_due(pending))
    except Exception as error:
        raise ValueError(f"update_due({pending}) fails ({_text_of(error)})") from error


def _look(protocol: Protocol, updates: int) -> None:
    """Raises ValueError if a question that a replay does not ask changes the protocol."""
    clock = Clock(updates, [updates] * protocol.learners)
    questions: dict[str, Callable[[], Any]] = {"rate_scale": lambda: protocol.rate_scale(1)}
    if type(protocol).pull_granted is not Protocol.pull_granted:
        questions["pull_granted"] = lambda: protocol.pull_granted(0, updates, clock)
    for name, ask in questions.items():
        before = _contents(protocol)
        try:
            ask()
        except Exception as error:
            raise ValueError(f"{name} fails ({_text_of(error)})") from error
        if changed := _different(before, _contents(protocol)):
            raise ValueError(
                f"{name} changes {changed}, but a replay calls it at other times; change it only in update_due"
            )


def _contents(protocol: Protocol) -> dict[str, object]:
    """Returns the attributes of a protocol and of its classes, by name, so that changes can be detected."""
    own = type(protocol).__mro__[: type(protocol).__mro__.index(Protocol)]
    found: dict[str, Any] = {}
    for cls in reversed(own):
        found |= {name: value for name, value in vars(cls).items() if not callable(value)}
        found |= {name: getattr(protocol, name) for name in getattr(cls, "__slots__", ()) if hasattr(protocol, name)}
    cached = [name for cls in own for name, value in vars(cls).items() if isinstance(value, cached_property)]
    found |= {name: value for name, value in vars(protocol).items() if name not in cached}
    return {name: _frozen(value) for name, value in found.items() if not name.startswith("__")}


def _frozen(value: object) -> object:
    """Returns a copy of a value that does not change with it."""
    try:
        return pickle.dumps(value)
    except Exception:  # a lock, a generator, a function: nobody can see into it
        return type(value)


def _same(one: object, other: object) -> bool:
    if one == other or not (isinstance(one, bytes) and isinstance(other, bytes)):
        return one == other
    try:
        return bool(pickle.loads(one) == pickle.loads(other))
    except ValueError:  # arrays
        return False


def _different(before: dict[str, object], after: dict[str, object]) -> str:
    """Returns the names of the attributes that differ."""
    return ", ".join(sorted(name for name in {*before, *after} if not _same(before.get(name), after.get(name))))


def _text_of(error: Exception) -> str:
    """Returns an error of the user's code with its place."""
    place, at = "", error.__traceback__
    while at is not None:
        place, at = f", {Path(at.tb_frame.f_code.co_filename).name}:{at.tb_lineno}", at.tb_next
    return f"{type(error).__name__}: {' '.join(str(error).split())}{place}"
