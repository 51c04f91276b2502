"""Streams: work that a device does in order, while the host does something else.

Work gives numbers, such as a loss. They come back with it, so that the host never waits for them separately. The base
class is the stream of a CPU. It does all work at once, so that devices and CPUs take the same code.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ClassVar

import torch

from rudra.core.events import Event

Number = float | torch.Tensor
"""A number: known, or a tensor of one element on a device that may still compute it."""


class Pending(ABC):
    """Work of a stream that may not be done yet.

    Attributes:
        threaded: Class attribute. Whether a thread of this process does the work. It may need the core of this thread.
        gathers: Class attribute. Whether no device works, and only a request of another role can end the wait.
    """

    threaded: ClassVar[bool] = False
    gathers: ClassVar[bool] = False

    @abstractmethod
    def done(self) -> bool:
        """Returns whether the device has done it, without waiting."""

    @abstractmethod
    def numbers(self) -> list[float]:
        """Returns the numbers that the work gave. Waits until it is done."""

    def when_done(self, call: Callable[[], None]) -> None:  # noqa: B027
        """Calls a function once the work is done, from any thread. It is not called if only `done` finds that out."""


class Done(Pending):
    """Work that is done.

    Args:
        numbers: Numbers that it gave.
    """

    def __init__(self, numbers: list[float]) -> None:
        self._numbers = numbers

    def done(self) -> bool:
        return True

    def numbers(self) -> list[float]:
        return self._numbers


class Stream:
    """Queue of work on a device. The base class does work at once."""

    def submit(self, work: Callable[[], Sequence[Number]], after: Sequence[Pending] = ()) -> Pending:
        """Appends work that begins after all earlier work of this stream. The host does not wait.

        Args:
            work: Uses the device, and returns numbers. The host may not touch its inputs and outputs before it is done.
            after: Work of other streams of the device that must be done before.

        Raises:
            Exception: An exception of the work. A device may raise it later, in `Pending.done` or `Pending.numbers`.
        """
        return Done(known(work()))

    def close(self) -> None:
        """Ends the threads of the stream, if it has some. It takes no work afterwards."""


def until_done(pending: Pending) -> Iterator[Pending]:
    """Yields work of a device until it is done. The rank does other work meanwhile."""
    while not pending.done():
        yield pending


def known(numbers: Iterable[Number]) -> list[float]:
    """Returns numbers in main memory. Waits for those on a device."""
    return [float(number) for number in numbers]


def finished(work: Iterable[Event | Pending | None]) -> list[Event]:
    """Carries out an action of an executor to its end, and returns its events. Waits where the action does."""
    events: list[Event] = []
    for each in work:
        if isinstance(each, Pending):
            each.numbers()
        elif each is not None:
            events.append(each)
    return events
