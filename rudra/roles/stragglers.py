"""Children of a server that are much slower than the others: slow is not dead, but worth a word."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from rudra.job.job import Job
from topologies import Plan

CHECK_S = 1.0
"""How often a server looks; it does so when it updates."""

TURNS = 10
"""A child that is silent for so many times as long as a gradient of one takes on average is a straggler."""


def tick_s(job: Job) -> float | None:
    """How often a server looks whether to drop a learner; None: it never does."""
    timeout = job.fault_tolerance.straggler_timeout_s
    return None if timeout is None else min(1.0, timeout / 4)


def overdue_s(job: Job, plan: Plan, child: int | None, heard: Mapping[int, float], now: float) -> float | None:
    """For how long nothing has come of the child that all wait for, if that is a learner and too long.

    Args:
        job: says how long is too long.
        plan: who is who.
        child: for whom all wait; None: for nobody.
        heard: when something last came, by role.
        now: seconds.
    """
    timeout = job.fault_tolerance.straggler_timeout_s
    if timeout is None or child is None or not plan.roles[child].kind_traits.trains:
        return None
    silence_s = now - heard[child]
    return silence_s if silence_s > timeout else None


class End(NamedTuple):
    """How a learner is no more, for `/events` and for people."""

    kind: str
    text: str


class Stragglers:
    """When each child was heard of last, and which learner is dropped for its silence.

    Args:
        children: ids of the roles.
        patience_s: a silence that is shorter is no matter.

    Attributes:
        heard: child -> when something came of it.
        dropping: whether a learner is being dropped.
    """

    def __init__(self, children: Iterable[int], patience_s: float) -> None:
        self.heard = dict.fromkeys(children, 0.0)
        self._patience_s = patience_s
        self._began = self._looked = 0.0
        self._before = 0
        self._known: set[int] = set()
        self._late: tuple[int, End] | None = None

    @property
    def dropping(self) -> bool:
        return self._late is not None

    def begin(self, now: float, gradients: int) -> None:
        """Training begins, or goes on after so many gradients."""
        self._began = self._looked = now
        self._before = gradients
        self.heard = dict.fromkeys(self.heard, now)

    def forget(self, child: int) -> None:
        """A child is no more."""
        self.heard.pop(child, None)

    def found(self, now: float, gradients: int) -> list[tuple[int, float]]:
        """Those that have become stragglers since the last time, and for how long nothing came of them.

        Args:
            now: seconds.
            gradients: received so far.
        """
        if now - self._looked < CHECK_S:
            return []
        self._looked = now
        usual_s = (now - self._began) * len(self.heard) / max(1, gradients - self._before)
        limit = max(self._patience_s, TURNS * usual_s)
        silent = {child: now - then for child, then in self.heard.items() if now - then > limit}
        new = [(child, silence) for child, silence in silent.items() if child not in self._known]
        self._known = set(silent)
        return new

    def drop(self, learner: int, silence_s: float) -> None:
        """A learner is being dropped."""
        self._late = learner, End("dropped", f"was dropped: it sent nothing for {silence_s:.0f} s")

    def end_of(self, role: int, now: float, gradients: int) -> End:
        """How a learner is no more."""
        if self._late is None or role != self._late[0]:
            return End("lost", "died")
        (_, end), self._late = self._late, None
        self.begin(now, gradients)  # the others could not be heard meanwhile
        return end
