"""`rudra plot`: one picture of several runs."""

import shutil
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from rudra.errors import ConfigError, ResultsError
from rudra.results.reader import open_results
from tests.unit.report_files import without_layout, write_point
from tests.unit.results_files import write_run

pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'rudra[plot]'")
from rudra.report.curve_styles import wrapped
from rudra.report.plot import named, picture, plot
from rudra.report.svg import _drawn


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    place = tmp_path_factory.mktemp("recorded")
    made = {
        "soft": (1000, 5, 2),
        "hard": (300, 5, 0),
        "single": (20, 1, 1),
        "untested": (1, 0, 1),
        "nothing": (0, 0, 0),
    }
    for name, (updates, epochs, staleness) in made.items():
        driver = "simulation" if name == "single" else "mpi"
        finish = epochs > 0
        write_run(
            place / f"{name}.h5", updates=updates, epochs=epochs, staleness=staleness, finish=finish, driver=driver
        )
    return place


@pytest.fixture
def runs(recorded, tmp_path):
    return shutil.copytree(recorded, tmp_path, dirs_exist_ok=True)


@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".PDF", b"%PDF")])
def test_kinds_of_pictures(runs, suffix, magic):
    plot([runs / "soft.h5", runs / "hard.h5"], runs / f"picture{suffix}")
    assert (runs / f"picture{suffix}").read_bytes().startswith(magic)


@pytest.mark.parametrize("names", [["single"], ["untested"], ["nothing"], ["nothing", "single", "soft", "hard"]])
def test_any_run_can_be_drawn(runs, names):
    plot([runs / f"{name}.h5" for name in names], runs / "picture.png")
    assert (runs / "picture.png").stat().st_size > 10_000


def panels(figure):
    return {axis.get_title(loc="left"): axis for axis in figure.axes}


def drawn(files, *, laid_out=False, **options):
    with nullcontext() if laid_out else without_layout():
        return _drawn(picture(named(files), **options), narrow=False)


def note_of(figure):
    return figure.get_supxlabel()


def test_what_the_picture_shows(runs):
    figure = drawn([runs / f"{name}.h5" for name in ("soft", "single")])
    axes = panels(figure)
    by_epoch, by_time = axes["Test error over epochs"], axes["Test error over time"]
    over_updates, histogram = axes["Mean staleness over updates"], axes["Staleness of gradients"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "soft (2-softsync, λ = 4, μ = 16)",
        "single (2-softsync, λ = 4, μ = 16)",
    ]
    assert [len(line.get_xdata()) for line in by_epoch.lines] == [5, 1]
    assert by_epoch.lines[1].get_marker() not in (None, "None")  # one epoch is no line, only a marker
    assert by_time.lines[0].get_xdata()[-1] == pytest.approx(10.0)
    assert by_time.get_xlabel() == "training time, virtual in simulations (s)"
    assert len(over_updates.lines[0].get_xdata()) <= 200  # means over blocks of 1,000 updates
    assert over_updates.lines[0].get_ydata().mean() == pytest.approx(2.0, abs=0.1)
    assert len(over_updates.lines[1].get_xdata()) == 20
    assert sum(histogram.patches[0].get_data().values) == pytest.approx(100)
    assert "Dashed: (λ − 1)/c" in note_of(figure)


def test_equal_names_are_told_apart(runs):
    (runs / "other").mkdir()
    write_run(runs / "other" / "soft.h5", updates=10, epochs=1, staleness=1)
    plot([runs / "soft.h5", runs / "other" / "soft.h5"], runs / "picture.svg")
    assert "other/soft (2-softsync" in (runs / "picture.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("files", "output", "error", "message"),
    [
        (["soft"], "picture.gif", ConfigError, r"unknown kind of picture '\.gif'; valid: \.png, \.svg, \.pdf"),
        (["soft"], "picture", ConfigError, "unknown kind of picture ''; valid"),
        ([], "picture.png", ConfigError, "no result file"),
        (["soft"], "nowhere/picture.png", ResultsError, "nowhere does not exist"),
        (["missing"], "picture.png", ResultsError, "missing.h5: no such result file"),
    ],
)
def test_mistakes(runs, files, output, error, message):
    with pytest.raises(error, match=message):
        plot([runs / f"{name}.h5" for name in files], runs / output)


def test_without_matplotlib(runs):
    """In a process of its own, whose import of matplotlib fails as if it were not installed."""
    code = f"""
import sys
sys.modules["matplotlib"] = None
from rudra.report.plot import plot
from rudra.errors import ConfigError
try:
    plot(["{runs / "soft.h5"}"], "{runs / "picture.png"}")
except ConfigError as error:
    print(error)
"""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "pictures need matplotlib: pip install 'rudra[plot]'\n"


def seeded(path, seed, **more):
    write_point(path, protocol="softsync", n=2, mu=4, lam=4, seed=seed, **more)
    return path


def test_seeds_are_a_band_with_their_median(tmp_path):
    files = [seeded(tmp_path / f"{seed}.h5", seed) for seed in (1, 2, 5)]
    one, two, five = (100 * open_results(file).epochs["test_error"] for file in files)
    files.append(seeded(tmp_path / "other.h5", 1, learning_rate=0.03))
    axis = panels(figure := drawn(files))["Test error over epochs"]
    assert [text.get_text().rpartition(", α = ")[0] for text in figure.legends[0].get_texts()] == [
        "2-softsync, μ = 4, λ = 4, α0 = 0.01, 3 seeds",
        "other (2-softsync, λ = 4, μ = 4)",
    ]
    assert axis.lines[0].get_ydata() == pytest.approx(two)
    (band,) = axis.collections
    low, high = band.get_datalim(axis.transData).intervaly
    assert (low, high) == pytest.approx((one.min(), five.max()))


def test_runs_of_one_seed_are_no_band(tmp_path):
    files = [seeded(tmp_path / f"{name}.h5", 1) for name in "ab"]
    assert len(panels(drawn(files))["Test error over epochs"].lines) == 2


def test_thirteen_runs_can_be_told_apart(tmp_path):
    files = [seeded(tmp_path / f"{i}.h5", 1, learning_rate=0.01 * (i + 1)) for i in range(13)]
    figure = drawn(files, laid_out=True)
    figure.draw_without_rendering()
    axes = panels(figure).values()
    lines = [[line for line in axis.lines if line.get_marker() != "None" and len(line.get_xdata())] for axis in axes]
    looks = [[(line.get_color(), line.get_marker()) for line in drawn] for drawn in lines]
    assert all(found == looks[0] for found in looks), "in every panel alike"
    assert len(set(looks[0])) == 13
    (legend,) = figure.legends
    assert len(legend.get_texts()) == 13
    assert legend.get_window_extent().y0 > max(axis.get_window_extent().y1 for axis in axes), "above the panels"


def test_markers_of_a_short_run_stand_apart(tmp_path):
    """Beside a run of many more updates, too, where the short one has a small part of the panel."""
    for name, updates in (("long", 4000), ("short", 400)):
        write_run(tmp_path / f"{name}.h5", updates=updates, epochs=2, staleness=2)
    long, short = panels(drawn([tmp_path / "long.h5", tmp_path / "short.h5"]))["Mean staleness over updates"].lines
    markers = [len(line.get_xdata()[:: line.get_markevery()]) for line in (long, short)]
    assert markers[0] == pytest.approx(20, abs=2)
    assert markers[1] == pytest.approx(2, abs=1)


def test_what_belongs_together_is_not_broken():
    assert wrapped("1-softsync, μ = 16, α = 0.05", 24) == ["1-softsync, μ = 16,", "α = 0.05"]


def test_who_is_not_in_a_panel_is_named_there(runs, tmp_path):
    write_point(tmp_path / "lossy.h5", protocol="softsync", n=2, mu=4, lam=4, known_error=False)
    said = note_of(drawn([runs / f"{name}.h5" for name in ("soft", "hard", "untested", "lossy")]))
    said = said.replace("\n", " ")
    untested = "untested (2-softsync, λ = 4, μ = 16), interrupted; lossy (2-softsync, λ = 4, μ = 4)"
    assert f"Not in test error: {untested}" in said
    assert f"Not in training error: {untested}" in said
    assert "σ = 0: hard (2-softsync, λ = 4, μ = 16)" in said


def test_logarithmic_axes(tmp_path):
    files = [seeded(tmp_path / "a.h5", 1)]
    scales = {title: axis.get_yscale() for title, axis in panels(drawn(files, log=True)).items()}
    of_errors = {title for title, scale in scales.items() if scale == "log"}
    assert of_errors == {title for title in scales if "taleness" not in title}
    assert {axis.get_yscale() for axis in panels(drawn(files)).values()} == {"linear"}


def test_what_a_logarithmic_axis_cannot_show_is_named(tmp_path):
    write_point(tmp_path / "perfect.h5", protocol="softsync", n=2, mu=4, lam=4)
    (run,) = named([tmp_path / "perfect.h5"])
    run.test_error[-1] = 0
    run.train_error[:] = 0
    other = replace(run, label="other", test_error=run.test_error + 1, train_error=run.train_error + 1)
    left_out = picture([run, other], log=True).left_out
    assert left_out["In test error not where it is 0 or less"] == [run.label]
    assert left_out["Not in training error"] == [run.label]


def test_nothing_stale_is_one_line_instead_of_panels(runs):
    figure = drawn([runs / "hard.h5"])
    assert not [title for title in panels(figure) if "taleness" in title]
    assert note_of(figure).endswith("Nothing is stale: σ = 0 in all gradients.")


def test_effective_learning_rates_stand_in_the_legend_where_they_differ(tmp_path):
    for n in (2, 4):
        write_point(tmp_path / f"{n}.h5", protocol="softsync", n=n, mu=4, lam=4)
    texts = [text.get_text() for text in drawn([tmp_path / "2.h5", tmp_path / "4.h5"]).legends[0].get_texts()]
    assert [text.rpartition(", ")[2] for text in texts] == ["α = 0.005", "α = 0.0025"]
    write_point(tmp_path / "same.h5", protocol="softsync", n=2, mu=8, lam=4)
    figure = drawn([tmp_path / "2.h5", tmp_path / "same.h5"])
    assert not [text for text in figure.legends[0].get_texts() if "α" in text.get_text()]
