import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rudra.errors import ConfigError, ResultsError
from tests.unit.results_files import write_run

pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'rudra[plot]'")
from matplotlib.figure import Figure

from rudra.analysis import _draw, _load, plot


@pytest.fixture
def runs(tmp_path):
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
            tmp_path / f"{name}.h5", updates=updates, epochs=epochs, staleness=staleness, finish=finish, driver=driver
        )
    return tmp_path


@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".PDF", b"%PDF")])
def test_kinds_of_pictures(runs, suffix, magic):
    plot([runs / "soft.h5", runs / "hard.h5"], runs / f"picture{suffix}")
    assert (runs / f"picture{suffix}").read_bytes().startswith(magic)


@pytest.mark.parametrize("names", [["single"], ["untested"], ["nothing"], ["nothing", "single", "soft", "hard"]])
def test_any_run_can_be_drawn(runs, names):
    plot([runs / f"{name}.h5" for name in names], runs / "picture.png")
    assert (runs / "picture.png").stat().st_size > 10_000


def test_what_the_picture_shows(runs):
    figure = Figure()
    _draw(figure, [_load(runs / f"{name}.h5", name) for name in ("soft", "single")])
    by_epoch, by_time, over_updates, histogram = figure.axes
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "soft (2-softsync, λ = 4, μ = 16)",
        "single (2-softsync, λ = 4, μ = 16)",
    ]
    assert [len(line.get_xdata()) for line in by_epoch.lines] == [5, 1]
    assert by_epoch.lines[1].get_marker() not in (None, "None")  # one epoch is no line, only a marker
    assert by_time.lines[0].get_xdata()[-1] == pytest.approx(10.0)
    assert by_time.get_xlabel() == "training time (s; virtual in simulations)"
    assert len(over_updates.lines[0].get_xdata()) <= 200  # means over blocks of 1,000 updates
    assert over_updates.lines[0].get_ydata().mean() == pytest.approx(2.0, abs=0.1)
    assert len(over_updates.lines[1].get_xdata()) == 20
    assert sum(histogram.patches[0].get_data().values) == pytest.approx(100)


def test_blocks_keep_the_last_updates(runs):
    figure = Figure()
    curves = _load(runs / "soft.h5", "soft")
    _draw(figure, [curves._replace(update=np.arange(1, 202), mean_staleness=np.append(np.zeros(200), 7.0))])
    assert figure.axes[2].lines[0].get_ydata()[-1] == 7.0


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
from rudra.analysis import plot
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
    assert done.stdout == "plots need matplotlib: pip install 'rudra[plot]'\n"
