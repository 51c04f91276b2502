"""What a job would cost before anybody pays for it: its roles in virtual time, without tensors and without its data.

Only as many updates are simulated as a steady rate needs; an epoch's time follows from that rate. Tests of the weights,
start and end are left out: they are off the training path, or do not grow with the epoch.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rudra.core.events import (
    Accumulate,
    Compute,
    Copy,
    Event,
    ExecutorAction,
    Finish,
    Record,
    RunFirstStage,
    RunLastStage,
    StoreEpochWeights,
    Update,
)
from rudra.core.layout import Placed
from rudra.core.records import TIMES
from rudra.core.wire import tail_bytes
from rudra.errors import ConfigError
from rudra.findings import Report
from rudra.job.job import Job
from rudra.prepare import cost_files
from rudra.prepare.resolve import resolve_virtual, settle, with_cut
from rudra.simulation.assembly import assemble
from rudra.simulation.cluster import without_tensors
from rudra.simulation.costs import CostModel, expected_shares
from rudra.simulation.efficiency import Efficiency, efficiency
from rudra.simulation.efficiency import as_text as efficiency_text
from rudra.simulation.timing_only import TimingOnly
from topologies import Plan

ROUNDS = 24
"""Mini-batches of each learner that are simulated at least."""

GRADIENTS = 2000
UPDATES = 40
"""That are simulated at least, both."""

EPOCHS = 4
"""That are simulated, where a coordinator deals samples out."""

_WARM = 0.25  # of the updates: they do not count


class Outline(NamedTuple):
    """What the costs of a job depend on, beside the job itself.

    Attributes:
        training_samples: of one epoch.
        size_bytes: of a gradient or the weights on the wire.
        placed: the pieces of a model of which a stage server has the last layers.
    """

    training_samples: int
    size_bytes: int
    placed: Placed | None = None


@dataclass(frozen=True, slots=True)
class Prediction:
    """What one job would do.

    Attributes:
        job: resolved, with its costs read in.
        costs: where they come from; None: nobody has measured them.
        updates: that were simulated.
        epoch_s: duration of an epoch.
        samples_per_s: all learners together.
        mean_staleness: of the gradients.
        max_staleness: likewise.
        shares: of the learners' time, by what took it (`records.TIMES`, without "_s"); they add up to 1.
        loads: of the busiest server: "server" (handling messages, adding, updating), and of the busiest way of any
            link: "link", each as a fraction of the time.
        bound: what limits the rate most: "compute", "server" or "link".
        bound_s: an epoch's time if everything else were free.
        guessed: of which mini-batch sizes nobody has measured how long they take, and what stands for it; or nothing.
        efficiency: time per iteration by Omnivore's model, where that is about such a job.
        workers: of protocol hogbatch: what each does in a second, its share of the updates, how busy it is.
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
        """In numbers and texts that fit into JSON; the job by its learners."""
        left_out = {"job", "efficiency"} if self.workers else {"job", "efficiency", "workers"}
        fields = {name: getattr(self, name) for name in self.__slots__ if name not in left_out}
        model = {"efficiency": self.efficiency.as_dict()} if self.efficiency else {}
        return {"learners": self.job.learners, **fields, **model}


def outline(job: Job) -> Outline:
    """Finds the size of a job's data and model, reading little of the one and allocating nothing of the other.

    Raises:
        ConfigError: there is no such model, or it does not fit the data.
        DataError: files are missing that would tell.
    """
    cluster = without_tensors(job)
    return Outline(cluster.info.training_samples, cluster.size * 4 + tail_bytes(1), cluster.placed)


def predict(
    job: Job, *, samples: int | None = None, updates: int | None = None, known: Outline | None = None
) -> Prediction:
    """Predicts the time of an epoch, and where it goes, as long as nothing goes wrong: `faults` do not count.

    Of a job that changes, it is its first part that is predicted; `Job.at` gives the others.

    Args:
        job: with its number of learners; `[simulation]` says what things cost.
        samples: of one epoch; by default as many as the training set has.
        updates: how many to simulate; by default as many as a steady rate needs.
        known: the job's outline, where that is known already.

    Raises:
        RudraError: a mistake in the job.
    """
    if job.scheduled and updates is not None:
        raise ConfigError("--updates: under protocol hogbatch whole epochs are simulated; valid: none")
    measured = cost_files.source(job)
    job = cost_files.load(job)
    resolved = resolve_virtual(_timed(job), with_cut(job, {}))
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
    simulation = assemble(job, plan, meter, rows, training_samples=simulated, size_bytes=size, placed=known.placed)
    simulation.run()
    found = _evaluate(job, plan, simulation.costs, meter, rows, training_samples, size)
    if job.scheduled:
        return replace(found, costs=measured)
    return replace(found, costs=measured, efficiency=efficiency(job, simulation.costs, size, found.samples_per_s))


def _timed(job: Job) -> Job:
    """The first part of a job, with all that decides how long an epoch takes, and nothing else."""
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
    table = job.simulation
    rare = 20 / table.straggler_probability if table.straggler_probability else 0
    return max(UPDATES, math.ceil(max(ROUNDS * job.learners, GRADIENTS, rare) / per_update))


class _Meter(TimingOnly):
    """Counts what servers and links have to do, from the first gradient to the last update.

    Attributes:
        transfers: (sender, receiver) -> tensors.
        done: role and kind of local action -> how often, of those that keep a server busy.
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
        if isinstance(action, Accumulate | RunLastStage | Update | Copy):
            self.done[role, type(action)] += 1
        if isinstance(action, Compute | RunFirstStage | Update):
            self._training = self.done[self._owner, Update] < self._updates
        return super().perform(role, action, seconds)


class KeptRows:
    """Keeps what the statistics server records, in memory."""

    def __init__(self) -> None:
        self._tables: dict[str, list[npt.NDArray[Any]]] = {}

    def record(self, action: Record) -> None:
        self._tables.setdefault(action.table, []).append(action.rows)

    def keep(self, role: int, action: StoreEpochWeights) -> None: ...
    def finish(self, role: int, action: Finish) -> None: ...
    def warn(self, name: str, text: str) -> None: ...

    def __getitem__(self, table: str) -> npt.NDArray[Any]:
        return np.concatenate(self._tables[table])


def _evaluate(
    job: Job, plan: Plan, model: CostModel, meter: _Meter, rows: KeptRows, training_samples: int, size_bytes: int
) -> Prediction:
    updates, gradients, minibatches = rows["updates"], rows["gradients"], rows["minibatches"]
    if job.scheduled:
        first, per_s = _epochs_rate(rows["epochs"], updates)
    else:
        first, per_s = steady_rate(updates)
    began, ended = updates["time_s"][first], updates["time_s"][-1]
    # Those at the end were pushed to nobody, which takes no time; with overlap nothing has to take any.
    answered = plan.overlapped | (sum(minibatches[name] for name in TIMES[1:]) > 0)
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


def _epochs_rate(epochs: npt.NDArray[Any], updates: npt.NDArray[Any]) -> tuple[int, float]:
    """As `steady_rate`, of whole epochs: all but the first, which begins with the first sizes of batches."""
    if len(epochs) == 1:
        return 0, float(epochs["samples"][0] / epochs["time_s"][0])
    first = int(np.searchsorted(updates["timestamp"], epochs["timestamp"][0]))
    elapsed = epochs["time_s"][-1] - epochs["time_s"][0]
    return first, float((epochs["samples"][-1] - epochs["samples"][0]) / elapsed)


def _workers(job: Job, minibatches: npt.NDArray[Any], elapsed: float) -> tuple[dict[str, Any], ...]:
    """What each worker did in so many seconds, of its rows."""
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
    """Samples per second of a run, from its `records.UPDATE`, and the update from which on they are counted.

    Raises:
        ConfigError: too few updates.
    """
    if len(updates) < 2:
        raise ConfigError(f"{len(updates)} updates tell no rate; at least 2 are needed")
    first = min(int(len(updates) * _WARM), len(updates) - 2)
    elapsed = updates["time_s"][-1] - updates["time_s"][first]
    return first, float(updates["samples"][first:-1].sum() / elapsed)


def _mean_s(minibatches: npt.NDArray[Any], learners: Sequence[int]) -> float:
    """How long a mini-batch of learners takes that share a rank: those that overlap in time took turns."""
    mine = minibatches[np.isin(minibatches["learner"], learners)]
    if not len(mine):
        return math.inf
    mine = mine[np.argsort(mine["time_s"])]
    before = np.concatenate([[-math.inf], mine["time_s"][:-1]])
    return float(np.minimum(mine["compute_s"], mine["time_s"] - before).mean())


def _server_s(plan: Plan, model: CostModel, meter: _Meter, size_bytes: int) -> dict[str, float]:
    """Seconds that the busiest server and the busiest way of a link were occupied."""
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
    """A table with one row for each prediction; they differ in λ."""
    kinds = [kind for kind in predictions[0].shares if any(p.shares[kind] for p in predictions)]
    columns = ["λ", "s/epoch", "speed-up", "samples/s", "staleness", "at most", *kinds]
    report = Report([*columns, "server", "link", "bound, s/epoch"])
    for p in predictions:
        shares = (f"{p.shares[kind]:.1%}" for kind in kinds)
        speed_up = f"{predictions[0].epoch_s / p.epoch_s:.2f}"
        counts = f"{p.samples_per_s:,.0f}", f"{p.mean_staleness:.2f}", str(p.max_staleness)
        loads = (f"{p.loads[name]:.1%}" for name in ("server", "link"))
        cells = f"{p.epoch_s:.4g}", speed_up, *counts, *shares, *loads, f"{p.bound} {p.bound_s:.4g}"
        report.rows.append((str(p.job.learners), *cells))
    updates = sorted({p.updates for p in predictions})
    simulated = f"{updates[0]:,} updates" if len(updates) == 1 else f"{updates[0]:,} to {updates[-1]:,} updates"
    report.notes = [
        "compute, push, wait, pull: of the learners' time; server, link: how long the busiest server and the",
        "busiest way of a link are occupied; bound: an epoch if all else were free.",
        f"From {simulated}; tests of weights do not count.",
        *dict.fromkeys(p.guessed for p in predictions if p.guessed),
    ]
    if any(p.workers for p in predictions):
        report.notes[2:3] = [f"From {simulated}, of whole epochs, the first left out; tests of weights do not count."]
    modelled = [p.efficiency for p in predictions if p.efficiency]
    teams = [_workers_text(p) for p in predictions if p.workers]
    return "\n\n".join([report.as_text(), *teams, *([efficiency_text(modelled)] if modelled else [])])
