"""Who is called a straggler, and when."""

from typing import Any

import pytest
from clusters import timing

from rudra.job.job import Job
from rudra.roles.stragglers import Stragglers


def watched(silences: dict[int, float], gradients: int, patience_s: float = 5.0) -> list[int]:
    """Who is found after 100 s, if they were heard of last so long before."""
    stragglers = Stragglers(silences, patience_s)
    stragglers.begin(0.0, 1000)
    stragglers.last_message |= {child: 100.0 - silence for child, silence in silences.items()}
    return [child for child, _ in stragglers.found(100.0, 1000 + gradients)]


@pytest.mark.parametrize(
    ("silences", "gradients", "found"),
    [
        ({1: 0.1, 2: 0.2}, 1000, []),
        ({1: 0.1, 2: 6.0}, 1000, [2]),
        ({1: 0.1, 2: 4.9}, 1000, []),  # patience
        ({1: 0.1, 2: 6.0}, 100, []),  # two learners give one in 2 s each: 6 s is not ten of their turns
        ({1: 0.1, 2: 21.0}, 100, [2]),
        ({1: 6.0, 2: 6.0, 3: 0.0}, 1000, [1, 2]),
        ({1: 100.0}, 0, []),  # nothing has come of anybody
    ],
)
def test_a_straggler_is_silent_for_longer_than_usual(
    silences: dict[int, float], gradients: int, found: list[int]
) -> None:
    assert watched(silences, gradients) == found


def test_a_straggler_is_told_once_and_again_when_it_has_come_and_gone() -> None:
    stragglers = Stragglers([1, 2], 5.0)
    stragglers.begin(0.0, 0)
    told: list[Any] = []
    for now in range(1, 60):
        stragglers.last_message[1] = float(now)
        if 20 <= now < 30:
            stragglers.last_message[2] = float(now)
        told += [(now, child) for child, _ in stragglers.found(float(now), 100 * now)]
    assert told == [(6, 2), (35, 2)]


def test_the_server_says_who_and_how_far_behind() -> None:
    job = Job(
        protocol={"name": "async"},
        cluster={"learners": 3, "threads_per_rank": 1},
        training={"epochs": 1, "minibatch_size": 4},
        simulation={"compute_s": 0.1, "jitter": 0.0, "slowdown": {1: 300.0}},
        fault_tolerance={"stall_warning_s": 5.0},
    )
    rows = timing(job, 4 * 400)
    (warning,) = rows.warnings
    assert warning.startswith("parameter server: learner 1 (rank 3) is a straggler: silent for 5 s, 5")
    assert warning.endswith(" gradients behind the fastest")
    (event,) = rows["events"]
    assert (event["kind"], event["role"]) == (b"straggler", 3)
