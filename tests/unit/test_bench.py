"""What the benchmarks say of themselves, and how figures become ratios and goals."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import benchmarks
from benchmarks import islands, overlap_10g, placed, reduction, tta, tta_runs, tta_search
from rudra import bench, package_check
from rudra.benchmark_report import Goal, Report, ratios, spread
from rudra.cli import bench as command
from rudra.cli.main import main
from rudra.errors import ConfigError
from rudra.job.job import Job


def test_each_benchmark_is_listed_with_its_goal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 0
    listed = capsys.readouterr().out
    for name, (what, goal) in (bench.BENCHMARKS | benchmarks.BENCHMARKS).items():
        assert f"  {name:12}{what}\n" in listed
        assert f"goal: {goal}\n" in listed
    assert listed.strip() in command.MORE, "made once, when the command is imported"
    with pytest.raises(SystemExit) as end:
        main(["bench", "--help"])
    assert end.value.code == 0
    assert listed in capsys.readouterr().out


@pytest.mark.parametrize("package", [bench, benchmarks])
def test_each_benchmark_is_a_module_of_its_own(package: Any) -> None:
    modules = {file.stem for file in Path(package.__file__).parent.glob("*.py")}
    assert set(package.BENCHMARKS) <= modules
    assert not set(bench.BENCHMARKS) & set(benchmarks.BENCHMARKS)


def test_an_unknown_benchmark_is_refused_before_any_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "update", "updates"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("rudra: benchmark 'updates' is unknown; valid: ddp, overhead")
    assert said.err.endswith("; did you mean update?\n")


def test_a_benchmark_of_a_checkout_is_refused_without_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(package_check, "ROOT", tmp_path)
    assert main(["bench", "sparse"]) == 2
    six = "ddp, overhead, pingpong, overlap, prediction, evaluation"
    said = f"rudra: benchmark 'sparse' needs a checkout of Rudra; installed: {six}\n"
    assert capsys.readouterr() == ("", said)


@pytest.mark.parametrize(
    ("names", "option"),
    [(["update"], ["--only", "sma"]), (["tta", "update"], ["--only", "sma"]), (["update"], ["--keep", "runs"])],
)
def test_an_option_that_a_benchmark_does_not_have_is_refused(
    names: list[str], option: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *names, *option]) == 2
    assert capsys.readouterr().err == f"rudra: {option[0]} is not an option of benchmark update\n"


def test_ratios_are_of_neighbours() -> None:
    assert ratios([1.0, 4.0, 9.0], [1.0, 2.0, 3.0]) == (2.0, 1.0, 3.0)
    assert str(spread([0.5, 4.0, 1.25])) == "1.25 (0.5–4)"
    with pytest.raises(ValueError, match="shorter"):
        ratios([1.0, 2.0], [1.0])


@pytest.mark.parametrize(
    ("figures", "limits", "reached", "figure"),
    [
        ([0.9, 1.5], {"at_least": 0.9}, True, 0.9),
        ([1.5, 0.89], {"at_least": 0.9}, False, 0.89),
        ([3.0, 1.0], {"at_most": 3.0}, True, 3.0),
        ([1.0, 3.1], {"at_most": 3.0}, False, 3.1),
    ],
)
def test_the_worst_figure_decides(figures: list[float], limits: dict[str, float], reached: bool, figure: float) -> None:
    goal = Goal("g", figures, **limits)
    assert (goal.reached, goal.figure) == (reached, figure)
    assert str(goal) == f"goal g: {'reached' if reached else 'not reached'} ({figure:.3g})"


def test_a_report_is_an_aligned_table_and_plain_json() -> None:
    report = Report(["what", "ms", "ratio"], [("a", 1.23456, spread([1.0])), ("longer", "x", 1)], ["a note"])
    report.goals = [Goal("ratio >= 1", [1.0], at_least=1.0)]
    assert report.as_text().split("\n") == [
        "what       ms    ratio",
        "a       1.235  1 (1–1)",
        "longer      x        1",
        "a note",
        "goal ratio >= 1: reached (1)",
    ]
    assert report.as_text(goals=False).endswith("\na note"), "as with --quick"
    assert json.loads(json.dumps(report.as_dict()))["rows"][0] == ["a", 1.23456, {"median": 1, "low": 1, "high": 1}]


def outcome_of(point: tta_search.Point) -> tta_search.Outcome:
    """The rate 0.05 comes furthest in one epoch; the cosine reaches the target one epoch earlier."""
    furthest = {0.02: 0.84, 0.05: 0.86}[point.rate]
    each = 0.04 if point.schedule == "cosine" else 0.02
    seconds = point.size / 16 * {"sma": 0.5, "ddp-moving": 1.0, "ddp": 2.0}[point.contestant]
    epochs = range(point.epochs)
    return tta_search.Outcome([furthest + each * n for n in epochs], [seconds * (n + 1) for n in epochs])


def test_time_to_accuracy_is_that_of_the_first_test_that_reaches_it() -> None:
    outcome = tta_search.Outcome([0.8, 0.91, 0.89], [1.0, 2.5, 4.0])
    assert outcome.reached(0.9) == (2.5, 2)
    assert outcome.reached(0.95) == (math.inf, 3)


@pytest.mark.parametrize(
    ("sizes", "rates", "schedules", "turns", "epochs"),
    [
        # a constant rate needs three epochs, so a cosine of the same pace gets as many; at half the pace it gets one
        ([16, 32], [0.02, 0.05], ["constant", "cosine"], [(8, 1), (2, 4), (2, 3), (2, 1), (2, 1)], 3),
        ([16, 32], [0.05], ["constant"], [(2, 4), (2, 4)], 4),
        ([16], [0.05], ["constant", "cosine"], [(2, 4), (2, 3)], 3),
        ([16], [0.02, 0.05], ["cosine"], [(4, 1)], 4),
        ([16], [0.05], ["cosine"], [], 4),
    ],
)
def test_each_contestant_is_searched_by_heats(
    sizes: list[int], rates: list[float], schedules: list[str], turns: list[tuple[int, int]], epochs: int
) -> None:
    """A heat without a choice is left out; a point that cannot become the fastest gets no more epochs."""
    made: list[tuple[int, int]] = []

    def perform(points: Sequence[tta_search.Point]) -> dict[tta_search.Point, tta_search.Outcome]:
        made.append((len(points), points[0].epochs))
        return {point: outcome_of(point) for point in points}

    best = tta_search.search("fashion-mnist", ["ddp-moving", "ddp"], sizes, rates, perform, schedules)
    assert made == turns
    assert best == {
        who: tta_search.Point("fashion-mnist", who, 16, 0.05, schedules[-1], epochs) for who in ("ddp-moving", "ddp")
    }


def test_who_never_reaches_the_target_is_left_out() -> None:
    def perform(points: Sequence[tta_search.Point]) -> dict[tta_search.Point, tta_search.Outcome]:
        short = {point: outcome_of(point) for point in points}
        return {
            point: tta_search.Outcome([0.5] * point.epochs, one.seconds) if point.contestant == "ddp" else one
            for point, one in short.items()
        }

    found = tta_search.search("fashion-mnist", ["ddp-moving", "ddp"], [16, 32], [0.02, 0.05], perform)
    assert {*found} == {"ddp-moving"}


def test_runs_that_are_kept_are_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def on_ranks(measure: Any, learners: int, *, points: Sequence[tta_search.Point], kept: str, **_: Any) -> None:
        made.append(len(points))
        for point in points:
            tta_runs.write_down(Path(kept), point, outcome_of(point))

    monkeypatch.setenv("RUDRA_DATA", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(tta, "on_ranks", on_ranks)
    answer = Job(training={"minibatch_size": 32}, optimizer={"learning_rate": 0.05})
    monkeypatch.setattr(tta, "tune", lambda *_, **about: SimpleNamespace(job=answer, winner=about["given"]))
    (tmp_path / "fashion-mnist").mkdir()
    keep, only = tmp_path / "runs", ["sma", "ddp", "32", "0.02", "0.05"]
    first = tta.run(quick=False, only=only, keep=keep)
    assert made == [2, 1, 1, 6]
    cut = keep.read_text().splitlines()[:-1]
    keep.write_text("\n".join(cut) + '\n{"kind": "run", "point": ["fashion')
    made.clear()
    again = tta.run(quick=False, only=only, keep=keep)
    assert made == [1], "a run whose line is torn is made again, and nothing else"
    assert again == first
    assert [row[1] for row in again.rows] == ["sma", "ddp"]
    assert (again.goals[0].figure, again.goals[0].reached) == (pytest.approx(8 / 3), True)
    assert any(note.startswith("no rows of cifar-10") for note in again.notes)


def test_what_cannot_be_compared_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUDRA_DATA", str(tmp_path))
    with pytest.raises(ConfigError, match=r"bench tta: no rows of fashion-mnist: it is not in .*RUDRA_DATA"):
        tta.run(quick=False)
    with pytest.raises(ConfigError, match=r"bench tta: --only smaa; valid: fashion-mnist, cifar-10, tuned"):
        tta.run(quick=False, only=["smaa"])


@pytest.mark.parametrize("benchmark", [reduction, islands, overlap_10g])
def test_what_needs_two_hosts_says_in_a_line_why_there_are_none(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    report = benchmark.run(quick=True)
    assert (report.rows, report.goals, report.notes) == ([], [], ["no rows: network namespaces need root"])


def test_bytes_that_cross_the_link_are_those_of_the_traffic_model() -> None:
    model = placed.network((1, 28, 28), 10)
    sizes = [4 * sum(parameter.numel() for parameter in layer.parameters()) for layer in model.children()]
    front, whole = sum(sizes[: placed.CUT]), sum(sizes)
    assert front < 0.1 * whole
    moved, learners = placed.crossing(placed.HIDDEN), placed.LEARNERS
    assert moved["base"] == moved["async"] == (2 * learners * whole, 1)
    activations = 4 * model[: placed.CUT](torch.zeros(placed.SIZE, 1, 28, 28)).numel()
    assert moved["ralp"] == moved["merged"] == (2 * learners * (activations + front), 1)
    size, ways = moved["allreduce"]
    assert size / ways == pytest.approx(2 * (learners - 1) / learners * whole)
