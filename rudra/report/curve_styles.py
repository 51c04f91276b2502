"""Common parts of all figures: grouping of runs into curves, and the look of curves, bands and axes."""

import json
from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rudra.results.reader import Results

# Okabe and Ito's colours, which can be distinguished with any colour vision. Further lines are dashed.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000")
MARKERS = "osD^vPX"
_MOST_POINTS = 200
_MOST_MARKERS = 20
_DECADES = 300  # with a larger ratio of highest to lowest value, ticks between powers of ten would be too many
_CLOSE = 0.6  # values are close to each other if the smallest is above this share of the largest
NOT_POSITIVE = "not where it is 0 or less"
STYLE: dict[Any, Any] = {  # style of every picture, including figures of reports
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
    "text.parse_math": False,  # a name that contains two dollar signs is no formula
}

Numbers = NDArray[np.float64]


class Blocks(NamedTuple):
    """Mean staleness over updates, thinned: each point is a mean over `width` updates, the last one over the rest."""

    width: int
    update: NDArray[np.int64]
    mean: Numbers
    low: Numbers
    high: Numbers


def blocks_of(update: NDArray[np.int64], mean_staleness: Numbers, most: int) -> Blocks:
    """Returns means and ranges over blocks of updates, large enough to leave at most `most` points."""
    width = max(1, -(-len(update) // most))
    starts = np.arange(0, len(update), width)
    if not len(starts):
        return Blocks(width, update, mean_staleness, mean_staleness, mean_staleness)
    low, high, total = (f.reduceat(mean_staleness, starts) for f in (np.minimum, np.maximum, np.add))
    return Blocks(width, update[starts], total / np.diff(np.append(starts, len(update))), low, high)


class Course(NamedTuple):
    """A quantity over epochs or blocks: x and y, each of shape (points,). `step` numbers the epochs or blocks."""

    step: NDArray[Any]
    x: NDArray[Any]
    y: Numbers

    def known(self) -> "Course":
        """Returns the course without points that have no value."""
        there = np.isfinite(self.y)
        return Course(self.step[there], self.x[there], self.y[there])


class Band(NamedTuple):
    """Median of several courses at each step, with the lowest and highest y."""

    x: Numbers
    y: Numbers
    low: Numbers
    high: Numbers


def band_of(courses: Sequence[Course]) -> Band:
    """Returns the band of runs that differ only in the seed. At each step it covers the runs that reached the step."""
    courses = [course.known() for course in courses]
    steps = np.unique(np.concatenate([course.step for course in courses]))
    table = np.full((2, len(courses), len(steps)), np.nan)
    for row, course in enumerate(courses):
        table[:, row, np.searchsorted(steps, course.step)] = course.x, course.y
    x, y = table
    return Band(np.nanmedian(x, 0), np.nanmedian(y, 0), np.nanmin(y, 0), np.nanmax(y, 0))


def flat(job: Mapping[str, Any]) -> dict[str, Any]:
    """Returns table.key -> value. A key at the top of a job has no table."""
    found: dict[str, Any] = {}
    for table, keys in job.items():
        if table in {"study", "hooks"}:  # the study only describes the sweep, and hooks decide nothing
            continue
        found |= {f"{table}.{key}": value for key, value in keys.items()} if isinstance(keys, dict) else {table: keys}
    return found


def matters(key: str) -> bool:
    """Whether a key of the job makes a different setting. A seed only makes another run of the same setting."""
    return key not in {"name", "training.seed", "cluster.threads_per_rank"} and not key.startswith("results.")


def together(runs: Sequence[tuple[Mapping[str, Any], Any]]) -> list[list[int]]:
    """Groups runs, by number, into curves: runs that differ only in the seed are one curve.

    Runs with the same seed stay separate curves, because the reason for the repetition is unknown.

    Args:
        runs: for each run its job (see `flat`) and any other property that distinguishes it.
    """
    groups: dict[str, list[int]] = {}
    for i, (job, other) in enumerate(runs):
        same = {key: value for key, value in job.items() if matters(key)}
        groups.setdefault(json.dumps([same, other], sort_keys=True, default=str), []).append(i)
    seeds = [json.dumps(job.get("training.seed"), sort_keys=True) for job, _ in runs]  # the file may hold any value
    return [part for g in groups.values() for part in ([g] if len({seeds[i] for i in g}) > 1 else [[i] for i in g])]


def several(seeds: Sequence[Any]) -> str:
    """Returns the part of a curve's name that describes the seeds of its runs."""
    count = len(set(seeds))
    runs = f"{len(seeds)} runs with " if count < len(seeds) else ""
    return f", {runs}{count} seeds" if len(seeds) > 1 else ""


def rate_of(results: Results) -> Course:
    """Returns learning rates over epochs, thinned evenly. Each rate holds until the next one."""
    rows, samples = results.updates, results.attributes.get("training_samples")
    ended = np.cumsum(rows["samples"]) / samples if samples else rows["epoch"].astype(float)
    began = np.append(0.0, ended)[: len(rows)]
    places = np.unique(np.linspace(0, len(rows) - 1, min(len(rows), _MOST_POINTS)).round().astype(int))
    x, y = began[places], rows["learning_rate"][places]
    if len(rows):
        x, y = np.append(x, ended[-1]), np.append(y, y[-1])
    return Course(np.arange(len(x)), x, y)


def with_rate(label: str, rate: float | None) -> str:
    """Adds the effective learning rate to a legend's text, unless it is None."""
    return label if rate is None else f"{label}, α = {rate:.4g}"


def wrapped(text: str, letters: int) -> list[str]:
    """Breaks a text into lines of limited length, without a break inside parts like `λ = 4`."""
    return [line.replace("\u00a0", " ") for line in wrap(text.replace(" = ", "\u00a0=\u00a0"), letters)]


def draw_band(axis: Any, band: Band, style: Mapping[str, Any], label: str | None = None, *, share: float = 1.0) -> None:
    """Draws a curve with markers, or the median of several seeds in a band. `share`: part of the panel's width."""
    if (band.low < band.high).any():
        step = {"step": "post"} if style.get("drawstyle") == "steps-post" else {}
        axis.fill_between(band.x, band.low, band.high, color=style["color"], alpha=0.18, linewidth=0, **step)
    axis.plot(band.x, band.y, **style, label=label, markevery=max(1, int(len(band.x) / (_MOST_MARKERS * share))))


def draw_blocks(
    axis: Any, runs: Sequence[Blocks], style: Mapping[str, Any], label: str | None = None, *, band: bool, updates: int
) -> None:
    """Draws a quantity over updates: the median of several seeds.

    `band` shows the range over seeds. With one seed it shows the range over the updates that a point averages.
    `updates` is the number of updates of the longest run in the panel.
    """
    if len(runs) == 1:
        (blocks,) = runs
        found = Band(blocks.update.astype(float), blocks.mean, blocks.low, blocks.high)
    else:
        found = band_of([Course(np.arange(len(blocks.update)), blocks.update, blocks.mean) for blocks in runs])
    share = float(found.x[-1]) / updates if len(found.x) and updates else 1.0
    draw_band(axis, found if band else found._replace(low=found.y, high=found.y), style, label, share=share)


def mean_of(histograms: Sequence[Numbers]) -> Numbers:
    """Returns the mean over several seeds."""
    longest = max(map(len, histograms))
    table: Numbers = np.stack([np.pad(h, (0, longest - len(h))) for h in histograms])
    return np.asarray(table.mean(0))


def draw_histogram(axis: Any, histogram: Numbers, style: Mapping[str, Any], *, filled: bool) -> None:
    """Draws the share of gradients with σ = 0, 1, … in percent, as an outline if the panel has other histograms."""
    sigma = np.arange(len(histogram))
    if filled:
        axis.bar(sigma, histogram, width=0.9 if len(sigma) < 50 else 1.0, color=style["color"])
    elif len(sigma):
        line = {key: style[key] for key in ("color", "linestyle")}
        axis.stairs(histogram, np.append(sigma, len(sigma)) - 0.5, **line, linewidth=1.6)
        there = np.flatnonzero(histogram)
        every = max(1, len(there) // _MOST_MARKERS)
        axis.plot(there, histogram[there], **{**style, "linestyle": "none"}, markevery=every)


def whole(axis: Any) -> None:
    """Uses whole numbers on the x axis."""
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    axis.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
    axis.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def log_ticks(axis: Any, low: float, high: float) -> None:
    """Sets a logarithmic scale with readable ticks for values in a range. Values of 0 or less are not drawn."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    (axis.axes.set_xscale if axis.axis_name == "x" else axis.axes.set_yscale)("log", nonpositive="mask")
    axis.set_major_locator(LogLocator(10, (1, 2, 5) if high < _DECADES * low else (1,)))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())


def close(low: float, high: float) -> bool:
    """Whether a scale from zero would hide the differences between values in this range."""
    return 0 < _CLOSE * high < low < high


def not_from_zero(axes: Sequence[Any]) -> list[str]:
    """Returns a note that names the vertical scales that do not begin at zero, or "" if all do."""
    cut = [axis for axis in axes if axis.get_yscale() == "linear" and axis.get_ylim()[0] > 0]
    labels = dict.fromkeys(axis.get_ylabel() for axis in cut if axis.get_ylabel())
    return [f"The scale does not begin at 0: {', '.join(labels)}"] if labels else []


def set_scale(axis: Any) -> None:
    """Sets a vertical scale that begins at zero, or below zero for negative values. All zeros are a line at the bottom.

    Values that are close together get a scale of their own range, which shows their differences.
    """
    low, high = axis.dataLim.y0, axis.dataLim.y1
    if close(low, high):
        room = 0.1 * (high - low)
        axis.set_ylim(low - room, high + room)
    elif low >= 0:
        top = max(axis.get_ylim()[1], 1.05 * high) if high > 0 else 1.0
        axis.set_ylim(-0.01 * top, top)


def look(i: int) -> dict[str, Any]:
    """Returns colour, dashes and marker. There are 28 different looks, which colour and marker already distinguish."""
    again, colour = divmod(i, len(COLOURS))
    marker = MARKERS[(colour + 3 * again) % len(MARKERS)]
    return {"color": COLOURS[colour], "linestyle": ("-", "--", ":", "-.")[again % 4], "marker": marker}


def time_unit(longest_s: float) -> tuple[str, float]:
    return ("s", 1.0) if longest_s < 180 else ("min", 60.0) if longest_s < 3 * 3600 else ("h", 3600.0)
