"""The executors of all roles of a simulation, and what they share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from rudra.compute import models
from rudra.compute.checks import check_batching
from rudra.compute.executor import Executor
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
from rudra.data.load import Data, DataInfo, load
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


def make_cluster(job: Job, plan: Plan, data: Data, device: torch.device) -> SimulatedCluster:
    """Builds the model and the executors of all roles.

    Args:
        job: settled.
        plan: who is who.
        data: of the job.
        device: on which tensors are computed.

    Raises:
        RudraError: the model does not fit the data, or the job asks for batches that its protocol or model do not
            allow.
    """
    info, roles = data.info, tuple(range(len(plan.roles)))
    alone = job.simulation.batching == "none"
    executors = make_executors(
        job, plan, roles, data, prefetch=False, device=device, rows=alone, first_weights=final_weights
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
    prints = fingerprints(data)
    return SimulatedCluster(tensors, info, *about, weights, executors, placed, statistics.step_bytes, prints)


def without_tensors(job: Job) -> SimulatedCluster:
    """Finds out how large data and model are, without executors: where only time counts.

    Args:
        job: resolved.

    Raises:
        ConfigError: there is no such model, or it does not fit the data.
        DataError: files are missing that would tell.
    """
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
    about = (TimingOnly(), info, flat.layout, flat.size, "", (), lambda role, buffer: None)
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
