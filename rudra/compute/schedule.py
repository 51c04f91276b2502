"""Learning rates of a job's schedule, mostly from torch's schedulers."""

import inspect
import math

import torch

from protocols import Protocol
from rudra.compute.optimizers import uncompiled
from rudra.core.schedule import Schedule
from rudra.errors import ConfigError
from rudra.job.job import Job
from rudra.job.tables import OptimizerTable
from rudra.plugins import choose
from topologies import Plan


def schedule_of(job: Job, plan: Plan, training_samples: int) -> Schedule:
    """Returns the learning rates of a job.

    Args:
        job: Resolved job.
        plan: Role assignment.
        training_samples: Size of the training set, which defines the epochs.

    Raises:
        ConfigError: The schedule does not exist, rejects its options, or gives no rates. Or a change begins too early
            or too late.
    """
    return planned(job.optimizer, job.training.epochs, expected_updates(job, plan, training_samples))


def planned(table: OptimizerTable, epochs: int, updates: int | None = None) -> Schedule:
    """Returns the learning rates of a table.

    Cosine and torch's other schedulers are stepped once an epoch, starting with the first epoch after the warm-up, or
    once an update.

    Args:
        table: [optimizer] table of the job.
        epochs: Number of epochs of the job.
        updates: Number of updates in these epochs. None: not known in advance.

    Raises:
        ConfigError: As for `schedule_of`.
    """
    if table.schedule in ("step", "plateau"):
        return Schedule.stepped(table, table.milestones)
    if table.schedule_every == "update":
        steps = updates or table.schedule_options.get("total_steps")
        if not isinstance(steps, int) or steps < 1:
            where = "[optimizer] schedule_every = 'update': the protocol decides how many updates an epoch has"
            raise ConfigError(f"{where}; schedule_options.total_steps must give their total number")
        return Schedule(table, tuple(range(steps)), _stepped(table, steps))
    first = min(math.ceil(table.warm_up), epochs - 1)
    return Schedule(table, (0, *range(first + 1, epochs)), _stepped(table, epochs - first))


def expected_updates(job: Job, plan: Plan, training_samples: int) -> int | None:
    """Returns the number of updates of a run if every update has c gradients. None if a protocol differs.

    Raises:
        ConfigError: A change of the job does not lie between the previous change and the end of the run.
    """
    samples = updates = end = 0
    for number, (_, part, its_plan) in enumerate(job.parts(plan)):
        each = _samples_per_update(part, its_plan)
        if each is None:
            return None
        end = updates - (samples - job.training.epochs * training_samples) // each
        for change in job.changes[number : number + 1]:
            before = updates
            if change.at_epoch is None:
                updates = change.boundary.number
            else:
                updates -= (samples - change.at_epoch * training_samples) // each
            by_update = any(c.at_update is not None for c in job.changes[max(0, number - 1) : number + 1])
            if updates <= before and by_update:  # else one update ends several epochs
                late = f"{change.where}: is reached with update {updates}, but the previous change with {before}"
                raise ConfigError(f"{late}; use the order of the run")
            if updates >= end and change.at_update is not None:
                raise ConfigError(f"{change.where}: must be less than the {end} updates of the run")
            samples += (updates - before) * each
    return end


def _samples_per_update(job: Job, plan: Plan) -> int | None:
    """Returns the number of samples of every update. None if updates differ."""
    protocol = job.make_protocol(plan)
    if plan.scheduled or type(protocol).update_due is not Protocol.update_due:
        return None
    each = job.training.minibatch_size * protocol.period * len(plan.learners)
    return protocol.gradients_per_update * each // plan.workers


def _stepped(table: OptimizerTable, epochs: int) -> tuple[float, ...]:
    """Returns the rates of a torch scheduler for each epoch or update."""
    optimizer = uncompiled(torch.optim.SGD)([torch.nn.Parameter(torch.zeros(1))], lr=table.learning_rate)
    shipped = {"cosine": torch.optim.lr_scheduler.CosineAnnealingLR}
    make, options = choose("[optimizer] schedule", table.schedule, shipped), table.schedule_options
    if make is torch.optim.lr_scheduler.ReduceLROnPlateau:
        valid = "schedule = 'plateau', with decay_factor and schedule_options.patience"
        raise ConfigError(f"[optimizer] schedule: ReduceLROnPlateau depends on evaluations; valid: {valid}")
    if table.schedule == "cosine":
        options = {"T_max": epochs, **options}
    try:
        takes = inspect.signature(make).parameters if callable(make) else ()
        if "total_steps" in takes and not options.keys() & {"total_steps", "epochs"}:
            options = {"total_steps": epochs, **options}
        scheduler = make(optimizer, **options)
        rates = [float(optimizer.param_groups[0]["lr"])]
        while len(rates) < epochs:
            optimizer.step()  # torch warns if a scheduler is stepped before its optimiser
            scheduler.step()
            rates.append(float(optimizer.param_groups[0]["lr"]))
    except Exception as error:  # a scheduler may raise any exception
        raise ConfigError(f"[optimizer] schedule: {' '.join(str(error).split())}") from error
    for step, rate in enumerate(rates):
        if not (math.isfinite(rate) and rate >= 0):
            after = f"{step} {table.schedule_every}s"
            raise ConfigError(f"[optimizer] schedule: gives a rate of {rate} after {after}; valid: >= 0")
    return tuple(rates)
