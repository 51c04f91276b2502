"""Measured times of the forms of a bank, which later runs of the same job on this machine use again."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from rudra.compute.bank.graphs import streams_of
from rudra.compute.device.devices import kind_of
from rudra.compute.flat import FlatModel
from rudra.data.load import DataInfo
from rudra.errors import ResultsError
from rudra.files import cache_directory, written
from rudra.job.job import Job
from rudra.job.table import named
from rudra.machine import cores, processor

Times = Mapping[str, float]
"""Seconds of the gradients of all learners of a bank together, by form."""


class MeasuredForms:
    """File with the times of the forms of a bank.

    Args:
        job: Resolved job.
        model: Model of the job.
        info: Description of its data.
        forms: Forms that the job may use.

    Attributes:
        path: Path of the file. Its name has the model's name, and a digest of all that decides the times.
    """

    def __init__(self, job: Job, model: FlatModel, info: DataInfo, forms: Sequence[str]) -> None:
        cluster, training, device = job.cluster, job.training, model.device
        self._forms = {*forms}
        about: dict[str, Any] = {
            "model": [named(job.model.name), job.model.options, model.size],
            "data": [named(job.data.name), info.input_shape, info.classes],
            "task": [named(job.task.name), job.task.options],
            "minibatch_size": [training.minibatch_size, training.microbatches],
            "precision": [training.precision, training.compile, training.gradients, cluster.deterministic],
            "learners": [cluster.tried_bank_size, streams_of(job, device), cluster.threads_per_rank],
            "device": [device.type, kind_of(device).model(device) or processor(), cores()],
            "torch": torch.__version__,
        }
        self._about = json.loads(json.dumps(about, default=str, sort_keys=True))
        digest = hashlib.sha256(json.dumps(self._about, sort_keys=True).encode()).hexdigest()[:16]
        name = "".join(letter if letter.isalnum() else "-" for letter in named(job.model.name)[:60])
        self.path = cache_directory() / f"bank-{name}-{digest}.json"

    def read(self) -> Times | None:
        """Returns the times of all these forms. None: the file does not have them, or is damaged."""
        try:
            found = json.loads(self.path.read_bytes())
            times = {form: float(seconds) for form, seconds in found["seconds"].items()}
            usable = found["about"] == self._about and all(0 < each < math.inf for each in times.values())
        except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
            return None
        return {form: times[form] for form in self._forms} if usable and self._forms <= times.keys() else None

    def write(self, times: Times) -> None:
        """Replaces the file at once. Without a directory to write to, the next run measures again."""
        with suppress(OSError, ResultsError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with written(self.path) as file:
                file.write(json.dumps({"about": self._about, "seconds": dict(times)}, indent=1).encode())
