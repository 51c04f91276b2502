"""Costs of virtual time that the rows of a recorded run identify.

Times of single learners come from their mini-batches. Costs of the network and of a server's messages come from the
shortest exchanges (`rudra.prepare.run_network`). All other costs come from a calibration or a preset, as without a run.
"""

import math
import socket
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rudra.core.buckets import copied
from rudra.core.messages import Rows
from rudra.errors import ConfigError, printable
from rudra.job.job import Job
from rudra.job.simulation import SimulationTable
from rudra.job.tables import OptimizerTable
from rudra.machine import cores
from rudra.prepare.early_rows import left_out
from rudra.prepare.points import at
from rudra.prepare.recorded_spread import Times, TimeSpread, spread_of
from rudra.prepare.run_banks import RowsAndBanks, hosts, without_banks
from rudra.prepare.run_network import ROWS, hosts_of, network_of_run, places_of
from rudra.results.identity import completed, tables_of
from rudra.results.reader import Results, open_results
from topologies import Plan

SUFFIXES = (".h5", ".hdf5")
"""Suffixes of result files."""

WARM = 5
"""Number of first mini-batches of each learner that do not count."""

SLOW = 1.15
"""A learner whose time differs by this factor counts as slower, or faster, than the others."""

COMMUNICATION_S = 4e-4
"""Core's time of a learner's communication threads for a mini-batch. No row shows it.

We measured it as the CPU time of the threads of `adv*` that do not compute, for LeNet on two cores of an AMD EPYC.
"""

_ENDS = 3  # ends of epochs with a wait, at least
_SAME = ("model.name", "model.options", "data.name", "data.options", "training.precision", "training.compile")
_NO_COSTS = {"costs", "faults", "detection_s", "tensors", "batching", "background_jobs", "machines", "nodes"}


@dataclass(frozen=True, slots=True)
class RunCosts:
    """Costs of a run.

    Attributes:
        keys: Keys of `[simulation]` that the rows identify.
        known: Other keys: of a calibration, or of the job of a simulated run.
        layout: Keys of the cluster's layout.
        slow: Learner -> factor on its time of a mini-batch, for learners that differ from the others.
        minibatches: Number of mini-batches that count.
        others: Origin of the other keys.
    """

    keys: dict[str, Any]
    known: dict[str, Any]
    layout: dict[str, Any]
    slow: dict[int, float]
    minibatches: int
    others: str

    def as_text(self) -> str:
        """Returns one line that says which costs come from the run."""
        named = [name for name in _QUANTITIES if any(key in self.keys for key in _QUANTITIES[name])]
        left = [name for name in _QUANTITIES if name not in named]
        rest = f"; from {self.others}: {', '.join(left)}" if left else ""
        return f"from {self.minibatches:,} mini-batches of the run: {', '.join(named)}{rest}"


_QUANTITIES = {
    "compute times": ("compute_s",),
    "banks": ("bank_s",),
    "slow learners": ("slowdown",),
    "jitter": ("jitter",),
    "latency": ("latency_s", "local_latency_s"),
    "bandwidth": ("bandwidth_bytes_per_s", "local_bandwidth_bytes_per_s"),
    "server's messages": ("message_s", "correction_s_per_byte"),
    "updates": ("update_s",),
    "additions": ("gradient_s",),
    "copies": ("copy_s_per_byte",),
    "evaluations": ("evaluation_s",),
}


def is_run(costs: str) -> bool:
    """Returns whether a source of costs is a result file."""
    return costs.endswith(SUFFIXES)


def costs_of(path: Path, job: Job, known: Mapping[str, Any]) -> RunCosts:
    """Returns the costs of a run for a job of the same model.

    Args:
        path: Result file of the run.
        job: Job to predict or simulate. Its number of learners decides the number of nodes.
        known: Keys of `[simulation]` from a calibration, which give the costs that the rows do not identify.

    Raises:
        ConfigError: The run is of another model, or has too few rows.
        ResultsError: The file cannot be read.
    """
    with open_results(path) as results:
        _check_model(results, job)
        return fitted(results, known, job.learners if job.cluster.learners else None)


def _check_model(results: Results, job: Job) -> None:
    ran, now = completed(results.job), tables_of(job)
    for name in _SAME:
        table, _, key = name.partition(".")
        then, wanted = ran[table][key], now[table][key]
        if then != wanted:
            raise ConfigError(
                f"[simulation] costs = '{results.path}': the run has {name} = {printable(str(then))}, not "
                f"{printable(str(wanted))}; use a run of this model, or `rudra calibrate`"
            )


def fitted(results: Results, known: Mapping[str, Any] | None = None, learners: int | None = None) -> RunCosts:
    """Fits costs to the rows of a run.

    Args:
        results: Results of the run.
        known: See `costs_of`.
        learners: Number of learners to predict. None: the run's.

    Raises:
        ConfigError: The rows do not suffice.
    """
    plan = results.plan()
    rows, banks = _rows(results, plan)
    others = "`rudra calibrate`" if known else "defaults"
    if results.attributes["driver"] == "simulation":
        own = completed(results.job)["simulation"]
        known = {key: value for key, value in own.items() if value is not None and key not in _NO_COSTS}
        others = "its job"
    known, layout = dict(known or {}), _layout(results, plan, learners or len(plan.learners))
    together, slowed = _together(plan), _slowed(results, known, _together(plan))
    count = learners or len(plan.learners)
    most = math.ceil(count / layout.get("nodes", count))
    if most > 1:
        known["node_slowdown"] = (slowed(most) - 1) / (most - 1)
    prior = SimulationTable(**{**known, **layout})
    size = sum(entry.size for entry in results.layout)
    parameters = sum(entry.size for entry in results.layout if entry.kind == "parameter")
    size_bytes, usual_s = size * 4, float(np.median(rows["compute_s"]))
    alone = () if plan.served else max(plan.groups, key=len, default=())
    early = np.isin(rows["learner"], _apart(results, plan))
    copies = copied(OptimizerTable(**completed(results.job)["optimizer"]).state_vectors)
    left_share = left_out(results.attributes, prior, (size, parameters), alone, usual_s, copies)
    rows["compute_s"][early] /= 1 - left_share
    apart = rows if banks else _in_turns(rows, plan)
    spread, compute_s, slow, jitter = _computations(apart, plan, slowed(together))
    own = {"slowdown": slow, "learner_jitter": jitter}
    left = {key: {number: value for number, value in of.items() if number < count} for key, of in own.items()}
    keys: dict[str, Any] = {"compute_s": compute_s, **left, **spread.keys()}
    keys |= {"bank_s": _bank_s(banks, compute_s)} if banks else {}
    update_s = _update_s(results, rows, plan)
    keys |= {} if update_s is None else {"update_s": update_s}
    keys |= network_of_run(results, rows, plan, prior, size_bytes, update_s or 0.0)
    copied_s = _copied_s(results)
    keys |= {} if copied_s is None else {"copy_s_per_byte": copied_s * len(plan.front_owners) / max(1, size_bytes)}
    evaluations = results.epochs["evaluation_s"]
    if (evaluations := evaluations[np.isfinite(evaluations)]).size:
        keys["evaluation_s"] = float(np.median(evaluations))
    return RunCosts(keys, known, layout, slow, len(rows), others)


def _rows(results: Results, plan: Plan) -> RowsAndBanks:
    """Returns the mini-batches that count, as single learners compute them.

    Raises:
        ConfigError: There are too few, or their times do not describe single learners.
    """
    where = f"[simulation] costs = '{results.path}'"
    if plan.scheduled or plan.stage is not None:
        what = "protocol hogbatch" if plan.scheduled else "layers on a stage server"
        raise ConfigError(
            f"{where}: is a run with {what}, whose times do not add up from its rows; use a file of `rudra calibrate`"
        )
    rows = results.minibatches
    if not len(rows) and len(results.updates):
        raise ConfigError(f"{where}: has no mini-batches; use a run with results.minibatches = true")
    banks: Mapping[int, float] = {}
    if completed(results.job)["cluster"]["learners_per_device"] is not None and plan.averaging and not plan.served:
        rows, banks = without_banks(rows, plan, where)
    # Dormant learners have none.
    counts = {int(learner): 0 for learner in np.unique(rows["learner"])} or {0: 0}
    rows = rows[(rows["step"] >= WARM) & (rows["compute_s"] > 0)]
    for learner, count in zip(*np.unique(rows["learner"], return_counts=True), strict=True):
        counts[int(learner)] = int(count)
    learner = min(counts, key=lambda each: counts[each])
    if banks:
        return RowsAndBanks(rows, banks)
    if counts[learner] < ROWS:
        raise ConfigError(
            f"{where}: learner {learner} has {counts[learner]} mini-batches after the first {WARM}; costs need {ROWS} "
            "of each learner: use a longer run"
        )
    return RowsAndBanks(rows, {})


def _layout(results: Results, plan: Plan, learners: int) -> dict[str, Any]:
    """Returns the nodes of a run with as many learners on each node as the recorded one."""
    simulated = results.attributes["driver"] == "simulation"
    found: dict[str, Any] = {}
    nodes = [plan.roles[role].node for role in plan.learners]
    count, each = len({*nodes}), math.ceil(len(nodes) / len({*nodes}))
    if not simulated:
        places = places_of(results, plan, near=False)
        found["servers_on_first_node"] = places[plan.server] == places[plan.learners[0]]
        if held := _cores(results):
            found["cores_per_node"] = max(1, held // int(results.attributes["threads_per_rank"]))
            found["communication_s"] = COMMUNICATION_S
    if len(nodes) == learners:
        found["nodes"] = count
    elif count == 1 and each > 1:
        found["nodes"] = 1
    elif each > 1:
        found["nodes"] = math.ceil(learners / each)
    return found


def _apart(results: Results, plan: Plan) -> list[int]:
    """Returns the learners whose weights come from another node. Without a server: all learners."""
    places = places_of(results, plan, near=True)
    served = {role: plan.roles[role].parent for role in plan.learners} if plan.served else {}
    return [
        plan.roles[role].index
        for role in plan.learners
        if (parent := served.get(role)) is None or places[role] != places[parent]
    ]


def _together(plan: Plan) -> int:
    """Returns the largest number of ranks with learners on a node."""
    ranks = {plan.roles[role].world_rank: plan.roles[role].node for role in plan.learners}
    return max(Counter(ranks.values()).values())


def _slowed(results: Results, known: Mapping[str, Any], together: int) -> Callable[[int], float]:
    """Returns a function that gives the factor on a learner's time for a number of ranks with learners on its node.

    Ranks share the cores of a node. If its number of cores is unknown, the ranks of the run had enough.
    """
    by, threads = known.get("node_slowdown"), int(results.attributes["threads_per_rank"])
    held = _cores(results) or (together * threads if by is None else math.inf)
    return lambda ranks: max(1.0, 1 + float(by or 0.0) * (ranks - 1), ranks * threads / held)


def _cores(results: Results) -> int | None:
    """Returns the number of cores of each node. None: it is unknown, or a simulation's job says what follows."""
    if results.attributes["driver"] == "simulation":
        return None
    found = results.attributes.get("cores_per_node")
    return found or (cores() if {*hosts_of(results)} == {socket.gethostname()} else None)


def _computations(
    rows: Rows, plan: Plan, slowed: float
) -> tuple[TimeSpread, dict[int, float], dict[int, float], dict[int, float]]:
    """Returns the spread of times, the time of a mini-batch of each size, slow learners, and jitters that differ."""
    sizes, counts = np.unique(rows["samples"], return_counts=True)
    main = int(sizes[counts.argmax()])
    times: dict[int, Times] = {}
    for role in plan.learners:
        number = plan.roles[role].index
        mine = np.sort(rows[rows["learner"] == number], order="step")
        if not len(mine):  # it was dormant
            continue
        own = mine["samples"].astype(float)
        # Sizes that differ between learners, or within one, are compared per sample.
        times[number] = mine["compute_s"] * (main / own)
    middles = {number: float(np.median(own)) for number, own in times.items()}
    usual = sorted(middles.values())[(len(middles) - 1) // 2]
    slow = {number: middle / usual for number, middle in middles.items() if not 1 / SLOW < middle / usual < SLOW}
    spread = spread_of({number: own / middles[number] for number, own in times.items()})
    alone_s = usual * spread.of_median / slowed
    slow = {number: round(factor, 4) for number, factor in slow.items()}
    return spread, {main: alone_s}, slow, spread.own


def _in_turns(rows: Rows, plan: Plan) -> Rows:
    """Returns the rows without the times that learners of one rank waited for their turns."""
    rank = hosts(plan)
    if len({*rank.tolist()}) == len(rank):
        return rows
    rows = rows[np.lexsort((rows["time_s"], rank[rows["learner"]]))]
    learners: NDArray[np.int32] = rows["learner"]
    same = np.diff(rank[learners]) == 0
    time_s: NDArray[np.float64] = rows["time_s"]
    compute_s: NDArray[np.float64] = rows["compute_s"][1:]
    compute_s[same] = np.minimum(compute_s, np.diff(time_s))[same]
    return rows[rows["compute_s"] > 0]


def _bank_s(banks: Mapping[int, float], compute_s: Mapping[int, float]) -> dict[int, dict[int, float]]:
    """Returns the times of banks on a node of their own."""
    ((size, alone_s),) = compute_s.items()
    scale = alone_s / at(banks, 1)
    return {m: {size: seconds * scale} for m, seconds in banks.items()}


def _update_s(results: Results, rows: Rows, plan: Plan) -> float | None:
    """Returns the time of an update of all weights."""
    taken = rows["update_s"] if plan.averaging else results.updates["update_s"]
    taken = taken[taken > 0]
    return float(np.median(taken)) * (1 if plan.averaging else len(plan.front_owners)) if len(taken) else None


def _copied_s(results: Results) -> float | None:
    """Returns the time of a server's copy of its weights at the end of an epoch. None: there are too few epochs.

    The last gradient of an epoch waits longer than the last gradient of any other update.
    """
    gradients, ends, rows = results.gradients, results.epochs["timestamp"], results.minibatches
    if len(ends) < _ENDS or not len(gradients):
        return None
    update: NDArray[np.int64] = gradients["update"]
    last = gradients[np.append(update[1:] != update[:-1], True)]
    steps = int(max(rows["step"].max(), last["step"].max())) + 1
    numbers = rows["learner"].astype(np.int64) * steps + rows["step"]
    order = np.argsort(numbers)
    wanted = last["learner"].astype(np.int64) * steps + last["step"]
    places = np.minimum(np.searchsorted(numbers[order], wanted), len(rows) - 1)
    waits = np.where(numbers[order][places] == wanted, rows["wait_s"][order][places], 0.0)
    at_end = np.isin(last["update"], ends)
    here, there = waits[at_end & (waits > 0)], waits[~at_end & (waits > 0)]
    if len(here) < _ENDS or len(there) < ROWS:
        return None
    return max(0.0, float(np.median(here) - np.median(there)))
