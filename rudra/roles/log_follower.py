"""The log of an owner that decides, as another owner carries it out (`rudra.roles.multi_owner.Log`)."""

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from typing import Any

from rudra.core.events import (
    WEIGHTS,
    Accumulate,
    Action,
    AverageGroup,
    CancelReceive,
    ComputeNorms,
    Copy,
    DeclareLost,
    Receive,
    Reconfigure,
    Save,
    Send,
    Update,
)
from rudra.core.messages import WeightsPart
from rudra.core.training_state import BEGINNING
from rudra.roles.multi_owner import LOGGED, NUMBER
from topologies import Plan

Entry = tuple[Any, ...]
"""A row of `records.LOG`."""

Due = Callable[[Entry], list[Action] | None]


class LogFollower:
    """Member of an owner that carries out a log, entry by entry.

    Args:
        role: id of the owner.
        plan: who is who.
        dead: ids of roles that have died, as the owner knows them.

    Attributes:
        entries: that are not carried out yet.
        coming: buffers that receive a gradient -> its source, and its number.
        lent: number of transfers under way, by buffer.
    """

    def __init__(self, role: int, plan: Plan, dead: Collection[int]) -> None:
        self._id, self._plan, self._dead = role, plan, dead
        self.entries: deque[Entry] = deque()
        self.coming: dict[str, tuple[int, int]] = {}
        self.lent: Counter[str] = Counter()

    def validate(self) -> None:
        assert min(self.lent.values(), default=0) >= 0

    @property
    def waiting_for(self) -> str:
        if not self.entries:
            return f"the {self._plan.roles[self._plan.server].name} to announce the next step"
        lent = [buffer for buffer, count in self.lent.items() if count]
        return f"transfers of its {' and '.join(lent)} to end" if lent else "part of a gradient"

    def carry_out(self, due: Due) -> list[Action]:
        """Carries out entries in their order until one must wait.

        Args:
            due: returns what an entry leads to now, or None if the entry must wait.
        """
        actions: list[Action] = []
        while self.entries and (now := due(self.entries[0])) is not None:
            self.entries.popleft()
            actions += now
        return actions

    def receive_ahead(self) -> list[Action]:
        """Carries out later entries that receive gradients, while an entry before them must wait.

        It may, unless an entry before is about the buffer, or about another gradient of that learner.
        """
        actions: list[Action] = []
        needed: set[bytes | int] = set()
        for entry in list(self.entries):
            what, role, buffer, other, *_ = entry
            if what == NUMBER[Receive] and not needed & {role, buffer}:
                self.entries.remove(entry)
                actions += self.due(entry) or []
            else:
                needed |= {buffer, other, role} if what == NUMBER[Receive] else {buffer, other}
        return actions

    def due(self, entry: Entry) -> list[Action] | None:
        """Returns what an entry leads to, or None if it must wait."""
        what, role, buffer_, other_, number, fraction, scale, samples, time_s, epoch, _ = entry
        kind, buffer, other = LOGGED[what], buffer_.decode(), other_.decode()
        if kind is Receive:
            self.coming[buffer] = role, number
            return [] if role in self._dead else [Receive(buffer, role, gradient=True)]
        if kind is CancelReceive:
            if buffer in self.coming and self.coming[buffer][0] not in self._dead:
                return None
            self.coming.pop(buffer, None)
            return []
        if kind is Accumulate:
            return [Accumulate(other, buffer, fraction, scale)]
        if kind is Update:
            return None if self.lent[WEIGHTS] else [Update(buffer, WEIGHTS, scale, number, epoch, samples, time_s)]
        if kind is Copy:
            return None if self.lent[other] else [Copy(buffer, other)]
        if kind is Send:
            self.lent[buffer] += 1
            return [Send(role, WeightsPart(self._id), buffer)]
        if kind is ComputeNorms:
            return [ComputeNorms(buffer)]
        if kind is AverageGroup:
            return [AverageGroup(buffer)]
        if kind is Reconfigure:
            return [Reconfigure(self._plan, BEGINNING)]
        return [Save(WEIGHTS, BEGINNING) if kind is Save else DeclareLost(role)]

    def read(self, entries: Iterable[Entry]) -> None:
        """Takes entries that have arrived."""
        self.entries.extend(entries)

    def arrived(self, buffer: str) -> int:
        """A gradient, or a part of one, is in a buffer; returns its number."""
        _, number = self.coming.pop(buffer)
        return number
