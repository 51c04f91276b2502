"""What a rank does when somebody, or the launcher, asks it to stop."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from rudra.mpi.driver import Rank
from rudra.mpi.failures import survivable
from rudra.mpi.forkserver import launcher

GRACE_S = 5.0
"""How long a failing rank leaves the statistics server to save the results, an ending one all to stop in order."""

SAVE_S = 0.4
"""mpirun may be ending everybody, who are killed a second after they were told; so the statistics server brings what
there is to the disk after this time."""

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""What asks a run to stop, on whichever rank; before there are roles it ends the rank, which the others notice."""


class StopSignals:
    """The signals that ask a rank to stop, from the end of its set-up on.

    Args:
        secure: saves what there is, should this rank be killed in a moment; None: other ranks have the results.

    Attributes:
        rank: that is stopped; None: not made yet.
        told: whether a signal has come.
        asked: whether one came from somebody who is not the launcher.
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
        """Stops the rank in order when a signal comes."""
        alarm = signal.signal(signal.SIGALRM, self._press)
        with on_stops(self._interrupt):
            yield
        signal.setitimer(signal.ITIMER_REAL, 0)  # Python's own end takes its time
        signal.signal(signal.SIGALRM, alarm)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """Stops the run in order; where the launcher may soon kill everybody, what there is is saved before."""
        self.told = True
        self.asked |= number != signal.SIGTERM
        if self.rank is not None:
            self.rank.stop()
        if number == signal.SIGTERM:
            signal.setitimer(signal.ITIMER_REAL, GRACE_S if self._secure is None else SAVE_S)

    def _press(self, number: int, frame: FrameType | None) -> None:
        """Some time has passed since the launcher, or somebody, told this rank to end."""
        alone = launcher() != self._launcher
        if self.rank is None:
            return
        if self._secure is not None and not self._secured and not alone:
            self._secured, self.rank.signalled.urgent = True, self._secure
            signal.setitimer(signal.ITIMER_REAL, GRACE_S)
        elif alone or not survivable():  # else the others go on to stop in order, or notice who is killed
            self.rank.signalled.ended = True


@contextmanager
def on_stops(handler: Any, *, after: Any = None) -> Iterator[None]:
    """What a rank does when it is asked to stop; then `after`, or what it did before. What is ignored stays so."""
    before = {number: signal.getsignal(number) for number in STOPS if signal.getsignal(number) != signal.SIG_IGN}
    for number in before:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, usual in before.items():
            signal.signal(number, usual if after is None else after)
