"""Costs of the network and of a server's messages that the exchanges of a recorded run identify.

They come from the shortest exchanges, which met no other exchange. An exchange of a learner with its server has three
recorded parts. Without contention

- a push takes `latency_s` and the transfer of a gradient,
- a wait takes `message_s`, the server's correction, additions and update, and `latency_s`,
- a pull takes the transfer of the weights.

The reduction of a group of k learners takes 2 `latency_s`, 2 (k - 1)/k transfers, and (k - 1)/k additions.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from protocols import corrections
from rudra.core.messages import Rows
from rudra.core.wire import tail_bytes
from rudra.job.simulation import SimulationTable
from rudra.prepare.recorded_spread import Times
from rudra.results.identity import completed
from rudra.results.reader import Results
from topologies import Plan

ROWS = 20
"""Minimum number of rows that identify a cost."""

_FLOOR = 0.1


def network_of_run(
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
    places = places_of(results, plan, near=prior.servers_on_first_node)
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
    if wait_s is None or plan.sharded or parent not in plan.owners:
        return found
    handling_s = max(0.0, wait_s - latency_s - _handled_s(results, plan, prior, size_bytes, update_s))
    if _correction(results) is None:
        return found | {"message_s": handling_s}
    # The rows do not separate the two, and a correction takes more time than a message.
    return found | {"correction_s_per_byte": max(0.0, handling_s - prior.message_s) / max(1, size_bytes)}


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
    places = places_of(results, plan, near=prior.servers_on_first_node)
    local = len({places[role] for role in members}) == 1
    if push_s is None:
        latency_s = prior.latency_s if not local or prior.local_latency_s is None else prior.local_latency_s
    else:
        latency_s = max(0.0, (rest_s - 2 * share * push_s) / (2 - 2 * share))
    transfer_s = max((rest_s - 2 * latency_s) / (2 * share), 1e-9)
    return _keys(local, None if push_s is None else latency_s, (size_bytes + tail_bytes(1)) / transfer_s)


def _floor(times: Times, most: float) -> float | None:
    """Returns the time of exchanges without contention. None: there are none."""
    times = times[times > 0]
    return float(np.quantile(times, most, method="lower")) if len(times) >= ROWS else None


def _keys(local: bool, latency_s: float | None, bytes_per_s: float) -> dict[str, Any]:
    kind = "local_" if local else ""
    found = {f"{kind}latency_s": latency_s, f"{kind}bandwidth_bytes_per_s": bytes_per_s}
    return {key: value for key, value in found.items() if value is not None}


def _added_s(prior: SimulationTable, size_bytes: int) -> float:
    per_byte = prior.gradient_s_per_byte
    return prior.gradient_s if per_byte is None else per_byte * size_bytes


def _handled_s(results: Results, plan: Plan, prior: SimulationTable, size_bytes: int, update_s: float) -> float:
    """Returns the time of a server's additions, updates and copies in the shortest waits."""
    per_update = int(results.attributes["gradients_per_update"])
    if per_update == 1:
        rule = corrections().get(str(_correction(results)))
        copied = rule is not None and rule.needs_pulled_weights and len(plan.learners) > 1  # of one other learner
        return update_s + copied * prior.copy_s_per_byte * size_bytes
    # If not all gradients make an update, the shortest waits are for a gradient that begins a sum.
    return update_s + _added_s(prior, size_bytes) if per_update == len(plan.learners) and _ordered(results) else 0.0


def _correction(results: Results) -> str | None:
    name: str | None = completed(results.job)["protocol"]["correction"]
    return name


def _ordered(results: Results) -> bool:
    return str(results.attributes["protocol"]) == "hardsync"


def places_of(results: Results, plan: Plan, *, near: bool) -> Sequence[object]:
    """Returns the node of each role: its host, or its node in virtual time."""
    hosts = hosts_of(results)
    if len(hosts) < plan.ranks:
        return plan.nodes(near=near)
    return [hosts[role.world_rank] for role in plan.roles]


def hosts_of(results: Results) -> Sequence[str]:
    return results.attributes.get("hosts") or ()
