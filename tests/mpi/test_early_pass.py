"""Forward passes that begin while an averaged gradient arrives: they do, and lead to the bits of other runs."""

from pathlib import Path
from typing import Any

import pytest
import user_code

import rudra
from rudra.bench.ranks import on_ranks

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(600)]

TWO, FOUR = [0, 0, 1], [0, 0, 0, 1, 1]  # node of the statistics server and of each learner
MLP = {"name": "mlp", "options": {"hidden": [64, 48]}}
LSTM = {"name": "lstm", "options": {"hidden": 24, "layers": 2}}
FALLING = {"schedule": "cosine", "warm_up": 0.5}
CASES: dict[str, tuple[list[int], dict[str, Any]]] = {
    "mlp": (TWO, {"model": MLP}),
    "mlp, its rate changes with every update": (TWO, {"model": MLP, "optimizer": FALLING}),
    "mlp, velocity of Caffe": (TWO, {"model": MLP, "optimizer": {"momentum_form": "caffe", "weight_decay": 0.01}}),
    "mlp, sums of nodes": (FOUR, {"model": MLP, "topology": {"options": {"reduction": "nodes"}}}),
    "mlp, four learners": (FOUR, {"model": MLP}),
    "dropout": (TWO, {"model": {"name": user_code.forgetful}}),
    "convolution": (TWO, {"model": {"name": user_code.convolving}}),
    "LSTM": (TWO, {"model": LSTM, "task": {"name": "language"}}),
}


def job_of(tmp_path: Path, nodes: list[int], tables: dict[str, Any], **cluster: Any) -> rudra.Job:
    job = rudra.Job(
        data={"name": user_code.prompt},
        training={"epochs": 2, "minibatch_size": 4, "seed": 7},
        optimizer={"learning_rate": 0.05, "momentum": 0.9},
        protocol={"name": "hardsync"},
        topology={"name": "groups"},
        cluster={"threads_per_rank": 1, "learners": len(nodes) - 1, **cluster},
    )
    if "task" in tables:
        text = tmp_path / "text.txt"
        text.write_text("the quick brown fox jumps over the lazy dog. " * 80)
        job = job.with_(data={"name": "text", "path": text, "options": {"length": 16}})
    return job.with_(**tables)


def test_passes_that_begin_early_lead_to_the_same_weights(tmp_path: Path) -> None:
    """Only at the end of training, and where a pass checks the weights, none begins early."""
    jobs: dict[str, tuple[list[int], rudra.Job]] = {}
    for case, (nodes, tables) in CASES.items():
        for buckets in (0.001, "off"):
            jobs[str(tmp_path / f"{case}-{buckets}.h5")] = nodes, job_of(tmp_path, nodes, tables, buckets=buckets)
    told = on_ranks(user_code.train_early_on_nodes, len(FOUR) - 2, jobs=jobs)
    weights: dict[str, set[str]] = {}
    for path, (nodes, _) in jobs.items():
        case, _, buckets = Path(path).stem.rpartition("-")
        assert rudra.replay(path, quiet=True).difference is None, path
        with rudra.open_results(path) as results:
            assert results.status == "finished"
            weights.setdefault(case, set()).add(str(results.state["weights_sha256"]))
        early = [rank["early"][path] for rank in told[1 : len(nodes)]]
        assert all(count == 0 if buckets == "off" else count > 0 for count in early), path
    assert {case: len(found) for case, found in weights.items()} == dict.fromkeys(CASES, 1)
