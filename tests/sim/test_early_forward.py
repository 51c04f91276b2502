"""Forward passes that begin before all their weights are there change the times of a simulation, and nothing else."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rudra
from rudra.job.job import Job
from rudra.results.reader import Results

OPTIONS = {"sharded": {"shards": 2, "servers_on_own_nodes": True}}


def run(path: Path, buckets: Any, topology: str = "groups", **tables: Any) -> Results:
    job = Job(
        model={"name": "mlp", "options": {"hidden": [40, 40]}},
        data={"name": "digits", "train_limit": 192},
        protocol={"name": "hardsync"},
        topology={"name": topology, "options": OPTIONS.get(topology, {})},
        training={"epochs": 3, "minibatch_size": 16},
        optimizer={"learning_rate": 0.05, "momentum": 0.9},
        cluster={"learners": 3, "buckets": buckets},
        **tables,
    )
    return rudra.simulate(job, output=path, progress="quiet")


def slow(topology: str) -> dict[str, Any]:
    """Costs with which passes begin early: an average takes longer than a gradient."""
    return {"compute_s": 0.1, "bandwidth_bytes_per_s": 1e5 if topology == "groups" else 2e5, "latency_s": 1e-4}


@pytest.mark.parametrize(("topology", "share"), [("groups", 2 / 3), ("base", 2 / 3), ("sharded", 1 / 2)])
def test_weights_and_records_are_those_of_passes_that_wait(topology: str, share: float, tmp_path: Path) -> None:
    """More of each gradient's time is hidden than this share. The backward pass takes two thirds of it."""
    with (
        run(tmp_path / "early.h5", 0.002, topology, simulation=slow(topology)) as early,
        run(tmp_path / "late.h5", "off", topology, simulation=slow(topology)) as late,
    ):
        assert early.state["weights_sha256"] == late.state["weights_sha256"]
        for name in ("timestamp", "samples", "learning_rate"):
            assert np.array_equal(early.updates[name], late.updates[name])
        hidden_s = late.updates["time_s"][-1] - early.updates["time_s"][-1]
        assert hidden_s > len(late.updates) * 0.1 * share
        # As in a run, a forward pass that begins early counts as part of the average, or as waiting for weights.
        mine = [found.minibatches[found.minibatches["learner"] == 1]["compute_s"] for found in (early, late)]
        assert mine[0][1:].mean() < 0.75 * mine[1].mean()
        assert mine[0][0] == mine[1][0], "before the first mini-batch a learner does not know what it will compute"


@pytest.mark.parametrize("topology", ["groups", "base"])
@pytest.mark.parametrize("dies_at_s", [0.33, 0.41, 0.47, 0.55])
def test_the_others_continue_if_a_learner_dies_at_any_moment(dies_at_s: float, topology: str, tmp_path: Path) -> None:
    faults = ({"learner": 1, "dies_at_s": dies_at_s},)
    with run(tmp_path / "run.h5", 0.002, topology, simulation=slow(topology) | {"faults": faults}) as found:
        assert found.epochs["epoch"][-1] == 3
        assert found.updates["time_s"][-1] > dies_at_s + 1
