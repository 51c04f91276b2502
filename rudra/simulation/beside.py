"""Jobs beside a job: they take their part of the links of machines that all of them use, and leave nothing else behind.

Source: Park et al., RALP, §3 and §6.4, where eight jobs share eight machines.
"""

from collections import defaultdict
from typing import Any

from rudra.core.events import Finish, Record, StoreEpochWeights
from rudra.errors import ConfigError
from rudra.job.job import Job

ENDLESS = 1 << 50
"""Samples of an epoch that is never over."""


def job_beside(job: Job, number: int) -> Job:
    """A job that trains beside a job, without data, tests and an end of its own.

    Args:
        job: resolved, with its costs read in.
        number: of its table in `[simulation] beside`, from 0.

    Raises:
        ConfigError: it is none, or links have turns.
    """
    if job.simulation.sharing != "equal":  # which a preset may say
        raise ConfigError("jobs share the links of machines; valid with sharing = 'equal'")
    tables: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for key, value in job.simulation.beside[number].items():
        table, _, name = key.partition(".")
        tables[table][name] = _default(job, table, name) if value == "" else value
    tables["simulation"] |= {"beside": (), "tensors": False}
    tables["training"] |= {"epochs": 1, "evaluate": False, "seed": job.training.seed + number + 1}
    tables["results"] |= {"minibatches": False, "checkpoint_every": "never", "keep_checkpoints": "never"}
    return job.with_(hooks=(), **dict[str, Any](tables)).without_tests().resolved()


def _default(job: Job, table: str, name: str) -> Any:
    """The value of a key that no job gives."""
    kind: Any = type(getattr(job, table, job))
    field = kind.model_fields.get(name)
    return None if field is None else field.get_default(call_default_factory=True)


class Unrecorded:
    """Where rows go that nobody reads."""

    def record(self, action: Record) -> None: ...
    def keep(self, role: int, action: StoreEpochWeights) -> None: ...
    def finish(self, role: int, action: Finish) -> None: ...
    def warn(self, name: str, text: str) -> None: ...
