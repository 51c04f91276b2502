"""Cooperation of several owners of weights: a log of decisions, and updates that every owner makes to its part.

One owner decides. It writes into a log what it does to its own part of the weights, and what concerns the other parts.
The other owners carry out the log entry by entry. An update is complete when every owner has made it.
"""

import math
from collections import Counter

import numpy as np
from msgspec import structs

from rudra.core import records
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
from rudra.core.digest import digest_of
from rudra.core.events import Updated
from rudra.core.messages import LogEntries, MessageKind, OwnerMeasured, OwnerStepped
from rudra.core.norms import joint_norm
from rudra.core.wire import PACK, in_pieces
from rudra.errors import ProtocolError

LOGGED: tuple[type[Action], ...] = (
    Receive,
    CancelReceive,
    Accumulate,
    Update,
    Copy,
    Send,
    Save,
    DeclareLost,
    AverageGroup,
    Reconfigure,
    ComputeNorms,
    Correct,
    FollowJob,
)
"""Actions that concern other owners. An entry of the log identifies an action by its place here."""

NUMBER = {kind: number for number, kind in enumerate(LOGGED)}


def entry(action: Action, number: int = 0) -> bytes:
    """Returns an action of the deciding owner as a log entry. `number` identifies a received gradient."""
    role, buffer, other, fraction, scale, samples, time_s, epoch = -1, "", "", 0.0, 0.0, 0, 0.0, 0
    match action:
        case Receive():
            assert action.source is not None
            role, buffer = action.source, action.buffer
        case CancelReceive():
            buffer = action.buffer
        case Accumulate():
            buffer, other, fraction, scale = action.gradient, action.into, action.fraction, action.scale
        case Correct():
            role, buffer, other, number = action.learner, action.gradient, action.pulled, action.step
            samples, epoch, fraction = action.samples, action.timestamp, float(action.staleness)
        case AverageGroup():
            buffer = action.into
        case ComputeNorms():
            buffer = action.gradient
        case Update():
            buffer, scale, number = action.gradient, action.learning_rate, action.timestamp
            samples, time_s, epoch = action.samples, action.time_s, action.epoch
            other, fraction = action.average, action.average_weight
        case Copy():
            buffer, other = action.source, action.target
        case Send():
            assert action.buffer is not None
            role, buffer = action.to, action.buffer
        case DeclareLost():
            role = action.role
        case Save() | Reconfigure() | FollowJob():
            number, epoch = action.position.timestamp, action.position.epoch
    told = (role, buffer.encode(), other.encode(), number, fraction, scale, samples, time_s, epoch, 0)
    return PACK[MessageKind.LOG](NUMBER[type(action)], *told)


class Log:
    """Log of the actions that other owners must carry out.

    Args:
        role: id of the owner that decides.
        readers: ids of the owners that carry the log out.
    """

    def __init__(self, role: int, readers: tuple[int, ...]) -> None:
        self._role, self.readers = role, readers
        self._entries: list[bytes] = []

    def add(self, action: Action, number: int = 0) -> Action:
        """Adds an action to the log, and returns it."""
        self._entries.append(entry(action, number))
        return action

    def told(self) -> list[Action]:
        """Returns the messages with new entries. Send them first, so that the other owners work in parallel."""
        if not self._entries:
            return []
        rows, self._entries = np.frombuffer(b"".join(self._entries), records.LOG), []
        messages = [LogEntries(self._role, piece) for piece in in_pieces(rows)]
        return [Send(to, message) for to in self.readers for message in messages]


def measured(owner: int, event: Updated) -> list[OwnerMeasured]:
    """Returns the message with the norm of an owner's part of a gradient, if it is recorded."""
    return [] if math.isnan(event.norm) else [OwnerMeasured(owner, event.timestamp, event.norm)]


def stepped(owner: int, event: Updated) -> list[OwnerStepped]:
    """Returns the messages that report an owner's update: one for each stretch of its part, in ascending order."""
    samples = event.sampled or (b"",)
    return [
        OwnerStepped(
            owner,
            event.timestamp,
            stretch,
            event.seconds,
            last=stretch == len(samples) - 1,
            rows=np.frombuffer(sampled, records.FLOATS) if sampled else None,
        )
        for stretch, sampled in enumerate(samples)
    ]


class OwnerSteps:
    """Updates that not all owners have made yet.

    Args:
        owners: ids of the owners, in the order of their parts. The first owner has the ledger.

    Attributes:
        alone: whether there is only one owner.
    """

    def __init__(self, owners: tuple[int, ...]) -> None:
        self._owners = owners
        self.alone = len(owners) == 1
        # timestamp -> (number of a stretch, place of its owner) -> (sample of the stretch, seconds)
        self._made: dict[int, dict[tuple[int, int], tuple[bytes, float]]] = {}
        self._complete: Counter[int] = Counter()  # timestamp -> number of owners whose samples have all arrived
        self._norms: dict[int, dict[int, float]] = {}  # timestamp -> owner -> norm of its part of the gradient

    def here(self, event: Updated) -> Updated | None:
        """Takes an update of the first owner's part and returns the whole update if it is complete."""
        for message in measured(self._owners[0], event):
            self.measured(message)
        *_, made = (self.there(message) for message in stepped(self._owners[0], event))
        return made

    def measured(self, message: OwnerMeasured) -> None:
        """Takes the norm of an owner's part of a gradient. Its update follows."""
        self._norms.setdefault(message.timestamp, {})[message.sender] = message.norm

    def there(self, message: OwnerStepped) -> Updated | None:
        """Takes an update of another owner's part and returns the whole update if it is complete."""
        if message.sender not in self._owners:
            raise ProtocolError(f"role {message.sender} owns no part of the weights")
        timestamp = message.timestamp
        made = self._made.setdefault(timestamp, {})
        sampled = b"" if message.rows is None else message.rows.tobytes()
        made[message.stretch, self._owners.index(message.sender)] = sampled, message.seconds
        self._complete[timestamp] += message.last
        if self._complete[timestamp] < len(self._owners):
            return None
        del self._made[timestamp], self._complete[timestamp]
        samples = b"".join(made[place][0] for place in sorted(made))
        digest = digest_of(samples) if samples else 0
        update = Updated(timestamp, digest, max(seconds for _, seconds in made.values()))
        norms = self._norms.pop(timestamp, None)
        if norms is None:
            return update
        return structs.replace(update, norm=joint_norm(norms.get(owner, math.nan) for owner in self._owners))
