"""Runs of several jobs on the same ranks, and launches whose ranks call a function of a test."""

import gc
import os
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any


def train_quietly(job: Any, path: str, comm: Any = None) -> None:
    """This rank's part in a run. No rank opens the results."""
    from rudra.mpi.session import run_ranks
    from rudra.prepare.start import StartRequest

    code, _ = run_ranks(job, StartRequest(Path(path)), progress={"mode": "quiet", "columns": None}, comm=comm)
    if code:
        raise RuntimeError(f"the run ended with exit code {code}")


def train_all(comm: Any, directory: Path, jobs: dict[str, Any]) -> dict[str, Any]:
    """Runs several jobs, one after the other, on the same ranks; the result files' names are the keys."""
    from rudra.bench.ranks import rest

    for path, job in jobs.items():
        train_quietly(job, path)
        rest(comm)
    return {}


def train_as_needed(
    comm: Any, directory: Path, jobs: dict[str, Any], origins: Mapping[str, Path] = {}
) -> dict[str, Any]:
    """Runs several jobs, one after the other, each on as many of the ranks as it needs; names of files are the keys.

    Some begin with the state of a checkpoint."""
    from rudra.mpi.session import run_all
    from rudra.prepare.start import StartRequest

    starts = {path: StartRequest(Path(path), origin=origins.get(path), rows=False) for path in jobs}
    if code := run_all([(job, starts[path]) for path, job in jobs.items()]):
        raise RuntimeError(f"a run ended with exit code {code}")
    return {}


def train_banks(comm: Any, directory: Path, jobs: dict[str, Any]) -> dict[str, Any]:
    """As `train_as_needed`. Returns for each file how many gradients of this rank were computed with others."""
    from rudra.compute.bank import gathering

    fused, counts = gathering.fused_gradients, dict.fromkeys(jobs, 0)

    def counted(*args: Any) -> Any:
        found = fused(*args)
        counts[path] += len(found)
        return found

    gathering.fused_gradients = counted
    try:
        for path, job in jobs.items():
            train_as_needed(comm, directory, {path: job})
    finally:
        gathering.fused_gradients = fused
    return counts


def launch_calls(run: Callable[[dict[str, Any]], int]) -> None:
    """Lets the ranks that this process launches call this function with what they would run a job with."""
    from rudra.mpi import launch

    plain = launch.launch

    def launched(*about: Any, payload: dict[str, Any], **more: Any) -> Any:
        return plain(*about, payload=partial(run, payload), **more)

    launch.launch = launched


def left_behind(comm: Any, directory: Path, jobs: list[Any], rounds: int) -> dict[str, Any]:
    """Runs the same jobs again and again: threads, open files and vectors of this rank after each round."""
    from rudra.bench.ranks import rest, train
    from rudra.compute.vectors import Buffer

    threads, files, vectors = [], [], []
    for _ in range(rounds):
        for job in jobs:
            train(job, directory / "run.h5").close()
            rest(comm)
        threads.append([len(threading.enumerate()), len(os.listdir("/proc/self/task"))])
        files.append(len(os.listdir("/proc/self/fd")))
        vectors.append(sum(type(thing) is Buffer for thing in gc.get_objects()))
    return {"threads": threads, "files": files, "vectors": vectors}
