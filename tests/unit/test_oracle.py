"""Searches on recorded curves of real training."""

import pytest

from benchmarks.oracle import CLUSTERS, RECORDED, TASKS
from benchmarks.strategies import EASIER, Case
from rudra.tuning.strategies import shipped

CASES = [(task, cluster) for task in TASKS for cluster in CLUSTERS if (RECORDED / f"{task}-{cluster}.jsonl").is_file()]


@pytest.mark.parametrize(("task", "cluster"), CASES)
@pytest.mark.parametrize("easier", EASIER)
def test_the_default_finds_nearly_the_best_point_of_an_oracle(task: str, cluster: str, easier: float) -> None:
    case = Case(task, cluster, easier)
    found = case.searched(shipped()["guided"])
    assert found.late <= 1.15
    assert found.until <= 8
    assert case.correlation(2) >= 0.8
