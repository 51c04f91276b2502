import csv
import dataclasses
import io
import json
import re
from pathlib import Path

import pytest
import torch

import rudra
from rudra.cli import main
from rudra.errors import ConfigError, ResultsError
from tests.unit.report_files import TITLE, write_point, write_study
from tests.unit.results_files import write_run

pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'rudra[plot]'")
pytest.importorskip("jinja2", reason="Jinja is not installed: pip install 'rudra[plot]'")

from matplotlib.figure import Figure

from rudra.report import report
from rudra.report.charts import figures
from rudra.report.runs import Study, collect, read
from rudra.report.tables import comparison, speed_up, summary
from rudra.report.who import drawings

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_study(tmp_path_factory.mktemp("studies") / "grid", (4, 64), (1, 10, 30))


@pytest.fixture(scope="module")
def page(study: Path) -> str:
    return report([study], study.parent / "page.html")[0].read_text(encoding="utf-8")


def test_page_needs_nothing_else(page: str) -> None:
    links = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert [link for link in links if not link.startswith(("data:", "#"))] == []
    assert re.findall(r"@import|url\((?!#)", page) == []
    assert {found for found in re.findall(r'https?://[^"\s<]*', page) if "www.w3.org" not in found} == set()


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


def test_every_figure_is_drawn_twice_and_has_its_data(study: Path, page: str) -> None:
    names = [figure.name for figure in (*figures(*_known(study)), *drawings(_known(study)[0]))]
    assert names[0] == "tradeoff"  # what the study is about
    assert names[1:] == [
        *("error-over-epochs", "error-over-time", "staleness-over-updates"),
        *("staleness-histogram", "speedup", "roles"),
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
    assert table is not None
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
        assert table is not None
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
    assert table is not None
    assert [(quantity, ours) for _, _, quantity, _, ours, *_ in table.rows] == [
        ("best explicit momentum", "0.6"),
        ("best η", "0.01"),
    ]


def test_staleness_is_not_called_momentum(study: Path) -> None:
    run = read(study / "softsync-10-4-10.h5")
    table = comparison(Study("x", (run,), paper=({"file": run.file.name, "implicit_momentum": 0.9},)))
    assert table is not None
    ((_, _, quantity, _, _, _, remark),) = table.rows
    assert quantity == "⟨σ⟩ / (1 + ⟨σ⟩)"
    assert "staleness alone" in remark


@pytest.mark.parametrize(("server", "known"), [(True, True), (False, False)])
def test_p_he_is_against_one_group_with_a_server_where_there_is_one(tmp_path: Path, server: bool, known: bool) -> None:
    for groups in (1, 2):
        options = {"groups": groups, "server": server}
        write_point(
            tmp_path / f"{groups}.h5", protocol="softsync", n=groups, mu=4, lam=4, topology="groups", options=options
        )
    one, two = (read(tmp_path / f"{groups}.h5") for groups in (1, 2))
    table = comparison(Study("x", (one, two), paper=({"file": "2.h5", "he_penalty": 0.5},)))
    assert table is not None
    ((*_, ours, _, _),) = table.rows
    assert (ours is not None) is known


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
    assert "No run has left a result yet" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_equal_configurations_are_told_apart_by_file(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_run(tmp_path / f"{name}.h5", updates=5, epochs=1, staleness=1)
    (study,) = collect([tmp_path])
    assert [run.label for run in study.runs] == ["one", "two"]


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
    monkeypatch.setattr("rudra.results.Results.job", property(lambda self: jobs))
    run = read(tmp_path / "run.h5")
    assert run.error is None
    assert [f.name for f in figures(Study("x", (run,)), [run])] == [
        *("staleness-over-updates", "staleness-histogram", "roles"),
    ]
    assert summary(Study("x", (run,))).rows[0][6] is None


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


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run.h5", updates=5, epochs=1, staleness=1)
    page, place = tmp_path / "page.html", tmp_path / "figures"
    assert main(["report", str(tmp_path / "run.h5"), "-o", str(page), "--figures", str(place)]) == 0
    assert capsys.readouterr().out == f"wrote {page} and 13 files in {place}\n"
    names = ("error", "staleness-over-updates", "staleness-histogram", "roles")
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


def test_runs_without_an_error_show_loss_metrics_and_target(tmp_path: Path) -> None:
    job = rudra.Job.load("digits").with_(
        model={"name": "mlp"},
        task={"name": negative, "metrics": [hits]},
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
