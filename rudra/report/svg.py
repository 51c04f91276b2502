"""Figures as SVG for the page, and as files."""

import io
import re
from collections.abc import Sequence
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rudra.errors import ConfigError, ResultsError
from rudra.files import check_output, written
from rudra.report.curve_styles import COLOURS, STYLE, close, log_ticks, not_from_zero, wrapped
from rudra.report.palette import GRID, INK, MUTED
from rudra.report.panels import Figure
from rudra.report.tables import ReportTable

if TYPE_CHECKING:
    from rudra.report.sections import Section

SUFFIXES = (".png", ".svg", ".pdf")
_DATES = {".svg": "Date", ".pdf": "CreationDate"}
_NAMED = 12  # maximum number of named runs that a figure cannot show
_WIDE, _NARROW = 11.0, 4.6  # inches, scaled to the width of the page and of a phone
_BELOW = 0.5  # inches from a panel to its legend
_INKS = {"ink": INK, "muted": MUTED, "grid": GRID} | {f"c{i}": colour for i, colour in enumerate(COLOURS)}


def inline(figure: Figure, prefix: str, *, narrow: bool) -> str:
    """Returns the figure as an `<svg>` element. Its colours are variables of the page, and its ids are unique.

    Args:
        figure: figure to draw.
        prefix: prefix of all ids.
        narrow: whether the figure is for a phone.
    """
    file = io.StringIO()
    drawn = _drawn(figure, narrow=narrow)
    with _style(narrow):
        drawn.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r'\b(id="|href="#|url\(#)', rf"\g<1>{prefix}-", text)
    for part, tooltip in figure.tooltips.items():
        text = text.replace(start := f'<g id="{prefix}-{part}">', f"{start}<title>{escape(tooltip)}</title>")
    text = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d)\d+", r"\1", path[0]), text)
    for name, colour in _INKS.items():
        text = text.replace(colour.lower(), f"var(--{name})")
    label = re.sub(r'[<>&"]', " ", " ".join((f"{figure.title}. {figure.caption}", *_missing(figure))))
    head = f'<svg role="img" aria-label="{label}" class="{"narrow" if narrow else "wide"}"'
    text = re.sub(r' (width|height)="[\d.]+pt"', "", text)
    return re.sub(r'<svg( (?:width|height)="[^"]*")*', lambda _: head, text, count=1)  # names may have a backslash


def save(sections: Sequence["Section"], directory: Path, *, force: bool) -> list[Path]:
    """Writes every figure as PDF and SVG and every table as CSV, and returns the paths of the files.

    Raises:
        ResultsError: a file cannot be written, or it exists and `force` is not set.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ResultsError(f"{directory}: cannot write: {error.strerror or error}") from None
    made: list[tuple[Path, Figure | ReportTable]] = []
    for section in sections:
        start = f"{section.slug}-" if len(sections) > 1 else ""
        pictures = [(figure, suffix) for figure in section.figures for suffix in (".pdf", ".svg")]
        made += [(directory / f"{start}{figure.name}{suffix}", figure) for figure, suffix in pictures]
        made += [(directory / f"{start}{table.name}.csv", table) for table in section.tables]
    for path, _ in made:
        check_output(path, force)
    for path, content in made:
        if isinstance(content, Figure):
            save_figure(content, path)
            continue
        with written(path) as file:
            file.write(content.csv().encode(errors="backslashreplace"))
    return [path for path, _ in made]


def check_picture(output: Path, *, force: bool) -> None:
    """Checks that a picture can be written, before anything is measured or drawn for it.

    Raises:
        ConfigError: the suffix is not in `SUFFIXES`, or matplotlib is missing.
        ResultsError: the picture exists and `force` is not set, or its directory does not exist.
    """
    if output.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"{output}: unknown kind of picture '{output.suffix}'; valid: {', '.join(SUFFIXES)}")
    check_output(output, force)
    if find_spec("matplotlib") is None:
        raise ConfigError("pictures need matplotlib: pip install 'rudra[plot]'")


def save_figure(figure: Figure, output: Path) -> None:
    """Writes a figure of a report as a picture of any kind."""
    drawing = _drawn(figure, narrow=False)
    with _style(False):
        save_drawing(drawing, output)


def save_drawing(drawing: Any, output: Path) -> None:
    """Writes a matplotlib drawing. Equal drawings give identical files."""
    suffix = output.suffix.lower()
    with written(output) as file:
        metadata = {_DATES[suffix]: None} if suffix in _DATES else None
        drawing.savefig(file, format=suffix[1:], dpi=120, metadata=metadata)


def _style(narrow: bool) -> Any:
    import matplotlib

    sizes: dict[Any, Any] = {"font.size": 11, "axes.titlesize": 12, "axes.labelsize": 11, "legend.fontsize": 11}
    inked = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    rest: dict[Any, Any] = {"svg.fonttype": "none", "pdf.fonttype": 42, "grid.color": GRID, "lines.linewidth": 1.8}
    sizes |= {"lines.markersize": 4.5 if narrow else 5, "xtick.labelsize": 10, "ytick.labelsize": 10}
    inks: dict[Any, Any] = dict.fromkeys(inked, INK)
    return matplotlib.rc_context({**STYLE, **sizes, **inks, **rest})


def _drawn(figure: Figure, *, narrow: bool) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Drawing
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    count = len(figure.panels)
    columns = (1 if count <= 6 or figure.own_legends else 2) if narrow else min(3, count)
    rows = -(-count // columns)
    width, scale = (_NARROW if narrow else _WIDE), 0.9 if narrow and columns == 2 else 1
    heights = [scale * height for height in figure.heights or [figure.height] * count]
    tallest = [max(heights[first : first + columns]) for first in range(0, count, columns)]  # height of each row
    with _style(narrow):
        engine = ConstrainedLayoutEngine()
        drawing = Drawing(figsize=(width, sum(tallest)), layout=engine)
        FigureCanvasAgg(drawing)
        grid = drawing.subplots(rows, columns, squeeze=False, sharey=figure.share_y, height_ratios=tallest)
        axes = grid.ravel().tolist()
        finishes = [panel(axis) for panel, axis in zip(figure.panels, axes, strict=False)]
        for axis in axes[count:]:
            axis.remove()
        if figure.share_y:
            _share(axes[:count], columns, from_zero=figure.from_zero)
        if figure.own_legends:
            _legends(drawing, axes[:count], columns, width)
        else:
            _legend(drawing, axes[:count], width, least=1 if _missing(figure) else 2)
        _note(drawing, [*figure.notes, *_missing(figure), *not_from_zero(axes[:count])], width)
        engine.execute(drawing)
        drawing.set_layout_engine(None)  # labels are placed for the current layout
        for finish in finishes:
            if finish is not None:
                finish()
    return drawing


def _share(axes: Sequence[Any], columns: int, *, from_zero: bool) -> None:
    """Sets one scale that has room for all panels, with its name at the left."""
    low, high = min(axis.dataLim.y0 for axis in axes), max(axis.dataLim.y1 for axis in axes)
    if axes[0].get_yscale() == "log":
        low = min(axis.dataLim.minposy for axis in axes)
        log_ticks(axes[0].yaxis, low, high)
        axes[0].set_ylim(low / 1.2, high * 1.2)
    else:
        room = 0.09 * (max(high - low, 0.05 * abs(high)) or 1.0)
        from_zero = from_zero and not close(low, high)
        bottom = low - room if low < 0 else -0.01 * high if from_zero else max(0.0, low - room)
        axes[0].set_ylim(bottom, high + room)
    for i, axis in enumerate(axes):
        if i % columns:
            axis.set_ylabel("")


def _missing(figure: Figure) -> list[str]:
    """Returns the names of the runs that the figure does not show, one text for each reason."""
    found = []
    for why, names in figure.left_out.items():
        rest = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        found += [f"{why}: {'; '.join(names[:_NAMED])}{rest}"] if names else []
    return found


def _note(drawing: Any, texts: Sequence[str], width: float) -> None:
    """Writes the notes below the panels."""
    lines = [line for text in texts for line in wrapped(text, int(12.5 * width))]
    if lines:
        drawing.set_figheight(drawing.get_figheight() + 0.2 * len(lines) + 0.1)
        drawing.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize=10, color=MUTED)


def _legends(drawing: Any, axes: Sequence[Any], columns: int, width: float) -> None:
    """Draws a legend below each panel, where it covers no line."""
    from matplotlib.transforms import ScaledTranslation

    labels = [axis.get_legend_handles_labels()[1] for axis in axes]
    longest = max((len(label) for each in labels for label in each), default=0)
    beside = 2 if 2 * (longest + 8) <= 11 * width / columns else 1  # letters that a panel has room for
    rows = [-(-len(each) // beside) for each in labels]
    below = ScaledTranslation(0, -_BELOW, drawing.dpi_scale_trans)  # space for the axis's numbers and name
    for axis in axes:
        where = {"loc": "upper left", "bbox_to_anchor": (0, 0), "bbox_transform": axis.transAxes + below}
        axis.legend(
            **where, ncols=beside, fontsize=9, borderpad=0, borderaxespad=0, columnspacing=1.2, handletextpad=0.5
        )
    tallest = [max(rows[first : first + columns]) for first in range(0, len(rows), columns)]
    drawing.set_figheight(drawing.get_figheight() + sum(0.19 * count + 0.08 for count in tallest))


def _legend(drawing: Any, axes: Sequence[Any], width: float, least: int) -> None:
    """Draws one legend for all panels, in as many columns as fit. There is none for fewer lines than `least`."""
    found = {label: h for axis in axes for h, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    if len(found) < least:
        return
    room = int(11 * width)  # in letters
    found = {"\n".join(wrapped(label, room - 8)): handle for label, handle in found.items()}
    longest = max(len(line) for label in found for line in label.split("\n"))
    columns = max(1, min(len(found), room // (longest + 8)))
    rows = -(-len(found) // columns) * max(label.count("\n") + 1 for label in found)
    drawing.set_figheight(drawing.get_figheight() + 0.25 * rows)
    drawing.legend(found.values(), found.keys(), loc="outside upper left", ncols=columns)
