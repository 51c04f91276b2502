"""Dry run of one mini-batch with a job's own parts, in this process, before ranks are started for the job.

It loads the data, builds the model, and makes loss, optimiser, metrics and hooks. It computes one gradient and
evaluates one batch. The buffers that each role needs are counted in virtual time, without tensors.
"""

import math
import os
import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rudra.compute import models, tasks
from rudra.compute.bank.choice import check_form
from rudra.compute.device.kind import CPU
from rudra.compute.device.streams import finished
from rudra.compute.executor import Executor, torch_as_in
from rudra.compute.first_gradient import try_first_gradient
from rudra.compute.flat import FlatModel
from rudra.compute.learners import LearnerExecutor, ReplicaExecutor, StatisticsExecutor
from rudra.compute.making import check_output, make_executors
from rudra.compute.memory_plan import MemoryPlan, planned
from rudra.compute.owners import OwnerExecutor
from rudra.compute.replicas import AveragerExecutor
from rudra.compute.stages import FirstStageExecutor
from rudra.core.actions import (
    BackpropFirstStage,
    Compute,
    ExecutorAction,
    Reduce,
    ReorderParts,
    RunFirstStage,
    RunLastStage,
    StepReplica,
    Update,
)
from rudra.core.bucket_rules import held, in_buckets, passes_early, spread
from rudra.core.buffer_names import ACTIVATION_GRADIENT, ACTIVATIONS, GRADIENT, REPLICA, WEIGHTS
from rudra.core.events import Computed, Event
from rudra.core.wire import behind_bytes, tail_bytes
from rudra.data.fingerprint import fingerprints, unrepeatable
from rudra.data.load import load
from rudra.errors import ConfigError
from rudra.job.job import Job
from rudra.memory import memory_bytes
from rudra.prepare.resolve import settle
from rudra.results.warm_start import final_weights
from rudra.simulation.assembly import assemble
from rudra.simulation.predict import KeptRows
from rudra.simulation.timing_only import TimingOnly
from topologies import Plan

ROUNDS = 6
"""Number of mini-batches per learner in the simulation that counts buffers."""


class Sample(NamedTuple):
    """Numbers of samples in the splits of the data."""

    training: int
    test: int
    validation: int


class Crossed(NamedTuple):
    """Bytes that one learner and the servers exchange in a step with layers placed, both directions together.

    Attributes:
        activations: Bytes of the activations and their gradient.
        parameters: Bytes of the first layers' parameters and their gradient.
        buffers: Bytes of the first layers' buffers.
        generator: Bytes of the random generator's state, if the stage server continues from it.
        headers: Bytes of the messages' headers.
    """

    activations: int
    parameters: int
    buffers: int
    generator: int
    headers: int


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """Results of a rehearsal.

    Attributes:
        parameters: Number of trained parameters.
        size: Number of floats in a message: parameters, followed by the model's buffers.
        samples: Numbers of samples in the data.
        loss: Loss of the first mini-batch, at the initial weights.
        gradient_s: Seconds of its gradient, measured at the second computation.
        metrics: Names of the metrics that each evaluation measures, in addition to loss and error.
        memory: Kind of role -> approximate bytes that its rank will take, with Python and torch.
        apart_bytes: Bytes that a server takes in addition if all learners are on other nodes, for gradients in buckets.
            Without a server, bytes that a learner takes in addition, for updates that begin early.
        plan: Memory of a learner on its device, as counted on the CPU. None: it cannot be predicted.
        data_bytes: Bytes of the data, stored once on every node.
        crossed: Bytes per mini-batch of a learner that has only the first layers.
        unrepeatable: Reason why the samples cannot be drawn again, or empty if they can.
    """

    parameters: int
    size: int
    samples: Sample
    loss: float
    gradient_s: float
    metrics: tuple[str, ...]
    memory: dict[str, int]
    apart_bytes: int
    plan: MemoryPlan | None
    data_bytes: int
    crossed: Crossed | None
    unrepeatable: str


def rehearse(job: Job, plan: Plan) -> Rehearsal:
    """Tries everything that a run would do on its ranks, with one mini-batch.

    Args:
        job: Resolved job. If it uses a GPU, which may be on another machine, the rehearsal uses the CPU instead.
        plan: Roles and their ranks.

    Raises:
        RudraError: The job has a mistake that a run would find. Exceptions of the user's own code are passed on.
    """
    job = job.with_(cluster={"device": "cpu", "transport": "auto"}, simulation={"batching": "none"})
    taking = dict.fromkeys((*plan.owners, plan.statistics, plan.learners[0]))
    for hook in job.hooks:
        taking |= dict.fromkeys(hook.roles(plan)[:1])
    with torch_as_in(job.cluster):
        alone = memory_bytes("VmRSS")
        loaded = load(job.data, seed=job.training.seed, ignored=job.task.ignored)
        with_data = memory_bytes("VmRSS")
        job.check_samples(loaded.info.training_samples)
        with suppress(OSError):  # restarts the peak
            Path(f"/proc/{os.getpid()}/clear_refs").write_text("5")
        job = settle(job, gradients=try_first_gradient(job, plan, loaded))
        check_form(job, plan, loaded)
        made = make_executors(job, plan, tuple(taking), loaded, prefetch=False, first_weights=final_weights)
        for executor in made.values():
            executor.hooks = None  # hooks are made but not called, as their effects may last
            executor.prepare()
        owners = {role: made[role] for role in plan.owners}
        loss, gradient_s = _gradient(owners, made[plan.learners[0]])
        of_model = max(0, memory_bytes("VmHWM") - with_data)
        metrics = _test(owners, made[plan.statistics])
        for owner in owners.values():
            owner.perform(Update(GRADIENT, WEIGHTS, 0.0, 1))  # the optimiser allocates its state
            if isinstance(owner, AveragerExecutor):
                finished(owner.perform(StepReplica(GRADIENT, REPLICA, 0.0)))
        why = unrepeatable(fingerprints(loaded))
        on_device = planned(job, plan, loaded, CPU)
    held_out = 0 if loaded.validation is None else len(loaded.validation)
    return Rehearsal(
        parameters=sum(owner.parameters for owner in owners.values()),
        size=made[plan.statistics].size,
        samples=Sample(loaded.info.training_samples, loaded.info.test_samples, held_out),
        loss=loss,
        gradient_s=gradient_s,
        metrics=metrics,
        memory=_memory(job, plan, made, alone, of_model),
        apart_bytes=_apart_bytes(job, plan, owners),
        plan=on_device,
        data_bytes=max(0, with_data - alone),
        crossed=_crossed(made[plan.learners[0]]),
        unrepeatable=why,
    )


def check_target(job: Job) -> None:
    """Checks that an evaluation of the job measures the metric of its target, which takes less than a rehearsal.

    Raises:
        ConfigError: None does, or the model does not fit the data.
        DataError: The data cannot be read.
    """
    data = load(job.data)
    task = tasks.make(job.task, data.info.classes)
    check_output(job, task, FlatModel(models.build(job.model, data.info, job.training.seed), task), data)


def _crossed(learner: Executor) -> Crossed | None:
    if not isinstance(learner, FirstStageExecutor):
        return None
    both_ways = 2 * 4
    return Crossed(
        activations=both_ways * learner.activations,
        parameters=both_ways * learner.parameters,
        buffers=both_ways * (learner.size - learner.parameters),
        generator=both_ways * (learner.sizes[ACTIVATIONS] - learner.activations),
        headers=behind_bytes(0) + 3 * behind_bytes(1),  # weights have no header of a gradient
    )


def _pull(owners: Mapping[int, Executor], into: Executor) -> None:
    """Copies the owners' weights to a role."""
    for role, owner in owners.items():
        if into is not owner:
            into.slice_for(WEIGHTS, role).copy_(owner.buffer(WEIGHTS).vector)


def _gradient(owners: Mapping[int, Executor], learner: Executor) -> tuple[float, float]:
    """Returns the loss of the first mini-batch at the initial weights, and the seconds of its gradient."""
    assert isinstance(learner, LearnerExecutor)
    if isinstance(learner, FirstStageExecutor):
        *fronts, back = owners.items()
        _pull(dict(fronts), learner)
        compute = partial(_through_stage, back[1], learner)
    else:
        _pull(owners, learner)
        compute = partial(_outcome, learner, Compute(0, learner.source.work, WEIGHTS, GRADIENT))
    compute()
    began = time.perf_counter()
    computed = compute()
    gradient_s = time.perf_counter() - began
    loss = computed.loss
    if not math.isfinite(loss):
        text = "is all of the data finite, and does the loss fit?"
        raise ConfigError(f"the loss of the first mini-batch is {loss}, at the initial weights: {text}")
    return loss, gradient_s


def _outcome(executor: Executor, action: ExecutorAction) -> Computed:
    (computed,) = finished(executor.perform(action))
    assert isinstance(computed, Computed)
    return computed


def _through_stage(stage: Executor, learner: FirstStageExecutor) -> Computed:
    """Computes a gradient of a learner whose last layers are at a stage server."""
    work = learner.source.work
    next(learner.perform(RunFirstStage(0, work, WEIGHTS, ACTIVATIONS)))
    stage.buffer(ACTIVATIONS).vector.copy_(learner.buffer(ACTIVATIONS).vector)
    computed = _outcome(stage, RunLastStage(work.stream, 0, work, ACTIVATIONS, WEIGHTS, GRADIENT, ACTIVATION_GRADIENT))
    learner.buffer(ACTIVATION_GRADIENT).vector.copy_(stage.buffer(ACTIVATION_GRADIENT).vector)
    found = (computed.loss, computed.errors, computed.samples)
    return _outcome(learner, BackpropFirstStage(0, WEIGHTS, ACTIVATION_GRADIENT, GRADIENT, *found))


def _test(owners: Mapping[int, Executor], statistics: Executor) -> tuple[str, ...]:
    """Evaluates one batch, and returns the names of the metrics."""
    if not isinstance(statistics, StatisticsExecutor):
        return ()
    _pull(owners, statistics)
    statistics.arrange(ReorderParts(WEIGHTS))
    return statistics.try_out(WEIGHTS)


def _memory(job: Job, plan: Plan, made: dict[int, Executor], alone: int, of_model: int) -> dict[str, int]:
    """Returns the bytes of the largest rank of each kind of role."""
    counted = buffers_of(job, plan)
    found: dict[str, int] = {}
    for role in plan.roles:
        here = plan.on_rank(role.world_rank)
        taken = alone
        for i in here:
            first = plan.learners[0] if plan.stage is not None and not plan.traits(i).tests else plan.statistics
            alike = plan.stage if i in plan.stages else i if i in plan.owners else first
            assert alike is not None
            like, tail = made[alike], tail_bytes(plan.max_gradients_per_message)
            taken += sum(like.size_of(name) * 4 + tail for name in counted[i])
            taken += _held_bytes(job, plan, plan.nodes(near=True), i, like)
            owner = made[plan.server if plan.traits(i).trains else alike] if plan.traits(i).updates else None
            taken += owner.state_bytes() if isinstance(owner, OwnerExecutor) else 0
        if not all(plan.roles[i].kind_traits.serves and not plan.roles[i].kind_traits.concludes for i in here):
            taken += of_model
        found[role.kind] = max(found.get(role.kind, 0), taken)
    return found


def _held_bytes(job: Job, plan: Plan, node: Sequence[int], role: int, executor: Executor) -> int:
    """Returns the bytes of gradients that come to a role in buckets.

    Args:
        job: Resolved job.
        plan: Roles and their ranks.
        node: Node of every role.
        role: Id of the role.
        executor: Executor of the role, or of a role that holds as much.
    """
    size = executor.size
    count = held(job, plan, node, role, size, executor.parameters, size)  # a fast network may need no buckets
    return count * (executor.size * 4 + tail_bytes(plan.max_gradients_per_message))


def _apart_bytes(job: Job, plan: Plan, owners: Mapping[int, Executor]) -> int:
    """Returns the bytes of buckets that a server or a learner holds if all learners are on other nodes only."""
    here, (apart, nodes) = plan.nodes(near=True), spread(job)
    ahead = in_buckets if plan.averaging else passes_early
    if any(ahead(job, apart, members) for members in apart.groups):
        learner = next(iter(owners.values()))
        return learner.ahead_bytes if isinstance(learner, ReplicaExecutor | AveragerExecutor) else 0
    more = [
        _held_bytes(job, apart, nodes, there, executor) - _held_bytes(job, plan, here, owner, executor)
        for (owner, executor), there in zip(owners.items(), apart.owners, strict=True)
    ]
    return max(0, *more)


def buffers_of(job: Job, plan: Plan) -> defaultdict[int, set[str]]:
    """Returns the names of the buffers that each role uses in a short simulation."""
    size = job.training.minibatch_size
    job = job.at(0).without_tests()
    about: dict[str, Any] = {"training": {"epochs": 1}, "results": {"checkpoint_every": "never"}}
    job = job.with_(hooks=(), simulation={"faults": ()}, **about)
    tensors, samples = _Counted(), ROUNDS * size * len(plan.learners)
    assemble(job, plan, tensors, KeptRows(), training_samples=samples, size_bytes=4).run()
    return tensors.names


class _Counted(TimingOnly):
    """Recorder of the buffers that each role uses."""

    idle: Collection[type[ExecutorAction]] = ()

    def __init__(self) -> None:
        self.names: defaultdict[int, set[str]] = defaultdict(set)

    def transfer(self, source: int, source_buffer: str, to: int, to_buffer: str) -> None:
        self.names[source].add(source_buffer)
        self.names[to].add(to_buffer)

    def perform(self, role: int, action: ExecutorAction, seconds: float) -> Event | None:
        self.names[role] |= {getattr(action, field) for field in (*action.reads, *action.changes)} - {""}
        return super().perform(role, action, seconds)

    def reduce(self, actions: Mapping[int, Reduce], sums: Sequence[Sequence[int]]) -> None:
        for role, action in actions.items():
            self.names[role].add(action.buffer)
