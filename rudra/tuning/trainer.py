"""Trains probes in virtual time, as far as a store does not know them."""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rudra import api
from rudra.errors import ConfigError, RunError
from rudra.job.job import Job
from rudra.job.target import Target
from rudra.log import only_errors
from rudra.results import checkpoint
from rudra.results.reader import open_results
from rudra.results.run_noise import noise_of
from rudra.tuning.probes import Noise, Outcome, Probe
from rudra.tuning.ruler import Mark, reached
from rudra.tuning.space import trajectory, with_settings
from rudra.tuning.state import SearchState
from rudra.tuning.store import Evaluation, Measured, ProbeStore

SHORT = 8
"""Mini-batches of each learner in the runs that show whether code and data are the same."""

HORIZON = 0.25
"""Epochs over which the average of the weights that judges a probe reaches back."""


class Trainer:
    """Trains probes in virtual time.

    Args:
        job: Job as `searched` returns it, with its costs.
        target: Target of the search.
        store: What probes measured, also in other searches.
        code: Digest of the user's code and data, see `code_digest`.
        state: State of the search.
    """

    def __init__(self, job: Job, target: Target, store: ProbeStore, code: str, state: SearchState) -> None:
        self._job, self._target, self._store, self._code, self._state = job, target, store, code, state

    def job_of(self, settings: Mapping[str, Any]) -> Job:
        """Returns the job of a probe."""
        return averaged(with_settings(self._job, settings), self._state.training_samples)

    def train(self, probe: Probe, before: Outcome | None) -> Outcome:
        """Trains a probe up to its length, as far as it is not known. See `Train`."""
        digest = self._digest(probe)
        found = self._store.read(digest)
        if len(found.evaluations) < probe.epochs and not found.failed:
            found = self._trained(probe, digest, found)
            self._store.keep(digest, found)
        marks = self._marks(probe, found.evaluations[: probe.epochs])
        return Outcome(marks, found.failed if len(marks) < probe.epochs else "", found.noise)

    def _marks(self, probe: Probe, evaluations: Sequence[Evaluation]) -> tuple[Mark, ...]:
        rate, marks = self._state.rate(probe.by_key), []
        for samples, scores in evaluations:
            value = self._target.of(scores)
            metric = math.nan if value is None else value
            marks.append(Mark(samples, scores["loss"], metric, samples / rate))
        return tuple(marks)

    def checkpoint(self, probe: Probe, epochs: int) -> tuple[int, Path] | None:
        """Returns the checkpoint of a probe after a number of epochs. If it is gone, returns the latest one, if any.

        Args:
            probe: Probe at its present length.
            epochs: Number of epochs of the probe.

        Returns:
            Number of epochs, and the path.
        """
        digest = self._digest(probe)
        there = self._store.checkpoint(digest, epochs).is_file()
        found = epochs if there else self._store.latest(digest, probe.epochs)
        return (found, self._store.checkpoint(digest, found)) if found else None

    def _trained(self, probe: Probe, digest: str, found: Measured) -> Measured:
        """Trains a probe from its latest checkpoint to its length."""
        done = self._store.latest(digest, len(found.evaluations))
        begin = self._store.checkpoint(digest, done) if done else self._origin(probe)
        job, total = self.job_of(probe.by_key), probe.begins_at + probe.epochs
        job = job.with_(training={"epochs": total, "seed": job.training.seed + probe.seed})
        if measures := not (begin or probe.seed):
            job = _with_norms(job)
        output, failed = self._store.scratch(f"part-{digest}.h5"), ""
        try:
            with only_errors():
                carry: api.Carry = "state" if begin else "weights"
                api.simulate(job, output=output, force=True, from_=begin, carry=carry, progress="quiet").close()
        except RunError as error:
            failed = str(error)
        known = found.evaluations[:done]
        first = (_samples_at(begin) if begin else 0) - (known[-1].samples if known else 0)
        evaluations = [*known, *_evaluations(output, first)]
        for kept in output.parent.glob(f"{output.stem}-*.ckpt"):
            kept.rename(self._store.checkpoint(digest, int(kept.stem.rpartition("-")[2]) - probe.begins_at))
        marks = self._marks(probe, evaluations)
        end = reached(marks, self._target.value, at_least=self._target.at_least)
        self._store.forget(digest, but=(len(marks), 0 if end is None else marks.index(end) + 1))
        noise = _noise(output) if measures and not failed else found.noise
        output.unlink(missing_ok=True)
        return Measured(tuple(evaluations), failed, noise)

    def _origin(self, probe: Probe) -> Path | None:
        """Returns the checkpoint that a probe begins with. None: it begins with the initial weights."""
        if not probe.origin:
            return None
        before = self._before(probe)
        path = self._store.checkpoint(self._digest(before), before.epochs)
        if not path.is_file():
            self._trained(before, self._digest(before), Measured())
        return path

    def _before(self, probe: Probe) -> Probe:
        """Returns the probe whose end a probe begins with."""
        name, _, epochs = probe.origin.rpartition("-")
        before = self._state.probes[name]
        return before._replace(epochs=int(epochs) - before.begins_at)

    def _digest(self, probe: Probe) -> str:
        """Returns a digest of everything that decides the weights of a probe, except its length."""
        job = self.job_of(probe.by_key)
        seeded = job.with_(training={"seed": job.training.seed + probe.seed})
        before = self._before(probe) if probe.origin else None
        origin = [self._digest(before), before.epochs] if before else []
        text = json.dumps([self._code, trajectory(seeded), *origin])
        return hashlib.sha256(text.encode()).hexdigest()[:24]


def _evaluations(output: Path, first: int) -> Iterator[Evaluation]:
    """Yields the evaluations of a result file, with samples after the first ones."""
    if not output.is_file():  # the run failed before its first update
        return
    with open_results(output) as results:
        metrics = results.metrics
        for row in results.epochs:
            mine = metrics[(metrics["epoch"] == row["epoch"]) & (metrics["split"] == b"validation")]
            scores = {name: float(row[f"validation_{name}"]) for name in ("loss", "error")}
            scores |= {metric["name"].decode(): float(metric["value"]) for metric in mine}
            yield Evaluation(int(row["samples"]) - first, scores)


def _with_norms(job: Job) -> Job:
    """Returns a job that records the norms of its gradients, if it can."""
    with suppress(ConfigError):
        return job.with_(results={"gradient_norms": "every 1"})
    return job


def _noise(output: Path) -> Noise | None:
    """Returns the gradient noise scale of a run. None: the run has no norms, or too few updates."""
    with open_results(output) as results:
        found = noise_of(results)
    scale = found.scale if found else None
    return Noise(scale.samples, scale.error) if scale and scale.samples > 0 and math.isfinite(scale.error) else None


def _samples_at(path: Path) -> int:
    """Returns the number of samples before a checkpoint."""
    return checkpoint.read(path)[0].position.samples


def averaged(job: Job, training_samples: int) -> Job:
    """Returns a job with an average of its weights over `HORIZON` epochs, unless it has an average of its own."""
    if job.optimizer.average.given:
        return job
    share = job.gradients_per_update(job.plan()) * job.training.minibatch_size / (HORIZON * training_samples)
    return job.with_(optimizer={"average": {"rate": min(1.0, share)}})


def code_digest(job: Job, store: ProbeStore) -> str:
    """Returns a digest of the user's code and data: the weights of a short run. Empty: two short runs differ.

    If the job allows hardsync, the digest does not depend on its cluster.

    Args:
        job: Job as `searched` returns it, with its costs.
        store: Place for the runs' files.
    """
    with suppress(ConfigError):
        job = with_settings(job, {"protocol.name": "hardsync", "topology.name": "base"})
    update = job.training.minibatch_size * job.learners
    samples = min(job.data.train_limit or SHORT * update, SHORT * update)
    short = job.with_(data={"train_limit": samples}, training={"epochs": 1}, results={"keep_checkpoints": "never"})
    found = set()
    for turn in (1, 2):
        output = store.scratch(f"repeat-{turn}.h5")
        with only_errors(), api.simulate(short, output=output, force=True, progress="quiet") as results:
            found.add(str(results.summary()["weights_sha256"]))
        output.unlink()
    return found.pop() if len(found) == 1 else ""
