"""Result files with made-up contents, for the tests of what writes and reads them."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rudra.core.records import EPOCH, GRADIENT, LEARNER, TOTALS, UPDATE
from rudra.job.job import Job
from rudra.results.reader import LayoutEntry, ResultsWriter

LAYOUT = (
    LayoutEntry("conv.weight", "parameter", (2, 1, 3, 3), 0, 18),
    LayoutEntry("scale", "parameter", (), 18, 1),
    LayoutEntry("norm.running_mean", "buffer", (4,), 19, 4),
)
SIZE = 23
WEIGHTS = np.arange(SIZE, dtype=np.float32)


def sha256(weights: NDArray[np.float32]) -> str:
    return hashlib.sha256(weights.tobytes()).hexdigest()


def new_writer(path: Path, *, flush_s: float = 0.0, **extra: Any) -> ResultsWriter:
    """A writer for 4 learners; `extra` are attributes, and arguments of the writer."""
    job = Job(name="digits", protocol={"name": "softsync", "n": 2}).resolved(learners=4, threads_per_rank=1)
    arguments = {"layout": LAYOUT, "size": SIZE, "learners": 4, "overwrite": False, "swmr": True}
    arguments |= {"state_dict": (), "carried": None, "carried_weights": (), "roles": None}
    arguments |= {key: extra.pop(key) for key in list(extra) if key in arguments}
    attributes = {"name": "digits", "job": job.to_json(), "driver": "mpi", "protocol": "softsync", "n": 2}
    attributes |= {"modulation": "n", "rate_factor": 0.5}
    attributes |= {"topology": "base", "learners": 4, "minibatch_size": 16, "epochs": 10}
    attributes |= {"hosts": ["köln", "b"], **extra}
    return ResultsWriter(path, attributes=attributes, flush_s=flush_s, **arguments)


def rows(dtype: np.dtype[np.void], count: int = 1, **columns: Any) -> NDArray[np.void]:
    """Rows of a record type: the given columns, 16 samples, no validation split, and zeros."""
    made = np.zeros(count, dtype)
    usual = {"samples": 16, "validation_loss": np.nan, "validation_error": np.nan}
    values: Mapping[str, Any] = {name: usual[name] for name in usual if name in (dtype.names or ())} | columns
    for name, value in values.items():
        made[name] = value
    return made


def write_run(
    path: Path, *, updates: int, epochs: int, staleness: int, finish: bool = True, digest: int = 0, **extra: Any
) -> None:
    """A run whose test error falls, and whose gradients have staleness 0 to 2 * `staleness`; `digest` of weights."""
    times = np.linspace(0.01, 0.01 * updates, updates)
    random = np.random.default_rng(updates)
    sigma = random.binomial(2 * staleness, 0.5, (updates, 2)) if staleness else np.zeros((updates, 2), int)
    with new_writer(path, **extra) as writer:
        stamps = np.arange(updates) + 1
        common = {"timestamp": stamps, "time_s": times, "mean_staleness": sigma.mean(1), "gradients": 2}
        common["digest"] = digest
        writer.append("updates", rows(UPDATE, updates, **common | {"samples": 32, "learning_rate": 0.01}))
        writer.append("gradients", rows(GRADIENT, 2 * updates, update=stamps.repeat(2), staleness=sigma.ravel()))
        last = times[updates * np.arange(1, epochs + 1) // max(1, epochs) - 1] if epochs else 0
        number = np.arange(epochs) + 1
        error = 0.02 + 0.8 / (number + staleness) + random.uniform(0, 0.02, epochs)
        described = {"epoch": number, "evaluated": 1, "test_error": error, "train_error": 0.9 * error}
        described["train_loss"] = 2.5 * error
        writer.append("epochs", rows(EPOCH, epochs, **described, time_s=last, mean_staleness=staleness))
        if finish:
            totals = rows(TOTALS, timestamp=updates, samples=32 * updates, pushed=2 * updates + 3, applied=2 * updates)
            totals["pending"], totals["discarded"], totals["time_s"] = 1, 2, times[-1]
            times_s = {"compute_s": 0.7 * times[-1], "push_s": 0.1 * times[-1], "wait_s": 0.15 * times[-1]}
            learners = rows(LEARNER, 4, learner=range(4), world_rank=range(2, 6), pushed=updates // 2, **times_s)
            writer.finish(totals, learners, WEIGHTS, sha256(WEIGHTS))
        else:
            writer.fail("interrupted", "somebody pressed Ctrl-C")
