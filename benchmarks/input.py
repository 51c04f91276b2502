"""Waiting time of a learner for mini-batches, with and without an input thread, and the resulting speed-up."""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
import torch

from benchmarks.shared import one_thread
from rudra.benchmark_report import Goal, Report, ratios, spread
from rudra.compute import models
from rudra.compute.flat import FlatModel
from rudra.compute.gradients import GradientSource
from rudra.core.work import Work
from rudra.data.load import DataInfo, in_memory, load
from rudra.data.samples import Samples, Split
from rudra.data.sources import Dense
from rudra.job.job import Job

SIZES = (4, 16, 64)
LIMIT = 2.0  # percent
TURN_S = 0.3
CHUNK = 8  # samples in one compressed chunk of HDF5


@one_thread()
def run(*, quick: bool) -> Report:
    """Measures in this process with one torch thread. The input thread has its own core if there are two."""
    report = Report(
        ["network, data", "μ", "wait, % of a step", "with a thread", "thread: times the steps/s", "a run has"]
    )
    found = []
    with tempfile.TemporaryDirectory(prefix="rudra-bench-") as directory:
        for name, job, samples, wanted in _cases(Path(directory), 64 if quick else None):
            for size in SIZES[:1] if quick else SIZES:
                ahead = not in_memory(samples)
                case = _Case(job.with_(training={"minibatch_size": size}), samples)
                times, waits = case.measure(1 if quick else 15, 0.0 if quick else TURN_S)
                faster = ratios(times[False], times[True])
                shares = {way: spread(wait * 100 for wait in waits[way]) for way in waits}
                report.rows.append((name, size, shares[False], shares[True], faster, "thread" if ahead else "none"))
                if wanted:
                    found.append(shares[ahead].median)
    report.notes = [
        "a step is drawing a mini-batch and its gradient; noise in the number, size and type of the real images;",
        f"crop: augment.crop = 4 and flip; gzip: HDF5, {CHUNK} images in a chunk, few of which stay decoded",
    ]
    text = f"wait < {LIMIT:g} % of a step of lenet and resnet32, in the way that a run draws"
    report.goals = [Goal(text, found, at_most=LIMIT)]
    return report


def _cases(directory: Path, samples: int | None) -> Iterator[tuple[str, Job, Samples, bool]]:
    """Returns the name, job and training set of each case, and whether the goal includes the case."""
    crop = {"crop": 4, "flip": True}
    mnist, cifar = _split(samples or 60_000, (1, 28, 28)), _split(samples or 50_000, (3, 32, 32))
    yield "lenet, Fashion-MNIST's", Job(model={"name": "lenet"}), mnist, True
    yield "resnet32, CIFAR-10's, crop", Job(model={"name": "resnet32"}, augment=crop), cifar, True
    yield "lenet, Fashion-MNIST's, crop", Job(model={"name": "lenet"}, augment=crop), mnist, False
    images = {"name": "hdf5", "path": directory / "images.h5", "options": {"cache_bytes": 1 << 20}}
    job = Job(model={"name": "resnet32", "options": {"blocks": 1}}, data=images)
    _write(directory / "images.h5", samples or 4096)
    compressed = load(job.data, test=False).training
    assert compressed is not None
    yield "ResNet-8, 64x64 px, gzip", job, compressed, False


def _split(count: int, shape: tuple[int, ...]) -> Split:
    """Returns noise in memory, in the form that image readers return."""
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (count, *shape), np.uint8)
    mean = images.mean(0, dtype=np.float32)
    return Split(Dense(images), Dense(generator.integers(0, 10, count)), mean, 1 / 255)


def _write(path: Path, count: int) -> None:
    """Writes a file of images in compressed chunks. The noise has few colours, so that it compresses like pictures."""
    generator = np.random.default_rng(0)
    images = generator.integers(0, 16, (count, 3, 64, 64), np.uint8) * np.uint8(16)
    labels = generator.integers(0, 10, count)
    with h5py.File(path, "w") as file:
        file.create_dataset("x_train", data=images, chunks=(CHUNK, 3, 64, 64), compression="gzip")
        file.create_dataset("y_train", data=labels)
        file["x_test"], file["y_test"] = images[:1], labels[:1]


class _Case:
    """Steps of one learner at fixed weights, with both kinds of input."""

    def __init__(self, job: Job, samples: Samples) -> None:
        inputs, target = samples.batch(np.zeros(1, np.int64))
        info = DataInfo("bench", len(samples), 1, tuple(inputs.shape[1:]), 10, (inputs, target))
        self._flat = FlatModel(models.build(job.model, info, 0), gradients="direct")
        self._weights, self._gradient = torch.empty(self._flat.size), torch.empty(self._flat.size)
        self._flat.read_into(self._weights)
        size = job.training.minibatch_size
        work = Work(0, 0, size, size)
        self._sources = {way: GradientSource(job, 0, work, self._flat, samples, prefetch=way) for way in (False, True)}
        self._next = dict.fromkeys(self._sources, 0)

    def measure(self, rounds: int, turn_s: float) -> tuple[dict[bool, list[float]], dict[bool, list[float]]]:
        """Returns seconds per step and the share of waiting, with and without the thread, in alternating turns."""
        times: dict[bool, list[float]] = {False: [], True: []}
        waits: dict[bool, list[float]] = {False: [], True: []}
        warm_s = max(self._steps(way, 3)[0] for way in times)
        count = max(4, round(turn_s / warm_s))
        for turn in range(rounds):
            for way in (False, True) if turn % 2 else (True, False):
                step_s, wait_s = self._steps(way, count)
                times[way].append(step_s)
                waits[way].append(wait_s / step_s)
        for source in self._sources.values():
            source.close()
        return times, waits

    def _steps(self, way: bool, count: int) -> tuple[float, float]:
        """Returns seconds per step in total, and seconds of waiting."""
        source, first, wait_s = self._sources[way], self._next[way], 0.0
        self._next[way] += count
        began = time.perf_counter()
        for step in range(first, first + count):
            since = time.perf_counter()
            inputs, target = source.minibatch(step, source.work.after(step))
            wait_s += time.perf_counter() - since
            self._flat.bind(self._weights)
            self._flat.gradient(inputs, target, self._gradient, source.seed(step))
        return (time.perf_counter() - began) / count, wait_s / count
