"""Workers that share weights in a window: two against one, and against torch's Hogwild. Cost of waiting and locks.

Source: Hogbatch §6.1, and the example `mnist_hogwild` of PyTorch, whose processes share the tensors of a model.
"""

import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from rudra.bench.ranks import on_ranks, train
from rudra.benchmark_report import Goal, Report, ratios, spread
from rudra.compute.window import Contribution, Update, WindowLayout
from rudra.job.job import Job
from rudra.mpi.quiet import rest
from rudra.mpi.shared_window import WindowFile

if TYPE_CHECKING:
    from mpi4py import MPI

FEATURES = 300  # as w8a
SMALL, LARGE = (64, 64), (512, 512)
TURNS = 5
TURN_S = 2.0
TWICE, BEYOND, WAITING = 1.7, 1.5, 3.0


class Case(NamedTuple):
    """A model to train, with the approximate speed of a worker.

    Attributes:
        hidden: numbers of units in the hidden layers.
        size: μ.
        parts: number of parts of a worker's batch. Each part is a gradient of μ samples.
        pace: approximate samples/s of one worker.
    """

    hidden: tuple[int, ...]
    size: int
    parts: int
    pace: int

    @property
    def name(self) -> str:
        return f"{FEATURES}-{'-'.join(map(str, self.hidden))}-2, μ = {self.size}"


HOGWILD = Case(SMALL, 1, 16, 6_000), Case(SMALL, 8, 16, 40_000)
BIG = Case(LARGE, 8, 4, 8_000)
PATIENT = Case(LARGE, 8, 1, 8_000)
"""Case with batches of about 1 ms of work."""


def noise(count: int) -> tuple[TensorDataset, TensorDataset]:
    """Returns random samples with the shape of w8a, which need no download."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, FEATURES, generator=generator)
    labels = torch.randint(2, (count,), generator=generator)
    labels[0] = 1  # so that the number of classes is known
    return TensorDataset(inputs, labels), TensorDataset(inputs[:4], labels[:4])


def job(case: Case, workers: int, update: Update = "racing", seconds: float = TURN_S) -> Job:
    """Returns a job of one epoch that takes about `seconds`."""
    count = max(200 * case.size, round(case.pace * workers * seconds))
    return Job(
        name="bench",
        model={"name": "mlp", "options": {"hidden": list(case.hidden), "activation": "sigmoid"}},
        data={"name": noise, "classes": 2, "options": {"count": count}},
        training={"epochs": 1, "minibatch_size": case.size, "evaluate": False},
        optimizer={"learning_rate": 0.01},
        protocol={"name": "hogbatch", "reference_batch_size": case.size},
        cluster={"learners": workers, "threads_per_rank": 1},
        hogbatch={
            "weights": "shared",
            "locking": update == "locked",
            "workers": [{"kind": "small", "threads": case.parts, "min": case.size, "max": case.size}],
        },
    )


def run(*, quick: bool) -> Report:
    """Measures in turns on the ranks of this machine."""
    turns, seconds = (1, 0.05) if quick else (TURNS, TURN_S)
    cases = HOGWILD[1:] if quick else (*HOGWILD, BIG)
    found = on_ranks(_measure, 2, cases=cases, turns=turns, seconds=seconds)[0]
    report = Report(
        ["network", "samples/s, one worker", "two", "two against one", "locked", "β", "torch's Hogwild", "against it"]
    )
    beyond, twice = [], []
    for case in cases:
        rates = found[case.name]
        theirs = [hogwild(case, seconds) for _ in range(turns)] if case in HOGWILD else []
        more = ratios(rates["two"], rates["one"])
        against = ratios(rates["two"], theirs) if theirs else "-"
        columns = [spread(rates[name]) for name in ("one", "two")], spread(rates["locked"]), rates["beta"]
        report.rows.append((case.name, *columns[0], more, *columns[1:], spread(theirs) if theirs else "-", against))
        if case in HOGWILD:
            beyond.append(statistics.median(a / b for a, b in zip(rates["two"], theirs, strict=True)))
        if case is BIG or quick:
            twice.append(more.median)
    report.notes.append(
        f"two racing workers wait {found['waiting']:.2f} % of their time for work of {found['work_ms']:.2f} ms"
    )
    report.notes += _locks(1000 if quick else 100_000)
    report.goals = [
        Goal(f"two racing workers >= {TWICE:g} times the samples/s of one", twice, at_least=TWICE),
        Goal(f">= {BEYOND:g} times the samples/s of torch's Hogwild at μ = 1 and 8", beyond, at_least=BEYOND),
        Goal(f"waiting for work <= {WAITING:g} % at about 1 ms of work", [found["waiting"]], at_most=WAITING),
    ]
    return report


def _measure(comm: "MPI.Comm", directory: Path, cases: Sequence[Case], turns: int, seconds: float) -> dict[str, Any]:
    """Returns samples/s of each case in turns: one worker and two, without locks and with them."""
    found: dict[str, Any] = {}
    plans: tuple[tuple[str, int, Update], ...] = (("one", 1, "racing"), ("two", 2, "racing"), ("locked", 2, "locked"))
    for case in cases:
        rates: dict[str, Any] = {name: [] for name, *_ in plans}
        for turn in range(turns):
            for name, workers, update in plans if turn % 2 else plans[::-1]:
                ran = _trained(comm, directory / "out.h5", job(case, workers, update, seconds))
                rates[name].append(ran["rate"])
                if name == "two":
                    rates["beta"] = ran["beta"]
        found[case.name] = rates
    ran = _trained(comm, directory / "out.h5", job(PATIENT, 2, seconds=seconds))
    return {**found, "waiting": ran["waiting"], "work_ms": ran["work_ms"]}


def _trained(comm: "MPI.Comm", path: Path, job: Job) -> dict[str, float]:
    """Runs a job on the ranks that it needs, and returns its results on those ranks."""
    from mpi4py import MPI

    some = comm.Split(0 if comm.rank < job.plan().ranks else MPI.UNDEFINED)
    figures = {"rate": 0.0, "beta": 1.0, "waiting": 0.0, "work_ms": 0.0}
    if some != MPI.COMM_NULL:
        with train(job, path, some) as results:
            totals, learners = results.totals[0], results.learners
            spent = sum(learners[name].sum() for name in ("compute_s", "wait_s", "update_s"))
            worked = learners["compute_s"].sum() + learners["update_s"].sum()
            figures["rate"] = float(totals["samples"] / totals["time_s"])
            figures["waiting"] = float(100 * learners["wait_s"].sum() / spent)
            figures["work_ms"] = float(1e3 * worked / totals["applied"])
            told = results.events["text"][results.events["kind"] == b"window"]
            if len(told):
                figures["beta"] = float(told[-1].decode().split(" of all updates ")[1].split()[0])
        some.Free()
    rest(comm)
    return figures


def hogwild(case: Case, seconds: float) -> float:
    """Returns samples/s of two processes that share the tensors of a model, as in PyTorch's example."""
    import torch.multiprocessing as processes

    context = processes.get_context("spawn")
    model = _network(case.hidden)
    model.share_memory()
    data, _ = noise(4096)
    steps = max(50, round(case.pace * seconds / case.size / 2))
    ready, times = context.Barrier(2), context.Queue()
    tensors = [tensor.share_memory_() for tensor in data.tensors]  # type: ignore[no-untyped-call]
    about = (model, *tensors, case.size, steps, ready, times)
    children = [context.Process(target=_hogwild_worker, args=(rank, *about)) for rank in range(2)]
    for child in children:
        child.start()
    taken: list[float] = [times.get(timeout=120) for _ in children]
    for child in children:
        child.join()
    return 2 * steps * case.size / max(taken)


def _network(hidden: Sequence[int]) -> nn.Module:
    sizes = [FEATURES, *hidden, 2]
    layers = [layer for inputs, outputs in pairwise(sizes) for layer in (nn.Linear(inputs, outputs), nn.Sigmoid())]
    return nn.Sequential(*layers[:-1])


def _hogwild_worker(
    rank: int,
    model: nn.Module,
    inputs: torch.Tensor,
    labels: torch.Tensor,
    size: int,
    steps: int,
    ready: Any,
    times: Any,
) -> None:
    """Trains in one of the processes. Batches are indexed in memory, which is faster than the example's loader."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(rank))
    for step in range(-10, steps):
        if step == 0:
            ready.wait()
            began = time.perf_counter()
        first = step * size % (len(order) - size)
        chosen = order[first : first + size]
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs[chosen]), labels[chosen]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    times.put(time.perf_counter() - began)


def _locks(rounds: int) -> list[str]:
    """Returns the cost of the lock of a window, and of each kind of update."""
    lines = []
    for size in (23_554, 420_866):
        gradient, taken = torch.zeros(size), {}
        for update in ("racing", "locked"):
            file = WindowFile(WindowLayout(size, 2, update))
            window, own = file.window, torch.empty(size)
            count = max(10, rounds // (10 if size < 100_000 else 100))
            began = time.perf_counter()
            for step in range(count):
                window.add(Contribution(0, step, 0, 1, 0.0, 0.0, 0.1), window.copy(0, own), gradient)
            taken[update] = (time.perf_counter() - began) / count * 1e6
            held = window.lock() if update == "locked" else nullcontext()
            began = time.perf_counter()
            for _ in range(rounds):
                with held:
                    pass
            lock_us = (time.perf_counter() - began) / rounds * 1e6
            file.close()
        lines.append(
            f"{size:,} weights: copy and update {taken['racing']:.0f} µs racing, {taken['locked']:.0f} µs locked, of "
            f"which the lock, twice, is {2 * lock_us:.1f} µs"
        )
    return lines
