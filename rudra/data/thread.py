"""The thread in which the user's own datasets are made and asked for samples.

Some objects may be used only in the thread that made them: SQLite's connections, for example. Every other thread asks
this one, an input thread too, so that the next mini-batches are still prepared while a learner computes.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

_Asked = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...]]


class Ask(Protocol):
    """Calls a function with its arguments, in some thread, and returns what it returns."""

    def __call__(self, function: Callable[..., T], /, *args: Any) -> T: ...


class _DataThread:
    """The thread and its queue of calls."""

    def __init__(self) -> None:
        self._asked: SimpleQueue[_Asked] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="rudra-data", daemon=True)
        self._thread.start()

    def call(self, function: Callable[..., T], args: tuple[Any, ...]) -> T:
        if threading.current_thread() is self._thread:
            return function(*args)
        future: Future[T] = Future()
        self._asked.put((future, function, args))
        return future.result()

    def _serve(self) -> None:
        while True:
            future, function, args = self._asked.get()
            try:
                future.set_result(function(*args))
            except BaseException as error:  # the thread that asked raises it
                future.set_exception(error)
            del future, function, args  # while this thread waits it holds no data


_lock = threading.Lock()
_thread: _DataThread | None = None


def _forget() -> None:
    """A forked process has no threads."""
    global _lock, _thread
    _lock, _thread = threading.Lock(), None


os.register_at_fork(after_in_child=_forget)


def in_data_thread(function: Callable[..., T], /, *args: Any) -> T:
    """Calls a function in the data thread of this process, and waits for its result.

    Raises:
        BaseException: what the function raises.
    """
    global _thread
    with _lock:
        _thread = _thread or _DataThread()
    return _thread.call(function, args)


def at_once(function: Callable[..., T], /, *args: Any) -> T:
    """Calls a function in the thread that asks, for objects that were made there."""
    return function(*args)
