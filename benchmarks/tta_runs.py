"""The runs of `rudra bench tta` on real ranks, and the journal that keeps their results."""

import gzip
import lzma
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import distributed
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from benchmarks.tta_search import CONTESTANTS, DATA, MOVING, Goalpost, Outcome, Point
from rudra.bench.ddp import connect, wrapped
from rudra.bench.ranks import LEARNER, STATISTICS, train
from rudra.compute import models
from rudra.compute.flat import FlatModel
from rudra.data.load import load
from rudra.job.job import Job
from rudra.job.tables import DataTable
from rudra.mpi.quiet import rest
from rudra.results.reader import Results
from rudra.tuning.journal import Journal

if TYPE_CHECKING:
    from mpi4py import MPI

LEARNERS = 2
MOMENTUM = 0.9


def runs_in(path: Path) -> Journal:
    """Returns the journal of all runs."""
    return Journal(path, {"benchmark": "tta"})


def write_down(path: Path, point: Point, outcome: Outcome) -> None:
    """Adds a run to the journal."""
    runs_in(path).add({"kind": "run", "point": point, "outcome": outcome})


def read_kept(path: Path) -> dict[Point, Outcome]:
    """Returns the runs in the journal."""
    return {Point(*run["point"]): Outcome(*run["outcome"]) for run in runs_in(path).of("run")}


def measure(
    comm: "MPI.Comm", directory: Path, points: Sequence[Sequence[Any]], data: str, kept: str, quick: bool
) -> dict[str, Any]:
    """Makes one run after the other, and writes down the outcome of each."""
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
        contestant = CONTESTANTS[point.contestant]
        if contestant.space is None:
            goal = DATA[point.data]
            outcome = learners.train(job, goal, averaged=contestant.averaged) if learners else None
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
    """Decompresses data once, instead of for every run."""
    to.mkdir()
    for file in (file for file in path.rglob("*") if file.is_file()):
        opens: Any = {".gz": gzip.open, ".xz": lzma.open}.get(file.suffix, open)
        packed = file.suffix in {".gz", ".xz"}
        with opens(file, "rb") as source, (to / (file.stem if packed else file.name)).open("wb") as plain:
            shutil.copyfileobj(source, plain)


def job_of(point: Point, path: Path, *, quick: bool = False) -> Job:
    """Returns a run as a job. For DDP the job holds the settings that DDP shares with Rudra's runs."""
    limits = {"train_limit": 1024, "test_limit": 256} if quick else {}
    job = Job.load(point.file) if point.file else given(point, path)
    return job.with_(
        data={"path": path, **limits},
        training={"epochs": point.epochs, "seed": point.seed, "compile": point.compiled, "evaluate": False},
        results={"keep_every": 1},
        fault_tolerance={"non_finite_loss": "warn"},  # a learning rate that is too high is a valid result
    )


def given(point: Point, path: Path) -> Job:
    """Returns the job that `rudra tune` begins with: hardsync by allreduce with the settings of a point."""
    goal, cosine = DATA[point.data], point.schedule == "cosine"
    return Job(
        name="bench",
        model={"name": "lenet"},
        data={"name": goal.reader, "path": path},
        training={"epochs": point.epochs, "minibatch_size": point.size},
        optimizer={
            "learning_rate": point.rate,
            "momentum": MOMENTUM,
            "schedule": "cosine" if cosine else "step",
            "schedule_options": {"T_max": goal.epochs} if cosine else {},
        },
        protocol={"name": "hardsync"},
        topology={"name": "groups"},
        cluster={"learners": LEARNERS, "threads_per_rank": 1},
    )


class _Learners:
    """Work of both learners outside of Rudra's driver: DDP training and evaluations."""

    def __init__(self, comm: "MPI.Comm", directory: Path, data: DataTable) -> None:
        connect(comm.rank, directory)
        self._rank = comm.rank - LEARNER
        training, test, self._info, _ = load(data)
        assert training is not None
        assert test is not None
        self._training, self._test = training, test

    def train(self, job: Job, goal: Goalpost, *, averaged: bool) -> Outcome:
        """Trains with DDP in the usual way: each epoch a learner gets a shuffled share of the samples.

        `averaged`: evaluates torch's moving average of the weights.
        """
        size, seed, epochs = job.training.minibatch_size, job.training.seed, job.training.epochs
        training = self._training
        network = models.build(job.model, self._info, seed)
        computes: Any = wrapped(torch.compile(network) if job.training.compile else network)  # type: ignore[arg-type]
        rate = job.optimizer.learning_rate
        optimizer = torch.optim.SGD(network.parameters(), lr=rate, momentum=MOMENTUM, fused=True)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, goal.epochs)
        moving = AveragedModel(network, multi_avg_fn=get_ema_multi_avg_fn(1 - MOVING)) if averaged else None  # type: ignore[no-untyped-call]

        def gradient(indices: npt.NDArray[np.int64]) -> None:
            optimizer.zero_grad(set_to_none=False)
            inputs, labels = training.batch(indices)
            functional.cross_entropy(computes(inputs), labels).backward()  # type: ignore[no-untyped-call]

        gradient(np.arange(size))  # compiles the network
        outcome, so_far = Outcome([], []), 0.0
        while len(outcome.seconds) < epochs and max(outcome.accuracy, default=0.0) < goal.accuracy:
            generator = torch.Generator().manual_seed(1000 * seed + len(outcome.seconds))
            order = torch.randperm(len(training), generator=generator).numpy()[self._rank :: LEARNERS]
            distributed.barrier()
            began = time.perf_counter()
            for first in range(0, len(order) - size + 1, size):
                gradient(order[first : first + size])
                optimizer.step()
                if moving:
                    moving.update_parameters(network)
            so_far += time.perf_counter() - began
            if job.optimizer.schedule == "cosine":
                cosine.step()
            outcome.seconds.append(so_far)
            outcome.accuracy.append(self._accuracy(moving or network))
        return outcome

    def test(self, job: Job, results: Results) -> Outcome:
        """Evaluates the weights of every epoch of a run."""
        network = models.build(job.model, self._info, 0)
        flat, accuracy = FlatModel(network), []
        for epoch in results.epochs["epoch"].tolist():
            flat.bind(torch.from_numpy(results.weights_of(epoch)))
            accuracy.append(self._accuracy(network))
        return Outcome(accuracy, results.epochs["time_s"].tolist())

    @torch.no_grad()
    def _accuracy(self, network: torch.nn.Module) -> float:
        """Returns the accuracy on the test set. Each learner evaluates a share of the samples."""
        test, right = self._test, torch.zeros(1)
        for indices in np.array_split(np.arange(self._rank, len(test), LEARNERS), 20):
            inputs, labels = test.batch(indices)
            right += (network(inputs).argmax(1) == labels).sum()
        distributed.all_reduce(right)
        return float(right) / len(test)
