"""Searches on recorded curves of real training."""

from statistics import median

import pytest

from benchmarks.oracle import CLUSTERS, RECORDED, TASKS
from benchmarks.strategies import EASIER, Case
from rudra.tuning.strategies import shipped

CASES = [(task, cluster) for task in TASKS for cluster in CLUSTERS if (RECORDED / f"{task}-{cluster}.jsonl").is_file()]


def test_the_default_finds_nearly_the_best_points_of_oracles() -> None:
    found = [Case(*case, easier).searched(shipped()["guided"]) for case in CASES for easier in EASIER]
    assert sum(each.late > 1.15 for each in found) <= len(found) / 6
    assert median(each.until for each in found) <= 4


@pytest.mark.parametrize(("task", "cluster"), CASES)
def test_longer_probes_order_points_as_whole_runs_do(task: str, cluster: str) -> None:
    case = Case(task, cluster, 1.0)
    assert case.correlation(2) >= 0.75
    assert case.correlation(3) >= 0.85
    assert case.correlation(3) > case.correlation(1)
