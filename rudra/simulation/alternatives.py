"""Changes of a recorded run that might make it faster, with their predicted gains."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rudra.errors import RudraError
from rudra.job.job import Job
from rudra.simulation.predict import UPDATES, Prediction
from rudra.simulation.whatif import FittedRun

WORTH = 0.05
"""Smallest gain that is worth a change."""

_ROUNDS, _GRADIENTS = 12, 600


@dataclass(frozen=True)
class Alternative:
    """Change of a run.

    Attributes:
        what: The change in words.
        overrides: Options `--set` that make it, each a text `table.key=value`.
        gain: Predicted increase of the samples per second, as a fraction.
        epoch_s: Predicted time of an epoch.
        staleness: Predicted mean staleness.
        samples: Number of samples of an update.
        measured: Whether the gain is measured in the run, instead of predicted.
    """

    what: str
    overrides: tuple[str, ...]
    gain: float
    epoch_s: float
    staleness: float
    samples: int
    measured: bool = False


def alternatives(run: FittedRun) -> list[Alternative]:
    """Predicts changes of a run, the best one first. Changes that the run's job does not allow are left out.

    Args:
        run: Recorded run.
    """
    found = []
    for what, overrides in _changes(run):
        try:
            job = run.written(overrides)
            predicted = run.predict(job, updates=_enough(run, job))
        except RudraError:
            continue
        gain = run.epoch_s / predicted.epoch_s - 1
        about = (predicted.epoch_s, predicted.mean_staleness, samples_of(predicted))
        found.append(Alternative(what, tuple(overrides), gain, *about))
    return sorted(found, key=lambda each: -each.gain)


def _enough(run: FittedRun, job: Job) -> int | None:
    """Returns the number of updates to simulate for a gain of a few percent. None: rare events need more."""
    if run.job.simulation.straggler_probability:
        return None
    return max(UPDATES, math.ceil(max(_ROUNDS * job.learners, _GRADIENTS) / job.gradients_per_update(job.plan())))


def samples_of(predicted: Prediction) -> int:
    """Returns the number of samples of an update."""
    job = predicted.job
    return job.gradients_per_update(job.plan()) * job.training.minibatch_size


def _changes(run: FittedRun) -> Iterator[tuple[str, list[str]]]:
    """Yields changes in words, and their overrides."""
    job = run.job
    protocol, topology, options = job.protocol.name, job.topology.name, job.topology.options
    learners, size = job.learners, job.training.minibatch_size
    if run.costs.slow and not job.cluster.shares:
        yield "parts of the batch in proportion to speed", ["cluster.shares=auto"]
        if together := [*_topology(job, "groups"), *_protocol(job, "hardsync")]:
            yield "parts in proportion to speed, and allreduce", ["cluster.shares=auto", *together]
    if (plan := job.plan()).averaging:
        period = job.make_protocol(plan).period
        yield f"averages half as often, τ = {2 * period}", [f"averaging.period={2 * period}"]
    else:
        if protocol != "hardsync":
            yield "updates by all learners together", [*_protocol(job, "hardsync")]
        if protocol != "softsync" or (job.protocol.n or 1) != 1:
            yield (
                "1-softsync: nobody waits",
                [*_protocol(job, "softsync"), *(["protocol.n=1"] if job.protocol.n else [])],
            )
        if protocol != "async":
            yield "async: each gradient is an update", [*_protocol(job, "async")]
        if topology != "groups":
            yield "allreduce, no server", [*_topology(job, "groups"), *_protocol(job, "hardsync")]
        if learners >= 4 and learners % 2 == 0 and options.get("groups") != 2:
            yield "two groups", [*_topology(job, "groups", "{groups=2}"), *_protocol(job, "async")]
        for name, own in (("sharded", "{shards=2}"), ("adv", ""), ("adv*", "")):
            if topology != name and job.plan().served:
                yield f"topology {name}", _topology(job, name, own)
        if job.cluster.gradient_format == "float32" and job.plan().served:
            yield "gradients of 16 bits", ["cluster.gradient_format=float16"]
    yield "mini-batches twice as large", [f"training.minibatch_size={2 * size}"]
    yield "twice as many learners", [f"cluster.learners={2 * learners}"]


def _topology(job: Job, name: str, options: str = "") -> list[str]:
    own: list[Any] = [f"topology.name={name}"] if job.topology.name != name else []
    return [*own, *([f"topology.options={options}"] if options or job.topology.options else [])]


def _protocol(job: Job, name: str) -> list[str]:
    if job.protocol.name == name:
        return []
    left = [f"protocol.{key}=" for key in ("n", "options") if getattr(job.protocol, key)]
    return [f"protocol.name={name}", *left]
