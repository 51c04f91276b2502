"""The cost model: tables of cases for durations, places, links and luck, and cost files."""

import json
import random
import re
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rudra.cli.main import main
from rudra.core.actions import (
    Accumulate,
    BackpropFirstStage,
    Copy,
    Evaluate,
    PullReplica,
    RunFirstStage,
    StepReplica,
    TrainInPlace,
    Update,
)
from rudra.core.layout import Placed
from rudra.core.training_state import BEGINNING
from rudra.errors import ConfigError
from rudra.job.job import Job
from rudra.prepare import cost_files
from rudra.prepare.cost_files import find, load, presets
from rudra.prepare.nodes import nodes_of
from rudra.prepare.phases import phases_of
from rudra.prepare.points import at
from rudra.simulation.assembly import prices_of
from rudra.simulation.costs import CostModel, Link, guessed

SERVER, STATISTICS = 0, 1


def model(learners: int, minibatch_size: int = 4, **table: Any) -> CostModel:
    run = Job(cluster={"learners": learners}, simulation=table)
    return CostModel(run.simulation, run.plan(nodes_of(run)), minibatch_size)


POWER = {1: 2.0, 100: 20.0}  # 2·√μ
BENT = {4: 1.0, 16: 2.0, 64: 8.0}  # ∝ √μ, and from 16 on ∝ μ


@pytest.mark.parametrize(
    ("compute_s", "minibatch_size", "seconds"),
    [
        (0.5, 1, 0.5),
        (0.5, 1000, 0.5),
        ({8: 0.4}, 8, 0.4),
        ({8: 0.4}, 2, 0.1),
        ({8: 0.4}, 80, 4.0),
        (POWER, 1, 2.0),
        (POWER, 100, 20.0),
        (POWER, 25, 10.0),
        (POWER, 400, 40.0),
        (BENT, 4, 1.0),
        (BENT, 16, 2.0),
        (BENT, 64, 8.0),
        (BENT, 8, 2.0**0.5),
        (BENT, 32, 4.0),
        (BENT, 1, 0.5),
        (BENT, 128, 16.0),
        (dict(reversed(BENT.items())), 32, 4.0),
    ],
)
def test_seconds_for_a_minibatch(compute_s: Any, minibatch_size: int, seconds: float) -> None:
    assert at(compute_s, minibatch_size) == pytest.approx(seconds)


BANK = {1: {4: 1.0, 16: 2.0}, 4: {4: 2.0, 16: 8.0}}


@pytest.mark.parametrize(
    ("bank_s", "cluster", "size", "seconds"),
    [
        (BANK, {"learners_per_device": 4}, 4, 0.5),
        (BANK, {"learners_per_device": 4}, 16, 2.0),
        (BANK, {"learners_per_device": 2}, 4, 2.0**0.5 / 2),  # between the sizes of a bank
        (BANK, {"learners_per_device": 4}, 8, 1.0),  # between mini-batches
        ({1: 1.0, 4: 2.0}, {"learners_per_device": 4}, 8, 0.5),  # of any mini-batch
        (BANK, {"learners_per_device": 4, "active_learners": 1}, 16, 2.0),
        (BANK, {"learners_per_rank": 4}, 4, 3.0),  # they take turns
        (BANK, {}, 4, 3.0),
        ({}, {"learners_per_device": 4}, 4, 3.0),
    ],
)
def test_learners_of_a_bank_share_its_time(bank_s: Any, cluster: dict[str, Any], size: int, seconds: float) -> None:
    about = {"bank_s": bank_s, "compute_s": 3.0, "nodes": 1, "sharing": "turns"}
    cluster = {"learners": 4, **cluster}
    job = Job(protocol={"name": "sma"}, training={"minibatch_size": size}, cluster=cluster, simulation=about).resolved()
    phases = phases_of(job, job.plan(nodes_of(job)), 100)
    model = prices_of(phases, 4)(BEGINNING)
    assert [model.compute_s[role] for role in model.plan.learners] == pytest.approx(
        [seconds] * (job.cluster.active_learners or 4)
    )


@pytest.mark.parametrize(
    ("bank_s", "text"),
    [
        ({0: 1.0}, "bank_s has a key 0; use 1 or more"),
        ({2: {0: 1.0}}, "bank_s has a key 0; use 1 or more"),
        ({2: {4: 0.0}}, "bank_s of m = 2, μ = 4 must be > 0, not 0.0"),
        ({2: -1.0}, "bank_s of m = 2 must be > 0, not -1.0"),
        ({2: {}}, "bank_s has no entry; use a number, or a table with at least one entry"),
    ],
)
def test_a_table_of_banks_that_is_none_is_refused(bank_s: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        Job(simulation={"bank_s": bank_s})


@pytest.mark.parametrize(
    ("learners", "nodes", "place"),
    [
        (3, None, [0, 1, 2]),
        (3, 1, [0, 0, 0]),
        (4, 2, [0, 0, 1, 1]),
        (5, 2, [0, 0, 0, 1, 1]),
        (3, 8, [0, 1, 2]),
        (4, {4: 2}, [0, 0, 1, 1]),
        (2, {2: 1, 4: 3}, [0, 0]),
        (4, {2: 1, 4: 3}, [0, 0, 1, 2]),
        (8, {2: 1, 4: 2}, [0, 0, 1, 1, 2, 2, 3, 3]),  # as many to a node as in the nearest smaller entry
        (5, {2: 1, 4: 2}, [0, 0, 1, 1, 2]),
        (1, {4: 2}, [0]),
    ],
)
def test_learners_stand_in_blocks_on_nodes(learners: int, nodes: Any, place: list[int]) -> None:
    apart = model(learners, nodes=nodes)
    assert [apart.node[role] for role in apart.plan.learners] == place
    together = model(learners, nodes=nodes, servers_on_first_node=True)
    assert [together.node[role] for role in together.plan.learners] == place
    for role in (SERVER, STATISTICS):
        assert apart.node[role] not in place
        assert together.node[role] == 0


@pytest.mark.parametrize(("learners", "nodes"), [(30, 8), (30, 7), (4096, 64), (7, 3)])
def test_blocks_differ_by_one_at_most(learners: int, nodes: int) -> None:
    spread = model(learners, nodes=nodes)
    sizes = Counter(spread.node[role] for role in spread.plan.learners)
    assert len(sizes) == nodes
    assert max(sizes.values()) - min(sizes.values()) <= 1


LINK = {"latency_s": 0.5, "bandwidth_bytes_per_s": 10.0}
LOCAL = {"local_latency_s": 0.25, "local_bandwidth_bytes_per_s": 100.0}
BETWEEN, INSIDE = (0.5, 0.1), (0.25, 0.01)


@pytest.mark.parametrize(
    ("sender", "receiver", "table", "link"),
    [
        # Roles 2 and 3 on node 0, 4 and 5 on node 1; servers on node -1, or with the first.
        (2, 0, LOCAL, Link(*BETWEEN, ("node", 0), ("node", -1))),
        (0, 5, LOCAL, Link(*BETWEEN, ("node", -1), ("node", 1))),
        (0, 1, LOCAL, Link(*INSIDE, ("role", 0), ("role", 1))),
        (2, 0, {**LOCAL, "servers_on_first_node": True}, Link(*INSIDE, ("role", 2), ("role", 0))),
        (4, 0, {**LOCAL, "servers_on_first_node": True}, Link(*BETWEEN, ("node", 1), ("node", 0))),
        (2, 0, {"servers_on_first_node": True}, Link(*BETWEEN, ("role", 2), ("role", 0))),
        (2, 0, {"servers_on_first_node": True, "local_latency_s": 0.0}, Link(0.0, 0.1, ("role", 2), ("role", 0))),
        (2, 3, LOCAL, Link(*INSIDE, ("role", 2), ("role", 3))),
        (3, 4, LOCAL, Link(*BETWEEN, ("node", 0), ("node", 1))),
    ],
)
def test_links(sender: int, receiver: int, table: dict[str, Any], link: Link) -> None:
    assert model(4, nodes=2, **LINK, **table).link(sender, receiver) == link


@pytest.mark.parametrize(
    ("topology", "sender", "receiver", "blocking"),
    [
        ("base", "learner 3", "parameter server", ["parameter server"]),
        ("base", "parameter server", "learner 3", ["parameter server"]),
        ("adv", "learner 3", "tree server 1", ["tree server 1"]),
        ("adv", "tree server 1", "parameter server", ["tree server 1", "parameter server"]),
        ("adv*", "learner 3", "tree server 1", []),  # threads of their own push and pull
        ("adv*", "parameter server", "learner 0", []),
    ],
)
def test_servers_with_blocking_calls_move_one_tensor_at_a_time(
    topology: str, sender: str, receiver: str, blocking: list[str]
) -> None:
    table = {"blocking_servers": True, "nodes": 2}
    job = Job(topology={"name": topology}, cluster={"learners": 4}, simulation=table)
    plan = job.plan(nodes_of(job))
    roles = {role.name: i for i, role in enumerate(plan.roles)}
    link = CostModel(job.simulation, plan, 4).link(roles[sender], roles[receiver])
    assert link.blocking == tuple(("role", roles[name]) for name in blocking)


@pytest.mark.parametrize(
    ("learners", "table", "seconds"),
    [
        # 100 bytes; twice a latency and what each member sends: its share, or what leaves a node that several share.
        (1, {}, 0.0),
        (4, {"nodes": 1}, 2 * (0.25 + 0.75 * 1.0)),
        (4, {"nodes": 4}, 2 * (0.5 + 0.75 * 10.0)),
        (4, {"nodes": 2}, 2 * (0.5 + 1.0 * 10.0)),
        (3, {"nodes": 2}, 2 * (0.5 + 2 / 3 * 10.0)),
        (4, {"nodes": 3}, 2 * (0.5 + 1.0 * 10.0)),  # two share a link, the others have one each
        (2, {"nodes": 1, "gradient_s": 4.0}, 2 * (0.25 + 0.5 * 1.0) + 4.0 / 2),
    ],
)
def test_seconds_for_a_reduction(learners: int, table: dict[str, Any], seconds: float) -> None:
    known = model(learners, **LINK, **LOCAL, **table)
    assert known.reduction_s(known.plan.learners, 100) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("learners", "nodes", "seconds"),
    [
        # On a node what `ordered` takes; where each has a node, too; else twice on the node, and twice a node's share.
        (4, 1, 2 * (0.25 + 0.75 * 1.0) + 0.75),
        (4, 4, 2 * (0.5 + 0.75 * 10.0) + 0.75),
        (4, 2, 2 * (0.25 + 0.5 * 1.0) + 2 * (0.5 + 0.5 * 10.0) + 0.5 + 0.25),
        (3, 2, 2 * (0.25 + 0.5 * 1.0) + 2 * (0.5 + 2 / 3 * 10.0) + 0.5 + 1 / 3),
    ],
)
def test_seconds_for_a_reduction_by_nodes(learners: int, nodes: int, seconds: float) -> None:
    table = {**LINK, **LOCAL, "nodes": nodes, "gradient_s": 1.0}
    job = Job(
        topology={"name": "groups", "options": {"reduction": "nodes"}}, cluster={"learners": learners}, simulation=table
    )
    known = CostModel(job.simulation, job.plan(nodes_of(job)), 4)
    assert known.reduction_s(known.plan.groups[0], 100) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("table", "means"),
    [
        ({}, [1.0, 1.0, 1.0]),
        ({"slowdown": {0: 3.0, 2: 0.5}}, [3.0, 1.0, 0.5]),
        ({"nodes": 1, "node_slowdown": 0.25}, [1.5, 1.5, 1.5]),
        ({"nodes": 2, "node_slowdown": 0.25}, [1.25, 1.25, 1.0]),
        ({"nodes": 2, "node_slowdown": 0.25, "slowdown": {1: 2.0}}, [1.25, 2.5, 1.0]),
        ({"compute_s": {2: 1.0, 4: 6.0}}, [6.0, 6.0, 6.0]),
    ],
)
def test_mean_times_of_learners(table: dict[str, Any], means: list[float]) -> None:
    known = model(3, **{"compute_s": 1.0, **table})
    assert [known.compute_s[role] for role in known.plan.learners] == pytest.approx(means)
    assert set(known.compute_s) == set(known.plan.learners)


def draws(count: int = 20_000, **table: Any) -> list[float]:
    """Durations of learner 0, whose mean without luck is 1."""
    known = model(2, compute_s=1.0, **table)
    next_s = known.computation(known.plan.learners[0], random.Random(1))
    return [next_s() for _ in range(count)]


@pytest.mark.parametrize(
    ("table", "mean", "least", "most"),
    [
        ({"jitter": 0.0}, 1.0, 1.0, 1.0),
        ({"jitter": 0.2}, 1.0, 0.8, 1.2),
        ({"jitter": 0.1, "learner_jitter": {0: 0.3}}, 1.0, 0.7, 1.3),
        ({"jitter": 0.1, "learner_jitter": {1: 0.3}}, 1.0, 0.9, 1.1),
        ({"jitter": 0.0, "distribution": "lognormal"}, 1.0, 1.0, 1.0),
        ({"jitter": 0.5, "distribution": "lognormal"}, 2.718281828 ** (0.5**2 / 2), 0.0, 1000.0),
        ({"jitter": 0.0, "distribution": "exponential"}, 1.0, 1.0, 1.0),
        ({"jitter": 0.5, "distribution": "exponential"}, 1.5, 1.0, 1000.0),
        ({"jitter": 0.0, "distribution": "memoryless"}, 1.0, 0.0, 1000.0),
        ({"jitter": 0.0, "straggler_probability": 0.1, "straggler_factor": 11.0}, 2.0, 1.0, 11.0),
        ({"jitter": 0.2, "straggler_probability": 0.1, "straggler_factor": 11.0}, 2.0, 0.8, 13.2),
        ({"jitter": 0.2, "straggler_probability": 1.0, "straggler_factor": 5.0}, 5.0, 4.0, 6.0),
        ({"jitter": 0.5, "distribution": "exponential", "straggler_probability": 0.5}, 1.5 * 5.5, 1.0, 1000.0),
    ],
)
def test_durations_have_the_mean_and_the_bounds_of_their_distribution(
    table: dict[str, Any], mean: float, least: float, most: float
) -> None:
    times = draws(**table)
    assert sum(times) / len(times) == pytest.approx(mean, rel=0.03)
    assert least <= min(times)
    assert max(times) <= most
    if table["jitter"]:
        assert len(set(times)) > len(times) // 2


def test_a_learner_may_have_a_jitter_of_its_own() -> None:
    times = draws(jitter=0.1, learner_jitter={0: 0.3})
    assert (min(times), max(times)) == pytest.approx((0.7, 1.3), abs=0.01)


def test_a_few_steps_take_much_longer() -> None:
    times = draws(jitter=0.0, straggler_probability=0.02, straggler_factor=7.0)
    assert set(times) == {1.0, 7.0}
    assert times.count(7.0) == pytest.approx(0.02 * len(times), rel=0.2)


def test_the_median_of_the_lognormal_is_the_mean_time() -> None:
    times = sorted(draws(jitter=0.5, distribution="lognormal"))
    assert times[len(times) // 2] == pytest.approx(1.0, rel=0.03)


def test_what_a_server_and_a_test_take_is_in_the_table() -> None:
    known = model(2, gradient_s=1.0, update_s=2.0, evaluation_s=3.0)
    assert known.local_s(SERVER) == {Accumulate: 1.0, Update: 2.0, StepReplica: 2.0, TrainInPlace: 2.0, Evaluate: 3.0}


def test_what_is_of_each_byte_grows_with_the_weights_or_what_a_role_holds_of_them() -> None:
    table = {"gradient_s_per_byte": 1.0, "update_s_per_byte": 2.0, "copy_s_per_byte": 0.5, "evaluation_s": 3.0}
    run = Job(cluster={"learners": 2}, simulation=table)
    known = CostModel(run.simulation, run.plan(), 4, size_bytes=100)
    assert known.local_s(SERVER) == {
        Accumulate: 100.0,
        Update: 200.0,
        StepReplica: 200.0,
        TrainInPlace: 200.0,
        PullReplica: 50.0,
        Copy: 50.0,
        Evaluate: 3.0,
    }
    sharded = run.with_(topology={"name": "sharded", "options": {"shards": 4}}).plan()
    quarter = CostModel(run.simulation, sharded, 4, size_bytes=100)
    assert quarter.local_s(1) == {
        Accumulate: 25.0,
        Update: 50.0,
        StepReplica: 50.0,
        TrainInPlace: 50.0,
        PullReplica: 12.5,
        Copy: 12.5,
        Evaluate: 0.75,
    }
    assert quarter.local_s(sharded.statistics) == known.local_s(SERVER)


@pytest.mark.parametrize("key", ["gradient_s", "update_s"])
def test_seconds_are_of_an_action_or_of_a_byte(key: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"^\[simulation\] {key} is not supported with {key}_per_byte; use one of them$"
    ):
        Job(simulation={key: 0.5, f"{key}_per_byte": 1e-9})
    per_byte = Job(simulation={f"{key}_per_byte": 1e-9})
    assert Job(**json.loads(per_byte.to_json())).to_json() == per_byte.to_json(), "a file of a run has every key"


@pytest.mark.parametrize(
    ("compute_s", "sizes", "text"),
    [
        (0.1, (3,), ""),
        (BENT, (4, 64), ""),
        (BENT, (8, 4, 12), "compute_s of mini-batches of 8, 12 is interpolated between 4 and 16"),
        (BENT, (32,), "compute_s of mini-batches of 32 is interpolated between 16 and 64"),
        (BENT, (128,), "compute_s of mini-batches of 128 is extrapolated from 16 and 64"),
        ({8: 0.4}, (2, 4), "compute_s of mini-batches of 2, 4 is extrapolated from 8"),
        (
            BENT,
            (1, 5, 6, 7, 8),
            "compute_s of mini-batches of 1 is extrapolated from 4 and 16; "
            "compute_s of mini-batches of 5, 6, 7, … is interpolated between 4 and 16",
        ),
    ],
)
def test_what_nobody_has_measured_is_said(compute_s: Any, sizes: tuple[int, ...], text: str) -> None:
    assert guessed(compute_s, sizes) == text


# Cost files.


def job(model_name: Any = "lenet", **simulation: Any) -> Job:
    return Job(model={"name": model_name}, cluster={"learners": 2}, simulation=simulation)


def written(directory: Path, text: str) -> str:
    path = directory / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_job_without_a_cost_file_stays_as_it_is() -> None:
    plain = job(compute_s=3.0)
    assert load(plain) is plain


CLUSTER = """
latency_s = 0.25
update_s = 0.5
[models.lenet]
compute_s = { 4 = 0.125, 16 = 0.25 }
update_s = 0.75
[models.mlp]
compute_s = 9.0
[measured]
on = "a machine"
"""


@pytest.mark.parametrize(
    ("model_name", "own", "expected"),
    [
        ("lenet", {}, {"latency_s": 0.25, "update_s": 0.75, "compute_s": {4: 0.125, 16: 0.25}}),
        ("mlp", {}, {"latency_s": 0.25, "update_s": 0.5, "compute_s": 9.0}),
        ("alexnet", {"compute_s": 3.0}, {"latency_s": 0.25, "update_s": 0.5, "compute_s": 3.0}),
        ("lenet", {"update_s": 2.0, "compute_s": 1.0}, {"latency_s": 0.25, "update_s": 2.0, "compute_s": 1.0}),
        ("lenet", {"latency_s": 1e-5}, {"latency_s": 1e-5, "update_s": 0.75}),  # a default, but the job says so
        ("lenet", {"jitter": 0.5}, {"jitter": 0.5, "update_s": 0.75}),
    ],
)
def test_the_jobs_own_keys_win_over_the_models_and_those_over_the_files(
    tmp_path: Path, model_name: str, own: dict[str, Any], expected: dict[str, Any]
) -> None:
    loaded = load(job(model_name, costs=written(tmp_path, CLUSTER), **own)).simulation
    assert {key: getattr(loaded, key) for key in expected} == expected


@pytest.mark.parametrize(
    ("far", "near", "own", "expected"),
    [
        ("update_s = 0.5", "update_s_per_byte = 0.25", {}, (1e-4, 0.25)),
        ("update_s_per_byte = 0.25", "update_s = 0.5", {}, (0.5, None)),
        ("update_s_per_byte = 0.25", "", {"update_s": 1e-4}, (1e-4, None)),
        ("", "update_s = 0.5", {"update_s_per_byte": 0.125}, (1e-4, 0.125)),
        ("update_s_per_byte = 0.25", "", {}, (1e-4, 0.25)),
    ],
)
def test_what_is_nearer_wins_in_whichever_unit(
    tmp_path: Path, far: str, near: str, own: dict[str, Any], expected: tuple[float, float | None]
) -> None:
    costs_file = written(tmp_path, f"{far}\n[models.lenet]\ncompute_s = 1.0\n{near}")
    loaded = load(job(costs=costs_file, **own))
    assert (loaded.simulation.update_s, loaded.simulation.update_s_per_byte) == expected
    assert load(loaded) == loaded


def test_a_model_that_the_file_does_not_know_needs_a_compute_time(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"mine.toml: has no model 'alexnet', only .*; set \[simulation\] compute_s"):
        load(job("alexnet", costs=written(tmp_path, CLUSTER)))


def test_a_compute_time_of_the_file_is_for_models_that_it_does_not_know(tmp_path: Path) -> None:
    path = written(tmp_path, "compute_s = 5.0\n[models.lenet]\ncompute_s = 2.0")
    assert [load(job(name, costs=path)).simulation.compute_s for name in ("lenet", "mlp")] == [2.0, 5.0]


def lenet(**options: Any) -> None:
    """A model given as an object goes by its name."""


def test_a_model_that_is_an_object_goes_by_its_name(tmp_path: Path) -> None:
    assert load(job(lenet, costs=written(tmp_path, CLUSTER))).simulation.update_s == 0.75


@pytest.mark.parametrize(
    ("name", "model_name"),
    [(name, model) for name in presets() for model in tomllib.loads(find(name).read_text(encoding="utf-8"))["models"]],
)
def test_every_preset_loads(name: str, model_name: str) -> None:
    assert load(job(model_name, costs=name)).simulation != job(model_name, costs=name).simulation


def test_clusters_of_papers_are_presets() -> None:
    assert presets() == ["crossbow", "p775", "ralp", "wan"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("compute_s = ", "mine.toml: Invalid value"),
        ("bandwith = 3", "mine.toml: [simulation] unknown key 'bandwith'"),
        ("latency_s = -1.0", "mine.toml: [simulation] latency_s"),
        ("compute_s = {}", "mine.toml: [simulation] compute_s"),
        ("[models.lenet]\nspeed = 3", "mine.toml: [simulation] unknown key 'speed'"),
        ("models = 3", "mine.toml: models must be tables [models.NAME]"),
        ("[models]\nlenet = 3", "mine.toml: models must be tables [models.NAME]"),
        ("[slowdown]\n7 = 2.0", "mine.toml: [simulation] slowdown names learner 7"),
    ],
)
def test_what_is_no_cost_file_is_one_line(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(job(costs=written(tmp_path, text)))
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_an_unknown_name_lists_the_presets_and_a_directory_is_no_cost_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load(job(costs="p776"))
    assert str(error.value) == (
        f"[simulation] costs = 'p776' is neither a file nor a preset; use a file or one of {', '.join(presets())}; "
        "did you mean p775?"
    )
    with pytest.raises(ConfigError, match="neither a file nor a preset"):
        load(job(costs=str(tmp_path)))


def test_presets_are_found_where_they_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "slow.toml").write_text("latency_s = 1.0", encoding="utf-8")
    monkeypatch.setattr(cost_files, "PRESETS", tmp_path)
    assert presets() == ["slow"]
    assert load(job(costs="slow")).simulation.latency_s == 1.0


def test_where_costs_come_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured here counts where a job says nothing itself, for the model that it is of."""
    monkeypatch.setattr(cost_files, "MEASURED", tmp_path)
    job = Job(model={"name": "mlp"})
    assert cost_files.source(job) is None
    assert cost_files.load(job) == job
    path = cost_files.measured_path(job)
    path.write_text("message_s = 0.5\n[models.mlp]\ncompute_s = 7.0\n")
    assert cost_files.source(job) == str(path)
    loaded = cost_files.load(job.with_(simulation={"message_s": 0.25}))
    table = loaded.simulation
    assert (table.compute_s, table.message_s, table.costs) == (7.0, 0.25, str(path))
    assert cost_files.source(loaded) == str(path)
    for other in (
        job.with_(model={"name": "lenet"}),
        job.with_(data={"name": "cifar10"}),
        job.with_(simulation={"costs": "defaults"}),
    ):
        assert cost_files.source(other) is None
    assert cost_files.source(job.with_(simulation={"costs": "p775"})) == "p775"
    own = job.with_(simulation={"compute_s": 0.2})
    assert cost_files.source(own) == "the job"
    assert cost_files.load(own) == own
    assert cost_files.measured_path(job.with_(training={"minibatch_size": 4, "epochs": 3})) == path


@pytest.mark.parametrize(
    "tables",
    [
        {"model": {"options": {"hidden": [3]}}},
        {"data": {"options": {"size": 32}}},
        {"training": {"precision": "bfloat16"}},
        {"training": {"compile": True}},
        {"cluster": {"device": "cuda"}},
        {"optimizer": {"name": "adam"}},
    ],
    ids=str,
)
def test_what_decides_how_long_a_minibatch_takes_has_a_file_of_its_own(tables: dict[str, Any]) -> None:
    job = Job(model={"name": "mlp"}, data={"name": "folder", "path": "images"})
    assert cost_files.measured_path(job.with_(**tables)) != cost_files.measured_path(job)


@pytest.mark.parametrize(("name", "other"), [("processor", "another processor"), ("cores", 1000)])
def test_what_another_machine_measured_is_not_of_this_one(
    name: str, other: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = cost_files.measured_path(Job())
    monkeypatch.setattr(cost_files, name, lambda: other)
    assert cost_files.measured_path(Job()) != here


@pytest.mark.parametrize(("options", "labelled"), [([], True), (["--set", "simulation.compute_s=0.5"], False)])
def test_times_that_nobody_measured_are_labelled(
    options: list[str], labelled: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = ["digits", "--set", "training.epochs=1", "--set", "data.train_limit=64", *options]
    assert main(["simulate", *job, "--output", str(tmp_path / "run.h5")]) == 0
    assert main(["predict", *job]) == 0
    assert main(["show", str(tmp_path / "run.h5")]) == 0
    said = capsys.readouterr().out
    assert said.count("not measured here: run rudra calibrate") == 3 * labelled


def test_a_backward_pass_takes_twice_as_long_as_a_forward_pass() -> None:
    """Of what the stage server does not compute: three quarters of a mini-batch here."""
    run = Job(cluster={"learners": 2})
    found = CostModel(run.simulation, run.plan(), 4, placed=Placed(back=0.25))
    assert (found.pieces[RunFirstStage], found.pieces[BackpropFirstStage]) == (0.25, 0.5)
