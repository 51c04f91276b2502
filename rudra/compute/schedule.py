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
        ConfigError: The schedule does not exist, rejects its options, or gives no rates.
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
    """Returns the number of updates of a run if every update has c gradients. None if the protocol differs."""
    protocol = job.make_protocol(plan)
    if plan.scheduled or type(protocol).update_due is not Protocol.update_due:
        return None
    samples = protocol.gradients_per_update * job.training.minibatch_size * len(plan.learners) // plan.workers
    return -(-job.training.epochs * training_samples // samples)


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
