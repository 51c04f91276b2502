"""Buffer for rows that a role reports to the statistics server."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from rudra.core.actions import Action, Send
from rudra.core.messages import MESSAGES, ROWS, MessageKind, Rows
from rudra.core.wire import PACK, reported
from rudra.probe import probed
from topologies import Plan


class Outbox:
    """Rows that a role collects and sends to the statistics server in batches.

    Args:
        role: id of the sender.
        plan: roles of the run.
        interval_s: longest time in seconds that rows wait before they are sent.

    Attributes:
        role: id of the sender.
    """

    ROWS_AT_MOST = 48
    NEAR_ROWS_AT_MOST = 2048  # if both roles are on one rank, where a message has any length

    def __init__(self, role: int, plan: Plan, interval_s: float) -> None:
        self.role, self._to, self._interval_s = role, plan.statistics, interval_s
        self._near = plan.roles[role].world_rank == plan.roles[self._to].world_rank
        self._most = self.NEAR_ROWS_AT_MOST if self._near else self.ROWS_AT_MOST
        self._rows: dict[MessageKind, list[bytes]] = {}
        self._count = 0
        self._since = 0.0

    def add(self, kind: MessageKind, *row: Any) -> None:
        self.extend(kind, [PACK[kind](*row)])

    @probed
    def extend(self, kind: MessageKind, rows: Sequence[bytes]) -> None:
        """Adds packed rows."""
        self._rows.setdefault(kind, []).extend(rows)
        self._count += len(rows)

    def extend_by(self, kind: MessageKind, rows: Rows) -> None:
        """Adds rows of a table."""
        self._rows.setdefault(kind, []).append(rows.tobytes())
        self._count += len(rows)

    def due(self, now: float) -> list[Action]:
        """Returns messages with all collected rows if there are enough rows or they have waited long enough."""
        if not self._count or (self._count < self._most and now - self._since < self._interval_s):
            return []
        return self.flush(now)

    @probed
    def flush(self, now: float) -> list[Action]:
        """Returns messages with all collected rows."""
        self._since = now
        if not self._count:
            return []
        gathered, self._rows, self._count = self._rows, {}, 0
        joined = ((kind, np.frombuffer(b"".join(rows), ROWS[kind])) for kind, rows in gathered.items())
        if self._near:
            return [Send(self._to, MESSAGES[kind](self.role, rows)) for kind, rows in joined]
        return [Send(self._to, message) for kind, rows in joined for message in reported(kind, self.role, rows)]


class NullOutbox(Outbox):
    """Outbox of a role that reports nothing: it drops all rows."""

    def add(self, kind: MessageKind, *row: Any) -> None: ...
    def extend(self, kind: MessageKind, rows: Sequence[bytes]) -> None: ...
    def extend_by(self, kind: MessageKind, rows: Rows) -> None: ...
