"""Section "speed" of `rudra bench gpu`: images/s of one learner and of plain torch loops, measured in turns."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import distributed
from torch.nn import functional

import rudra
from benchmarks.gpu_jobs import CLASSES, SHAPES, images, learner_job
from benchmarks.gpu_rows import Found, LeftOut, Row, Setting, failure
from rudra.bench.ranks import MOMENTUM, RATE
from rudra.benchmark_report import Cell, ratios, spread
from rudra.compute import models
from rudra.data.load import DataInfo
from rudra.job.job import Job

Rate = Callable[[], float]
"""Function that measures images/s."""


@dataclass(frozen=True, slots=True)
class Case:
    """A network and a mini-batch.

    Attributes:
        model: Name of a shipped model.
        size: Mini-batch.
        options: Options of the model.
        ways: Names in `OURS` and `LOOPS`, in the order of a turn.
        expected_s: Expected seconds of all turns.
    """

    model: str
    size: int
    options: Mapping[str, Any] = field(default_factory=dict)
    ways: tuple[str, ...] = ()
    expected_s: float = 60.0

    @property
    def name(self) -> str:
        return f"{self.model}, μ = {self.size}"


class Loop:
    """A network trained by a few lines of torch, with its data on the device.

    Args:
        setting: Setting of the benchmark.
        case: Network and mini-batch.
        data: (inputs, labels) on the device. None: noise.
        rate: Learning rate.
    """

    def __init__(
        self, setting: Setting, case: Case, data: tuple[torch.Tensor, torch.Tensor] | None = None, rate: float = RATE
    ) -> None:
        device = setting.machine.device
        shape = SHAPES[case.model]
        info = DataInfo("bench", 1, 1, shape, CLASSES)
        made = models.build(Job(model={"name": case.model, "options": dict(case.options)}).model, info, 0)
        self.network = made.to(device)
        self.computes: Any = self.network
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=rate, momentum=MOMENTUM, fused=True)
        noise, _ = images(shape, max(case.size, setting.sized(1 << 13, 256)))
        self.inputs, self.labels = (tensor.to(device) for tensor in noise.tensors) if data is None else data
        self.chosen = torch.zeros(case.size, dtype=torch.int64, device=device)
        self.order = torch.randperm(len(self.labels), device=device)
        self.next = 0
        self.size = case.size

    def step(self) -> None:
        """Gathers the chosen samples, and computes and applies their gradient."""
        inputs, labels = self.inputs[self.chosen], self.labels[self.chosen]
        self.optimizer.zero_grad(set_to_none=True)
        functional.cross_entropy(self.computes(inputs), labels).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    def choose(self) -> None:
        """Chooses the next samples."""
        self.next = self.next if self.next + self.size <= len(self.order) else 0
        self.chosen.copy_(self.order[self.next : self.next + self.size])
        self.next += self.size


Step = Callable[[], object]


def eager(setting: Setting, loop: Loop) -> Step:
    """Returns a plain step."""
    return loop.step


def graphed(setting: Setting, loop: Loop) -> Step:
    """Returns the whole step as a CUDA graph."""
    replay = setting.machine.graph(loop.step)
    if replay is None:
        raise LeftOut("there are no CUDA graphs on the host")
    return replay


def reduced(setting: Setting, loop: Loop) -> Step:
    """Returns a step whose network torch has compiled."""
    torch.compiler.reset()  # shapes of earlier cases would make this one dynamic
    loop.computes = torch.compile(loop.network, mode="reduce-overhead")

    def step() -> None:
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        loop.step()

    return step


def ddp(setting: Setting, loop: Loop) -> Step:
    """Returns a step whose network is wrapped in DDP, with one rank."""
    if not distributed.is_initialized():
        store = f"file://{setting.directory}/store-{time.monotonic_ns()}"
        distributed.init_process_group(setting.machine.backend, init_method=store, rank=0, world_size=1)
    ids = None if setting.machine.is_host else [setting.machine.device.index]
    loop.computes = torch.nn.parallel.DistributedDataParallel(
        loop.network, device_ids=ids, gradient_as_bucket_view=True
    )
    return loop.step


LOOPS: dict[str, Callable[[Setting, Loop], Step]] = {
    "eager": eager,
    "graph": graphed,
    "reduce-overhead": reduced,
    "DDP": ddp,  # last: a thread of NCCL would disturb captures
}
"""Loops to compare with, by name. Each returns the function that computes one step on the chosen samples."""

OURS: dict[str, dict[str, Any]] = {"Rudra": {}, "Rudra compiled": {"training": {"compile": True}}}
"""Runs with one learner by name, as tables of their jobs. Loops are compared with the first one."""

COMPARED = {"Rudra compiled": "reduce-overhead"}
"""Loops that other runs are compared with."""

PLAIN = ("Rudra", "eager", "graph", "DDP")
MAIN = [
    Case("lenet", 16, ways=(*OURS, *LOOPS), expected_s=80),
    Case("resnet32", 16, ways=(*OURS, *LOOPS), expected_s=110),
    Case("vgg16", 64, ways=("Rudra", *LOOPS), expected_s=60),
]
MORE = [
    Case("lenet", 4, ways=("Rudra", *LOOPS), expected_s=40),
    Case("lenet", 64, ways=("Rudra", *LOOPS), expected_s=40),
    Case("resnet32", 64, ways=("Rudra", *LOOPS), expected_s=60),
]
SMALL = [
    Case("lenet", 16, ways=("Rudra", *LOOPS), expected_s=50),
    Case("resnet32", 4, {"blocks": 1}, PLAIN, 20),
    Case("vgg16", 4, {"width": 8}, PLAIN, 20),
]
QUICK = [Case("lenet", 16, ways=PLAIN, expected_s=5)]


def rows(setting: Setting) -> list[Row]:
    """Returns the rows of the section: one for each network and mini-batch, which has one outcome for each way."""
    return _rows(setting.sized(MAIN, SMALL, QUICK))


def more_rows(setting: Setting) -> list[Row]:
    """Returns the rows of the section with other mini-batches."""
    return _rows(setting.sized(MORE, [Case("lenet", 4, ways=PLAIN, expected_s=20)], []))


def _rows(cases: Sequence[Case]) -> list[Row]:
    return [Row(case.name, partial(compare, case), case.expected_s) for case in cases]


def compare(case: Case, setting: Setting) -> Iterator[Found]:
    """Measures a case in turns, and yields the images/s of each run of Rudra and of each loop.

    A way that fails is left out of later turns. The others do not depend on it.
    """
    span_s = setting.sized(1.0, 0.5, 0.1)
    rates: dict[str, Rate] = {}
    figures: defaultdict[str, list[float]] = defaultdict(list)
    try:
        for name in (name for name in case.ways if name in LOOPS):
            try:
                rates[name] = loop_rate(setting, case, name, span_s)
            except Exception as error:
                yield failure(f"{case.name}: {name}", error)
        fastest = max((rate() for rate in rates.values()), default=100.0)
        steps = int(min(setting.sized(3000, 300, 30), max(20, fastest * 2 * span_s / case.size)))
        rates |= {name: partial(run_rate, setting, case, steps, OURS[name]) for name in case.ways if name in OURS}
        for _ in range(setting.sized(2, 1)):
            for name in [name for name in case.ways if name in rates]:
                try:
                    figures[name].append(rates[name]())
                except Exception as error:
                    del rates[name]
                    yield failure(f"{case.name}: {name}", error)
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()
    first, *_ = OURS
    for name in (name for name in case.ways if name in rates):
        shown: dict[str, Cell] = {"images/s": spread(figures[name])}
        if name in LOOPS and first in rates:
            shown[f"{first} / {name}"] = ratios(figures[first], figures[name])
        if (other := COMPARED.get(name)) in rates:
            shown[f"{name} / {other}"] = ratios(figures[name], figures[other])
        yield Found(f"{case.name}: {name}", shown)


def loop_rate(setting: Setting, case: Case, name: str, span_s: float) -> Rate:
    """Returns a function that measures a loop, after some steps to warm up."""
    loop = Loop(setting, case)
    step = LOOPS[name](setting, loop)
    finish = setting.machine.finish

    def steps(count: int) -> float:
        finish()
        began = time.perf_counter()
        for _ in range(count):
            loop.choose()
            step()
        finish()
        return time.perf_counter() - began

    steps(5)
    count = max(3, int(span_s / (steps(5) / 5)))
    return lambda: count * case.size / steps(count)


def run_rate(setting: Setting, case: Case, steps: int, tables: Mapping[str, Any]) -> float:
    """Returns the images/s of a run with one learner, without the first fifth of its steps."""
    job = learner_job(setting, case.model, case.size, steps, dict(case.options)).with_(**tables)
    with rudra.run(job, output=setting.directory / "speed.h5", force=True, progress="quiet") as results:
        time_s = results.minibatches["time_s"]
    first = len(time_s) // 5
    return float((len(time_s) - 1 - first) * case.size / (time_s[-1] - time_s[first]))
