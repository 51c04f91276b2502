"""Job of a recorded run for predictions: what would this run have taken with other keys?"""

import json
from collections.abc import Sequence
from typing import Any

from rudra.core.decisions import recorded
from rudra.errors import ConfigError
from rudra.job.changes import JobChange, with_decided
from rudra.job.job import Job
from rudra.job.jobfiles import parsed
from rudra.results.reader import Results
from rudra.trust import admit

UNUSED = ("model", "data", "task", "optimizer", "hooks", "decisions", "study")
"""Tables whose code a prediction with the sizes of the result file does not run."""


def recorded_job(results: Results, overrides: Sequence[str] = (), *, trust: bool = False) -> Job:
    """Returns the job of a run, whose costs are the costs of the run.

    Args:
        results: Results of the run.
        overrides: Changes of the job, each a text `table.key=value`, applied in this order.
        trust: Whether to import the code that the file names, even if another user wrote the file.

    Raises:
        ConfigError: The job cannot be made again, or a change is not valid.
        TrustError: The file names code that a prediction runs, was not written by this user's own run, and `trust` is
            not set.
    """
    changes = [parsed(override) for override in overrides]
    touched = {change.key.partition(".")[0] for change in changes}
    unused = {"hooks", "decisions", "study"} if touched & {*UNUSED, "placement"} else {*UNUSED}
    objects = str(results.attributes.get("python_objects") or "").split(", ")
    if given := ", ".join(name for name in objects if name and name.partition(".")[0] not in unused):
        raise ConfigError(
            f"{results.path}: {given} was given as a Python object, which a file cannot hold; predict its job with "
            f"simulation.costs = '{results.path}'"
        )
    without = ("hooks", "decisions", "study")
    tables: dict[str, Any] = {table: keys for table, keys in results.job.items() if table not in without}
    planned = [JobChange.model_validate(change) for change in tables.get("changes", ())]
    if decided := recorded(results.events):
        tables["changes"] = [change.model_dump(exclude_unset=True) for change in with_decided(planned, decided)]
    tables["simulation"] = {"costs": str(results.path)}
    learners = next((change.value for change in reversed(changes) if change.key == "cluster.learners"), None)
    shares = tables.get("cluster", {}).get("shares")
    if shares and learners not in (None, len(shares)):  # they were measured for other learners, or chosen for them
        tables["cluster"] = {**tables["cluster"], "shares": "auto"}
    used = {table: keys for table, keys in tables.items() if table not in unused}
    admit(results.path, json.loads(results.attributes["job"]), used, results.attributes, trust=trust)
    return Job.of(results.path, tables, changes).without_growth()
