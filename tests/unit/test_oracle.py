"""Searches on recorded curves of real training."""

import pytest

from benchmarks.oracle import CLUSTERS, RECORDED, TASKS
from benchmarks.strategies import EASIER, Case
from rudra.tuning.strategies import shipped

CASES = [(task, cluster) for task in TASKS for cluster in CLUSTERS if (RECORDED / f"{task}-{cluster}.jsonl").is_file()]


@pytest.mark.parametrize("easier", EASIER)
def test_the_default_finds_nearly_the_best_point_of_an_oracle(easier: float) -> None:
    found = Case("fashion-mnist", "even", easier).searched(shipped()["guided"])
    assert found.late <= 1.15
    assert found.until <= 4


@pytest.mark.parametrize(("task", "cluster"), CASES)
def test_longer_probes_order_points_as_whole_runs_do(task: str, cluster: str) -> None:
    case = Case(task, cluster, 1.0)
    assert case.correlation(2) >= 0.75
    assert case.correlation(3) >= 0.85
    assert case.correlation(3) > case.correlation(1)
