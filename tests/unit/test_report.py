import csv
import dataclasses
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import rudra
from rudra.cli.main import main
from rudra.errors import ConfigError, ResultsError
from tests.unit.report_files import TITLE, without_layout, write_point, write_study
from tests.unit.results_files import write_run

pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'rudra[plot]'")
pytest.importorskip("jinja2", reason="Jinja is not installed: pip install 'rudra[plot]'")

from matplotlib.figure import Figure

from rudra.report import report
from rudra.report.charts import figures
from rudra.report.cluster_diagram import drawings
from rudra.report.panels import lines_of
from rudra.report.runs import Run, Study, collect, names_of, read
from rudra.report.sections import sections_of
from rudra.report.svg import _drawn, inline
from rudra.report.tables import ReportTable, comparison, form_of, speed_up, summary

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_study(tmp_path_factory.mktemp("studies") / "grid", (4, 64), (1, 10, 30))


@pytest.fixture(scope="module")
def page(study: Path) -> str:
    with without_layout():
        return report([study], study.parent / "page.html")[0].read_text(encoding="utf-8")


@pytest.fixture
def _not_laid_out() -> Iterator[None]:
    with without_layout():
        yield


@pytest.fixture
def _undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages have no figures, which take nearly all of their time: for tests of what else is in them."""
    monkeypatch.setattr("rudra.report.page.inline", lambda figure, prefix, *, narrow: "")


def test_page_needs_nothing_else(page: str) -> None:
    links = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert [link for link in links if not link.startswith(("data:", "#"))] == []
    assert re.findall(r"@import|url\((?!#)", page) == []
    assert {found for found in re.findall(r'https?://[^"\s<]*', page) if "www.w3.org" not in found} == set()


def test_a_page_begins_with_the_answer(page: str) -> None:
    told = page.index("<h3>The answer</h3>")
    assert told < page.index("<h3>What was run</h3>") < page.index("<h3>Runs</h3>")
    answer = page[told : page.index("<h3>What was run</h3>")]
    for text in ("Best test error: ", "Fastest epoch: ", "The runs differ in ", "No mini-batch is recorded"):
        assert text in answer


def test_ids_are_unique_and_found(page: str) -> None:
    ids = re.findall(r'\bid="([^"]*)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="|url\()#([^")]*)', page)) <= set(ids)


def test_what_users_named_is_escaped(page: str) -> None:
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert" in page
    assert "learner 1 &lt;b&gt;died&lt;/b&gt;" in page


def test_runs_that_are_not_there_are_shown(study: Path, page: str) -> None:
    (found,) = collect([study])
    assert [run.status for run in found.runs][-3:] == ["failed", "unreadable", "missing"]
    assert "3 of 19 runs did not finish (1 failed, 1 unreadable, 1 missing)" in page
    assert "unreadable: not a result file of Rudra" in page


def test_simulated_time_is_called_virtual(page: str) -> None:
    assert "All times are virtual" in page
    assert "virtual time (s)" in page
    assert ">training time (" not in page


@pytest.mark.usefixtures("_undrawn")
def test_times_by_the_defaults_are_not_measured_ones(tmp_path: Path) -> None:
    about = {"protocol": "hardsync", "n": None, "mu": 16}
    write_point(tmp_path / "a.h5", lam=2, costs="defaults", **about)
    write_point(tmp_path / "b.h5", lam=4, costs="here.toml", **about)
    for files, said in (
        (["a.h5"], "These come from its defaults, not measured here: run rudra calibrate."),
        (
            ["a.h5", "b.h5"],
            "The times of hardsync, μ = 16, λ = 2 come from its defaults, not measured here: run rudra calibrate.",
        ),
        (["b.h5"], ""),
    ):
        report([tmp_path / file for file in files], tmp_path / "page.html", force=True)
        text = (tmp_path / "page.html").read_text()
        assert said in text
        assert ("not measured here" in text) == bool(said)


def test_every_figure_is_drawn_twice_and_has_its_data(study: Path, page: str) -> None:
    names = [figure.name for figure in (*figures(*_known(study)), *drawings(_known(study)[0]))]
    assert names[0] == "tradeoff"  # what the study is about
    assert names[1:] == [
        *("error-over-epochs", "error-over-time", "training-loss", "training-error", "learning-rate"),
        *("staleness-over-updates", "staleness-histogram", "speedup", "roles"),
        "topology",
    ]
    assert page.count('<svg role="img" aria-label=') == 2 * len(names)  # wide and narrow
    assert page.count('download="') == len(names) + 2


def _known(path: Path) -> tuple[Study, list]:
    (study,) = collect([path])
    return study, study.known


def test_tables_hold_what_was_measured(study: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(figures(*_known(study))[0].table.csv())))
    run = read(study / "softsync-30-4-30.h5")
    (row,) = [row for row in rows if (row["protocol"], row["μ"], row["λ"]) == ("λ-softsync", "4", "30")]
    assert float(row["virtual time (s)"]) == pytest.approx(run.time_s)
    assert float(row["test error (%)"]) == pytest.approx(100 * run.summary["final_test_error"])
    # 1 learner belongs to both softsyncs; the failed run to none
    assert {(row["protocol"], row["λ"]) for row in rows if row["λ"] == "1"} == {
        (family, "1") for family in ("hardsync", "1-softsync", "λ-softsync")
    }
    assert len(rows) == 3 * 6


def test_speed_up_is_against_one_learner_with_the_same_minibatch(study: Path) -> None:
    runs = collect([study])[0].known
    fast, base = read(study / "softsync-1-64-10.h5"), read(study / "hardsync-None-64-1.h5")
    assert speed_up(fast, runs) == pytest.approx(base.time_s / fast.time_s)
    assert speed_up(fast, [run for run in runs if run.learners > 1]) is None


def test_ours_beside_the_papers(study: Path) -> None:
    table = comparison(collect([study])[0])
    rows = {(where, quantity): rest for _, where, quantity, *rest in table.rows}
    assert rows["(0, 64, 1)", "test error (%)"][0] == "17.90"
    assert "paper: 140 of 50,000" in rows["(0, 64, 1)", "test error (%)"][-1]
    assert rows["(0, 64, 1)", "time per sample (ms)"][0] == "3.199"  # other amounts of work are not compared
    assert rows["(1, 4, 30)", "test error (%), training time (s)"][1:] == [None, None, "no such run here"]
    assert rows["(30, any, 30)", "largest σ"][2] == "within"
    assert rows["(1, 64, 10)", "speed-up"][0] == "8.78"


@pytest.mark.parametrize(
    ("paper", "difference"),
    [({"test_error": 0.20}, "points"), ({"time_s": 2.0, "epochs": 6, "training_samples": 3200}, " %"), ({}, None)],
)
def test_equal_work_is_compared_directly(study: Path, paper: dict[str, float], difference: str | None) -> None:
    run = read(study / "hardsync-None-4-10.h5")
    table = comparison(Study("x", (run,), paper=({"file": run.file.name, **paper},)))
    assert (table and difference and table.rows[0][5].endswith(difference)) or table is difference


def test_a_ratio_is_against_the_run_that_the_row_tells(study: Path) -> None:
    run, other = read(study / "softsync-1-64-10.h5"), read(study / "hardsync-None-64-1.h5")
    row = {"file": run.file.name, "against": other.file.name, "samples_per_s_ratio": 9.0}
    table = comparison(Study("x", (run, other), paper=(row,)))
    ((_, _, quantity, theirs, ours, _, remark),) = table.rows
    assert (quantity, float(theirs)) == ("samples/s, times as many", 9.0)
    assert float(ours) == pytest.approx(run.summary["samples_per_s"] / other.summary["samples_per_s"], rel=0.01)
    assert remark == f"against {other.label}"
    (alone,) = comparison(Study("x", (run,), paper=(row,))).rows
    assert alone[4] is None


def test_what_a_preset_was_fitted_to_is_marked(study: Path) -> None:
    run = read(study / "hardsync-None-4-10.h5")
    paper = {"file": run.file.name, "test_error": 0.2, "time_s": 2.0, "epochs": 6, "training_samples": 3200}
    for costs, fitted, marked in [
        ("p775", "a", True),
        (None, "a", False),
        ("here.toml", "a", False),
        ("p775", "", False),
    ]:
        used = dataclasses.replace(run, job={**run.job, "simulation.costs": costs})
        row = {**paper, "fitted": fitted} if fitted else paper
        table = comparison(Study("x", (used,), paper=(row,)))
        remarks = {quantity: remark for _, _, quantity, *_, remark in table.rows}
        assert ("fitted (a): no evidence" in remarks["training time (s)"]) is marked
        assert "fitted" not in remarks["test error (%)"], "errors are not"


def test_the_best_of_what_was_tuned_stands_beside_the_papers(study: Path) -> None:
    run = read(study / "softsync-10-4-10.h5")
    error = run.test_error
    tried = [
        dataclasses.replace(
            run,
            file=Path(f"{momentum}-{rate}.h5"),
            job={**run.job, "optimizer.momentum": momentum, "optimizer.learning_rate": rate},
            test_error=error + worse,
        )
        for momentum, rate, worse in [(0.0, 0.1, 2.0), (0.6, 0.1, 1.0), (0.9, 0.1, 5.0), (0.6, 0.01, 0.5)]
    ]
    others = read(study / "softsync-1-4-10.h5")  # not of as many groups
    paper = {"file": "0.0-0.1.h5", "sigma": 9, "best_momentum": 0.9, "best_learning_rate": 0.01}
    table = comparison(Study("x", (*tried, others), paper=(paper,)))
    assert [(quantity, ours) for _, _, quantity, _, ours, *_ in table.rows] == [
        ("best explicit momentum", "0.6"),
        ("best η", "0.01"),
    ]


def test_staleness_is_not_called_momentum(study: Path) -> None:
    run = read(study / "softsync-10-4-10.h5")
    table = comparison(Study("x", (run,), paper=({"file": run.file.name, "implicit_momentum": 0.9},)))
    ((_, _, quantity, _, _, _, remark),) = table.rows
    assert quantity == "⟨σ⟩ / (1 + ⟨σ⟩)"
    assert "staleness only" in remark


@pytest.mark.parametrize(("server", "known"), [(True, True), (False, False)])
def test_p_he_is_against_one_group_with_a_server_where_there_is_one(tmp_path: Path, server: bool, known: bool) -> None:
    for groups in (1, 2):
        options = {"groups": groups, "parameter_server": server}
        write_point(
            tmp_path / f"{groups}.h5", protocol="softsync", n=groups, mu=4, lam=4, topology="groups", options=options
        )
    one, two = (read(tmp_path / f"{groups}.h5") for groups in (1, 2))
    table = comparison(Study("x", (one, two), paper=({"file": "2.h5", "he_penalty": 0.5},)))
    ((*_, ours, _, _),) = table.rows
    assert (ours is not None) is known


@pytest.mark.usefixtures("_not_laid_out")
@pytest.mark.parametrize(
    ("updates", "epochs", "finish", "said"),
    [
        (0, 0, False, "No run has anything to draw yet"),
        (1, 0, False, "interrupted: somebody pressed Ctrl-C"),
        (20, 1, True, "1 of 10"),
        (7000, 3, True, "rows were left out evenly"),
    ],
)
def test_any_run_can_be_reported(tmp_path: Path, updates: int, epochs: int, finish: bool, said: str) -> None:
    write_run(tmp_path / "run.h5", updates=updates, epochs=epochs, staleness=1, finish=finish)
    (written,) = report([tmp_path / "run.h5"], tmp_path / "page.html")
    assert said in written.read_text(encoding="utf-8")


def test_a_sweep_that_has_not_begun(tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text(json.dumps({"points": [{"file": "a.h5"}, {"file": "b.h5"}]}))
    report([tmp_path], tmp_path / "page.html")
    assert "No run has a result yet" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_equal_configurations_are_told_apart_by_file(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_run(tmp_path / f"{name}.h5", updates=5, epochs=1, staleness=1)
    (study,) = collect([tmp_path])
    assert [run.label for run in study.runs] == ["one", "two"]


@pytest.mark.usefixtures("_undrawn")
def test_directories_of_sweeps_become_parts(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_run(tmp_path / name / "run.h5", updates=5, epochs=1, staleness=1)
    (written,) = report([tmp_path], tmp_path / "page.html")
    assert re.findall(r'<section id="([^"]*)"', written.read_text(encoding="utf-8")) == ["a", "b"]


def test_simulations_without_tensors_have_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_point(tmp_path / "run.h5", protocol="softsync", n=1, mu=4, lam=2)
    run = read(tmp_path / "run.h5")
    assert run.error is not None
    jobs = {"simulation": {"tensors": False}}
    monkeypatch.setattr("rudra.results.reader.Results.job", property(lambda self: jobs))
    run = read(tmp_path / "run.h5")
    assert run.error is None
    assert [f.name for f in figures(Study("x", (run,)), [run])] == [
        *("staleness-over-updates", "staleness-histogram", "roles")
    ]
    table = summary(Study("x", (run,)))
    assert table.rows[0][table.columns.index("test error (%)")] is None


@pytest.mark.parametrize(
    ("files", "output", "error", "message"),
    [
        ([], "page.html", ConfigError, "no result file to report on"),
        (["grid"], "page.pdf", ConfigError, r"a report is an \.html file, not '\.pdf'"),
        (["gone.h5"], "page.html", ResultsError, r"gone\.h5: no such result file"),
        (["empty"], "page.html", ConfigError, r"empty: has neither a result file nor a sweep\.json"),
        (["broken"], "page.html", ConfigError, r"broken/sweep\.json: damaged: points: "),
        (["one.h5"], "gone/page.html", ResultsError, r"page\.html: directory .*gone does not exist"),
    ],
)
def test_mistakes(
    tmp_path: Path, study: Path, files: list[str], output: str, error: type[Exception], message: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "sweep.json").write_text('{"points": 3}')
    (tmp_path / "grid").symlink_to(study)
    write_run(tmp_path / "one.h5", updates=1, epochs=0, staleness=0, finish=False)
    with pytest.raises(error, match=message):
        report([tmp_path / name for name in files], tmp_path / output)


@pytest.mark.usefixtures("_undrawn", "_not_laid_out")
def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run.h5", updates=5, epochs=1, staleness=1)
    page, place = tmp_path / "page.html", tmp_path / "figures"
    assert main(["report", str(tmp_path / "run.h5"), "-o", str(page), "--figures", str(place)]) == 0
    assert capsys.readouterr().out == f"wrote {page} and 16 files in {place}\n"
    names = ("error", "training", "staleness-over-updates", "staleness-histogram", "roles")
    wanted = {f"{name}{suffix}" for name in names for suffix in (".pdf", ".svg", ".csv")} | {"runs.csv"}
    assert {path.name for path in place.iterdir()} == wanted
    assert (place / "error.pdf").read_bytes().startswith(b"%PDF")
    assert main(["report", str(tmp_path / "gone"), "-o", str(page)]) == 2


def test_title_names_the_study(page: str) -> None:
    assert (
        f"<title>{TITLE.replace('&', '&amp;').replace('<', '&lt;').replace('>', '&gt;').replace(chr(34), '&#34;')}"
        in page
    )


def negative(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss that goes below 0, and comes without an error."""
    return torch.nn.functional.cross_entropy(output, target) - 3


def hits(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.argmax(1) == target).float().mean()


@pytest.mark.usefixtures("_not_laid_out")
def test_runs_without_an_error_show_loss_metrics_and_target(tmp_path: Path) -> None:
    job = rudra.Job.load("digits").with_(
        model={"name": "mlp"},
        task={"name": negative, "metrics": [hits]},
        data={"train_limit": 400},
        training={"epochs": 6, "target": "hits >= 0.5"},
    )
    path = tmp_path / "run.h5"
    rudra.simulate(job, output=path, progress="quiet").close()
    (study,) = collect([path])
    (run,) = study.known
    drawn = {figure.name: figure for figure in figures(study, study.known)}
    assert list(drawn)[:2] == ["loss", "metric-hits"]
    assert [row[-1] for row in drawn["loss"].table.rows] == run.summary["test_loss"]
    assert [row[-1] for row in drawn["metric-hits"].table.rows] == run.summary["metrics"]["test"]["hits"]
    table = summary(study)
    row = dict(zip(table.columns, table.rows[0], strict=True))
    assert row["test loss"] == run.summary["test_loss"][-1] < 0
    assert row["virtual time to target (s)"] == run.summary["time_to_target_s"] > 0
    assert "test error (%)" not in row
    report([path], tmp_path / "page.html")
    axis = Figure().subplots()
    drawn["loss"].panels[0](axis)
    bottom, top = axis.get_ylim()
    assert bottom < min(run.summary["test_loss"]) <= max(run.summary["test_loss"]) < top


def test_what_a_step_sends_is_told_where_layers_are_placed(tmp_path: Path) -> None:
    job = rudra.Job.load("digits", ["cluster.learners=3", "simulation.tensors=false", "training.epochs=1"])
    for name, cut in (("whole.h5", None), ("placed.h5", 5)):
        rudra.simulate(job.with_(placement={"cut": cut}), output=tmp_path / name, progress="quiet").close()
    head = "a step sends (MB)"
    (both,) = collect([tmp_path / "whole.h5", tmp_path / "placed.h5"])
    table = summary(both)
    assert [row[table.columns.index(head)] for row in table.rows] == [None, 0.3756]
    assert head not in summary(collect([tmp_path / "whole.h5"])[0]).columns


def write_grid(place: Path, count: int, **more: object) -> list[Path]:
    """Runs with learning rates of their own."""
    for i in range(count):
        about = {"protocol": "softsync", "n": 2, "mu": 4, "lam": 4, "learning_rate": 0.01 * (i + 1)} | more
        write_point(place / f"run{i:02}.h5", **about)
    return sorted(place.glob("*.h5"))


def drawn(files: list[Path], **options: bool) -> dict[str, list]:
    """Figure -> its panels, drawn."""
    (study,) = collect(files)
    found = {}
    for figure in figures(study, study.known, **options):
        found[figure.name] = [Figure().subplots() for _ in figure.panels]
        for panel, axis in zip(figure.panels, found[figure.name], strict=True):
            panel(axis)
    return found


@pytest.mark.each_value
@pytest.mark.parametrize("protocols", [("softsync",), ("hardsync", "softsync")])
@pytest.mark.parametrize("count", [4, 13])
def test_a_run_looks_alike_in_every_panel_of_a_page(tmp_path: Path, count: int, protocols: tuple[str, ...]) -> None:
    """Also where others are left out, as are those of hardsync from staleness."""
    for protocol in protocols:
        (tmp_path / protocol).mkdir()
        write_grid(tmp_path / protocol, count, protocol=protocol, n=2 if protocol == "softsync" else None)
    files = sorted(tmp_path.glob("*/*.h5"))
    (study,) = collect(files)
    lines = {line.runs[0].label: line for line in lines_of(study.known)}
    assert len({(line.style["color"], line.style["marker"]) for line in lines.values()}) == len(files)
    looks: dict[str, set] = {}
    for name, axes in drawn(files).items():
        if name in ("tradeoff", "speedup", "roles"):
            continue  # no lines of runs
        for axis in axes:
            assert len({line.get_label() for line in axis.lines if line.get_label()[0] != "_"}) <= 8
            for line in axis.lines:
                if line.get_label()[0] != "_":
                    looks.setdefault(line.get_label(), set()).add((line.get_color(), line.get_marker()))
    assert len(looks) == len(files)
    assert all(len(found) == 1 for found in looks.values())


def test_seeds_are_one_line(tmp_path: Path) -> None:
    for seed in (1, 2, 5):
        write_point(tmp_path / f"{seed}.h5", protocol="softsync", n=2, mu=4, lam=4, seed=seed)
    write_point(tmp_path / "hard.h5", protocol="hardsync", n=None, mu=4, lam=4)
    (study,) = collect(files := sorted(tmp_path.glob("*.h5")))
    labels = [line.label for line in lines_of(study.known)]
    assert labels == ["2-softsync, μ = 4, λ = 4, 3 seeds", study.runs[-1].label]
    panel = drawn(files)["error"][0]
    assert panel.lines[0].get_ydata() == pytest.approx(read(tmp_path / "2.h5").test_error)
    assert len(panel.collections) == 1
    assert "the median, and the range" in figures(study, study.known)[0].caption


def test_errors_losses_and_rates_of_training_are_shown(tmp_path: Path) -> None:
    files = write_grid(tmp_path, 2)
    loss, error, rate = drawn(files)["training"]
    run = read(files[1])
    assert error.lines[1].get_ydata() == pytest.approx(0.9 * run.test_error)
    assert loss.lines[1].get_ydata() == pytest.approx(0.025 * run.test_error)
    assert set(rate.lines[1].get_ydata()) == {0.02}
    (study,) = collect(files)
    (table,) = [figure.table for figure in figures(study, study.known) if figure.name == "training"]
    assert table.columns == ("run", "epoch", "training loss", "training error (%)", "learning rate α")


@pytest.mark.usefixtures("_not_laid_out")
def test_error_and_loss_are_not_in_one_panel(tmp_path: Path) -> None:
    """A run without an error is named where it is not, and brings a figure of the loss."""
    write_point(tmp_path / "a.h5", protocol="softsync", n=2, mu=4, lam=4)
    write_point(tmp_path / "lossy.h5", protocol="softsync", n=4, mu=4, lam=4, known_error=False)
    (study,) = collect(files := sorted(tmp_path.glob("*.h5")))
    made = {figure.name: figure for figure in figures(study, study.known)}
    assert [len(axis.lines) for axis in drawn(files)["error"]] == [1, 1]
    assert [len(axis.lines) for axis in drawn(files)["loss"]] == [2, 2]
    assert list(made["error"].left_out.values()) == [["4-softsync, μ = 4, λ = 4"]]
    for narrow in (False, True):
        assert "Not in test error: 4-softsync, μ = 4, λ = 4<" in inline(made["error"], "x", narrow=narrow)
        assert ">Not in" not in inline(made["loss"], "x", narrow=narrow)
    table = summary(study)
    assert table.columns[:3] == ("run", "test error (%)", "test loss")
    assert [row[1] is None for row in table.rows] == [False, True]


@pytest.mark.parametrize("count", [2, 13])
def test_figures_of_few_and_many_runs_have_logarithmic_axes_where_asked(tmp_path: Path, count: int) -> None:
    files = write_grid(tmp_path, count)
    for log in (False, True):
        scales = {name: {axis.get_yscale() for axis in axes} for name, axes in drawn(files, log=log).items()}
        wanted = {name for name in scales if name.startswith(("error", "training", "learning-rate"))}
        assert {name for name, scale in scales.items() if scale == {"log"}} == (wanted if log else set())
    (study,) = collect(files)
    study.known[0].train_error[-1] = 0
    (training,) = [f for f in figures(study, study.known, log=True) if f.name in ("training", "training-error")]
    assert list(training.left_out.values()) == [[study.known[0].label]]


@pytest.mark.usefixtures("_not_laid_out")
def test_commands_that_draw_accept_logarithmic_axes(tmp_path: Path) -> None:
    files = write_grid(tmp_path, 2)
    assert main(["report", *map(str, files), "-o", str(tmp_path / "page.html"), "--log"]) == 0
    assert main(["plot", *map(str, files), "-o", str(tmp_path / "page.png"), "--log"]) == 0


@pytest.mark.usefixtures("_not_laid_out")
def test_nothing_stale_is_one_line(tmp_path: Path) -> None:
    write_point(tmp_path / "hard.h5", protocol="hardsync", n=None, mu=4, lam=4)
    assert "staleness-histogram" not in drawn([tmp_path / "hard.h5"])
    page = report([tmp_path / "hard.h5"], tmp_path / "page.html")[0].read_text(encoding="utf-8")
    assert page.count("Nothing is stale: σ = 0 in all gradients.") == 1
    assert "Data (6 rows)" in page
    assert "Data (1 row)" in page
    write_point(tmp_path / "soft.h5", protocol="softsync", n=2, mu=4, lam=4)
    (study,) = collect([tmp_path / "hard.h5", tmp_path / "soft.h5"])
    made = {figure.name: figure.left_out for figure in figures(study, study.known)}
    assert made["staleness-histogram"] == {"σ = 0": ["hardsync, μ = 4, λ = 4"]}


def test_an_unfinished_study_is_not_called_fresh_for_good(tmp_path: Path) -> None:
    write_run(tmp_path / "a.h5", updates=4, epochs=1, staleness=0, finish=False)
    (section,) = sections_of(collect([tmp_path / "a.h5"]))
    assert any(note.startswith("Nothing is stale yet") for note in section.notes)


def test_bars_that_are_compared_share_a_scale(study: Path, tmp_path: Path) -> None:
    files = [study / f"softsync-{n}-4-30.h5" for n in (1, 30)]
    made = drawn(files)
    assert len({axis.get_xlim() for axis in made["roles"]}) == 1 < len(made["roles"])
    (found,) = collect(files)
    (histogram,) = [figure for figure in figures(found, found.known) if figure.name == "staleness-histogram"]
    assert histogram.share_y
    outlines = drawn([*files, *write_grid(tmp_path, 1, n=30, lam=30)])["staleness-histogram"][1]
    assert [patch.get_fill() for patch in outlines.patches] == [False, False]


def test_shares_and_bars_of_roles_stay_in_their_bounds(study: Path) -> None:
    """Tests that end after the training, learners whose phases overlap, and a server that updates in parallel."""
    run = read(study / "softsync-1-4-30.h5")
    times = [{**row, "wait_share": 0.7} for row in run.summary["learner_times"]]
    times_of = {"update_s": 2 * run.time_s, "evaluation_s": 1.18 * run.time_s}
    run = dataclasses.replace(run, summary={**run.summary, "learner_times": times}, **times_of)
    (figure,) = [f for f in figures(Study("x", (run,)), [run]) if f.name == "roles"]
    row = dict(zip(figure.table.columns, figure.table.rows[0], strict=True))
    assert row["statistics: evaluation (%)"] == 100
    assert row["server: updates (%)"] == pytest.approx(200)
    for narrow in (False, True):
        page = _drawn(figure, narrow=narrow)
        assert len(page.axes) == 3
        for axis in page.axes:
            drawn = [*axis.patches, *(text for text in axis.texts if text.get_text().endswith(" %"))]
            assert max(each.get_window_extent().x1 for each in drawn) <= axis.bbox.x1


def test_scales_that_do_not_begin_at_zero_say_so(tmp_path: Path) -> None:
    """Those of values that are close together, in one panel or in several that share the scale."""
    write_point(tmp_path / "run.h5", protocol="softsync", n=2, mu=4, lam=4)
    run = read(tmp_path / "run.h5")
    note = "The scale does not begin at 0: test error (%)"
    for count in (1, 13):  # one panel for all, and several
        for low, cut in ((48.0, True), (2.0, False)):
            runs = [
                dataclasses.replace(
                    run,
                    file=Path(f"{i}.h5"),
                    label=f"run {i}",
                    job={**run.job, "optimizer.momentum": i / 20},
                    test_error=np.linspace(50, low, 6),
                )
                for i in range(count)
            ]
            figure = figures(Study("x", tuple(runs)), runs)[0]
            page = _drawn(figure, narrow=False)
            bottom, top = page.axes[0].get_ylim()
            assert (page.get_supxlabel() == note) is cut
            assert 50 < top < 60
            assert 40 < bottom < low if cut else bottom <= 0


def notes_of(*files: Path) -> str:
    (section,) = sections_of(collect(files))
    return "\n".join(section.notes)


def test_runs_of_one_seed_get_a_note(tmp_path: Path) -> None:
    for name, n, seed in (("one", 1, 1), ("other", 4, 1), ("again", 4, 2)):
        write_point(tmp_path / f"{name}.h5", protocol="softsync", n=n, mu=4, lam=4, seed=seed)
    one, other, again = (tmp_path / f"{name}.h5" for name in ("one", "other", "again"))
    assert "All runs have the same seed" in notes_of(one, other)
    assert "same seed" not in notes_of(one), "nothing is compared"
    assert "same seed" not in notes_of(one, other, again)


def test_warm_up_by_updates_gets_a_note_where_runs_make_different_numbers_of_them(tmp_path: Path) -> None:
    def point(name: str, n: int, **more: object) -> Path:
        linear = {"schedule": "torch.optim.lr_scheduler:LinearLR", "schedule_options": {"total_iters": 20}}
        optimizer = {**linear, "schedule_every": "update", **more}
        write_point(tmp_path / name, protocol="softsync", n=n, mu=4, lam=4, optimizer=optimizer)
        return tmp_path / name

    one, four, said = (
        point("one.h5", 1),
        point("four.h5", 4),
        "counts updates, such as a warm-up, lasts for more epochs",
    )
    assert said in notes_of(one, four)
    assert said not in notes_of(one, point("rate.h5", 1, learning_rate=0.02)), "equally many updates"
    assert said not in notes_of(one, point("epoch.h5", 4, schedule_every="epoch")), "one of them counts epochs"
    assert said not in notes_of(*(point(f"cosine{n}.h5", n, schedule="cosine", schedule_options={}) for n in (1, 4)))


def test_effective_rates_stand_in_legends_and_the_table(tmp_path: Path) -> None:
    """Of many runs in the legend of each panel, where a λ has another rate in each."""
    for lam in (2, 4, 8):
        for mu in (4, 8, 16):
            write_point(tmp_path / f"{lam}-{mu}.h5", protocol="hardsync", n=None, mu=mu, lam=lam)
    (study,) = collect([tmp_path])
    (made, *_) = [figure for figure in figures(study, study.known) if figure.name == "error-over-epochs"]
    page = inline(made, "x", narrow=False)
    assert made.own_legends
    assert all(f">λ = {lam}, α = {rate}<" in page for lam, rate in ((2, "0.003536"), (8, "0.007071"), (8, "0.01414")))
    for narrow in (False, True):  # below the panels: a legend covers no line, and is not cut
        page = _drawn(made, narrow=narrow)
        legends = [axis.get_legend().get_window_extent() for axis in page.axes]
        assert not any(legend.overlaps(axis.bbox) for legend in legends for axis in page.axes)
        assert all(legend.x1 <= page.bbox.x1 and legend.y0 >= 0 for legend in legends)
    table = summary(study)
    rates = [row[table.columns.index("learning rate")] for row in table.rows]
    assert rates == [run.effective_rate for run in study.known]


def rates_note(*files: Path) -> bool:
    return "Effective learning rates differ" in notes_of(*files)


def test_a_report_says_where_rates_differ_beside_what_is_compared(tmp_path: Path) -> None:
    def point(name: str, **about: object) -> Path:
        write_point(tmp_path / name, **{"protocol": "softsync", "n": 1, "mu": 4, "lam": 4, **about})
        return tmp_path / name

    one, four = point("1.h5"), point("4.h5", n=4)
    fair = point("fair.h5", n=4, learning_rate=0.04)
    higher = point("higher.h5", learning_rate=0.04)
    assert rates_note(one, four), "α0/n"
    assert not rates_note(one, fair), "both have 0.01"
    assert not rates_note(one, higher), "the rate is what is compared"
    assert not rates_note(one, higher, point("a.h5", n=4, learning_rate=0.04), point("b.h5", n=4, learning_rate=0.16))
    assert not rates_note(four, point("none.h5", n=4, modulation="none")), "so is modulation"
    assert not rates_note(one, point("seed.h5", seed=2))


def test_numbers_of_a_column_have_one_format() -> None:
    table = ReportTable("x", ("s", "loss", "count", "n"), [(36.2, 2.5, 1444, 2.0), (9.254, 0.0134, 7, 10.0)], {})
    assert [[text for text, *_ in table.cells(row)] for row in table.rows] == [
        ["36.20", "2.5000", "1,444", "2"],
        ["9.25", "0.0134", "7", "10"],
    ]
    table = ReportTable("x", ("run", "error"), [("a", 3.25), ("b", None)], {})
    assert [cell[2] for cell in table.cells(("b", None))] == [False, True], "a dash stands where the numbers do"
    assert [form_of([0.01, 0.000625])(rate) for rate in (0.01, 0.000625)] == ["0.010000", "0.000625"]


def test_speed_ups_against_a_fitted_time_are_marked(study: Path) -> None:
    """And a difference from what was fitted is no difference that tells something."""
    files = ("hardsync-None-4-1.h5", "hardsync-None-4-10.h5")
    base, run = (
        dataclasses.replace(r, job={**r.job, "simulation.costs": "p775"}) for r in map(read, map(study.joinpath, files))
    )
    paper = {"file": run.file.name, "speed_up": 8.0, "time_s": 2.0, "epochs": 6, "training_samples": 3200}
    for more, marked in (
        ({}, []),
        ({"base_fitted": "a"}, ["speed-up"]),
        ({"fitted": "a"}, ["training time (s)", "speed-up"]),
    ):
        table = comparison(Study("x", (base, run), paper=({**paper, **more},)))
        found = {row[2]: row[5:] for row in table.rows}
        assert [quantity for quantity, (difference, _) in found.items() if difference.endswith("(fitted)")] == marked
        assert [quantity for quantity, (_, remark) in found.items() if "fitted (a)" in remark] == marked


def test_shares_are_in_percent_as_errors_are(tmp_path: Path) -> None:
    write_point(tmp_path / "run.h5", protocol="softsync", n=2, mu=4, lam=4)
    run = read(tmp_path / "run.h5")
    run = dataclasses.replace(run, metrics={"precision@1": 0.5 - run.test_error / 1000})
    (figure,) = [f for f in figures(Study("x", (run,)), [run]) if f.name == "metric-precision@1"]
    assert figure.table.columns[-1] == "precision@1 (%)"
    assert [row[-1] for row in figure.table.rows] == pytest.approx(50 - run.test_error / 10)
    assert figure.table.cells(figure.table.rows[0])[-1][0] == f"{figure.table.rows[0][-1]:.2f}"


@pytest.mark.parametrize(("lam", "n", "mean"), [(4, 1, 0.75), (4, 4, 3.0), (5, 3, 4.0)])
def test_the_line_of_theory_is_that_of_the_gradients_under_way(tmp_path: Path, lam: int, n: int, mean: float) -> None:
    """λ - 1 of them become staler with each update, which takes c = ⌊λ/n⌋."""
    write_point(tmp_path / "run.h5", protocol="softsync", n=n, mu=4, lam=lam)
    made = drawn([tmp_path / "run.h5"])
    (over_updates,), (histogram,) = made["staleness-over-updates"], made["staleness-histogram"]
    assert [line.get_ydata()[0] for line in over_updates.lines if line.get_linestyle() == "--"] == [mean]
    marks = {line.get_linestyle(): line.get_xdata()[0] for line in histogram.lines if len(line.get_xdata()) == 2}
    assert marks == {"--": mean, ":": 2 * n}


def test_how_far_replicas_are_is_drawn_where_there_are_any(tmp_path: Path) -> None:
    cluster = {"learners": 2, "threads_per_rank": 1}
    tables = {"model": {"name": "mlp"}, "data": {"train_limit": 64}, "training": {"epochs": 2}, "cluster": cluster}
    for name, topology in (("easgd", "replicas"), ("async", "base")):
        job = rudra.Job(protocol={"name": name}, topology={"name": topology}, **tables)
        rudra.simulate(job, output=tmp_path / f"{name}.h5", progress="quiet").close()
    runs = [read(tmp_path / f"{name}.h5") for name in ("easgd", "async")]
    drawn = {figure.name: figure for figure in figures(Study("x", tuple(runs)), runs)}
    figure = drawn["distance-over-updates"]
    assert figure.left_out == {"no replicas": [runs[1].label]}
    with rudra.open_results(tmp_path / "easgd.h5") as results:
        assert len(figure.table.rows) == len(results.updates)
        size = results.layout[-1].offset + results.layout[-1].size
    assert f"{4 * size / 16:,.0f}" in figure.caption
    assert "distance-over-updates" not in {figure.name for figure in figures(Study("x", tuple(runs[1:])), runs[1:])}


@pytest.fixture
def aimed(tmp_path: Path) -> list[Run]:
    """Three seeds at two λ of two protocols; one of hardsync's with λ = 8 never got there."""
    runs = []
    for protocol, lam, epochs in [
        ("hardsync", 2, (6, 5, 9)),
        ("hardsync", 8, (9, None, 8)),
        ("softsync", 8, (4, 4, 5)),
    ]:
        for seed, epoch in enumerate(epochs, 1):
            path = tmp_path / f"{protocol}-{lam}-{seed}.h5"
            about = {"protocol": protocol, "n": 1 if protocol == "softsync" else None, "mu": 4 * lam}
            write_point(path, lam=lam, seed=seed, **about)
            run = read(path)
            reached = {"target": "accuracy >= 0.8", "target_epoch": epoch, "time_to_target_s": epoch and 2.0 * epoch}
            runs.append(dataclasses.replace(run, summary={**run.summary, **reached}))
    return runs


def test_targets_are_drawn_over_what_varies(aimed: list[Run]) -> None:
    figure, *_ = figures(Study("x", tuple(aimed), "target"), aimed)
    assert figure.name == "target"
    assert figure.table.columns[:6] == (
        *("runs", "learners λ", "seeds"),
        *("epochs to target", "epochs to target, least", "epochs to target, most"),
    )
    assert [row[:6] for row in figure.table.rows] == [
        ("hardsync", 2, 3, 6, 5, 9),
        ("hardsync", 8, 3, 9, 8, None),  # the one that never got there comes last
        ("1-softsync", 8, 3, 4, 4, 5),
    ]
    assert figure.left_out == {"Did not reach it": ["hardsync at 8 (1 of 3)"]}
    epochs, *_ = _drawn(figure, narrow=False).axes
    assert [(line.get_label(), *line.get_ydata()) for line in epochs.lines] == [("hardsync", 6, 9), ("1-softsync", 4)]


def test_a_bank_that_grew_is_drawn_at_the_size_that_it_kept(aimed: list[Run]) -> None:
    """Beside banks of fixed sizes, on one device and on two."""
    runs = []
    for devices, m, growth, kept in [
        (1, 1, "double", 1),
        (1, 2, "double", 2),
        (2, 1, "double", 1),
        (1, "auto", "one", 2),
        (1, "auto", "double", 2),
    ]:
        table = {"learners_per_device": m, "growth": growth, "learners": 4 if m == "auto" else devices * kept}
        keys = {f"cluster.{key}": value for key, value in table.items()} | {"simulation.nodes": devices}
        summary = {**aimed[0].summary, "learners_per_device": kept, "learners": table["learners"]}
        runs.append(dataclasses.replace(aimed[0], job={**aimed[0].job, **keys}, summary=summary))
    figure, *_ = figures(Study("x", tuple(runs), "target"), runs)
    assert figure.table.columns[1] == "learners on each device m"
    one, two = (f"hardsync, nodes {devices}" for devices in (1, 2))
    assert [row[:2] for row in figure.table.rows] == [
        *((one, 1), (one, 2), (two, 1)),
        *((f"{one}, m by rule one", 2), (f"{one}, m by rule double", 2)),
    ]


def test_ratios_are_of_the_medians_of_all_seeds(aimed: list[Run]) -> None:
    row = {"file": aimed[4].file.name, "against": aimed[0].file.name, "target_epoch_ratio": 2.0}
    table = comparison(Study("x", tuple(aimed), paper=(row,)))
    assert table.rows[0][4] == "1.5"  # 9 against 6, though the run that the row tells never got there
    assert table.rows[0][6] == f"against {aimed[0].label}; medians of 3 seeds"
    assert comparison(Study("x", tuple(aimed[i] for i in (0, 1, 2, 4)), paper=(row,))).rows[0][4] is None


def test_targets_that_nothing_varies_with_are_not_drawn(aimed: list[Run]) -> None:
    for runs in (aimed[:3], [run for run in aimed if run.summary["target_epoch"] is None]):
        assert "target" not in {figure.name for figure in figures(Study("x", tuple(runs)), runs)}


def test_lines_of_one_name_are_told_apart_by_what_does_not_follow_from_it(tmp_path: Path) -> None:
    runs = []
    for lam, rate, seed in [(2, 0.01, 1), (2, 0.02, 1), (4, 0.01, 1), (4, 0.02, 1)]:
        path, rates = tmp_path / f"{lam}-{rate}.h5", {"learning_rate": rate, "modulation": "none"}
        about = {"protocol": "hardsync", "n": None, "mu": 4, "topology": "groups" if lam == 2 else "base"}
        write_point(path, lam=lam, seed=seed, **about, **rates)
        runs.append(read(path))
    assert names_of(runs) == [
        *("hardsync, μ = 4, λ = 2, α0 = 0.01", "hardsync, μ = 4, λ = 2, α0 = 0.02"),
        *("hardsync, μ = 4, λ = 4, α0 = 0.01", "hardsync, μ = 4, λ = 4, α0 = 0.02"),
    ]


def test_a_name_with_a_backslash_is_part_of_a_figure(tmp_path: Path) -> None:
    write_point(tmp_path / "one.h5", protocol="hardsync", n=None, mu=4, lam=2)
    (study,) = collect([tmp_path])
    made = dataclasses.replace(figures(study, study.known)[0], left_out={"Not finished": [r"caf\udce9"]})
    assert r"Not finished: caf\udce9" in inline(made, "x", narrow=False)
