"""What every protocol must do in virtual time, the shipped ones and a user's own, on every topology that it fits."""

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from clusters import Rows, job, timing
from pages import names_in, page

import protocols
from protocols import Averaging, Protocol
from rudra.cli.main import main
from rudra.errors import ConfigError
from rudra.job.job import Job
from rudra.simulation.conformance import NOISY, TOPOLOGY_CASES, check, check_stages
from rudra.simulation.costs import places

PAGE = page("own-rules.md")
Bounded = names_in(PAGE, "bounded.py")["Bounded"]
Racks = names_in(PAGE, "racks.py")["Racks"]


class Eager(Protocol):
    """Adds in learner order, but lets everybody go on at once: gradients queue up at the server."""

    ordered = True

    def __init__(self, learners: int) -> None:
        super().__init__(learners)
        self.gradients_per_update = learners


RULES: list[dict[str, Any]] = [
    *({"name": name} for name in protocols.shipped() if name != "hogbatch"),  # has workers: test_hogbatch
    {"name": "softsync", "n": 2},
    {"name": "softsync", "n": 3},
    {"name": Bounded},
    {"name": Bounded, "options": {"ahead": 0, "gradients": 3}},
    {"name": Eager},
]
TOPOLOGIES: list[dict[str, Any]] = [*TOPOLOGY_CASES, {"name": Racks}]
ASYNC, DILOCO = {"name": "async"}, {"name": "diloco"}  # whose first average ends the training here
SUITS = {name: {"name": "easgd"} for name in ("replicas", "hierarchical")}
"""A protocol that a topology takes, if not `ASYNC`."""


def averages(rule: dict[str, Any]) -> bool:
    return issubclass(protocols.rule_of(rule["name"]) if isinstance(rule["name"], str) else rule["name"], Averaging)


def text(rule: Any) -> str:
    return "-".join(str(getattr(value, "__name__", value)) for value in rule.values()) if isinstance(rule, dict) else ""


def conform(rule: dict[str, Any], learners: int, samples: int = 90, epochs: int = 4, **simulation: Any) -> Job:
    run = job("async", learners, epochs=epochs, simulation={**NOISY, **simulation})
    topology = {"name": "replicas"} if averages(rule) else {}
    return run.with_(protocol={"modulation": "none", **rule}, topology=topology)


@pytest.mark.parametrize("rule", RULES, ids=text)
@pytest.mark.parametrize(("learners", "slowdown"), [(3, {}), (4, {0: 5.0}), (5, {4: 0.1, 2: 3.0})])
def test_every_protocol_ends_and_counts_right(rule: dict[str, Any], learners: int, slowdown: dict[int, float]) -> None:
    run = conform(rule, learners, slowdown=slowdown)
    check(run, timing(run, 90), 90)


def refused(rule: dict[str, Any], topology: dict[str, Any], tree: bool) -> str:
    """Why a protocol cannot work on a topology; empty if it can."""
    if averages(rule) != (topology["name"] in SUITS):
        return "averages replicas of the learners" if averages(rule) else r"average replicas there|n = \d, with [12] "
    if topology["name"] == "hierarchical" and rule["name"] not in {"easgd", "sma"}:
        return "replicas are corrected before they step; valid protocols: easgd, sma"
    if averages(rule) and "server" in topology.get("options", {}) and rule["name"] != "easgd":
        return "lets each replica exchange with the weights alone; valid with protocol easgd"
    made = protocols.make(rule["name"], learners=4, minibatch_size=4, n=rule.get("n"), options=rule.get("options"))
    by_pushes = made.waits and made.grants_on_push
    if topology["name"] == "groups" and "options" not in topology:
        if rule.get("n", 1) > 1:
            return rf"n = {rule['n']}, with 1"
        if rule.get("options", {}).get("gradients", 1) > 1:
            return "one compute group alone updates by each of its averages, but protocol \\w+ wants 3 for an update"
    if topology["name"] == "adv*" and made.waits:
        return r"never wait for a server, but with protocol \w+ they must; valid: softsync, async, or topology adv"
    if tree and by_pushes:
        return "decides by what every learner has pushed, which servers of a tree do not know; valid: topology base"
    if tree and rule.get("modulation") == "gradient_staleness":
        return "weighs each gradient .* but a tree has averaged them by then; valid: topology base, or modulation"
    return ""


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=text)
@pytest.mark.parametrize("rule", [*RULES, {"name": "async", "modulation": "gradient_staleness"}], ids=text)
def test_every_protocol_on_every_topology_counts_right_or_is_refused(
    rule: dict[str, Any], topology: dict[str, Any]
) -> None:
    for learners, nodes, slowdown in ((7, 3, {0: 5.0}), (5, 2, {4: 0.1, 2: 3.0}), (4, 1, {})):
        run = conform(SUITS.get(topology["name"], ASYNC), learners, slowdown=slowdown, nodes=nodes)
        run = run.with_(topology=topology)
        tree = any(role.kind == "tree server" for role in run.plan(places(run)).roles)
        reason = refused(rule, topology, tree)
        if reason:
            with pytest.raises(ConfigError, match=reason) as raised:
                run.with_(protocol={"modulation": "none", **rule}).plan(places(run))
            assert "\n" not in str(raised.value)
            continue
        run = run.with_(protocol={"modulation": "none", **rule})
        check(run, timing(run, 90), 90)


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=text)
@pytest.mark.parametrize("rule", RULES, ids=text)
def test_learners_may_share_ranks_with_every_protocol_on_every_topology(
    rule: dict[str, Any], topology: dict[str, Any]
) -> None:
    for learners, nodes, per_rank in ((7, 2, 2), (5, 1, 3)):
        run = conform(SUITS.get(topology["name"], ASYNC), learners, nodes=nodes, slowdown={0: 3.0}, cores_per_node=1)
        run = run.with_(topology=topology)
        tree = any(role.kind == "tree server" for role in run.plan(places(run)).roles)
        if not refused(rule, topology, tree):
            run = run.with_(protocol={"modulation": "none", **rule}, cluster={"learners_per_rank": per_rank})
            check(run, timing(run, 90), 90)


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=text)
@pytest.mark.parametrize("rule", RULES, ids=text)
def test_any_front_may_have_its_last_layers_with_a_stage_server(rule: dict[str, Any], topology: dict[str, Any]) -> None:
    """Every protocol on every topology, or it is refused."""
    run = conform(SUITS.get(topology["name"], ASYNC), 6, nodes=2, slowdown={0: 5.0}).with_(topology=topology)
    tree = any(role.kind == "tree server" for role in run.plan(places(run)).roles)
    if refused(rule, topology, tree):
        return
    run = run.with_(protocol={"modulation": "none", **rule})
    for placed in ("merged", "synchronous"):
        tables = {"cut": 1, "rule": placed}
        reason = "have all layers; valid: topologies base, sharded" if averages(rule) else ""
        if not reason and placed == "synchronous" and not together(run):
            reason = "valid: protocol hardsync, or rule merged"
        if reason:
            with pytest.raises(ConfigError, match=reason) as raised:
                run.with_(placement=tables).plan(places(run))
            assert "\n" not in str(raised.value)
            continue
        rows = timing(run.with_(placement=tables), 90)
        check(run.with_(placement=tables), rows, 90)
        check_stages(run.with_(placement=tables), rows)


def together(run: Job) -> bool:
    """Whether an update takes a gradient of each learner, all of the same weights."""
    rule = run.make_protocol(run.plan(places(run)))
    return rule.ordered and rule.waits and rule.gradients_per_update == rule.learners


@pytest.mark.parametrize("rule", [r for r in RULES if not {"n", "options"} & {*r} and r != DILOCO], ids=text)
def test_with_one_learner_every_protocol_is_sequential(rule: dict[str, Any]) -> None:
    run = conform(rule, 1)
    rows = timing(run, 90)
    check(run, rows, 90)
    if rule["name"] is not Eager:  # it computes its next gradient before the update
        assert (rows["gradients"]["staleness"] == 0).all()
        assert np.array_equal(rows["gradients"], timing(conform({"name": "async"}, 1), 90)["gradients"])


def cosine(epoch: int) -> float:
    """Over three epochs, behind one that the warm-up is in."""
    return 0.5 if epoch == 0 else 0.25 * (1 + math.cos(math.pi * (epoch - 1) / 3))


@pytest.mark.parametrize("rule", [r for r in RULES if r != DILOCO], ids=text)
@pytest.mark.parametrize(
    ("schedule", "scheduled"),
    [
        ({"milestones": [1, 3]}, lambda epoch: 0.5 * 0.1 ** ((epoch >= 1) + (epoch >= 3))),
        ({"schedule": "cosine", "warm_up": 0.7}, cosine),
    ],
    ids=["milestones", "warm-up and cosine"],
)
def test_every_protocol_applies_its_modulation_to_the_schedule(
    rule: dict[str, Any], schedule: dict[str, Any], scheduled: Callable[[int], float]
) -> None:
    auto = {"name": rule["name"]} | {k: v for k, v in rule.items() if k != "modulation"}
    run = conform(auto, 4, slowdown={1: 3.0}).with_(
        protocol={"modulation": "auto"}, optimizer={"learning_rate": 0.5, **schedule}
    )
    samples = 90
    updates = timing(run, samples)["updates"]
    factor = run.make_protocol().modulation.rate_factor
    progress = np.cumsum(updates["samples"]) / samples
    warm = np.minimum(1.0, progress / run.optimizer.warm_up) if run.optimizer.warm_up else np.ones(len(updates))
    plain = [scheduled(int(u["epoch"]) - 1) * factor(float(u["mean_staleness"])) for u in updates]
    assert updates["learning_rate"] == pytest.approx(plain * warm, rel=1e-12)
    assert set(updates["epoch"]) == {1, 2, 3, 4}
    assert len(set(warm[updates["epoch"] == 1])) > 1 or not run.optimizer.warm_up


def furthest_ahead(rows: Rows, learners: int) -> int:
    """By how many gradients the fastest learner was ever before the slowest, in gradients at the server."""
    steps = np.zeros(learners, int)
    most = 0
    for learner in rows["gradients"]["learner"]:
        steps[learner] += 1
        most = max(most, int(steps.max() - steps.min()))
    return most


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_a_users_rule_bounds_how_far_anybody_runs_ahead(ahead: int) -> None:
    slow = {"slowdown": {0: 5.0}}
    bounded = timing(conform({"name": Bounded, "options": {"ahead": ahead}}, 4, **slow), 200)
    assert furthest_ahead(bounded, 4) == ahead + 1
    assert furthest_ahead(timing(conform({"name": "async"}, 4, **slow), 200), 4) > 8


def test_a_gradient_that_makes_no_update_may_release_others() -> None:
    """The first waits for the second, whose gradient is the second of three: nothing else would wake the first."""
    run = conform({"name": Bounded, "options": {"ahead": 0, "gradients": 3}}, 2)
    check(run, timing(run, 90), 90)


@pytest.mark.parametrize("learners", [2, 6])
def test_hardsync_waits_for_the_slowest_and_async_does_not(learners: int) -> None:
    slow = {"slowdown": {0: 10.0}, "jitter": 0.0, "latency_jitter_s": 1e-3}  # with more, the server is the bound
    samples = 240
    hardsync = timing(conform({"name": "hardsync"}, learners, **slow), samples)
    async_ = timing(conform({"name": "async"}, learners, **slow), samples)
    assert hardsync.learners is not None
    assert async_.learners is not None
    assert np.ptp(hardsync.learners["pushed"]) == 0
    assert async_.learners["pushed"][0] < async_.learners["pushed"][1:].min() / 5
    assert hardsync.totals["time_s"] > 2 * async_.totals["time_s"]


def test_one_softsync_skips_pulls_and_never_takes_the_same_weights_twice() -> None:
    one = timing(conform({"name": "softsync", "n": 1}, 6), 240)
    all_ = timing(conform({"name": "async"}, 6), 240)
    assert one.learners is not None
    assert all_.learners is not None
    assert all_.learners["skipped_pulls"].sum() == 0
    assert one.learners["skipped_pulls"].sum() > 0
    assert (one.learners["pulls"] <= one.totals["timestamp"]).all(), "no weights twice"


class Deaf(Protocol):
    """Lets nobody have weights: a run under it would never end."""

    default_modulation = "none"

    def pull_granted(self, learner: int, timestamp: int, clock: Any) -> bool:
        return False


class Ramp(Protocol):
    """Has a state, and an update_due of its own."""

    default_modulation = "none"

    def __init__(self, learners: int, updates: int = 10) -> None:
        super().__init__(learners)
        self.updates, self.done = updates, 0

    def update_due(self, pending: int) -> bool:
        due = pending >= max(1, round(self.learners * (1 - self.done / self.updates)))
        self.done += due
        return due

    def state(self) -> dict[str, Any]:
        return {"done": self.done}

    def restore(self, state: dict[str, Any]) -> None:
        self.done = state["done"]


@pytest.mark.parametrize(
    ("kind", "code", "lines"),
    [
        (
            Ramp,
            0,
            [r"ok +7 learners on 3 nodes, sharded", r"ok +7 learners on 3 nodes, adv \(fan_out = 2\)", " 0 FAILED"],
        ),
        (Deaf, 1, [r"FAILED +3 learners: \w+: ", r"refused +7 learners on 3 nodes, replicas: .*valid protocols: "]),
    ],
)
def test_the_command_checks_a_class_of_the_user_in_every_case(
    kind: type[Protocol], code: int, lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", f"{__name__}:{kind.__name__}"]) == code
    told = capsys.readouterr().out
    for line in lines:
        assert re.search(line, told), told


def test_the_command_checks_topologies_and_refuses_what_is_neither(capsys: pytest.CaptureFixture[str]) -> None:
    target = "topologies.base:NoSuch"
    assert main(["check", target]) == 2
    assert main(["check", "math:pi"]) == 2
    assert "math:pi: is no class of protocols.Protocol" in capsys.readouterr().err
