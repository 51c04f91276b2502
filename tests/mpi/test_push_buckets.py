"""Gradients that are pushed in buckets to servers of other nodes: replays, and the bits of whole gradients."""

import os
import signal
from pathlib import Path

import point_data
import pretended_nodes
import pytest
import small_models
from job_files import short_job
from processes import finish, replays, start, wait_for_updates

import rudra
from rudra.bench.ranks import on_ranks
from tests.selection import covering, together

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(600)]

NODES = [0, 0, 0, 1, 1, 1]  # on the servers' node there is room for a learner
CASES = {
    "hardsync, base": ({"name": "hardsync"}, {"name": "base"}, {}),
    "hardsync, shards": ({"name": "hardsync"}, {"name": "sharded", "options": {"shards": 2}}, {}),
    "hardsync, ranks of two": ({"name": "hardsync"}, {"name": "base"}, {"learners_per_rank": 2}),
    "hardsync, base, placed": ({"name": "hardsync"}, {"name": "base"}, {}),
    "hardsync, groups, placed": ({"name": "hardsync"}, {"name": "groups"}, {}),
    "softsync, base": ({"name": "softsync"}, {"name": "base"}, {}),
    "async, base": ({"name": "async"}, {"name": "base"}, {}),
    "async, shards": ({"name": "async"}, {"name": "sharded", "options": {"shards": 2}}, {}),
    "async, overlapped": ({"name": "async"}, {"name": "adv*", "options": {"fan_out": 8}}, {"node_memory": False}),
}


COVERING = [
    "hardsync, shards",
    "hardsync, groups, placed",
    "softsync, base",
    "async, overlapped",
]


@pytest.mark.parametrize("cases", together(COVERING, CASES))
def test_gradients_that_come_in_buckets_lead_to_the_same_weights(tmp_path: Path, cases: list[str]) -> None:
    """A server gets the gradients of learners on its own node as a whole, unless ranks exchange messages there."""
    jobs: dict[str, tuple[list[int], rudra.Job]] = {}
    for case in cases:
        protocol, topology, cluster = CASES[case]
        for buckets in (0.001, "off") if protocol["name"] == "hardsync" else (0.001,):
            job = rudra.Job(
                model={"name": small_models.dropping},
                data={"name": point_data.prompt},
                training={"epochs": 1, "minibatch_size": 4, "seed": 7},
                optimizer={"learning_rate": 0.05, "momentum": 0.9},
                protocol=protocol,
                topology=topology,
                cluster={"threads_per_rank": 1, "buckets": buckets, **cluster},
                placement={"cut": 3, "rule": "synchronous"} if "placed" in case else {},
            )
            servers = 2 + ("shards" in case) + 2 * ("overlapped" in case) + ("base, placed" in case)
            job = job.with_(cluster={"learners": (len(NODES) - servers) * cluster.get("learners_per_rank", 1)})
            jobs[str(tmp_path / f"{case}-{buckets}.h5")] = NODES, job
    on_ranks(pretended_nodes.train_on_nodes, len(NODES) - 2, jobs=jobs)
    found: dict[str, set[str]] = {}
    for path in jobs:
        assert rudra.replay(path, quiet=True).difference is None, path
        with rudra.open_results(path) as results:
            assert results.status == "finished"
            found.setdefault(Path(path).stem.rpartition("-")[0], set()).add(str(results.state["weights_sha256"]))
    assert {case: len(weights) for case, weights in found.items()} == dict.fromkeys(cases, 1)


@pytest.mark.parametrize("topology", covering(["sharded"], ["base", "sharded"]))
def test_a_run_that_is_stopped_takes_no_notice_of_gradients_that_come(tmp_path: Path, topology: str) -> None:
    every = 'checkpoint_every = "1 epochs"'
    job, output = short_job(tmp_path, "async", topology=f'name = "{topology}"', results=every), tmp_path / "out.h5"
    more = ["--set", "cluster.node_memory=false", "--set", "cluster.buckets=0.001"]
    process = start("run", job, "--output", output, *more)
    wait_for_updates(process, output, 10)
    os.kill(process.pid, signal.SIGTERM)
    code, _, err = finish(process)
    assert code == 3, err
    code, _, err = finish(start("resume", output))
    assert code == 0, err
    with rudra.open_results(output) as results:
        assert results.status == "finished"
    assert replays(output)
