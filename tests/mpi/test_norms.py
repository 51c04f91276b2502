"""Norms of gradients on real ranks, also of gradients that are averaged or pushed while they are computed."""

from pathlib import Path
from typing import Any

import numpy as np
import point_data
import pretended_nodes
import pytest
import small_models

import rudra
from rudra.bench.ranks import on_ranks
from tests.selection import together

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(600)]

SHARDS = {"name": "sharded", "options": {"shards": 2}}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "group in buckets": ({"name": "hardsync"}, {"name": "groups", "options": {"groups": 1}}),
    "replicas in buckets": ({"name": "sma"}, {"name": "replicas"}),
    "pushes in buckets": ({"name": "softsync"}, {"name": "base"}),
    "shards in buckets": ({"name": "async"}, SHARDS),
    "groups": ({"name": "async"}, {"name": "groups", "options": {"groups": 2}}),
    "mpi": ({"name": "hardsync"}, {"name": "groups", "options": {"groups": 1, "reduction": "mpi"}}),
}


@pytest.mark.parametrize(
    "cases", together(["group in buckets", "replicas in buckets", "shards in buckets", "mpi"], CASES)
)
def test_norms_of_a_run_on_ranks_are_those_of_its_replay(tmp_path: Path, cases: list[str]) -> None:
    """The replay computes whole gradients, one after the other."""
    jobs: dict[str, tuple[list[int], rudra.Job]] = {}
    for case in cases:
        protocol, topology = CASES[case]
        job = rudra.Job(
            model={"name": small_models.dropping},
            data={"name": point_data.prompt},
            training={"epochs": 1, "minibatch_size": 4, "seed": 7},
            optimizer={"learning_rate": 0.05, "momentum": 0.9},
            protocol=protocol,
            topology=topology,
            cluster={"threads_per_rank": 1, "buckets": 0.001 if "buckets" in case else "off"},
            results={"gradient_norms": "every 1"},
        )
        servers = {"base": 2, "sharded": 3, "groups": 1 + ("groups" in case), "replicas": 1}[topology["name"]]
        nodes = [0, 0, 0, 1, 1] if servers == 3 else [0, 0, 1, 1, 1]
        jobs[str(tmp_path / f"{case}.h5")] = nodes, job.with_(cluster={"learners": len(nodes) - servers})
    on_ranks(pretended_nodes.train_on_nodes, 3, jobs=jobs)
    for case in cases:
        path = tmp_path / f"{case}.h5"
        with rudra.open_results(path) as results:
            assert results.status == "finished"
            for norms in (results.gradients["norm"], results.updates["norm"]):
                assert not np.isnan(norms).any(), case
                assert len(norms) > 5
                assert norms.max() > 0
        if case != "mpi":
            assert rudra.replay(path, quiet=True).difference is None, case
