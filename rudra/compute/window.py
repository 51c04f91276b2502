"""Weights that several workers of a node share and update themselves: a window of memory that all of them map.

Under `"racing"` there is one vector. Workers read it and add to it whenever they like, without a lock (Hogwild); what
two of them write to one element at the same time may be lost, and nothing is promised. How much is lost is measured:
behind the weights lie probes, to each of which every update adds 1 by the same kind of write (`surviving`).

Under `"locked"` there are two generations of the vector, of which a number says which is the latest. It is copied under
a lock, and an update is written into the other one, again under the lock; then the number changes. So whoever dies in
between leaves the latest generation whole. Who made which generation, of which, is logged beside them.

Source: Hogbatch §5.1 and §6.1 (racing), which take their updates from Hogwild (Niu et al.).
"""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from rudra.core.digest import digest_of, sample
from rudra.errors import RunError

Update = Literal["racing", "locked"]

PROBES = 8
"""Elements that count updates: a cache line of int64."""

LOGGED = 1 << 14
"""Latest updates of which a log tells at least: more than are made until somebody looks who made them."""

_LINE = 64
_WORDS = _LINE // 8
_BEGUN, _MADE = 0, 1  # words of a worker's cache line, which nobody else writes

LOG = np.dtype(
    [
        ("update", "<i8"),
        ("worker", "<i4"),
        ("samples", "<i4"),
        ("step", "<i8"),
        ("first", "<i8"),
        ("timestamp", "<i8"),
        ("fewest", "<i4"),
        ("most", "<i4"),
        ("loss", "<f8"),
        ("errors", "<f8"),
        ("rate", "<f8"),
        ("digest", "<u8"),
    ]
)
"""One update: its number, among all or those of the worker, and what it was made of."""


class Reading(NamedTuple):
    """When weights were read: between which counts of the others' updates.

    Attributes:
        made: that were complete when reading began; in a locked window, all that there were.
        begun: that had begun when it ended.
    """

    made: int
    begun: int


class Contribution(NamedTuple):
    """What an update is made of, beside the gradient.

    Attributes:
        worker: its number among those of the window.
        step: which of its gradients.
        first, samples: of the gradient, as in `rudra.core.work.Work`.
        loss, errors: of these samples.
        rate: α.
    """

    worker: int
    step: int
    first: int
    samples: int
    loss: float
    errors: float
    rate: float


class WindowEntry(NamedTuple):
    """An update that is complete.

    Attributes:
        update: its number in a locked window; in a racing one nobody can tell, and it is that among the worker's own.
        of: what it is made of.
        timestamp: updates that were complete when the weights of its gradient were read.
        fewest, most: how many updates of others may have come between reading and writing: σ lies between.
        digest: of a sample of the new weights; 0 in a racing window, where others write meanwhile.
    """

    update: int
    of: Contribution
    timestamp: int
    fewest: int
    most: int
    digest: int


class Shape(NamedTuple):
    """What a window holds.

    Attributes:
        size: floats of the weights.
        workers: that write to it.
        update: how.
        logged: latest updates of which the log tells; of a racing window those of each worker.
    """

    size: int
    workers: int
    update: Update
    logged: int = LOGGED

    @property
    def bytes(self) -> int:
        """Memory that it needs."""
        return self.ends[-1]

    @property
    def ends(self) -> list[int]:
        """Of its sections, in bytes: the number of the latest generation, the workers' counts, the log, vectors, each
        with probes behind it.
        """
        vector = -(-self.size * 4 // _LINE) * _LINE + PROBES * 8
        log = self.logs * self.logged * LOG.itemsize
        sections = (_LINE, self.workers * _LINE, -(-log // _LINE) * _LINE, vector * self.generations)
        return list(accumulate(sections))

    @property
    def generations(self) -> int:
        """Vectors."""
        return 2 if self.update == "locked" else 1

    @property
    def logs(self) -> int:
        """One, of all updates, or one of each worker's."""
        return 1 if self.update == "locked" else self.workers


class Window:
    """The shared weights, as one process sees them.

    Args:
        memory: `shape.bytes` of it, aligned to 64 bytes, zeros at first; the same for all.
        shape: what it holds.
        lock: gives what is held while something is read or written, in a locked window; it has to keep out each thread
            of each process that shares the memory.

    Attributes:
        update: how it is written to.
        size: floats of the weights.
        lock: as given.
        vector: (size,) float32: the weights of a racing window. Those of a locked one are `latest`.
    """

    def __init__(
        self,
        memory: npt.NDArray[np.uint8],
        shape: Shape,
        lock: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.update, self.size, self.lock = shape.update, shape.size, lock
        ends = shape.ends
        self._numbers = memory[: ends[2]]
        self._head = memory[:8].data.cast("B").cast("q")
        counts = memory[ends[0] : ends[1]].data.cast("B").cast("q")
        self._counts, self._begun, self._made = counts, counts[_BEGUN::_WORDS], counts[_MADE::_WORDS]
        log = memory[ends[1] : ends[1] + shape.logs * shape.logged * LOG.itemsize]
        self._log, self._logged = log.view(LOG).reshape(shape.logs, shape.logged), shape.logged
        vectors = memory[ends[2] : ends[3]].reshape(shape.generations, -1)
        self._vectors = [torch.from_numpy(vector[: shape.size * 4].view(np.float32)) for vector in vectors]
        self._probes = torch.from_numpy(vectors[0][-PROBES * 8 :].view(np.int64))
        self.vector = self._vectors[0]

    # Their owner.

    def fill(self, weights: torch.Tensor, timestamp: int = 0) -> None:
        """Begins anew with these weights, while nobody reads or writes: (size,) float32, after so many updates."""
        self._numbers[:] = 0
        self._head[0] = timestamp
        self.latest.copy_(weights)
        self._probes.zero_()

    @property
    def latest(self) -> torch.Tensor:
        """The weights, (size,) float32."""
        return self._vectors[self._head[0] % len(self._vectors)]

    def updates_of(self, worker: int) -> tuple[int, int]:
        """How many updates of a worker are complete, and how many it has begun."""
        return self._made[worker], self._begun[worker]

    @property
    def made(self) -> int:
        """How many updates are complete, with those before this window."""
        return self._head[0] if self.update == "locked" else self._head[0] + sum(self._made)

    def entries(self, worker: int, after: int) -> list[WindowEntry]:
        """The updates of a worker that are complete, but for the first ones, in order.

        Args:
            worker: its number; it makes no more updates.
            after: how many to leave out: in a locked window of all updates, else of those of this worker.

        Raises:
            RunError: the log does not tell of all of them any more.
        """
        locked = self.update == "locked"
        ring = self._log[0 if locked else worker]
        last = self._head[0] if locked else self._made[worker]
        if last - after > len(ring):
            raise RunError(f"the window's log has the latest {len(ring)} updates, and {last - after} are to be found")
        rows = (ring[update % len(ring)].item() for update in range(after + 1, last + 1))
        return [_entry(*row) for row in rows if row[1] == worker]

    @property
    def surviving(self) -> float:
        """β: the part of the updates that races have left, as the probes counted them; 1 before the first.

        Source: Hogbatch §6.3, β, which is assumed there.
        """
        made = sum(self._made)
        return float(self._probes.double().mean()) / made if made and self.update == "racing" else 1.0

    # Workers.

    def _others(self, counts: memoryview, worker: int) -> int:
        return sum(counts) - counts[worker]

    def begin_reading(self, worker: int) -> Reading:
        """A worker begins to read a racing window in place."""
        made = self._others(self._made, worker)
        return Reading(made, made)

    def end_reading(self, worker: int, reading: Reading) -> Reading:
        """It has read all of it."""
        return Reading(reading.made, self._others(self._begun, worker))

    def copy(self, worker: int, into: torch.Tensor) -> Reading:
        """Copies the weights to `into`, (size,) float32; in a locked window a whole generation."""
        if self.update == "locked":
            with self.lock():
                into.copy_(self.latest)
                return Reading(self._head[0], self._head[0])
        reading = self.begin_reading(worker)
        into.copy_(self.vector)
        return self.end_reading(worker, reading)

    def add(
        self, of: Contribution, reading: Reading, gradient: torch.Tensor, instead: torch.Tensor | None = None
    ) -> WindowEntry:
        """Subtracts the rate times the gradient from the weights as they are now.

        Args:
            of: what the update is made of.
            reading: of the weights that the gradient is of.
            gradient: (size,) float32.
            instead: subtract from these weights, and overwrite those that there are by what comes of it: what others
                have done meanwhile is lost.
        """
        if self.update == "locked":
            with self.lock():
                return self._make_generation(of, reading, gradient, instead)
        fewest = self.begin_update(of, reading)
        if instead is None:
            self.vector.add_(gradient, alpha=-of.rate)
        else:
            torch.add(instead, gradient, alpha=-of.rate, out=self.vector)
        self._probes.add_(1)
        return self.end_update(of, reading, fewest)

    def begin_update(self, of: Contribution, reading: Reading) -> int:
        """A worker begins to write to a racing window; gives the fewest updates of others since it read."""
        self._counts[of.worker * _WORDS + _BEGUN] += 1
        return max(0, self._others(self._made, of.worker) - reading.begun)

    def end_update(self, of: Contribution, reading: Reading, fewest: int) -> WindowEntry:
        """It has written all of it."""
        most = self._others(self._begun, of.worker) - reading.made
        place = of.worker * _WORDS + _MADE
        own = self._counts[place] + 1
        entry = WindowEntry(own, of, self._head[0] + reading.made + own - 1, fewest, most, 0)
        self._log[of.worker, own % self._logged] = _row(entry)
        self._counts[place] = own  # whoever dies before this has not done it all
        return entry

    def copy_in_slices(self, worker: int, into: torch.Tensor, slices: int) -> Generator[None, None, Reading]:
        """As `copy` of a racing window, for who lets others write between slices; yields after each."""
        reading = self.begin_reading(worker)
        for part in _parts(self.size, slices):
            into[part] = self.vector[part]
            yield
        return self.end_reading(worker, reading)

    def add_in_slices(
        self, of: Contribution, reading: Reading, gradient: torch.Tensor, instead: torch.Tensor | None, slices: int
    ) -> Generator[None, None, WindowEntry]:
        """As `add` to a racing window, for who lets others read and write between slices; yields in each.

        A slice is read, and written a moment later: what others have written to it in between is lost.
        """
        fewest = self.begin_update(of, reading)
        source = self.vector if instead is None else instead
        probes = self._probes.clone()
        for part in _parts(self.size, slices):
            if part.stop == self.size:
                probes.copy_(self._probes)
            new = torch.add(source[part], gradient[part], alpha=-of.rate)
            yield
            self.vector[part] = new
        self._probes.copy_(probes.add_(1))
        return self.end_update(of, reading, fewest)

    def _make_generation(
        self, of: Contribution, reading: Reading, gradient: torch.Tensor, instead: torch.Tensor | None
    ) -> WindowEntry:
        before = self._head[0]
        update = before + 1
        weights = self._vectors[update % 2]
        torch.add(self._vectors[before % 2] if instead is None else instead, gradient, alpha=-of.rate, out=weights)
        digest = digest_of(weights[sample(update, self.size)].numpy().tobytes())
        staleness = before - reading.made
        entry = WindowEntry(update, of, reading.made, staleness, staleness, digest)
        self._log[0, update % self._logged] = _row(entry)
        self._head[0] = update  # whoever dies before this has done nothing
        place = of.worker * _WORDS
        self._counts[place + _BEGUN] += 1
        self._counts[place + _MADE] += 1
        return entry


def _parts(size: int, slices: int) -> list[slice]:
    """Nearly equal slices of a vector; no more than it has elements."""
    count = min(size, slices)
    return [slice(size * i // count, size * (i + 1) // count) for i in range(count)]


def _row(entry: WindowEntry) -> tuple[float, ...]:
    of = entry.of
    made_of = (of.worker, of.samples, of.step, of.first)
    measured = (of.loss, of.errors, of.rate, entry.digest)
    return (entry.update, *made_of, entry.timestamp, entry.fewest, entry.most, *measured)


def _entry(
    update: int,
    worker: int,
    samples: int,
    step: int,
    first: int,
    timestamp: int,
    fewest: int,
    most: int,
    loss: float,
    errors: float,
    rate: float,
    digest: int,
) -> WindowEntry:
    of = Contribution(worker, step, first, samples, loss, errors, rate)
    return WindowEntry(update, of, timestamp, fewest, most, digest)
