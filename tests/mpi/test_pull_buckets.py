"""Weights that come from servers in buckets: forward passes begin early, and lead to the bits of whole weights."""

from pathlib import Path
from typing import Any

import pytest
import user_code

import rudra
from rudra.bench.ranks import on_ranks

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(600)]

APART, NEAR, ONE = [0, 0, 1, 1, 2], [0, 0, 0, 1, 1], [0, 0, 0, 0, 0]  # node of each rank
MLP = {"name": "mlp", "options": {"hidden": [64, 48]}}
SHARDED = {"topology": {"name": "sharded", "options": {"shards": 2}}, "cluster": {"node_memory": False}}
CASES: dict[str, tuple[list[int], dict[str, Any]]] = {
    "hardsync, mlp": (APART, {"model": MLP}),
    "hardsync, dropout": (APART, {"model": {"name": user_code.forgetful}, "optimizer": {"clip_norm": 1.0}}),
    "hardsync, float16 pushes": (APART, {"model": MLP, "cluster": {"gradient_format": "float16"}}),
    "hardsync, shards": (ONE, {"model": MLP, **SHARDED}),
    "hardsync, buffers": (APART, {"model": {"name": user_code.normed}}),
    "hardsync, a learner near the server": (NEAR, {"model": MLP}),
    "softsync": (APART, {"model": MLP, "protocol": {"name": "softsync", "n": 2}}),
    "async": (APART, {"model": {"name": user_code.convolving}, "protocol": {"name": "async"}}),
    "async, shards": (ONE, {"model": MLP, "protocol": {"name": "async"}, **SHARDED}),
}


def test_weights_that_come_in_buckets_lead_to_the_same_weights(tmp_path: Path) -> None:
    """A learner near its server gets them whole, and so do learners of a model that learns buffers."""
    jobs: dict[str, tuple[list[int], rudra.Job]] = {}
    for case, (nodes, tables) in CASES.items():
        for buckets in (0.001, "off") if "hardsync" in case else (0.001,):
            job = rudra.Job(
                data={"name": user_code.prompt},
                training={"epochs": 2, "minibatch_size": 4, "seed": 7},
                optimizer={"learning_rate": 0.05, "momentum": 0.9},
                protocol={"name": "hardsync"},
                cluster={"threads_per_rank": 1, "learners": 2 if "shards" in case else 3, "buckets": buckets},
            ).with_(**tables)
            jobs[str(tmp_path / f"{case}-{buckets}.h5")] = nodes, job
    told = on_ranks(user_code.train_early_on_nodes, len(APART) - 2, jobs=jobs)
    found: dict[str, set[str]] = {}
    for path, (nodes, _) in jobs.items():
        case, _, buckets = Path(path).stem.rpartition("-")
        assert rudra.replay(path, quiet=True).difference is None, path
        with rudra.open_results(path) as results:
            assert results.status == "finished"
            found.setdefault(case, set()).add(str(results.state["weights_sha256"]))
        pulls = 0 if buckets == "off" or "buffers" in case else 2 if nodes in (NEAR, ONE) else 3
        assert sum(bool(rank["early"][path]) for rank in told) == pulls, path
    assert {case: len(weights) for case, weights in found.items()} == dict.fromkeys(CASES, 1)
