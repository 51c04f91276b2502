"""Pictures of a model's layers: their time, parameter size and output size, and the cut of the model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rudra.core.placement import Layer, PlacementDecision
from rudra.report.curve_styles import COLOURS, STYLE
from rudra.report.palette import INK
from rudra.report.svg import check_picture, save_drawing

_NAMED = 40  # layers whose names can be read below a panel


def draw(
    layers: Sequence[Layer], output: Path, title: str, *, decision: PlacementDecision | None = None, force: bool = False
) -> None:
    """Draws times, sizes, and the share of the parameters in front of each layer.

    Args:
        layers: layers of the model, in order.
        output: picture to write. Its suffix is one of `svg.SUFFIXES`.
        title: title of the picture.
        decision: placement whose cut is marked, with the traffic of each cut.
        force: replace an existing picture.

    Raises:
        ConfigError: the suffix is not supported, or matplotlib is missing.
        ResultsError: the picture exists or cannot be written.
    """
    check_picture(output, force=force)
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = [_sizes, _share]
    if any(layer.seconds for layer in layers):
        panels.insert(0, _times)
    with matplotlib.rc_context(STYLE):
        width = min(24.0, max(9.0, 0.3 * len(layers)))
        count = len(panels) + (decision is not None)
        figure = Figure(figsize=(width, 3.2 * count), layout="constrained")
        FigureCanvasAgg(figure)
        figure.suptitle(title)
        axes = figure.subplots(count, squeeze=False)[:, 0]
        for axis, panel in zip(axes, panels, strict=False):
            panel(axis, layers)
            if decision is not None and decision.cut is not None:
                axis.axvline(decision.cut.index - 0.5, color=INK, linestyle=":", linewidth=1.5)
        if decision is not None:
            _sent(axes[-1], decision)
        save_drawing(figure, output)


def _times(axis: Any, layers: Sequence[Layer]) -> None:
    forward, backward = ([1e3 * getattr(layer, f"{way}_s") for layer in layers] for way in ("forward", "backward"))
    axis.bar(range(len(layers)), forward, color=COLOURS[0], label="forward")
    axis.bar(range(len(layers)), backward, bottom=forward, color=COLOURS[1], label="backward")
    _finish(axis, layers, "Time of a mini-batch", "ms")


def _sizes(axis: Any, layers: Sequence[Layer]) -> None:
    held, given = ([getattr(layer, f"{what}_bytes") / 1e3 for layer in layers] for what in ("parameters", "output"))
    axis.bar(range(len(layers)), held, color=COLOURS[2], label="parameters")
    axis.plot(range(len(layers)), given, color=COLOURS[4], marker="o", label="output of a sample")
    axis.set_yscale("symlog", linthresh=0.1)
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    _finish(axis, layers, "Sizes", "kB")


def _share(axis: Any, layers: Sequence[Layer]) -> None:
    total = sum(layer.parameters_bytes for layer in layers)
    so_far, share = 0, []
    for layer in layers:
        so_far += layer.parameters_bytes
        share.append(100 * so_far / total if total else 0.0)
    axis.plot(range(len(layers)), share, color=COLOURS[3], marker="o", label="up to here")
    axis.set_ylim(0, 105)
    _finish(axis, layers, "Share of the parameters", "%")


def _sent(axis: Any, decision: PlacementDecision) -> None:
    """Draws the traffic of all learners in one step, for each cut."""
    places = range(len(decision.cuts))
    axis.bar(places, [cut.placed_bytes / 1e6 for cut in decision.cuts], color=COLOURS[0], label="cut here")
    for place, cut in enumerate(decision.cuts):
        if decision.cut is not None and cut.index == decision.cut.index:
            axis.bar(place, cut.placed_bytes / 1e6, color=COLOURS[4], label="chosen")
    axis.axhline(decision.server_bytes / 1e6, color=INK, label="parameter server")
    axis.axhline(decision.allreduce_bytes / 1e6, color=INK, linestyle="--", label="allreduce")
    axis.set_title("Tensors of a step, all learners")
    axis.set_ylabel("MB")
    axis.set_xticks(list(places), [cut.name for cut in decision.cuts], rotation=90, fontsize=9)
    axis.set_xlabel("first layer at the stage server")
    axis.legend()


def _finish(axis: Any, layers: Sequence[Layer], title: str, unit: str) -> None:
    axis.set_title(title)
    axis.set_ylabel(unit)
    if len(layers) <= _NAMED:
        axis.set_xticks(range(len(layers)), [layer.name for layer in layers], rotation=90, fontsize=9)
    else:
        axis.set_xlabel("layer")
    axis.legend()
