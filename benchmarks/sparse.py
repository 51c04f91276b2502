"""Inputs that are mostly 0: the first layer and the whole step with sparse rows, against the same with dense rows."""

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch.nn import functional

from benchmarks.shared import one_thread, seconds
from rudra.bench.ranks import compared
from rudra.benchmark_report import Goal, Report, ratios, spread
from rudra.compute.first_gradient import try_first_gradient
from rudra.compute.learners import LearnerExecutor
from rudra.compute.making import make_executors
from rudra.compute.optim import UpdateRule
from rudra.compute.rows import RowFormat, RowGradient
from rudra.compute.sparse import SparseLinear, gradient_of, product
from rudra.core.actions import Compute, Update
from rudra.core.buffer_names import GRADIENT, WEIGHTS
from rudra.core.layout import Entry
from rudra.data.load import Data, DataInfo
from rudra.data.samples import Split
from rudra.data.sources import Dense, Source, Sparse
from rudra.job.job import Job
from rudra.job.tables import OptimizerTable
from rudra.prepare.resolve import settle

FEATURES, STORED, WIDTH, SAMPLES = 8315, 44, 512, 777
"""Sizes of Reuters, with a tenth of its samples. The frequency of features is 1 / (rank + 10)^1.1. With it, 8 and 64
samples have 268 and 1,204 different features (Reuters: 269 and 1,227)."""

SIZES = (1, 8, 64)
FIRST, STEP = 20.0, 5.0
ROWS = 5  # memory traffic in sizes of the rows: weights forward, gradient out and in, weights in, out
RATE = 1e-6
BATCHES, TURN_S = 8, 0.05  # mini-batches in turns, and seconds of calls one after the other


@one_thread()
def run(*, quick: bool) -> Report:
    """Measures in this process, with one thread."""
    report = Report(["what", "μ", "rows", "dense, ms", "sparse, ms", "dense / sparse", "bound, ms", "bound / sparse"])
    rounds, turn_s = (3, 0.0) if quick else (15, TURN_S)
    firsts, steps = list[float](), list[float]()
    matrix = _matrix()
    others = Dense(np.random.default_rng(0).random((SAMPLES, WIDTH), np.float32))
    for size in SIZES[:1] if quick else SIZES:
        which = np.arange(BATCHES * size).reshape(BATCHES, size) % SAMPLES
        ours, theirs = ([Split(matrix, others, sparse=on).batch(i)[0] for i in which] for on in (True, False))
        wanted = torch.randn(size, WIDTH)
        rows = sum(len(batch.col_indices().unique()) for batch in ours) // BATCHES
        least_s = ROWS * rows * WIDTH * 4 / _bytes_per_s()
        ways: list[Callable[[], object]] = [_Dense(theirs, wanted), _Sparse(ours, wanted)]
        about = (size, rows)
        firsts.append(_compare(report, "first layer", about, least_s, ways, rounds, turn_s))
        rest = _Step(others, size, 3, sparse=False)
        alone_s = spread(_seconds(rest, turn_s) for _ in range(rounds)).median
        ways = [_Step(matrix, size, 4, sparse=on) for on in (False, True)]
        steps.append(_compare(report, "step", about, least_s + alone_s, ways, rounds, turn_s))
    report.notes = [
        f"first layer: {FEATURES:,} x {WIDTH}, {STORED} features of each sample: forward, gradient, update by SGD",
        f"step: mini-batch, gradient and update of {FEATURES:,}-512x4-2, by learner and server; nothing travels",
        "bound: five times the rows at the rate of a += b on two such layers; and a step of the other layers",
    ]
    report.goals = [
        Goal(f"the first layer >= {FIRST:g} times as fast", firsts, at_least=FIRST),
        Goal(f"the step >= {STEP:g} times as fast", steps, at_least=STEP),
    ]
    return report


def _compare(
    report: Report,
    name: str,
    about: tuple[int, int],
    bound: float,
    ways: list[Callable[[], object]],
    rounds: int,
    turn_s: float,
) -> float:
    """Adds one row with a dense and a sparse way in turns, and returns the median of their ratio."""
    measured = {name: partial(_seconds, way, turn_s) for name, way in zip(("dense", "sparse"), ways, strict=True)}
    dense, sparse = compared(measured, rounds).values()
    ratio = ratios(dense, sparse)
    milliseconds = [spread(t * 1e3 for t in taken) for taken in (dense, sparse)]
    report.rows.append((name, *about, *milliseconds, ratio, bound * 1e3, spread(bound / t for t in sparse)))
    return float(ratio.median)


def _seconds(function: Callable[[], object], span_s: float = 0.0) -> float:
    """Returns the duration of a call, averaged over the calls in the span, after one call that fills the caches."""
    function()
    return seconds(function, span_s)


def _bytes_per_s() -> float:
    a, b = torch.ones(2, FEATURES * WIDTH)
    return 12.0 * len(a) / min(_seconds(lambda: a.add_(b, alpha=RATE)) for _ in range(5))


def _matrix() -> Sparse:
    rng = np.random.default_rng(0)
    often = 1 / np.arange(10, FEATURES + 10) ** 1.1
    often /= often.sum()
    names = rng.permutation(FEATURES).astype(np.int32)
    columns = np.array([names[rng.choice(FEATURES, STORED, replace=False, p=often)] for _ in range(SAMPLES)])
    columns.sort(1)
    starts = np.arange(SAMPLES + 1) * STORED
    return Sparse(rng.random(columns.size, np.float32), columns.reshape(-1), starts, FEATURES)


class _Sparse:
    """The first layer of a model with sparse inputs: only the products, without autograd."""

    def __init__(self, batches: list[torch.Tensor], wanted: torch.Tensor) -> None:
        layer = SparseLinear(FEATURES, WIDTH)
        assert layer.bias is not None
        self._batches, self._wanted = itertools.cycle(batches), wanted
        form = RowFormat(0, FEATURES, WIDTH, FEATURES * WIDTH + WIDTH)
        weights, layout = _flat([layer.weight, layer.bias])
        self._weight, self._bias = layer.weight.detach(), layer.bias.detach()
        self._gradient = RowGradient(torch.zeros(form.floats), form)
        self._rule = UpdateRule(OptimizerTable(), weights, layout, rows=form)

    def __call__(self) -> None:
        inputs = next(self._batches)
        parts = inputs.crow_indices(), inputs.col_indices(), inputs.values()
        product(*parts, self._weight, self._bias)
        self._gradient.put(gradient_of(*parts, self._wanted))
        torch.sum(self._wanted, 0, out=self._gradient.rest)
        self._rule.step_rows(self._gradient, RATE)


class _Dense:
    """The same layer on dense inputs. Each product is written directly to its destination."""

    def __init__(self, batches: list[torch.Tensor], wanted: torch.Tensor) -> None:
        layer = torch.nn.Linear(FEATURES, WIDTH)
        self._batches, self._wanted = itertools.cycle(batches), wanted
        weights, layout = _flat([layer.weight, layer.bias])
        self._weight, self._bias = layer.weight.detach(), layer.bias.detach()
        self._gradient = torch.zeros_like(weights)
        self._rule = UpdateRule(OptimizerTable(), weights, layout)

    def __call__(self) -> None:
        inputs = next(self._batches)
        functional.linear(inputs, self._weight, self._bias)
        first = self._gradient[: FEATURES * WIDTH].view(WIDTH, FEATURES)
        torch.mm(self._wanted.t(), inputs, out=first)
        torch.sum(self._wanted, 0, out=self._gradient[FEATURES * WIDTH :])
        self._rule.step(self._gradient, RATE)


def _flat(parameters: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[Entry]]:
    """Moves the parameters into one vector, and returns the vector."""
    vector, layout = torch.cat([p.detach().reshape(-1) for p in parameters]), list[Entry]()
    for parameter, name in zip(parameters, ("weight", "bias"), strict=True):
        offset = sum(entry.size for entry in layout)
        layout.append(Entry(name, tuple(parameter.shape), offset, parameter.numel(), "parameter"))
        parameter.data = vector[offset : offset + parameter.numel()].view(parameter.shape)
    return vector, layout


class _Step:
    """Work of a learner and its server for one update, with weights and gradient in memory that both share.

    Args:
        inputs: inputs, shape (samples, features).
        size: μ.
        hidden: widths of the layers.
        sparse: whether mini-batches are sparse.
    """

    def __init__(self, inputs: Source, size: int, hidden: int, *, sparse: bool) -> None:
        samples, features = inputs.shape
        split = Split(inputs, Dense(np.arange(samples) % 2), sparse=sparse)
        job = Job(
            model={"name": "mlp", "options": {"hidden": [WIDTH] * hidden, "activation": "sigmoid"}},
            data={"sparse": sparse},
            training={"minibatch_size": size},
            protocol={"name": "async", "modulation": "none"},
            cluster={"learners": 1, "threads_per_rank": 1},
        ).resolved()
        plan = job.plan()
        data = Data(split, split, DataInfo("bench", samples, samples, (features,), 2, sparse=sparse))
        job = settle(job, gradients=try_first_gradient(job, plan, data))
        made = make_executors(job, plan, (plan.server, *plan.learners), data, prefetch=False)
        server, learner = made[plan.server], made[plan.learners[0]]
        assert isinstance(learner, LearnerExecutor)
        learner.put(WEIGHTS, server.buffer(WEIGHTS))
        server.put(GRADIENT, learner.buffer(GRADIENT))
        self._server, self._learner, self._step = server, learner, 0

    def __call__(self) -> None:
        work = self._learner.source.work.after(self._step)
        for _ in self._learner.perform(Compute(self._step, work, WEIGHTS, GRADIENT)):
            pass
        self._step += 1
        for _ in self._server.perform(Update(GRADIENT, WEIGHTS, RATE, self._step)):
            pass
