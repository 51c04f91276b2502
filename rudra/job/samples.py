"""Check that a training set has enough samples for a job."""

from rudra.errors import ConfigError
from rudra.job.job import Job


def check_minibatch(job: Job, training_samples: int) -> None:
    """Raises ConfigError if a mini-batch of the job, at any epoch, has more samples than the training set.

    Workers of Hogbatch get at most the samples that are left in the epoch, so their batches are never too large.
    """
    if job.scheduled:
        return
    for start in (0, *(change.at_epoch for change in job.changes)):
        size = job.at(start).training.minibatch_size
        if size > training_samples:
            raise ConfigError(
                f"[training] minibatch_size = {size} (μ) exceeds the training set; use 1 to {training_samples:,}"
            )
