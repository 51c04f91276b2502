"""Invariants of every protocol and every topology, and the cases that `rudra check` runs to verify them.

A case is a small job in virtual time and without tensors, with learners of different speed. The invariants: no gradient
is lost or counted twice, clocks only advance, an update has as many gradients as the protocol requires, times add up,
and every run ends. A run that is resumed in the middle continues in the state of its checkpoint, and its updates have
as many gradients as in a run that never stopped. If the result does not depend on the learners' speed, the final
weights of the resumed run are bitwise identical.
"""

import traceback
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

import protocols
import topologies
from rudra import plugins
from rudra.core.actions import Save
from rudra.core.records import TIMES
from rudra.core.training_state import TrainingState
from rudra.errors import ConfigError
from rudra.job.job import Job
from rudra.prepare.nodes import nodes_of
from rudra.simulation.checked_run import TrialRows, timing, train
from topologies import Plan

SAMPLES = 4
TRAINING_SAMPLES = 90
"""Number of training samples per epoch of a case."""

REAL: dict[str, Any] = {
    "model": {"name": "mlp", "options": {"hidden": [4]}},
    "data": {"name": "digits", "train_limit": TRAINING_SAMPLES},
    "training": {"epochs": 2, "evaluate": False},
}
"""Job tables of a case that computes real gradients."""

NOISY = {
    "compute_s": 0.02,
    "jitter": 0.5,
    "latency_jitter_s": 0.01,
    "bandwidth_bytes_per_s": 1e8,
    "message_s": 1e-3,
    "update_s": 2e-3,
    "evaluation_s": 0.3,
}


def check_updates(run: Job, rows: TrialRows) -> None:
    """Checks the number and the order of the gradients of each update.

    With one server it is exactly c of them. A server of a tree sends several at a time, so an update may have more than
    c, but the excess is less than one message carries. With compute groups an update has exactly c gradients of whole
    groups, each group in group_rank order.
    """
    plan = run.plan(nodes_of(run))
    rule, gradients, sizes = run.make_protocol(plan), rows["gradients"], rows["updates"]["gradients"]
    c = rule.gradients_per_update
    assert len(gradients) == sizes.sum()
    assert np.array_equal(gradients["update"], np.repeat(np.arange(1, len(sizes) + 1), sizes))
    if protocols.own_update_due(rule):  # such a rule decides by itself how many it needs
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


def check_epochs(rows: TrialRows) -> None:
    """Checks that an epoch's means are over its updates' gradients, or absent if an update ended several epochs."""
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
    """Returns the largest number of gradients in one message. A role waits until it has enough, then may have more."""
    if plan.roles[role].kind_traits.trains:
        return 1
    return min(plan.learners_below(role), c) - 1 + max(carried(plan, child, c) for child in plan.children[role])


def check(run: Job, rows: TrialRows, samples: int) -> None:
    """Checks the invariants of counting and of the clock."""
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
    last = updates["gradients"][-1] * SAMPLES * run.make_protocol().period
    assert totals["samples"] >= run.training.epochs * samples > totals["samples"] - last
    assert list(epochs["epoch"]) == list(range(1, run.training.epochs + 1))
    assert epochs["evaluated"][-1] == 1
    apart_s = np.diff(updates["time_s"])
    assert (apart_s >= 0).all()
    if run.topology.name == "base" and not run.make_protocol().waits:
        assert (apart_s > 0).all(), "a learner gets the answer to its gradient before the next update"
    placed, parts = run.placement.given, len(run.plan().front_owners)
    share = (0.5 if run.placement.rule == "synchronous" else 0.5 / parts) if placed else 1 / parts
    assert (updates["update_s"] == run.simulation.update_s * share).all()
    tested = epochs[epochs["evaluated"] == 1]
    assert (tested["evaluation_began_s"] >= tested["time_s"]).all()
    check_times(run, rows)
    for learner in range(run.learners):
        mine = gradients[gradients["learner"] == learner]
        period = run.make_protocol().period  # only its last step is recorded
        assert np.array_equal(mine["step"], np.arange(period - 1, period * len(mine), period))
        assert (np.diff(mine["timestamp"]) >= 0).all(), "a learner never goes back to older weights"
    for learner in rows.learners:
        if run.topology.name == "adv*":
            assert learner["skipped_pulls"] == 0, "with adv* no learner requests weights"
        else:
            assert learner["pulls"] + learner["skipped_pulls"] <= learner["pushed"]


def check_times(run: Job, rows: TrialRows) -> None:
    """Checks that a learner's mini-batches follow each other without a gap, and add up to its totals."""
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


def check_stages(run: Job, rows: TrialRows) -> None:
    """Checks that the stage server computes and updates with the same weights, and with a whole group's batch."""
    stages, gradients = rows["stages"], rows["gradients"]
    plan = run.plan(nodes_of(run))
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


def saving(run: Job, samples: int) -> tuple[TrialRows, list[TrainingState]]:
    """Runs a job without tensors that saves after every update. Returns its rows, and the state of each checkpoint."""
    plan, saved = run.plan(nodes_of(run)), list[TrainingState]()

    def save(role: int, action: Save) -> None:
        if role == plan.server:
            saved.append(action.position)

    return timing(run.with_(results={"checkpoint_every": "1 update"}), samples, save=save), saved


def check_resumed(run: Job, whole: TrialRows, middle: TrainingState, samples: int) -> None:
    """Checks that a resumed run loses no gradient, applies none twice, and makes updates of the same sizes.

    Args:
        run: Job that was run.
        whole: Rows of the run that was not stopped.
        middle: State of one of its checkpoints.
        samples: Number of training samples per epoch.
    """
    plan = run.plan(nodes_of(run))
    rest = timing(run, samples, position=middle)
    if "updates" not in rest.tables:  # the checkpoint is the end of the run
        return
    before = whole["gradients"][whole["gradients"]["update"] <= middle.timestamp]
    gradients = np.concatenate([before, rest["gradients"]])
    assert rest.totals["applied"] == len(gradients), "gradients of before the checkpoint and of after it"
    assert (rest["gradients"]["timestamp"] < rest["gradients"]["update"]).all()
    period = run.make_protocol().period
    for learner in range(run.learners):
        steps = gradients["step"][gradients["learner"] == learner]
        assert np.array_equal(steps, np.arange(period - 1, period * len(steps), period)), "none twice, none left out"
    updates = rest["updates"]
    assert np.array_equal(updates["timestamp"], middle.timestamp + 1 + np.arange(len(updates)))
    if not plan.children or len(plan.learners) == len(plan.children[plan.server]):  # else several arrive at a time
        sizes = whole["updates"]["gradients"][middle.timestamp :]
        both = min(len(sizes), len(updates)) - 1  # the last one may end the run
        same = updates["gradients"][:both] == sizes[:both]
        assert same.all(), (
            f"update {middle.timestamp + 1 + same.argmin()} has {updates['gradients'][same.argmin()]} gradients when "
            f"the run is resumed after update {middle.timestamp}, else {sizes[same.argmin()]}: state() and restore()"
        )


def check_bits(run: Job) -> None:
    """Checks that a run of real gradients, resumed from its middle, has the weights of a run that was not stopped."""
    whole = train(run.with_(results={"checkpoint_every": "1 update"}))
    if whole.saved:
        middle = whole.saved[(len(whole.saved) - 1) // 2]
        resumed = train(run, resumed=middle)
        same = resumed.weights.numpy().tobytes() == whole.weights.numpy().tobytes()
        assert same, f"resumed after update {middle.position.timestamp}, its weights are not bitwise identical"


def determined(run: Job) -> bool:
    """Returns whether the result does not depend on the learners' speed: all learners wait for each other."""
    rule = run.make_protocol(run.plan(nodes_of(run)))
    if rule.averages:
        return not run.topology.options.get("parameter_server")
    return rule.ordered and rule.waits and rule.gradients_per_update == rule.learners


class Case(NamedTuple):
    """A small job that must satisfy the invariants, or be refused in one line.

    Attributes:
        name: Name to display.
        tables: Tables of the job, in addition to the tables that all cases share.
        real: Whether the case is also run with tensors.
    """

    name: str
    tables: dict[str, Any]
    real: bool = False

    def job(self) -> Job:
        """Returns the case's job, without tensors. Raises ConfigError."""
        training = {"epochs": 4, "minibatch_size": SAMPLES, "evaluate": True}
        run = Job(training=training, **self.tables).resolved()
        run.plan(nodes_of(run))
        return run

    def real_job(self) -> Job:
        """Returns the case's job, with a small network and few samples."""
        run = self.job()
        return run.with_(**REAL, cluster={"threads_per_rank": 1})


class CaseOutcome(NamedTuple):
    """Outcome of a case.

    Attributes:
        case: Name of the case.
        status: `"ok"`, `"refused"` or `"FAILED"`.
        text: Reason if the status is not ok.
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
    {"name": "replicas", "options": {"parameter_server": True}},
    {"name": "replicas", "options": {"groups": 2}},
    {"name": "hierarchical", "options": {"blocks": 3}},
)
"""Topologies for the checks of a protocol."""


def cases_of(protocol: dict[str, Any], topology: dict[str, Any] | None) -> Iterator[Case]:
    """Yields the cases of a protocol on a topology. Without one, yields its cases with suitable servers or replicas."""
    rule = {"protocol": {"modulation": "none", **protocol}}
    where = "" if topology is None else f", {_words(topology)}"
    on = {} if topology is None else {"topology": topology}
    if topology is None:
        for learners, slowdown in ((1, {}), (3, {}), (4, {0: 5.0}), (5, {4: 0.1, 2: 3.0})):
            about = {**NOISY, "slowdown": slowdown}
            yield Case(_count(learners), {**rule, "cluster": {"learners": learners}, "simulation": about})
        return
    for learners, nodes, slowdown in ((7, 3, {0: 5.0}), (5, 2, {4: 0.1, 2: 3.0}), (4, 1, {})):
        about = {**NOISY, "slowdown": slowdown, "nodes": nodes}
        name = f"{_count(learners)} on {nodes} node{'s' if nodes > 1 else ''}{where}"
        tables = {**rule, **on, "cluster": {"learners": learners}, "simulation": about}
        yield Case(name, tables, real=nodes == 1)
    for learners, nodes, per_rank in ((7, 2, 2), (5, 1, 3)):
        shared = {**NOISY, "slowdown": {0: 3.0}, "nodes": nodes, "cores_per_node": 1}
        cluster = {"learners": learners, "learners_per_rank": per_rank}
        tables = {**rule, **on, "cluster": cluster, "simulation": shared}
        yield Case(f"{_count(learners)}, {per_rank} on a rank{where}", tables)
    for placed in ("merged", "synchronous"):
        about = {**NOISY, "slowdown": {0: 5.0}, "nodes": 2}
        tables = {**rule, **on, "cluster": {"learners": 6}, "simulation": about}
        yield Case(f"6 learners, layers placed, {placed}{where}", {**tables, "placement": {"cut": 1, "rule": placed}})


CORRECTED_CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    *((name, {"name": "base"}) for name in ("async", "softsync", "hardsync")),
    *((name, {"name": "sharded"}) for name in ("async", "hardsync")),
    ("async", {"name": "groups", "options": {"groups": 2}}),
    ("hardsync", {"name": "groups", "options": {"groups": 1}}),
    ("sma", {"name": "replicas"}),
    ("easgd", {"name": "replicas", "options": {"parameter_server": True}}),
    ("async", {"name": "adv", "options": {"fan_out": 2}}),
)
"""Protocols and topologies for the checks of a correction."""


def cases_of_correction(protocol: dict[str, Any]) -> Iterator[Case]:
    """Yields the cases of a correction, all with tensors."""
    for name, topology in CORRECTED_CASES:
        about = {**NOISY, "slowdown": {0: 5.0}}
        rule = {"modulation": "none", **protocol, "name": name}
        tables = {"protocol": rule, "topology": topology, "cluster": {"learners": 4}, "simulation": about}
        yield Case(f"{name}, {_words(topology)}", tables, real=True)


def cases(target: str, tables: dict[str, dict[str, Any]]) -> Iterator[Case]:
    """Yields the cases of a user's class: a protocol, an averaging rule, a correction, or a topology.

    Args:
        target: `module:name`.
        tables: Keys of `[protocol]` and `[topology]` in addition to the name.

    Raises:
        ConfigError: The class is neither a protocol, an averaging rule, a correction nor a topology.
    """
    found: Any = plugins.resolve(target)
    if callable(getattr(found, "plan", None)):
        topology = {**tables.get("topology", {}), "name": target}
        for name in protocols.shipped():
            if not protocols.rule_of(name).schedules:  # such a rule has invariants of its own
                yield from cases_of({"name": name}, topology)
        return
    if isinstance(found, type) and issubclass(found, protocols.Correction):
        yield from cases_of_correction({**tables.get("protocol", {}), "correction": target})
        return
    if not (isinstance(found, type) and issubclass(found, protocols.Protocol)):
        kinds = "protocols.Protocol or protocols.Correction"
        raise ConfigError(f"{target}: is no class of {kinds}, and has no function plan, as topologies have")
    protocol = {**tables.get("protocol", {}), "name": target}
    if not found.averages:
        yield from cases_of(protocol, None)
    for topology in TOPOLOGY_CASES:
        yield from cases_of(protocol, topology)


def outcome(case: Case) -> CaseOutcome:
    """Runs a case, and checks the invariants."""
    try:
        run = case.job()
    except ConfigError as error:
        return CaseOutcome(case.name, "refused", str(error))
    try:
        rows, saved = saving(run, TRAINING_SAMPLES)
        check(run, rows, TRAINING_SAMPLES)
        if run.placement.given:
            check_stages(run, rows)
        if saved:  # otherwise the run had only one update
            check_resumed(run, rows, saved[(len(saved) - 1) // 2], TRAINING_SAMPLES)
        if case.real and determined(run):
            check_bits(case.real_job())
    except AssertionError as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return CaseOutcome(case.name, "FAILED", f"{error or place.line} ({place.name}, line {place.lineno})")
    except Exception as error:  # the user's own code may raise anything
        place = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return CaseOutcome(case.name, "FAILED", f"{what} ({place.filename}:{place.lineno})")
    return CaseOutcome(case.name, "ok")


def _count(learners: int) -> str:
    return f"{learners} learner{'s' if learners > 1 else ''}"


def _words(topology: dict[str, Any]) -> str:
    options = ", ".join(f"{key} = {value}" for key, value in topology.get("options", {}).items())
    return f"{topology['name']}{f' ({options})' if options else ''}"
