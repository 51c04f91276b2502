"""Pictures of one or several runs: test error, and staleness."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rudra.errors import ConfigError
from rudra.files import check_output, written
from rudra.results import open_results
from rudra.summary import protocol_label

SUFFIXES = (".png", ".svg", ".pdf")
# Okabe and Ito's colours, which people tell apart whatever their colour vision; after these the lines get dashed.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000")
MARKERS = "osD^vPX"
_MOST_POINTS = 200
STYLE: dict[Any, Any] = {  # of every picture, those of a report too
    "font.size": 13,
    "axes.titlesize": 14,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.7,
    "lines.linewidth": 2,
    "lines.markersize": 6,
    "legend.frameon": False,
    "figure.constrained_layout.w_pad": 0.15,
    "figure.constrained_layout.h_pad": 0.12,
    "svg.hashsalt": "rudra",
    "text.parse_math": False,  # a name with two dollars in it is a name
}


class Blocks(NamedTuple):
    """Mean staleness over updates, thinned: each point stands for `width` updates, the last one for the rest."""

    width: int
    update: NDArray[np.int64]
    mean: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]


def blocks_of(update: NDArray[np.int64], mean_staleness: NDArray[np.float64], most: int) -> Blocks:
    """Means and ranges over as many updates at a time as leave `most` points."""
    width = max(1, -(-len(update) // most))
    starts = np.arange(0, len(update), width)
    if not len(starts):
        return Blocks(width, update, mean_staleness, mean_staleness, mean_staleness)
    low, high, total = (f.reduceat(mean_staleness, starts) for f in (np.minimum, np.maximum, np.add))
    return Blocks(width, update[starts], total / np.diff(np.append(starts, len(update))), low, high)


class _Curves(NamedTuple):
    """What the picture shows of one run."""

    label: str
    driver: str
    epoch: NDArray[np.int64]
    epoch_end_s: NDArray[np.float64]
    test_error: NDArray[np.float64]  # in percent; NaN where the task knows none
    test_loss: NDArray[np.float64]
    update: NDArray[np.int64]
    mean_staleness: NDArray[np.float64]
    histogram: NDArray[np.float64]


def plot(files: Sequence[str | Path], output: str | Path, *, force: bool = False) -> None:
    """Draws test error over epochs and over time, staleness over updates, and the staleness histogram.

    Where no task knows an error, the test's loss takes its place.

    Args:
        files: result files; several are overlaid.
        output: picture to write; its suffix is one of `SUFFIXES`.
        force: replace an existing picture.

    Raises:
        ConfigError: another suffix, no file given, or matplotlib is missing.
        ResultsError: a file is not readable as a result file, or the picture exists or cannot be written.
    """
    output = Path(output)
    if output.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"{output}: unknown kind of picture '{output.suffix}'; valid: {', '.join(SUFFIXES)}")
    if not files:
        raise ConfigError("no result file to plot")
    check_output(output, force)
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("plots need matplotlib: pip install 'rudra[plot]'") from None
    paths = [Path(file) for file in files]
    unique = len({path.stem for path in paths}) == len(paths)
    curves = [_load(path, path.stem if unique else str(path.with_suffix(""))) for path in paths]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 8.2), dpi=120, layout="constrained")
        FigureCanvasAgg(figure)  # no display, no global state
        _draw(figure, curves)
        metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(output.suffix.lower())
        with written(output) as file:
            figure.savefig(file, format=output.suffix[1:].lower(), metadata=metadata)


def _load(path: Path, name: str) -> _Curves:
    with open_results(path) as results:
        summary, epochs, updates = results.summary(), results.epochs, results.updates
    tested = epochs[epochs["evaluated"] != 0]
    counts = np.asarray(summary["staleness_histogram"], float)
    label = f"{name} ({protocol_label(summary)}, λ = {summary['learners']}, μ = {summary['minibatch_size']})"
    return _Curves(
        label=label if summary["status"] == "finished" else f"{label}, {summary['status']}",
        driver=summary["driver"],
        epoch=tested["epoch"].astype(np.int64),
        epoch_end_s=tested["time_s"],
        test_error=100 * tested["test_error"],
        test_loss=tested["test_loss"],
        update=updates["timestamp"],
        mean_staleness=updates["mean_staleness"],
        histogram=100 * counts / max(1.0, counts.sum()),
    )


def _draw(figure: Any, curves: Sequence[_Curves]) -> None:
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    (by_epoch, by_time), (over_updates, histogram) = figure.subplots(2, 2)
    unit, unit_s = time_unit(max((c.epoch_end_s.max() for c in curves if len(c.epoch_end_s)), default=0.0))
    virtual = {c.driver == "simulation" for c in curves}
    clock = "virtual training time" if virtual == {True} else "training time"
    remark = "; virtual in simulations" if len(virtual) == 2 else ""
    lost = any(len(c.epoch) for c in curves) and all(np.isnan(c.test_error).all() for c in curves)
    what, axis_label = ("Test loss", "test loss") if lost else ("Test error", "test error (%)")
    lines = []
    for i, curve in enumerate(curves):
        style = look(i)
        dots = {**style, "marker": MARKERS[i % len(MARKERS)], "markevery": max(1, len(curve.epoch) // 20)}
        tested = curve.test_loss if lost else curve.test_error
        lines += by_epoch.plot(curve.epoch, tested, **dots)
        by_time.plot(curve.epoch_end_s / unit_s, tested, **dots)
        blocks = blocks_of(curve.update, curve.mean_staleness, _MOST_POINTS)
        draw_staleness(over_updates, blocks, {**style, "linewidth": 1.5}, band=len(curves) == 1)
        draw_histogram(histogram, curve.histogram, style, filled=len(curves) == 1)
    describe(by_epoch, f"{what} over epochs", "epoch", axis_label)
    describe(by_time, f"{what} over time", f"{clock} ({unit}{remark})", axis_label)
    describe(over_updates, "Mean staleness over updates", "update", "mean staleness ⟨σ⟩")
    describe(histogram, "Staleness of gradients", "staleness σ (updates)", "gradients (%)")
    for axis in (by_epoch, over_updates, histogram):
        axis.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
        axis.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    for axis in (by_epoch, by_time, over_updates):
        axis.set_xlim(left=0)
    if not any(len(c.epoch) for c in curves):
        for axis in (by_epoch, by_time):
            axis.set(xticks=[], yticks=[])
            axis.text(0.5, 0.5, "no epoch tested", ha="center", va="center", transform=axis.transAxes, color="#666666")
    if len(curves) == 1:
        figure.suptitle(curves[0].label)
    else:
        names = [c.label for c in curves]
        figure.legend(lines, names, loc="outside upper center", ncols=1 if max(map(len, names)) > 48 else 2)


def draw_staleness(axis: Any, blocks: Blocks, style: dict[str, Any], *, band: bool) -> None:
    """⟨σ⟩ over updates; where a point stands for several updates, `band` shows how far they range."""
    if band and blocks.width > 1:
        axis.fill_between(blocks.update, blocks.low, blocks.high, color=style["color"], alpha=0.2, linewidth=0)
    axis.plot(blocks.update, blocks.mean, **style, marker="o" if len(blocks.update) == 1 else None)


def draw_histogram(axis: Any, histogram: NDArray[np.float64], style: dict[str, Any], *, filled: bool) -> None:
    """Share of the gradients with σ = 0, 1, … in percent."""
    sigma = np.arange(len(histogram))
    if filled:
        axis.bar(sigma, histogram, width=0.9 if len(sigma) < 50 else 1.0, color=style["color"])
    elif len(sigma):
        edges = np.append(sigma, len(sigma)) - 0.5
        axis.stairs(histogram, edges, fill=True, color=style["color"], alpha=0.15)
        axis.stairs(histogram, edges, **style)


def describe(axis: Any, title: str, x: str, y: str) -> None:
    axis.set(title=title, xlabel=x, ylabel=y)
    set_scale(axis)


def set_scale(axis: Any) -> None:
    """A vertical scale from zero, or from below it where values are; all zero is a line at the bottom."""
    low, high = axis.dataLim.y0, axis.dataLim.y1
    if low >= 0:
        top = max(axis.get_ylim()[1], 1.05 * high) if high > 0 else 1.0
        axis.set_ylim(-0.01 * top, top)


def look(i: int) -> dict[str, Any]:
    dashed, colour = divmod(i, len(COLOURS))
    return {"color": COLOURS[colour], "linestyle": ("-", "--", ":", "-.")[dashed % 4]}


def time_unit(longest_s: float) -> tuple[str, float]:
    return ("s", 1.0) if longest_s < 180 else ("min", 60.0) if longest_s < 3 * 3600 else ("h", 3600.0)
