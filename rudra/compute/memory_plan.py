"""Memory that the training of a learner takes on its device, predicted before training from small mini-batches.

Autograd saves tensors for the backward pass: the activations. Their bytes grow linearly with the samples. They are
counted in the gradients of two small mini-batches, on any device, and extrapolated. The rest follows from the size of
the model and from the activations. If the device has statistics, a step that takes more than predicted adds the
difference as a workspace, for instance of cuDNN.
"""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from protocols import Averaging
from rudra.compute import models, tasks
from rudra.compute.bank.graphs import streams_of
from rudra.compute.device.devices import kind_of
from rudra.compute.device.kind import DeviceKind
from rudra.compute.flat import FlatModel
from rudra.compute.gradients import GradientSource
from rudra.compute.speculation import BURSTS, LARGEST
from rudra.core.work import Work, portion
from rudra.data.load import Data
from rudra.data.resident import Resident, ResidentSplit, stored_in_memory
from rudra.data.samples import Samples, whole_of
from rudra.data.sparse import bytes_of
from rudra.data.trees import moved, named
from rudra.errors import ConfigError
from rudra.job.job import Job
from rudra.job.tables import OptimizerTable
from rudra.job.transports import slots_of, transports_of
from rudra.machine import free_memory
from rudra.memory import bytes_text
from topologies import Plan

MEASURED = (4, 8)
"""Samples of the measured mini-batches. A job whose mini-batches are smaller is measured once, at their size."""

LIBRARIES = 1 << 26
"""Bytes of workspaces that libraries of a device may add with larger mini-batches: cuDNN takes up to 56 MB on an
H200."""

_PASSED = 2
"""Gradients of activations that a backward pass holds at a time: of an operation's output, and of its input."""

_HELD = 4
"""Activations that an evaluation holds at a time: input and output of two operations, as in a block with a shortcut."""


class LinearBytes(NamedTuple):
    """Bytes as a linear function of the number of samples.

    Attributes:
        fixed: Bytes without samples.
        per_sample: Bytes of each sample.
    """

    fixed: float
    per_sample: float

    def at(self, samples: int) -> int:
        """Returns the bytes at a number of samples."""
        return math.ceil(self.fixed + self.per_sample * samples)

    def times(self, count: int) -> "LinearBytes":
        """Returns the bytes of several at once."""
        return LinearBytes(self.fixed * count, self.per_sample * count)


def through(sizes: Sequence[int], found: Sequence[float]) -> LinearBytes:
    """Returns the line through one or two measurements. One measurement is proportional to the samples."""
    if len(sizes) == 1:
        return LinearBytes(0.0, found[0] / sizes[0])
    slope = max(0.0, (found[1] - found[0]) / (sizes[1] - sizes[0]))
    return LinearBytes(max(0.0, found[0] - slope * sizes[0]), slope)


class StepMemory(NamedTuple):
    """Memory of the gradient and of the evaluation of one mini-batch, in bytes.

    Attributes:
        data: Inputs and targets.
        activations: Tensors that autograd saves, without the weights and the data.
        largest: Largest of them.
        peak: Peak of the step beyond model, gradient and data, by statistics of the device. 0: it has none.
        evaluation: Peak of an evaluation beyond model and data, by statistics or estimated.
    """

    data: int
    activations: int
    largest: int
    peak: int
    evaluation: int


class MemoryPlan(NamedTuple):
    """Predicted memory of a learner on its device, in bytes.

    Attributes:
        weights: Weights of the learners, and of the servers on the same device.
        gradients: Their gradients, with the copies that autograd makes.
        state: State of the optimiser of all that update weights there, and copies of the state for speculative steps.
        data: One mini-batch, or two if one is copied while the other is computed.
        activations: Tensors that autograd saves.
        workspaces: Gradients of activations in the backward pass, and temporary memory of operations.
        evaluation: Weights and one batch of an evaluation.
        slots: Copies of vectors that other ranks of the node read.
        bank: Numbers that give the parts for any number of learners.
    """

    weights: int
    gradients: int
    state: int
    data: LinearBytes
    activations: LinearBytes
    workspaces: LinearBytes
    evaluation: int
    slots: int = 0
    bank: "BankMemory | None" = None

    def parts(self, samples: int) -> dict[str, int]:
        """Returns the bytes of each part, if the learner computes a number of samples at once."""
        found = {name: part for name, part in self._asdict().items() if name != "bank"}
        return {name: part.at(samples) if isinstance(part, LinearBytes) else part for name, part in found.items()}

    def total(self, samples: int) -> int:
        """Returns the bytes of all parts."""
        return sum(self.parts(samples).values())

    def text(self, samples: int) -> str:
        """Describes the plan in one line."""
        parts = ", ".join(f"{name} {bytes_text(size)}" for name, size in self.parts(samples).items() if size)
        text = f"{bytes_text(self.total(samples))} with {samples} samples at once: {parts}"
        bank = self.bank
        if bank is None or bank.learners == 1:
            return text
        saved = self.activations.at(samples) * (bank.learners - bank.at_once) // bank.at_once
        return f"{text}; activations of {bank.at_once} of {bank.learners} learners at a time save {bytes_text(saved)}"


class BankMemory(NamedTuple):
    """Memory of learners that share a device, as a function of their number. Bytes, or numbers of vectors.

    Activations, workspaces, mini-batches and autograd's gradients exist once for each learner that computes at the same
    time. In the form `graphs` these are as many as streams.

    Source: crossbow.txt §4.5, the online memory plan. There the learners of a device share a pool of buffers.

    Attributes:
        learners: Number of learners, m.
        form: `cluster.bank`.
        streams: Most learners that compute at the same time in the form `graphs`.
        vector: Bytes of the weights.
        kept: Bytes of the gradients that autograd makes.
        weights: Vectors of weights of each learner.
        others: Vectors of weights, and of gradients, of all learners together.
        updates: Whether each learner updates its weights. If not, a server on this device may do so.
        state: Bytes of the state of all optimisers, or of each learner that updates its weights.
        one: Parts of the plan for one learner that computes.
    """

    learners: int
    form: str
    streams: int
    vector: int
    kept: int
    weights: int
    others: tuple[int, int]
    updates: bool
    state: int
    one: MemoryPlan

    @property
    def at_once(self) -> int:
        """Number of learners that compute at the same time."""
        return {"graphs": min(self.streams, self.learners), "fused": self.learners}.get(self.form, 1)

    def plan(self) -> MemoryPlan:
        """Returns the plan of all learners."""
        copies = self.form == "fused"  # stacked weights, and their gradients
        one, times, kept = self.one, self.at_once, self.kept * self.at_once
        return one._replace(
            weights=self.vector * (self.learners * (self.weights + copies) + self.others[0]),
            gradients=self.vector * (self.learners + self.others[1]) + kept,
            state=self.state * (self.learners if self.updates else 1),
            data=one.data.times(times),
            activations=one.activations.times(times),
            workspaces=one.workspaces.times(times),
            bank=self,
        )


def planned(job: Job, plan: Plan, data: Data, device: torch.device) -> MemoryPlan | None:
    """Predicts the memory of the learners of a rank on a device.

    Args:
        job: Resolved job.
        plan: Role assignment.
        data: Data with the training set.
        device: Device of the learners.

    Returns:
        None if layers are placed on a stage server, or if the model does not compute the small mini-batches. The first
        gradient then shows what is wrong.
    """
    if plan.stage is not None:
        return None
    with suppress(Exception):  # of torch, or of the user's code
        return _planned(job, plan, data, device)
    return None


def _planned(job: Job, plan: Plan, data: Data, device: torch.device) -> MemoryPlan:
    assert data.training is not None
    learner, training = plan.learners[0], job.training
    task = tasks.make(job.task, data.info.classes)
    flat = FlatModel(models.build(job.model, data.info, training.seed).to(device), task, 1, training.precision)
    most = most_at_once(job, plan, len(data.training))
    sizes = MEASURED if most >= MEASURED[-1] else (most,)
    works = [Work(plan.roles[learner].index, 0, size, 0) for size in sizes]
    source = GradientSource(job, plan.roles[learner].index, works[0], flat, data.training, prefetch=False)
    steps = [_measured(flat, source.minibatch(0, work), source.seed(0)) for work in works]
    vector, kept = 4 * flat.size, 4 * flat.parameter_count
    traits = [plan.traits(role) for role in plan.on_rank(plan.roles[learner].world_rank)]
    here, several = sum(kind.trains for kind in traits), training.microbatches > 1
    serves = job.cluster.one_rank is True and any(kind.updates and not kind.trains for kind in traits)
    updates, owned = plan.traits(learner).updates, vector * (1 + job.optimizer.state_vectors)
    saved = BURSTS * owned if serves and here == 1 and kind_of(device).records and owned <= LARGEST else 0
    passed = [_PASSED * step.largest for step in steps]
    beyond = [step.peak - step.activations - more - kept for step, more in zip(steps, passed, strict=True)]
    of_data, tested = through(sizes, [s.data for s in steps]), through(sizes, [s.evaluation for s in steps])
    count = training.evaluation_batch_size
    spaces = through(sizes, [more + max(0, left) for more, left in zip(passed, beyond, strict=True)])
    one = MemoryPlan(
        weights=vector,
        gradients=vector + kept,
        state=owned - vector,
        data=of_data.times(1 + kind_of(device).apart),
        activations=through(sizes, [step.activations for step in steps]),
        workspaces=spaces._replace(fixed=spaces.fixed + LIBRARIES * kind_of(device).apart),
        evaluation=vector + of_data.at(count) + tested.at(count) if training.evaluate else 0,
        slots=vector * slots_of(plan, plan.roles[learner].world_rank, plan.nodes(near=True), transports_of(job, plan)),
    )
    return BankMemory(
        learners=here,
        form=job.cluster.bank if job.cluster.learners_per_device is not None else "loop",
        streams=streams_of(job, device),
        vector=vector,
        kept=kept,
        weights=3 if plan.averaging else 1,  # the central model, a replica and their difference
        others=(serves + (several and flat.size > flat.parameter_count), serves + several),
        updates=updates,
        state=(owned - vector) * (updates or serves) + saved + vector * _outer_state(job, plan),
        one=one,
    ).plan()


def _outer_state(job: Job, plan: Plan) -> int:
    """Returns the number of vectors of state of the outer optimiser, which each learner has if it averages replicas."""
    if not plan.averaging or plan.served:
        return 0
    name, momentum, options = Averaging.of(job.make_protocol(plan)).outer
    return OptimizerTable(name=name, momentum=momentum, options=options).state_vectors


def _measured(flat: FlatModel, batch: Any, seed: int) -> StepMemory:
    """Computes a gradient at the initial weights, and counts its memory."""
    weights, out = torch.empty(2, flat.size, device=flat.device)
    flat.read_into(weights)
    flat.bind(weights)
    inputs, target = (moved(tree, flat.device) for tree in batch)
    given = [tensor for tree in (inputs, target) for _, tensor in named(tree)]
    kept = [weights, *flat.module.parameters(), *flat.module.buffers(), *given]
    sizes: dict[int, int] = {}
    with torch.autograd.graph.saved_tensors_hooks(_noting(sizes, set(_storages(kept))), lambda tensor: tensor):
        flat.gradient(inputs, target, out, seed)
    kind, largest = kind_of(flat.device), max(sizes.values(), default=0)
    peak = kind.peak_bytes(flat.device, lambda: flat.gradient(inputs, target, out, seed))
    tested = kind.peak_bytes(flat.device, lambda: flat.evaluate_batch(inputs, target)) or _HELD * largest
    return StepMemory(sum(map(bytes_of, given)), sum(sizes.values()), largest, peak, tested)


def _noting(sizes: dict[int, int], kept: Collection[int]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns a hook that notes the storages of saved tensors, each once, except those that are kept anyway."""

    def note(tensor: torch.Tensor) -> torch.Tensor:
        for place in _storages([tensor]):
            if place not in kept:
                sizes[place] = tensor.untyped_storage().nbytes()
        return tensor.detach()  # a node that holds its own output would never be freed

    return note


def _storages(tensors: Sequence[torch.Tensor]) -> Iterator[int]:
    """Yields the addresses of dense tensors."""
    return (tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.layout is torch.strided)


def check_memory(
    job: Job, plan: Plan, found: MemoryPlan, kind: DeviceKind, device: torch.device, training_samples: int
) -> None:
    """Checks that the mini-batches of all parts of a run fit into the memory of a device.

    Args:
        job: Resolved job.
        plan: Role assignment.
        found: Predicted memory.
        kind: Kind of the device.
        device: Device of the learner.
        training_samples: Size of the training set.

    Raises:
        ConfigError: They do not fit. The text has the most learners of a bank that fit, or the largest μ.
    """
    free = free_for_learners(job, plan, kind, device)
    for where, batch, its, its_plan in _batches(job, plan, training_samples):
        samples = at_once(its, its_plan)
        needed = found.total(samples(batch))
        if free is None or needed <= free:
            continue
        if (bank := found.bank) is not None and job.cluster.learners_per_device is not None and bank.learners > 1:
            place = f"on their {kind.noun}, where {bytes_text(free)} are free"
            totals = [bank._replace(learners=m).plan().total(samples(batch)) for m in range(1, bank.learners)]
            if fits := bisect_right(totals, free):
                raise ConfigError(
                    f"[cluster] learners_per_device = {bank.learners}: the learners take {bytes_text(needed)} {place}; "
                    f"use 1 to {fits}, or a smaller training.minibatch_size"
                )
        text = f"{where}: a learner takes {bytes_text(needed)} on its {kind.noun}, where {bytes_text(free)} are free"
        fits = bisect_right(range(1, batch), free, key=lambda mu: found.total(samples(mu)))
        if fits:
            raise ConfigError(f"{text}; use 1 to {fits}, or more training.microbatches")
        least = f"{bytes_text(found.total(1))} with a single sample does not fit either"
        raise ConfigError(f"{text}, and {least}; use a smaller model, or a smaller training.evaluation_batch_size")


def free_for_learners(job: Job, plan: Plan, kind: DeviceKind, device: torch.device) -> int | None:
    """Returns the bytes that the learners of a rank may use. None: no limit is known.

    On a GPU the limit is the device's free memory. On CPUs only banks have a limit: all ranks of a node divide the free
    main memory equally.
    """
    free = kind.free_bytes(device)
    if free is not None or job.cluster.learners_per_device is None:
        return free
    node_of = {plan.roles[learner].world_rank: plan.roles[learner].node for learner in plan.learners}
    return free_memory() // max(Counter(node_of.values()).values())


def check_device_memory(job: Job, plan: Plan, data: Data, device: torch.device) -> None:
    """Checks as `check_memory` does, if a limit of the learners' memory is known and the memory can be predicted."""
    kind = kind_of(device)
    if free_for_learners(job, plan, kind, device) is None:
        return
    if (found := planned(job, plan, data, device)) is not None:
        check_memory(job, plan, found, kind, device, data.info.training_samples)


def _batches(job: Job, plan: Plan, training_samples: int) -> Iterator[tuple[str, int, Job, Plan]]:
    """Yields the largest mini-batch of each part of a run: its key, its number of samples, the job and the plan."""
    for _, its, its_plan in job.parts(plan):
        if its.scheduled:
            team = its.hogbatch.team(its_plan.learner_numbers)
            most = max(team[its_plan.roles[role].index].bounds.most for role in _on_devices(its, its_plan))
            yield f"[hogbatch] workers: max = {most}", min(most, training_samples), its, its_plan
        else:
            most = its.training.minibatch_size
            yield f"[training] minibatch_size = {most} (μ)", most, its, its_plan


def most_at_once(job: Job, plan: Plan, training_samples: int) -> int:
    """Returns the most samples that a learner computes at once in a run."""
    return max(at_once(its, its_plan)(batch) for _, batch, its, its_plan in _batches(job, plan, training_samples))


def at_once(job: Job, plan: Plan) -> Callable[[int], int]:
    """Returns a function from μ to the most samples that a learner computes at once."""

    learners = _on_devices(job, plan) if job.cluster.parts and not job.scheduled else ()

    def samples(mu: int) -> int:
        parts = [portion(plan, role, mu, job.cluster.parts).count for role in learners] or [mu]
        return -(-max(parts) // job.training.microbatches)

    return samples


def _on_devices(job: Job, plan: Plan) -> list[int]:
    """Returns the learners that do not stay on the CPU while others use GPUs. If all stay there: all learners."""
    on_cpu = job.learners_on_cpu(plan)
    return [learner for learner in plan.learners if learner not in on_cpu] or list(plan.learners)


class ResidentSets(NamedTuple):
    """Sets of samples on a device.

    Attributes:
        training: Training set on the device. None: mini-batches are sent there.
        tests: Splits for evaluation, on the device if they are there.
    """

    training: Resident | None
    tests: Mapping[str, Samples]


def resident_sets(job: Job, plan: Plan, data: Data, device: torch.device, *, trains: bool) -> ResidentSets:
    """Copies sets to a device, as they are stored, if they fit there together with a learner.

    A set stays in main memory if it does not fit, if it is not in memory as arrays, or if the user's own code changes
    its samples. Half of the free memory is left: other ranks may use the device too.

    Args:
        job: Resolved job.
        plan: Role assignment.
        data: Data with the sets.
        device: The device.
        trains: Whether learners compute there.
    """
    free, there = kind_of(device).free_bytes(device), dict[int, Resident]()
    room = math.inf
    if free is not None:
        found = planned(job, plan, data, device)
        needed = 0 if found is None else found.total(most_at_once(job, plan, len(data.training or ())))
        room = (free - needed) / 2

    def resident(samples: Samples) -> Resident | None:
        nonlocal room
        stored, whole = stored_in_memory(samples), id(whole_of(samples))
        if stored is not None and whole not in there and (size := sum(array.nbytes for array in stored)) <= room:
            room -= size
            there[whole] = Resident(samples, device)
        return there.get(whole)

    augmented = job.augment.name is not None
    training = None if data.training is None or not trains or augmented else resident(data.training)
    tests = {name: (split, resident(split)) for name, split in data.tests.items()}
    return ResidentSets(
        training,
        {n: split if its is None else ResidentSplit(split, its, device) for n, (split, its) in tests.items()},
    )
