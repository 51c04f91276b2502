"""What several benchmarks need: words of `--only`, real data, one thread, and learners that exchange nothing."""

import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from rudra.bench.ranks import step_s
from rudra.errors import ConfigError
from rudra.job.job import Job
from rudra.mpi.session import keep_freed_memory
from rudra.results.reader import Results

T = TypeVar("T")


def check_only(benchmark: str, only: Collection[str], known: Iterable[Any]) -> None:
    """Refuses a word that is none of those known, with a ConfigError."""
    words = [str(word) for word in known]
    if strange := [word for word in only if word not in words]:
        raise ConfigError(f"bench {benchmark}: --only {strange[0]}; valid: {', '.join(words)}")


def chosen(only: Collection[str], words: Iterable[T]) -> list[T]:
    """Those of one sort that are asked for; all, if none is."""
    every = list(words)
    return [word for word in every if str(word) in only] or every


def data_directory() -> Path:
    """Where real data is, as `RUDRA_DATA` says."""
    return Path(os.environ.get("RUDRA_DATA", "data")).absolute()


@contextmanager
def one_thread() -> Iterator[None]:
    """Has torch compute on one thread, and memory that a step frees stay for the next step."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    keep_freed_memory()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def seconds(function: Callable[[], object], span_s: float = 0.0) -> float:
    """Returns how long one call takes, of as many as fill the span, and of one at least."""
    calls, began = 0, time.perf_counter()
    while not calls or time.perf_counter() < began + span_s:
        function()
        calls += 1
    return (time.perf_counter() - began) / calls


def unconnected(job: Job, steps: int) -> Job:
    """The same learners at the same time, which compute and update, and exchange nothing before the last step."""
    return job.with_(protocol={"name": "average"}, averaging={"period": steps}, topology={"name": "replicas"})


def learner_step_s(results: Results, learner: int) -> float:
    """Mean time between the mini-batches of a learner; the first, which warms caches up, does not count."""
    rows = results.minibatches
    return step_s(rows["time_s"][rows["learner"] == learner])
