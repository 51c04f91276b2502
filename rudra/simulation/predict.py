"""Predictions of a job's cost before it runs: its roles run in virtual time, without tensors and without data.

The simulation covers only as many updates as a steady rate needs, and an epoch's time follows from this rate. It omits
start and end, which do not grow with the epoch. Evaluations are on the training path only where they need the learners'
cores: an epoch then takes longer by the delay of one.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rudra.benchmark_report import Report
from rudra.core.actions import (
    Accumulate,
    Compute,
    Copy,
    Correct,
    ExecutorAction,
    Finish,
    Record,
    RunFirstStage,
    RunLastStage,
    StoreEpochWeights,
    Update,
)
from rudra.core.events import Event
from rudra.core.layout import Placed
from rudra.core.records import TIMES, joined_rows
from rudra.core.wire import tail_bytes
from rudra.errors import ConfigError
from rudra.job.job import Job
from rudra.prepare import cost_files
from rudra.prepare.resolve import resolve_virtual, settle
from rudra.simulation.assembly import assemble
from rudra.simulation.cluster import without_tensors
from rudra.simulation.costs import CostModel, Crowded, expected_shares
from rudra.simulation.efficiency import Efficiency, efficiency
from rudra.simulation.efficiency import as_text as efficiency_text
from rudra.simulation.timing_only import TimingOnly
from topologies import Plan

ROUNDS = 24
"""Minimum number of mini-batches to simulate per learner."""

GRADIENTS = 2000
UPDATES = 40
"""Minimum number of updates, and of gradients, to simulate."""

EPOCHS = 4
"""Number of epochs to simulate if a coordinator assigns samples."""

_WARM = 0.25  # initial fraction of the updates, which is not counted


class Outline(NamedTuple):
    """Properties that a job's costs depend on, in addition to the job itself.

    Attributes:
        training_samples: Number of training samples per epoch.
        size_bytes: Size of a gradient or the weights on the wire.
        placed: How the model is divided between learners and a stage server.
        buffers: Number of elements of a gradient that are not parameters.
    """

    training_samples: int
    size_bytes: int
    placed: Placed | None = None
    buffers: int = 0


@dataclass(frozen=True, slots=True)
class Prediction:
    """Prediction for one job.

    Attributes:
        job: Resolved job with its cost file read.
        costs: Origin of the costs, or None if they are not measured.
        updates: Number of simulated updates.
        epoch_s: Duration of an epoch.
        samples_per_s: Rate of all learners together.
        mean_staleness: Mean staleness of the gradients.
        max_staleness: Maximum staleness of the gradients.
        shares: Fractions of the learners' time by activity (`records.TIMES`, without "_s"). They add up to 1.
        loads: Load of the busiest server, "server" (handling messages, adding, updating), and of the busiest direction
            of any link, "link", each as a fraction of the time.
        bound: Main limit of the rate: "compute", "server" or "link".
        bound_s: Time of an epoch if everything except `bound` took no time.
        guessed: Mini-batch sizes without a measured time, and how their time is estimated. Empty if there are none.
        efficiency: Time per iteration by Omnivore's model, if the model covers the job.
        workers: Rate, share of the updates and utilisation of each worker, for protocol hogbatch.
    """

    job: Job
    costs: str | None
    updates: int
    epoch_s: float
    samples_per_s: float
    mean_staleness: float
    max_staleness: int
    shares: Mapping[str, float]
    loads: Mapping[str, float]
    bound: str
    bound_s: float
    guessed: str
    efficiency: Efficiency | None = None
    workers: tuple[dict[str, Any], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Returns numbers and texts that fit into JSON, with the number of learners in place of the job."""
        left_out = {"job", "efficiency"} if self.workers else {"job", "efficiency", "workers"}
        fields = {name: getattr(self, name) for name in self.__slots__ if name not in left_out}
        model = {"efficiency": self.efficiency.as_dict()} if self.efficiency else {}
        return {"learners": self.learners, **fields, **model}

    @property
    def learners(self) -> int:
        """Number of learners that take part."""
        return min(self.job.learners, self.job.cluster.active_count or self.job.learners)


def outline(job: Job) -> Outline:
    """Finds the size of a job's data and model. It reads little of the data, and allocates no memory for the model.

    Raises:
        ConfigError: The model does not exist, or does not fit the data.
        DataError: Files are missing that would give the sizes.
    """
    cluster = without_tensors(job)
    return Outline(cluster.info.training_samples, cluster.size * 4 + tail_bytes(1), cluster.placed, cluster.buffers)


def predict(
    job: Job, *, samples: int | None = None, updates: int | None = None, known: Outline | None = None
) -> Prediction:
    """Predicts the time of an epoch and its parts for a run without failures: `faults` are ignored.

    For a job that changes during the run, this predicts its first part. `Job.at` gives the other parts.

    Args:
        job: Job with its number of learners. `[simulation]` gives the costs.
        samples: Number of samples per epoch, by default the size of the training set.
        updates: Number of updates to simulate, by default as many as a steady rate needs.
        known: Outline of the job, if already known.

    Raises:
        RudraError: The job has a mistake.
    """
    if job.scheduled and updates is not None:
        raise ConfigError("--updates: under protocol hogbatch whole epochs are simulated; valid: none")
    measured, evaluates = cost_files.source(job), job.training.evaluate in (True, "always")
    urgent = job.evaluations_decide
    job = cost_files.load(job)
    resolved = resolve_virtual(_timed(job))
    job, plan = resolved.job, resolved.plan
    known = known or outline(job)
    training_samples = known.training_samples if samples is None else samples
    per_update = job.gradients_per_update(job.plan())
    updates = updates or (2**62 if job.scheduled else _enough(job, per_update))
    if job.cluster.shares == "auto":
        job = settle(job, gradients=job.training.gradients, shares=expected_shares(job, plan))
    minibatch_size, size = job.training.minibatch_size, known.size_bytes
    meter, rows = _Meter(updates, plan.server), KeptRows()
    simulated = training_samples if job.scheduled else updates * per_update * minibatch_size
    about: dict[str, Any] = {"size_bytes": size, "placed": known.placed, "buffers": known.buffers}
    simulation = assemble(job, plan, meter, rows, training_samples=simulated, **about)
    simulation.run()
    found = _evaluate(job, plan, simulation.costs, meter, rows, training_samples, size)
    if evaluates and (evaluation := simulation.costs.evaluation_of(urgent=urgent)) is not None:
        found = _with_evaluations(found, simulation.costs, evaluation)
    if job.scheduled:
        return replace(found, costs=measured)
    return replace(found, costs=measured, efficiency=efficiency(job, simulation.costs, size, found.samples_per_s))


def _timed(job: Job) -> Job:
    """Returns the first part of a job, reduced to everything that affects the duration of an epoch."""
    return (
        job.at(0)
        .without_tests()
        .with_(
            training={"epochs": min(job.training.epochs, EPOCHS) if job.scheduled else 1},
            results={"minibatches": True, "checkpoint_every": "never"},
            simulation={"faults": ()},
            optimizer={"schedule": "step", "schedule_options": {}, "schedule_every": "epoch"},  # rates take no time
        )
    )


def _enough(job: Job, per_update: int) -> int:
    rare = 20 / job.simulation.straggler_probability if job.simulation.straggler_probability else 0
    return max(UPDATES, math.ceil(max(ROUNDS * job.learners, GRADIENTS, rare) / per_update))


class _Meter(TimingOnly):
    """Counter of the work of servers and links, from the first gradient to the last update.

    Attributes:
        transfers: (sender, receiver) -> number of tensors.
        done: (role, kind of local action) -> number of actions, for actions that keep a server busy.
    """

    idle: Collection[type[ExecutorAction]] = ()

    def __init__(self, updates: int, owner: int) -> None:
        self.transfers: Counter[tuple[int, int]] = Counter()
        self.done: Counter[tuple[int, type[ExecutorAction]]] = Counter()
        self._updates, self._owner = updates, owner
        self._training = False

    def transfer(self, source: int, source_buffer: str, to: int, to_buffer: str) -> None:
        self.transfers[source, to] += self._training

    def perform(self, role: int, action: ExecutorAction, seconds: float) -> Event | None:
        if isinstance(action, Accumulate | Correct | RunLastStage | Update | Copy):
            self.done[role, type(action)] += 1
        if isinstance(action, Compute | RunFirstStage | Update):
            self._training = self.done[self._owner, Update] < self._updates
        return super().perform(role, action, seconds)


class KeptRows:
    """Recorder that keeps the statistics server's rows in memory."""

    def __init__(self) -> None:
        self._tables: dict[str, list[npt.NDArray[Any]]] = {}

    def record(self, action: Record) -> None:
        self._tables.setdefault(action.table, []).append(action.rows)

    def keep(self, role: int, action: StoreEpochWeights) -> None: ...
    def finish(self, role: int, action: Finish) -> None: ...
    def warn(self, name: str, text: str) -> None: ...

    def __getitem__(self, table: str) -> npt.NDArray[Any]:
        return joined_rows(self._tables[table])


def _evaluate(
    job: Job, plan: Plan, model: CostModel, meter: _Meter, rows: KeptRows, training_samples: int, size_bytes: int
) -> Prediction:
    updates, gradients, minibatches = rows["updates"], rows["gradients"], rows["minibatches"]
    if job.scheduled:
        first, per_s = _epochs_rate(rows["epochs"], updates)
    else:
        first, per_s = steady_rate(updates)
    began, ended = updates["time_s"][first], updates["time_s"][-1]
    # The last gradients got no answer, so they have no waiting time. With overlap, or if nothing but computing takes
    # time, every gradient may have none.
    answered = np.sum([minibatches[name] for name in TIMES[1:]], axis=0) > 0
    answered |= plan.overlapped or not np.any(answered)
    steady = minibatches[(minibatches["time_s"] > began) & answered]
    times = {name.removesuffix("_s"): float(steady[name].sum()) for name in TIMES}
    staleness = gradients["staleness"][gradients["update"] > updates["timestamp"][first]]
    work = _server_s(plan, model, meter, size_bytes)
    elapsed, epochs = float(ended), float(updates["samples"].sum()) / training_samples
    # Without anything to wait for, each rank with learners computes all the time.
    hosted: defaultdict[int, list[int]] = defaultdict(list)
    for learner in (plan.roles[i] for i in plan.learners):
        hosted[learner.world_rank].append(learner.index)
    queued_s = float(rows["stages"]["wait_s"].mean()) if plan.stage is not None else 0.0
    workers = _workers(job, steady, float(ended - began)) if job.scheduled else ()
    if workers:
        rate = sum(worker["samples_per_s"] / worker["busy_share"] for worker in workers)
    elif model.any_early(size_bytes):  # their rows have only backward passes
        rate = sum(job.training.minibatch_size / model.compute_s[role] for role in plan.learners)
    else:
        rate = sum(job.training.minibatch_size / (_mean_s(steady, learners) - queued_s) for learners in hosted.values())
    bounds = {"compute": training_samples / rate} | {name: seconds / epochs for name, seconds in work.items()}
    bound = max(bounds, key=lambda name: bounds[name])
    return Prediction(
        job=job,
        costs=None,
        updates=len(updates),
        epoch_s=training_samples / per_s,
        samples_per_s=per_s,
        mean_staleness=float(staleness.mean()),
        max_staleness=int(staleness.max()),
        shares={name: seconds / (sum(times.values()) or 1.0) for name, seconds in times.items()},
        loads={name: min(1.0, seconds / elapsed) for name, seconds in work.items()},
        bound=bound,
        bound_s=bounds[bound],
        guessed=model.guessed,
        workers=workers,
    )


def _with_evaluations(found: Prediction, costs: CostModel, evaluation: Crowded) -> Prediction:
    """Adds the delay by one evaluation in each epoch. If it takes longer than an epoch, some epochs have none.

    The learners of other nodes wait for those that it delays, unless the protocol is asynchronous.
    """
    plan, delay_s = costs.plan, evaluation.delay_s * min(1.0, found.epoch_s / evaluation.seconds)
    if plan.served and not plan.groups and not found.job.make_protocol(plan).waits:
        delay_s *= sum(costs.node[role] == evaluation.node for role in plan.learners) / len(plan.learners)
    slower = 1 + delay_s / found.epoch_s
    return replace(found, epoch_s=found.epoch_s * slower, samples_per_s=found.samples_per_s / slower)


def _epochs_rate(epochs: npt.NDArray[Any], updates: npt.NDArray[Any]) -> tuple[int, float]:
    """Computes the rate as `steady_rate` does, from whole epochs except the first, which starts with initial batch
    sizes."""
    if len(epochs) == 1:
        return 0, float(epochs["samples"][0] / epochs["time_s"][0])
    first = int(np.searchsorted(updates["timestamp"], epochs["timestamp"][0]))
    elapsed = epochs["time_s"][-1] - epochs["time_s"][0]
    return first, float((epochs["samples"][-1] - epochs["samples"][0]) / elapsed)


def _workers(job: Job, minibatches: npt.NDArray[Any], elapsed: float) -> tuple[dict[str, Any], ...]:
    """Returns what each worker did in `elapsed` seconds, computed from its rows."""
    found = []
    for learner, table in enumerate(job.hogbatch.team(job.learners)):
        mine = minibatches[minibatches["learner"] == learner]
        count, samples = len(mine), int(mine["samples"].sum())
        found.append(
            {
                "worker": learner,
                "kind": table.kind,
                "updates_per_s": count / elapsed,
                "share": count / max(1, len(minibatches)),
                "samples_per_s": samples / elapsed,
                "mean_batch": table.threads * samples / max(1, count),
                "busy_share": float(mine["compute_s"].sum()) / elapsed,
            }
        )
    return tuple(found)


def steady_rate(updates: npt.NDArray[Any]) -> tuple[int, float]:
    """Returns a run's samples per second, from its `records.UPDATE` rows, and the first update that is counted.

    Raises:
        ConfigError: There are too few updates.
    """
    if len(updates) < 2:
        raise ConfigError(f"{len(updates)} updates give no rate; at least 2 are needed")
    first = min(int(len(updates) * _WARM), len(updates) - 2)
    elapsed = updates["time_s"][-1] - updates["time_s"][first]
    return first, float(updates["samples"][first:-1].sum() / elapsed)


def _mean_s(minibatches: npt.NDArray[Any], learners: Sequence[int]) -> float:
    """Returns the mean time of a mini-batch of learners on one rank. Mini-batches that overlap in time took turns."""
    mine = minibatches[np.isin(minibatches["learner"], learners)]
    if not len(mine):
        return math.inf
    mine = mine[np.argsort(mine["time_s"])]
    before = np.concatenate([[-math.inf], mine["time_s"][:-1]])
    return float(np.minimum(mine["compute_s"], mine["time_s"] - before).mean())


def _server_s(plan: Plan, model: CostModel, meter: _Meter, size_bytes: int) -> dict[str, float]:
    """Returns the seconds that the busiest server and the busiest direction of a link were occupied."""
    table = model.table
    ways: defaultdict[object, float] = defaultdict(float)
    handling: defaultdict[int, float] = defaultdict(float)
    for (source, to), count in meter.transfers.items():
        size = size_bytes * model.travelling(source, to)
        link = model.link(source, to)
        for way in ("out", link.out), ("into", link.into), *(("both", end) for end in link.blocking):
            ways[way] += count * size * link.seconds_per_byte
        if source in plan.children[to] or (to in plan.owners and source in plan.learners):
            handling[to] += count * table.message_s
    for (role, kind), count in meter.done.items():
        handling[role] += count * model.local_s(role).get(kind, 0.0)
    return {"server": max(handling.values(), default=0.0), "link": max(ways.values(), default=0.0)}


def _workers_text(prediction: Prediction) -> str:
    report = Report(["worker", "kind", "updates/s", "of all", "samples/s", "mean batch", "busy"])
    for about in prediction.workers:
        rates = [f"{about[name]:,.4g}" for name in ("updates_per_s", "samples_per_s", "mean_batch")]
        shares = [f"{about[name]:.1%}" for name in ("share", "busy_share")]
        report.rows.append((str(about["worker"]), about["kind"], rates[0], shares[0], *rates[1:], shares[1]))
    return report.as_text()


def as_text(predictions: Sequence[Prediction]) -> str:
    """Returns a table with one row for each prediction. Predictions differ in λ."""
    kinds = [kind for kind in predictions[0].shares if any(p.shares[kind] for p in predictions)]
    columns = ["λ", "s/epoch", "speed-up", "samples/s", "staleness", "at most", *kinds]
    report = Report([*columns, "server", "link", "bound, s/epoch"])
    for p in predictions:
        shares = (f"{p.shares[kind]:.1%}" for kind in kinds)
        speed_up = f"{predictions[0].epoch_s / p.epoch_s:.2f}"
        counts = f"{p.samples_per_s:,.0f}", f"{p.mean_staleness:.2f}", str(p.max_staleness)
        loads = (f"{p.loads[name]:.1%}" for name in ("server", "link"))
        cells = f"{p.epoch_s:.4g}", speed_up, *counts, *shares, *loads, f"{p.bound} {p.bound_s:.4g}"
        report.rows.append((str(p.learners), *cells))
    updates = sorted({p.updates for p in predictions})
    simulated = f"{updates[0]:,} updates" if len(updates) == 1 else f"{updates[0]:,} to {updates[-1]:,} updates"
    report.notes = [
        "compute, push, wait, pull: of the learners' time; server, link: how long the busiest server and the",
        "busiest way of a link are occupied; bound: an epoch if all else were free.",
        f"From {simulated}; evaluations are left out.",
        *dict.fromkeys(p.guessed for p in predictions if p.guessed),
    ]
    if any(p.workers for p in predictions):
        report.notes[2:3] = [f"From {simulated}, of whole epochs; the first epoch and evaluations are left out."]
    modelled = [p.efficiency for p in predictions if p.efficiency]
    teams = [_workers_text(p) for p in predictions if p.workers]
    return "\n\n".join([report.as_text(), *teams, *([efficiency_text(modelled)] if modelled else [])])
