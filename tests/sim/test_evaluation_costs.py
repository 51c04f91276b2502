"""Evaluations in virtual time, on nodes whose cores the learners need."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rudra
from rudra.core.priority import WEIGHT
from rudra.job.job import Job
from rudra.simulation.predict import predict

CORE_S, STEP_S, LEARNERS = 0.3, 0.1, 2

FULL = {"nodes": 1, "cores_per_node": 2}


def job_of(protocol: str, topology: str, costs: dict[str, Any], **training: Any) -> Job:
    exact = {"compute_s": STEP_S, "jitter": 0.0, "update_s": 0.0, "message_s": 0.0, "latency_s": 0.0}
    evaluation = {"evaluation_s": CORE_S, "evaluation_core_s": CORE_S, "servers_on_first_node": True}
    return Job(
        model={"name": "mlp"},
        data={"name": "digits", "train_limit": 1280},
        training={"epochs": 4, "minibatch_size": 64, **training},
        protocol={"name": protocol},
        topology={"name": topology},
        cluster={"learners": LEARNERS},
        simulation={**exact, **evaluation, **costs},
    )


@pytest.mark.parametrize(
    ("protocol", "topology", "costs", "delay_s", "taken_s"),
    [
        ("hardsync", "groups", FULL, CORE_S / 2, 1.5 * CORE_S),  # three share two cores
        ("hardsync", "base", FULL, CORE_S / 2, 1.5 * CORE_S),
        ("async", "base", FULL, CORE_S / 2, 1.5 * CORE_S),
        ("hardsync", "groups", FULL | {"cores_per_node": 1}, CORE_S / 2, 3 * CORE_S),
        ("hardsync", "groups", FULL | {"cores_per_node": 3}, 0.0, CORE_S),
        ("hardsync", "groups", FULL | {"evaluation_core_s": 0.0}, 0.0, CORE_S),
        ("hardsync", "base", {"nodes": 2, "cores_per_node": 1}, CORE_S, 2 * CORE_S),  # the other one waits
        ("async", "base", {"nodes": 2, "cores_per_node": 1}, CORE_S / 2, 2 * CORE_S),  # the other one does not
        ("hardsync", "base", FULL | {"servers_on_first_node": False}, 0.0, CORE_S),
    ],
)
def test_an_evaluation_delays_learners_that_fill_the_cores_of_its_node(
    tmp_path: Path, protocol: str, topology: str, costs: dict[str, Any], delay_s: float, taken_s: float
) -> None:
    job = job_of(protocol, topology, costs, target="accuracy >= 1", target_window=1)
    with rudra.simulate(job, output=tmp_path / "out.h5") as results:
        ended, taken = results.epochs["time_s"], results.epochs["evaluation_s"]
    first_s, *later_s = np.diff(ended, prepend=0.0)  # the first epoch has no evaluation
    assert later_s == pytest.approx([first_s + delay_s] * 3, abs=STEP_S / 2)
    assert taken == pytest.approx([taken_s] * 4)
    assert predict(job).epoch_s == pytest.approx(first_s + delay_s, rel=0.05)


def test_an_evaluation_that_decides_nothing_has_a_low_priority(tmp_path: Path) -> None:
    """It takes what the learners leave, so it lasts for several epochs, which have no evaluation of their own."""
    job = job_of("hardsync", "groups", FULL, epochs=16)
    lasts_s = CORE_S * (LEARNERS + WEIGHT) / (2 * WEIGHT)
    with rudra.simulate(job, output=tmp_path / "out.h5") as results:
        ended, taken = results.epochs["time_s"], results.epochs["evaluation_s"]
    assert taken[0] == pytest.approx(lasts_s)
    assert np.isnan(taken).sum() >= 8  # about half of the epochs
    first_s = ended[0]
    assert (ended[-1] - first_s) / 15 == pytest.approx(first_s + CORE_S / 2 * first_s / lasts_s, rel=0.01)
    assert predict(job).epoch_s == pytest.approx(first_s + CORE_S / 2 * first_s / lasts_s, rel=0.01)
