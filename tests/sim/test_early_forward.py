"""Forward passes that begin before an average is complete change the times of a simulation, and nothing else."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rudra
from rudra.job.job import Job
from rudra.results.reader import Results


def run(path: Path, buckets: Any, **tables: Any) -> Results:
    job = Job(
        model={"name": "mlp", "options": {"hidden": [40, 40]}},
        data={"name": "digits", "train_limit": 192},
        protocol={"name": "hardsync"},
        topology={"name": "groups"},
        training={"epochs": 3, "minibatch_size": 16},
        optimizer={"learning_rate": 0.05, "momentum": 0.9},
        cluster={"learners": 3, "buckets": buckets},
        **tables,
    )
    return rudra.simulate(job, output=path, progress="quiet")


SLOW = {"compute_s": 0.1, "bandwidth_bytes_per_s": 2e5, "latency_s": 1e-4}


def test_weights_and_records_are_those_of_passes_that_wait(tmp_path: Path) -> None:
    with (
        run(tmp_path / "early.h5", 0.002, simulation=SLOW) as early,
        run(tmp_path / "late.h5", "off", simulation=SLOW) as late,
    ):
        assert early.state["weights_sha256"] == late.state["weights_sha256"]
        for name in ("timestamp", "samples", "learning_rate"):
            assert np.array_equal(early.updates[name], late.updates[name])
        hidden_s = late.updates["time_s"][-1] - early.updates["time_s"][-1]
        assert hidden_s > len(late.updates) * 0.1 * 2 / 3, "more than the backward pass hides"
        # As in a run, a forward pass that begins early counts as part of the average.
        compute_s = [found.minibatches["compute_s"].mean() for found in (early, late)]
        assert compute_s[0] < 0.75 * compute_s[1]


@pytest.mark.parametrize("dies_at_s", [0.33, 0.41, 0.47, 0.55])
def test_the_others_continue_if_a_learner_dies_at_any_moment(dies_at_s: float, tmp_path: Path) -> None:
    faults = ({"learner": 1, "dies_at_s": dies_at_s},)
    with run(tmp_path / "run.h5", 0.002, simulation=SLOW | {"faults": faults}) as found:
        assert found.epochs["epoch"][-1] == 3
        assert found.updates["time_s"][-1] > dies_at_s + 1
