"""Phases of a run between the changes of its job, with the learning rates of each."""

from rudra.compute.schedule import schedule_of
from rudra.core.phases import Phase, Phases, parts
from rudra.job.job import Job
from topologies import Plan


def phases_of(job: Job, plan: Plan, training_samples: int) -> Phases:
    """Returns the phases of a run.

    Args:
        job: Resolved job.
        plan: Plan of the first phase.
        training_samples: Size of the training set, for counting epochs.

    Raises:
        ConfigError: The schedule does not exist, does not accept its options, or gives no rates.
    """
    texts = ["", *(change.text for change in job.changes)]
    return tuple(
        Phase(start, part, its_plan, schedule_of(part, its_plan, training_samples), text)
        for (start, part, its_plan), text in zip(parts(job, plan), texts, strict=True)
    )
