"""What must hold for every protocol and every topology, and the cases in which `rudra check` looks whether it does.

A case is a small job in virtual time and without tensors, with learners of unlike speed. The laws: no gradient is lost
or counted twice, clocks only grow, an update has as many gradients as the protocol says, times add up, every run ends.
"""

import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import protocols
import topologies
from rudra import plugins
from rudra.core.events import Event, Finish, Keep, Record
from rudra.core.records import TIMES
from rudra.errors import ConfigError
from rudra.job.job import Job
from rudra.roles import Machine
from rudra.roles.machine import States
from rudra.simulation.assembly import assemble
from rudra.simulation.costs import places
from rudra.simulation.driver import Check
from rudra.simulation.timing_only import TimingOnly
from topologies import Plan
from topologies.kinds import LEARNER

SIZE_BYTES = 350_000
"""Of a tensor on the wire."""
SAMPLES = 4


@dataclass
class Rows:
    """Keeps what a statistics server records."""

    tables: dict[str, list[npt.NDArray[Any]]] = field(default_factory=dict)
    totals: dict[str, float] = field(default_factory=dict)
    learners: npt.NDArray[Any] | None = None
    warnings: list[str] = field(default_factory=list)
    time_s: float = 0.0
    code: int = -1

    def record(self, action: Record) -> None:
        self.tables.setdefault(action.table, []).append(action.rows)

    def keep(self, role: int, action: Keep) -> None: ...

    def finish(self, role: int, action: Finish) -> None:
        names = action.totals.dtype.names or ()
        self.totals = dict(zip(names, action.totals[0].item(), strict=True))
        self.learners = action.learners

    def warn(self, name: str, text: str) -> None:
        self.warnings.append(f"{name}: {text}")

    def __getitem__(self, table: str) -> npt.NDArray[Any]:
        return np.concatenate(self.tables[table])


NOISY = {
    "compute_s": 0.02,
    "jitter": 0.5,
    "latency_jitter_s": 0.01,
    "bandwidth_bytes_per_s": 1e8,
    "message_s": 1e-3,
    "update_s": 2e-3,
    "evaluation_s": 0.3,
}


def check_updates(run: Job, rows: Rows) -> None:
    """Of how many gradients an update is made, and in which order they stand there.

    With one server it is exactly c of them. A tree brings several at a time, so it may be more, but by less than what
    one message carries. With compute groups it is exactly c gradients of whole groups, each in group_rank order.
    """
    plan = run.plan(places(run))
    rule, gradients, sizes = run.make_protocol(plan), rows["gradients"], rows["updates"]["gradients"]
    c = rule.gradients_per_update
    assert len(gradients) == sizes.sum()
    assert np.array_equal(gradients["update"], np.repeat(np.arange(1, len(sizes) + 1), sizes))
    if protocols.own_update_due(rule):  # how many it wants is its own affair
        return
    if plan.groups:
        members = [[plan.roles[role].index for role in group] for group in plan.groups]
        group_of = {learner: group for group in members for learner in group}
        units, place = np.zeros(len(sizes), int), 0
        while place < len(gradients):
            group = group_of[gradients["learner"][place]]
            unit = gradients[place : place + len(group)]
            assert list(unit["learner"]) == group
            assert all(len(set(unit[name])) == 1 for name in ("update", "step", "timestamp"))
            units[unit["update"][0] - 1] += 1
            place += len(group)
        assert (units == (len(plan.groups) if plan.averaging else c)).all()
    else:
        assert (sizes >= c).all()
        assert (sizes < c + max(carried(plan, child, c) for child in plan.children[plan.server])).all()
    if rule.ordered:
        assert np.array_equal(gradients["learner"], np.tile(np.arange(run.learners), len(sizes)))


def check_epochs(rows: Rows) -> None:
    """An epoch's means are over the gradients of its updates; it has none where an update ended several epochs."""
    gradients, updates = rows["gradients"], rows["updates"]
    of = updates["epoch"][gradients["update"] - 1]
    assert 1 <= updates["epoch"].min() <= updates["epoch"].max() <= len(rows["epochs"])
    for epoch in rows["epochs"]:
        mine = gradients[of == epoch["epoch"]]
        names = ("mean_staleness", "train_loss", "train_error")
        if not len(mine):
            assert all(np.isnan(epoch[name]) for name in names)
            continue
        total = mine["samples"].sum()
        means = mine["staleness"].mean(), (mine["loss"] @ mine["samples"]) / total, mine["errors"].sum() / total
        assert np.allclose([epoch[name] for name in names], means, rtol=1e-6, atol=0)


def carried(plan: Plan, role: int, c: int) -> int:
    """For how many gradients one message of a role may stand: it waits until it has enough, and then has a few more."""
    if plan.roles[role].kind == LEARNER:
        return 1
    return min(plan.learners_below(role), c) - 1 + max(carried(plan, child, c) for child in plan.children[role])


def validate(machine: Machine, before: States, event: Event) -> None:
    machine.validate()
    machine.validate_step(before, event)


def timing(job_: Job, training_samples: int, after: Check = validate) -> Rows:
    """Runs a job without tensors and checks every invariant after every event.

    Args:
        job_: what to run.
        training_samples: of one epoch.
        after: what to do with a machine after each of its events.
    """
    plan = job_.plan(places(job_))
    rows, tensors = Rows(), TimingOnly()
    simulation = assemble(
        job_, plan, tensors, rows, training_samples=training_samples, size_bytes=SIZE_BYTES, check=after
    )
    rows.time_s = simulation.run()
    rows.code = simulation.code
    return rows


def check(run: Job, rows: Rows, samples: int) -> None:
    """The laws of counting and of the clock."""
    totals, updates, gradients, epochs = rows.totals, rows["updates"], rows["gradients"], rows["epochs"]
    assert rows.learners is not None
    assert totals["pushed"] == rows.learners["pushed"].sum() == totals["applied"] + totals["discarded"]
    assert (totals["pending"], totals["lost"]) == (0, 0)
    assert np.array_equal(updates["timestamp"], np.arange(1, len(updates) + 1))
    assert totals["applied"] == len(gradients)
    check_updates(run, rows)
    check_epochs(rows)
    assert (gradients["staleness"] == gradients["update"] - 1 - gradients["timestamp"]).all()
    assert (gradients["staleness"] >= 0).all()
    needed = run.training.epochs * samples
    assert (
        totals["samples"]
        >= needed
        > totals["samples"] - updates["gradients"][-1] * SAMPLES * run.make_protocol().period
    )
    assert list(epochs["epoch"]) == list(range(1, run.training.epochs + 1))
    assert epochs["evaluated"][-1] == 1
    apart_s = np.diff(updates["time_s"])
    assert (apart_s >= 0).all()
    if run.topology.name == "base" and not run.make_protocol().waits:
        assert (apart_s > 0).all(), "whose gradient made an update is answered before the next"
    placed, parts = run.placement.given, len(run.plan().front_owners)
    share = (0.5 if run.placement.rule == "synchronous" else 0.5 / parts) if placed else 1 / parts
    assert (updates["update_s"] == run.simulation.update_s * share).all()
    tested = epochs[epochs["evaluated"] == 1]
    assert (tested["evaluation_began_s"] >= tested["time_s"]).all()
    check_times(run, rows)
    for learner in range(run.learners):
        mine = gradients[gradients["learner"] == learner]
        period = run.make_protocol().period  # of which the last step counts
        assert np.array_equal(mine["step"], np.arange(period - 1, period * len(mine), period))
        assert (np.diff(mine["timestamp"]) >= 0).all(), "nobody goes back to older weights"
    for learner in rows.learners:
        if run.topology.name == "adv*":
            assert learner["skipped_pulls"] == 0, "nobody asks"
        else:
            assert learner["pulls"] + learner["skipped_pulls"] <= learner["pushed"]


def check_times(run: Job, rows: Rows) -> None:
    """Mini-batches of a learner follow each other without a gap, and add up to its account."""
    minibatches = rows["minibatches"]
    assert rows.learners is not None
    for learner, account in enumerate(rows.learners):
        mine = minibatches[minibatches["learner"] == learner]
        ends = mine["time_s"] + sum(mine[name] for name in TIMES[1:])
        begins = mine["time_s"] - mine["compute_s"]
        assert np.allclose(begins[1:], ends[:-1])
        for name in TIMES:
            assert (mine[name] >= 0).all()
            assert np.isclose(mine[name].sum(), account[name])


def check_stages(run: Job, rows: Rows) -> None:
    """The stage server computes and updates with the same weights, and with those of a whole group's batch."""
    stages, gradients = rows["stages"], rows["gradients"]
    plan = run.plan(places(run))
    assert not stages["staleness"].any()
    stamps, parts = np.unique(stages["timestamp"], return_counts=True)
    assert np.array_equal(stamps, np.arange(1, len(stamps) + 1)), "one update after the other"
    of = {(row["learner"], row["step"]): row["front"] for row in stages}
    assert len(of) == len(stages)
    assert all(of[row["learner"], row["step"]] == row["timestamp"] for row in gradients)
    if run.placement.rule == "merged":
        numbers = {plan.roles[role].index: plan.group_of(role) for role in plan.learners}
        for stamp, count in zip(stamps, parts, strict=True):
            learners = stages["learner"][stages["timestamp"] == stamp]
            members = [plan.roles[role].index for role in numbers[int(learners[0])]]
            assert list(learners) == members
            assert count == len(members)


class Case(NamedTuple):
    """A small job that must follow the laws, or be refused in one line.

    Attributes:
        name: for people.
        tables: of the job, beside those that all cases have.
    """

    name: str
    tables: dict[str, Any]


class Outcome(NamedTuple):
    """What came of a case.

    Attributes:
        case: its name.
        status: `"ok"`, `"refused"` or `"FAILED"`.
        text: why, where it is not ok.
    """

    case: str
    status: str
    text: str = ""


TOPOLOGY_CASES: tuple[dict[str, Any], ...] = (
    *({"name": name} for name in topologies.shipped()),
    {"name": "adv", "options": {"fan_out": 2}},
    {"name": "adv", "options": {"fan_out": [1, 2]}},
    {"name": "adv*", "options": {"fan_out": [2, 3], "weight_fan_out": 1}},
    {"name": "groups", "options": {"groups": 3}},
    {"name": "replicas", "options": {"server": True}},
    {"name": "replicas", "options": {"groups": 2}},
    {"name": "hierarchical", "options": {"blocks": 3}},
)
"""Topologies on which a protocol is checked."""


def cases_of(protocol: dict[str, Any], topology: dict[str, Any] | None) -> Iterator[Case]:
    """The cases of a protocol on a topology; without one, those with servers or replicas that it has by itself."""
    rule = {"protocol": {"modulation": "none", **protocol}}
    where = "" if topology is None else f", {_words(topology)}"
    on = {} if topology is None else {"topology": topology}
    if topology is None:
        for learners, slowdown in ((1, {}), (3, {}), (4, {0: 5.0}), (5, {4: 0.1, 2: 3.0})):
            about = {**NOISY, "slowdown": slowdown}
            yield Case(f"{_count(learners)}", {**rule, "cluster": {"learners": learners}, "simulation": about})
        return
    for learners, nodes, slowdown in ((7, 3, {0: 5.0}), (5, 2, {4: 0.1, 2: 3.0}), (4, 1, {})):
        about = {**NOISY, "slowdown": slowdown, "nodes": nodes}
        yield Case(
            f"{_count(learners)} on {nodes} node{'s' if nodes > 1 else ''}{where}",
            {**rule, **on, "cluster": {"learners": learners}, "simulation": about},
        )
    shared = {**NOISY, "slowdown": {0: 3.0}, "nodes": 2, "cores_per_node": 1}
    cluster = {"learners": 7, "learners_per_rank": 2}
    yield Case(f"7 learners, 2 on a rank{where}", {**rule, **on, "cluster": cluster, "simulation": shared})
    for placed in ("merged", "synchronous"):
        about = {**NOISY, "slowdown": {0: 5.0}, "nodes": 2}
        tables = {**rule, **on, "cluster": {"learners": 6}, "simulation": about}
        yield Case(f"6 learners, layers placed, {placed}{where}", {**tables, "placement": {"cut": 1, "rule": placed}})


def cases(target: str, tables: dict[str, dict[str, Any]]) -> Iterator[Case]:
    """The cases of a user's class: a protocol, a rule of averaging, or a topology.

    Args:
        target: `module:name`.
        tables: keys of `[protocol]` and `[topology]` beside the name.

    Raises:
        ConfigError: it is none of them.
    """
    found: Any = plugins.resolve(target)
    if callable(getattr(found, "plan", None)):
        topology = {**tables.get("topology", {}), "name": target}
        for name in protocols.shipped():
            if not issubclass(protocols.rule_of(name), protocols.Hogbatch):  # which has workers
                yield from cases_of({"name": name}, topology)
        return
    if not (isinstance(found, type) and issubclass(found, protocols.Protocol)):
        raise ConfigError(f"{target}: is no class of protocols.Protocol, and has no function plan, as topologies have")
    protocol = {**tables.get("protocol", {}), "name": target}
    averages = issubclass(found, protocols.Averaging)
    if not averages:
        yield from cases_of(protocol, None)
    for topology in TOPOLOGY_CASES:
        yield from cases_of(protocol, topology)


def outcome(case: Case) -> Outcome:
    """Runs a case, and looks whether the laws hold."""
    training = {"epochs": 4, "minibatch_size": SAMPLES, "evaluate": True}
    try:
        run = Job(training=training, **case.tables).resolved()
        run.plan(places(run))
    except ConfigError as error:
        return Outcome(case.name, "refused", str(error))
    try:
        rows = timing(run, 90)
        check(run, rows, 90)
        if run.placement.given:
            check_stages(run, rows)
    except AssertionError as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return Outcome(case.name, "FAILED", f"{error or place.line} ({place.name}, line {place.lineno})")
    except Exception as error:  # the user's own code raises what it likes
        place = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return Outcome(case.name, "FAILED", f"{what} ({place.filename}:{place.lineno})")
    return Outcome(case.name, "ok")


def _count(learners: int) -> str:
    return f"{learners} learner{'s' if learners > 1 else ''}"


def _words(topology: dict[str, Any]) -> str:
    options = ", ".join(f"{key} = {value}" for key, value in topology.get("options", {}).items())
    return f"{topology['name']}{f' ({options})' if options else ''}"
