"""Searches on recorded curves of real training."""

from statistics import median

from benchmarks.oracle import CLUSTERS, RECORDED, TASKS
from benchmarks.strategies import EASIER, Case
from rudra.tuning.strategies import shipped

CASES = [(task, cluster) for task in TASKS for cluster in CLUSTERS if (RECORDED / f"{task}-{cluster}.jsonl").is_file()]


def test_the_default_finds_nearly_the_best_points_of_oracles() -> None:
    found = [Case(*case, easier).searched(shipped()["guided"]) for case in CASES for easier in EASIER]
    assert sum(each.late > 1.15 for each in found) <= len(found) / 6
    assert median(each.until for each in found) <= 4


def test_longer_probes_order_points_as_whole_runs_do() -> None:
    cases = [Case(*case, 1.0) for case in CASES]
    assert median(case.correlation(2) for case in cases) >= 0.8
    assert min(case.correlation(3) for case in cases) >= 0.85
