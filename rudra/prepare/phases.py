"""The parts of a run between the changes of its job, with the learning rates of each."""

from rudra.compute.schedule import schedule_of
from rudra.core.phases import Phase, Phases, parts
from rudra.job.job import Job
from topologies import Plan


def phases_of(job: Job, plan: Plan, training_samples: int) -> Phases:
    """Draws up the parts of a run.

    Args:
        job: resolved.
        plan: of the first part.
        training_samples: size of the training set, by which epochs are counted.

    Raises:
        ConfigError: the schedule is not there, does not take its options, or gives no rates.
    """
    texts = ["", *(change.text for change in job.changes)]
    return tuple(
        Phase(start, part, its_plan, schedule_of(part, its_plan, training_samples), text)
        for (start, part, its_plan), text in zip(parts(job, plan), texts, strict=True)
    )
