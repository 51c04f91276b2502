"""Weights that several workers of a node share and update themselves: a window of memory that all of them map.

Under `"racing"` there is one vector. Workers read it and add to it whenever they like, without a lock (Hogwild); what
two of them write to one element at the same time may be lost, and nothing is promised. How much is lost is measured:
behind the weights lie probes, to each of which every update adds 1 by the same kind of write (`surviving`).

Under `"locked"` there are two generations of the vector, of which a number says which is the latest. It is copied under
a lock, and an update is written into the other one, again under the lock; then the number changes. So whoever dies in
between leaves the latest generation whole. Who made which generation, of which, is logged beside them.

Source: Hogbatch §5.1 and §6.1 (racing), which take their updates from Hogwild (Niu et al.).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from rudra.core.digest import digest_of, sample

Update = Literal["racing", "locked"]

PROBES = 8
"""Elements that count updates: a cache line of int64."""

LOGGED = 1 << 14
"""Latest updates of which the log says who made them."""

_LINE = 64
_WORDS = _LINE // 8
_BEGUN, _MADE = 0, 1  # words of a worker's cache line, which nobody else writes

LOG = np.dtype([("update", "<i8"), ("worker", "<i8"), ("step", "<i8"), ("timestamp", "<i8")])
"""One update of a locked window: its number, who made it, by which of its gradients, of which weights."""


class Reading(NamedTuple):
    """When weights were read: between which counts of the others' updates.

    Attributes:
        made: that were complete when reading began.
        begun: that had begun when it ended.
    """

    made: int
    begun: int


class Applied(NamedTuple):
    """What has come of an update of the window.

    Attributes:
        update: number of the update that made the weights; -1 where nobody can tell.
        timestamp: updates that were complete when the gradient's weights were read; in a locked window those of which
            they were.
        fewest, most: how many updates of others may have come between reading and writing: σ lies between.
        digest: of a sample of the new weights; 0 where nobody can tell.
    """

    update: int
    timestamp: int
    fewest: int
    most: int
    digest: int


def window_bytes(size: int, workers: int, update: Update) -> int:
    """Memory that a window needs."""
    return sum(_sections(size, workers, update))


def _sections(size: int, workers: int, update: Update) -> tuple[int, int, int, int]:
    """Bytes of its sections: the number of the latest generation, the workers' counts, the log, vectors with probes."""
    vector = -(-size * 4 // _LINE) * _LINE + PROBES * 8
    locked = update == "locked"
    return _LINE, workers * _LINE, LOGGED * LOG.itemsize if locked else 0, vector * (2 if locked else 1)


class Window:
    """One worker's, or the coordinator's, view of the shared weights.

    Args:
        memory: of `window_bytes`, aligned to 64 bytes, zeros at first; the same for all.
        size: floats of the weights.
        workers: that write to it.
        update: how.
        lock: gives what is held while something is read or written, in a locked window; each thread of each process
            that shares the memory has to be kept out by it.

    Attributes:
        update: how it is written to.
        vector: (size,) float32, the weights, of a racing window; of a locked one the latest generation is `latest`.
    """

    def __init__(
        self,
        memory: npt.NDArray[np.uint8],
        size: int,
        workers: int,
        update: Update,
        lock: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.update, self.size, self._lock = update, size, lock
        ends = np.cumsum(_sections(size, workers, update)).tolist()
        self._numbers = memory[: ends[2]]
        self._head = memory[:8].data.cast("B").cast("q")
        counts = memory[ends[0] : ends[1]].data.cast("B").cast("q")
        self._counts, self._begun, self._made = counts, counts[_BEGUN::_WORDS], counts[_MADE::_WORDS]
        self._log = memory[ends[1] : ends[2]].view(LOG)
        vectors = memory[ends[2] : ends[3]].reshape(2 if update == "locked" else 1, -1)
        self._vectors = [torch.from_numpy(vector[: size * 4].view(np.float32)) for vector in vectors]
        self._probes = torch.from_numpy(vectors[0][-PROBES * 8 :].view(np.int64))
        self.vector = self._vectors[0]

    # The coordinator, while nobody writes.

    def fill(self, weights: torch.Tensor) -> None:
        """Begins anew with these weights, (size,) float32; all counts are 0."""
        self._vectors[0].copy_(weights)
        self._numbers[:] = 0
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
        """How many updates are complete."""
        return self._head[0] if self.update == "locked" else sum(self._made)

    def maker(self, update: int) -> tuple[int, int, int] | None:
        """Who made an update of a locked window: worker, its step, timestamp of its weights; None: too long ago."""
        row = self._log[update % LOGGED]
        if row["update"] != update or update > self.made:
            return None
        return int(row["worker"]), int(row["step"]), int(row["timestamp"])

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

    def begin(self, worker: int) -> Reading:
        """Reading in place begins."""
        made = self._others(self._made, worker)
        return Reading(made, made)

    def copy(self, worker: int, into: torch.Tensor) -> Reading:
        """Copies the weights to `into`, (size,) float32; in a locked window a whole generation."""
        if self.update == "locked":
            with self._lock():
                into.copy_(self.latest)
                return Reading(self._head[0], self._head[0])
        made = self._others(self._made, worker)
        into.copy_(self.vector)
        return Reading(made, self._others(self._begun, worker))

    def add(
        self,
        worker: int,
        step: int,
        reading: Reading,
        gradient: torch.Tensor,
        rate: float,
        instead: torch.Tensor | None = None,
    ) -> Applied:
        """Subtracts `rate * gradient` from the weights as they are now.

        Args:
            worker: whose update it is.
            step: which of its gradients.
            reading: of the weights that the gradient is of.
            gradient: (size,) float32.
            rate: α.
            instead: subtract from these weights, and overwrite those that there are by what comes of it: what others
                have done meanwhile is lost.
        """
        if self.update == "locked":
            with self._lock():
                return self._make_generation(worker, step, reading, gradient, rate, instead)
        place = worker * _WORDS
        fewest = max(0, self._others(self._made, worker) - reading.begun)
        self._counts[place + _BEGUN] += 1
        if instead is None:
            self.vector.add_(gradient, alpha=-rate)
        else:
            torch.add(instead, gradient, alpha=-rate, out=self.vector)
        self._probes.add_(1)
        most = self._others(self._begun, worker) - reading.made
        own = self._counts[place + _MADE] = self._counts[place + _MADE] + 1
        return Applied(-1, reading.made + own - 1, fewest, most, 0)

    def _make_generation(
        self,
        worker: int,
        step: int,
        reading: Reading,
        gradient: torch.Tensor,
        rate: float,
        instead: torch.Tensor | None,
    ) -> Applied:
        before = self._head[0]
        update = before + 1
        weights = self._vectors[update % 2]
        torch.add(self._vectors[before % 2] if instead is None else instead, gradient, alpha=-rate, out=weights)
        self._log[update % LOGGED] = (update, worker, step, reading.made)
        digest = digest_of(weights[sample(update, self.size)].numpy().tobytes())
        self._head[0] = update  # whoever dies before this has done nothing
        place = worker * _WORDS
        self._counts[place + _BEGUN] += 1
        self._counts[place + _MADE] += 1
        return Applied(update, reading.made, before - reading.made, before - reading.made, digest)
