"""A bank of learners on one device: gradients of m learners fused, against one learner after another."""

import time
from functools import partial

import torch

from benchmarks.compile import LENET, RESNET, SMALLEST
from benchmarks.shared import one_thread
from rudra.bench.ranks import compared
from rudra.benchmark_report import Report, ratios, spread
from rudra.compute import models
from rudra.compute.bank.fused import fused_gradients
from rudra.compute.flat import FlatModel
from rudra.compute.shortcuts import gradients_of
from rudra.compute.tasks import Classification
from rudra.data.load import DataInfo
from rudra.job.job import Job

SMALL = DataInfo("resnet32", 1, 1, (3, 8, 8), 10)


@one_thread()
def run(*, quick: bool) -> Report:
    """Measures in this process, with one thread, on random images."""
    cases = [(LENET, 4, 4), (LENET, 4, 8), (LENET, 16, 4), (RESNET, 4, 4), (SMALL, 4, 8), (SMALL, 4, 32)]
    report = Report(["network", "pixels", "μ", "m", "images/s loop", "images/s fused", "times the images/s"])
    for info, size, learners in [(SMALLEST, 4, 2)] if quick else cases:
        times = _Case(info, size, learners).measure(2 if quick else 15)
        loop, fused = (size * learners / spread(turns).median for turns in times.values())
        report.rows.append(
            (info.name, info.input_shape[1], size, learners, loop, fused, ratios(times["loop"], times["fused"]))
        )
    return report


class _Case:
    def __init__(self, info: DataInfo, size: int, learners: int) -> None:
        module = models.build(Job(model={"name": info.name}).model, info, 0)
        self._model = FlatModel(
            module, gradients="direct" if gradients_of(module, Classification(0)) == "direct" else "autograd"
        )
        self._inputs = torch.randn(learners, size, *info.input_shape)
        self._target = torch.arange(size).expand(learners, -1) % info.classes
        weights, outs = torch.zeros(2, learners, self._model.size)
        for vector in weights:
            self._model.read_into(vector)
        weights[:, : self._model.parameter_count] *= 1 + 0.01 * torch.randn(learners, self._model.parameter_count)
        self._weights, self._outs = list(weights), list(outs)

    def _loop(self, count: int) -> float:
        """Returns the processor time of a gradient of each learner, in seconds."""
        began = time.thread_time()
        for step in range(count):
            for batch in zip(self._weights, self._inputs, self._target, self._outs, strict=True):
                self._model.bind(batch[0])
                self._model.gradient(*batch[1:], step)
        return (time.thread_time() - began) / count

    def _fused(self, count: int) -> float:
        """Returns the processor time of a gradient of each learner, in seconds."""
        began = time.thread_time()
        for step in range(count):
            seeds = [step] * len(self._outs)
            fused_gradients(self._model, self._weights, self._inputs, self._target, self._outs, seeds)
        return (time.thread_time() - began) / count

    def measure(self, turns: int) -> dict[str, list[float]]:
        """Returns the seconds of a gradient of each learner in each turn, by form."""
        count = max(2, int(0.1 / min(self._loop(2), self._fused(2))))
        return compared({"loop": partial(self._loop, count), "fused": partial(self._fused, count)}, turns)
