"""Queue of weight snapshots for the statistics server."""

from rudra.core.actions import Action, Copy, Send
from rudra.core.buffer_names import SNAPSHOT
from rudra.core.messages import Snapshot

CREDITS = 2
"""Number of snapshots that the statistics server can hold: one in process and one waiting."""


class SnapshotQueue:
    """Sender of snapshots. It sends a snapshot only if the statistics server has room for it.

    Args:
        statistics: role id of the statistics server.
        all_epochs: whether the weights of every epoch must be sent.
        weights: buffer of the weights to send.

    Attributes:
        all_epochs: whether the weights of every epoch must be sent.
        final_lent: whether the weights of the last epoch are not completely sent yet.
    """

    def __init__(self, statistics: int, *, all_epochs: bool, weights: str) -> None:
        self._statistics, self.all_epochs, self._weights = statistics, all_epochs, weights
        self._credits = CREDITS
        self._lent = False
        self._final: Snapshot | None = None  # waits until the statistics server has room
        self.final_lent = False

    def validate(self) -> None:
        """Raises AssertionError unless the invariants hold."""
        assert 0 <= self._credits <= CREDITS

    @property
    def free(self) -> bool:
        """Whether a snapshot can be sent now."""
        return bool(self._credits) and not self._lent

    def send(self, snapshot: Snapshot) -> list[Action]:
        """Copies the weights and sends the copy. The caller checks `free` first."""
        self._credits -= 1
        self._lent = True
        return [Copy(self._weights, SNAPSHOT), Send(self._statistics, snapshot, SNAPSHOT)]

    def send_final(self, snapshot: Snapshot) -> list[Action]:
        """Sends the final weights without a copy, because they no longer change, as soon as there is room."""
        self._final, self.final_lent = snapshot, True
        return self._send_waiting()

    def returned(self, buffer: str) -> None:
        """Notes the end of a transfer to the statistics server."""
        if buffer == SNAPSHOT:
            self._lent = False
        else:
            self.final_lent = False

    def credit(self) -> list[Action]:
        """Notes that the statistics server has room for one additional snapshot."""
        self._credits += 1
        return self._send_waiting()

    def _send_waiting(self) -> list[Action]:
        if self._final is None or not self._credits:
            return []
        self._credits -= 1
        snapshot, self._final = self._final, None
        return [Send(self._statistics, snapshot, self._weights)]
