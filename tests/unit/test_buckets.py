"""Buckets of a gradient: their sizes, when a model reports them, what virtual time makes of them, and refusals."""

import math
import random
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzzing import cases
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import rudra
from rudra.cli.main import main
from rudra.compute.flat import FlatModel
from rudra.core.bucket_rules import (
    group_parts,
    pairs_of_nodes,
    passes_early,
    pull_parts,
    pulling,
    push_parts,
    pushing,
    refusal,
    text_of,
)
from rudra.core.buckets import ALIGNED, LEAST, MOST, FinalParts, NetworkSpeed, auto_size, bucket_size, parts
from rudra.core.training_state import BEGINNING
from rudra.errors import ConfigError, RunError
from rudra.job.job import Job
from rudra.prepare.nodes import nodes_of
from rudra.prepare.phases import phases_of
from rudra.simulation.assembly import prices_of

MILLION = 1_000_000


def groups(buckets: Any = "auto", nodes: int = 4, **tables: Any) -> Job:
    cluster = {"learners": 4, "buckets": buckets, **tables.pop("cluster", {})}
    simulation = {"nodes": nodes, **tables.pop("simulation", {})}
    given = {"protocol": {"name": "hardsync"}, "topology": {"name": "groups"}} | tables
    return Job(cluster=cluster, simulation=simulation, **given)


@pytest.mark.parametrize(
    ("buckets", "size", "elements"),
    [
        ("auto", 65_535, 65_535),  # of a server that takes a part of a gradient
        ("auto", 65_537, 65_536),
        ("auto", 100 * MILLION, 65_536),
        ("off", 100 * MILLION, 0),
        (1.0, 4 * MILLION, 250_000),
        (0.001, 2000, 256),
        (0.001, 62 * MILLION, MILLION),  # not more than MOST
        (100, 4 * MILLION, 0),
    ],
)
def test_size_of_a_bucket(buckets: Any, size: int, elements: int) -> None:
    assert bucket_size(groups(buckets), size, 65_536) == elements


GBIT = 1.2e8
"""Bytes per second of a link of 1 Gbit/s."""


@pytest.mark.parametrize(
    ("latency_s", "bytes_per_s", "megabytes", "bucket_mb", "count"),
    [
        # A bucket has a fixed time of 0.2 ms, in which 24 kB cross the link. Ten times this is the smallest bucket.
        (1e-4, GBIT, 0.48, 0, 0),
        (1e-4, GBIT, 0.4805, 0.24, 3),
        (1e-4, GBIT, 1.9, 0.24, 8),
        (1e-4, GBIT, 4.32, 0.322, 14),  # √(0.024 · 4.32)
        (1e-4, GBIT, 21.6, 0.72, 30),
        (1e-4, GBIT, 216, 216 / 62, 62),  # not more than MOST
        # At ten times the bandwidth 0.24 MB cross the link in this time.
        (1e-4, 10 * GBIT, 4.8, 0, 0),
        (1e-4, 10 * GBIT, 21.6, 2.4, 9),
        (1e-4, 10 * GBIT, 216, 7.2, 30),
        # Without latency only the rank's own time counts.
        (0.0, GBIT, 21.6, 0.509, 43),
        (0.0, 100 * GBIT, 21.6, 0, 0),
        (1e-5, 1e10, 100, 11, 10),
        # A slow network: small models gain, too. A distant one: its latency costs more than it hides.
        (1e-3, GBIT / 100, 0.4, 0.023, 18),
        (5e-2, GBIT, 21.6, 0, 0),
        (0.0, 1e300, 21.6, 0, 0),
    ],
)
def test_the_size_that_suits_a_network(
    latency_s: float, bytes_per_s: float, megabytes: float, bucket_mb: float, count: int
) -> None:
    size = round(megabytes * 1e6 / 4)
    found = auto_size(NetworkSpeed(latency_s, bytes_per_s), size)
    assert 4e-6 * found == pytest.approx(bucket_mb, rel=0.01)
    assert found % ALIGNED == 0
    assert (math.ceil(size / found) if found else 0) == count


@pytest.mark.parametrize(
    ("latency_s", "bytes_per_s", "megabytes", "bucket_mb", "count"),
    [
        # 0.2 ms of its own, and a third of 2 looks: 0.104 MB cross the link in this time. 2.12² = 2 · 21.6 · 0.104
        (1e-4, GBIT, 21.6, 2.12, 11),
        (2e-4, GBIT, 21.6, 2.24, 10),
        (1e-4, GBIT, 216, 6.70, 33),
        (1e-4, GBIT, 1.2, 0.4, 3),  # not fewer than LEAST
        (1e-4, GBIT, 0.4, 0, 0),
        # Copies take longer than the transfer of half a gradient: no pass begins early, and the size is the usual one.
        (1e-4, 10 * GBIT, 21.6, 2.4, 9),
    ],
)
def test_buckets_are_larger_where_passes_begin_early(
    latency_s: float, bytes_per_s: float, megabytes: float, bucket_mb: float, count: int
) -> None:
    size = round(megabytes * 1e6 / 4)
    found = auto_size(NetworkSpeed(latency_s, bytes_per_s), size, copies=2)
    assert 4e-6 * found == pytest.approx(bucket_mb, rel=0.01)
    assert (math.ceil(size / found) if found else 0) == count


NETWORKS = st.builds(NetworkSpeed, st.floats(0, 1), st.floats(1e3, 1e12))
SIZES = st.integers(1, 10**9)


@cases(400)
@given(network=NETWORKS, size=SIZES, factor=st.floats(1, 100))
def test_a_bucket_grows_with_latency_and_bandwidth_and_with_the_gradient_until_there_are_none(
    network: NetworkSpeed, size: int, factor: float
) -> None:
    found = auto_size(network, size)
    larger = auto_size(network, size, copies=2)
    assert larger >= found
    assert not larger or LEAST <= len(parts(size, size, larger)) < MOST
    if found:
        assert larger
        assert LEAST <= len(parts(size, size, found)) < MOST
        assert auto_size(network, round(size * factor)) >= found
        assert auto_size(network, max(1, round(size / factor))) <= found
    for other in (
        network._replace(latency_s=network.latency_s * factor),
        network._replace(bytes_per_s=network.bytes_per_s * factor),
    ):
        assert not (its := auto_size(other, size)) or its >= found > 0


@pytest.mark.parametrize("seed", range(30))
def test_parts_are_the_vector_and_the_last_parameters_come_first(seed: int) -> None:
    chance = random.Random(seed)
    parameters = chance.randint(1, 10_000)
    size = parameters + chance.choice([0, 1, 700])
    bucket = bucket_size(groups(chance.uniform(0.001, 0.05)), size, 0)
    found = parts(size, parameters, bucket)
    assert sorted(i for part in found for i in range(part.start, part.stop)) == list(range(size))
    assert len(found) <= MOST
    if bucket:
        trained = [part.start for part in found if part.start < parameters]
        assert trained == sorted(trained, reverse=True)
        assert all(start % ALIGNED == 0 for start in trained)
        assert found[-1] == slice(parameters, size) or size == parameters


@pytest.mark.parametrize("seed", range(30))
def test_a_part_is_final_with_the_last_of_its_pieces_in_any_order(seed: int) -> None:
    chance = random.Random(seed)
    edges = [0, *sorted(chance.sample(range(1, 1000), 20)), 1000]
    found = [slice(*ends) for ends in pairwise(edges)]
    chance.shuffle(found)
    final, known = FinalParts(found), [False] * 1000
    pieces = [slice(*ends) for ends in pairwise([0, *sorted(chance.sample(range(1, 1000), 30)), 1000])]
    chance.shuffle(pieces)
    for piece in pieces:
        before = {number for number, part in enumerate(found) if all(known[part])}
        known[piece] = [True] * (piece.stop - piece.start)
        after = {number for number, part in enumerate(found) if all(known[part])}
        assert sorted(final.add(piece)) == sorted(after - before)
    assert all(known)


class Twice(nn.Module):
    """A layer that is used twice, a branch that is not used, and layers that are used in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first, self.unused = nn.Linear(6, 3), nn.Linear(4, 6), nn.Linear(2, 2)
        self.middle = nn.Linear(6, 6)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.middle(torch.tanh(self.first(inputs))))
        found: torch.Tensor = self.last(torch.tanh(self.middle(hidden)))
        return found


MODELS = {
    "chain": lambda: nn.Sequential(nn.Linear(4, 40), nn.ReLU(), nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 3)),
    "autograd": lambda: nn.Sequential(nn.Linear(4, 40), nn.BatchNorm1d(40), nn.GELU(), nn.Linear(40, 3)),
    "another order": Twice,
}


@pytest.mark.parametrize("name", MODELS)
def test_what_a_model_reports_as_final_does_not_change_any_more(name: str) -> None:
    torch.manual_seed(1)
    flat = FlatModel(MODELS[name](), gradients="direct")
    weights, out = torch.empty(flat.size), torch.full((flat.size,), torch.nan)
    flat.read_into(weights)
    flat.bind(weights)
    inputs, target = torch.randn(16, 4), torch.randint(3, (16,))
    seen: dict[tuple[int, int], torch.Tensor] = {}

    def ready(part: slice) -> None:
        seen[part.start, part.stop] = out[part].clone()

    reported = flat.gradient(inputs, target, out, 0, ready)
    for (first, stop), then in seen.items():
        assert torch.equal(out[first:stop], then)
    ends = sorted(seen)
    assert all(stop <= first for (_, stop), (first, _) in pairwise(ends)), "no part is reported twice"
    unused = sum(entry.size for entry in flat.layout if "unused" in entry.name)
    assert sum(stop - first for first, stop in seen) == flat.parameter_count - unused
    whole = torch.full_like(out, torch.nan)
    flat.read_into(weights)
    flat.bind(weights)
    assert flat.gradient(inputs, target, whole, 0) == reported
    assert torch.equal(whole[: flat.parameter_count], out[: flat.parameter_count])


class Checkpointed(nn.Module):
    """Computes a layer twice, each time in a backward pass of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        once = checkpoint(self.layer, inputs.requires_grad_(), use_reentrant=True)
        found: torch.Tensor = checkpoint(self.layer, once, use_reentrant=True)
        return found


def test_a_gradient_that_grows_after_it_was_final_is_refused() -> None:
    flat = FlatModel(Checkpointed())
    weights, out = torch.empty(flat.size), torch.empty(flat.size)
    flat.read_into(weights)
    flat.bind(weights)
    with pytest.raises(RunError, match=r"\[cluster\] buckets: .*use_reentrant"):
        flat.gradient(torch.randn(2, 4), torch.tensor([0, 1]), out, 0, lambda first: None)
    flat.gradient(torch.randn(2, 4), torch.tensor([0, 1]), out, 0)


@pytest.mark.parametrize(
    ("bandwidth", "compute_s", "seconds"),
    [
        # 4 members, 16 MB: each sends 3/4 twice. The backward pass is 2/3 of a gradient, and 1/62 comes after it.
        (12e6, 1.2, 2.0 - 0.8 * 61 / 62),
        (12e6, 12.0, 2.0 / 62),  # only the last bucket is left
        (12e8, 1.2, 0.02 * math.sqrt(0.12 / 16)),  # 0.1 ms carry 0.12 of 16 MB
        (12e9, 1.2, 0.002),  # without buckets
    ],
)
def test_virtual_time_hides_the_reduction_in_the_backward_pass(
    bandwidth: float, compute_s: float, seconds: float
) -> None:
    table = {"latency_s": 0.0, "bandwidth_bytes_per_s": bandwidth, "compute_s": compute_s, "gradient_s": 0.0}
    found = {}
    for buckets in ("auto", "off"):
        job = groups(buckets, simulation=table, optimizer={"clip_norm": 1.0})  # so that no forward pass begins early
        costs = prices_of(phases_of(job, job.plan(nodes_of(job)), 64), 16 * MILLION)(BEGINNING)
        found[buckets] = costs.reduction_s(costs.plan.learners, 16 * MILLION)
    assert found == pytest.approx({"auto": seconds, "off": 24e6 / bandwidth}, rel=1e-3)


@pytest.mark.parametrize(
    ("job", "count"),
    [
        (groups(), 20),
        (groups("off"), 1),
        (groups(nodes=1), 1),
        (groups(nodes=1, cluster={"node_memory": False}), 1),
        (groups(1.0, nodes=1, cluster={"node_memory": False}), 16),
        (groups(1.0, nodes=1), 16),
        (groups(topology={"name": "groups", "options": {"reduction": "nodes"}}, nodes=2), 20),
        (groups(topology={"name": "groups", "options": {"reduction": "mpi"}}), 20),
        (groups(protocol={"name": "average"}, topology={"name": "replicas"}), 20),
        (groups(protocol={"name": "sma"}, topology={"name": "replicas"}), 1),
    ],
)
def test_buckets_are_for_gradients_that_cross_a_network(job: Job, count: int) -> None:
    plan = job.plan(nodes_of(job))
    assert len(group_parts(job, plan, 4 * MILLION, 4 * MILLION, 200_000, plan.learners)) == count
    assert bool(text_of(job, plan)) == (count > 1)


def served(buckets: Any = "auto", learners: int = 3, **tables: Any) -> Job:
    cluster = {"learners": learners, "buckets": buckets, **tables.pop("cluster", {})}
    simulation = {"nodes": 3, **tables.pop("simulation", {})}
    return Job(cluster=cluster, simulation=simulation, **{"protocol": {"name": "hardsync"}} | tables)


SHARDS = {"name": "sharded", "options": {"shards": 2}}
NEAR = {"simulation": {"nodes": 1}, "cluster": {"node_memory": False}}


@pytest.mark.parametrize(
    ("job", "learners"),
    [
        (served(), [1, 2]),
        (served(4.0, protocol={"name": "async"}), [1, 2]),
        (served(topology=SHARDS), [1, 2]),
        (served(topology={"name": "adv", "options": {"fan_out": 2}}), []),  # the root takes averages
        (served(protocol={"name": "async"}, topology={"name": "adv*"}), []),
        (served(protocol={"name": "async"}, topology={"name": "groups", "options": {"groups": 3}}), []),
        (served("off"), []),
        (served(simulation={"nodes": 1}), []),
        (served(1.0, simulation={"nodes": 1}), []),
        (served(**NEAR), []),
        (served(1.0, **NEAR), [0, 1, 2]),
        (served(training={"microbatches": 2}), []),
        (served(training={"compile": True}), []),
        (served(training={"precision": "float16"}), []),
        (served(training={"precision": "bfloat16"}), [1, 2]),
        (served(cluster={"gradient_format": "float16"}), []),
        (served(cluster={"device": "cuda"}), [1, 2]),
        (served(cluster={"device": "cuda", "transport": "mpi"}), []),
        (served(data={"name": "libsvm", "path": "a9a", "sparse": True}), []),
    ],
)
def test_learners_of_other_nodes_push_in_buckets_what_becomes_final_in_parts(job: Job, learners: list[int]) -> None:
    plan = job.plan(nodes_of(job))
    node = plan.nodes(near=True)
    found = [plan.roles[learner].index for learner in pushing(job, plan, node, plan.server)]
    assert found == learners
    assert bool(text_of(job, plan, node).startswith("pushed")) == bool(learners)


@pytest.mark.parametrize(
    ("job", "learners", "told"),
    [
        (served(), [1, 2], "weights come in buckets, too"),
        (served(protocol={"name": "async"}), [1, 2], "weights come in buckets, too"),
        (served(topology=SHARDS), [2], "weights come in buckets, too"),  # the second shard is on the node of learner 1
        (served(topology=SHARDS, simulation={"nodes": 2}), [], "weights come whole: a server is on the node of its"),
        (served(topology={"name": "adv", "options": {"fan_out": 2}}), [], ""),
        (served(protocol={"name": "async"}, topology={"name": "adv*"}), [], ""),
        (served(protocol={"name": "async"}, topology={"name": "groups", "options": {"groups": 3}}), [], ""),
        (served("off"), [], ""),
        (served(simulation={"nodes": 1}), [], ""),
        (served(1.0, **NEAR), [0, 1, 2], "weights come in buckets, too"),
        (served(training={"microbatches": 2}), [], ""),
        (served(learners=4, cluster={"learners_per_rank": 2}), [], "weights come whole: cluster.learners_per_rank = 2"),
        (served(cluster={"gradient_format": "float16"}), [1, 2], "weights come from servers unless they are small"),
        (served(optimizer={"name": "adam", "clip_norm": 1.0}), [1, 2], "weights come in buckets, too"),
    ],
)
def test_learners_of_other_nodes_that_wait_for_weights_get_them_in_buckets(
    job: Job, learners: list[int], told: str
) -> None:
    plan = job.plan(nodes_of(job))
    node = plan.nodes(near=True)
    for owner in plan.front_owners:
        assert [plan.roles[learner].index for learner in pulling(job, plan, node, owner)] == learners
    assert told in text_of(job, plan, node)
    assert not told or learners or "weights come whole" in told


@pytest.mark.parametrize("size", [1000, 1540])
def test_parts_of_weights_are_those_of_a_gradient_buffers_and_the_first_layers_first(size: int) -> None:
    job = served(0.001)
    found = pull_parts(job, size, 1000, 0)
    assert sorted(found, key=lambda part: part.start) == sorted(
        push_parts(job, size, 1000, 0, 1), key=lambda part: part.start
    )
    first = slice(1000, size)
    assert found[0] == (first if size > 1000 else slice(0, 256))
    assert (found[size > 1000].start, found[-1].stop) == (0, 1000)
    assert pull_parts(served("off"), size, 1000, 0) == []


@pytest.mark.parametrize(
    ("job", "pairs"),
    [
        (groups(nodes=3), {(0, 1), (0, 2), (1, 2)}),
        (groups(nodes=1), set()),
        (groups(1.0, nodes=3), set()),
        (groups("off", nodes=3), set()),
        (served(), {(0, 1), (0, 2)}),
        (served(topology=SHARDS), {(0, 1), (0, 2), (1, 2)}),  # the second server is on node 1
        (served(cluster={"gradient_format": "float16"}), {(0, 1), (0, 2)}),  # of weights
        (served(4.0), set()),
    ],
)
def test_the_network_between_nodes_that_exchange_gradients_decides_the_size(
    job: Job, pairs: set[tuple[int, int]]
) -> None:
    plan = job.plan(nodes_of(job))
    assert pairs_of_nodes(job, plan, plan.nodes(near=True)) == pairs


@pytest.mark.parametrize(
    ("buckets", "size", "senders", "count"),
    [
        ("auto", 4 * MILLION, 3, 3),  # and the last elements, which become final at the end
        ("auto", 100_000, 3, 2),
        ("auto", 4 * MILLION, 0, 0),
        ("auto", 100 * MILLION, 2, 51),
        ("auto", 100 * MILLION, 3, 0),  # 1.2 GB
        (10.0, 100 * MILLION, 3, 41),
    ],
)
def test_a_server_holds_a_gigabyte_of_gradients_in_buckets_at_most_unless_a_job_says_more(
    buckets: Any, size: int, senders: int, count: int
) -> None:
    found = push_parts(served(buckets), size, size - 10, 2 * MILLION, senders)
    assert len(found) == count
    assert sorted(i for part in found for i in (part.start, part.stop))[:: 2 * count - 1] == [0, size][: 2 * count]


@pytest.mark.parametrize(
    ("seconds", "sharing", "whole_s", "push_s", "pull_s"),
    [
        # 16 MB each way in `seconds`, for two learners on nodes of their own, and a server. A gradient takes 1.2 s, its
        # backward pass 0.8 s, which hides the pushes of all 32, 55 or 62 buckets except the last. In turns, the second
        # learner gets weights, computes and pushes while the first one already computes again. The forward pass of
        # 0.4 s begins with the first three buckets of weights, and computes the last two or one after all others.
        (0.1, "turns", 0.1, 0.1 / 32, 0.1 * 3 / 32),
        (0.3, "turns", 0.3, 0.3 / 55, 0.3 * 3 / 55),
        (1.0, "turns", 1.0, 1.0 - 0.8 * 61 / 62, 0.6 + 0.4 * 2 / 62),
        (1.0, "equal", 2.0, 2.0 - 0.8 * 61 / 62, 1.6 + 0.4 * 2 / 62),
        (0.3, "equal", 0.6, 2 * 0.3 / 55, 0.2 + 0.4 / 55),
    ],
)
def test_virtual_time_hides_pushes_in_the_backward_pass_and_weights_in_the_forward_pass(
    seconds: float, sharing: str, whole_s: float, push_s: float, pull_s: float
) -> None:
    table = {"latency_s": 0.0, "bandwidth_bytes_per_s": 16e6 / seconds, "compute_s": 1.2, "gradient_s": 0.0}
    free = {"message_s": 0.0, "update_s": 0.0, "jitter": 0.0, "tensors": False, "sharing": sharing}
    step_s = {}
    for buckets in ("auto", "off"):
        job = served(
            buckets,
            learners=2,
            simulation={"nodes": 2, **table, **free},
            model={"name": "mlp", "options": {"hidden": [2000, 1930]}},
            training={"epochs": 1, "minibatch_size": 8, "evaluate": False},
        )
        with (
            tempfile.TemporaryDirectory() as name,
            rudra.simulate(job, output=Path(name, "run.h5"), progress="quiet") as results,
        ):
            time_s, its = results.updates["time_s"], results.attributes
        network = NetworkSpeed(its["network_latency_s"], its["network_bytes_per_s"])
        assert network == (0.0, 16e6 / seconds)
        chosen = auto_size(network, 4 * MILLION) if buckets == "auto" else 0
        assert its["bucket_bytes"] == pytest.approx(4 * chosen, rel=0.01)
        step_s[buckets] = time_s[-1] - time_s[-2]
    both_s = 2 * seconds if sharing == "equal" else seconds
    waits_s = 1.2 + 2 * seconds - both_s  # in turns for the other learner's weights
    assert step_s == pytest.approx({"auto": waits_s + pull_s + push_s, "off": waits_s + both_s + whole_s}, rel=0.02)


SEVERAL = {"training": {"microbatches": 2}}


@pytest.mark.parametrize(
    ("job", "why"),
    [
        (served(1.0, **NEAR), ""),
        (groups(1.0, nodes=1), ""),
        (groups("off", nodes=1), ""),
        (served("auto", simulation={"nodes": 1}, **SEVERAL), ""),  # it does not ask for buckets
        (served(1.0, simulation={"nodes": 1}), "ranks of a node read them in memory; between nodes they have buckets"),
        (
            served(1.0, learners=4, simulation={"nodes": 1}, cluster={"learners_per_rank": 2}),
            "ranks of a node read them in memory; between nodes they have buckets, but weights come whole: "
            "cluster.learners_per_rank = 2 lets learners of a rank compute in turn",
        ),
        (served(1.0, **SEVERAL), "training.microbatches = 2 adds whole gradients"),
        (served(1.0, training={"compile": True}), "training.compile = true computes all of a gradient at once"),
        (served(1.0, training={"precision": "float16"}), "training.precision = 'float16' scales whole gradients"),
        (served(1.0, cluster={"device": "cuda", "transport": "mpi"}), "MPI reads them on the GPU"),
        (
            served(1.0, cluster={"gradient_format": "float16"}),
            "cluster.gradient_format = 'float16' converts whole gradients",
        ),
        (served(1.0, data={"name": "libsvm", "path": "a9a", "sparse": True}), "data.sparse = true pushes rows"),
        (served(1.0, topology={"name": "adv", "options": {"fan_out": 2}}), "leaf servers are on the nodes of"),
        (served(1.0, protocol={"name": "async"}, topology={"name": "adv*"}), "leaf servers are on the nodes of"),
        (served(1.0, protocol={"name": "hogbatch"}), "protocol hogbatch has no buckets"),
        (groups(1.0, cluster={"learners_per_rank": 4}), "the group has one rank"),
    ],
)
def test_a_job_that_asks_for_buckets_in_vain_is_told_why(job: Job, why: str) -> None:
    found = refusal(job, job.plan())
    assert found.startswith(f"gradients leave whole: {why}") if why else not found
    assert "\n" not in found
    if not why and job.cluster.buckets == 1.0:
        assert refusal(job, job.plan(), 250_000) == "gradients leave whole: 1 MB are not more than a bucket"
        assert not refusal(job, job.plan(), 300_000)


@pytest.mark.parametrize(
    ("tables", "why"),
    [
        ({}, ""),
        ({"protocol": {"name": "diloco"}}, ""),
        ({"protocol": {"name": "sma"}}, "protocol sma averages them while they train"),
        ({"topology": {"options": {"groups": 2}}}, "members of a group step together, after the backward pass"),
        ({"optimizer": {"name": "adamw"}}, ""),
        ({"optimizer": {"name": "torch.optim:Adadelta"}}, "optimizer torch.optim:Adadelta steps whole replicas"),
        ({"optimizer": {"clip_norm": 1.0}}, "clip_norm = 1 needs the norm of a whole gradient"),
        ({"protocol": {"name": "average", "correction": "dc_asgd"}}, "protocol.correction changes whole gradients"),
        ({"training": {"microbatches": 2}}, "training.microbatches = 2 adds whole gradients"),
        ({"cluster": {"learners_per_rank": 4}}, "they are on one rank"),
    ],
)
def test_where_replicas_are_averaged_in_buckets(tables: dict[str, Any], why: str) -> None:
    """The next forward pass does not begin before the average is there."""
    job = groups(1.0, **{"protocol": {"name": "average"}, "topology": {"name": "replicas"}} | tables)
    plan = job.plan(nodes_of(job))
    assert refusal(job, plan) == (f"replicas are averaged whole: {why}" if why else "")
    assert bool(pairs_of_nodes(job.with_(cluster={"buckets": "auto"}), plan, plan.nodes(near=True))) == (not why)
    during = "replicas are averaged during the last backward pass of a period, in buckets of at least 1 MB"
    assert text_of(job, plan) == ("" if why else during)
    whole = "replicas are averaged whole: 1 MB are not more than a bucket"
    assert why or refusal(job, plan, 250_000) == whole


def test_a_group_whose_gradients_are_final_at_once_averages_them_after_the_pass() -> None:
    job = groups(1.0, **SEVERAL)
    plan = job.plan(nodes_of(job))
    assert text_of(job, plan) == (
        "averaged after the backward pass, in buckets of at least 1 MB: training.microbatches = 2 adds whole gradients"
    )


def test_validate_says_that_gradients_leave_whole(capsys: pytest.CaptureFixture[str]) -> None:
    """Without the data, it does not know how large a gradient is."""
    line = ["validate", "digits", "--set=cluster.node_memory=false", "--set=cluster.buckets=2"]
    for more, said in (([], "1.66 MB are not more than a bucket"), (["--syntax"], "")):
        assert main([*line, *more]) == 0
        found = [text for text in capsys.readouterr().out.splitlines() if text.startswith("  buckets")]
        assert found == ([f"  buckets        gradients leave whole: {said}"] if said else [])


@pytest.mark.parametrize("value", [-1, 0, 1e300, float("nan"), True, "huge", [1], {"a": 1}])
def test_a_size_that_is_none_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"buckets must be megabytes, .*'auto' or 'off', not"):
        groups(value)


@pytest.mark.parametrize(
    ("tables", "early"),
    [
        ({}, True),
        ({"nodes": 1}, False),
        ({"buckets": 1.0, "nodes": 1}, False),
        ({"nodes": 2}, False),
        ({"buckets": "off"}, False),
        ({"optimizer": {"name": "adam"}}, True),
        ({"optimizer": {"name": "torch.optim:Adadelta"}}, False),
        ({"optimizer": {"clip_norm": 1.0}}, False),
        ({"training": {"precision": "float16"}}, False),
        ({"training": {"precision": "bfloat16"}}, True),
        ({"training": {"compile": True}}, False),
        ({"training": {"microbatches": 2}}, False),
        ({"topology": {"name": "groups", "options": {"reduction": "mpi"}}}, False),
        ({"topology": {"name": "groups", "options": {"reduction": "nodes"}}}, True),
        ({"topology": {"name": "groups", "options": {"groups": 2}}, "protocol": {"name": "async"}}, False),
        ({"cluster": {"learners_per_rank": 2}}, False),
    ],
)
def test_where_the_next_forward_pass_may_use_buckets_at_once(tables: dict[str, Any], early: bool) -> None:
    job = groups(**tables)
    plan = job.plan(nodes_of(job))
    assert any(passes_early(job, plan, members) for members in plan.groups) == early
    assert ("forward pass" in text_of(job, plan)) == early


def test_parts_of_large_tensors_begin_with_the_tensor_if_one_begins_near_the_edge() -> None:
    """As in an LSTM: two layers of two matrices and two biases each, between an embedding and an output."""
    sizes = [18_000, 262_144, 262_144, 1024, 1024, 262_144, 262_144, 1024, 1024, 16_000]
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    total, bucket = sum(sizes), 250_000
    edges = [part.start for part in parts(total, total, bucket, starts)][::-1]
    assert edges == [0, *(-(-starts[number] // ALIGNED) * ALIGNED for number in (2, 5, 6)), 4 * bucket]
    grid = [part.start for part in parts(total, total, bucket)][::-1]
    assert grid == [0, 250_000, 500_000, 750_000, 1_000_000]


@given(
    st.lists(st.integers(1, 5000), min_size=1, max_size=30),
    st.integers(1, 100).map(lambda lines: lines * ALIGNED),
    st.integers(0, 50),
)
def test_parts_with_edges_at_tensors_cover_the_vector_and_are_no_more_than_without(
    sizes: list[int], bucket: int, buffers: int
) -> None:
    starts, parameters = [sum(sizes[:number]) for number in range(len(sizes))], sum(sizes)
    found = parts(parameters + buffers, parameters, bucket, starts)
    ordered = sorted(found, key=lambda part: part.start)
    assert [part.start for part in ordered] == [0, *(part.stop for part in ordered[:-1])]
    assert ordered[-1].stop == parameters + buffers
    assert all(part.start % ALIGNED == 0 or part.start == parameters for part in ordered)
    assert len(found) <= len(parts(parameters + buffers, parameters, bucket))
    assert all(0 < part.stop - part.start <= 2 * bucket + ALIGNED for part in ordered if part.stop <= parameters)
