"""A running mpirun: relays its output, checks its ranks, and ends it."""

import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType

from rudra.errors import LaunchError
from rudra.log import log
from rudra.machine import end_with_parent
from rudra.mpi.failures import SPEAKS_S, RollCall, is_stopped, named_ranks
from rudra.mpi.loopback import listen_on_loopback
from rudra.mpi.patience import Patience
from rudra.mpi.relay import OutputRelay

GRACE_S = 30.0
"""Time that the ranks may take to stop in order after Ctrl-C, and to write a checkpoint, before they are ended."""

INSISTS_S = 3.0
"""Time that mpirun may take to end on request, before it is killed."""

ENDS_S = 6.0
"""Time that mpirun may take to end after the run. It sometimes hangs if ranks have died."""

LOOKS_S, RARELY_S = 0.1, 0.5
"""Interval of checks whether ranks are alive, before MPI has started and afterwards."""

NOTICES_S = 1.5
"""Time that mpirun may take to end itself if a rank has died before MPI has started, and others wait for it."""

OTHERS_S = 15.0
"""Time that other ranks may take which have started MPI, and know of the dead rank or would wait for it for ever."""

START_S = 300.0
"""Time that MPI may take to start if the job sets no limit."""

TOGETHER_S = 0.3
"""Ranks that end within this time of the first one ended on their own, and not as a consequence."""


class Mpirun:
    """A process of mpirun, started by the constructor.

    Args:
        command: mpirun with its options, and the command that it starts.
        ranks: number of ranks that it starts.
        write: receives output for the user.
        env: environment of mpirun. None: the environment of this process.
        name: name of the run, for messages.
        stall_warning_s: seconds after which this process reports its wait, for a wait that no rank can notice.
        stall_limit_s: seconds after which such a wait ends the run. None: never, but MPI must start within `START_S`.

    Attributes:
        stalled: text about the wait that made this process end the run, or empty if none did.
        ranks: number of ranks that mpirun starts.
        relay: relay that has read the output of the ranks.
        stopped_at: time when a signal to this process stopped the run. None: no signal did.
        ended_it: whether this process ended mpirun.
        roll: checks of the ranks of this node.
        dead: ranks that were the first to end, if MPI has not started on all ranks.

    Raises:
        LaunchError: mpirun does not start.
    """

    def __init__(
        self,
        command: Sequence[str],
        ranks: int,
        write: Callable[[bytes], None],
        *,
        env: Mapping[str, str] | None = None,
        name: str = "",
        stall_warning_s: float = 60.0,
        stall_limit_s: float | None = None,
    ) -> None:
        self.relay = OutputRelay(write, ranks)
        self.stopped_at: float | None = None
        self.ended_it = False
        self.dead: set[int] = set()
        self.ranks = ranks
        self._looked_at = self._died_at = 0.0
        self._name, self._warning_s, self._limit_s = name, stall_warning_s, stall_limit_s
        self._awaited, self._awaited_at, self._patience = "", 0.0, Patience(stall_warning_s, stall_limit_s)
        self.stalled = ""
        self._over_at: float | None = None
        self._grace_s = GRACE_S
        self._sent: list[int] = []
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=env,
                start_new_session=True,  # only this process gets the terminal's Ctrl-C, and stops the run in order
                preexec_fn=end_with_parent,  # so that no rank is left over
            )
        except OSError as error:
            raise LaunchError(f"{command[0]} does not start: {error.strerror}") from None
        self.roll = RollCall(self._process.pid, ranks)

    def wait(self) -> int:
        """Waits for mpirun, ends it if necessary, and returns its exit status."""
        assert self._process.stderr is not None
        try:
            with self._on_signals():
                self._pump(self._process.stderr.fileno())
                while (status := self._process.poll()) is None:
                    time.sleep(0.05)
                    self._keep()
        finally:
            if self._process.poll() is None:  # an internal error: leave no process running
                self._process.kill()
                self._process.wait()
            self._process.stderr.close()
        return status

    def _pump(self, pipe: int) -> None:
        """Relays output until mpirun has closed its standard error or ended."""
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while True:
                if selector.select(timeout=RARELY_S if self.relay.started else LOOKS_S):
                    data = os.read(pipe, 1 << 16)
                    if not data:
                        break
                    self.relay.feed(data)
                elif self._process.poll() is not None:  # another process that outlived mpirun holds the pipe
                    break
                self._keep()
        self.relay.close()

    @contextmanager
    def _on_signals(self) -> Iterator[None]:
        """Stops the run on Ctrl-C, SIGTERM or SIGHUP to this process. Needs the main thread, does nothing elsewhere."""
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
        """Stops the run in order at the first signal, so that the result file is closed, and at once at the second."""
        if self.stopped_at is None:
            self.stopped_at = time.monotonic()
            if self.relay.started:
                self._send(signal.SIGUSR1)  # mpirun forwards it to every rank
            else:  # there is no training to stop in order, and perhaps no rank to forward it to
                self._grace_s = 0.0
        else:  # a second Ctrl-C: end now
            self._grace_s = 0.0

    def _keep(self) -> None:
        """Ends mpirun when its time is over, if it does not end itself."""
        now = time.monotonic()
        self._look(now)
        self._wait_for_ranks(now)
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
                self._send(signal.SIGKILL)  # the ranks follow, because they die with their parent

    def _look(self, now: float) -> None:
        """Checks the ranks of this node. Before MPI has started, no other process may notice that a rank is missing."""
        if now - self._looked_at < (RARELY_S if self.relay.started else LOOKS_S):
            return
        self._looked_at = now
        self.roll.look()
        if not self.relay.started and self.roll.here == self.ranks:
            listen_on_loopback(self._process.pid)
        if self.relay.started >= self.ranks or self.relay.ends or self.relay.code is not None:
            self.dead = set()
        elif not self.relay.died and (not self.dead or now - self._died_at < TOGETHER_S):
            self._died_at = self._died_at if self.dead else now
            self.dead = self.roll.dead | self.relay.killed_early

    def _look_again(self) -> None:
        """Checks missing ranks again before acting, while other ranks run that mpirun has not ended."""
        self.roll.look_again()
        self.dead = self.roll.dead | self.relay.killed_early if self.roll.alive else self.dead

    def _wait_for_ranks(self, now: float) -> None:
        """Reports a wait that no rank may notice, and ends it if it is too long."""
        awaited = "" if self.stopped_at is not None or self._over() else self._whom()
        if awaited != self._awaited or not awaited:  # some rank has made progress
            self._awaited, self._awaited_at = awaited, now
            self._patience = Patience(self._warning_s, self._limit_of_wait())
            return
        due, waited = self._patience.due(now - self._awaited_at), f"{now - self._awaited_at:.0f} s for {awaited}"
        if due == "end":
            self.stalled = f"mpirun has waited {waited}"
            self._end(signal.SIGTERM)
        elif due:
            log.warning(f"{self._name}: mpirun has waited {waited}")

    def _limit_of_wait(self) -> float | None:
        """Returns the seconds after which a wait ends the run. None: a rank that waits ends it."""
        if self.relay.started < self.ranks:
            return self._limit_s or START_S
        return self._limit_s + SPEAKS_S if self._limit_s else None

    def _whom(self) -> str:
        """Returns the awaited ranks and their action, as text. Empty if there are none, or if they check themselves."""
        relay, roll = self.relay, self.roll
        if is_stopped(self._process.pid):
            return "mpirun itself, which is stopped"
        stopped = f"{named_ranks(roll.stopped)}, stopped by a signal," if roll.stopped else ""
        if relay.started < self.ranks:
            missing = self.ranks - relay.started
            others = f"{missing} of {self.ranks} ranks" if relay.started else "the ranks"
            return f"{stopped or others} to start MPI"
        if relay.ends and len(relay.ends) < self.ranks:
            missing = self.ranks - len(relay.ends)
            others = named_ranks(roll.alive) if len(roll.alive) == missing else f"{missing} of {self.ranks} ranks"
            return f"{stopped or others} to end"
        return "" if relay.training or not stopped else f"{stopped} to get ready"

    def _over(self) -> bool:
        """Returns whether mpirun has nothing left to wait for."""
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
