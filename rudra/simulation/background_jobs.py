"""Background jobs. They use links of the same machines as the main job, and have no other effect on it.

Source: Park et al., RALP, §3 and §6.4, where eight jobs share eight machines.
"""

from collections import defaultdict
from typing import Any

from rudra.core.actions import Finish, Record, StoreEpochWeights
from rudra.errors import ConfigError
from rudra.job.job import Job

ENDLESS = 1 << 50
"""Samples of an epoch that never ends."""


def job_beside(job: Job, number: int) -> Job:
    """Returns a background job, without data and evaluation, that never ends by itself.

    Args:
        job: Resolved job with its cost file read.
        number: Index of its table in `[simulation] background_jobs`, from 0.

    Raises:
        ConfigError: The table is not a valid job, or links are used in turns.
    """
    if job.simulation.sharing != "equal":  # a preset may set another value
        raise ConfigError("jobs share the links of machines; valid with sharing = 'equal'")
    tables: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for key, value in job.simulation.background_jobs[number].items():
        table, _, name = key.partition(".")
        tables[table][name] = _default(job, table, name) if value == "" else value
    tables["simulation"] |= {"background_jobs": (), "tensors": False}
    tables["training"] |= {"epochs": 1, "evaluate": False, "seed": job.training.seed + number + 1}
    tables["results"] |= {"minibatches": False, "checkpoint_every": "never", "keep_checkpoints": "never"}
    return job.with_(hooks=(), **dict[str, Any](tables)).without_tests().resolved()


def _default(job: Job, table: str, name: str) -> Any:
    """Returns the default value of a key."""
    kind: Any = type(getattr(job, table, job))
    field = kind.model_fields.get(name)
    return None if field is None else field.get_default(call_default_factory=True)


class Unrecorded:
    """Recorder that discards all rows."""

    def record(self, action: Record) -> None: ...
    def keep(self, role: int, action: StoreEpochWeights) -> None: ...
    def finish(self, role: int, action: Finish) -> None: ...
    def warn(self, name: str, text: str) -> None: ...
