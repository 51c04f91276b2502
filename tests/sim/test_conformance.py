"""What every protocol must do in virtual time, the shipped ones and a user's own, on every topology that it fits."""

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from clusters import Ramp, TrialRows, job, timing
from fuzzing import in_campaign
from rules import Bounded, Eager, Racks

import protocols
from protocols import Averaging, Protocol
from rudra.cli.main import main
from rudra.job.job import Job
from rudra.prepare.nodes import nodes_of
from rudra.simulation.conformance import NOISY, TOPOLOGY_CASES, Case, cases_of, check, determined, outcome
from tests.selection import CAMPAIGN

RULES: list[dict[str, Any]] = [
    *({"name": name} for name in protocols.shipped() if name != "hogbatch"),  # has workers: test_hogbatch
    {"name": "softsync", "n": 2},
    {"name": "softsync", "n": 3},
    {"name": Bounded},
    {"name": Bounded, "options": {"ahead": 0, "gradients": 3}},
    {"name": Eager},
]
RULES_AND_STALENESS = [*RULES, {"name": "async", "modulation": "gradient_staleness"}]
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


@pytest.mark.parametrize("rule", [rule for rule in RULES if not averages(rule)], ids=text)
def test_every_protocol_follows_the_laws_with_servers(rule: dict[str, Any]) -> None:
    for case in cases_of(rule, None):
        few = case.tables["cluster"]["learners"] < rule.get("n", 1)
        name, status, why = outcome(case)
        assert status == ("refused" if few else "ok"), (name, why)


def refused(rule: dict[str, Any], topology: dict[str, Any], tree: bool) -> str:
    """Why a protocol cannot work on a topology; empty if it can."""
    if averages(rule) != (topology["name"] in SUITS):
        return (
            r"protocol \w+; use topology replicas" if averages(rule) else r"; use protocol average|n = \d is .* [12] "
        )
    if topology["name"] == "hierarchical" and rule["name"] not in {"easgd", "sma"}:
        return r"hierarchical' is not supported with protocol \w+; use protocol easgd or sma"
    if averages(rule) and "parameter_server" in topology.get("options", {}) and rule["name"] != "easgd":
        return r"server = true is not supported with protocol \w+; use protocol easgd"
    made = protocols.make(rule["name"], learners=4, minibatch_size=4, n=rule.get("n"), options=rule.get("options"))
    by_pushes = made.waits and made.grants_on_push
    if topology["name"] == "groups" and "options" not in topology:
        if rule.get("n", 1) > 1:
            return rf"n = {rule['n']} is not supported with 1"
        if rule.get("options", {}).get("gradients", 1) > 1:
            return r"one group is not supported with the 3 gradients per update of protocol \w+; use more groups"
    if topology["name"] == "adv*" and made.waits:
        return r"protocol \w+, which makes learners wait; use protocol softsync or async, or topology adv"
    if tree and by_pushes:
        return "which waits for pushes of all learners; use topology base"
    if tree and rule.get("modulation") == "gradient_staleness":
        return "'gradient_staleness' is not supported with topology .*; use modulation = 'mean_staleness'"
    return ""


def reason_of(case: Case) -> str:
    """Why a case must be refused; empty if it must not."""
    rule, topology = case.tables["protocol"], case.tables["topology"]
    suits = SUITS.get(topology["name"], ASYNC)
    tables = {name: table for name, table in case.tables.items() if name != "placement"}
    plain = Job(**{**tables, "protocol": {"modulation": "none", **suits}}).resolved()
    reason = refused(rule, topology, any(role.kind == "tree server" for role in plain.plan(nodes_of(plain)).roles))
    if "placement" not in case.tables:
        return reason
    if reason:
        return f"{reason}|use protocol hardsync, or rule = 'merged'"
    if averages(rule):
        return r"cut is not supported with protocol \w+; use hardsync, softsync or async, on topology base"
    alone = Job(**tables).resolved()
    if case.tables["placement"]["rule"] == "synchronous" and not determined(alone):
        return "use protocol hardsync, or rule = 'merged'"
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=text)
@pytest.mark.parametrize("rule", RULES_AND_STALENESS, ids=text)
def test_every_protocol_on_every_topology_follows_the_laws_or_is_refused(
    rule: dict[str, Any], topology: dict[str, Any]
) -> None:
    """Each case with every second topology of a rule, and with every second rule of a topology."""
    every, place = list(cases_of(rule, topology)), RULES_AND_STALENESS.index(rule) + TOPOLOGIES.index(topology)
    for case in every if in_campaign() else every[place % 2 :: 2]:
        reason, (name, status, why) = reason_of(case), outcome(case)
        assert status == ("refused" if reason else "ok"), (name, why)
        assert re.search(reason, why), (name, why)
        assert "\n" not in why


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


def furthest_ahead(rows: TrialRows, learners: int) -> int:
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
    assert np.ptp(hardsync.learners["pushed"]) == 0
    assert async_.learners["pushed"][0] < async_.learners["pushed"][1:].min() / 5
    assert hardsync.totals["time_s"] > 2 * async_.totals["time_s"]


def test_one_softsync_skips_pulls_and_never_takes_the_same_weights_twice() -> None:
    one = timing(conform({"name": "softsync", "n": 1}, 6), 240)
    all_ = timing(conform({"name": "async"}, 6), 240)
    assert all_.learners["skipped_pulls"].sum() == 0
    assert one.learners["skipped_pulls"].sum() > 0
    assert (one.learners["pulls"] <= one.totals["timestamp"]).all(), "no weights twice"


class Deaf(Protocol):
    """Lets nobody have weights: a run under it would never end."""

    default_modulation = "none"

    def pull_granted(self, learner: int, timestamp: int, clock: Any) -> bool:
        return False


class Half(Protocol):
    """Brings back one of the two numbers of its state right, which is seen only after some updates."""

    default_modulation = "none"

    def __init__(self, learners: int) -> None:
        super().__init__(learners)
        self.done, self.size = 0, 1

    def update_due(self, pending: int) -> bool:
        if due := pending >= self.size:
            self.done += 1
            self.size = 1 + self.done // 4 % 3
        return due

    def state(self) -> dict[str, Any]:
        return {"done": self.done, "size": self.size}

    def restore(self, state: dict[str, Any]) -> None:
        self.done, self.size = state["done"] + (state["done"] > 5), state["size"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "code", "lines"),
    [
        pytest.param(  # the page about own rules shows it, too
            Ramp,
            0,
            [r"ok +7 learners on 3 nodes, sharded", r"ok +7 learners on 3 nodes, adv \(fan_out = 2\)", " 0 FAILED"],
            marks=CAMPAIGN,
        ),
        (Deaf, 1, [r"FAILED +3 learners: \w+: ", r"refused +7 learners on 3 nodes, replicas: .*use protocol average"]),
    ],
)
def test_the_command_checks_a_class_of_the_user_in_every_case(
    kind: type[Protocol], code: int, lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", f"{kind.__module__}:{kind.__name__}"]) == code
    told = capsys.readouterr().out
    for line in lines:
        assert re.search(line, told), told


def test_a_state_that_is_brought_back_in_part_fails() -> None:
    told = [outcome(case) for case in cases_of({"name": Half}, None)]
    assert [status for _, status, _ in told] == ["FAILED"] * 4
    assert all(
        re.match(r"update \d+ has \d gradients when the run is resumed after update \d+, else ", why)
        for *_, why in told
    )


def test_the_command_checks_topologies_and_refuses_what_is_neither(capsys: pytest.CaptureFixture[str]) -> None:
    target = "topologies.base:NoSuch"
    assert main(["check", target]) == 2
    assert main(["check", "math:pi"]) == 2
    assert "math:pi: is no class of protocols.Protocol" in capsys.readouterr().err
