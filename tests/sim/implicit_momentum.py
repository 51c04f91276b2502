"""Implicit momentum: how much of the last step asynchrony repeats, with no momentum in the optimiser.

Source: omnivore.txt §IV-C, Theorem 1 and Figure 6. With g groups, no explicit momentum and step times that are
exponential (A2), E V(t+1) = (1 - 1/g) E V(t) - (η/g) E ∇ℓ(W(t)), where V(t+1) = W(t+1) - W(t) and E is over batches and
times. So the modulus m is estimated as the coefficient of E V(t) in a least-squares fit

    E V(t+1) = m E V(t) - a E ∇ℓ(W(t))        over all t and all parameters, m and a unknown.

E is a mean over seeds that start from the same weights; ∇ℓ is the gradient over the whole training set at the server's
weights after every update. Means over a finite number of seeds carry noise that a plain fit would take for a smaller m;
therefore only products of *different* seeds enter the normal equations, whose noises are independent, so that the
estimate has no such bias. Errors are standard errors of a jackknife that leaves out a twentieth of the seeds at a time.

Every seed is a run of the simulator with real gradients: topology groups with one learner in each of its g groups,
protocol async, communication that takes no time. A fit needs steps that swing: where training creeps, V follows the
gradient, and nothing tells m from a. So rates are as large as g - 1 updates of delay allow.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.utils.data import TensorDataset

from rudra.compute import models
from rudra.compute.executor import Executor, torch_as_in
from rudra.compute.flat import FlatModel
from rudra.compute.making import make_executors
from rudra.core.actions import ExecutorAction, Finish, Record, StoreEpochWeights, Update
from rudra.core.events import Event
from rudra.data.load import DataInfo, load
from rudra.data.samples import Samples
from rudra.job.job import Job
from rudra.simulation.assembly import assemble
from rudra.simulation.tensors import RealTensors

CURVATURES = (0.25, 0.5, 1.0)
BLOCKS = 20  # of seeds, for the jackknife
FREE = {"latency_s": 0.0, "bandwidth_bytes_per_s": 1e15, "message_s": 0.0, "update_s": 0.0, "compute_s": 1.0}
RATE = 1.2
"""η with one group; with g it is that times sin(π/(4g - 2)), so that weights g - 1 updates old stay stable."""


class Bowl(nn.Module):
    """A model whose cross entropy is ½ Σ h (w - x)² + 1: least squares, in the form that Rudra trains.

    With logits (0, z) and label 0 the cross entropy is log(1 + exp z), so z = log(exp q - 1) makes it q.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((len(CURVATURES),), 3.0))
        self._curvature = torch.tensor(CURVATURES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = 1.0 + 0.5 * ((self.weight - x).square() * self._curvature).sum(1)
        return torch.stack([torch.zeros_like(loss), loss + torch.log(-torch.expm1(-loss))], dim=1)


def points(samples: int = 256) -> tuple[TensorDataset, TensorDataset]:
    """What the bowl is fitted to."""
    x = torch.randn(samples, len(CURVATURES), generator=torch.Generator().manual_seed(0))
    labels = torch.zeros(samples, dtype=torch.int64)
    return TensorDataset(x, labels), TensorDataset(x[:2], labels[:2])


class Modulus(NamedTuple):
    """An estimate.

    Attributes:
        momentum: m.
        error: its standard error.
        rate: a · g/η, which the theorem says is 1.
        staleness: mean, of all gradients.
    """

    momentum: float
    error: float
    rate: float
    staleness: float


def measure(groups: int, *, seeds: int, n: int | None = None) -> Modulus:
    """Trains with every seed and fits; under n-softsync, which is async where n is not given."""
    rate = RATE * math.sin(math.pi / (4 * groups - 2))
    runs = [_train(_job(groups, rate, seed, n or groups)) for seed in range(1, seeds + 1)]
    steps, gradients = (np.stack([run[i] for run in runs]) for i in (0, 1))
    momentum, coefficient, error = fit(steps, gradients)
    staleness = np.mean([run[2] for run in runs])
    return Modulus(momentum, error, coefficient * groups / rate, float(staleness))


def fit(steps: npt.NDArray[Any], gradients: npt.NDArray[Any]) -> tuple[float, float, float]:
    """Fits E V(t+1) = m E V(t) - a E G(t).

    Args:
        steps: (seeds, T, parameters): V(1) … V(T).
        gradients: (seeds, T, parameters): G(t) at the weights that V(t+1) changes, t = 0 … T - 1.

    Returns:
        m, a, and the standard error of m.
    """
    columns = (steps[:, :-1], -gradients[:, 1:], steps[:, 1:])
    blocks = np.arange(len(steps)) * min(BLOCKS, len(steps)) // len(steps)
    names = range(blocks[-1] + 1)
    sums = np.stack([[column[blocks == b].sum(0) for column in columns] for b in names])  # (block, 3, T, parameters)
    own = np.stack(
        [np.einsum("iktp,jktp->ij", c, c) for c in (np.stack([x[blocks == b] for x in columns]) for b in names)]
    )

    def solve(left_out: int | None) -> npt.NDArray[Any]:
        kept = [b for b in names if b != left_out]
        total = sums[kept].sum(0)
        products = np.einsum("itp,jtp->ij", total, total) - own[kept].sum(0)  # of different seeds only
        return np.linalg.solve(products[:2, :2], products[:2, 2])

    momentum, coefficient = solve(None)
    without = np.array([solve(b)[0] for b in names])
    error = math.sqrt((len(without) - 1) * without.var())
    return float(momentum), float(coefficient), error


def _job(groups: int, rate: float, seed: int, n: int) -> Job:
    return Job(
        name="momentum",
        model={"name": Bowl},
        data={"name": points, "classes": 2},
        training={"epochs": 1, "minibatch_size": 32, "seed": seed, "evaluate": False},
        optimizer={"learning_rate": rate},
        protocol={"name": "softsync", "n": n, "modulation": "none"},
        topology={"name": "groups", "options": {"groups": groups}},
        cluster={"learners": groups, "threads_per_rank": 1, "device": "cpu"},
        simulation={**FREE, "distribution": "memoryless"},
        results={"minibatches": False},
    )


class _Watched(RealTensors):
    """Calls `moved` after each update of the weights, which only what holds the tensors sees."""

    moved: Callable[[], None]

    def perform(self, role: int, action: ExecutorAction, seconds: float) -> Event | None:
        event = super().perform(role, action, seconds)
        if isinstance(action, Update):
            self.moved()
        return event


class _Staleness:
    """Keeps of all records the staleness of gradients."""

    def __init__(self) -> None:
        self.found: list[npt.NDArray[Any]] = []

    def record(self, action: Record) -> None:
        if action.table == "gradients":
            self.found.append(action.rows["staleness"].copy())

    def keep(self, role: int, action: StoreEpochWeights) -> None: ...
    def finish(self, role: int, action: Finish) -> None: ...
    def warn(self, name: str, text: str) -> None: ...


def _train(job: Job) -> tuple[npt.NDArray[Any], npt.NDArray[Any], float]:
    """Steps V(1) … V(T), gradients ∇ℓ(W(0)) … ∇ℓ(W(T-1)), both (T, parameters) float64, and the mean staleness."""
    plan, updates = job.plan(), 8 * job.learners + 12
    per_update = job.make_protocol(plan).gradients_per_update
    with torch_as_in(job.cluster):
        loaded = load(job.data, seed=job.training.seed)
        train, info = loaded.training, loaded.info
        executors: dict[int, Executor] = make_executors(
            job, plan, tuple(range(len(plan.roles))), loaded, prefetch=False
        )
        tensors, rows = _Watched(executors), _Staleness()
        weights = executors[plan.server].buffer("weights")
        path = [weights.vector.clone()]
        tensors.moved = lambda: path.append(executors[plan.server].buffer("weights").vector.clone())
        samples = updates * per_update * job.training.minibatch_size
        assemble(job, plan, tensors, rows, training_samples=samples, size_bytes=4).run()
        gradients = _full_gradients(job, info, train, path[:-1])
    steps = torch.stack(path).double().diff(dim=0).numpy()
    return steps, gradients, float(np.concatenate(rows.found).mean())


def _full_gradients(job: Job, info: DataInfo, train: Samples, path: Sequence[torch.Tensor]) -> npt.NDArray[Any]:
    """The gradient over all training samples at each of some weights."""
    model = FlatModel(models.build(job.model, info, 0))
    inputs, labels = train.batch(np.arange(len(train)))
    out, found = torch.empty(model.size), []
    for weights in path:
        model.bind(weights)
        model.gradient(inputs, labels, out, 0)
        found.append(out.double().numpy().copy())
    return np.stack(found)
