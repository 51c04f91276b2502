"""The form of a bank: a check that the job's form is possible, or a measurement of the forms before training."""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing

import torch

from rudra.compute.bank.graphs import streams_of
from rudra.compute.bank.measured import MeasuredForms, Times
from rudra.compute.bank.trial import BankLearners, FormTrial
from rudra.compute.device.devices import kind_of
from rudra.compute.device.kind import CPU
from rudra.compute.executor import arithmetic_of_thread
from rudra.compute.graphs import WARM
from rudra.compute.memory_plan import check_device_memory
from rudra.data.load import Data
from rudra.errors import ConfigError
from rudra.job.job import Job
from rudra.job.rules import not_fused_because, not_graphed_because
from rudra.log import log
from topologies import Plan

_SPAN_S = 2.0
"""Time for the measurement of all forms together, before training."""

_FASTER = 1.05
"""Least advantage over the loop that justifies another form, which takes more memory or changes the last bits."""


def check_form(job: Job, plan: Plan, data: Data, device: torch.device = CPU) -> None:
    """Checks that the learners of a bank can compute in the form that the job names.

    Args:
        job: Resolved job.
        plan: Role assignment.
        data: Data with the training set.
        device: Device that computes gradients.

    Raises:
        ConfigError: The model or the data does not allow it.
    """
    for form, check in _CHECKS.items():
        if job.cluster.learners_per_device is not None and job.cluster.bank == form:
            check(BankLearners(job, plan, data, device, "autograd"))


def choose_form(job: Job, plan: Plan, data: Data, device: torch.device, gradients: str) -> str:
    """Chooses the form of a bank, by a measurement if the job leaves it open.

    Args:
        job: Resolved job.
        plan: Role assignment.
        data: Data with the training set.
        device: Device that computes gradients.
        gradients: `training.gradients` of the job, which the loop uses.

    Returns:
        "loop", "graphs" or "fused".

    Raises:
        ConfigError: As for `check_form`.
    """
    check_form(job, plan, data, device)
    if job.cluster.bank != "auto":
        return job.cluster.bank
    m = job.cluster.tried_bank_size or 1
    if m == 1 or plan.overlapped or all(_excluded(job, device).values()):
        return "loop"
    learners = BankLearners(job, plan, data, device, gradients)
    forms, reasons = possible_forms(learners, plan)
    if len(forms) == 1:
        log.info(f"{job.name}: the learners of a bank compute one after another ({'; '.join(reasons)})")
        return "loop"
    file = MeasuredForms(job, learners.models[0], data.info, forms)
    times, when = file.read(), f", measured earlier: {file.path}"
    if times is None:
        times, when = measured_times(learners, forms, _SPAN_S), ""
        file.write(times)
    form = fastest(times)
    text = ", ".join(f"{name} {1e3 * seconds / m:.3g} ms" for name, seconds in sorted(times.items()))
    log.info(f"{job.name}: bank of {m} learners: {form} (a gradient takes: {text}{when})")
    return form


def possible_forms(learners: BankLearners, plan: Plan) -> tuple[list[str], list[str]]:
    """Returns the forms that a job with an open form may use, and why its model, data or memory exclude others.

    Args:
        learners: Learners of a bank.
        plan: Role assignment.
    """
    job, device = learners.job, learners.device
    excluded, forms, reasons = _excluded(job, device), ["loop"], []
    for form, check in _CHECKS.items():
        if not excluded[form]:
            try:
                check(learners)
                check_device_memory(job.with_(cluster={"bank": form}), plan, learners.data, device)
                forms.append(form)
            except ConfigError as error:
                reasons.append(str(error))
    return forms, reasons


def fastest(times: Times) -> str:
    """Returns the form that `auto` takes. Another one than the loop must be clearly faster."""
    best = min(times, key=times.__getitem__)
    return best if times.get("loop", math.inf) > _FASTER * times[best] else "loop"


def _excluded(job: Job, device: torch.device) -> dict[str, str]:
    """Returns form -> the key or device that excludes it. Empty: none does."""
    return {"graphs": _not_graphed_because(job, device), "fused": not_fused_because(job)}


def _not_graphed_because(job: Job, device: torch.device) -> str:
    """Returns why graphs are no form for this device. Empty: they may be."""
    few = streams_of(job, device) == 1 and not kind_of(device).records
    return "a single thread computes" if few else not_graphed_because(job)


_CHECKS: dict[str, Callable[[BankLearners], None]] = {
    "graphs": BankLearners.check_graphs,
    "fused": BankLearners.check_fused,
}
"""Checks of each form except the plain loop, which any job allows."""


def measured_times(learners: BankLearners, forms: Sequence[str], span_s: float) -> Times:
    """Measures the gradients of all learners of a bank in several forms, in turns. Returns their shortest times.

    Args:
        learners: Learners of a bank.
        forms: Forms.
        span_s: Seconds that all forms together take, at least one round of each.
    """
    restore = arithmetic_of_thread()
    warm = WARM if kind_of(learners.device).records else 0
    shortest: dict[str, float] = {}
    with ExitStack() as stack:
        stack.callback(restore)
        trials = {form: stack.enter_context(closing(FormTrial(learners, form))) for form in forms}
        end = time.perf_counter() + span_s
        for round_ in range(1000):
            for form, trial in trials.items():
                seconds = trial.seconds()
                if round_ > warm:  # the first gradients allocate memory, and are recorded
                    shortest[form] = min(shortest.get(form, seconds), seconds)
            if shortest and time.perf_counter() > end:
                break
    return shortest
