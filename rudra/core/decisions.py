"""Changes of a job that are decided during the run: their text in messages, in checkpoints and in the result file.

A decided change is JSON of a table `[[changes]]`. A table of events holds it in one row, or in several if it is long.
"""

import json
import math
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec
import numpy as np

from rudra.core import records
from rudra.core.messages import Rows
from rudra.core.training_state import DecidedChange
from rudra.job.boundary import Boundary

WIDTH = records.TEXT["text"].itemsize
"""Largest number of characters of a row of text."""

LONGEST = 6 * WIDTH
"""Largest number of characters of a decided change, which one message holds."""


def in_texts(text: str) -> Rows:
    """Returns a text of ASCII characters as rows of a message, `records.TEXT`."""
    return np.array([(piece.encode(),) for piece in pieces(text)], records.TEXT)


def text_of(rows: Rows) -> str:
    """Returns the text of `in_texts`."""
    return b"".join(rows["text"].tolist()).decode()


def pieces(text: str) -> list[str]:
    """Returns the parts of a text that fit into a row each."""
    return [text[start : start + WIDTH] for start in range(0, len(text), WIDTH)]


def in_events(kind: bytes, text: str, timestamp: int, gradients: int, time_s: float, role: int = -1) -> Rows:
    """Returns events with a text of ASCII characters, `records.EVENT`."""
    about = (kind, role, 0, timestamp, gradients, time_s, 0.0)
    return np.array([(*about, piece.encode()) for piece in pieces(text)], records.EVENT)


def from_events(events: Rows, kind: bytes) -> list[Any]:
    """Returns the JSON values in all complete events of a kind."""
    text = b"".join(events["text"][events["kind"] == kind].tolist()).decode("ascii", "replace")
    found, place, decoder = [], 0, json.JSONDecoder()
    while place < len(text):
        try:
            value, place = decoder.raw_decode(text, place)
        except ValueError:  # a run that was killed may have lost the last rows
            break
        found.append(value)
    return found


class MeasuredBanks(NamedTuple):
    """Measurement of banks that grow.

    Attributes:
        sizes: Number of active learners of each bank, in the order of ranks. One number: of each.
        images_per_s: Samples of all learners in a second. 0: memory does not suffice for a bank.
        update_s: Seconds of each bank for its part of an update, if the devices are unequal.
        lacking: Place of the bank whose memory does not suffice, if the devices are unequal. -1: none.
    """

    sizes: tuple[int, ...]
    images_per_s: float
    update_s: tuple[float, ...] = ()
    lacking: int = -1

    @property
    def size(self) -> int | str:
        """Number of learners of each bank: one number, or several as text."""
        return self.sizes[0] if len(self.sizes) == 1 else "+".join(map(str, self.sizes))

    @property
    def text(self) -> str:
        """JSON of the measurement."""
        sizes = self.sizes[0] if len(self.sizes) == 1 else self.sizes
        found: dict[str, Any] = {"learners_per_device": sizes, "images_per_s": round(self.images_per_s, 3)}
        if self.update_s:
            found["update_s"] = [float(f"{seconds:.6g}") for seconds in self.update_s]
        if self.lacking >= 0:
            found["lacking"] = self.lacking
        return json.dumps(found)


def measurements(events: Rows) -> list[MeasuredBanks]:
    """Returns the measurements in a table of events."""
    found = []
    for value in from_events(events, b"measured"):
        with suppress(msgspec.ValidationError):
            row = msgspec.convert(value, _Measured)
            sizes = row.learners_per_device
            sizes = sizes if isinstance(sizes, tuple) else (sizes,)
            found.append(MeasuredBanks(sizes, row.images_per_s, row.update_s, row.lacking))
    return found


class _Measured(msgspec.Struct):
    """JSON of a measurement."""

    learners_per_device: int | tuple[int, ...]
    images_per_s: float
    update_s: tuple[float, ...] = ()
    lacking: int = -1


def start_of(decided: DecidedChange) -> Boundary:
    """Returns the place in the run where a decided change takes effect."""
    found = json.loads(decided.change)
    return Boundary(*(found.get(key, math.inf) for key in ("at_epoch", "at_update")))


def tables_of(decided: DecidedChange) -> str:
    """Returns JSON of a decided change without its place in the run: table -> key -> value."""
    found = json.loads(decided.change)
    return json.dumps({table: keys for table, keys in found.items() if table not in ("at_epoch", "at_update")})


def taken_effect(decided: DecidedChange) -> str:
    """Returns the text that records a decided change that has taken effect."""
    restarts = {"restarts": True} if decided.restarts else {}
    return json.dumps({"place": decided.place, **restarts, **json.loads(decided.change)})


def recorded(events: Rows) -> tuple[DecidedChange, ...]:
    """Returns the decided changes of a run that have taken effect, from its table of events."""
    found = [value for value in from_events(events, b"decided") if isinstance(value, dict)]
    places = [place if isinstance(place := value.pop("place", None), int) else 0 for value in found]
    restarts = [value.pop("restarts", None) is True for value in found]
    texts = map(json.dumps, found)
    return tuple(DecidedChange(*about) for about in zip(texts, places, restarts, strict=True))


def is_possible(decided: DecidedChange) -> bool:
    """Returns whether a decided change from a file may be what Rudra wrote."""
    try:
        return isinstance(json.loads(decided.change), dict) and -1 <= decided.place < 2**31
    except (ValueError, RecursionError):
        return False
