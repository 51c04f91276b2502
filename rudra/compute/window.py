"""Shared-memory windows: weights that several workers of a node map and update directly.

A `"racing"` window has one vector. Workers read it and add to it at any time without a lock (Hogwild). If two workers
write to one element at the same time, one write may be lost, and there are no guarantees. Probes measure the loss: they
follow the weights, and every update adds 1 to each probe by the same kind of write (`surviving`).

A `"locked"` window has two generations of the vector, and a number that says which is the latest. Workers copy it under
a lock. They write an update into the other generation, again under the lock, and then change the number. So if a worker
dies during an update, the latest generation is still complete. A log records the worker and the source of each
generation.

Source: Hogbatch §5.1 and §6.1 (racing), with updates from Hogwild (Niu et al.).
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
"""Number of elements that count updates: a cache line of int64."""

LOGGED = 1 << 14
"""Least number of latest updates in a log: more than workers make between two reads of the log."""

_LINE = 64
_WORDS = _LINE // 8
_BEGUN, _MADE = 0, 1  # words of a worker's cache line; only the worker writes to it


class Reading(NamedTuple):
    """Time when weights were read, given by counts of other workers' updates.

    Attributes:
        made: Number of updates that were complete when reading began. In a locked window, of all workers.
        begun: Number of updates that had begun when reading ended.
    """

    made: int
    begun: int


class Contribution(NamedTuple):
    """Description of an update without its gradient.

    Attributes:
        worker: Number of the worker in the window.
        step: Index among the worker's gradients.
        first, samples: First sample and number of samples of the gradient, as in `rudra.core.work.Work`.
        loss, errors: Loss and errors of these samples.
        rate: Learning rate α.
    """

    worker: int
    step: int
    first: int
    samples: int
    loss: float
    errors: float
    rate: float


class WindowEntry(NamedTuple):
    """A complete update in the log.

    Attributes:
        update: Number of the update in a locked window. In a racing window the order is unknown, so it is the number
            among the worker's own updates.
        of: Contribution of the update.
        timestamp: Number of updates that were complete when the weights of its gradient were read.
        fewest, most: Bounds on σ, the number of other workers' updates between reading and writing.
        digest: Digest of a sample of the new weights. In a racing window it is 0, because others write concurrently.
    """

    update: int
    of: Contribution
    timestamp: int
    fewest: int
    most: int
    digest: int


LOG = np.dtype(
    [
        ("update", "<i8"),
        *((name, "<f8" if name in {"loss", "errors", "rate"} else "<i8") for name in Contribution._fields),
        *(("timestamp", "<i8"), ("fewest", "<i8"), ("most", "<i8"), ("digest", "<u8")),
    ]
)
"""One logged update: its number, among all updates or its worker's, and its contribution."""


class WindowLayout(NamedTuple):
    """Layout of a window.

    Attributes:
        size: Number of floats in the weights.
        workers: Number of workers that write to it.
        update: Kind of window, `"racing"` or `"locked"`.
        logged: Number of latest updates in the log. In a racing window, for each worker.
    """

    size: int
    workers: int
    update: Update
    logged: int = LOGGED

    @property
    def bytes(self) -> int:
        """Memory size of the window."""
        return self.ends[-1]

    @property
    def ends(self) -> list[int]:
        """Ends of the sections in bytes: the number of the latest generation, the workers' counts, the log, and the
        vectors, each followed by its probes.
        """
        vector = -(-self.size * 4 // _LINE) * _LINE + PROBES * 8
        log = self.logs * self.logged * LOG.itemsize
        sections = (_LINE, self.workers * _LINE, -(-log // _LINE) * _LINE, vector * self.generations)
        return list(accumulate(sections))

    @property
    def generations(self) -> int:
        """Number of vectors."""
        return 2 if self.update == "locked" else 1

    @property
    def logs(self) -> int:
        """Number of logs: one for all updates, or one for each worker."""
        return 1 if self.update == "locked" else self.workers


class Window:
    """The shared weights, as one process sees them.

    Args:
        memory: `shape.bytes` bytes, aligned to 64 bytes and initially zero. The same for all processes.
        shape: Layout of the window.
        lock: Returns the lock for reads and writes of a locked window. It must exclude every thread of every process
            that shares the memory.

    Attributes:
        update: Kind of window, `"racing"` or `"locked"`.
        size: Number of floats in the weights.
        lock: As given.
        vector: (size,) float32, the weights of a racing window. For a locked window use `latest`.
    """

    def __init__(
        self,
        memory: npt.NDArray[np.uint8],
        shape: WindowLayout,
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

    # Methods for the owner of the weights.

    def fill(self, weights: torch.Tensor, timestamp: int = 0) -> None:
        """Restarts from these weights, (size,) float32, after `timestamp` updates. Nobody may use them at the time."""
        self._numbers[:] = 0
        self._head[0] = timestamp
        self.latest.copy_(weights)
        self._probes.zero_()

    @property
    def latest(self) -> torch.Tensor:
        """Current weights, (size,) float32."""
        return self._vectors[self._head[0] % len(self._vectors)]

    @property
    def made(self) -> int:
        """Returns the number of complete updates, including updates before this window."""
        return self._head[0] if self.update == "locked" else self._head[0] + sum(self._made)

    def entries(self, worker: int, after: int) -> list[WindowEntry]:
        """Returns the complete updates of a worker after the first `after`, in order.

        Args:
            worker: Number of the worker, which makes no more updates.
            after: Number of updates to skip: in a locked window among all workers' updates, else among this worker's.

        Raises:
            RunError: The log no longer contains all of them.
        """
        locked = self.update == "locked"
        ring = self._log[0 if locked else worker]
        last = self._head[0] if locked else self._made[worker]
        if last - after > len(ring):
            raise RunError(f"the window's log has the latest {len(ring)} updates, but {last - after} are needed")
        rows = (ring[update % len(ring)].item() for update in range(after + 1, last + 1))
        count = len(Contribution._fields)
        return [
            WindowEntry(update, Contribution(*rest[:count]), *rest[count:])
            for update, *rest in rows
            if rest[0] == worker
        ]

    @property
    def surviving(self) -> float:
        """Returns β, the share of updates that races did not overwrite, measured by the probes.

        It is 1 before the first update.

        Source: Hogbatch §6.3, which assumes a value of β.
        """
        made = sum(self._made)
        return float(self._probes.double().mean()) / made if made and self.update == "racing" else 1.0

    # Methods for workers.

    def _others(self, counts: memoryview, worker: int) -> int:
        return sum(counts) - counts[worker]

    def begin_reading(self, worker: int) -> Reading:
        """Records that a worker begins to read a racing window in place."""
        made = self._others(self._made, worker)
        return Reading(made, made)

    def end_reading(self, worker: int, reading: Reading) -> Reading:
        """Records that the worker has read all weights."""
        return Reading(reading.made, self._others(self._begun, worker))

    def copy(self, worker: int, into: torch.Tensor) -> Reading:
        """Copies the weights to `into`, (size,) float32. In a locked window the copy is one complete generation."""
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
        """Subtracts the rate times the gradient from the current weights.

        Args:
            of: Contribution of the update.
            reading: Reading of the weights that the gradient was computed from.
            gradient: (size,) float32.
            instead: Weights to subtract from. The result overwrites the current weights, so updates that others made
                since are lost.
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
        """Records that a worker begins to write to a racing window. Returns `fewest` of its entry."""
        self._counts[of.worker * _WORDS + _BEGUN] += 1
        return max(0, self._others(self._made, of.worker) - reading.begun)

    def end_update(self, of: Contribution, reading: Reading, fewest: int) -> WindowEntry:
        """Records that the worker has completed its update."""
        most = self._others(self._begun, of.worker) - reading.made
        place = of.worker * _WORDS + _MADE
        own = self._counts[place] + 1
        entry = WindowEntry(own, of, self._head[0] + reading.made + own - 1, fewest, most, 0)
        self._log[of.worker, own % self._logged] = (own, *of, *entry[2:])
        self._counts[place] = own  # a worker that dies before this line has not completed the update
        return entry

    def copy_in_slices(self, worker: int, into: torch.Tensor, slices: int) -> Generator[None, None, Reading]:
        """Copies a racing window as `copy` does, but yields after each slice so that others can write in between."""
        reading = self.begin_reading(worker)
        for part in _parts(self.size, slices):
            into[part] = self.vector[part]
            yield
        return self.end_reading(worker, reading)

    def add_in_slices(
        self, of: Contribution, reading: Reading, gradient: torch.Tensor, instead: torch.Tensor | None, slices: int
    ) -> Generator[None, None, WindowEntry]:
        """Adds to a racing window as `add` does, but yields within each slice so that others can read and write.

        A slice is read and written back a moment later: writes by others in between are lost.
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
        self._log[0, update % self._logged] = (update, *of, *entry[2:])
        self._head[0] = update  # a worker that dies before this line has changed nothing
        place = of.worker * _WORDS
        self._counts[place + _BEGUN] += 1
        self._counts[place + _MADE] += 1
        return entry


def _parts(size: int, slices: int) -> list[slice]:
    """Returns nearly equal slices of a vector, at most one for each element."""
    count = min(size, slices)
    return [slice(size * i // count, size * (i + 1) // count) for i in range(count)]
