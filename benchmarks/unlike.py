"""Hogbatch's claims: whether unlike workers together are first to 95 % of the drop in loss, before either kind alone.

Source: Hogbatch §7, Figures 5, 7 and 8, with the networks of `rudra sweep hogbatch/… --quick`. Weights are in a racing
window. Five ways take the same time: small workers alone, large ones alone, and both under each rule. As in the paper,
a set's rate is the power of ten with which any of them gets to the lowest loss; that search has a seed of its own. The
loss is that of all ways alike, on the same training samples, and is looked at from outside, 100 times a run.

In virtual time a small worker has 48 threads, and speeds are the studies'. On the ranks of this machine a small worker
has one thread, which is far slower than a large one by itself, because single samples take it so long.
"""

import logging
import math
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from tqdm import tqdm

import rudra
from benchmarks.shared import check_only, chosen, data_directory
from rudra.bench.ranks import SERVER, on_ranks, train
from rudra.compute import models, tasks
from rudra.compute.flat import FlatModel
from rudra.compute.hogwild import Sharing
from rudra.compute.window import Window
from rudra.data.load import load
from rudra.errors import EXIT_STOPPED, ConfigError
from rudra.findings import Goal, Report, Spread, spread
from rudra.job.job import Job
from rudra.log import log
from rudra.machine import cores
from rudra.mpi.agreement import rest
from rudra.probe import Method, wrapped
from rudra.report.workers import workers_of
from rudra.results.reader import Results
from rudra.simulation.driver import Simulation
from rudra.studies import sweep

if TYPE_CHECKING:
    from mpi4py import MPI

WAYS = ("small alone", "large alone", "fixed", "adaptive", "balanced")
ALONE, PAPERS, OURS = WAYS[:2], WAYS[2:4], WAYS[4]
SEARCH, SEEDS = 1, (2, 3, 4)
LOOKS = 100
PROBED = 2048  # training samples whose loss is looked at
DROP = 0.95
SCALINGS = ("none", "sqrt", "linear")
ENDLESS = 1_000_000  # epochs
WHERE = ("virtual", "ranks")
EVEN, WITHIN = 52.5, 7.5  # 45 to 60 percent


class Set(NamedTuple):
    """Real data.

    Attributes:
        path: below RUDRA_DATA.
        virtual_s: how long a run takes, in epochs of a large worker.
        seconds: likewise, on the ranks of this machine.
        rates: to search.
        test: that for tests; others are found, or made.
    """

    path: str
    virtual_s: float
    seconds: float
    rates: tuple[float, ...]
    test: str = ""


SETS = {
    "w8a": Set("libsvm/w8a.xz", 20.0, 5.0, (0.01, 0.1, 1.0)),
    "delicious": Set("delicious", 20.0, 5.0, (1.0, 10.0)),
    "fashion": Set("fashion-mnist", 40.0, 5.0, (0.01, 0.1, 1.0)),
    "reuters": Set("libsvm/reuters.trn.bz2", 20.0, 5.0, (0.1, 1.0, 10.0), "reuters.tst.bz2"),
}


Rate = tuple[float, str]
"""Learning rate, and how it goes with a batch."""


class Run(NamedTuple):
    """What came of one.

    Attributes:
        seconds: when it was looked at.
        loss: what it was then.
        share: of the updates, those of small workers, in percent.
        used: mean utilisation of large workers, in percent; NaN: there are none.
    """

    seconds: list[float]
    loss: list[float]
    share: float
    used: float

    @property
    def least(self) -> float:
        """The lowest loss."""
        return min(loss for loss in self.loss if math.isfinite(loss))

    def reached(self, loss: float) -> float:
        """When the loss was first no higher; infinite: never."""
        return next((at for at, found in zip(self.seconds, self.loss, strict=True) if found <= loss), math.inf)


class Task(NamedTuple):
    """A run to be made."""

    data: str
    way: str
    rate: Rate
    seed: int


def run(*, quick: bool, only: Collection[str] = ()) -> Report:
    """Searches rates and compares, in virtual time and on ranks; about an hour.

    Args:
        quick: one set of data, and a moment of each way.
        only: names of sets, of scalings, `virtual` or `ranks`: of each sort of which there are some, these alone.

    Raises:
        ConfigError: no data, or a word that means nothing.
        RunError: a run failed.
    """
    check_only("unlike", only, (*SETS, *SCALINGS, *WHERE))
    names, scalings = ["delicious"] if quick else chosen(only, SETS), chosen(only, SCALINGS)
    root = data_directory()
    for name in names:
        if not (root / SETS[name].path).exists():
            raise ConfigError(
                f"bench unlike: no {SETS[name].path} in {root}; RUDRA_DATA names the directory that it is in"
            )
    report = Report(["data", "time", "rate", "what", *WAYS])
    for where in chosen(only, WHERE):
        _compare(report, where, names, scalings, root, quick=quick)
    report.notes += [
        f"s to {DROP:.0%}: until the loss on {PROBED:,} training samples has dropped by so much of the way to the "
        f"lowest of all ways; medians over seeds {', '.join(map(str, SEEDS))}",
        f"rate, and how it goes with a batch ({', '.join(scalings)}): with which any way gets to the lowest loss, with "
        "another seed; " + ", ".join(f"{name} {'|'.join(f'{rate:g}' for rate in SETS[name].rates)}" for name in names),
    ]
    return report


class Marks(NamedTuple):
    """What the goals are about, of one set.

    Attributes:
        ahead: how many times as long either kind alone takes to 95 %, of the paper's rules; 0: they never get there.
        share: of all updates under `fixed` those of small workers, in percent.
        uneven: under `adaptive` and `balanced`, in points from 52.5.
        used: of large workers under `balanced`, as a share of `fixed`'s.
    """

    ahead: Sequence[float]
    share: float
    uneven: tuple[float, float]
    used: float


def _compare(
    report: Report, where: str, names: Sequence[str], scalings: Sequence[str], root: Path, *, quick: bool
) -> None:
    """Adds rows and goals of all sets, in one kind of time."""
    perform = partial(_on_ranks if where == "ranks" else _in_virtual_time, root, quick=quick)
    rates = {name: list(product(SETS[name].rates, scalings)) for name in names}
    best = {name: known[0] for name, known in rates.items()}
    seeds = (SEARCH,) if quick else SEEDS
    if not quick:
        tried = perform([Task(name, way, rate, SEARCH) for name in names for rate in rates[name] for way in WAYS])
        best = {name: min(rates[name], key=partial(_least, tried, name, SEARCH)) for name in names}
    found = perform([Task(name, way, best[name], seed) for name in names for seed in seeds for way in WAYS])
    marks = []
    for name, rate in best.items():
        runs = {way: [found[Task(name, way, rate, seed)] for seed in seeds] for way in WAYS}
        least = [_least(found, name, seed, rate) for seed in seeds]
        marks.append(_set(report, (name, where, f"{rate[0]:g}, {rate[1]}"), runs, least))
    ahead = [times for mark in marks for times in mark.ahead]
    adaptive, ours = ([mark.uneven[place] for mark in marks] for place in (0, 1))
    report.goals += [
        Goal(f"{where}: fixed and adaptive at {DROP:.0%} before either kind alone, as a ratio", ahead, at_least=1.0),
        Goal(f"{where}: updates of the small worker under fixed, in %", [mark.share for mark in marks], at_least=95.0),
        Goal(f"{where}: under adaptive 45 to 60, as points from {EVEN:g}", adaptive, at_most=WITHIN),
        Goal(f"{where}: and under balanced", ours, at_most=WITHIN),
        Goal(f"{where}: large used under balanced, of fixed's", [mark.used for mark in marks], at_least=0.9),
    ]


def _set(report: Report, about: tuple[str, ...], runs: Mapping[str, Sequence[Run]], least: Sequence[float]) -> Marks:
    """Adds the rows of one set, of each way's runs with all seeds and the lowest losses with these."""
    first = [max(of[place].loss[0] for of in runs.values()) for place in range(len(least))]
    goals = [high - DROP * (high - low) for high, low in zip(first, least, strict=True)]
    times = {way: [one.reached(loss) for one, loss in zip(of, goals, strict=True)] for way, of in runs.items()}
    share = {way: spread(one.share for one in of) for way, of in runs.items()}
    used = {way: spread(one.used for one in of) for way, of in runs.items() if way != ALONE[0]}
    report.rows += [
        (*about, f"s to {DROP:.0%}", *map(_told, times.values())),
        (*about, "updates of small, %", *share.values()),
        (*about, "large used, %", "-", *used.values()),
        (*about, "lowest loss", *(spread(one.least for one in of) for of in runs.values())),
    ]
    alone, ours = min(median(times[way]) for way in ALONE), [median(times[way]) for way in PAPERS]
    return Marks(
        [0.0 if math.isinf(each) else alone / each for each in ours],
        share["fixed"].median,
        (abs(share["adaptive"].median - EVEN), abs(share[OURS].median - EVEN)),
        used[OURS].median / max(used["fixed"].median, 1e-9),  # a moment may be too short for a large batch
    )


def _least(found: Mapping[Task, Run], name: str, seed: int, rate: Rate) -> float:
    """The lowest loss of all ways."""
    return min(found[Task(name, way, rate, seed)].least for way in WAYS)


def _told(times: Sequence[float]) -> Spread | str:
    reached = [one for one in times if math.isfinite(one)]
    if len(reached) == len(times):
        return spread(times)
    return f"{median(times):.3g}, {len(reached)} of {len(times)}" if reached else "-"


def job_of(task: Task, root: Path) -> Job:
    """A run without an end; what it is to end after is not a job's."""
    about = SETS[task.data]
    given = {"data.path": root / about.path, "training.seed": task.seed, "training.evaluate": "false"}
    if about.test:
        given["data.options.test"] = about.test
    given |= {"optimizer.learning_rate": task.rate[0], "protocol.lr_scaling": task.rate[1], "weights.push": "gradient"}
    planned = sweep.plan(
        f"hogbatch/{task.data}", quick=True, overrides=[f"{key}={value}" for key, value in given.items()]
    )
    job = planned.points[WAYS.index(task.way)].job
    return job.with_(
        training={"epochs": ENDLESS},
        cluster={"threads_per_rank": 1, "device": "cpu"},
        fault_tolerance={"non_finite_loss": "warn"},
    )


class _Probe:
    """Looks at the weights of a run.

    Attributes:
        first: the loss at those that it begins with.
    """

    def __init__(self, job: Job) -> None:
        data = load(job.data, seed=job.training.seed)
        assert data.training is not None
        module = models.build(job.model, data.info, job.training.seed)
        self._flat = FlatModel(module, tasks.make(job.task, data.info.classes))
        first = torch.empty(self._flat.size)
        self._flat.read_into(first)
        which = np.random.default_rng(0).permutation(len(data.training))[:PROBED]
        self._batch = data.training.batch(which)
        self.first = self.loss(first)

    def loss(self, weights: torch.Tensor) -> float:
        self._flat.bind(weights)
        return self._flat.evaluate_batch(*self._batch)[0]


@lru_cache(maxsize=1)  # runs that follow each other differ in their ways and rates alone
def _probe(data: str, seed: int, root: Path) -> _Probe:
    return _Probe(job_of(Task(data, WAYS[0], (SETS[data].rates[0], SCALINGS[0]), seed), root))


def _moments(end_s: float, looks: int) -> list[float]:
    """When to look: often at first, when a loss falls fast."""
    return [end_s * (place / looks) ** 2 for place in range(looks + 1)]


def _came_of(results: Results, seconds: list[float], losses: list[float]) -> Run:
    workers = workers_of(results)
    assert workers is not None
    used = workers.used("large")
    return Run(seconds, losses, workers.share("small"), math.nan if used is None else used)


# In virtual time, a process for each core.


def _in_virtual_time(root: Path, wanted: Sequence[Task], *, quick: bool) -> dict[Task, Run]:
    with (
        ProcessPoolExecutor(cores(), multiprocessing.get_context("spawn")) as pool,
        tqdm(total=len(wanted), unit=" runs", leave=False, disable=None) as bar,
    ):
        runs = [pool.submit(_simulate, task, root, quick=quick) for task in wanted]
        for run in runs:
            run.add_done_callback(lambda _: bar.update())
        return {task: run.result() for task, run in zip(wanted, runs, strict=True)}


def _simulate(task: Task, root: Path, *, quick: bool) -> Run:
    """One run, which is looked at between two events, and so goes as if it was not."""
    job = job_of(task, root)
    end_s, looks = (SETS[task.data].virtual_s / 100, 10) if quick else (SETS[task.data].virtual_s, LOOKS)
    probe = _probe(task.data, task.seed, root)
    seconds, losses = list[float](), list[float]()

    def watched(run: Method) -> Method:
        def call(simulation: Simulation) -> Any:
            owner = simulation.tensors.executors[simulation.plan.server]
            assert isinstance(owner, Sharing)
            own = torch.empty(owner.size)

            def look(*_: None) -> None:
                seconds.append(simulation.queue.now)
                losses.append(probe.loss(own.copy_(owner.window.vector)))

            for at in _moments(end_s, looks):
                simulation.queue.later(at, look, None, None)
            simulation.stop_at(end_s)
            return run(simulation)

        return call

    with (
        tempfile.TemporaryDirectory(prefix="rudra-bench-") as directory,
        wrapped(Simulation, "run", watched),
        rudra.simulate(job, output=Path(directory) / "run.h5", progress="quiet") as results,
    ):
        return _came_of(results, seconds, losses)


# On the ranks of this machine, one run after the other.


def _on_ranks(root: Path, wanted: Sequence[Task], *, quick: bool) -> dict[Task, Run]:
    found = on_ranks(_measure, 2, wanted=wanted, root=str(root), quick=quick)[0]["runs"]
    return {task: Run(*run) for task, run in zip(wanted, found, strict=True)}


def _measure(comm: "MPI.Comm", directory: Path, wanted: Sequence[Any], root: str, quick: bool) -> dict[str, Any]:
    from mpi4py import MPI

    log.setLevel(logging.ERROR)  # not that each run was stopped
    runs = []
    for values in wanted:
        data, way, (rate, scaling), seed = values
        task = Task(data, way, (rate, scaling), seed)
        job = job_of(task, Path(root))
        job = job.with_(workers=[{**table.model_dump(), "threads": 1} for table in job.workers])
        some = comm.Split(0 if comm.rank < job.plan().ranks else MPI.UNDEFINED)
        if some != MPI.COMM_NULL:
            end_s = SETS[task.data].seconds / (20 if quick else 1)
            looks, results = _watched(some, directory / "run.h5", job, end_s)
            with results:
                if comm.rank == SERVER:
                    probe = _probe(task.data, task.seed, Path(root))
                    losses = [probe.loss(weights) for _, weights in looks]
                    runs.append(_came_of(results, [0.0, *(at for at, _ in looks)], [probe.first, *losses]))
            some.Free()
        rest(comm)
    return {"runs": runs}


Looks = list[tuple[float, torch.Tensor]]
"""When the weights were looked at, and what they were."""


def _watched(comm: "MPI.Comm", path: Path, job: Job, end_s: float) -> tuple[Looks, Results]:
    """One run, which the server's rank looks at and stops."""
    looks: Looks = []

    def watched(enter: Method) -> Method:
        def call(executor: Sharing, window: Window) -> None:
            enter(executor, window)
            if comm.rank == SERVER:
                threading.Thread(target=_watch, args=(window, end_s, looks), daemon=True).start()

        return call

    with wrapped(Sharing, "enter", watched):
        return looks, train(job, path, comm, ends=EXIT_STOPPED)


def _watch(window: Window, end_s: float, looks: Looks) -> None:
    """Copies the weights until it is time to stop; time begins with the first update."""
    while not window.made:
        time.sleep(1e-3)
    began = time.perf_counter()
    for at in _moments(end_s, LOOKS)[1:]:
        time.sleep(max(0.0, began + at - time.perf_counter()))
        looks.append((time.perf_counter() - began, window.vector.clone()))
    os.kill(os.getpid(), signal.SIGUSR1)
