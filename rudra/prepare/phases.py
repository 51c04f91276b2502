"""Phases of a run between the changes of its job, with the learning rates of each."""

import math
from dataclasses import replace

from rudra.compute.schedule import expected_updates, planned
from rudra.core.phases import Phase, Phases, phases_begun
from rudra.core.training_state import TrainingState
from rudra.errors import ConfigError
from rudra.job.job import Job
from topologies import Plan


def phases_of(job: Job, plan: Plan, training_samples: int) -> Phases:
    """Returns the phases of a run.

    Args:
        job: Resolved job.
        plan: Plan of the first phase.
        training_samples: Size of the training set, for counting epochs.

    Raises:
        ConfigError: The schedule does not exist, does not accept its options, or gives no rates. Or a change of the
            job does not lie between the previous change and the end of the run.
    """
    updates = expected_updates(job, plan, training_samples)
    room = next(job.parts(plan))[2].max_gradients_per_message

    def made(of: Job) -> Phases:
        """Makes the phases of a job. Their messages fit into the buffers of this run."""
        if of is not job:
            of.check_samples(training_samples)
        texts = ["", *(change.text for change in of.changes)]
        found = [
            Phase(start, part, its_plan, planned(part.optimizer, part.training.epochs, updates), text)
            for (start, part, its_plan), text in zip(of.parts(plan), texts, strict=True)
        ]
        if (most := found[0].plan.max_gradients_per_message) > room:
            raise ConfigError(
                f"[topology] messages of {most} gradients do not fit into buffers for {room}; plan this change in "
                "[[changes]]"
            )
        roomy = (phase._replace(plan=replace(phase.plan, max_gradients_per_message=room)) for phase in found)
        return Phases(roomy, of, made)

    return made(job)


def replanned(job: Job, plan: Plan, epochs: int, position: TrainingState, training_samples: int) -> str:
    """Compares past learning rates with the rates that a job would have had if its present length had been planned.

    Args:
        job: Job that continues.
        plan: Plan of its first phase.
        epochs: Number of epochs of the job before.
        position: Position of the checkpoint that it continues from.
        training_samples: Size of the training set, for counting epochs.

    Returns:
        Text for the user about the differences. Empty: there are none.
    """
    planned = [phases_of(long, plan, training_samples) for long in (job.with_(training={"epochs": epochs}), job)]
    by_update = job.optimizer.schedule_every == "update"
    done = position.timestamp if by_update else -(-position.samples // training_samples)
    begun = (phases_begun(phases, position) for phases in planned)
    then, now = ([phase.schedule.rate(i, math.inf, i) for phase in phases for i in range(done)] for phases in begun)
    if then == now:
        return ""
    text = f"schedule {job.optimizer.schedule!s} differs between {epochs} and {job.training.epochs} epochs"
    return f"{text}: the rate is {then[-1]:.4g} here, and would be {now[-1]:.4g} if all had been planned at first"
