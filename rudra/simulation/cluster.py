"""The executors of all roles of a simulation, and what they share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from rudra.compute import models
from rudra.compute.checks import check_batching
from rudra.compute.devices import CPU
from rudra.compute.executor import Executor
from rudra.compute.first_gradient import settled
from rudra.compute.flat import FlatModel
from rudra.compute.learners import LearnerExecutor
from rudra.compute.making import make_executors
from rudra.compute.stages import FirstStageExecutor, cut_model
from rudra.compute.statedict import StateEntry
from rudra.core.events import (
    WEIGHTS,
)
from rudra.core.layout import Entry, Placed
from rudra.data.fingerprint import Fingerprint, fingerprints
from rudra.data.load import DataInfo, load
from rudra.errors import ConfigError
from rudra.job.job import Job
from rudra.results.warm_start import final_weights
from rudra.simulation.batching import BigBatchTensors, VmapTensors
from rudra.simulation.tensors import RealTensors
from rudra.simulation.timing_only import Tensors, TimingOnly
from topologies import Plan


@dataclass(frozen=True, slots=True)
class SimulatedCluster:
    """What a simulation needs of a job beside its roles.

    Attributes:
        job: as resolved, with what the first gradient has settled.
        tensors: do what roles want done with tensors.
        info: what the data is like.
        layout: of the flat vector.
        size: of that vector, in elements.
        initial_sha256: of the weights at the start; empty where there are none.
        state_dict: what that of the model lists; empty where there are no weights.
        weights: gives the floats of a buffer of a role; None where there are none.
        executors: by role; without tensors there are none.
        placed: the pieces of a model of which a stage server has the last layers.
        step_bytes: of tensors that a step of all learners sends then.
    """

    job: Job
    tensors: Tensors
    info: DataInfo
    layout: tuple[Entry, ...]
    size: int
    initial_sha256: str
    state_dict: tuple[StateEntry, ...]
    weights: Callable[[int, str], npt.NDArray[np.float32] | None]
    executors: Mapping[int, Executor] = field(default_factory=dict)
    placed: Placed | None = None
    step_bytes: int = 0
    fingerprints: Mapping[str, Fingerprint] = field(default_factory=dict)


def make_cluster(job: Job, plan: Plan) -> SimulatedCluster:
    """Loads the data, builds the model, and makes real tensors or none, as the job says.

    Args:
        job: resolved.
        plan: who is who.

    Raises:
        RudraError: data or model are not there or do not fit, the job asks for a GPU that is not there, or for
            batches that its protocol or model do not allow.
    """
    if not job.simulation.tensors:
        return _without_tensors(job)
    device = find_device(job)
    loaded = load(job.data, seed=job.training.seed, ignored=job.task.ignored)
    info, roles = loaded.info, tuple(range(len(plan.roles)))
    alone = job.simulation.batching == "none"
    job = settled(job, plan, loaded, device)
    executors = make_executors(
        job, plan, roles, loaded, prefetch=False, device=device, rows=alone, first_weights=final_weights
    )
    tensors = _KINDS[job.simulation.batching](executors, halves=job.cluster.gradient_format == "float16")
    if job.simulation.batching != "none":
        _check_batching(job, executors, torch.cat([executors[i].buffer(WEIGHTS).vector for i in plan.owners]), info)
    for executor in executors.values():
        executor.prepare()

    def weights(role: int, buffer: str) -> npt.NDArray[np.float32]:
        return executors[role].buffer(buffer).array

    digest, statistics = tensors.sha256(plan.server, WEIGHTS), executors[plan.statistics]
    about = (statistics.layout, statistics.size, digest, statistics.state_dict)
    fronts = (executor.cut for executor in executors.values() if isinstance(executor, FirstStageExecutor))
    placed = next((cut.placed(statistics.size, job.training.minibatch_size, info) for cut in fronts), None)
    prints = fingerprints(loaded)
    return SimulatedCluster(job, tensors, info, *about, weights, executors, placed, statistics.step_bytes, prints)


def _without_tensors(job: Job) -> SimulatedCluster:
    info = load(job.data, train=False, test=False, seed=job.training.seed, ignored=job.task.ignored).info
    try:
        with torch.device("meta"):  # shapes alone
            flat = FlatModel(models.build(job.model, info, job.training.seed))
    except Exception:  # a factory that needs real tensors
        flat = FlatModel(models.build(job.model, info, job.training.seed))
    placed, step_bytes = None, 0
    if job.placement.given:
        cut = cut_model(job, models.build(job.model, info, job.training.seed), info)
        placed = cut.placed(flat.size, job.training.minibatch_size, info)
        step_bytes = cut.sent(job.training.minibatch_size) * job.learners
    tensors = TimingOnly()
    about = (job, tensors, info, flat.layout, flat.size, "", (), lambda role, buffer: None)
    return SimulatedCluster(*about, placed=placed, step_bytes=step_bytes)


def _check_batching(job: Job, executors: dict[int, Executor], weights: torch.Tensor, info: DataInfo) -> None:
    batching, protocol = job.simulation.batching, job.make_protocol()
    if batching == "big-batch" and not (protocol.ordered and protocol.gradients_per_update == job.learners):
        raise ConfigError(
            "[simulation] batching = 'big-batch' needs a protocol whose updates take one gradient of every learner at "
            "the same weights, as hardsync's do; valid here: none, vmap"
        )
    if batching == "big-batch" and any(fault.deadly for fault in job.simulation.faults):
        raise ConfigError(
            "[simulation] batching = 'big-batch' needs all learners all the time, but faults has some die; valid here: "
            "none, vmap"
        )
    source = next(e.source for e in executors.values() if isinstance(e, LearnerExecutor))
    check_batching(batching, source.model, weights, info.sample)


_KINDS = {"none": RealTensors, "big-batch": BigBatchTensors, "vmap": VmapTensors}


def find_device(job: Job) -> torch.device:
    """Where a simulation computes.

    Raises:
        ConfigError: the job asks for a GPU, and there is none, or none is used.
    """
    wanted, there = job.cluster.device, torch.cuda.is_available()
    if job.hogbatch.shares_weights:
        if wanted == "cuda":
            raise ConfigError("[cluster] device = 'cuda': windows of virtual time are in main memory; valid: cpu, auto")
        return CPU
    if wanted == "cuda" and not there:
        raise ConfigError("[cluster] device = 'cuda': torch sees no GPU here; valid: cpu, auto")
    return torch.device("cuda", 0) if wanted != "cpu" and there else CPU
