"""Forward passes that begin while an averaged gradient arrives: they do, and lead to the bits of other runs."""

import os
import signal
from pathlib import Path
from typing import Any

import point_data
import pretended_nodes
import pytest
import small_models
from job_files import restartable_job
from processes import finish, ranks_of, replays, start, wait_for_deaths, wait_for_updates

import rudra
from rudra.bench.ranks import on_ranks
from tests.selection import covering, together

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(600)]

TWO, FOUR, PAIRS = [0, 0, 1], [0, 0, 1, 2, 3], [0, 0, 0, 1, 1]  # node of the statistics server and of each learner
MLP = {"name": "mlp", "options": {"hidden": [64, 48]}}
LSTM = {"name": "lstm", "options": {"hidden": 24, "layers": 2}}
FALLING = {"schedule": "cosine", "warm_up": 0.5, "momentum_form": "caffe", "weight_decay": 0.01}
ADAM = {"name": "adam", "momentum": 0.0, "learning_rate": 1e-3}
CASES: dict[str, tuple[list[int], dict[str, Any]]] = {
    "mlp": (TWO, {"model": MLP}),
    "mlp, a rate that changes with every update, velocity of Caffe": (TWO, {"model": MLP, "optimizer": FALLING}),
    "mlp, sums of nodes": (PAIRS, {"model": MLP, "topology": {"options": {"reduction": "nodes"}}}),
    "mlp, four learners": (FOUR, {"model": MLP}),
    "dropout and buffers": (TWO, {"model": {"name": small_models.dropping}}),
    "convolution, Adam": (TWO, {"model": {"name": small_models.convolving}, "optimizer": ADAM}),
    "LSTM": (TWO, {"model": LSTM, "task": {"name": "language"}}),
}
COVERING = [name for name in CASES if name not in ("mlp", "mlp, four learners", "dropout and buffers")]


def job_of(tmp_path: Path, nodes: list[int], tables: dict[str, Any], **cluster: Any) -> rudra.Job:
    job = rudra.Job(
        data={"name": point_data.prompt},
        training={"epochs": 1, "minibatch_size": 4, "seed": 7},
        optimizer={"learning_rate": 0.05, "momentum": 0.9},
        protocol={"name": "hardsync"},
        topology={"name": "groups"},
        cluster={"threads_per_rank": 1, "learners": len(nodes) - 1, **cluster},
    )
    if "task" in tables:
        text = tmp_path / "text.txt"
        text.write_text("the quick brown fox jumps over the lazy dog. " * 40)
        job = job.with_(data={"name": "text", "path": text, "options": {"length": 16}})
    return job.with_(**tables)


@pytest.mark.parametrize("cases", together(COVERING, CASES))
def test_passes_that_begin_early_lead_to_the_same_weights(tmp_path: Path, cases: list[str]) -> None:
    """A replay computes each gradient after whole updates. None begins early where learners share a node."""
    jobs: dict[str, tuple[list[int], rudra.Job]] = {}
    for case in cases:
        nodes, tables = CASES[case]
        jobs[str(tmp_path / f"{case}.h5")] = nodes, job_of(tmp_path, nodes, tables, buckets=0.001)
    told = on_ranks(pretended_nodes.train_early_on_nodes, len(FOUR) - 2, jobs=jobs)
    for path, (nodes, _) in jobs.items():
        assert rudra.replay(path, quiet=True).difference is None, path
        with rudra.open_results(path) as results:
            assert results.status == "finished"
        early = [rank["early"][path] for rank in told[1 : len(nodes)]]
        assert all((count == 0) == (nodes is PAIRS) for count in early), path


def job_file(tmp_path: Path) -> Path:
    """A job with momentum, dropout, a schedule and checkpoints, whose learners are on nodes of their own."""
    job = restartable_job(tmp_path, "hardsync", more='[topology]\nname = "groups"\n', epochs=2)
    job.write_text(job.read_text().replace("small_models:dropping", "small_models:forgetful"))
    return job


APART = ["--set", "cluster.node_memory=false", "--set", "cluster.buckets=0.02"]


def test_a_run_that_is_stopped_and_resumed_gets_the_weights_of_one_that_is_not(tmp_path: Path) -> None:
    job, output = job_file(tmp_path), tmp_path / "out.h5"
    process = start("run", job, "--output", output, *APART)
    wait_for_updates(process, output, 30)
    os.kill(process.pid, signal.SIGTERM)
    code, _, err = finish(process)
    assert code == 3, err
    code, _, err = finish(start("resume", output))
    assert code == 0, err
    undivided = rudra.Job.load(job, ["cluster.buckets=off"])
    with (
        rudra.open_results(output) as results,
        rudra.simulate(undivided, output=tmp_path / "whole.h5", progress="quiet") as expected,
    ):
        assert results.status == "finished"
        assert results.state["weights_sha256"] == expected.state["weights_sha256"]
    assert replays(output)


@pytest.mark.parametrize("updates", covering([33], [10, 33, 61]))
def test_when_a_learner_dies_no_update_is_half_made(tmp_path: Path, updates: int) -> None:
    """A replay makes all updates before the death and after it, and gets the same weights."""
    job, output = job_file(tmp_path), tmp_path / "out.h5"
    process = start("run", job, "--output", output, *APART)
    wait_for_updates(process, output, updates)
    os.kill(ranks_of(process)[2], signal.SIGKILL)
    wait_for_deaths(process, output)
    code, _, err = finish(process)
    assert code == 0, err
    assert "died; 2 learners are left, which continue from update" in err
    with rudra.open_results(output) as results:
        assert results.status == "finished"
        assert set(results.updates["gradients"]) == {2, 3}
    assert replays(output)
