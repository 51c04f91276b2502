"""The form of a bank: a check that the job's form is possible, or a measurement of the forms before training."""

import time
from collections.abc import Callable
from functools import partial

import torch

from rudra.compute import models, tasks
from rudra.compute.bank.gathering import ReadyLearner, bank_gradients
from rudra.compute.checks import check_fused
from rudra.compute.device.devices import finish
from rudra.compute.device.kind import CPU
from rudra.compute.first_gradient import portion_of
from rudra.compute.flat import FlatModel, Gradients
from rudra.compute.gradients import GradientSource
from rudra.core.actions import Compute
from rudra.core.buffer_names import GRADIENT, WEIGHTS
from rudra.data.load import Data
from rudra.errors import ConfigError
from rudra.job.job import Job
from rudra.job.rules import not_fused_because
from rudra.log import log
from topologies import Plan

_SPAN_S = 2.0
"""Time for the measurement of all forms together."""

_FASTER = 1.05
"""Least advantage over the loop that justifies other last bits."""


def check_form(job: Job, plan: Plan, data: Data, device: torch.device = CPU) -> None:
    """Checks that the learners of a bank can compute in the form that the job names.

    Args:
        job: Resolved job.
        plan: Role assignment.
        data: Data with the training set.
        device: Device that computes gradients.

    Raises:
        ConfigError: The form is "fused", and the model or the data does not allow it.
    """
    if job.cluster.fused:
        _check_fused(job, _model(job, data, device), data)


def choose_form(job: Job, plan: Plan, data: Data, device: torch.device, gradients: str) -> str:
    """Chooses the form of a bank, by a measurement if the job leaves it open.

    Args:
        job: Resolved job.
        plan: Role assignment.
        data: Data with the training set.
        device: Device that computes gradients.
        gradients: `training.gradients` of the job, which the loop uses.

    Returns:
        "loop" or "fused".

    Raises:
        ConfigError: As for `check_form`.
    """
    check_form(job, plan, data, device)
    if job.cluster.bank != "auto":
        return job.cluster.bank
    m = job.cluster.learners_per_device or 1
    if m == 1 or plan.overlapped or not_fused_because(job):
        return "loop"
    model = _model(job, data, device, gradients)
    try:
        _check_fused(job, model, data)
    except ConfigError as error:
        log.info(f"{job.name}: the learners of a bank compute one after another ({error})")
        return "loop"
    loop_s, fused_s = _measured(job, plan, data, model, m)
    form = "fused" if loop_s > _FASTER * fused_s else "loop"
    times = f"fused {1e3 * fused_s / m:.3g} ms, loop {1e3 * loop_s / m:.3g} ms"
    log.info(f"{job.name}: bank of {m} learners: {form} (a gradient takes: {times})")
    return form


def _model(job: Job, data: Data, device: torch.device, gradients: str = "autograd") -> FlatModel:
    task = tasks.make(job.task, data.info.classes)
    module = models.build(job.model, data.info, job.training.seed).to(device)
    how: Gradients = "direct" if gradients == "direct" else "autograd"
    return FlatModel(module, task, 1, job.training.precision, gradients=how)


def _check_fused(job: Job, model: FlatModel, data: Data) -> None:
    weights = torch.empty(model.size, device=model.device)
    model.read_into(weights)
    check_fused("[cluster] bank = 'fused'", "valid for this model: loop", model, weights, data.info.sample)


def _pair(weights: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return weights, out


def _measured(job: Job, plan: Plan, data: Data, model: FlatModel, m: int) -> tuple[float, float]:
    """Measures the gradients of m learners: one after another, and fused. Returns the shortest times, in seconds."""
    assert data.training is not None
    weights, outs = torch.empty(2, m, model.size, device=model.device)
    for row in weights:
        model.read_into(row)
    sources = []
    for role in plan.learners[:m]:
        work = portion_of(job, plan, role).work(0)
        index = plan.roles[role].index
        sources.append(GradientSource(job, index, work, model, data.training, prefetch=False))
    steps = [0]

    def ready() -> list[ReadyLearner]:
        steps[0] += 1
        found = []
        for source, *pair in zip(sources, weights, outs, strict=False):
            action = Compute(steps[0], source.work.after(steps[0]), WEIGHTS, GRADIENT)
            found.append(ReadyLearner(source, action, partial(_pair, *pair)))
        return found

    def loop() -> None:
        for each in ready():
            bank_gradients([each], joint=False)

    def fused() -> None:
        bank_gradients(ready(), joint=False)

    fastest: dict[Callable[[], None], float] = {}
    end = time.perf_counter() + _SPAN_S
    for round_ in range(1000):
        for form in (loop, fused):
            finish(model.device)
            began = time.perf_counter()
            form()
            finish(model.device)
            if round_:  # the first gradient allocates memory
                fastest[form] = min(fastest.get(form, float("inf")), time.perf_counter() - began)
        if fastest and time.perf_counter() > end:
            break
    return fastest[loop], fastest[fused]
