"""Costs of virtual time that the rows of a recorded run identify.

Times of single learners come from their mini-batches. Costs of the network come from the shortest exchanges, which met
no other exchange. All other costs come from a calibration or a preset, as without a run.

An exchange of a learner with its server has three recorded parts. Without contention

- a push takes `latency_s` and the transfer of a gradient,
- a wait takes `message_s`, the server's additions and update, and `latency_s`,
- a pull takes the transfer of the weights.

The reduction of a group of k learners takes 2 `latency_s`, 2 (k - 1)/k transfers, and (k - 1)/k additions.
"""

import math
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rudra.core.messages import Rows
from rudra.core.wire import tail_bytes
from rudra.errors import ConfigError, printable
from rudra.job.job import Job
from rudra.job.simulation import SimulationTable
from rudra.machine import cores
from rudra.prepare.recorded_spread import Times, TimeSpread, spread_of
from rudra.results.identity import completed, tables_of
from rudra.results.reader import Results, open_results
from topologies import Plan

SUFFIXES = (".h5", ".hdf5")
"""Suffixes of result files."""

WARM, ROWS = 5, 20
"""Number of first mini-batches of each learner that do not count, and minimum number of the others."""

SLOW = 1.15
"""A learner whose time differs by this factor counts as slower, or faster, than the others."""

_FLOOR = 0.1
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
    "slow learners": ("slowdown",),
    "jitter": ("jitter",),
    "latency": ("latency_s", "local_latency_s"),
    "bandwidth": ("bandwidth_bytes_per_s", "local_bandwidth_bytes_per_s"),
    "server's messages": ("message_s",),
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
    rows = _rows(results, plan)
    others = "`rudra calibrate`" if known else "defaults"
    if results.attributes["driver"] == "simulation":
        own = completed(results.job)["simulation"]
        known = {key: value for key, value in own.items() if value is not None and key not in _NO_COSTS}
        others = "its job"
    known, layout = dict(known or {}), _layout(results, plan, learners or len(plan.learners))
    together, slowed = _together(plan), _slowed(results, known, _together(plan))
    count = learners or len(plan.learners)
    most = math.ceil(count / layout.get("nodes", count))
    if "node_slowdown" not in known and most > 1:
        known["node_slowdown"] = (slowed(most) - 1) / (most - 1)
    prior = SimulationTable(**{**known, **layout})
    size_bytes = sum(entry.size for entry in results.layout) * 4
    spread, compute_s, slow, jitter = _computations(rows, plan, slowed(together))
    keys: dict[str, Any] = {"compute_s": compute_s, "slowdown": slow, "learner_jitter": jitter, **spread.keys()}
    update_s = _update_s(results, rows, plan)
    keys |= {} if update_s is None else {"update_s": update_s}
    keys |= _network(results, rows, plan, prior, size_bytes, update_s or 0.0)
    copied_s = _copied_s(results)
    keys |= {} if copied_s is None else {"copy_s_per_byte": copied_s * len(plan.front_owners) / max(1, size_bytes)}
    evaluations = results.epochs["evaluation_s"]
    if (evaluations := evaluations[np.isfinite(evaluations)]).size:
        keys["evaluation_s"] = float(np.median(evaluations))
    return RunCosts(keys, known, layout, slow, len(rows), others)


def _rows(results: Results, plan: Plan) -> Rows:
    """Returns the mini-batches that count.

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
    counts = {plan.roles[role].index: 0 for role in plan.learners}
    rows = rows[(rows["step"] >= WARM) & (rows["compute_s"] > 0)]
    for learner, count in zip(*np.unique(rows["learner"], return_counts=True), strict=True):
        counts[int(learner)] = int(count)
    learner = min(counts, key=lambda each: counts[each])
    if counts[learner] < ROWS:
        raise ConfigError(
            f"{where}: learner {learner} has {counts[learner]} mini-batches after the first {WARM}; costs need {ROWS} "
            "of each learner: use a longer run"
        )
    return rows


def _layout(results: Results, plan: Plan, learners: int) -> dict[str, Any]:
    """Returns the nodes of a run with as many learners on each node as the recorded one."""
    simulated = results.attributes["driver"] == "simulation"
    found: dict[str, Any] = {}
    nodes = [plan.roles[role].node for role in plan.learners]
    count, each = len({*nodes}), math.ceil(len(nodes) / len({*nodes}))
    if not simulated:
        places = _places(results, plan, near=False)
        found["servers_on_first_node"] = places[plan.server] == places[plan.learners[0]]
    if len(nodes) == learners:
        found["nodes"] = count
    elif count == 1 and each > 1:
        found["nodes"] = 1
    elif each > 1:
        found["nodes"] = math.ceil(learners / each)
    return found


def _together(plan: Plan) -> int:
    """Returns the largest number of ranks with learners on a node."""
    ranks = {plan.roles[role].world_rank: plan.roles[role].node for role in plan.learners}
    return max(Counter(ranks.values()).values())


def _slowed(results: Results, known: Mapping[str, Any], together: int) -> Callable[[int], float]:
    """Returns a function that gives the factor on a learner's time for a number of ranks with learners on its node.

    Without a calibration, ranks share the cores of this machine. On other machines the ranks of the run had enough.
    """
    by = known.get("node_slowdown")
    if by is not None:
        return lambda ranks: 1 + float(by) * (ranks - 1)
    threads = int(results.attributes["threads_per_rank"])
    held = cores() if {*_hosts(results)} == {socket.gethostname()} else together * threads
    return lambda ranks: max(1.0, ranks * threads / held)


def _places(results: Results, plan: Plan, *, near: bool) -> Sequence[object]:
    """Returns the node of each role: its host, or its node in virtual time."""
    hosts = _hosts(results)
    if len(hosts) < plan.ranks:
        return plan.nodes(near=near)
    return [hosts[role.world_rank] for role in plan.roles]


def _hosts(results: Results) -> Sequence[str]:
    return results.attributes.get("hosts") or ()


def _computations(
    rows: Rows, plan: Plan, slowed: float
) -> tuple[TimeSpread, dict[int, float], dict[int, float], dict[int, float]]:
    """Returns the spread of times, the time of a mini-batch of each size, slow learners, and jitters that differ."""
    sizes, counts = np.unique(rows["samples"], return_counts=True)
    main = int(sizes[counts.argmax()])
    rows = _in_turns(rows, plan)
    times: dict[int, Times] = {}
    for role in plan.learners:
        number = plan.roles[role].index
        mine = np.sort(rows[rows["learner"] == number], order="step")
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
    rank = np.zeros(plan.learner_numbers, np.int64)
    for role in plan.learners:
        rank[plan.roles[role].index] = plan.roles[role].world_rank
    if len({*rank.tolist()}) == len(rank):
        return rows
    rows = rows[np.lexsort((rows["time_s"], rank[rows["learner"]]))]
    same = np.diff(rank[rows["learner"]]) == 0
    rows["compute_s"][1:][same] = np.minimum(rows["compute_s"][1:], np.diff(rows["time_s"]))[same]
    return rows[rows["compute_s"] > 0]


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
    last = gradients[np.append(gradients["update"][1:] != gradients["update"][:-1], True)]
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


def _floor(times: Times, most: float) -> float | None:
    """Returns the time of exchanges without contention. None: there are none."""
    times = times[times > 0]
    return float(np.quantile(times, most, method="lower")) if len(times) >= ROWS else None


def _network(
    results: Results, rows: Rows, plan: Plan, prior: SimulationTable, size_bytes: int, update_s: float
) -> dict[str, Any]:
    """Returns latency, bandwidth and time of a message, as far as the exchanges of learners identify them."""
    most = min(_FLOOR, 0.5 / len(plan.learners))  # in each step of hardsync, one learner meets no other
    groups = [members for members in plan.groups if len(members) > 1]
    found: dict[str, Any] = {}
    if groups and plan.reduction == "ordered":
        found = _of_group(results, plan, prior, max(groups, key=len), rows, size_bytes, update_s)
    elif not groups and not plan.overlapped and not plan.averaging:
        found = _of_server(results, rows, plan, prior, most, size_bytes, update_s)
    attributes = results.attributes
    latency_s, bytes_per_s = attributes.get("network_latency_s"), attributes.get("network_bytes_per_s")
    if not latency_s or not bytes_per_s:  # on one node
        return found
    measured = _keys(False, latency_s, bytes_per_s)
    # Buckets hide a part of the exchanges between nodes.
    return found | measured if attributes.get("bucket_bytes") else measured | found


def _of_server(
    results: Results,
    rows: Rows,
    plan: Plan,
    prior: SimulationTable,
    most: float,
    size_bytes: int,
    update_s: float,
) -> dict[str, Any]:
    """Returns the costs of exchanges between single learners and their server."""
    parent = plan.roles[plan.learners[0]].parent
    if parent is None:
        return {}
    places = _places(results, plan, near=prior.servers_on_first_node)
    apart = [role for role in plan.children[parent] if places[role] != places[parent]]
    chosen = np.isin(rows["learner"], [plan.roles[role].index for role in apart or plan.children[parent]])
    push_s, wait_s, pull_s = (_floor(rows[f"{name}_s"][chosen], most) for name in ("push", "wait", "pull"))
    if push_s is None or pull_s is None:
        return {}
    if plan.sharded:  # all parts cross the learner's own link, most often one after the other
        push_s, pull_s = (float(np.median(rows[name][chosen & (rows[name] > 0)])) for name in ("push_s", "pull_s"))
    transfer_s = max(min(push_s, pull_s), 1e-9)
    latency_s = max(0.0, push_s - transfer_s)
    found = _keys(not apart, latency_s, (size_bytes + tail_bytes(1)) / transfer_s)
    if wait_s is not None and not plan.sharded and parent in plan.owners:
        found["message_s"] = max(0.0, wait_s - latency_s - _handled_s(results, plan, prior, size_bytes, update_s))
    return found


def _of_group(
    results: Results,
    plan: Plan,
    prior: SimulationTable,
    members: Sequence[int],
    rows: Rows,
    size_bytes: int,
    update_s: float,
) -> dict[str, Any]:
    """Returns the costs of a reduction. A push also identifies the latency."""
    reduce_s, push_s = (_floor(rows[f"{name}_s"], min(_FLOOR, 0.5 / len(members))) for name in ("reduce", "push"))
    if reduce_s is None:
        return {}
    share = (len(members) - 1) / len(members)
    rest_s = reduce_s - _added_s(prior, size_bytes) * share - (update_s if plan.averaging else 0.0)
    places = _places(results, plan, near=prior.servers_on_first_node)
    local = len({places[role] for role in members}) == 1
    if push_s is None:
        latency_s = prior.latency_s if not local or prior.local_latency_s is None else prior.local_latency_s
    else:
        latency_s = max(0.0, (rest_s - 2 * share * push_s) / (2 - 2 * share))
    transfer_s = max((rest_s - 2 * latency_s) / (2 * share), 1e-9)
    return _keys(local, None if push_s is None else latency_s, (size_bytes + tail_bytes(1)) / transfer_s)


def _keys(local: bool, latency_s: float | None, bytes_per_s: float) -> dict[str, Any]:
    kind = "local_" if local else ""
    found = {f"{kind}latency_s": latency_s, f"{kind}bandwidth_bytes_per_s": bytes_per_s}
    return {key: value for key, value in found.items() if value is not None}


def _added_s(prior: SimulationTable, size_bytes: int) -> float:
    per_byte = prior.gradient_s_per_byte
    return prior.gradient_s if per_byte is None else per_byte * size_bytes


def _handled_s(results: Results, plan: Plan, prior: SimulationTable, size_bytes: int, update_s: float) -> float:
    """Returns the time of a server's additions and updates in the shortest waits."""
    per_update = int(results.attributes["gradients_per_update"])
    if per_update == 1:
        return update_s
    # If not all gradients make an update, the shortest waits are for a gradient that begins a sum.
    return update_s + _added_s(prior, size_bytes) if per_update == len(plan.learners) and _ordered(results) else 0.0


def _ordered(results: Results) -> bool:
    return str(results.attributes["protocol"]) == "hardsync"
