"""Buckets of a gradient: their sizes, when a model reports them, what virtual time makes of them, and refusals."""

import random
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import rudra
from rudra.compute.flat import FlatModel
from rudra.core.buckets import (
    ALIGNED,
    MOST,
    FinalParts,
    bucket_size,
    count_of,
    parts,
    passes_early,
    push_parts,
    pushing,
    text_of,
)
from rudra.core.training_state import BEGINNING
from rudra.errors import ConfigError, RunError
from rudra.job.job import Job
from rudra.prepare.phases import phases_of
from rudra.prepare.resolve import nodes_of
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
        ("auto", 125_000, 0),  # no more than one
        ("auto", 125_024, 125_008),
        ("auto", 4 * MILLION, 250_000),  # a 16th
        ("off", 100 * MILLION, 0),
        (1.0, 4 * MILLION, 250_000),
        (0.001, 2000, 256),
        (0.001, 62 * MILLION, MILLION),  # not more than MOST
        (100, 4 * MILLION, 0),
    ],
)
def test_size_of_a_bucket(buckets: Any, size: int, elements: int) -> None:
    assert bucket_size(groups(buckets), size) == elements


@pytest.mark.parametrize("seed", range(30))
def test_parts_are_the_vector_and_the_last_parameters_come_first(seed: int) -> None:
    chance = random.Random(seed)
    parameters = chance.randint(1, 10_000)
    size = parameters + chance.choice([0, 1, 700])
    bucket = bucket_size(groups(chance.uniform(0.001, 0.05)), size)
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
        # 4 members, 16 MB: each sends 3/4 twice. The backward pass is 2/3 of a gradient, and 1/16 comes after it.
        (12e6, 1.2, 2.0 - 0.8 * 15 / 16),
        (12e6, 12.0, 2.0 / 16),  # only the last bucket is left
        (12e9, 1.2, 0.002 / 16),
    ],
)
def test_virtual_time_hides_the_reduction_in_the_backward_pass(
    bandwidth: float, compute_s: float, seconds: float
) -> None:
    table = {"latency_s": 0.0, "bandwidth_bytes_per_s": bandwidth, "compute_s": compute_s, "gradient_s": 0.0}
    found = {}
    for buckets in ("auto", "off"):
        job = groups(buckets, simulation=table)
        costs = prices_of(phases_of(job, job.plan(nodes_of(job)), 64), 16 * MILLION)(BEGINNING)
        found[buckets] = costs.reduction_s(costs.plan.learners, 16 * MILLION)
    assert found == pytest.approx({"auto": seconds, "off": 24e6 / bandwidth}, rel=1e-3)


@pytest.mark.parametrize(
    ("job", "count"),
    [
        (groups(), 16),
        (groups("off"), 1),
        (groups(nodes=1), 1),
        (groups(nodes=1, cluster={"node_memory": False}), 1),
        (groups(1.0, nodes=1, cluster={"node_memory": False}), 16),
        (groups(1.0, nodes=1), 16),
        (groups(topology={"name": "groups", "options": {"reduction": "nodes"}}, nodes=2), 16),
        (groups(topology={"name": "groups", "options": {"reduction": "mpi"}}), 16),
        (groups(protocol={"name": "average"}, topology={"name": "replicas"}), 1),
    ],
)
def test_buckets_are_for_gradients_that_cross_a_network(job: Job, count: int) -> None:
    plan = job.plan(nodes_of(job))
    assert count_of(job, plan, 4 * MILLION, plan.learners) == count
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
        (served(cluster={"device": "cuda"}), []),
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
    ("buckets", "size", "senders", "count"),
    [
        ("auto", 4 * MILLION, 3, 17),  # and the last elements, which become final at the end
        ("auto", 100_000, 3, 0),
        ("auto", 4 * MILLION, 0, 0),
        ("auto", 100 * MILLION, 2, 17),
        ("auto", 100 * MILLION, 3, 0),  # 1.2 GB
        (10.0, 100 * MILLION, 3, 41),
    ],
)
def test_a_server_holds_a_gigabyte_of_gradients_in_buckets_at_most_unless_a_job_says_more(
    buckets: Any, size: int, senders: int, count: int
) -> None:
    found = push_parts(served(buckets), size, size - 10, senders)
    assert len(found) == count
    assert sorted(i for part in found for i in (part.start, part.stop))[:: 2 * count - 1] == [0, size][: 2 * count]


@pytest.mark.parametrize(
    ("seconds", "sharing", "whole_s", "push_s"),
    [
        # 16 MB each way in `seconds`, for two learners on nodes of their own, and a server. A gradient takes 1.2 s, its
        # backward pass 0.8 s, of which 15/16 hide the pushes. In turns, the second learner gets weights, computes and
        # pushes while the first one already computes again.
        (0.1, "turns", 0.1, 0.1 / 16),
        (0.3, "turns", 0.3, 0.3 / 16),
        (1.0, "turns", 1.0, 1.0 - 0.75),
        (1.0, "equal", 2.0, 2.0 - 0.75),
        (0.3, "equal", 0.6, 2 * 0.3 / 16),
    ],
)
def test_virtual_time_hides_pushes_in_the_backward_pass(
    seconds: float, sharing: str, whole_s: float, push_s: float
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
            time_s = results.updates["time_s"]
        step_s[buckets] = time_s[-1] - time_s[-2]
    rest_s = 1.2 + 2 * seconds
    assert step_s == pytest.approx({"auto": rest_s + push_s, "off": rest_s + whole_s}, rel=0.02)


@pytest.mark.parametrize("value", [-1, 0, 1e300, float("nan"), True, "huge"])
def test_a_size_that_is_none_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"buckets must be (megabytes|a number).*'auto'.*'off'"):
        groups(value)


@pytest.mark.parametrize(
    ("tables", "early"),
    [
        ({}, True),
        ({"nodes": 1}, False),
        ({"buckets": 1.0, "nodes": 1}, True),
        ({"buckets": "off"}, False),
        ({"optimizer": {"name": "adam"}}, False),
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
