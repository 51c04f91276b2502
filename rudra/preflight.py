"""Checks of a run before its ranks start, so that a machine's limits are reported at once, in one line.

The ranks repeat the checks on their own machines, because a check here says nothing about other machines.
"""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

from rudra.data.readers import READERS
from rudra.data.readers.common import path_of
from rudra.errors import ConfigError, DataError
from rudra.job.job import Job
from rudra.log import log
from rudra.machine import RANK_BYTES, cores, free_memory
from topologies import Plan

ALLOCATIONS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "PE_HOSTFILE")
"""Variables of batch systems. If one is set, mpirun may start ranks on other machines."""

CROWDED = 8
"""Ranks per core. With more ranks a warning calls the run slow."""

QUICK_BYTES, QUICK_FILES = 16 << 20, 100
"""Maximum size of data whose samples are counted before the run."""


def check(job: Job, plan: Plan, *, begins: bool) -> None:
    """Checks requirements of a run on this machine: files, samples for a mini-batch, GPUs, memory.

    Under a batch system nothing is checked, because ranks may be on other machines.

    Args:
        job: resolved job.
        plan: roles of the job.
        begins: whether the run starts from the beginning. A resumed run does not need `training.warm_start`.

    Raises:
        RudraError: the ranks could not run the job here.
    """
    if any(name in os.environ for name in ALLOCATIONS):
        return
    if begins and job.training.warm_start is not None and not os.path.exists(job.training.warm_start):
        raise ConfigError(f"[training] warm_start: {job.training.warm_start}: no such file")
    _check_data(job)
    check_devices(job, plan)
    _check_size(job, plan)


def _check_data(job: Job) -> None:
    """Checks that the files of a reader exist, and for small files that they have enough samples for a mini-batch."""
    table = job.data
    if not isinstance(table.name, str) or table.name not in READERS:
        return  # the user's own code may create the files that it reads
    if table.path is not None and not _is_small(path_of(table)):
        return
    training = READERS[table.name](table, ()).counts["train"]
    if table.test_split is None and table.validation_split is None:  # otherwise only the ranks know the count
        job.check_samples(min(training, table.train_limit or training))


def _is_small(path: Path) -> bool:
    """Whether the samples at a path can be counted quickly."""
    left_bytes, left_files = QUICK_BYTES, QUICK_FILES
    for size in _sizes(path):
        left_bytes, left_files = left_bytes - size, left_files - 1
        if left_bytes < 0 or left_files < 0:
            return False
    return True


def _sizes(path: Path) -> Iterator[int]:
    try:
        if path.is_dir():
            for directory, _, files in os.walk(path):
                yield 0
                yield from (os.stat(os.path.join(directory, name)).st_size for name in files)
        else:
            yield path.stat().st_size
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None


def check_devices(job: Job, plan: Plan) -> None:
    """Raises ConfigError if learners need GPUs, and this machine has none."""
    if not job.cluster.accelerated:
        return
    from rudra.compute.device import devices, placement  # and torch, which the launching process usually does without

    wanted, host = job.cluster.device, socket.gethostname()
    counts = [devices.here(wanted)] * plan.ranks
    placement.agreed(wanted, plan, counts, [host] * plan.ranks, job.learners_on_cpu(plan))


def _check_size(job: Job, plan: Plan) -> None:
    """Refuses more ranks than fit into memory, and warns of many more ranks than cores."""
    needed, free, usable = plan.ranks * RANK_BYTES, free_memory(), cores()
    instead = "use fewer learners, more cluster.learners_per_rank, or rudra simulate"
    sizes = f"{needed / 1e9:.1f} GB of memory without the model, but {free / 1e9:.1f} GB are free"
    if needed > free:
        raise ConfigError(f"[cluster] learners = {job.learners}: {plan.ranks} ranks take {sizes}; {instead}")
    if plan.ranks > CROWDED * usable:
        share = f"{plan.ranks} ranks share {usable} cores, which is slow"
        log.warning(f"{job.name}: {share}; they take {sizes}; {instead}")
