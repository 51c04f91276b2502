"""Handling of stop requests to a rank from a user or the launcher."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from rudra.mpi.driver import Rank
from rudra.mpi.failures import survivable
from rudra.mpi.forkserver import launcher

GRACE_S = 5.0
"""Time for the statistics server to save results after a rank's failure, and for all ranks to stop in order."""

SAVE_S = 0.4
"""Time after which the statistics server writes the existing results to the disk. mpirun may be ending all ranks, and
kills them a second after its request."""

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""Signals that ask a run to stop, on any rank. Before the roles exist they end the rank, which the others notice."""


class StopSignals:
    """The signals that ask a rank to stop, after its set-up.

    Args:
        secure: saves the existing results before a possible kill of this rank. None: another rank has the results.

    Attributes:
        rank: rank that will be stopped, or None if not created yet.
        told: whether a stop signal has arrived.
        asked: whether a stop signal arrived that is not from the launcher.
    """

    def __init__(self, secure: Callable[[], None] | None) -> None:
        self.rank: Rank | None = None
        self.told = False
        self.asked = False
        self._secure = secure
        self._secured = False
        self._launcher = launcher()

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Stops the rank in order when a signal arrives."""
        alarm = signal.signal(signal.SIGALRM, self._press)
        with on_stops(self._interrupt):
            yield
        signal.setitimer(signal.ITIMER_REAL, 0)  # Python's own shutdown takes some time
        signal.signal(signal.SIGALRM, alarm)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """Stops the run in order, and saves the existing results first if the launcher may soon kill all ranks."""
        self.told = True
        self.asked |= number != signal.SIGTERM
        if self.rank is not None:
            self.rank.stop()
        if number == signal.SIGTERM:
            signal.setitimer(signal.ITIMER_REAL, GRACE_S if self._secure is None else SAVE_S)

    def _press(self, number: int, frame: FrameType | None) -> None:
        """Acts when some time has passed since this rank was asked to end: saves results, or ends the rank."""
        alone = launcher() != self._launcher
        if self.rank is None:
            return
        if self._secure is not None and not self._secured and not alone:
            self._secured, self.rank.signalled.urgent = True, self._secure
            signal.setitimer(signal.ITIMER_REAL, GRACE_S)
        elif alone or not survivable():  # otherwise the other ranks stop in order, or notice the death
            self.rank.signalled.ended = True


@contextmanager
def on_stops(handler: Any, *, after: Any = None) -> Iterator[None]:
    """Handles stop signals with `handler`, and afterwards with `after` or as before. Ignored signals stay ignored."""
    before = {number: signal.getsignal(number) for number in STOPS if signal.getsignal(number) != signal.SIG_IGN}
    for number in before:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, usual in before.items():
            signal.signal(number, usual if after is None else after)
