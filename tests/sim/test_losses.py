"""Learners that die or slow down in virtual time: what must hold whoever dies, and whenever."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from clusters import SAMPLES, TrialRows, check_accounts, job, timing, train
from fuzzing import cases
from hypothesis import given
from hypothesis import strategies as st
from random_clusters import SURVIVABLE, dying, outlived
from resumable import ALONE, GROUPS, TREE, check_gradients, lost, make_job

from rudra import replay, simulate
from rudra.cli.main import main
from rudra.compute.learners import LearnerExecutor
from rudra.compute.making import make_executors
from rudra.compute.owners import OwnerExecutor
from rudra.core.actions import Update
from rudra.data.load import load
from rudra.errors import EXIT_STOPPED, ConfigError, RunError
from rudra.job.job import Job
from rudra.prepare.nodes import nodes_of
from rudra.roles import Machine
from rudra.roles.server import ParameterServer
from rudra.simulation.batching import VmapTensors
from topologies.kinds import LEARNER

pytestmark = pytest.mark.slow


def dropped(rows: TrialRows) -> Any:
    return lost(rows, b"dropped")


def check(run_: Job, rows: TrialRows) -> None:
    plan, gradients, updates = run_.plan(nodes_of(run_)), rows["gradients"], rows["updates"]
    check_accounts(rows)
    rule = run_.make_protocol(plan)
    if run_.protocol.name == "hardsync":
        assert (gradients["staleness"] == 0).all()
    gone = lost(rows)
    gone = gone[[plan.roles[role].kind == LEARNER for role in gone["role"]]]
    alive = set(range(run_.learners)) - {plan.roles[role].index for role in gone["role"]}
    since = gone["timestamp"].max(initial=0)
    c = run_.make_protocol(plan.without(gone["role"])).gradients_per_update if alive else 1
    later = updates[updates["timestamp"] > since]
    if rule.ordered:
        for timestamp in later["timestamp"]:
            learners = list(gradients["learner"][gradients["update"] == timestamp])
            assert set(learners) >= alive
            # The first may hold what the dead had pushed in time, on their way through a tree longer.
            assert len(set(learners)) == len(learners)
            if run_.topology.name in {"base", "sharded"} and timestamp > since + 1:
                assert learners == sorted(alive)
    elif run_.topology.name in {"base", "sharded"}:
        # What was pending when c became smaller than that is in the first update after it.
        assert (later["gradients"][1:] == c).all()
    else:
        assert (later["gradients"] >= c).all()


@pytest.mark.parametrize("topology", SURVIVABLE)
@cases(100)
@given(st.data())
def test_a_run_ends_whoever_dies(topology: str, data: st.DataObject) -> None:
    """Invariants are checked after every event; a run in which somebody waits forever raises."""
    run_, training_samples = data.draw(dying(topology))
    rows = outlived(run_, training_samples)
    if rows is None:
        return
    assert rows.code == 0
    check(run_, rows)
    assert list(rows["epochs"]["epoch"]) == list(range(1, run_.training.epochs + 1))
    needed = run_.training.epochs * training_samples
    assert rows.totals["samples"] >= needed > rows.totals["samples"] - rows["updates"]["gradients"][-1] * SAMPLES
    assert list(rows.learners["learner"]) == list(range(run_.learners))


@pytest.mark.parametrize("topology", SURVIVABLE)
@cases(50)
@given(st.data())
def test_a_run_that_stops_with_the_first_loss_ends_in_order(topology: str, data: st.DataObject) -> None:
    run_, training_samples = data.draw(dying(topology))
    run_ = run_.with_(fault_tolerance={"on_learner_loss": "stop"})
    rows = outlived(run_, training_samples)
    if rows is None:
        return
    if rows.code == 0:
        assert rows["epochs"]["epoch"][-1] == run_.training.epochs
    else:
        assert rows.code == EXIT_STOPPED
    if rows.totals["timestamp"]:
        check(run_, rows)


QUIET = {"compute_s": 1.0, "jitter": 0.0, "latency_s": 0.0, "message_s": 0.0, "update_s": 0.0, "evaluation_s": 0.0}
QUARTER = {"bandwidth_bytes_per_s": 350_000 * 4.0}  # a tensor takes 0.25 s


def small(protocol: str, learners: int, *faults: dict[str, float], **simulation: Any) -> Job:
    costs = {**QUIET, **QUARTER, "faults": faults, "detection_s": 0.5, **simulation}
    tables = {"simulation": costs, "training": {"evaluate": False}, "results": {"report_s": 0.0}}
    return job(protocol, learners, epochs=1, **tables).with_(cluster={"buckets": "off"})  # a push follows a computation


def history(rows: TrialRows) -> list[tuple[float, float, str]]:
    """(time, update, learner.step of its gradients), and the losses, since training began."""
    gradients = rows["gradients"]
    found = [
        (round(float(row["time_s"]), 6), float(row["timestamp"]), " ".join(f"{g['learner']}.{g['step']}" for g in mine))
        for row in rows["updates"]
        for mine in [gradients[gradients["update"] == row["timestamp"]]]
    ]
    found += [(round(float(row["time_s"]), 6), float(row["timestamp"]), "lost") for row in lost(rows)]
    return sorted(found)


def test_hardsync_of_three_learners_of_whom_one_dies() -> None:
    """Training begins at 0.75 s, when the last one has its weights. Whoever has them pushes 1 s later, in 0.25 s."""
    rows = timing(small("hardsync", 3, {"learner": 1, "dies_at_s": 0.75 + 3.35}), 9 * SAMPLES)
    assert history(rows) == [
        (1.75, 1, "0.0 1.0 2.0"),
        # Learner 0 pushes from 3.0 s to 3.25 s, then learner 1, which dies; until that is noticed, learner 2 waits.
        (3.85, 1, "lost"),
        (4.1, 2, "0.1 2.1"),
        (5.85, 3, "0.2 2.2"),
        (7.6, 4, "0.3 2.3"),
    ]
    assert rows.warnings == [
        "parameter server: learner 1 (rank 3) died; 2 learners are left, 2 gradients make an update"
    ]
    assert list(rows.learners["pushed"]) == [4, 1, 4]
    assert rows.totals["lost"] == 0, "what was not there entirely was never pushed"


@pytest.mark.parametrize(
    ("protocol", "topology", "victim", "dead"),
    [
        ("hardsync", {"name": "base"}, 2, {2, 3}),
        ("softsync", {"name": "base"}, 5, {4, 5}),
        ("async", {"name": "groups", "options": {"groups": 2}}, 3, {3, 4}),  # two of three, of which another leads
        ("async", {"name": "groups", "options": {"groups": 2}}, 2, {2}),  # a rank of its own
        ("hardsync", {"name": "groups"}, 4, {4, 5}),
        ("hardsync", {"name": "adv", "options": {"fan_out": 2}}, 1, {0, 1}),
        ("async", {"name": "adv*"}, 4, {4, 5}),
    ],
    ids=str,
)
def test_who_dies_takes_the_others_of_its_rank_along(
    protocol: str, topology: dict[str, Any], victim: int, dead: set[int]
) -> None:
    run_ = small(protocol, 6, {"learner": victim, "dies_at_s": 9.0}, latency_s=0.01)
    run_ = run_.with_(topology=topology, cluster={"learners_per_rank": 2}, simulation={"nodes": 1})
    rows = timing(run_, 90 * SAMPLES)
    check(run_, rows)
    plan = run_.plan(nodes_of(run_))
    gone = lost(rows)
    assert {plan.roles[role].index for role in gone["role"]} == dead
    assert len(set(gone["time_s"])) == len({plan.roles[role].world_rank for role in gone["role"]}) == 1
    later = rows["gradients"][rows["gradients"]["update"] > gone["timestamp"].max() + 2]
    assert set(later["learner"]) == set(range(6)) - dead


def test_weights_under_way_to_the_dead_hold_the_update_up_until_it_is_noticed() -> None:
    """Learner 1 dies while it is sent the weights of update 1, from 1.5 s to 1.75 s."""
    rows = timing(small("async", 2, {"learner": 1, "dies_at_s": 0.5 + 1.6}, detection_s=1.5), 4 * SAMPLES)
    assert history(rows) == [
        (1.25, 1, "0.0"),
        (1.5, 2, "1.0"),
        (3.1, 3, "0.1"),  # which came at 2.75 s
        (3.1, 3, "lost"),  # this update was still one of before
        (4.6, 4, "0.2"),
    ]


def test_a_slow_down_stretches_what_is_under_way() -> None:
    """With 2 s to compute at 1 s, of which half is done, three times as slow for 1.5 s: 1 + 1.5 + 0.5 s."""
    slow = {"learner": 0, "slows_at_s": 0.25 + 1.0, "factor": 3.0, "for_s": 1.5}
    rows = timing(small("async", 1, slow, compute_s=2.0), 2 * SAMPLES)
    assert history(rows) == [(3.25, 1, "0.0"), (5.75, 2, "0.1")]


def test_slow_downs_multiply_and_come_again_at_random() -> None:
    both = [{"learner": 0, "slows_at_s": 0.25, "factor": 3.0, "for_s": 9.0}] * 2
    assert history(timing(small("async", 1, *both), SAMPLES)) == [(9.25, 1, "0.0")]
    often = small("async", 1, {"mean_time_to_slowdown_s": 10.0, "factor": 4.0, "for_s": 10.0})
    slow, usual = timing(often, 400 * SAMPLES).time_s, timing(small("async", 1), 400 * SAMPLES).time_s
    assert 1.3 < slow / usual < 1.7, "half of the time it takes four times as long, less what is no computing"


@pytest.mark.parametrize("learners", [1, 4])
def test_when_the_last_learner_dies_the_run_fails(learners: int) -> None:
    faults = [{"learner": i, "dies_at_s": 3.0 + i} for i in range(learners)]
    name = f"learner {learners - 1} \\(rank {learners + 1}\\)"
    with pytest.raises(RunError, match=f"^parameter server: {name} died, and no learner is left$"):
        timing(small("async", learners, *faults), 10**4)


def test_a_death_before_training_begins_fails_the_run() -> None:
    with pytest.raises(RunError, match=r"^parameter server: learner 0 \(rank 2\) died before training began$"):
        timing(small("async", 2, {"learner": 0, "dies_at_s": 0.0}), 100)


def slow(*learners: int, **faults: Any) -> Job:
    """Four learners of hardsync, of whom some take 100 times as long from their second mini-batch on."""
    slows = {"slows_at_s": 3.0, "factor": 100.0, "for_s": 1000.0}
    return small("hardsync", 4, *({"learner": i, **slows} for i in learners)).with_(fault_tolerance=faults)


ADV = {"name": "adv", "options": {"fan_out": 2}}


DEEP = {"name": "adv", "options": {"fan_out": [1, 2]}}


@pytest.mark.parametrize("topology", [{}, ADV, DEEP], ids=str)
def test_who_keeps_all_waiting_is_dropped_if_the_job_says_so(topology: dict[str, Any]) -> None:
    rows = timing(slow(1, straggler_timeout_s=20.0).with_(topology=topology), 400 * SAMPLES)
    (row,) = dropped(rows)
    assert row["time_s"] < 30.0
    assert rows.code == 0
    later = rows["gradients"][rows["gradients"]["update"] > row["timestamp"] + 1]
    assert set(later["learner"]) == {0, 2, 3}
    check_accounts(rows)
    assert list(rows.learners["learner"]) == [0, 1, 2, 3]
    (line,) = rows.warnings
    text = "was dropped: it sent nothing for 2[0-9] s; 3 learners are left, 3 gradients make an update"
    assert re.fullmatch(rf"parameter server: learner 1 \(rank [0-9]+\) {text}", line)
    assert timing(slow(1).with_(topology=topology), 400 * SAMPLES).time_s > 3 * rows.time_s


@pytest.mark.parametrize("topology", [{}, ADV], ids=str)
def test_of_all_who_are_too_slow_the_last_one_stays(topology: dict[str, Any]) -> None:
    rows = timing(slow(0, 1, 2, 3, straggler_timeout_s=20.0).with_(topology=topology), 40 * SAMPLES)
    assert len(dropped(rows)) == 3
    assert len(set(rows["gradients"]["learner"][-5:])) == 1
    check_accounts(rows)
    assert list(rows.learners["learner"]) == [0, 1, 2, 3]


@pytest.mark.parametrize("topology", [{}, ADV], ids=str)
@pytest.mark.parametrize("late_s", [19.0, 20.2, 21.3])
def test_who_comes_in_time_is_not_dropped(late_s: float, topology: dict[str, Any]) -> None:
    """About the moment at which a learner would be dropped: its gradient counts, or it is out, but nobody waits."""
    fault = {"learner": 1, "slows_at_s": 3.0, "factor": late_s, "for_s": 1.05 * late_s}
    run_ = small("hardsync", 4, fault).with_(fault_tolerance={"straggler_timeout_s": 20.0}, topology=topology)
    rows = timing(run_, 80 * SAMPLES)
    assert rows.code == 0
    check_accounts(rows)
    assert list(rows.learners["learner"]) == [0, 1, 2, 3]
    assert bool(len(dropped(rows))) == (set(rows["gradients"]["learner"][-3:]) == {0, 2, 3})


def test_a_tree_that_waits_for_one_of_its_servers_accuses_nobody_else() -> None:
    """Learner 3 is nearly late, again and again; from gradient to gradient the others take longer than the limit."""
    fault = {"learner": 3, "slows_at_s": 3.0, "factor": 19.3, "for_s": 300.0}
    rows = timing(
        small("hardsync", 4, fault).with_(fault_tolerance={"straggler_timeout_s": 20.0}, topology=ADV), 80 * SAMPLES
    )
    assert not len(dropped(rows))


@pytest.mark.parametrize(
    "tables", [{"protocol": {"name": "async"}}, {"topology": {"name": "groups", "options": {"groups": 2}}}], ids=str
)
def test_only_who_waits_for_each_learner_can_drop_one(tables: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError,
        match=r"straggler_timeout_s is not supported with protocol \w+ on topology \w+; use protocol hardsync",
    ):
        Job(
            **{
                "protocol": {"name": "hardsync"},
                "cluster": {"learners": 4},
                "fault_tolerance": {"straggler_timeout_s": 5},
                **tables,
            }
        )


def test_children_of_a_dead_tree_server_move_to_its_parent() -> None:
    """The root has them regroup 0.5 s after the death; what they were about is computed again."""
    topology = {"name": "adv", "options": {"fan_out": 2}}
    run_ = small("hardsync", 4, {"tree_server": 1, "dies_at_s": 6.0}, latency_s=0.1).with_(topology=topology)
    moved: set[int] = set()

    def look(machine: Machine, *about: object) -> None:
        if isinstance(machine, ParameterServer) and machine.plan.gone:
            moved.update(machine.plan.children[machine.id])

    rows = timing(run_, 20 * SAMPLES, look)
    plan = run_.plan(nodes_of(run_))
    dead = next(i for i, role in enumerate(plan.roles) if role.name == "tree server 1")
    assert moved == {*plan.children[plan.server], *plan.children[dead]} - {dead}
    assert rows.warnings == [
        f"parameter server: tree server 1 (rank {plan.roles[dead].world_rank}) died; 4 learners are left, "
        f"which continue from update {lost(rows)['timestamp'][0]}"
    ]
    assert list(lost(rows)["role"]) == [dead]
    check(run_, rows)
    assert list(rows.learners["pushed"]) == [5] * 4


@pytest.mark.parametrize(
    ("topology", "valid"),
    [({"name": "base"}, "a topology with tree servers"), ({"name": "adv", "options": {"fan_out": 2}}, r"0 to \d$")],
    ids=lambda value: str(value),
)
def test_a_fault_names_a_tree_server_that_is_there(topology: dict[str, Any], valid: str) -> None:
    run_ = small("async", 4, {"tree_server": 99, "dies_at_s": 6.0}).with_(topology=topology)
    with pytest.raises(ConfigError, match=f"faults names tree server 99, which does not exist; use {valid}"):
        timing(run_, 10)


def test_a_group_goes_on_without_its_first_member() -> None:
    topology = {"name": "groups", "options": {"groups": 2}}
    run_ = small("async", 6, {"learner": 3, "dies_at_s": 6.0}).with_(topology=topology)
    rows = timing(run_, 60 * SAMPLES)
    check(run_, rows)
    (gone,) = lost(rows)
    (warning,) = rows.warnings
    assert warning.endswith(f"died; 5 learners are left, which continue from update {gone['timestamp']}")
    later = rows["gradients"][rows["gradients"]["update"] > gone["timestamp"]]
    assert set(later["learner"]) == {0, 1, 2, 4, 5}


def test_without_the_first_replica_nothing_goes_on() -> None:
    run_ = small("hardsync", 4, {"learner": 0, "dies_at_s": 3.0}).with_(topology={"name": "groups"})
    with pytest.raises(RunError, match=r"^statistics server: learner 0 \(rank 1\) died, and the run cannot continue"):
        timing(run_, 10**4)


def by_hand(run_: Job, rows: TrialRows) -> torch.Tensor:
    """Weights after updates by the mean gradients of the mini-batches that the record names."""
    loaded = load(run_.data)
    plan = run_.plan(nodes_of(run_))
    executors = make_executors(run_, plan, tuple(range(len(plan.roles))), loaded, prefetch=False)
    owner = executors[plan.server]
    assert isinstance(owner, OwnerExecutor)
    owner.prepare()
    weights, mean = owner.buffer("weights").vector, owner.buffer("mean").vector
    for update in rows["updates"]:
        gradients = []
        for row in rows["gradients"][rows["gradients"]["update"] == update["timestamp"]]:
            learner = executors[plan.learners[row["learner"]]]
            assert isinstance(learner, LearnerExecutor)
            out = torch.zeros_like(weights)
            work = learner.source.work.after(int(row["step"]))
            learner.source.compute(int(row["step"]), work, weights, out)
            gradients.append(out)
        mean.copy_(torch.stack(gradients).mean(0))
        owner.update(Update("mean", "weights", float(update["learning_rate"]), int(update["timestamp"])))
    return weights


@pytest.mark.parametrize("dies_at_s", [0.55, 0.62, 0.71, 0.83])
def test_replicas_that_are_left_are_a_larger_batch_of_fewer(dies_at_s: float) -> None:
    """Weights after a loss are those of one learner with the mini-batches of all who were there, update by update."""
    run_ = make_job("hardsync", topology=ALONE).with_(results={"checkpoint_every": "never"}, training={"epochs": 1})
    trained = train(run_.with_(simulation={"faults": [{"learner": 2, "dies_at_s": dies_at_s}], "detection_s": 0.05}))
    (gone,) = lost(trained.rows)
    assert 0 < gone["timestamp"] < trained.rows.totals["timestamp"]
    assert torch.allclose(by_hand(run_, trained.rows), trained.weights, atol=1e-5)


def test_deaths_after_the_end_take_no_time() -> None:
    run_ = small("softsync", 3)
    late = run_.with_(simulation={"faults": [{"learner": 1, "dies_at_s": 1e9}, {"mean_time_to_failure_s": 1e9}]})
    assert timing(late, 50).time_s == timing(run_, 50).time_s


def test_random_deaths_follow_the_seed_and_their_mean() -> None:
    faults = {"faults": [{"mean_time_to_failure_s": 200.0}]}
    moments = []
    for seed in (1, 1, 2):
        run_ = small("async", 40).with_(simulation={**faults, "bandwidth_bytes_per_s": 1e12}, training={"seed": seed})
        moments.append(list(lost(timing(run_, 40 * 100 * SAMPLES))["time_s"]))
    assert moments[0] == moments[1] != moments[2]
    # Of 40, so many die in 100 s and what the others need longer: 40 (1 - exp(-1/2)) = 16 at least.
    assert 10 <= len(moments[0]) <= 34


FAULTS = [
    {"learner": 1, "dies_at_s": 0.55},
    {"learner": 3, "dies_at_s": 1.0},
    {"learner": 2, "slows_at_s": 0.6, "factor": 5.0, "for_s": 0.4},
]


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("topology", "protocol"),
    [(t, p) for t in ({"name": "base"}, TREE, GROUPS) for p in ("hardsync", "softsync", "async")]
    + [({"name": "adv*"}, "async"), (ALONE, "hardsync")],
    ids=lambda about: about if isinstance(about, str) else f"{about['name']}-{about.get('options', '')}",
)
def test_with_tensors_what_the_dead_held_is_free(protocol: str, topology: dict[str, Any]) -> None:
    """Buffers that nobody may read hold NaN here, and none that is lent may change."""
    run_ = make_job(protocol, topology=topology).with_(results={"checkpoint_every": "never"})
    falling = [{"tree_server": 1, "dies_at_s": 0.8}] if topology is TREE else []
    trained = train(run_.with_(simulation={"faults": FAULTS + falling, "detection_s": 0.05}))
    check(run_, trained.rows)
    assert len(lost(trained.rows)) == 2 + len(falling)
    assert torch.isfinite(trained.weights).all()
    dead = [trained.plan.learners[i] for i in (1, 3)]
    assert [trained.executors[role].names for role in dead] == [(), ()]
    assert not any(role in dead for holders in trained.tensors._holders.values() for role, _ in holders)


def test_learners_that_compute_together_lose_one() -> None:
    run_ = make_job("async").with_(model={"name": "mlp"}, simulation={"faults": FAULTS, "batching": "vmap"})
    trained = train(run_, VmapTensors)
    check(run_, trained.rows)
    assert len(lost(trained.rows)) == 2


@pytest.mark.each_value
@pytest.mark.parametrize("topology", [{"name": "base"}, TREE], ids=lambda t: t["name"])
@pytest.mark.parametrize("protocol", ["hardsync", "softsync", "async"])
def test_a_run_that_a_loss_stopped_goes_on_from_its_checkpoint(protocol: str, topology: dict[str, Any]) -> None:
    run_ = make_job(protocol, topology=topology).with_(
        results={"checkpoint_every": "never"}, fault_tolerance={"on_learner_loss": "stop"}
    )
    stopped = train(run_.with_(simulation={"faults": FAULTS}))
    assert stopped.rows.code == EXIT_STOPPED
    (saved,) = stopped.saved
    assert saved.position.timestamp == stopped.rows.totals["timestamp"] > 0
    resumed = train(run_, resumed=saved)
    assert resumed.rows.code == 0
    gradients = np.concatenate([part.rows["gradients"] for part in (stopped, resumed)])
    check_gradients(run_, stopped.plan, gradients)
    assert resumed.rows.totals["applied"] == len(gradients)
    if protocol == "hardsync":
        assert torch.equal(resumed.weights, train(run_).weights)


def test_a_simulation_that_a_loss_stopped_ends_with_its_own_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job_ = ["digits", "--output", str(tmp_path / "a.h5"), "--quiet", "--set", "simulation.tensors=false"]
    fault = ["--set", "simulation.faults=[{learner=1, dies_at_s=3.0}]", "--set", "training.epochs=2"]
    assert main(["simulate", *job_, *fault, "--set", "fault_tolerance.on_learner_loss=stop"]) == EXIT_STOPPED
    assert main(["simulate", *job_, *fault, "--force"]) == 0
    assert "learner 1 (rank 3) died; 3 learners are left" in capsys.readouterr().err


def test_a_simulated_run_replays_across_a_loss(tmp_path: Path) -> None:
    job_ = Job.load("digits").with_(training={"epochs": 1}, simulation={"faults": FAULTS[:1]}, model={"name": "mlp"})
    with simulate(job_, output=tmp_path / "a.h5", progress="quiet") as results:
        assert len(results.events) == 1
    assert replay(tmp_path / "a.h5", quiet=True).identical


@pytest.mark.parametrize("topology", [{}, ADV], ids=str)
def test_a_simulated_run_replays_across_a_learner_that_was_dropped(tmp_path: Path, topology: dict[str, Any]) -> None:
    fault = {"learner": 1, "slows_at_s": 3.0, "factor": 1000.0, "for_s": 1000.0}
    job_ = Job.load("digits").with_(
        training={"epochs": 1},
        model={"name": "mlp"},
        protocol={"name": "hardsync", "n": None},
        simulation={"faults": [fault]},
        fault_tolerance={"straggler_timeout_s": 5.0},
        topology=topology,
    )
    with simulate(job_, output=tmp_path / "a.h5", progress="quiet") as results:
        assert list(results.events["kind"]) == [b"dropped"]
    assert replay(tmp_path / "a.h5", quiet=True).identical


def test_one_gradient_of_all_learners_needs_all_of_them(tmp_path: Path) -> None:
    simulation = {"faults": FAULTS, "batching": "big-batch"}
    job_ = Job.load("digits").with_(protocol={"name": "hardsync"}, simulation=simulation)
    with pytest.raises(ConfigError, match="batching = 'big-batch' needs all learners all the time, but faults has"):
        simulate(job_, output=tmp_path / "a.h5", progress="quiet")
