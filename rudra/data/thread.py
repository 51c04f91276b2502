"""Thread that makes the user's own datasets and draws their samples.

Some objects may be used only in the thread that made them, for example SQLite's connections. Every other thread sends
its calls to this thread. Input threads do so too, so the next mini-batches are prepared while a learner computes.
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
    """Callable that calls a function with its arguments in some thread, and returns the result."""

    def __call__(self, function: Callable[..., T], /, *args: Any) -> T: ...


class _DataThread:
    """Thread and its queue of calls."""

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
            except BaseException as error:  # the calling thread raises it
                future.set_exception(error)
            del future, function, args  # holds no data while waiting


_lock = threading.Lock()
_thread: _DataThread | None = None


def _forget() -> None:
    """Removes the thread in a forked process, which has no threads."""
    global _lock, _thread
    _lock, _thread = threading.Lock(), None


os.register_at_fork(after_in_child=_forget)


def in_data_thread(function: Callable[..., T], /, *args: Any) -> T:
    """Calls a function in the data thread of this process, and waits for its result.

    Raises:
        BaseException: Exception of the function.
    """
    global _thread
    with _lock:
        _thread = _thread or _DataThread()
    return _thread.call(function, args)


def at_once(function: Callable[..., T], /, *args: Any) -> T:
    """Calls a function in the calling thread, for objects that were made there."""
    return function(*args)
