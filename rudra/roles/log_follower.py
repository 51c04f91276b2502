"""The log of the deciding owner of weights, carried out by another owner (`rudra.roles.multi_owner.Log`)."""

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from typing import Any

from rudra.core.actions import (
    Accumulate,
    Action,
    AverageGroup,
    CancelReceive,
    ComputeNorms,
    Copy,
    Correct,
    DeclareLost,
    FollowJob,
    Receive,
    Reconfigure,
    Save,
    Send,
    Update,
)
from rudra.core.buffer_names import AVERAGE, SNAPSHOT, WEIGHTS
from rudra.core.messages import WeightsPart
from rudra.core.training_state import BEGINNING, TrainingState
from rudra.roles.multi_owner import LOGGED, NUMBER
from topologies import Plan

Entry = tuple[Any, ...]
"""Row of `records.LOG`."""

Due = Callable[[Entry], list[Action] | None]


class LogFollower:
    """Member of an owner of weights that carries out the log, entry by entry.

    Args:
        role: id of the owner.
        plan: roles of the run and their connections.
        dead: ids of roles that the owner knows to be dead.

    Attributes:
        entries: entries that are not carried out yet.
        coming: buffer that receives a gradient -> source and number of the gradient.
        lent: Number of transfers from each buffer.
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
        in_transfer = [buffer for buffer, count in self.lent.items() if count]
        return f"transfers of its {' and '.join(in_transfer)} to end" if in_transfer else "part of a gradient"

    @property
    def lends_weights(self) -> bool:
        """Whether a transfer reads the weights, or their average over time."""
        return bool(self.lent[WEIGHTS] or self.lent[AVERAGE])

    def inherit(self, before: "LogFollower") -> None:
        """Takes over the log of an earlier follower, and its transfers to the statistics server."""
        self.read(before.entries)
        self.lent.update({name: before.lent[name] for name in (AVERAGE, SNAPSHOT)})

    def carry_out(self, due: Due) -> list[Action]:
        """Carries out entries in order until one must wait.

        Args:
            due: function that returns the actions of an entry, or None if the entry must wait.
        """
        actions: list[Action] = []
        while self.entries and (now := due(self.entries[0])) is not None:
            self.entries.popleft()
            actions += now
        return actions

    def receive_ahead(self) -> list[Action]:
        """Carries out later entries that receive gradients, while an earlier entry must wait.

        This is allowed unless an earlier entry uses the same buffer or receives another gradient of the same learner.
        """
        actions: list[Action] = []
        needed: set[bytes | int] = set()
        for entry in list(self.entries):
            what, role, buffer, other, *_ = entry
            if what == NUMBER[Reconfigure]:
                break
            if what == NUMBER[Receive] and not needed & {role, buffer}:
                self.entries.remove(entry)
                actions += self.due(entry) or []
            else:
                needed |= {buffer, other, role} if what == NUMBER[Receive] else {buffer, other}
        return actions

    def due(self, entry: Entry) -> list[Action] | None:
        """Returns the actions of an entry, or None if it must wait."""
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
        if kind is Correct:
            return [Correct(buffer, WEIGHTS, other, role, number, epoch, round(fraction), samples)]
        if kind is Update:
            about = (number, epoch, samples, time_s)
            update = Update(buffer, WEIGHTS, scale, *about, average=other, average_weight=fraction)
            return None if self.lends_weights else [update]
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
        if kind is FollowJob:
            return [FollowJob(TrainingState(number, epoch))]
        return [Save(WEIGHTS, TrainingState(number, epoch)) if kind is Save else DeclareLost(role)]

    def read(self, entries: Iterable[Entry]) -> None:
        """Appends entries that have arrived."""
        self.entries.extend(entries)

    def arrived(self, buffer: str) -> int:
        """Takes note that a gradient, or a part of one, has arrived in a buffer, and returns its number."""
        _, number = self.coming.pop(buffer)
        return number
