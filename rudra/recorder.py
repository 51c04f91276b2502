"""Where the statistics server's rows go: the result file and the progress bar, for both drivers."""

import platform
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rudra.config import Job
from rudra.events import Finish, Record
from rudra.flat import Entry, sha256
from rudra.progress import Progress
from rudra.writer import ResultsWriter

VERSIONED = ("rudra", "torch", "numpy", "mpi4py", "h5py")


class Recorder:
    """Writes what the statistics server records, and shows it.

    Args:
        writer: of the result file.
        progress: the bar.
        weights: gives the floats of a buffer of a role, for the final weights.
    """

    def __init__(
        self, writer: ResultsWriter, progress: Progress, weights: Callable[[int, str], npt.NDArray[np.float32]]
    ) -> None:
        self._writer, self._progress, self._weights = writer, progress, weights

    def record(self, action: Record) -> None:
        self._writer.append(action.table, action.rows)
        if action.table == "updates":
            self._progress.updates(action.rows)
        elif action.table == "epochs":
            self._progress.epochs(action.rows)

    def idle(self) -> None:
        """Lets rows that wait reach the file; to be called when there is nothing else to do."""
        self._writer.flush()

    def finish(self, role: int, action: Finish) -> None:
        weights = self._weights(role, action.weights)
        self._writer.finish(action.totals, action.learners, weights, sha256(weights))
        self._progress.close()

    def warn(self, name: str, text: str) -> None:
        print(f"rudra: {name}: {text}", file=sys.stderr, flush=True)


def make_writer(
    path: Path, job: Job, layout: Sequence[Entry], size: int, initial_sha256: str, overwrite: bool, **about: Any
) -> ResultsWriter:
    """The result file of a resolved job, with everything in it that is known before the first gradient.

    Args:
        path: of the file.
        job: resolved.
        layout: what the flat vector holds.
        size: of that vector.
        initial_sha256: hash of the weights that all learners start from.
        overwrite: whether an existing file may be replaced.
        about: attributes that only the driver knows, and those that `attributes` takes.
    """
    return ResultsWriter(
        path,
        attributes={**attributes(job, **about), "initial_weights_sha256": initial_sha256},
        layout=layout,
        size=size,
        learners=job.learners,
        flush_s=job.results.flush_s,
        overwrite=overwrite,
    )


def attributes(job: Job, *, driver: str, training_samples: int, classes: int, **extra: Any) -> dict[str, Any]:
    """What the result file says of the run as a whole.

    Args:
        job: resolved.
        driver: "mpi" or "simulation".
        training_samples: size of the training set.
        classes: of the data.
        extra: what only the driver knows.
    """
    protocol = job.make_protocol()
    return {
        "name": job.name,
        "job": job.to_json(),
        "driver": driver,
        "protocol": _text(job.protocol.name),
        "n": protocol.n,
        "gradients_per_update": protocol.gradients_per_update,
        "topology": _text(job.topology.name),
        "learners": job.learners,
        "minibatch_size": job.training.minibatch_size,
        "epochs": job.training.epochs,
        "seed": job.training.seed,
        "threads_per_rank": job.cluster.threads_per_rank,
        "flush_denormals": job.cluster.flush_denormals,
        "training_samples": training_samples,
        "classes": classes,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "python_version": platform.python_version(),
        **{f"{name}_version": _version(name) for name in VERSIONED},
        **extra,
    }


def _text(name: Any) -> str:
    return name if isinstance(name, str) else f"{name.__module__}:{name.__qualname__}"


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "unknown"
