"""Values of keys that a written job leaves open."""

from collections.abc import Mapping
from typing import Any

from rudra.job.job import Job

Decided = Mapping[str, Mapping[str, Any]]
"""Table -> key -> value."""


def fill(job: Job, decided: Decided) -> Job:
    """Fills decided values in.

    Args:
        job: as written, or resolved in part.
        decided: what is known by now.

    Returns:
        The job with these values; itself where there are none.

    Raises:
        ConfigError: the job does not allow them.
    """
    given: dict[str, Any] = {table: keys for table, keys in decided.items() if keys}
    return job.with_(**given) if given else job
