"""Probes: methods that a benchmark may wrap while it runs, to look at a run, to time a part of it or to leave it out.

The methods are marked with `probed`, which costs nothing. No other method of Rudra is wrapped.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

Method = Callable[..., Any]
F = TypeVar("F", bound=Method)

_MARK = "__probed__"


def probed(method: F) -> F:
    """Marks a method that `wrapped` may wrap."""
    setattr(method, _MARK, True)
    return method


@contextmanager
def wrapped(owner: type, name: str, wrap: Callable[[Method], Method]) -> Iterator[None]:
    """Has calls of a method go to `wrap(method)` until the block ends, in this process.

    Args:
        owner: class whose objects are concerned, and those of its subclasses that do not override the method.
        name: of the method.
        wrap: gets the method, whose first argument is the object, and returns what is called in its place.

    Raises:
        TypeError: the method is not marked with `probed`.
    """
    method = getattr(owner, name)
    if not getattr(method, _MARK, False):
        raise TypeError(f"{owner.__name__}.{name} is no probe; mark it with rudra.probe.probed")
    own = name in vars(owner)
    setattr(owner, name, wrap(method))
    try:
        yield
    finally:
        if own:
            setattr(owner, name, method)
        else:
            delattr(owner, name)
