"""Measurement of the time, parameter size and output size of each layer of a job's model.

Steps are computed as by a learner, and the clock is read when a layer begins and ends.
"""

import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

from rudra.benchmark_report import Report
from rudra.core.backward import SHARE, BackwardPass, FinalAt
from rudra.core.forward import NeededAt
from rudra.core.placement import Layer
from rudra.errors import ConfigError
from rudra.job.job import Job
from rudra.job.tables import IN_16_BITS

if TYPE_CHECKING:
    import torch

    from rudra.compute.flat import FlatModel
    from rudra.compute.timing import TimedChain
    from rudra.data.load import DataInfo

SECONDS = 2.0
"""Duration of a measurement. Half of it has readings at layers."""

LEAST, MOST = 5, 400
"""Number of steps of each kind."""

_ALIKE = 0.005  # difference of two fractions of a step's time that does not matter
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
        final_at: Times of a learner's step when parts of the gradient are final. Empty: all parts are final at once.
    """

    name: str
    minibatch_size: int
    layers: tuple[Layer, ...]
    loss_s: float
    rest_s: float
    step_s: float
    threads: int
    learner_s: float = 0.0
    final_at: FinalAt = ()

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
        """Returns the fraction of a step after which the gradient of each layer's parameters is final.

        None: the layer has no parameters.
        """
        stops = [*accumulate(layer.parameters_bytes // 4 for layer in self.layers)]
        found = BackwardPass.measured(self.final_at, stops[-1]) if self.final_at else BackwardPass(0, (), 0.0)
        parts = (slice(start, stop) for start, stop in pairwise([0, *stops]))
        return tuple(1 - found.share * found.left(part) if part.start < part.stop else None for part in parts)

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
    with torch_as_in(job.cluster):
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
        seconds: Duration of the measurement, by default `SECONDS`. A quarter of it is added for `Profile.final_at`.

    Raises:
        RudraError: The job has a mistake, or its model is no chain of layers.
    """
    from rudra.compute import models
    from rudra.compute.cuts import chain
    from rudra.compute.executor import torch_as_in
    from rudra.compute.flat import FlatModel
    from rudra.compute.timing import Through, TimedChain, layers_of
    from rudra.data import trees

    if job.training.compile:
        raise ConfigError(f"{job.name}: [training] compile = true leaves no layers to time; use compile = false")
    with torch_as_in(job.cluster):
        learner = _Learner.of(job)
        flat, inputs, device = learner.flat, learner.inputs, learner.device
        noted = models.build(job.model, learner.info, job.training.seed).to(device)
        alike = replace(learner, flat=FlatModel(Through(flat.module), flat.task, 1, job.training.precision))
        found = chain(noted, trees.moved(inputs, device))
        timed = TimedChain(found, device)
        whole = replace(learner, flat=FlatModel(timed, flat.task, 1, job.training.precision))
        alone = alike if flat.does_without_autograd else learner
        times, step_s, noted_s = _measured(timed, whole.step(), alone.step(), seconds or SECONDS)
        learner_s, final_at = _final_at(learner, (seconds or SECONDS) / 4)
    middle = [median(column) for column in zip(*times, strict=True)]
    made = zip(layers_of(found), middle, middle[len(found.layers) :], strict=False)
    layers = tuple(
        replace(layer, forward_s=max(there - noted_s, there / 2), backward_s=max(back - noted_s, back / 2))
        for layer, there, back in made
    )
    threads, size = job.cluster.threads_per_rank or 1, job.training.minibatch_size
    times_s = (middle[-2], middle[-1], step_s)
    return Profile(job.name, size, layers, *times_s, threads, learner_s if alone is alike else 0.0, final_at)


def final_at(job: Job, *, seconds: float | None = None) -> FinalAt:
    """Measures when parts of a gradient are final, for a model that may be no chain of layers.

    Compiled code finishes all parts at once.

    Args:
        job: Job with the model, the data, μ and the number of threads.
        seconds: Duration of the measurement, by default a quarter of `SECONDS`.

    Raises:
        RudraError: The job has a mistake.
    """
    from rudra.compute.executor import torch_as_in

    if job.training.compile:
        return ()
    with torch_as_in(job.cluster):
        return _final_at(_Learner.of(job), (seconds or SECONDS) / 4)[1]


def needed_at(job: Job, *, seconds: float | None = None) -> tuple[NeededAt, float]:
    """Measures when a forward pass first needs its parameters, and its fraction of a gradient's time.

    Args:
        job: Job with the model, the data, μ and the number of threads.
        seconds: Duration of the measurement, by default a quarter of `SECONDS`.

    Returns:
        No times if the code is compiled.

    Raises:
        RudraError: The job has a mistake.
    """
    from rudra.compute.executor import torch_as_in

    if job.training.compile:
        return (), 1 - SHARE
    with torch_as_in(job.cluster):
        return _needed_at(_Learner.of(job), job.training.precision, (seconds or SECONDS) / 4)


@dataclass(frozen=True, slots=True)
class _Learner:
    """Model, mini-batch and device of a learner.

    Attributes:
        flat: Model.
        inputs, target: Mini-batch.
        device: Device that computes.
        info: Description of the data.
    """

    flat: "FlatModel"
    inputs: Any
    target: Any
    device: "torch.device"
    info: "DataInfo"

    @classmethod
    def of(cls, job: Job) -> "_Learner":
        """Returns a learner of a resolved job. torch must be as in the job."""
        from rudra.compute import models, tasks
        from rudra.compute.device import placement
        from rudra.compute.flat import FlatModel
        from rudra.compute.gradients import GradientSource
        from rudra.compute.shortcuts import gradients_of
        from rudra.core.work import Work
        from rudra.data.load import load

        size, training = job.training.minibatch_size, job.training
        device = placement.virtual(job.cluster.device, window=False)
        data = load(job.data, test=False, seed=training.seed, ignored=job.task.ignored)
        assert data.training is not None
        task = tasks.make(job.task, data.info.classes)
        module = models.build(job.model, data.info, training.seed).to(device)
        models.check_model_output(module, task, data.info)
        how: dict[str, Any] = {"compiled": training.compile, "gradients": gradients_of(module, task)}
        flat = FlatModel(module, task, 1, training.precision, **how)
        work = Work(0, 0, size, size)
        batch = GradientSource(job, 0, work, flat, data.training, prefetch=False).minibatch(0, work)
        return cls(flat, *batch, device, data.info)

    def step(self) -> Callable[..., None]:
        """Returns a function that computes a gradient as a learner does, and calls its argument with parts that are
        final."""
        import torch

        weights, out = torch.empty(2, self.flat.size, device=self.device)
        self.flat.read_into(weights)
        self.flat.bind(weights)

        def step(ready: Callable[[slice], None] | None = None) -> None:
            self.flat.gradient(self.inputs, self.target, out, 0, ready)

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
    quick = {every: median(_quick(times)) for every, times in wholes.items()}
    more = notes[1] - notes[2]  # none, where there is one layer
    noted_s = max(0.0, quick[1] - quick[2]) / more if more else 0.0
    return _quick(parts, key=sum), quick[0], noted_s


def _final_at(learner: _Learner, seconds: float) -> tuple[float, FinalAt]:
    """Returns the median time of a learner's fast steps, and when parts of its gradient are final."""
    from rudra.compute.timing import clock

    step, now, parameters = learner.step(), clock(learner.device), learner.flat.parameter_count
    step(lambda part: None)
    found: list[tuple[float, dict[int, tuple[int, float]]]] = []
    ends = time.perf_counter() + seconds
    while len(found) < LEAST or (time.perf_counter() < ends and len(found) < MOST):
        final: dict[int, tuple[int, float]] = {}  # start of a part -> its end, and when it was final
        began = now()
        step(lambda part, final=final: final.update({part.start: (part.stop, now())}))
        taken = now() - began
        found.append((taken, {start: (stop, (at - began) / taken) for start, (stop, at) in final.items()}))
    quick = _quick(found, key=lambda each: each[0])
    runs: list[tuple[int, float]] = []
    place = 0
    for start, (stop, _) in sorted(quick[0][1].items()):
        if start > place:
            runs.append((start - place, 1.0))  # not used by the model
        runs.append((stop - start, median(each[start][1] for _, each in quick)))
        place = stop
    left = [(parameters - place, 1.0)] if runs and place < parameters else []
    return median(taken for taken, _ in quick), tuple(_merged([*runs, *left]))


def _needed_at(learner: _Learner, precision: str, seconds: float) -> tuple[NeededAt, float]:
    """Returns when the forward pass of a learner's fast steps first needs its parameters, and the fraction of a step
    that the pass takes."""
    import torch

    from rudra.compute.timing import clock
    from rudra.compute.waiting import Waiting
    from rudra.data import trees

    flat, now, device = learner.flat, clock(learner.device), learner.device
    weights, out = torch.empty(2, flat.size, device=device)
    flat.read_into(weights)
    flat.bind(weights)
    inputs = trees.moved(learner.inputs, device)
    mixed = precision in IN_16_BITS
    autocast = torch.autocast(device.type, getattr(torch, precision if mixed else "bfloat16"), enabled=mixed)
    flat.gradient(learner.inputs, learner.target, out, 0)
    wholes_s: list[float] = []
    found: list[tuple[float, dict[tuple[int, int], float]]] = []
    ends = time.perf_counter() + seconds
    while len(found) < LEAST or (time.perf_counter() < ends and len(found) < MOST):
        began = now()
        flat.gradient(learner.inputs, learner.target, out, 0)
        wholes_s.append(now() - began)
        used: dict[tuple[int, int], float] = {}
        began = now()

        def note(part: slice, began: float = began, used: dict[tuple[int, int], float] = used) -> None:
            used.setdefault((part.start, part.stop), now() - began)

        with autocast, Waiting(weights, note):
            trees.called(flat.module, inputs)
        found.append((now() - began, used))
    step_s = median(_quick(wholes_s))
    quick = _quick(found, key=lambda each: each[0])
    forward_s = median(taken for taken, _ in quick)
    first_s = {span: median(used[span] for _, used in quick if span in used) for span in quick[0][1]}
    runs = []
    for entry in flat.layout:
        start, stop = entry.offset, entry.offset + entry.size
        # Parameters that the model does not use are needed at the end.
        needed_s = min((at for span, at in first_s.items() if span[0] < stop and start < span[1]), default=forward_s)
        runs += [(entry.size, min(needed_s / step_s, 1.0))] if entry.kind == "parameter" else []
    return tuple(_merged(runs, min)), round(min(forward_s / step_s, 1.0), 4)


def _quick(found: Sequence[Any], key: Callable[[Any], float] | None = None) -> list[Any]:
    """Returns the fastest steps."""
    return sorted(found, key=key)[: max(1, len(found) // _QUICKEST)]


def _merged(
    runs: Sequence[tuple[int, float]], choose: Callable[[float, float], float] = max
) -> Iterator[tuple[int, float]]:
    """Yields consecutive parts of nearly the same time as one part, with the time that `choose` chooses."""
    count, time_s = 0, 0.0
    for more, at in runs:
        if count and abs(at - time_s) > _ALIKE:
            yield count, round(time_s, 4)
            count, time_s = 0, at
        count, time_s = count + more, choose(time_s, at) if count else at
    if count:
        yield count, round(min(time_s, 1.0), 4)


def as_toml(found: Profile) -> str:
    """Returns `layers` of a cost file (`rudra.job.simulation.LayerCost`), and `final_at`."""
    size = found.minibatch_size
    rows = [
        f"  {{ name = {json.dumps(layer.name)}, kind = {json.dumps(layer.kind)}"
        f", parameters_bytes = {layer.parameters_bytes}, output_bytes = {layer.output_bytes}"
        f", forward_s = {{ {size} = {layer.forward_s:.4g} }}, backward_s = {{ {size} = {layer.backward_s:.4g} }}"
        f", cut = {json.dumps(layer.cut)} }},"
        for layer in found.with_loss
    ]
    return "\n".join(["layers = [", *rows, "]", final_toml(found.final_at)])


def final_toml(final_at: FinalAt) -> str:
    """Returns `final_at` of a cost file. Empty if all parts of a gradient are final at once."""
    return f"final_at = [{', '.join(f'[{count}, {final:g}]' for count, final in final_at)}]" if final_at else ""


def needed_toml(needed_at: NeededAt, share: float) -> str:
    """Returns `needed_at` and `forward_share` of a cost file. Empty if there are no times."""
    pairs = ", ".join(f"[{count}, {needed:g}]" for count, needed in needed_at)
    return f"needed_at = [{pairs}]\nforward_share = {share:g}" if needed_at else ""


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
    ]
    if found.learner_s:
        report.notes.append(f"A learner's step takes {found.learner_s * 1e3:.3f} ms: it does without torch's autograd.")
    return report.as_text()
