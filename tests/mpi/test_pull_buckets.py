"""Weights that come from servers in buckets: forward passes begin early, and lead to the bits of whole weights."""

from pathlib import Path
from typing import Any

import point_data
import pretended_nodes
import pytest
import small_models
from job_files import short_job
from processes import finish, replays, start

import rudra
from rudra.bench.ranks import on_ranks
from tests.selection import together

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(600)]

APART, NEAR, ONE = [0, 0, 1, 1, 2], [0, 0, 0, 1, 1], [0, 0, 0, 0, 0]  # node of each rank
MLP = {"name": "mlp", "options": {"hidden": [64, 48]}}
SHARDED = {"topology": {"name": "sharded", "options": {"shards": 2}}, "cluster": {"node_memory": False}}
TREE = {"topology": {"name": "adv", "options": {"fan_out": 2}}, "cluster": {"node_memory": False}}
CASES: dict[str, tuple[list[int], dict[str, Any]]] = {
    "hardsync, mlp": (APART, {"model": MLP}),
    "hardsync, dropout": (APART, {"model": {"name": small_models.forgetful}, "optimizer": {"clip_norm": 1.0}}),
    "hardsync, float16 pushes": (APART, {"model": MLP, "cluster": {"gradient_format": "float16"}}),
    "hardsync, shards": (ONE, {"model": MLP, **SHARDED}),
    "hardsync, leaf servers": (ONE, {"model": MLP, **TREE}),
    "hardsync, buffers": (APART, {"model": {"name": small_models.normed}}),
    "hardsync, microbatches": (APART, {"model": MLP, "training": {"microbatches": 2}}),
    "hardsync, a learner near the server": (NEAR, {"model": MLP}),
    "async": (APART, {"model": {"name": small_models.convolving}, "protocol": {"name": "async"}}),
    "async, shards": (ONE, {"model": MLP, "protocol": {"name": "async"}, **SHARDED}),
}
COMPARED = ("hardsync, dropout", "hardsync, buffers", "hardsync, shards")


COVERING = [
    "hardsync, dropout",
    "hardsync, shards",
    "hardsync, leaf servers",
    "hardsync, microbatches",
    "hardsync, a learner near the server",
    "async",
]


@pytest.mark.parametrize("cases", together(COVERING, CASES))
def test_weights_that_come_in_buckets_lead_to_the_same_weights(tmp_path: Path, cases: list[str]) -> None:
    """A learner near its server gets them whole, and so do learners that read all weights several times."""
    jobs: dict[str, tuple[list[int], rudra.Job]] = {}
    for case in cases:
        nodes, tables = CASES[case]
        for buckets in (0.001, "off") if case in COMPARED else (0.001,):
            job = rudra.Job(
                data={"name": point_data.prompt},
                training={"epochs": 1, "minibatch_size": 4, "seed": 7},
                optimizer={"learning_rate": 0.05, "momentum": 0.9},
                protocol={"name": "hardsync"},
                cluster={"threads_per_rank": 1, "learners": 2 if nodes is ONE else 3, "buckets": buckets},
            ).with_(**tables)
            jobs[str(tmp_path / f"{case}-{buckets}.h5")] = nodes, job
    told = on_ranks(pretended_nodes.train_early_on_nodes, len(APART) - 2, jobs=jobs)
    found: dict[str, set[str]] = {}
    for path, (nodes, _) in jobs.items():
        case, _, buckets = Path(path).stem.rpartition("-")
        assert rudra.replay(path, quiet=True).difference is None, path
        with rudra.open_results(path) as results:
            assert results.status == "finished"
            found.setdefault(case, set()).add(str(results.state["weights_sha256"]))
        pulls = 0 if buckets == "off" or "microbatches" in case else 2 if nodes in (NEAR, ONE) else 3
        assert sum(bool(rank["early"][path]) for rank in told) == pulls, path
    assert {case: len(weights) for case, weights in found.items()} == dict.fromkeys(cases, 1)


def test_a_server_that_dies_between_two_buckets_leaves_nothing_half_done(tmp_path: Path) -> None:
    """A forward pass waits for its weights then. The run continues from its last checkpoint."""
    tables = {"results": 'checkpoint_every = "5 updates"', "fault_tolerance": "restarts = 1"}
    job, output = short_job(tmp_path, "softsync", **tables), tmp_path / "out.h5"
    before = f"import mortal_server; mortal_server.launch_with_mortal_server({str(output)!r})"
    more = ["--set", "cluster.node_memory=false", "--set", "cluster.buckets=0.001"]
    code, _, err = finish(start("run", job, "--output", output, *more, before=before))
    assert code == 0, err
    assert "(rank 0) died" in err
    assert "restart 1 of 1: job: continues from" in err
    with rudra.open_results(output) as results:
        assert results.status == "finished"
        assert list(results.epochs["epoch"]) == [1, 2]
    assert replays(output)
