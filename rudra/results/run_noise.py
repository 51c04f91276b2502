"""Gradient noise scale of a run, from the norms in its tables: for all updates, and for each epoch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rudra.core.messages import Rows
from rudra.results.noise_scale import Moments, NoiseScale, noise_scale, of_averages, of_neighbours, of_replicas
from rudra.results.norms import with_gradient_norms
from rudra.results.tables import RunTables

CORRECTED = "gradients are corrected after their norms are measured: B includes the corrections"
ESTIMATE = "estimated from the distances of replicas"
NEIGHBOURS = "biased: from gradients of successive updates, so B is too large"
DRIFT = "gradients of different weights: B includes their drift"


@dataclass(frozen=True)
class RunNoise:
    """Moments of the gradients of some updates. The arrays have the shape (updates,).

    Attributes:
        moments: Estimates of |G|² and tr(Σ).
        timestamp: Timestamp of each update.
        epoch: Epoch of each update.
        samples: Samples of each update.
        note: Other contents of the estimate, in words. Empty: it has none.
        reason: Why there is no estimate, however many updates there are. Empty: there may be one.
    """

    moments: Moments
    timestamp: NDArray[np.int64]
    epoch: NDArray[np.int32]
    samples: NDArray[np.int64]
    note: str = ""
    reason: str = ""

    def of_epoch(self, epoch: int) -> "RunNoise":
        """Returns the moments of the updates of an epoch."""
        there = self.epoch == epoch
        columns = (self.timestamp[there], self.epoch[there], self.samples[there])
        return RunNoise(self.moments.of(there), *columns, self.note, self.reason)

    @property
    def scale(self) -> NoiseScale:
        """B of all updates."""
        return noise_scale(self.moments)

    @property
    def update_samples(self) -> float:
        """Mean number of samples of an update. NaN: there is no update."""
        return float(self.samples.mean()) if len(self.samples) else math.nan

    @property
    def figures(self) -> dict[str, Any]:
        """Figures for `rudra show --json`. None: unknown."""
        scale, stamps = self.scale, self.timestamp
        first, last = (int(stamps[0]), int(stamps[-1])) if len(stamps) else (None, None)
        found = {"samples": finite(scale.samples), "error": finite(scale.error), "updates": scale.updates}
        about = {"first_update": first, "last_update": last, "needed_updates": scale.needed}
        texts = {"note": self.note or None, "reason": self.reason or None}
        return found | about | {"update_samples": finite(self.update_samples)} | texts


@np.errstate(all="ignore")  # `_made` leaves out what is not finite, such as norms of a run that diverged
def noise_of(results: RunTables) -> RunNoise | None:
    """Estimates the moments of a run's gradients from each update whose gradients all have norms.

    Returns:
        The moments. None: the run records no norms.
    """
    if not results.has_norms:
        return None
    updates = results.updates
    updates = updates[np.isfinite(updates["norm"]) & (updates["samples"] > 0)]
    averages, job = bool(results.attributes.get("averaging")), results.job
    if len(updates) and (updates["gradients"] == 1).all():
        if averages:
            return _unknown("each replica is averaged with the weights separately")
        if len(updates) > 1 and np.isnan(updates["product"]).all():
            return _unknown("an update has one gradient, in rows or on several servers, and none is kept for the next")
        return _made(of_neighbours(updates["samples"], updates["norm"] ** 2, updates["product"]), updates, NEIGHBOURS)
    optimizer = job.get("optimizer", {})
    if averages and results.attributes.get("sharing", "nothing") != "nothing":
        return _unknown("learners share replicas or references, so distances do not show their noise")
    if averages and (optimizer.get("name") != "sgd" or optimizer.get("momentum") or optimizer.get("clip_norm")):
        return _unknown("replicas do not take steps of plain SGD, without momentum and clip_norm")
    if averages:
        return _of_replicas(results, updates)
    gradients, place, updates = _complete(results.gradients, updates)
    samples = gradients["samples"]
    shares = samples * gradients["scale"] / updates["samples"][place]
    moments = of_averages(place, samples, shares, gradients["norm"] ** 2, updates["norm"] ** 2)
    notes = [CORRECTED] if job.get("protocol", {}).get("correction") is not None else []
    notes += [DRIFT] if _mixed(gradients["timestamp"], place, len(updates)) else []
    return _made(moments, updates, "; ".join(notes))


def _of_replicas(results: RunTables, updates: Rows) -> RunNoise:
    """A gradient of a replica covers its mini-batches of a period. The norm of the last one's gradient is recorded."""
    gradients, place, updates = _complete(results.recorded("gradients"), updates)
    period = np.rint(updates["samples"] / (updates["gradients"] * results.attributes["minibatch_size"]))
    distance, elasticity = _distances(gradients, results.averages)
    samples = gradients["samples"].copy()
    shares = samples / updates["samples"][place]
    gradients["samples"] = samples // np.maximum(1, period).astype(np.int64)[place]
    gradients = with_gradient_norms(gradients, results.gradient_norms)

    def mean(values: NDArray[np.float64]) -> NDArray[np.float64]:
        found: NDArray[np.float64] = np.bincount(place, shares * values, len(updates)).astype(np.float64, copy=False)
        return found

    differences = of_averages(place, samples, shares, distance**2, updates["norm"] ** 2)
    about = (mean(gradients["norm"] ** 2), mean(1 / gradients["samples"]), elasticity[_first(place)])
    moments = of_replicas(differences, *about, updates["learning_rate"] * period)
    return _made(moments, updates, ESTIMATE)


def _distances(gradients: Rows, averages: Rows) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns the distance of each gradient's replica from the weights, and the average's elasticity. NaN: unknown."""
    averages = averages[averages["distance"] > 0]
    keys = [
        (table[stamp] << 32) + table["learner"] for table, stamp in ((gradients, "update"), (averages, "timestamp"))
    ]
    _, mine, its = np.intersect1d(*keys, return_indices=True)
    distance, elasticity = np.full((2, len(gradients)), np.nan)
    distance[mine] = averages["distance"][its]
    correction: NDArray[np.float64] = averages["correction"][its]
    elasticity[mine] = correction / distance[mine]
    return distance, elasticity


def _complete(gradients: Rows, updates: Rows) -> tuple[Rows, NDArray[np.int64], Rows]:
    """Returns the gradients of those updates that have all their gradients, the place of each one's update, and these
    updates."""
    stamps, count = updates["timestamp"], len(updates)
    place = np.searchsorted(stamps, gradients["update"])
    there = (place < count) & (gradients["samples"] > 0)
    there[there] = stamps[place[there]] == gradients["update"][there]
    gradients, place = gradients[there], place[there]
    wanted: NDArray[np.int32] = updates["gradients"]
    complete = np.bincount(place, minlength=count) == wanted
    here = complete[place]
    return gradients[here], (np.cumsum(complete) - 1)[place[here]], updates[complete]


def _made(moments: Moments, updates: Rows, note: str) -> RunNoise:
    """Leaves out updates without an estimate: of one gradient, or with a gradient whose norm is not recorded."""
    known = (moments.weight > 0) & np.isfinite(moments.signal) & np.isfinite(moments.noise)
    updates = updates[known]
    return RunNoise(moments.of(known), updates["timestamp"], updates["epoch"], updates["samples"], note)


def _unknown(reason: str) -> RunNoise:
    nothing, none = np.zeros(0), np.zeros(0, np.int64)
    return RunNoise(Moments(nothing, nothing, nothing), none, none.astype(np.int32), none, reason=reason)


def _first(place: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the place of the first gradient of each update."""
    found: NDArray[np.int64] = np.unique(place, return_index=True)[1]
    return found


def _mixed(timestamps: NDArray[np.int64], place: NDArray[np.int64], updates: int) -> bool:
    """Returns whether gradients of one update were computed from different weights."""
    last = np.zeros(updates, np.int64)
    last[place] = timestamps
    return bool((last[place] != timestamps).any())


def finite(value: float) -> float | None:
    """Returns a number for JSON, which has no NaN."""
    return value if math.isfinite(value) else None


def plus_minus(value: float, error: float) -> str:
    """Formats a number and its standard error, which gets two digits: `812 ± 40`, `4.3 ± 1.2`."""
    places = max(0, 1 - math.floor(math.log10(error))) if error > 0 else 0
    return f"{value:,.{places}f} ± {error:,.{places}f}"


def described(noise: dict[str, Any], epochs: Sequence[dict[str, Any]], first_epoch: int) -> str:
    """Describes the noise scale of a run in words.

    Args:
        noise: `RunNoise.figures` of the run.
        epochs: `RunNoise.figures` of each epoch.
        first_epoch: Number of the first of these epochs.
    """
    count, first, last = noise["updates"], noise["first_update"], noise["last_update"]
    if noise["reason"]:
        return f"unknown: {noise['reason']}"
    if noise["samples"] is None:
        needed = f"at least {noise['needed_updates']:,} are needed"
        return f"unknown: {count:,} updates are too few, {needed}"
    note = f"; {noise['note']}" if noise["note"] else ""
    which = f"updates {first:,}–{last:,}" if last - first + 1 == count else f"{count:,} of updates {first:,}–{last:,}"
    known = [number for number, epoch in enumerate(epochs) if epoch["samples"] is not None]
    late = f", {_text(epochs[known[-1]])} in epoch {first_epoch + known[-1]}" if known and len(epochs) > 1 else ""
    return f"{_text(noise)} samples ({which}){late}; an update has {noise['update_samples']:,.0f}{note}"


def _text(noise: dict[str, Any]) -> str:
    return plus_minus(noise["samples"], noise["error"])
