"""An mpirun that runs: relays what comes of it, looks after its ranks, and brings it to an end."""

import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from rudra.errors import LaunchError
from rudra.machine import end_with_parent
from rudra.mpi.failures import RollCall
from rudra.mpi.relay import Relay

GRACE_S = 30.0
"""How long the ranks may take to stop in order after Ctrl-C, and to write a checkpoint, before they are ended."""

INSISTS_S = 3.0
"""How long mpirun may take to end when it is told to, before it is killed."""

ENDS_S = 6.0
"""How long mpirun may take to end when the run has ended; it hangs now and then when ranks have died."""

LOOKS_S, RARELY_S = 0.1, 0.5
"""How often it is looked whether ranks are alive, before MPI has started and afterwards."""

NOTICES_S = 1.5
"""How long mpirun may take to end by itself when a rank has died before MPI has started, for which others wait."""

OTHERS_S = 15.0
"""How long others may take that have started MPI, and know of such a rank or wait for it for ever."""

TOGETHER_S = 0.3
"""What ends so soon after a rank has not done so because of it."""


class Mpirun:
    """Starts mpirun.

    Args:
        command: with its options, and what it is to start.
        ranks: how many it starts.
        write: takes what is for the user.

    Attributes:
        ranks: how many it starts.
        relay: heard what they wrote.
        stopped_at: when a signal to this process stopped the run; None: none did.
        ended_it: mpirun was ended here, not by itself.
        roll: looks for the ranks of this node.
        dead: those that were the first to end, where MPI has not started on all.

    Raises:
        LaunchError: it does not start.
    """

    def __init__(self, command: Sequence[str], ranks: int, write: Callable[[bytes], None]) -> None:
        self.relay = Relay(write, ranks)
        self.stopped_at: float | None = None
        self.ended_it = False
        self.dead: set[int] = set()
        self.ranks = ranks
        self._looked_at = self._died_at = 0.0
        self._over_at: float | None = None
        self._grace_s = GRACE_S
        self._sent: list[int] = []
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C of the terminal comes to this process only, which stops it in order
                preexec_fn=end_with_parent,  # so that no rank is left over
            )
        except OSError as error:
            raise LaunchError(f"{command[0]} does not start: {error.strerror}") from None
        self.roll = RollCall(self._process.pid, ranks)

    def wait(self) -> int:
        """Waits for the end, and brings it about where it is time; mpirun's exit status."""
        assert self._process.stderr is not None
        try:
            with self._on_signals():
                self._pump(self._process.stderr.fileno())
                while (status := self._process.poll()) is None:
                    time.sleep(0.05)
                    self._keep()
        finally:
            if self._process.poll() is None:  # an error of ours: leave nothing running
                self._process.kill()
                self._process.wait()
            self._process.stderr.close()
        return status

    def _pump(self, pipe: int) -> None:
        """Relays until mpirun has closed its standard error or ended."""
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while True:
                if selector.select(timeout=RARELY_S if self.relay.started else LOOKS_S):
                    data = os.read(pipe, 1 << 16)
                    if not data:
                        break
                    self.relay.feed(data)
                elif self._process.poll() is not None:  # something that outlived mpirun holds the pipe
                    break
                self._keep()
        self.relay.close()

    @contextmanager
    def _on_signals(self) -> Iterator[None]:
        """Ctrl-C, SIGTERM and SIGHUP to this process stop the run; needs the main thread, does nothing elsewhere."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {
            number: signal.signal(number, self._stop)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            if signal.getsignal(number) != signal.SIG_IGN  # as under nohup
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """First asks, then insists, so that the result file is closed in order."""
        if self.stopped_at is None:
            self.stopped_at = time.monotonic()
            if self.relay.started:
                self._send(signal.SIGUSR1)  # mpirun forwards it to every rank
            else:  # there is nothing to stop in order, and perhaps nobody to forward it to
                self._grace_s = 0.0
        else:  # a second Ctrl-C: now
            self._grace_s = 0.0

    def _keep(self) -> None:
        """Ends what does not end by itself, if it is time."""
        now = time.monotonic()
        self._look(now)
        if self._over():
            self._over_at = self._over_at or now
            if now - self._over_at > ENDS_S:
                self._end(signal.SIGKILL)
        if self.dead and now - self._died_at > (OTHERS_S if self.relay.started else NOTICES_S) and not self.ended_it:
            self._look_again()
            if self.dead:
                self._end(signal.SIGTERM)
        if self.stopped_at is not None and now - self.stopped_at > self._grace_s:
            self._send(signal.SIGTERM)
            if now - self.stopped_at > self._grace_s + INSISTS_S:
                self._send(signal.SIGKILL)  # the ranks follow: they die with their parent

    def _look(self, now: float) -> None:
        """Which ranks of this node are there; before MPI has started, nobody else may notice that one is not."""
        if now - self._looked_at < (RARELY_S if self.relay.started else LOOKS_S):
            return
        self._looked_at = now
        self.roll.look()
        if self.relay.started >= self.ranks or self.relay.ends or self.relay.code is not None:
            self.dead = set()
        elif not self.relay.died and (not self.dead or now - self._died_at < TOGETHER_S):
            self._died_at = self._died_at if self.dead else now
            self.dead = self.roll.dead | self.relay.killed_early

    def _look_again(self) -> None:
        """Before anything is made of who was missed: who is, while there are others, whom mpirun has not ended."""
        self.roll.look_again()
        self.dead = self.roll.dead | self.relay.killed_early if self.roll.alive else self.dead

    def _over(self) -> bool:
        """Whether mpirun has nothing to wait for any more."""
        gone = self.roll.here == self.ranks and not self.roll.alive
        told = self.relay.code is not None or self.relay.died or len(self.relay.ends) == self.ranks
        return gone or told or self.ended_it

    def _end(self, number: int) -> None:
        self.ended_it = True
        self._send(number)

    def _send(self, number: int) -> None:
        if number not in self._sent:
            self._sent.append(number)
            self._process.send_signal(number)
