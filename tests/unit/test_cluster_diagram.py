"""The drawings of who is who in a report."""

from pathlib import Path
from typing import Any

import pytest

from tests.unit.report_files import without_layout, write_point
from tests.unit.results_files import write_run

pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'rudra[plot]'")
pytest.importorskip("jinja2", reason="Jinja is not installed: pip install 'rudra[plot]'")

from rudra.report import report
from rudra.report.cluster_diagram import drawings
from rudra.report.runs import collect
from rudra.report.svg import inline

pytestmark = pytest.mark.timeout(400)


def point(path: Path, lam: int, topology: str, options: dict[str, Any] | None = None, **more: Any) -> Path:
    write_point(path, protocol="softsync", n=1, mu=4, lam=lam, epochs=1, topology=topology, options=options, **more)
    return path


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("topologies")
    point(place / "base-2.h5", 2, "base")
    point(place / "base-6.h5", 6, "base")
    point(place / "star.h5", 6, "adv*", {"fan_out": 2})
    point(place / "groups.h5", 6, "groups", {"groups": 3})
    return place


def test_every_topology_is_drawn_once(directory: Path) -> None:
    (study,) = collect([directory])
    made = drawings(study)
    assert [(figure.name, figure.title) for figure in made] == [
        ("topology-1", "Topology base"),
        ("topology-2", "Topology groups (groups = 3)"),
        ("topology-3", "Topology adv* (fan_out = 2)"),
    ]
    assert "The drawing has λ = 6" in made[0].caption
    assert "Runs with λ = 2 are placed by the same rule" in made[0].caption
    assert [len(figure.panels) for figure in made] == [2, 2, 3]  # adv* has a tree of the weights, too


def test_a_drawing_names_everybody(directory: Path) -> None:
    (study,) = collect([directory])
    base, groups, star = drawings(study)
    for narrow in (False, True):
        with without_layout():
            drawn, of_groups, of_base = (inline(each, "x", narrow=narrow) for each in (star, groups, base))
        assert all(f">learner {i}<" in drawn for i in range(6))
        assert all(
            f">{text}<" in drawn for text in ("Weights come down", "node 0", "tree servers 0, 2, 3, learners 0 to 2")
        )
        assert "stroke-dasharray" in drawn
        assert ">group 2<" in of_groups
        assert "stroke-dasharray" not in of_base


def test_thousands_are_drawn_as_few(tmp_path: Path) -> None:
    point(tmp_path / "run.h5", 1024, "adv", {"fan_out": 8})
    (study,) = collect([tmp_path])
    (figure,) = drawings(study)
    drawn = inline(figure, "x", narrow=True)
    assert drawn.count("<text") < 60
    assert max(figure.heights) < 8
    assert ">learners 1 to 7<" in drawn
    assert len(figure.table.rows) == 1024 + 128 + 16 + 2 + 2  # the table has everybody


def test_table_says_who_talks_to_whom(directory: Path) -> None:
    (study,) = collect([directory])
    _, groups, star = drawings(study)
    assert star.table.columns == ("role", "rank", "gradients to", "weights from", "node", "host", "group")
    assert ("parameter server", 0, None, None, "of its own", None, None) in star.table.rows
    assert ("tree server 0", 2, "parameter server", None, 0, None, None) in star.table.rows
    assert ("learner 1", 9, "tree server 3", "learner 0", 0, None, None) in star.table.rows
    assert ("learner 3", 5, "learner 2", "learner 2", 1, None, 1) in groups.table.rows


def test_hosts_of_real_ranks_are_named(tmp_path: Path) -> None:
    point(tmp_path / "run.h5", 4, "base", driver="mpi", hosts=["a", "a", "a", "a", "b", "b"])
    (study,) = collect([tmp_path])
    (figure,) = drawings(study)
    assert all(f">node {node} ({host})<" in inline(figure, "x", narrow=False) for node, host in ((0, "a"), (1, "b")))
    assert [row[5] for row in figure.table.rows] == ["a", "a", "a", "a", "b", "b"]


def test_files_that_do_not_say_who_was_who_have_no_drawing(tmp_path: Path) -> None:
    write_run(tmp_path / "run.h5", updates=5, epochs=1, staleness=1)
    (study,) = collect([tmp_path])
    assert drawings(study) == []


@pytest.mark.slow
def test_drawings_are_written_as_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rudra.report.page.inline", lambda figure, prefix, *, narrow: "")
    point(tmp_path / "run.h5", 2, "base")
    with without_layout():
        report([tmp_path / "run.h5"], tmp_path / "page.html", tmp_path / "figures")
    written = {path.name for path in (tmp_path / "figures").iterdir() if path.stem.startswith("topology")}
    assert written == {"topology.pdf", "topology.svg", "topology.csv"}
