"""Snapshots of the weights on their way to the statistics server."""

from rudra.core.events import SNAPSHOT, WEIGHTS, Action, Copy, Send
from rudra.core.messages import Snapshot

CREDITS = 2
"""Snapshots that the statistics server can hold: one in work and one waiting."""


class SnapshotQueue:
    """Sends a snapshot if the statistics server has room for it.

    Args:
        statistics: role id of the statistics server.
        all_epochs: whether the weights of every epoch must be sent.

    Attributes:
        all_epochs: as given.
        final_lent: the weights of the last epoch are not all sent yet.
    """

    def __init__(self, statistics: int, *, all_epochs: bool) -> None:
        self._statistics, self.all_epochs = statistics, all_epochs
        self._credits = CREDITS
        self._lent = False
        self._final: Snapshot | None = None  # waits for room
        self.final_lent = False

    def validate(self) -> None:
        """Raises AssertionError unless the invariants hold."""
        assert 0 <= self._credits <= CREDITS

    @property
    def free(self) -> bool:
        """Whether a snapshot can be sent now."""
        return bool(self._credits) and not self._lent

    def send(self, snapshot: Snapshot) -> list[Action]:
        """Copies the weights and sends the copy; only if `free`."""
        self._credits -= 1
        self._lent = True
        return [Copy(WEIGHTS, SNAPSHOT), Send(self._statistics, snapshot, SNAPSHOT)]

    def send_final(self, snapshot: Snapshot) -> list[Action]:
        """Sends the last weights themselves, which change no more, as soon as there is room."""
        self._final, self.final_lent = snapshot, True
        return self._send_waiting()

    def returned(self, buffer: str) -> None:
        """A transfer to the statistics server has ended."""
        if buffer == SNAPSHOT:
            self._lent = False
        else:
            self.final_lent = False

    def credit(self) -> list[Action]:
        """The statistics server has room for one snapshot more."""
        self._credits += 1
        return self._send_waiting()

    def _send_waiting(self) -> list[Action]:
        if self._final is None or not self._credits:
            return []
        self._credits -= 1
        snapshot, self._final = self._final, None
        return [Send(self._statistics, snapshot, WEIGHTS)]
