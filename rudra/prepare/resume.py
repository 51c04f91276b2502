"""Job of `rudra resume`: the job of a checkpoint, with the changes that a resumed run allows."""

from collections.abc import Sequence
from pathlib import Path

from rudra.errors import ConfigError
from rudra.job.job import Job
from rudra.job.jobfiles import parsed
from rudra.prepare.start import is_over, onwards
from rudra.results import checkpoint
from rudra.results.checkpoint import SavedState
from rudra.results.identity import (
    LENGTH,
    RESUME_MAY_CHANGE,
    check_ranks_ran,
    compare,
    read_own,
    source,
    tables_of,
)
from rudra.results.reader import open_results
from rudra.trust import admit

UNUSED = ("name", "simulation", "study")
"""Keys and tables that a resumed run ignores."""


def resumable(given: Path, overrides: Sequence[str] = (), *, trust: bool = False) -> tuple[Job, Path, Path]:
    """Returns the job, the checkpoint and the result file of a run to resume.

    Args:
        given: Result file or checkpoint of the run.
        overrides: Texts `table.key=value`, for keys that decide the length of the training or have no effect on it.
        trust: Whether to import the code that the checkpoint names, whoever wrote it.

    Raises:
        TrustError: Another user's checkpoint names code.
        RudraError: There is no complete checkpoint, a change has no effect or is not allowed, or the run is finished.
    """
    if given.suffix not in ("", ".h5", checkpoint.SUFFIX):
        raise ConfigError(
            f"{given}: is no run; valid: a result file, FILE.h5, or a checkpoint, FILE{checkpoint.SUFFIX}"
        )
    path = source(given)
    output = checkpoint.results_of(path)
    if given != path and not path.exists():
        raise _no_checkpoint(given)
    state = read_own(path)
    check_ranks_ran(path)
    job = job_of(state, overrides, trust=trust)
    found = compare(state.job, tables_of(job))
    valid = f"use {', '.join((*LENGTH, *RESUME_MAY_CHANGE))}, or the tables fault_tolerance and results"
    different = {key: then for key, then, _ in found.differences}
    for override in overrides:
        key, table = parsed(override).key, override.partition(".")[0]
        if table in UNUSED:
            raise ConfigError(f"--set {override}: a resumed run cannot change {table}; {valid}")
        for decisive_key, then in different.items():
            if f"{key}.".startswith(f"{decisive_key}."):
                text = f"--set {override}: a resumed run cannot change this key, which was {then}"
                raise ConfigError(f"{text}; {valid}; or begin another run: rudra run JOB --from {path} --carry state")
    if is_over(state, found):
        raise ConfigError(f"{given}: is finished; {onwards(state)}")
    return job, path, output


def _no_checkpoint(given: Path) -> ConfigError:
    """Returns the error about a result file without a checkpoint.

    Raises:
        ResultsError: There is no such result file, or it cannot be read.
    """
    with open_results(given) as results:
        simulated, status = results.attributes["driver"] == "simulation", results.status
    if status != "finished":
        return ConfigError(f"{given}: has no checkpoint; if its run is not running any more, start it again")
    why = "its job wanted none" if simulated else "it was removed, or results.checkpoint_every = 'never'"
    why += "" if simulated else "; a run without --output removes its own"
    return ConfigError(f"{given}: is finished and has no checkpoint ({why}); use training.warm_start")


def job_of(state: SavedState, overrides: Sequence[str] = (), *, trust: bool = False) -> Job:
    """Returns the job of a checkpoint, with changes as in `Job.load`.

    Raises:
        ConfigError: The job was made of Python objects, which no file holds.
        TrustError: Another user's checkpoint names code, and `trust` is not set.
    """
    if given := state.attributes.get("python_objects"):
        raise ConfigError(
            f"{state.path}: {given} was given as a Python object, which a file cannot hold; "
            "use rudra.run(job, output=…, resume=True) with that job"
        )
    admit(state.path, state.signed_job, state.job, state.attributes, trust=trust)
    return Job.of(state.path, state.job, [parsed(override) for override in overrides])
