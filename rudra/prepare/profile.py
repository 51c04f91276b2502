"""Measurement of the time, parameter size and output size of each layer of a job's model.

Steps are computed as by a learner, and the clock is read when a layer begins and ends.
"""

import json
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from statistics import median
from typing import TYPE_CHECKING, Any

from rudra.benchmark_report import Report
from rudra.core.backward import BackwardPass
from rudra.core.placement import Layer
from rudra.errors import ConfigError
from rudra.job.job import Job
from rudra.machine import cores

if TYPE_CHECKING:
    import torch

    from rudra.compute.timing import TimedChain

SECONDS = 2.0
"""Duration of a measurement. Half of it has readings at layers."""

LEAST, MOST = 5, 400
"""Number of steps of each kind."""

_QUICKEST = 4  # only the fastest steps count: on a shared machine the others are delayed by other processes


@dataclass(frozen=True, slots=True)
class Profile:
    """Costs of a model's layers.

    Attributes:
        name: Name of the job.
        minibatch_size: μ.
        layers: Layers of the model, in order.
        loss_s: Time of the loss, forward and backward.
        rest_s: Time of all other work in a step, such as gathering the gradient into one vector.
        step_s: Time of a whole step without clock readings.
        learner_s: Time of a learner's step if it does not use autograd. 0: it is the same as `step_s`.
        threads: Number of torch's threads.
    """

    name: str
    minibatch_size: int
    layers: tuple[Layer, ...]
    loss_s: float
    rest_s: float
    step_s: float
    threads: int
    learner_s: float = 0.0

    @property
    def sum_s(self) -> float:
        """Returns the sum of all parts."""
        return sum(layer.seconds for layer in self.layers) + self.loss_s + self.rest_s

    @property
    def with_loss(self) -> tuple[Layer, ...]:
        """Returns the layers with the time of the loss added to the last one, because its owner computes the loss."""
        *others, last = self.layers
        return *others, replace(last, backward_s=last.backward_s + self.loss_s)

    @property
    def final(self) -> tuple[float | None, ...]:
        """Returns when the gradient of each layer's parameters is final, as a fraction of the time of all layers.

        None: the layer has no parameters.
        """
        places = [*accumulate((layer.parameters_bytes // 4 for layer in self.layers), initial=0)]
        backward = BackwardPass(places[-1], self.with_loss)
        pairs = zip(self.layers, places, strict=False)
        return tuple(
            1 - backward.share * backward.left(place) if layer.parameters_bytes else None for layer, place in pairs
        )

    def as_dict(self) -> dict[str, Any]:
        """Returns the profile as plain values."""
        return {**asdict(self), "sum_s": self.sum_s, "final": self.final}


def sizes(job: Job) -> tuple[Layer, ...]:
    """Returns the layers of a model with their sizes, without times.

    Args:
        job: Job with the model, the data and the number of threads.

    Raises:
        ConfigError: The model cannot be cut, or no cut leaves layers that a stage server can have.
    """
    from rudra.compute import models
    from rudra.compute.cuts import chain
    from rudra.compute.executor import torch_as_in
    from rudra.compute.timing import layers_of
    from rudra.data.load import load

    info = load(job.data, train=False, test=False, seed=job.training.seed, ignored=job.task.ignored).info
    with torch_as_in(job):
        model = models.build(job.model, info, job.training.seed)
        model.eval()  # BatchNorm cannot do with one sample
        found = chain(model, info.sample[0])
        layers = layers_of(found)
    if not any(layer.cut for layer in layers):
        where = f"[placement] cut = {job.placement.cut!r}"
        raise ConfigError(f"{where} is not supported with this model: {found.refusal(1)}; remove cut")
    return layers


def profile(job: Job, *, seconds: float | None = None) -> Profile:
    """Measures the layers of a model, as one learner computes them.

    Args:
        job: Job with the model, the data, μ and the number of threads.
        seconds: Duration of the measurement, by default `SECONDS`.

    Raises:
        RudraError: The job has a mistake, or its model is no chain of layers.
    """
    from rudra.compute import devices, models, tasks
    from rudra.compute.cuts import chain
    from rudra.compute.executor import torch_as_in
    from rudra.compute.flat import FlatModel
    from rudra.compute.gradients import GradientSource
    from rudra.compute.shortcuts import gradients_of
    from rudra.compute.timing import Through, TimedChain, layers_of
    from rudra.core.work import Work
    from rudra.data import trees
    from rudra.data.load import load

    if job.training.compile:
        raise ConfigError(f"{job.name}: [training] compile = true leaves no layers to time; use compile = false")
    job, size = job.resolved(cores=cores()), job.training.minibatch_size
    device = devices.virtual(job.cluster.device, window=False)
    with torch_as_in(job):
        data = load(job.data, test=False, seed=job.training.seed, ignored=job.task.ignored)
        assert data.training is not None
        task = tasks.make(job.task, data.info.classes)
        plain = models.build(job.model, data.info, job.training.seed).to(device)
        noted = models.build(job.model, data.info, job.training.seed).to(device)
        models.check_model_output(plain, task, data.info)
        gradients = gradients_of(plain, task)
        flat = FlatModel(plain, task, 1, job.training.precision, gradients=gradients)
        alike = FlatModel(Through(plain), task, 1, job.training.precision) if flat.does_without_autograd else flat
        work = Work(0, 0, size, size)
        inputs, target = GradientSource(job, 0, work, flat, data.training, prefetch=False).minibatch(0, work)
        found = chain(noted, trees.moved(inputs, device))
        timed = TimedChain(found, device)
        whole = FlatModel(timed, task, 1, job.training.precision)
        step, alone = (_step(each, inputs, target, device) for each in (whole, alike))
        times, step_s, noted_s = _measured(timed, step, alone, seconds or SECONDS)
        learner_s = _quick(timed, _step(flat, inputs, target, device)) if alike is not flat else 0.0
    middle = [median(column) for column in zip(*times, strict=True)]
    made = zip(layers_of(found), middle, middle[len(found.layers) :], strict=False)
    layers = tuple(
        replace(layer, forward_s=max(there - noted_s, there / 2), backward_s=max(back - noted_s, back / 2))
        for layer, there, back in made
    )
    threads = job.cluster.threads_per_rank or 1
    return Profile(job.name, size, layers, middle[-2], middle[-1], step_s, threads, learner_s)


def _step(flat: Any, inputs: Any, target: Any, device: "torch.device") -> Callable[[], None]:
    """Computes one gradient as a learner does."""
    import torch

    weights, out = torch.empty(2, flat.size, device=device)
    flat.read_into(weights)
    flat.bind(weights)

    def step() -> None:
        flat.gradient(inputs, target, out, 0)

    return step


def _measured(
    timed: "TimedChain", step: Callable[[], None], alone: Callable[[], None], seconds: float
) -> tuple[list[list[float]], float, float]:
    """Returns the times of the parts of fast steps, the median of fast steps without readings, and the time of a
    reading.

    The latter comes from steps that read the clock at every other layer. The kinds of steps alternate in random order.
    """
    step()
    alone()
    timed.listen()
    parts: list[list[float]] = []
    wholes: dict[int, list[float]] = {0: [], 1: [], 2: []}  # layers whose times are noted: none, all, every second one
    notes = {}
    ends = time.perf_counter() + seconds
    order = random.Random(0)  # turns of one order might always meet what interrupts us in the same kind of step
    while min(map(len, wholes.values())) < LEAST or (time.perf_counter() < ends and len(wholes[0]) < MOST):
        every = order.choice(list(wholes))
        timed.every = every or 1
        began = timed.now()
        (step if every else alone)()
        ended = timed.now()
        wholes[every].append(ended - began)
        notes[every] = timed.notes
        if every == 1:
            parts.append(timed.parts(began, ended))
    quick = {every: median(sorted(times)[: max(1, len(times) // _QUICKEST)]) for every, times in wholes.items()}
    more = notes[1] - notes[2]  # none, where there is one layer
    noted_s = max(0.0, quick[1] - quick[2]) / more if more else 0.0
    return sorted(parts, key=sum)[: max(1, len(parts) // _QUICKEST)], quick[0], noted_s


def _quick(timed: "TimedChain", step: Callable[[], None]) -> float:
    """Returns the median of the fast steps."""
    times = []
    for _ in range(MOST):
        began = timed.now()
        step()
        times.append(timed.now() - began)
    return median(sorted(times)[: MOST // _QUICKEST])


def as_toml(found: Profile) -> str:
    """Returns `layers` of a cost file (`rudra.job.simulation.LayerCost`)."""
    size = found.minibatch_size
    rows = [
        f"  {{ name = {json.dumps(layer.name)}, kind = {json.dumps(layer.kind)}"
        f", parameters_bytes = {layer.parameters_bytes}, output_bytes = {layer.output_bytes}"
        f", forward_s = {{ {size} = {layer.forward_s:.4g} }}, backward_s = {{ {size} = {layer.backward_s:.4g} }}"
        f", cut = {json.dumps(layer.cut)} }},"
        for layer in found.with_loss
    ]
    return "\n".join(["layers = [", *rows, "]"])


def as_text(found: Profile) -> str:
    """Returns a table with one row for each layer."""
    heads = ["layer", "kind", "forward, ms", "backward, ms", "of a step", "final at", "parameters, kB"]
    report = Report([*heads, "output, kB/sample"])
    for layer, final in zip(found.layers, found.final, strict=True):
        times = (f"{seconds * 1e3:.3f}" for seconds in (layer.forward_s, layer.backward_s))
        held = (f"{size / 1e3:,.1f}" if size else "–" for size in (layer.parameters_bytes, layer.output_bytes))
        shares = f"{layer.seconds / found.sum_s:.1%}", "–" if final is None else f"{final:.0%}"
        report.rows.append((layer.name, layer.kind, *times, *shares, *held))
    for name, seconds in (("loss", found.loss_s), ("all else", found.rest_s)):
        report.rows.append((name, "", f"{seconds * 1e3:.3f}", "", f"{seconds / found.sum_s:.1%}", "", "", ""))
    ratio = found.sum_s / found.step_s
    report.notes = [
        f"Sum {found.sum_s * 1e3:.3f} ms; a whole step that is not taken apart {found.step_s * 1e3:.3f} ms: "
        f"ratio {ratio:.3f}.",
        "final at: share of the layers' time after which the gradient of the layer is final, and may be sent.",
    ]
    if found.learner_s:
        report.notes.append(f"A learner's step takes {found.learner_s * 1e3:.3f} ms: it does without torch's autograd.")
    return report.as_text()
