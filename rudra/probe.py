"""Probes: methods that a benchmark may wrap, in order to watch a run, to time a part of it or to skip that part.

`probed` marks these methods and costs nothing. `wrapped` refuses all other methods.
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
    """Replaces a method by `wrap(method)` until the block ends, in this process.

    Args:
        owner: class of the method. The change also affects subclasses that do not override the method.
        name: name of the method.
        wrap: function that gets the method as a function of the object and its arguments, and returns the replacement.

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
