"""Trains probes in virtual time or on real ranks, as far as a store does not know them."""

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rudra import api
from rudra.errors import ConfigError, ResultsError, RunError
from rudra.job.job import Job
from rudra.job.target import Target
from rudra.log import only_errors
from rudra.results import checkpoint
from rudra.results.reader import Results, open_results
from rudra.results.run_noise import noise_of
from rudra.tuning.probes import Outcome, Probe, ProbeNoise
from rudra.tuning.ruler import Mark, reached
from rudra.tuning.space import trajectory, with_settings
from rudra.tuning.state import SearchState
from rudra.tuning.store import Evaluation, Measured, ProbeStore

SHORT = 8
"""Mini-batches of each learner in the runs that show whether code and data are the same."""

HARDLY = 1e-12
"""Learning rate of a run whose time counts, so that it does not diverge."""

HORIZON = 0.25
"""Epochs over which the average of the weights that judges a probe reaches back."""


Execute = Callable[[Job, Path, Path | None], Results]
"""Trains a job from a checkpoint, or from the initial weights, and returns its results. Arguments: job, result file,
checkpoint. It raises RunError if the loss is not finite."""


def simulated(job: Job, output: Path, begin: Path | None) -> Results:
    """Trains in virtual time. See `Execute`."""
    carry: api.Carry = "state" if begin else "weights"
    return api.simulate(job, output=output, force=True, from_=begin, carry=carry, progress="quiet")


class Trainer:
    """Trains probes.

    Args:
        job: Job as `searched` returns it, with its costs.
        target: Target of the search.
        store: Measurements of probes, also of other searches.
        code: Digest of the user's code and data, see `code_digest`.
        state: State of the search.
        execute: Trains the job of a probe.
    """

    def __init__(
        self,
        job: Job,
        target: Target,
        store: ProbeStore,
        code: str,
        state: SearchState,
        execute: Execute = simulated,
    ) -> None:
        self._job, self._target, self._store, self._code, self._state = job, target, store, code, state
        self._execute = execute

    def job_of(self, settings: Mapping[str, Any]) -> Job:
        """Returns the job of a probe."""
        return averaged(with_settings(self._job, settings), self._state.training_samples)

    def _seeded(self, probe: Probe) -> Job:
        """Returns the job of a probe with its seed."""
        job = self.job_of(probe.by_key)
        return job.with_(training={"seed": job.training.seed + probe.seed}) if probe.seed else job

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
        for samples, scores, time_s in evaluations:
            value = self._target.of(scores)
            metric = math.nan if value is None else value
            marks.append(Mark(samples, scores["loss"], metric, time_s if self._state.real else samples / rate))
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

    def wall_s(self, probe: Probe) -> float:
        """Returns the wall time of a probe's training."""
        return self._store.read(self._digest(probe)).wall_s

    def time_s(self, settings: Mapping[str, Any], samples: int) -> float:
        """Trains a number of samples from the initial weights, and returns the training time."""
        limit = min(samples, self._state.training_samples)
        about = {"epochs": math.ceil(samples / limit), "evaluate": False, "target": None}
        job = self.job_of(settings).with_(data={"train_limit": limit}, training=about)
        job = job.with_(results={"keep_checkpoints": "never"}, optimizer={"learning_rate": HARDLY})
        output = self._store.scratch("timed.h5")
        with only_errors(), self._execute(job, output, None) as results:
            taken = float(results.epochs["time_s"][-1])
        output.unlink()
        return taken

    def _trained(self, probe: Probe, digest: str, found: Measured) -> Measured:
        """Trains a probe from its latest checkpoint to its length.

        Raises:
            ResultsError: Its checkpoint could not be written.
        """
        done = self._store.latest(digest, len(found.evaluations))
        begin = self._store.checkpoint(digest, done) if done else self._origin(probe)
        job = self._seeded(probe).with_(training={"epochs": probe.begins_at + probe.epochs})
        if measures := not (begin or probe.seed):
            job = _with_norms(job)
        output, failed, began = self._store.scratch(f"part-{digest}.h5"), "", time.monotonic()
        try:
            with only_errors():
                self._execute(job, output, begin).close()
        except RunError as error:
            failed = str(error)
        known, wall_s = found.evaluations[:done], found.wall_s + time.monotonic() - began
        samples, time_s = _position(begin) if begin else (0, 0.0)
        if known:
            samples, time_s = samples - known[-1].samples, time_s - known[-1].time_s
        evaluations = [*known, *_evaluations(output, samples, time_s)]
        if failed:
            evaluations = [each for each in evaluations if math.isfinite(each.scores["loss"])]
        for kept in output.parent.glob(f"{output.stem}-*.ckpt"):
            kept.rename(self._store.checkpoint(digest, int(kept.stem.rpartition("-")[2]) - probe.begins_at))
        last = self._store.checkpoint(digest, len(evaluations))
        if not failed and not last.is_file():
            raise ResultsError(f"{last}: could not be written; free some space, and repeat the command")
        marks = self._marks(probe, evaluations)
        end = reached(marks, self._target.value, at_least=self._target.at_least)
        self._store.forget(digest, but=(len(marks), 0 if end is None else marks.index(end) + 1))
        noise = _noise(output) if measures and not failed else found.noise
        output.unlink(missing_ok=True)
        return Measured(tuple(evaluations), failed, noise, wall_s)

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
        seeded = self._seeded(probe)
        before = self._before(probe) if probe.origin else None
        origin = [self._digest(before), before.epochs] if before else []
        about = ["real", seeded.to_json()] if self._state.real else [trajectory(seeded)]  # its time is also measured
        text = json.dumps([self._code, *about, *origin])
        return hashlib.sha256(text.encode()).hexdigest()[:24]


def _evaluations(output: Path, samples: int, time_s: float) -> Iterator[Evaluation]:
    """Yields the evaluations of a result file, counted from a number of samples and a time."""
    if not output.is_file():  # the run failed before its first update
        return
    with open_results(output) as results:
        metrics = results.metrics
        for row in results.epochs:
            mine = metrics[(metrics["epoch"] == row["epoch"]) & (metrics["split"] == b"validation")]
            scores = {name: float(row[f"validation_{name}"]) for name in ("loss", "error")}
            scores |= {metric["name"].decode(): float(metric["value"]) for metric in mine}
            yield Evaluation(int(row["samples"]) - samples, scores, float(row["time_s"]) - time_s)


def _with_norms(job: Job) -> Job:
    """Returns a job that records the norms of its gradients, if it can."""
    with suppress(ConfigError):
        return job.with_(results={"gradient_norms": "every 1"})
    return job


def _noise(output: Path) -> ProbeNoise | None:
    """Returns the gradient noise scale of a run. None: the run has no norms, or too few updates."""
    with open_results(output) as results:
        found = noise_of(results)
    scale = found.scale if found else None
    return (
        ProbeNoise(scale.samples, scale.error) if scale and scale.samples > 0 and math.isfinite(scale.error) else None
    )


def _position(path: Path) -> tuple[int, float]:
    """Returns the number of samples and the training time before a checkpoint."""
    position = checkpoint.read(path)[0].position
    return position.samples, position.time_s


def averaged(job: Job, training_samples: int) -> Job:
    """Returns a job with an average of its weights over `HORIZON` epochs, unless it has an average of its own."""
    if job.optimizer.average.given:
        return job
    share = job.gradients_per_update(job.plan()) * job.training.minibatch_size / (HORIZON * training_samples)
    return job.with_(optimizer={"average": {"rate": min(1.0, share)}})


def code_digest(job: Job, store: ProbeStore) -> tuple[str, float]:
    """Trains a short run twice, and returns a digest of the user's code and data: the final weights.

    The digest is empty if the two runs differ. The second value is the relative difference of their losses.
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
    found, losses = set(), list[float]()
    for turn in (1, 2):
        output = store.scratch(f"repeat-{turn}.h5")
        try:
            with only_errors(), api.simulate(short, output=output, force=True, progress="quiet") as results:
                found.add(str(results.summary()["weights_sha256"]))
                losses.append(float(results.epochs["train_loss"][-1]))
        except RunError as error:  # it diverges, at the same mini-batch each time
            found.add(str(error))
            losses.append(math.nan)
        output.unlink(missing_ok=True)
    return found.pop() if len(found) == 1 else "", abs(losses[0] / losses[1] - 1) if losses[1] else math.inf
