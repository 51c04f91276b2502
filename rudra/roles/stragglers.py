"""Detection of children of a server that are alive but much slower than the others."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from rudra.job.job import Job
from topologies import Plan

CHECK_S = 1.0
"""Shortest time in seconds between two checks. A server checks when it updates."""

TURNS = 10
"""Number of mean gradient times of one child. A child that is silent for longer is a straggler."""


def tick_s(job: Job) -> float | None:
    """Returns the seconds between checks for learners to drop, or None if a server never drops any."""
    timeout = job.fault_tolerance.straggler_timeout_s
    return None if timeout is None else min(1.0, timeout / 4)


def overdue_s(job: Job, plan: Plan, child: int | None, last_message: Mapping[int, float], now: float) -> float | None:
    """Returns the seconds that the awaited child has been silent, if the child is a learner and the time is too long.

    Args:
        job: resolved job, which sets the timeout.
        plan: roles of the run and their connections.
        child: id of the child that all others wait for, or None.
        last_message: time of each role's last message, in seconds.
        now: seconds on the driver's clock.
    """
    timeout = job.fault_tolerance.straggler_timeout_s
    if timeout is None or child is None or not plan.roles[child].kind_traits.trains:
        return None
    silence_s = now - last_message[child]
    return silence_s if silence_s > timeout else None


class End(NamedTuple):
    """Reason for the loss of a learner, for `/events` and for people."""

    kind: str
    text: str


class Stragglers:
    """Time of each child's last message, and the learner that is being dropped for its silence.

    Args:
        children: ids of the child roles.
        patience_s: shortest silence in seconds that can make a child a straggler.

    Attributes:
        last_message: time of the last message of each child, in seconds on the driver's clock.
        dropping: whether a learner is being dropped.
    """

    def __init__(self, children: Iterable[int], patience_s: float) -> None:
        self.last_message = dict.fromkeys(children, 0.0)
        self._patience_s = patience_s
        self._began = self._looked = 0.0
        self._before = 0
        self._known: set[int] = set()
        self._late: tuple[int, End] | None = None

    @property
    def dropping(self) -> bool:
        return self._late is not None

    def begin(self, now: float, gradients: int) -> None:
        """Begins to measure silences, when training starts or continues. `gradients` is the number received before."""
        self._began = self._looked = now
        self._before = gradients
        self.last_message = dict.fromkeys(self.last_message, now)

    def forget(self, child: int) -> None:
        """Forgets a child that is lost."""
        self.last_message.pop(child, None)

    def found(self, now: float, gradients: int) -> list[tuple[int, float]]:
        """Returns the children that became stragglers since the last check, with the seconds of their silence.

        Args:
            now: seconds on the driver's clock.
            gradients: number of gradients received up to now.
        """
        if now - self._looked < CHECK_S:
            return []
        self._looked = now
        usual_s = (now - self._began) * len(self.last_message) / max(1, gradients - self._before)
        limit = max(self._patience_s, TURNS * usual_s)
        silent = {child: now - then for child, then in self.last_message.items() if now - then > limit}
        new = [(child, silence) for child, silence in silent.items() if child not in self._known]
        self._known = set(silent)
        return new

    def drop(self, learner: int, silence_s: float) -> None:
        """Notes that a learner is being dropped."""
        self._late = learner, End("dropped", f"was dropped: it sent nothing for {silence_s:.0f} s")

    def end_of(self, role: int, now: float, gradients: int) -> End:
        """Returns the reason for the loss of a learner."""
        if self._late is None or role != self._late[0]:
            return End("lost", "died")
        (_, end), self._late = self._late, None
        self.begin(now, gradients)  # messages of the others could not arrive during the drop
        return end
