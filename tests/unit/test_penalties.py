"""Penalties over compute groups, of runs whose times and epochs are known."""

import csv
import dataclasses
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from rudra.report.charts import figures
from rudra.report.panels import Figure
from rudra.report.runs import Run, Study, read
from rudra.report.tables import best_of
from tests.unit.report_files import write_point


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    path = tmp_path_factory.mktemp("run") / "run.h5"
    write_point(path, protocol="softsync", n=1, mu=4, lam=1)
    return read(path)


def made(run: Run, g: int, seconds: float, epochs: int | None, **job: Any) -> Run:
    """A run of g groups of one that takes so long for an iteration, and so many epochs to its target."""
    told = {"cluster.learners": g, "optimizer.momentum": 0.0, "placement.cut": 5, "training.seed": 1}
    told |= {key.replace("_", ".", 1): value for key, value in job.items()}
    summary = {**run.summary, "n": g, "learners": g, "target_epoch": epochs}
    summary["wall_time_s"] = seconds * summary["updates"]
    about = "-".join(map(str, told.values()))
    return dataclasses.replace(run, file=Path(f"{about}.h5"), label=about, job={**run.job, **told}, summary=summary)


def found(runs: Sequence[Run], figure: str = "penalties") -> Figure | None:
    drawn = figures(Study("x", tuple(runs), figure), runs)
    return next((figure for figure in drawn if figure.name == "penalties"), None)


def rows(figure: Figure | None) -> list[Mapping[str, str]]:
    return list(csv.DictReader(io.StringIO(figure.table.csv())))


def test_penalties_are_against_one_group(run: Run) -> None:
    figure = found([made(run, 1, 0.8, 4), made(run, 2, 0.6, 5), made(run, 8, 0.2, 10)])
    told = [float(row[head]) for row in rows(figure) for head in ("P_HE", "P_SE", "P_Total")]
    assert told == pytest.approx([1, 1, 1, 0.75, 1.25, 0.9375, 0.25, 2.5, 0.625])
    assert len(figure.panels) == 3


def test_each_number_of_groups_has_the_momentum_that_suits_it(run: Run) -> None:
    tried = [(1, 0.0, 6), (1, 0.6, 4), (1, 0.9, None), (4, 0.0, 5), (4, 0.6, None)]
    figure = found([made(run, g, 1 / g, epochs, optimizer_momentum=m) for g, m, epochs in tried])
    assert [(row["g"], row["momentum"], float(row["P_SE"])) for row in rows(figure)] == [
        ("1", "0.6", 1.0),
        ("4", "0.0", 1.25),
    ]


def test_seeds_are_one_point(run: Run) -> None:
    """Also where one of them does not get to the target: its median does."""
    runs = [made(run, 1, 1.0, epochs, training_seed=seed) for seed, epochs in enumerate((3, 4, 7))]
    runs += [made(run, 2, 0.5, epochs, training_seed=seed) for seed, epochs in enumerate((6, 8, None))]
    assert [float(row["P_SE"]) for row in rows(found(runs))] == [1.0, 2.0]


def test_what_never_gets_there_has_no_statistical_penalty(run: Run) -> None:
    figure = found([made(run, 1, 1.0, 4), made(run, 2, 0.5, None), made(run, 4, 0.25, 6)])
    assert [row["P_SE"] for row in rows(figure)] == ["1.0", "", "1.5"]
    assert [row["P_HE"] for row in rows(figure)] == ["1.0", "0.5", "0.25"]


def test_without_targets_only_times_are_shown(run: Run) -> None:
    figure = found([made(run, 1, 1.0, None), made(run, 2, 0.5, None)])
    assert len(figure.panels) == 1


def test_merged_and_unmerged_are_two_lines(run: Run) -> None:
    runs = [made(run, g, 1 / g, 4 + g, placement_cut=cut) for cut in (5, None) for g in (1, 2)]
    assert [row["last layers"] for row in rows(found(runs))] == ["merged", "merged", "unmerged", "unmerged"]


@pytest.mark.parametrize(("counts", "figure"), [((2, 4), "penalties"), ((1,), "penalties"), ((1, 2), "table")])
def test_nothing_is_shown_without_one_group_and_others_or_unasked(
    run: Run, counts: tuple[int, ...], figure: str
) -> None:
    assert found([made(run, g, 1.0, 4) for g in counts], figure) is None


def test_the_best_setting_is_that_whose_median_is_least(run: Run) -> None:
    """One lucky seed does not count."""
    tried = {0.0: (5, 6, 6), 0.3: (3, 7, None), 0.6: (None, None, None)}
    runs = [
        made(run, 2, 1.0, epochs, optimizer_momentum=m, training_seed=seed)
        for m, several in tried.items()
        for seed, epochs in enumerate(several)
    ]
    assert {r.job["optimizer.momentum"] for r in best_of(runs)} == {0.0}
    assert len(best_of(runs)) == 3
    assert best_of([]) == []
