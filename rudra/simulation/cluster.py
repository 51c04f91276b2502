"""Executors of all roles of a simulation, and the data that they share."""

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
from rudra.core.buffer_names import WEIGHTS
from rudra.core.layout import Entry, Placed
from rudra.data.fingerprint import Fingerprint, fingerprints
from rudra.data.load import Data, DataInfo, load
from rudra.errors import ConfigError
from rudra.job.job import Job
from rudra.results.warm_start import final_weights
from rudra.simulation.batching import BigBatchTensors, VmapTensors, bank_tensors
from rudra.simulation.tensors import RealTensors
from rudra.simulation.timing_only import Tensors, TimingOnly
from topologies import Plan


@dataclass(frozen=True, slots=True)
class SimulatedCluster:
    """Executors, tensors and sizes that a simulation needs in addition to its roles.

    Attributes:
        tensors: Carries out the roles' actions on tensors.
        info: Description of the data.
        layout: Layout of the flat vector.
        size: Number of elements of the flat vector.
        initial_sha256: SHA-256 of the initial weights, or empty without weights.
        state_dict: Entries of the model's state dict, or empty without weights.
        weights: Function that returns the floats of a role's buffer, or None without weights.
        executors: Executors by role, or empty without tensors.
        placed: How the model is divided between learners and a stage server.
        step_bytes: Bytes of tensors that one step of all learners sends if layers are placed.
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

    @property
    def buffers(self) -> int:
        """Returns the number of elements of the flat vector that are not parameters."""
        return sum(entry.size for entry in self.layout if entry.kind != "parameter")


def make_cluster(job: Job, plan: Plan, data: Data, device: torch.device) -> SimulatedCluster:
    """Builds the model and the executors of all roles.

    Args:
        job: Settled job.
        plan: Roles and their ranks.
        data: Data of the job.
        device: Device for the computations.

    Raises:
        RudraError: The model does not fit the data, or its protocol or model does not allow the job's batches.
    """
    info, roles = data.info, tuple(range(len(plan.roles)))
    alone = job.simulation.batching == "none"
    executors = make_executors(
        job, plan, roles, data, prefetch=False, device=device, rows=alone, first_weights=final_weights
    )
    tensors = _tensors_of(job, plan, executors)
    if job.simulation.batching != "none":
        _check_batching(
            job, plan, executors, torch.cat([executors[i].buffer(WEIGHTS).vector for i in plan.owners]), info
        )
    for executor in executors.values():
        executor.prepare()

    def weights(role: int, buffer: str) -> npt.NDArray[np.float32]:
        return executors[role].buffer(buffer).array

    digest, statistics = executors[plan.server].sha256(WEIGHTS), executors[plan.statistics]
    about = (statistics.layout, statistics.size, digest, statistics.state_dict)
    fronts = (executor.cut for executor in executors.values() if isinstance(executor, FirstStageExecutor))
    placed = next((cut.placed(statistics.size, job.training.minibatch_size, info) for cut in fronts), None)
    prints = fingerprints(data)
    return SimulatedCluster(tensors, info, *about, weights, executors, placed, statistics.step_bytes, prints)


def without_tensors(job: Job) -> SimulatedCluster:
    """Finds the sizes of data and model without making executors, for simulations that only measure time.

    Args:
        job: Resolved job.

    Raises:
        ConfigError: The model does not exist, or does not fit the data.
        DataError: Files are missing that would give the sizes.
    """
    info = load(job.data, train=False, test=False, seed=job.training.seed, ignored=job.task.ignored).info
    try:
        with torch.device("meta"):  # only shapes
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


def _tensors_of(job: Job, plan: Plan, executors: dict[int, Executor]) -> RealTensors:
    """Makes the tensors of all roles, for gradients that are computed one by one or together."""
    halves = job.cluster.gradient_format == "float16"
    match job.simulation.batching:
        case "big-batch":
            return BigBatchTensors(executors, halves=halves, groups=plan.groups)
        case "vmap":
            return VmapTensors(executors, halves=halves)
    return bank_tensors(job, plan, executors)


def _check_batching(
    job: Job, plan: Plan, executors: dict[int, Executor], weights: torch.Tensor, info: DataInfo
) -> None:
    batching, protocol = job.simulation.batching, job.make_protocol()
    together = bool(plan.groups) or (protocol.ordered and protocol.gradients_per_update == job.learners)
    if batching == "big-batch" and not together:
        raise ConfigError(
            "[simulation] batching = 'big-batch' needs a protocol whose updates take one gradient of every learner at "
            "the same weights, as hardsync's do, or compute groups; valid here: none, vmap"
        )
    if batching == "big-batch" and any(fault.deadly for fault in job.simulation.faults):
        raise ConfigError(
            "[simulation] batching = 'big-batch' needs all learners all the time, but faults has some die; valid here: "
            "none, vmap"
        )
    source = next(e.source for e in executors.values() if isinstance(e, LearnerExecutor))
    check_batching(batching, source.model, weights, info.sample)
