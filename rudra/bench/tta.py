"""Time to accuracy on real ranks: Rudra's ways to train with two learners, and torch DDP on gloo.

All begin with the same weights, draw from the same data, have the same optimiser (SGD, momentum 0.9) and one torch
thread for each learner, and search the same grid, in three heats:

1. every mini-batch size with every rate, for one epoch;
2. each size with the rate that came furthest, at a constant rate and at one that falls by a cosine, until a test after
   an epoch reaches the target;
3. the fastest of these, compiled and not, with seeds of which the first two know nothing.

What counts is time in which somebody trains. DDP's clock stands still while its learners test. Rudra's runs keep the
weights of each epoch, which the same learners test after the run: so no test takes a core from training.
"""

import gzip
import json
import lzma
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import distributed
from torch.nn import functional

from rudra.bench.ddp import connect, wrapped
from rudra.bench.ranks import LEARNER, STATISTICS, on_ranks, train
from rudra.compute import models
from rudra.compute.flat import FlatModel
from rudra.data.load import load
from rudra.errors import ConfigError
from rudra.findings import Goal, Report, Spread, ratios, spread
from rudra.job.job import Job
from rudra.job.tables import DataTable
from rudra.mpi.session import rest
from rudra.results.reader import Results

if TYPE_CHECKING:
    from mpi4py import MPI

LEARNERS = 2
MOMENTUM = 0.9
SEED, SEEDS = 1, (2, 3, 4)  # of the search, and of what is compared


class Goalpost(NamedTuple):
    """What is to be learned, by LeNet.

    Attributes:
        reader: of the data.
        accuracy: of a test, the target.
        epochs: in which it is to be reached, and in which the cosine falls.
    """

    reader: str
    accuracy: float
    epochs: int


DATA = {"fashion-mnist": Goalpost("idx", 0.90, 4), "cifar-10": Goalpost("cifar10", 0.60, 6)}
SIZES = (16, 32, 64, 128)
RATES = (0.01, 0.02, 0.05, 0.1)
SCHEDULES = ("constant", "cosine")
CONTESTANTS = {  # name -> protocol and topology
    "sma": ("sma", "replicas"),
    "easgd": ("easgd", "replicas"),
    "average": ("average", "replicas"),
    "diloco": ("diloco", "replicas"),
    "hardsync": ("hardsync", "groups"),
    "softsync": ("softsync", "base"),
    "ddp": ("", ""),
}


class Point(NamedTuple):
    """A run. `epochs`: at most; it ends where it reaches the target."""

    data: str
    contestant: str
    size: int
    rate: float
    schedule: str = "constant"
    epochs: int = 1
    seed: int = SEED
    compiled: bool = False


class Outcome(NamedTuple):
    """What came of a run: test accuracy after each epoch, and seconds of training until then."""

    accuracy: list[float]
    seconds: list[float]

    def reached(self, target: float) -> tuple[float, int]:
        """Seconds and epochs until the target was reached; infinitely many seconds if it was not."""
        for epoch, (accuracy, seconds) in enumerate(zip(*self, strict=True), 1):
            if accuracy >= target:
                return seconds, epoch
        return math.inf, len(self.accuracy)


Perform = Callable[[Sequence[Point]], dict[Point, Outcome]]


def run(*, quick: bool, only: Collection[str] = (), keep: Path | None = None) -> Report:
    """Searches and compares; hours for all of it.

    Args:
        quick: two contestants at one point, few samples.
        only: names of data, contestants and schedules, mini-batch sizes and rates: of each sort of which there are
            some, these alone.
        keep: a file in which runs are kept; what is there is not run again.

    Raises:
        ConfigError: no data, or a word that means nothing.
        RunError: a run failed.
    """
    known = [*DATA, *CONTESTANTS, *map(str, (*SIZES, *RATES)), *SCHEDULES]
    if strange := [word for word in only if word not in known]:
        raise ConfigError(f"bench tta: --only {strange[0]}; valid: {', '.join(known)}")

    def chosen(words: Iterable[Any]) -> list[Any]:
        every = list(words)
        return [word for word in every if str(word) in only] or every

    compiles = not quick and shutil.which(os.environ.get("CXX", "g++").split()[0]) is not None
    report = Report(["data", "contestant", "μ", "rate", "schedule", "epochs", "s to target", "s an epoch", "DDP / it"])
    lacking = []
    for data in ["fashion-mnist"] if quick else chosen(DATA):
        path = Path(os.environ.get("RUDRA_DATA", "data")) / data
        if not path.is_dir():
            lacking.append(f"no rows of {data}: it is not in {path}; RUDRA_DATA names the directory that it is in")
            continue
        with tempfile.TemporaryDirectory(prefix="rudra-bench-") as name:
            kept = keep or Path(name) / "runs"

            def perform(points: Sequence[Point], path: Path = path, kept: Path = kept) -> dict[Point, Outcome]:
                missing = [point for point in points if point not in _read(kept)]
                if missing:
                    where = {"data": str(path.absolute()), "kept": str(kept.absolute()), "quick": quick}
                    on_ranks(measure, LEARNERS, points=missing, **where)
                found = _read(kept)
                return {point: found[point] for point in points}

            if quick:
                best = {who: Point(data, who, 64, 0.05) for who in ("sma", "ddp")}
            else:
                best = search(data, chosen(CONTESTANTS), chosen(SIZES), chosen(RATES), perform, chosen(SCHEDULES))
            _compare(report, best, SEEDS[: 1 if quick else None], perform, compiles=compiles)
    if not report.rows:
        raise ConfigError(f"bench tta: {lacking[0]}")
    report.notes = [
        "two learners of one torch thread each, LeNet; each contestant at the best of its grid; medians over seeds "
        + ", ".join(map(str, SEEDS)),
        "s to target: of training, until an epoch's test reaches "
        + ", ".join(f"{goal.accuracy:.0%} ({name})" for name, goal in DATA.items()),
        "DDP / it: by how much it is faster than DDP, compiled or not, whichever is faster",
        *lacking,
    ]
    return report


def search(
    data: str,
    contestants: Sequence[str],
    sizes: Sequence[int],
    rates: Sequence[float],
    perform: Perform,
    schedules: Sequence[str] = SCHEDULES,
) -> dict[str, Point]:
    """The first two heats; the fastest point of each contestant, or the one that came furthest."""
    goal = DATA[data]
    grid = [Point(data, who, size, rate) for size in sizes for rate in rates for who in contestants]
    first = perform(grid)
    ways = []
    for size in sizes:
        for who in contestants:
            points = [point for point in grid if (point.size, point.contestant) == (size, who)]
            furthest = max(points, key=lambda point: first[point].accuracy[-1])
            ways += [furthest._replace(schedule=schedule, epochs=goal.epochs) for schedule in schedules]
    second = perform(ways)

    def rank(point: Point) -> tuple[float, float]:
        return second[point].reached(goal.accuracy)[0], -max(second[point].accuracy)

    return {who: min((point for point in ways if point.contestant == who), key=rank) for who in contestants}


def _compare(report: Report, best: dict[str, Point], seeds: Sequence[int], perform: Perform, *, compiles: bool) -> None:
    """The last heat: adds the rows, the fastest first, and the goal."""
    ways = [point._replace(compiled=compiled) for compiled in (False, True)[: 1 + compiles] for point in best.values()]
    found = perform([way._replace(seed=seed) for seed in seeds for way in ways])  # in turns
    data, runs = ways[0].data, {way: [found[way._replace(seed=seed)] for seed in seeds] for way in ways}
    reached = {way: [one.reached(DATA[data].accuracy) for one in runs[way]] for way in ways}
    times = {way: [seconds for seconds, _ in reached[way]] for way in ways}
    ordered = sorted(times, key=lambda point: (spread(times[point]).median, times[point]))
    theirs = next((point for point in ordered if point.contestant == "ddp"), None)
    for point in ordered:
        epoch_s = spread(one.seconds[-1] / len(one.seconds) for one in runs[point])
        ratio = _ratio(times[theirs], times[point]) if theirs else "-"
        name = point.contestant + (", compiled" if point.compiled else "")
        about = (name, point.size, point.rate, point.schedule, spread(epochs for _, epochs in reached[point]))
        report.rows.append((data, *about, _told(times[point]), epoch_s, ratio))
    ours = next((point for point in ordered if point.contestant != "ddp"), None)
    if theirs and ours:
        faster = spread(times[theirs]).median / spread(times[ours]).median
        text = f"{data}, {ours.contestant}: the best of ours >= 1.5 times as fast as the best DDP"
        report.goals.append(Goal(text, [faster if math.isfinite(faster) else 0.0], at_least=1.5))


def _told(times: Sequence[float]) -> Spread | str:
    reached = [one for one in times if math.isfinite(one)]
    return spread(times) if len(reached) == len(times) else f"reached in {len(reached)} of {len(times)} runs"


def _ratio(theirs: Sequence[float], ours: Sequence[float]) -> Spread | str:
    return ratios(theirs, ours) if all(map(math.isfinite, (*theirs, *ours))) else "-"


def write_down(path: Path, point: Point, outcome: Outcome) -> None:
    """Adds a run to a file whose last line may be torn."""
    with path.open("a") as file:
        file.write(f"\n{json.dumps([point, outcome])}")


def _read(path: Path) -> dict[Point, Outcome]:
    """The runs of a file whose lines are complete."""
    found = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        with suppress(ValueError):
            point, outcome = json.loads(line)
            found[Point(*point)] = Outcome(*outcome)
    return found


# On the ranks.


def measure(
    comm: "MPI.Comm", directory: Path, points: Sequence[Sequence[Any]], data: str, kept: str, quick: bool
) -> dict[str, Any]:
    """Makes one run after the other, and writes down what came of each."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    if comm.rank == 0:
        _unpack(Path(data), directory / "data")
    rest(comm)
    jobs = {point: job_of(point, directory / "data", quick=quick) for point in (Point(*values) for values in points)}
    learners = _Learners(comm, directory, next(iter(jobs.values())).data) if comm.rank >= LEARNER else None
    serverless = comm.Split(int(comm.rank >= STATISTICS), comm.rank)
    for point, job in jobs.items():
        rest(comm)
        outcome: Outcome | None = None
        if point.contestant == "ddp":
            outcome = learners.train(job, DATA[point.data].accuracy) if learners else None
        elif job.topology.name == "base" or comm.rank >= STATISTICS:
            with train(job, directory / "run.h5", comm if job.topology.name == "base" else serverless) as results:
                outcome = learners.test(job, results) if learners else None
        if comm.rank == LEARNER:
            assert outcome is not None
            write_down(Path(kept), point, outcome)
    rest(comm)
    if learners:
        distributed.destroy_process_group()
    return {}


def _unpack(path: Path, to: Path) -> None:
    """Decompresses data once, and not for every run."""
    to.mkdir()
    for file in (file for file in path.rglob("*") if file.is_file()):
        opens: Any = {".gz": gzip.open, ".xz": lzma.open}.get(file.suffix, open)
        packed = file.suffix in {".gz", ".xz"}
        with opens(file, "rb") as source, (to / (file.stem if packed else file.name)).open("wb") as plain:
            shutil.copyfileobj(source, plain)


def job_of(point: Point, path: Path, *, quick: bool = False) -> Job:
    """A run as a job; of DDP it says what that needs, too."""
    protocol, topology = CONTESTANTS[point.contestant]
    limits = {"train_limit": 1024, "test_limit": 256} if quick else {}
    return Job(
        name="bench",
        model={"name": "lenet"},
        data={"name": DATA[point.data].reader, "path": path, **limits},
        training={
            "epochs": point.epochs,
            "minibatch_size": point.size,
            "seed": point.seed,
            "compile": point.compiled,
            "evaluate": False,
        },
        optimizer={
            "learning_rate": point.rate,
            "momentum": MOMENTUM,
            "schedule": "cosine" if point.schedule == "cosine" else "step",
        },
        protocol={"name": protocol or "hardsync", "modulation": "none"},
        topology={"name": topology or "groups"},
        cluster={"learners": LEARNERS, "threads_per_rank": 1},
        results={"keep_every": 1},
        fault_tolerance={"non_finite_loss": "warn"},  # a rate that was too high is an answer
    )


class _Learners:
    """What both learners do together without Rudra's driver: DDP, and tests."""

    def __init__(self, comm: "MPI.Comm", directory: Path, data: DataTable) -> None:
        connect(comm.rank, directory)
        self._rank = comm.rank - LEARNER
        training, test, self._info, _ = load(data)
        assert training is not None
        assert test is not None
        self._training, self._test = training, test

    def train(self, job: Job, target: float) -> Outcome:
        """Trains by DDP, as its users write it: a shuffled share of the samples for each learner in each epoch."""
        size, seed, epochs = job.training.minibatch_size, job.training.seed, job.training.epochs
        training = self._training
        network = models.build(job.model, self._info, seed)
        computes: Any = wrapped(torch.compile(network) if job.training.compile else network)  # type: ignore[arg-type]
        rate = job.optimizer.learning_rate
        optimizer = torch.optim.SGD(network.parameters(), lr=rate, momentum=MOMENTUM, fused=True)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)

        def gradient(indices: npt.NDArray[np.int64]) -> None:
            optimizer.zero_grad(set_to_none=False)
            inputs, labels = training.batch(indices)
            functional.cross_entropy(computes(inputs), labels).backward()  # type: ignore[no-untyped-call]

        gradient(np.arange(size))  # compiles
        outcome, so_far = Outcome([], []), 0.0
        while len(outcome.seconds) < epochs and max(outcome.accuracy, default=0.0) < target:
            generator = torch.Generator().manual_seed(1000 * seed + len(outcome.seconds))
            order = torch.randperm(len(training), generator=generator).numpy()[self._rank :: LEARNERS]
            distributed.barrier()
            began = time.perf_counter()
            for first in range(0, len(order) - size + 1, size):
                gradient(order[first : first + size])
                optimizer.step()
            so_far += time.perf_counter() - began
            if job.optimizer.schedule == "cosine":
                cosine.step()
            outcome.seconds.append(so_far)
            outcome.accuracy.append(self._accuracy(network))
        return outcome

    def test(self, job: Job, results: Results) -> Outcome:
        """Tests the weights of every epoch of a run."""
        network = models.build(job.model, self._info, 0)
        flat, accuracy = FlatModel(network), []
        for epoch in results.epochs["epoch"].tolist():
            flat.bind(torch.from_numpy(results.weights_of(epoch)))
            accuracy.append(self._accuracy(network))
        return Outcome(accuracy, results.epochs["time_s"].tolist())

    @torch.no_grad()
    def _accuracy(self, network: torch.nn.Module) -> float:
        """Of the test samples, of which each learner tests a share."""
        test, right = self._test, torch.zeros(1)
        for indices in np.array_split(np.arange(self._rank, len(test), LEARNERS), 20):
            inputs, labels = test.batch(indices)
            right += (network(inputs).argmax(1) == labels).sum()
        distributed.all_reduce(right)
        return float(right) / len(test)
