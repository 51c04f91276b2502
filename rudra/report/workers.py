"""Facts about heterogeneous workers (protocol `hogbatch`) for a report: each worker's gradients and their times."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rudra.job.table import checked
from rudra.job.tables import HogbatchTable
from rudra.report.curve_styles import Numbers
from rudra.results.reader import Results

MANY = 100
"""Number of windows in an epoch, and in a run's time, over which a loss is averaged."""

_WINDOWS = 40  # number of time windows for utilisation
_LAST = 40  # the last step of a fit has at least 1/40 of an epoch


class Workers(NamedTuple):
    """Work of the workers in one run. Each array has one value for each gradient, ordered by the gradients' ends.

    Attributes:
        rule: rule that chose the batch sizes.
        kinds: kind of each worker.
        threads: number of threads of each worker.
        samples_of_epoch: size of the training set.
        end_s: end of the run.
        updates: number of applied updates of each worker.
        worker: number of the worker that computed the gradient.
        began_s: start of the computation.
        took_s: duration of the computation.
        samples: number of samples of the gradient.
        loss: mean loss over these samples.
    """

    rule: str
    kinds: tuple[str, ...]
    threads: tuple[int, ...]
    samples_of_epoch: int
    end_s: float
    updates: tuple[int, ...]
    worker: NDArray[np.int64]
    began_s: Numbers
    took_s: Numbers
    samples: NDArray[np.int64]
    loss: Numbers

    @property
    def name(self) -> str:
        """Name that distinguishes the run from other runs of the same workers."""
        kinds = set(self.kinds)
        return f"{kinds.pop()} only" if len(kinds) == 1 else self.rule

    def share(self, kind: str) -> float:
        """Returns the share of the updates by workers of a kind, in percent."""
        own = sum(count for count, other in zip(self.updates, self.kinds, strict=True) if other == kind)
        return 100 * own / max(1, sum(self.updates))

    def batches(self, worker: int) -> tuple[Numbers, NDArray[np.int64]]:
        """Returns the start of each of a worker's gradients in seconds, and the size of the batch that contains it."""
        own = self.worker == worker
        return self.began_s[own], self.samples[own] * self.threads[worker]

    def losses(self, parts: int) -> tuple[Numbers, Numbers, Numbers]:
        """Returns seconds, epochs and training loss, averaged over windows.

        A window spans at least 1/`parts` of an epoch, and at least 1/`parts` of the run's time.
        """
        order = np.argsort(self.began_s, kind="stable")
        samples, began_s = self.samples[order], self.began_s[order]
        done = np.cumsum(samples)
        window = done * parts // max(1, self.samples_of_epoch)
        clock = np.floor(began_s * parts / max(self.end_s, 1e-12)).astype(np.int64)
        starts = [0]
        for i in range(1, len(order)):
            last = starts[-1]
            if window[i] > window[last] and (clock[i] > clock[last] or last == 0):
                starts.append(i)
        at = np.array(starts if len(order) else [], np.int64)
        if not len(at):
            return np.zeros(0), np.zeros(0), np.zeros(0)
        count = np.add.reduceat(samples, at)
        loss = np.add.reduceat(self.loss[order] * samples, at) / count
        middle_s, middle = (np.add.reduceat(x * samples, at) / count for x in (began_s, done - samples / 2))
        return middle_s, middle / self.samples_of_epoch, loss

    def falling(self) -> tuple[Numbers, Numbers]:
        """Returns seconds, and the training loss as the non-increasing step function that fits the gradients best.

        A short time with few samples says little about the loss. The steps adapt: they span a few gradients if the loss
        falls fast, and many if it hardly falls. Nothing bounds the last step, so it is at least 1/40 of an epoch.

        Source: the algorithm of pooled adjacent violators (Ayer et al. 1955).
        """
        order = np.argsort(self.began_s, kind="stable")
        enough = self.samples_of_epoch / _LAST
        blocks: list[tuple[float, float, float]] = []  # start, mean, and number of samples
        for began_s, samples, loss in zip(
            *(x[order].tolist() for x in (self.began_s, self.samples, self.loss)), strict=True
        ):
            while blocks and blocks[-1][1] <= loss:
                began_s, mean, count = blocks.pop()
                samples, loss = samples + count, (loss * samples + mean * count) / (samples + count)
            blocks.append((began_s, loss, samples))
        while len(blocks) > 1 and blocks[-1][2] < enough:
            (began_s, mean, count), (_, loss, samples) = blocks[-2:]
            blocks[-2:] = [(began_s, (mean * count + loss * samples) / (count + samples), count + samples)]
        since_s, means, _ = zip(*blocks, strict=True) if blocks else ((), (), ())
        return np.array(since_s, float), np.array(means, float)

    def utilisation(self, worker: int) -> tuple[Numbers, Numbers]:
        """Returns a worker's utilisation over time: the middle of each window in seconds, and the percentage.

        The utilisation of a small worker is its computing time as a share of all time. For a large worker this share is
        scaled by its samples per second relative to its largest batches: in small batches much of the device idles.
        """
        own = self.worker == worker
        began_s, took_s, samples = self.began_s[own], self.took_s[own], self.samples[own]
        edges = np.linspace(0, max(self.end_s, 1e-12), _WINDOWS + 1)
        worth = took_s
        if self.kinds[worker] == "large" and len(took_s) and (took_s > 0).all():
            pace = samples / took_s
            worth = took_s * np.minimum(1.0, pace / np.median(pace[samples >= 0.9 * samples.max()]))
        # The worth of a gradient is spread evenly over its duration.
        done = np.concatenate(([0.0], np.cumsum(worth)))
        busy = np.interp(edges, *_steps(began_s, took_s, done)) if len(took_s) else np.zeros(len(edges))
        return (edges[1:] + edges[:-1]) / 2, 100 * np.diff(busy) / np.diff(edges)

    def used(self, kind: str) -> float | None:
        """Returns the mean utilisation of the workers of a kind, in percent. None: there are none."""
        own = [self.utilisation(i)[1].mean() for i, other in enumerate(self.kinds) if other == kind]
        return float(np.mean(own)) if own else None


def _steps(began_s: Numbers, took_s: Numbers, done: Numbers) -> tuple[Numbers, Numbers]:
    """Returns the corners of the worth completed over time, which rises only during a computation."""
    x, y = np.empty(2 * len(began_s)), np.empty(2 * len(began_s))
    x[0::2], x[1::2] = began_s, began_s + took_s
    y[0::2], y[1::2] = done[:-1], done[1:]
    return np.maximum.accumulate(x), y


def workers_of(results: Results) -> Workers | None:
    """Returns the workers recorded in a result file. None: all learners are alike."""
    rows = np.concatenate([*results.pieces("minibatches"), results.minibatches[:0]])
    if not results.attributes.get("scheduled") or not len(rows):
        return None
    table = checked(HogbatchTable, results.job.get("hogbatch", {}), "hogbatch")
    learners = int(results.summary()["learners"])
    team = table.team(learners)
    rows = rows[np.argsort(rows["time_s"], kind="stable")]
    counts = np.bincount(results.gradients["learner"], minlength=learners)
    return Workers(
        table.rule,
        tuple(worker.kind for worker in team),
        tuple(worker.threads for worker in team),
        int(results.attributes["training_samples"]),
        float(rows["time_s"].max()),
        tuple(int(count) for count in counts),
        rows["learner"].astype(np.int64),
        rows["time_s"] - rows["compute_s"],
        rows["compute_s"].astype(float),
        rows["samples"].astype(np.int64),
        rows["loss"].astype(float),
    )
