"""Measurements on real ranks: start of the ranks, common functions, and a plain torch loop for comparison."""

import json
import struct
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional
from torch.utils.data import TensorDataset

from rudra.compute import networks
from rudra.compute.optimizers import uncompiled
from rudra.errors import RunError
from rudra.job.job import Job
from rudra.log import log
from rudra.mpi.launch import launch
from rudra.mpi.quiet import rest
from rudra.results.reader import Results, open_results
from topologies import base

if TYPE_CHECKING:
    from mpi4py import MPI

SERVER, STATISTICS, LEARNER = 0, 1, 2  # world ranks in topology base
TAG = 7
IMAGES = 4096
PICTURE, CLASSES, PICTURES = (3, 224, 224), 1000, 64
RATE, MOMENTUM = 0.001, 0.9

Measure = Callable[..., dict[str, Any]]


def on_ranks(measure: Measure, learners: int = 1, **arguments: Any) -> list[dict[str, Any]]:
    """Calls `measure(comm, directory, **arguments)` on the ranks of topology base.

    Args:
        measure: a function of a module. The directory is shared by the ranks and exists until all have ended.
        learners: number of learners. Topology base adds two ranks.
        arguments: keyword arguments, the same for all ranks.

    Returns:
        Results of `measure` on each rank, by rank. They must fit into JSON.

    Raises:
        RunError: a rank failed, and has reported the reason.
    """
    roles = [role.name for role in base.plan([0] * learners).roles]
    with tempfile.TemporaryDirectory(prefix="rudra-bench-") as name:
        directory = Path(name)
        payload = partial(_rank, measure, directory, arguments)
        if launch(Job(name="bench"), directory / "bench", roles=roles, payload=payload).code:
            raise RunError("the benchmark failed on its ranks")
        results: list[dict[str, Any]] = json.loads((directory / "figures.json").read_text())
        return results


def _rank(measure: Measure, directory: Path, arguments: dict[str, Any]) -> int:
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    try:
        figures = measure(comm, directory, **arguments)
        rest(comm)
        gathered = comm.gather(figures)
        if gathered is not None:
            (directory / "figures.json").write_text(json.dumps(gathered))
    except BaseException:  # the others wait for this rank
        log.error(f"rank {comm.rank} failed\n{traceback.format_exc()}")
        comm.Abort(1)
    return 0


def train(job: Job, path: Path, comm: "MPI.Comm | None" = None) -> Results:
    """Takes this rank's part in a run, and returns the open results on every rank (of `comm`, if given).

    Raises:
        RunError: the run failed.
    """
    from rudra.mpi.session import run_ranks
    from rudra.prepare.start import StartRequest

    job = job.with_(cluster={"device": "cpu"})  # as the alternatives in the comparison
    code, _ = run_ranks(job, StartRequest(path, force=True), progress={"mode": "quiet", "columns": None}, comm=comm)
    if code:
        raise RunError(f"the run ended with exit code {code}")
    return open_results(path)


def in_turns(rounds: int, figures: dict[str, list[Any]]) -> Iterator[dict[str, Any]]:
    """Yields a dictionary for the figures of each turn, and appends its figures to those from earlier turns.

    Args:
        rounds: number of turns that count. One warm-up turn precedes them. With 0 rounds only this turn runs, and
            counts.
        figures: name -> one figure for each turn that counts.
    """
    for turn in range(rounds + 1):
        taken: dict[str, Any] = {}
        yield taken
        for name, value in taken.items() if turn or not rounds else ():
            figures.setdefault(name, []).append(value)


def compared(ways: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Calls measuring functions in turns (see `in_turns`), and returns name -> figures."""
    figures: dict[str, list[float]] = {}
    for taken in in_turns(rounds, figures):
        taken |= {name: measure() for name, measure in ways.items()}
    return figures


def step_s(time_s: NDArray[np.float64]) -> float:
    """Returns the mean time between steps that ended at these times, without the first step, which warms caches up."""
    return float((time_s[-1] - time_s[1]) / (len(time_s) - 2))


def exchange(
    comm: "MPI.Comm",
    gradient: NDArray[np.float32],
    weights: NDArray[np.float32],
    count: int,
    *,
    before: Callable[[], object] = lambda: None,
    between: Callable[[], object] = lambda: None,
) -> tuple[float, float]:
    """Sends a gradient to the server and weights back, by blocking MPI calls between the server and one learner.

    Args:
        comm: communicator of all ranks, all of which call this.
        gradient: gradient that the learner sends, (parameters,) float32.
        weights: weights that the server sends, (parameters,) float32.
        count: number of turns.
        before: called on the learner at the beginning of a turn.
        between: called on the server after it has received the gradient.

    Returns:
        Seconds per turn, and on the learner also seconds per turn without `before`.
    """
    exchange_s, began = 0.0, time.perf_counter()
    for _ in range(count):
        if comm.rank == LEARNER:
            before()
            since = time.perf_counter()
            comm.Send(gradient, SERVER, TAG)
            comm.Recv(weights, SERVER, TAG)
            exchange_s += time.perf_counter() - since
        elif comm.rank == SERVER:
            comm.Recv(gradient, LEARNER, TAG)
            between()
            comm.Send(weights, LEARNER, TAG)
    return (time.perf_counter() - began) / count, exchange_s / count


def write_images(directory: Path, samples: int = IMAGES) -> None:
    """Writes a data set of noise in the format and size of (Fashion-)MNIST, so that no download is needed."""
    generator = np.random.default_rng(0)
    for prefix, count in (("train", samples), ("t10k", 16)):
        images = generator.integers(0, 256, (count, 28, 28), np.uint8)
        labels = generator.integers(0, 10, count).astype(np.uint8)
        (directory / f"{prefix}-images-idx3-ubyte").write_bytes(
            struct.pack(">4i", 2051, *images.shape) + images.tobytes()
        )
        (directory / f"{prefix}-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 2049, count) + labels.tobytes())


def lenet_job(directory: Path, protocol: str, learners: int, minibatch_size: int, steps: int) -> Job:
    """Returns a job of one epoch with this number of steps, without evaluation, on one torch thread."""
    return Job(
        name="bench",
        model={"name": "lenet"},
        data={"name": "idx", "path": directory, "train_limit": learners * minibatch_size * steps},
        training={"epochs": 1, "minibatch_size": minibatch_size, "evaluate": False},
        optimizer={"name": "sgd", "learning_rate": RATE, "momentum": MOMENTUM},
        protocol={"name": protocol, "modulation": "none"},
        cluster={"learners": learners, "threads_per_rank": 1},
    )


def pictures(count: int = PICTURES) -> tuple[TensorDataset, TensorDataset]:
    """Returns a data set of noise with the image size of ImageNet, kept in memory."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, *PICTURE, generator=generator)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    labels[0] = CLASSES - 1  # the largest label determines the number of classes
    return TensorDataset(inputs, labels), TensorDataset(inputs[:4], labels[:4])


def alexnet_job(protocol: str, learners: int, minibatch_size: int, steps: int, **options: int) -> Job:
    """Returns such a job for a network of 72 M parameters (289 MB), without momentum, which saves every way a pass."""
    return Job(
        name="bench",
        model={"name": "alexnet", "options": options},
        data={"name": pictures, "classes": CLASSES, "options": {"count": learners * minibatch_size * steps}},
        training={"epochs": 1, "minibatch_size": minibatch_size, "evaluate": False},
        optimizer={"name": "sgd", "learning_rate": 1e-4},
        protocol={"name": protocol, "modulation": "none"},
        cluster={"learners": learners, "threads_per_rank": 1},
    )


class PlainLoop:
    """A network trained by a few lines of torch: mini-batches by index from memory, fused SGD.

    Args:
        minibatch_size: μ.
        wrap: wraps the model in the module that computes, for example in DDP.
        model: "lenet", with momentum, or "alexnet", without.
        exchange: receives the gradient as one vector before each update, to average it over ranks.
        compiled: whether to compile the network with torch.compile.
    """

    def __init__(
        self,
        minibatch_size: int,
        wrap: Callable[[torch.nn.Module], torch.nn.Module] | None = None,
        model: str = "lenet",
        exchange: Callable[[torch.Tensor], None] | None = None,
        *,
        compiled: bool = False,
    ) -> None:
        small = model == "lenet"
        network = networks.lenet((1, 28, 28), 10) if small else networks.alexnet(PICTURE, CLASSES)
        computes: Any = torch.compile(network) if compiled else network
        self._model = computes if wrap is None else wrap(computes)
        rate, momentum = (RATE, MOMENTUM) if small else (1e-4, 0.0)
        sgd = uncompiled(torch.optim.SGD)
        self._optimizer = sgd(network.parameters(), lr=rate, momentum=momentum, fused=True)
        count, shape = (IMAGES, (1, 28, 28)) if small else (PICTURES, PICTURE)
        generator = torch.Generator().manual_seed(0)
        self._inputs = torch.randn(count, *shape, generator=generator)
        self._labels = torch.randint(10, (count,), generator=generator)
        self._order = torch.randperm(count, generator=generator)
        self._minibatch_size = minibatch_size
        self._exchange = exchange
        if exchange is not None:
            sizes = [parameter.numel() for parameter in network.parameters()]
            self._gradient = torch.zeros(sum(sizes))
            for parameter, part in zip(network.parameters(), torch.split(self._gradient, sizes), strict=True):
                parameter.grad = part.view_as(parameter)

    def run(self, steps: int) -> tuple[float, float]:
        """Trains for a number of steps.

        Returns:
            Seconds per step of the whole loop, and of forward and backward only.
        """
        torch_s = 0.0
        began = time.perf_counter()
        for step in range(steps):
            first = step * self._minibatch_size % (len(self._order) - self._minibatch_size)
            chosen = self._order[first : first + self._minibatch_size]
            inputs, labels = self._inputs[chosen], self._labels[chosen]
            since = time.perf_counter()
            functional.cross_entropy(self._model(inputs), labels).backward()  # type: ignore[no-untyped-call]
            torch_s += time.perf_counter() - since
            if self._exchange is not None:
                self._exchange(self._gradient)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=self._exchange is None)
        return (time.perf_counter() - began) / steps, torch_s / steps
