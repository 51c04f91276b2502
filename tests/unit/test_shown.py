"""What pages say that commands print, and the files that these read."""

from pathlib import Path

import pytest
from pages import blocks, files, page, section, shown

import rudra
from rudra.cli.main import main

SHOWN = [
    (name, *each)
    for name in ("choosing", "protocols", "topologies", "virtual-time")
    for each in shown(page(f"{name}.md"))
]


@pytest.mark.parametrize(("name", "asked", "lines"), SHOWN, ids=[f"{name}-{i}" for i, (name, *_) in enumerate(SHOWN)])
def test_pages_show_what_is_printed(
    name: str, asked: list[str], lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(asked) == 0
    assert capsys.readouterr().out.splitlines()[: len(lines)] == lines, name


def test_a_cost_file_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (text,) = files(page("virtual-time.md")).values()
    Path("cluster.toml").write_text(text)
    asked = "predict digits --learners 1,8,64 --set simulation.costs=cluster.toml"
    assert f"rudra {asked}\n" in blocks("sh", page("virtual-time.md"))
    assert main(asked.split()) == 0
    assert "costs: cluster.toml" in capsys.readouterr().out


@pytest.fixture(scope="module")
def studied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which the study of the page was run, with a paper beside it."""
    place = tmp_path_factory.mktemp("study")
    for name, text in files(page("studies.md")).items():
        (place / name).write_text(text)
    job = place / "protocols.toml"
    job.write_text(job.read_text().replace("[study]\n", '[study]\npaper = ["table1"]\n'))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setattr("rudra.report.page.inline", lambda *_, **__: "")  # nobody looks at the figures
        for line in blocks("sh", section(page("studies.md"), "A study in the job file"))[0].splitlines():
            word, command, *arguments = line.split()
            assert word == "rudra"
            one = ["--workers", "1"] if command == "sweep" else []  # each worker imports torch
            assert main([command, *arguments, *one]) == 0
    return place


@pytest.mark.slow
def test_the_study_of_the_page_says_what_the_page_says(studied: Path) -> None:
    printed = blocks("", section(page("studies.md"), "A study in the job file"))[0]
    for line in printed.splitlines()[1:-1]:
        point, seed, error, staleness, *_ = line.replace(",", "").replace("seed ", "").split()
        file = studied / "protocols-quick-sweep" / f"protocol={point},seed={seed}.h5"
        with rudra.open_results(file) as results:
            summary = results.summary()
        assert f"{summary['mean_staleness']:.1f}" == f"{float(staleness):.1f}"
        assert summary["final_test_error"] == pytest.approx(float(error.rstrip("%")) / 100, abs=0.02), "bits may differ"


def test_the_report_has_the_paper_beside_it(studied: Path) -> None:
    text = (studied / "protocols.html").read_text()
    assert "Compared with the paper" in text
    assert "Effective learning rates differ (0.00625 to 0.05)" in text


def test_ones_own_analysis(studied: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(studied)
    exec((studied / "table.py").read_text(), {})
    assert len(capsys.readouterr().out.splitlines()) == 9
