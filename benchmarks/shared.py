"""Helpers of several benchmarks: words of `--only`, real data, one thread, and learners without communication."""

import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from rudra.bench.ranks import step_s
from rudra.errors import ConfigError
from rudra.job.job import Job
from rudra.memory import keep_freed_memory
from rudra.results.reader import Results

T = TypeVar("T")


def check_only(benchmark: str, only: Collection[str], known: Iterable[Any]) -> None:
    """Raises ConfigError if a word of `--only` is unknown."""
    words = [str(word) for word in known]
    if strange := [word for word in only if word not in words]:
        raise ConfigError(f"bench {benchmark}: --only {strange[0]}; valid: {', '.join(words)}")


def chosen(only: Collection[str], words: Iterable[T]) -> list[T]:
    """Returns the words of one sort that `--only` names, or all of them if it names none."""
    every = list(words)
    return [word for word in every if str(word) in only] or every


def data_directory() -> Path:
    """Returns the directory of real data: `RUDRA_DATA`, or `data`."""
    return Path(os.environ.get("RUDRA_DATA", "data")).absolute()


def write_text(path: Path) -> None:
    """Writes a text of noise, so that no download is needed."""
    path.write_bytes(np.random.default_rng(0).integers(48, 113, 1 << 20, np.uint8).tobytes())


@contextmanager
def one_thread() -> Iterator[None]:
    """Lets torch compute on one thread, and keeps memory that a step frees for the next step."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    keep_freed_memory()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def seconds(function: Callable[[], object], span_s: float = 0.0) -> float:
    """Returns the mean seconds of a call, over at least one call and at least `span_s` seconds."""
    calls, began = 0, time.perf_counter()
    while not calls or time.perf_counter() < began + span_s:
        function()
        calls += 1
    return (time.perf_counter() - began) / calls


def unconnected(job: Job, steps: int) -> Job:
    """Returns a job whose learners compute and update as before, but communicate only in the last step."""
    return job.with_(
        protocol={"name": "average"},
        averaging={"period": steps},
        topology={"name": "replicas"},
        cluster={"buckets": "off"},  # with a usual step in the last mini-batch, too
    )


def learner_step_s(results: Results, learner: int) -> float:
    """Returns the mean time between mini-batches of a learner, without the first one, which warms up caches."""
    rows = results.minibatches
    return step_s(rows["time_s"][rows["learner"] == learner])
