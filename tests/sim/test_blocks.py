"""Compute groups that train one replica, and replicas with a reference for each block: in virtual time."""

from typing import Any

import numpy as np
import pytest
import torch
from clusters import TrialResult, train
from fuzzing import cases
from hypothesis import given
from hypothesis import strategies as st
from replicas import MU, averaged, flat, interleaved, replica
from torch.nn import functional
from torch.nn.utils import vector_to_parameters

import rudra
from protocols.sma import SMA
from rudra.compute import models
from rudra.core.buffer_names import REFERENCE
from rudra.data.load import load
from rudra.data.sampling import Sampler
from rudra.errors import ConfigError
from rudra.job.job import Job
from rudra.prepare.nodes import nodes_of
from rudra.simulation.costs import CostModel
from tests.selection import covering

GROUPED = {"name": "replicas", "options": {"groups": 2}}
BLOCKS = {"name": "hierarchical", "options": {"blocks": 2}}


def reference(trained: TrialResult, learner: int) -> torch.Tensor:
    return trained.executors[trained.plan.learners[learner]].buffer(REFERENCE).vector


def everything(trained: TrialResult) -> list[torch.Tensor]:
    """The weights, all replicas and, where there are any, references."""
    learners = range(len(trained.plan.learners))
    found = [trained.weights, *(replica(trained, learner) for learner in learners)]
    return found + [reference(trained, i) for i in learners if trained.plan.sharing == "reference"]


def equal(ours: TrialResult, other: TrialResult) -> bool:
    return all(map(torch.equal, everything(ours), everything(other)))


# Groups that train one replica.


@pytest.mark.parametrize(
    ("name", "averaging"), [("sma", {}), ("easgd", {"period": 2}), ("average", {"period": 3}), ("diloco", {})]
)
def test_groups_of_one_are_learners(name: str, averaging: dict[str, Any]) -> None:
    run = averaged(name, 3, 2 if name == "diloco" else 8, averaging={"period": 4, **averaging})
    alone, grouped = train(run), train(run.with_(topology={"name": "replicas", "options": {"groups": 3}}))
    assert equal(alone, grouped)
    assert np.array_equal(alone.rows["averages"], grouped.rows["averages"])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_one_group_is_hardsync(momentum: float) -> None:
    """With the momentum of the group's own optimiser, and an average of one replica, which is that replica."""
    run = averaged("average", 3, 40, optimizer={"momentum": momentum})
    one = train(run.with_(topology={"name": "replicas", "options": {"groups": 1}}))
    hardsync = train(run.with_(protocol={"name": "hardsync", "modulation": "none"}, topology={"name": "groups"}))
    assert one.rows.totals["timestamp"] == hardsync.rows.totals["timestamp"] == 40
    assert (one.weights - hardsync.weights).abs().max() <= 1e-5


def test_a_group_is_one_learner_of_its_batch() -> None:
    """Of the samples that its members draw; they all have its replica, and what they bring counts by its samples."""
    run = averaged("sma", 5, 10, optimizer={"momentum": 0.9}).with_(topology=GROUPED)
    assert run.make_protocol().learners == 2
    trained = train(run)
    assert trained.rows.totals["samples"] == 10 * 5 * MU
    assert [torch.equal(replica(trained, 0), replica(trained, i)) for i in (1, 2, 3, 4)] == [True, False, False, False]
    assert torch.equal(replica(trained, 2), replica(trained, 4))
    distances = trained.rows["averages"]["distance"].reshape(-1, 5)
    assert (distances == distances[:, [0, 0, 2, 2, 2]]).all()
    assert trained.rows["gradients"]["learner"].tolist() == [*range(5)] * 10


# A reference for each block.


def hierarchical(run: Job, averages: int, blocks: list[range], α: float) -> list[torch.Tensor]:
    """Plain torch: z, all replicas and all references after so many averages by SMA of references."""
    split, _, info, _ = load(run.data, test=False)
    k, period = run.learners, run.make_protocol().period
    replicas = [models.build(run.model, info, run.training.seed) for _ in range(k)]
    steppers = [torch.optim.SGD(each.parameters(), lr=0.02, momentum=0.5) for each in replicas]
    samplers = [Sampler(run.training.seed, j, run.data.train_limit or 0) for j in range(k)]
    z = before = flat(replicas[0])
    references = [z.clone() for _ in blocks]
    for step in range(averages * period):
        for block, r in zip(blocks, references, strict=True):
            given_up = torch.zeros_like(z)
            for j in block:
                apart = flat(replicas[j]) - r
                inputs, labels = split.batch(samplers[j].indices(step * MU, MU))
                steppers[j].zero_grad()
                functional.cross_entropy(replicas[j](inputs), labels).backward()
                steppers[j].step()
                vector_to_parameters(flat(replicas[j]) - apart / (len(block) + 1), replicas[j].parameters())
                given_up += apart / (len(block) + 1)
            r += given_up
        if step % period == period - 1:
            apart_from_z = [r - z for r in references]
            for r, apart in zip(references, apart_from_z, strict=True):
                r -= α * apart
            mean = sum(len(block) / k * apart for block, apart in zip(blocks, apart_from_z, strict=True))
            z, before = z + α * len(blocks) * mean + 0.9 * (z - before), z
    of_block = [r for block, r in zip(blocks, references, strict=True) for _ in block]
    return [z, *map(flat, replicas), *of_block]


@pytest.mark.parametrize(
    ("k", "blocks", "period"),
    [
        (4, [range(2), range(2, 4)], 1),
        (5, [range(2), range(2, 5)], 2),
        (3, [range(3)], 1),
        (2, [range(1), range(1, 2)], 1),
    ],
)
def test_references_are_averaged_by_sma(k: int, blocks: list[range], period: int) -> None:
    """Every step of the weights, of all replicas and of all references, up to the rounding of float32."""
    for averages in (1, 2, 7, 17):
        run = averaged("sma", k, averages, averaging={"period": period}, optimizer={"momentum": 0.5})
        trained = train(run.with_(topology={"name": "hierarchical", "options": {"blocks": len(blocks)}}))
        expected = hierarchical(run, averages, blocks, 1 / len(blocks))
        assert max((a - b).abs().max() for a, b in zip(expected, everything(trained), strict=True)) <= 1e-6


def test_blocks_are_the_nodes() -> None:
    run = averaged("sma", 5, 4, simulation={"nodes": 3})
    trained = train(run.with_(topology={"name": "hierarchical"}))
    assert [len(members) for members in trained.plan.groups] == [2, 2, 1]
    shared = [torch.equal(reference(trained, 0), reference(trained, i)) for i in range(5)]
    assert shared == [True, True, False, False, False]


def test_without_local_elasticity_references_stay() -> None:
    run = averaged("easgd", 4, 10, averaging={"local_elasticity": 0.0}, topology=BLOCKS)
    trained = train(run)
    alone = train(averaged("easgd", 4, 10, averaging={"elasticity": 0.0}))
    assert torch.equal(reference(trained, 0), trained.weights)
    assert all(torch.equal(replica(trained, i), replica(alone, i)) for i in range(4))


def test_inside_a_block_nothing_goes_between_nodes() -> None:
    """Of two nodes of four: all in one reduction of 8 bring 16 slices through a node's link, references alone fewer."""
    near = {"nodes": 2, "local_bandwidth_bytes_per_s": 1e12, "bandwidth_bytes_per_s": 1e6, "latency_s": 0.0}
    seconds = {}
    for name in ("replicas", "hierarchical"):
        run = averaged("sma", 8, 2, simulation=near).with_(topology={"name": name})
        plan = run.plan(nodes_of(run))
        costs = CostModel(run.simulation, plan, MU)
        seconds[name] = costs.reduction_s(plan.learners, 1_000_000)
        if name == "hierarchical":
            assert costs.reduction_s(plan.groups[0], 1_000_000) < 1e-3
    assert seconds["hierarchical"] == pytest.approx(2 * 4 / 8, rel=1e-3)
    assert seconds["replicas"] == pytest.approx(2 * 16 / 8, rel=1e-3)


# Both, and replicas that share nothing.

CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("average", {}, {"name": "replicas"}),
    ("diloco", {"period": 4}, {"name": "replicas"}),
    ("easgd", {}, {"name": "replicas"}),
    ("sma", {"period": 2}, {"name": "replicas"}),
    ("sma", {}, GROUPED),
    ("average", {"period": 3}, GROUPED),
    ("diloco", {"period": 2}, GROUPED),
    ("sma", {}, BLOCKS),
    ("sma", {"period": 3}, BLOCKS),
    ("easgd", {"period": 2, "local_elasticity": 0.4}, BLOCKS),
]


COVERING = [CASES[place] for place in (0, 1, 2, 4, 6, 9)]
"""Each rule and each topology."""


@pytest.fixture(scope="module", params=covering(COVERING, CASES), ids=str)
def calm(request: pytest.FixtureRequest) -> tuple[Job, TrialResult]:
    name, averaging, topology = request.param
    run = averaged(
        name, 5, 6, averaging=averaging, epochs=2, optimizer={"momentum": 0.9, "milestones": [1]}, topology=topology
    )
    run = run.with_(simulation={"jitter": 0.0, "latency_jitter_s": 0.0, "slowdown": {}})
    return run, train(run)


@pytest.mark.slow
def test_interleavings_change_no_bit(calm: tuple[Job, TrialResult]) -> None:
    run, undisturbed = calm

    @cases(15)
    @given(seed=st.integers(0, 10**6))
    def check(seed: int) -> None:
        # What is drawn at random is so by the seed of the training; slow learners and latencies are as good.
        other = train(run.with_(simulation=interleaved(seed)))
        assert equal(other, undisturbed)
        assert np.array_equal(other.rows["gradients"], undisturbed.rows["gradients"])

    check()


def test_resumed_runs_have_the_bits_of_one_that_went_on(calm: tuple[Job, TrialResult]) -> None:
    """From every checkpoint, which has the replica of each group, or all replicas and a reference of each block."""
    run, undisturbed = calm
    saving = train(run.with_(results={"checkpoint_every": "1 update"}))
    assert equal(saving, undisturbed)
    assert len(saving.saved) > 1
    kept = {name.partition(".")[0] for name in saving.saved[0].tensors if name.startswith("replica")}
    assert len(kept) == (2 if undisturbed.plan.sharing == "replica" else 5)
    for saved in saving.saved:
        assert equal(train(run, resumed=saved), undisturbed)


def test_stopped_runs_leave_a_checkpoint_to_go_on_from(calm: tuple[Job, TrialResult]) -> None:
    run, undisturbed = calm
    for share in (0.1, 0.4):
        stopped = train(run, stop_at=share * undisturbed.rows.time_s)
        assert stopped.rows.totals["timestamp"] < undisturbed.rows.totals["timestamp"]
        assert equal(train(run, resumed=stopped.saved[-1]), undisturbed)


@pytest.mark.each_value
@pytest.mark.parametrize("topology", [{"name": "replicas"}, GROUPED, BLOCKS], ids=str)
@pytest.mark.parametrize("dies", [1, 2, 3])
@pytest.mark.parametrize("name", ["sma", "easgd"])
def test_when_a_learner_dies_the_others_go_on_from_the_weights(topology: dict[str, Any], dies: int, name: str) -> None:
    """The first of a block, one of two, or a later one; and who is resumed with all knows who is missing."""
    faults = [{"dies_at_s": 1.6, "learner": dies}]
    simulation = {"faults": faults, "compute_s": 0.1, "jitter": 0.3}
    run = averaged(name, 4, 10, epochs=2, simulation=simulation, optimizer={"momentum": 0.9}).with_(topology=topology)
    trained = train(run.with_(results={"checkpoint_every": "3 updates"}))
    rows = trained.rows
    (lost,) = rows["events"][rows["events"]["kind"] == b"lost"]
    assert 2 < lost["timestamp"] < rows.totals["timestamp"]  # the weights have momentum, which all lose
    assert rows.totals["samples"] >= 2 * (run.data.train_limit or 0)
    last = rows["gradients"][rows["gradients"]["update"] == rows["gradients"]["update"].max()]
    assert sorted(last["learner"]) == sorted({0, 1, 2, 3} - {dies})
    assert torch.isfinite(trained.weights).all()
    whole = run.with_(simulation={"faults": []})
    resumed = train(whole, resumed=trained.saved[-1])
    assert set(resumed.rows["gradients"]["learner"]) == {0, 1, 2, 3}


@pytest.mark.parametrize("topology", [GROUPED, BLOCKS], ids=str)
def test_a_simulation_replays_identical(tmp_path: Any, topology: dict[str, Any]) -> None:
    run = averaged("sma", 5, 12, "mlp", 2, averaging={"period": 2}, optimizer={"momentum": 0.9, "milestones": [1]})
    path = tmp_path / "sma.h5"
    with rudra.simulate(run.with_(topology=topology), output=path, progress="quiet") as results:
        assert results.averages["learner"].tolist()[:5] == [0, 1, 2, 3, 4]
        assert results.plan().sharing == run.with_(topology=topology).plan().sharing != "nothing"
    assert rudra.replay(path, quiet=True).identical


@pytest.mark.parametrize(
    ("tables", "text"),
    [
        ({"topology": {"options": {"groups": 5}}}, r"options.groups = 5 is not supported with 4 learners; use 1 to 4"),
        (
            {"topology": {"options": {"groups": 2, "parameter_server": True}}},
            "groups is not supported with options.parameter_server = true; remove one",
        ),
        (
            {"topology": {"options": {"groups": 2, "reduction": "mpi"}}},
            "is not supported with blocks; use 'ordered' or 'nodes'",
        ),
        ({"topology": {"name": "hierarchical", "options": {"blocks": "node"}}}, "blocks = 'node' .*; use 'nodes', 1"),
        (
            {"topology": {"name": "hierarchical", "options": {"blocks": 0}}},
            "blocks = 0 is not supported with 4 learners; use 'nodes'",
        ),
        (
            {"topology": {"name": "hierarchical"}, "averaging": {"local_elasticity": 0.5}},
            r"local_elasticity = 0.5 is not supported with blocks of 4 learners; use 0 to less than 0.4$",
        ),
        (
            {"topology": BLOCKS, "averaging": {"local_elasticity": 0.6, "elasticity": 0.7}},
            "diverge with 2 blocks of 2; use smaller values",
        ),
        (
            {"averaging": {"local_elasticity": 0.1}},
            "local_elasticity is not supported without blocks; use topology hierarchical",
        ),
        (
            {"topology": BLOCKS, "protocol": {"name": "diloco"}},
            "hierarchical' is not supported with protocol diloco; use protocol easgd or sma",
        ),
        (
            {"topology": BLOCKS, "protocol": {"name": "hardsync"}},
            "hierarchical' is not supported with protocol hardsync; use protocol average",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(tables: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text) as raised:
        averaged("sma", 4, 4).with_(**tables)
    assert "\n" not in str(raised.value)


@cases(400)
@given(
    blocks=st.integers(1, 4),
    size=st.integers(1, 4),
    local=st.floats(0.02, 0.95),
    α=st.floats(0.02, 0.95),
    momentum=st.sampled_from([0.0, 0.5, 0.9]),
    period=st.integers(1, 3),
)
def test_replicas_run_away_where_that_is_refused_and_nowhere_else(
    blocks: int, size: int, local: float, α: float, momentum: float, period: int
) -> None:
    """Numbers in place of vectors, which nothing but the corrections moves."""
    local, α = local * 2 / (size + 1), α * 2 * (1 + momentum) / (blocks + 1 + momentum)
    given = {"local_elasticity": local, "elasticity": α, "outer": {"momentum": momentum}, "period": period}
    accepted = True
    try:
        SMA(blocks, **given, blocks=[size] * blocks)  # type: ignore[arg-type]
    except ValueError:
        accepted = False
    generator = np.random.default_rng(0)
    w, r = generator.normal(size=(blocks, size)), generator.normal(size=blocks)
    z, moved = 0.0, 1.0
    gaps = []
    for _ in range(400):
        for _ in range(period):
            apart = local * (w - r[:, None])
            w, r = w - apart, r + apart.sum(1)
        apart_from_z = α * (r - z)
        r = r - apart_from_z
        moved = apart_from_z.sum() + momentum * moved
        z += moved
        gaps.append(max(np.abs(w - z).max(), np.abs(r - z).max()))
    rate = (gaps[-1] / gaps[200]) ** (1 / 199) if gaps[-1] > 1e-12 else 0.0
    assert accepted == (rate < 1) or rate == pytest.approx(1, abs=1e-2)
