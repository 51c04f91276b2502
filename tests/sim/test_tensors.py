"""Tensors in a simulation: what is shared, how much is held, gradients computed together, and none at all."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from clusters import Guarded, TrialResult, train
from hypothesis import given
from hypothesis import strategies as st
from rules import Eager
from torch import nn

import rudra
from rudra.compute.device import placement
from rudra.compute.executor import Executor
from rudra.compute.making import make_executors
from rudra.compute.vectors import Buffer
from rudra.core.actions import Compute, Copy, Reduce, Update
from rudra.core.buffer_names import GRADIENT, WEIGHTS
from rudra.core.records import Gradient
from rudra.data.load import load
from rudra.errors import ConfigError
from rudra.job.job import Job
from rudra.simulation import tensors
from rudra.simulation.batching import BigBatchTensors, VmapTensors
from rudra.simulation.tensors import RealTensors
from topologies import load as load_topology

BUSY = {"jitter": 0.9, "latency_jitter_s": 0.05, "message_s": 1e-3, "update_s": 5e-3}


def make_job(name: str = "async", learners: int = 4, *, model: Any = "mlp", limit: int = 480, **tables: Any) -> Job:
    training = {"minibatch_size": 8, "epochs": 1, "evaluate": False, "seed": 3, **tables.pop("training", {})}
    job = Job(
        model={"name": model},
        data={"train_limit": limit, "test_limit": 40},
        training=training,
        optimizer={"learning_rate": 0.01, "momentum": 0.9},
        protocol={"name": name, "reference_batch_size": 32, **tables.pop("protocol", {})},
        cluster={"learners": learners, "threads_per_rank": 1, **tables.pop("cluster", {})},
        simulation={**BUSY, **tables.pop("simulation", {})},
        **tables,
    )
    return job.resolved()


class Copying(Guarded):
    """Every role has buffers of its own, and a transfer copies: how real ranks do it."""

    def _share(self, source: tensors.RoleBuffer, target: tensors.RoleBuffer) -> None:
        buffer = self._new(target[0])
        buffer.vector.copy_(self._held(source).vector)
        self._hold(target, buffer)

    def _forget_stale(self, weights: tensors.RoleBuffer) -> None:
        """Nobody shares with the server, so that says nothing."""


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: nn.Sequential(nn.Flatten(), nn.Dropout(0.3), nn.Linear(64, 10)),
    "batch norm": lambda: nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 10)),
}


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize(("protocol", "learners"), [("async", 5), ("softsync", 4), ("hardsync", 3)])
def test_sharing_changes_no_bit(protocol: str, learners: int, network: str) -> None:
    job = make_job(protocol, learners, model=NETWORKS[network], training={"evaluate": True, "epochs": 2})
    shared, copied = train(job), train(job, Copying)
    assert torch.equal(shared.weights, copied.weights)
    for table in ("gradients", "updates", "epochs"):
        assert shared.rows[table].tobytes() == copied.rows[table].tobytes()


def learner_weights(trained: TrialResult) -> list[Any]:
    return [trained.executors[role].buffer("weights") for role in trained.plan.learners]


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("protocol", "n", "at_most"),
    [
        ("async", None, 30 + 6),  # everybody has weights of its own, or a gradient that waits for its turn
        ("softsync", 30, 30 + 6),
        ("softsync", 1, 30 + 6),
        ("hardsync", None, 30 + 2),  # one version of the weights
    ],
)
@pytest.mark.parametrize("bandwidth", [1e10, 5e7])
def test_only_versions_that_somebody_holds_are_kept(
    protocol: str, n: int | None, at_most: int, bandwidth: float
) -> None:
    rule = {} if n is None else {"n": n}
    simulation = {"jitter": 0.1, "latency_jitter_s": 0.0, "message_s": 1e-5, "bandwidth_bytes_per_s": bandwidth}
    job = make_job(protocol, 30, limit=1437, protocol=rule, simulation=simulation, training={"epochs": 2})
    trained = train(job, Unpoisoned)
    assert trained.rows.totals["timestamp"] > 8
    assert trained.tensors.vectors <= at_most


class Unpoisoned(RealTensors):
    """As in a simulation: what is posted holds no vector."""


def executors(count: int) -> dict[int, Executor]:
    return {role: Executor((), 3, 3, 1) for role in range(count)}


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), min_size=1, max_size=9),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_a_group_adds_on_each_node_and_then_the_nodes(members: list[tuple[int, int]], alike: bool, seed: int) -> None:
    """The stated order, addition by addition; on one node it is the group's."""
    generator = np.random.default_rng(seed)
    nodes, samples = [node for node, _ in members], [4 if alike else count for _, count in members]
    made = [generator.standard_normal(3, np.float32) * np.float32(10) ** i for i in range(len(members))]
    sums: dict[int, Any] = {}
    for node, count, gradient in zip(nodes, samples, made, strict=True):
        weighed = gradient if len(set(samples)) == 1 else gradient * np.float32(count)
        sums[node] = sums[node] + weighed if node in sums else weighed
    first, *others = sums.values()
    for other in others:
        first = first + other
    expected = first * np.float32(1 / (len(members) if len(set(samples)) == 1 else sum(samples)))
    found = {}
    for reduction in ("nodes", "ordered"):
        plan = load_topology("groups", {"reduction": reduction}).plan(len(nodes), nodes)
        roles = {role: Executor((), 3, 3, 1) for role in plan.learners}
        reductions = {}
        for role, gradient, count in zip(plan.learners, made, samples, strict=True):
            roles[role].buffer(GRADIENT).vector.copy_(torch.from_numpy(gradient))
            about = Gradient(-1, role, count, 0, 0, 0, 0, 1.0, 0.0, 0.0, 0)
            reductions[role] = Reduce(GRADIENT, 0, 0, about, True)
        RealTensors(roles).reduce(reductions, plan.partial_sums(plan.learners))
        found[reduction] = roles[plan.learners[-1]].buffer(GRADIENT).vector.numpy().tobytes()
    assert found["nodes"] == expected.tobytes()
    assert len(sums) > 1 or found["ordered"] == found["nodes"]


def test_an_optimiser_steps_the_weights_that_its_role_holds() -> None:
    """Replicas that take over the same weights hold one vector, until each takes a step of its own."""
    job = make_job("async", 3, topology={"name": "groups"})
    plan = job.plan()
    roles = make_executors(job, plan, tuple(range(len(plan.roles))), load(job.data), prefetch=False)
    kept = RealTensors(roles)
    first, *others = plan.learners
    before = roles[first].buffer("weights").vector.clone()
    for other in others:
        kept.transfer(first, "weights", other, "weights")
    for role in plan.learners:
        roles[role].buffer("gradient").vector.fill_(role)
        kept.perform(role, Update("gradient", "weights", 0.5, 1), 0.0)
    for role in plan.learners:
        assert torch.equal(roles[role].buffer("weights").vector, before - 0.5 * role)


def test_receivers_share_one_vector_and_get_a_copy_before_it_is_written_to() -> None:
    roles = executors(4)
    kept = RealTensors(roles)
    roles[0].buffer("weights").vector.fill_(1.0)
    for learner in (1, 2):
        kept.transfer(0, "weights", learner, "weights")
    kept.perform(0, Copy("weights", "snapshot"), 0.0)
    assert kept.vectors == 0
    kept._make_own((0, "weights"))
    roles[0].buffer("weights").vector.fill_(2.0)
    old = roles[1].buffer("weights")
    assert old is roles[2].buffer("weights") is roles[0].buffer("snapshot")
    assert old.vector.tolist() == [1.0] * 3
    assert kept.vectors == 1
    kept.transfer(0, "weights", 3, "weights")
    for role, name in ((1, "weights"), (2, "weights")):
        kept.posted(role, name)
    kept.transfer(0, "snapshot", 1, "other")
    kept.sent(0, "snapshot")
    assert roles[1].buffer("other") is old, "still held"
    kept.posted(1, "other")
    kept._make_own((0, "weights"))
    assert roles[3].buffer("weights") is old, "used again"
    assert kept.vectors == 1


class Noisy(Guarded):
    """Breaks a lease: writes into what is lent."""

    def lent(self, role: int, buffer: str) -> None:
        super().lent(role, buffer)
        if buffer == "gradient":
            self._executors[role].buffer(buffer).vector.add_(1.0)


class Hasty(Guarded):
    """Gives weights back that are still computed with."""

    def planned(self, role: int, action: Any) -> None:
        super().planned(role, action)
        if isinstance(action, Compute):
            self.posted(role, action.weights)


@pytest.mark.parametrize(("broken", "text"), [(Noisy, "changed in flight"), (Hasty, "weights of role 2 changed")])
def test_broken_leases_are_noticed(broken: type[Guarded], text: str) -> None:
    with pytest.raises(AssertionError, match=text):
        train(make_job(learners=2), broken)


# Gradients of several learners together.


@pytest.mark.each_value
@pytest.mark.slow
@pytest.mark.parametrize("model", ["mlp", "lenet", NETWORKS["dropout"]], ids=["mlp", "lenet", "dropout"])
@pytest.mark.parametrize(
    ("kind", "protocol"), [(BigBatchTensors, "hardsync"), (VmapTensors, "hardsync"), (VmapTensors, "async")]
)
def test_together_as_one_by_one(kind: type[RealTensors], protocol: str, model: Any) -> None:
    job = make_job(protocol, 4, model=model)
    one_by_one, together = train(job, Unpoisoned), train(job, kind)
    ours, theirs = together.rows["gradients"], one_by_one.rows["gradients"]
    for column in ("learner", "step", "timestamp", "update", "samples"):
        assert np.array_equal(ours[column], theirs[column])
    if isinstance(model, str):  # dropout draws other masks
        assert (together.weights - one_by_one.weights).abs().max() < 1e-5
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-4)
        assert np.array_equal(ours["errors"], theirs["errors"])
    else:
        assert ours["loss"].mean() == pytest.approx(theirs["loss"].mean(), rel=0.1)
    again = train(job, kind)
    assert torch.equal(together.weights, again.weights)


def test_a_joint_gradient_is_computed_once_and_shared() -> None:
    class Counting(BigBatchTensors):
        def _new(self, *place: Any) -> Any:
            self.asked = getattr(self, "asked", 0) + 1
            return super()._new(*place)

    trained = train(make_job("hardsync", 6), Counting)
    updates = int(trained.rows.totals["timestamp"])
    assert trained.rows.totals["applied"] == 6 * updates
    assert trained.tensors.vectors <= 4
    assert trained.tensors.asked <= 2 * updates + 2  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("protocol", "topology"),
    [
        ("async", {"name": "groups", "options": {"groups": 3}}),
        ("hardsync", {"name": "groups", "options": {"groups": 1}}),
        ("sma", {"name": "replicas", "options": {"groups": 2}}),
    ],
)
def test_a_group_computes_one_gradient(protocol: str, topology: dict[str, Any]) -> None:
    """It is the mean of those of its members, at the same time and at the same weights."""
    job = make_job(protocol, 5, topology=topology)
    groups = job.plan().groups
    joint: list[int] = []

    class Counting(BigBatchTensors):
        def _new(self, role: int, *name: Any) -> Any:
            joint.extend([role] if not name else [])
            return super()._new(role, *name)

    one_by_one = train(job, Unpoisoned)
    together = train(job, lambda executors: Counting(executors, groups=groups))
    ours, theirs = together.rows["minibatches"], one_by_one.rows["minibatches"]
    for column in ("learner", "step", "timestamp", "samples", "time_s", "errors"):
        assert np.array_equal(ours[column], theirs[column])
    assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
    assert (together.weights - one_by_one.weights).abs().max() < 1e-6
    steps = [1 + max(ours["step"][ours["learner"] == together.plan.roles[group[0]].index]) for group in groups]
    assert len(joint) <= sum(steps) + len(groups)


def test_large_layers_that_write_their_own_gradients_are_no_hooks(tmp_path: Path) -> None:
    job = make_job("hardsync", 3, model="lenet", limit=48, simulation={"batching": "big-batch"})
    with rudra.simulate(job, output=tmp_path / "run.h5", progress="quiet") as results:
        assert results.status == "finished"


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(inputs.flatten(1))
        return output if output.sum() > 0 else 2 * output


class Counting(nn.Module):
    """Changes a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += len(inputs)  # type: ignore[operator]
        output: torch.Tensor = self.layer(inputs.flatten(1))
        return output


@pytest.mark.parametrize(
    ("batching", "protocol", "model", "text"),
    [
        ("big-batch", "softsync", "mlp", "needs a protocol whose updates take one gradient of every learner"),
        ("big-batch", "hardsync", NETWORKS["batch norm"], "BatchNorm (1) depends on which samples share a batch"),
        ("vmap", "async", Branching, "torch.func.vmap does not support torch.Tensor.__bool__ of this model"),
        ("big-batch", "hardsync", Counting, "changes its buffers"),
    ],
)
def test_what_cannot_be_batched_is_said(batching: str, protocol: str, model: Any, text: str, tmp_path: Path) -> None:
    job = make_job(protocol, 3, model=model, simulation={"batching": batching})
    with pytest.raises(ConfigError) as caught:
        rudra.simulate(job, output=tmp_path / "run.h5", progress="quiet")
    assert str(caught.value).startswith(f"[simulation] batching = '{batching}'")
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run.h5").exists()


def test_big_batch_notices_learners_with_different_weights() -> None:
    job = make_job("async", 3, protocol={"name": Eager, "modulation": "none"})
    with pytest.raises(ConfigError, match=r"learners compute step [0-9]+ at different weights"):
        train(job, BigBatchTensors)


# Whole simulations.


def test_batching_is_recorded_and_makes_no_claim(tmp_path: Path) -> None:
    job = make_job("hardsync", 3, simulation={"batching": "big-batch"})
    with rudra.simulate(job, output=tmp_path / "run.h5", progress="quiet") as results:
        assert not results.attributes["replayable"]
        assert '"batching": "big-batch"' in results.attributes["job"]


def test_without_tensors_the_same_things_happen_at_the_same_time(tmp_path: Path) -> None:
    job = make_job("softsync", 5, protocol={"n": 2}, training={"epochs": 2})
    timed = job.with_(simulation={"tensors": False}, training={"evaluate": True})
    with (
        rudra.simulate(job, output=tmp_path / "tensors.h5", progress="quiet") as full,
        rudra.simulate(timed, output=tmp_path / "timing.h5", progress="quiet") as bare,
    ):
        columns = ["update", "learner", "samples", "step", "timestamp", "staleness", "scale"]
        assert all(np.array_equal(full.gradients[c], bare.gradients[c]) for c in columns)
        columns = ["timestamp", "epoch", "gradients", "samples", "learning_rate", "mean_staleness", "time_s"]
        assert all(np.array_equal(full.updates[c], bare.updates[c]) for c in columns)
        assert bare.status == "finished"
        assert bare.weights is None
        assert (bare.gradients["loss"] == 0).all()
        assert (bare.epochs["evaluated"] == 0).all()
        assert (bare.epochs["weights_sha256"] == b"").all()
        assert [entry.name for entry in bare.layout] == [entry.name for entry in full.layout]


def test_a_model_that_needs_real_tensors_is_built_for_its_size_alone(tmp_path: Path) -> None:
    def network() -> nn.Module:
        made = nn.Linear(64, 10)
        made.weight.detach().numpy()[:] = 0  # no such thing on the meta device
        return nn.Sequential(nn.Flatten(), made)

    job = make_job(model=network, simulation={"tensors": False})
    with rudra.simulate(job, output=tmp_path / "run.h5", progress="quiet") as results:
        assert sum(entry.size for entry in results.layout) == 650


# Devices.


def test_no_gpu_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert placement.virtual("auto", window=False).type == "cpu"
    with pytest.raises(ConfigError, match=r"\[cluster\] device = 'cuda': torch sees no GPU here; valid: cpu, auto"):
        placement.virtual("cuda", window=False)


@pytest.mark.gpu
@pytest.mark.parametrize("batching", ["none", "vmap"])
def test_a_gpu_computes_what_a_cpu_does(batching: str, tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU here")
    found = []
    for device in ("cpu", "cuda"):
        job = make_job("softsync", 4, model="lenet", cluster={"device": device}, training={"evaluate": True})
        job = job.with_(simulation={"batching": batching if device == "cuda" else "none"})
        with rudra.simulate(job, output=tmp_path / f"{device}.h5", progress="quiet") as results:
            assert results.attributes["device"] == device
            found.append(results.weights)
    assert np.abs(found[0] - found[1]).max() < 1e-4


@pytest.mark.parametrize("flushed", [False, True])
def test_a_simulation_leaves_torch_as_it_was(flushed: bool, tmp_path: Path) -> None:
    if not torch.set_flush_denormal(flushed):
        pytest.skip("this processor cannot flush denormal numbers to zero")
    try:
        rudra.simulate(make_job(training={"epochs": 1}), output=tmp_path / "run.h5", progress="quiet").close()
        assert bool(torch.tensor(1e-40).mul(1.0).any()) is not flushed
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize(
    ("protocol", "tables"),
    [
        ("async", {"topology": {"name": "sharded"}}),
        ("softsync", {"topology": {"name": "adv*"}}),
        ("hardsync", {"placement": {"cut": 2}}),
        ("easgd", {"averaging": {"period": 2}}),
    ],
)
def test_simulation_of_more_updates_needs_no_more_memory(
    protocol: str, tables: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = 0

    def counted(self: Executor, name: str = WEIGHTS) -> Buffer:
        nonlocal made
        made += 1
        return new_buffer(self, name)

    new_buffer = Executor.new_buffer
    monkeypatch.setattr(Executor, "new_buffer", counted)
    found = []
    for epochs in (2, 6):
        made = 0
        train(make_job(protocol, limit=160, training={"epochs": epochs}, **tables), Unpoisoned)
        found.append(made)
    assert found[1] <= found[0] + 2
