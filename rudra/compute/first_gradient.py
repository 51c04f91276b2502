"""The first gradient of a job, tried before training to find jobs that fail and to select the gradient code.

One rank decides for all. The job records the decision, so that resumed runs and replays keep it.
"""

import inspect
import math
import sys
from types import MethodType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rudra.compute import models, tasks
from rudra.compute.buffers import changed, tried
from rudra.compute.checks import check_gradient
from rudra.compute.device.faults import operations_named
from rudra.compute.device.kind import CPU
from rudra.compute.flat import FlatModel, Gradients
from rudra.compute.gradients import GradientSource
from rudra.compute.memory_plan import check_device_memory
from rudra.compute.parts import elements_of
from rudra.compute.shortcuts import gradients_of
from rudra.compute.stages import cut_model
from rudra.compute.tasks import Task
from rudra.core.work import DEALT, Portion, Work, portion
from rudra.data.load import Data
from rudra.data.trees import moved
from rudra.errors import ConfigError
from rudra.job.job import Job
from rudra.log import log
from topologies import Plan

_AGREE = 1e-6
"""Largest difference between two computations of a gradient, relative to its norm, that counts as agreement."""


@operations_named()
def try_first_gradient(job: Job, plan: Plan, data: Data, device: torch.device = CPU) -> Gradients:
    """Tries the first mini-batch of the first learner in training mode, and selects how gradients are computed.

    Args:
        job: Resolved job. The trial uses its initial weights.
        plan: Role assignment.
        data: Data with the training set.
        device: Device that computes gradients.

    Returns:
        `training.gradients` of the job: `"autograd"` or `"direct"`.

    Raises:
        ConfigError: The job does not fit into the memory of the device, the model changes its weights itself, or torch
            cannot compute its gradient in the job's precision, with the job's mini-batches or by deterministic
            operations. Exceptions of the user's own code propagate.
    """
    check_device_memory(job, plan, data, device)
    task = tasks.make(job.task, data.info.classes)

    def model() -> torch.nn.Module:
        return models.build(job.model, data.info, job.training.seed).to(device)

    flat = FlatModel(module := model(), task, 1, job.training.precision)
    models.check_model_output(module, task, data.info)
    _check_alone(job, plan, flat, lambda: FlatModel(model(), task, 1, job.training.precision), data)
    assert data.training is not None
    work = _first_work(job, plan, len(data.training))
    source = GradientSource(job, plan.roles[plan.learners[0]].index, work, flat, data.training, prefetch=False)
    batch = source.minibatch(0, work)
    first = _gradient(flat, batch, source.seed(0), guarded=True)
    gradients: Gradients = "autograd"
    if not job.training.in_16_bits and job.training.gradients != "autograd":
        gradients = gradients_of(module, task)
    if job.training.gradients == "direct" and gradients != "direct":
        raise ConfigError(
            "[training] gradients = 'direct': the model has layers, hooks or a loss that need torch.autograd; "
            "valid: auto, autograd"
        )
    if gradients == "direct" and (off := _difference(module, task, batch, source.seed(0), first)) > _AGREE:
        gradients = "autograd"
        log.warning(
            f"{job.name}: gradients that are written directly differ from torch.autograd's by {off:.1g} of their norm, "
            "so torch.autograd computes all gradients"
        )
    if plan.stage is not None:
        _check_pieces(job, FlatModel(model(), task), data, batch, source.seed(0), first)
    return gradients


def portion_of(job: Job, plan: Plan, role: int) -> Portion:
    """Returns a learner's portion. For a worker of `hogbatch` it is one sample, which may occur at an epoch's end."""
    if plan.scheduled:
        return Portion(DEALT, 0, 1, 0)
    return portion(plan, role, job.training.minibatch_size, job.cluster.parts)


def _first_work(job: Job, plan: Plan, samples: int) -> Work:
    if plan.scheduled:
        return Portion(DEALT, 0, min(job.training.minibatch_size, samples), 0).work(0)
    return portion_of(job, plan, plan.learners[0]).work(0)


def _gradient(flat: FlatModel, batch: Any, seed: int, *, guarded: bool = False) -> torch.Tensor:
    """Computes the gradient at the initial weights, (size,) float32.

    Args:
        flat: Model that computes.
        batch: Inputs and target.
        seed: Seed of dropout and similar layers.
        guarded: Whether to reject a model that writes to its weights, in training or in evaluation.

    Raises:
        ConfigError: The model writes to its weights.
    """
    weights, out = torch.empty(flat.size, device=flat.device), torch.empty(flat.size, device=flat.device)
    inputs, target = batch
    flat.read_into(weights)
    flat.bind(weights)
    if not guarded:
        flat.gradient(inputs, target, out, seed)
        return out
    guard = _Guard(weights)
    with guard:
        flat.gradient(inputs, target, out, seed)
        flat.module.eval()
        tried(flat.module, moved(inputs, flat.device))
        flat.module.train()
    for entry in flat.layout:
        if entry.kind == "parameter" and any(entry.offset <= at < entry.offset + entry.size for at in guard.writes):
            raise ConfigError(changed(entry.name))
    return out


def _difference(module: torch.nn.Module, task: Task, batch: Any, seed: int, wanted: torch.Tensor) -> float:
    """Returns the distance of the directly written gradient from autograd's, relative to the norm of autograd's."""
    flat = FlatModel(module, task, gradients="direct")
    return _distance(*(each[: flat.parameter_count] for each in (_gradient(flat, batch, seed), wanted)))  # no buffers


def _distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Returns the distance of a gradient from the wanted one, relative to the norm of the wanted one."""
    if torch.equal(found.nan_to_num(), wanted.nan_to_num()):
        return 0.0
    norm = float(wanted.norm())
    return float((found - wanted).norm()) / norm if norm else math.inf


def _check_pieces(job: Job, flat: FlatModel, data: Data, batch: Any, seed: int, wanted: torch.Tensor) -> None:
    """Computes the gradient of a model in the two pieces that a job cuts it in, as their executors do.

    A cut by torch.fx keeps the functions of the model's `forward`, but not code that changes their gradients.

    Args:
        job: Resolved job.
        flat: Model at its initial weights. It is cut.
        data: Data with the shape of a sample.
        batch: Inputs and target.
        seed: Seed of dropout and similar layers.
        wanted: Gradient of the whole model, (size,) float32.

    Raises:
        ConfigError: The pieces give another gradient.
    """
    where = f"[placement] cut = {job.placement.cut!r}"
    flat.read_into(weights := torch.empty(flat.size, device=flat.device))  # cutting may change buffers
    cut = cut_model(job, flat.module, data.info)
    pieces = [FlatModel(piece, flat.task) for piece in (cut.front, cut.back)]
    outs = [torch.zeros(piece.size, device=piece.device) for piece in pieces]
    for piece, part in zip(pieces, cut.parts(job.optimizer, flat.layout), strict=True):
        piece.bind(elements_of(weights, part))
    front, back = pieces
    inputs, target = batch
    activations = front.forward(inputs, seed, torch.empty(front.size - front.parameter_count, device=front.device))
    if not activations.requires_grad:
        raise ConfigError(
            f"{where}: the output of the first layers has no gradient; valid: a layer before the detach()"
        )
    crossing = activations.detach().clone().requires_grad_()
    back.gradient(crossing, target, outs[1], front.random_state if cut.random else seed)
    if crossing.grad is not None:
        front.backward(activations, crossing.grad, outs[0])
    found = torch.cat([out[: piece.parameter_count] for piece, out in zip(pieces, outs, strict=True)])
    if (off := _distance(found, wanted[: len(found)])) > _AGREE:
        raise ConfigError(
            f"{where}: the gradient of the two pieces differs from the model's by {off:.1g} of its norm, as with a "
            "torch.autograd.Function or torch.no_grad() in `forward`; valid: a model with `stages()`"
        )


class _Guard(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A monitor of torch operations that write to a vector.

    It sees writes through `weight.data`, which raise no version, and writes of equal values, which change no bits yet.

    Args:
        vector: Vector that must not be written.

    Attributes:
        writes: First element of each piece that was written.
    """

    def __init__(self, vector: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._at = vector.untyped_storage().data_ptr()
        self.writes: list[int] = []
        if "torch._dynamo" not in sys.modules:  # torch wraps this method for its compiler, and importing that takes 1 s
            plain = inspect.unwrap(type(self).__torch_dispatch__)
            self.__torch_dispatch__ = MethodType(plain, self)  # type: ignore[method-assign]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for place, argument in enumerate(func._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    value = args[place] if place < len(args) else kwargs.get(argument.name)
                    for each in value if isinstance(value, list | tuple) else [value]:
                        self._note(each)
        return func(*args, **kwargs)

    def _note(self, written: Any) -> None:
        strided = isinstance(written, torch.Tensor) and written.layout is torch.strided
        if strided and written.untyped_storage().data_ptr() == self._at:
            self.writes.append(written.storage_offset())


def _check_alone(job: Job, plan: Plan, flat: FlatModel, model: Any, data: Data) -> None:
    """Tries a gradient of one sample, or one in the job's precision, with another model.

    Args:
        job: Resolved job.
        plan: Role assignment.
        flat: Model.
        model: Function that makes another model.
        data: Data with the shape of a sample.
    """
    single, microbatches = None, job.training.microbatches
    portions = [portion_of(its, its_plan, role) for _, its, its_plan in job.parts(plan) for role in its_plan.learners]
    if job.scheduled:
        single = ("[protocol] name: hogbatch: the last batch of an epoch may be short", "models without BatchNorm")
    elif microbatches > 1 and any(mine.count < 2 * microbatches for mine in portions):
        single = (f"[training] microbatches = {microbatches}: a part may have one sample", "fewer")
    elif any(mine.count == 1 for mine in portions):
        single = ("[training] minibatch_size = 1", "2 or more")
    lonely = single is not None and flat.size > flat.parameter_count  # perhaps BatchNorm, which needs two
    if lonely or job.training.in_16_bits:
        check_gradient(job.training, model(), data.info.sample, single=single)
