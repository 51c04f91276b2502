"""Gradients with torch.compile against the same gradients without it."""

import copy
import time
from functools import partial
from typing import Any

import torch

from benchmarks.shared import one_thread
from rudra.bench.ranks import compared
from rudra.benchmark_report import Goal, Report, ratios, spread
from rudra.compute import models
from rudra.compute.flat import FlatModel
from rudra.compute.shortcuts import gradients_of
from rudra.compute.tasks import Classification
from rudra.data.load import DataInfo
from rudra.errors import ConfigError
from rudra.job.job import Job

LENET = DataInfo("lenet", 1, 1, (1, 28, 28), 10)
RESNET = DataInfo("resnet32", 1, 1, (3, 32, 32), 10)
SMALLEST = DataInfo("mlp", 1, 1, (1, 4, 4), 10)


@one_thread()
def run(*, quick: bool) -> Report:
    """Measures in this process, with one thread, on random images."""
    cases = [(SMALLEST, 4)] if quick else [(LENET, 4), (LENET, 16), (RESNET, 16)]
    report = Report(["network", "μ", "ms without", "ms compiled", "times the steps/s", "s to compile"])
    medians = []
    try:
        for info, size in cases:
            case = _Case(info, size)
            times = case.measure(2 if quick else 25)
            faster = ratios(times["plain"], times["compiled"])
            plain_ms, compiled_ms = (1e3 * spread(turns).median for turns in times.values())
            report.rows.append((info.name, size, plain_ms, compiled_ms, faster, case.compile_s))
            if info is not RESNET:
                medians.append(faster.median)
    except ConfigError as error:
        report.notes = [str(error)]
    report.goals = [Goal("lenet: >= 1.3 times the steps/s", medians, at_least=1.3)] if medians else []
    return report


class _Case:
    def __init__(self, info: DataInfo, size: int) -> None:
        module = models.build(Job(model={"name": info.name}).model, info, 0)
        self._batch = torch.randn(size, *info.input_shape), torch.arange(size) % info.classes
        how: Any = {"gradients": gradients_of(module, Classification(0))}
        self._models = [FlatModel(copy.deepcopy(module), **how), FlatModel(module, compiled=True, **how)]
        self._weights = torch.zeros(self._models[0].size)
        self._models[0].read_into(self._weights)
        self._out = torch.zeros_like(self._weights)
        began = time.perf_counter()
        self._steps(1, 1)
        self.compile_s = time.perf_counter() - began

    def _steps(self, which: int, count: int) -> float:
        """Returns the processor time of a gradient in seconds."""
        model = self._models[which]
        model.bind(self._weights)
        began = time.thread_time()
        for step in range(count):
            model.gradient(*self._batch, self._out, step)
        return (time.thread_time() - began) / count

    def measure(self, turns: int) -> dict[str, list[float]]:
        """Returns the seconds of a gradient in each turn, without compiling and with it."""
        count = max(2, int(0.1 / min(self._steps(0, 3), self._steps(1, 3))))
        return compared({"plain": partial(self._steps, 0, count), "compiled": partial(self._steps, 1, count)}, turns)
