"""Curves of the probes of a search: held-out loss over samples, and over predicted time."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rudra.report.curve_styles import COLOURS, log_ticks, look, time_unit
from rudra.report.panels import Figure, Panel, set_axes
from rudra.report.tables import ReportTable
from rudra.tuning.answer import Verdict, named
from rudra.tuning.probes import Probe
from rudra.tuning.ruler import Mark
from rudra.tuning.state import SearchState, key_of

MOST = 12
"""Largest number of curves."""

WIDE = 10.0
"""Least ratio of losses that needs a logarithmic scale."""


LOOKS = "The thick line is the reference, the red one the winner. "


class ProbeCurve(NamedTuple):
    """Curve of a probe.

    Attributes:
        name: Its settings, and its part in the answer.
        rate: Predicted samples per second.
        marks: Its evaluations, the first one at its beginning.
        style: Colour and width.
    """

    name: str
    rate: float
    marks: Sequence[Mark]
    style: dict[str, Any]


def curves(state: SearchState, verdict: Verdict) -> list[Figure]:
    """Returns the figure of the probes that matter most, or nothing if none has an evaluation."""
    drawn = [*_drawn(state, verdict)]
    if not drawn:
        return []
    begin = "the common checkpoint" if state.reference is not None else "the initial weights"
    unit, unit_s = time_unit(max(curve.marks[-1].samples / curve.rate for curve in drawn))
    losses = [mark.loss for curve in drawn for mark in curve.marks if math.isfinite(mark.loss)]
    log = bool(losses) and min(losses) > 0 and max(losses) > WIDE * min(losses)

    def panel(title: str, x_title: str, x_of: Callable[[ProbeCurve, Mark], float]) -> Panel:
        def draw(axis: Any) -> None:
            for curve in drawn:
                x = [x_of(curve, mark) for mark in curve.marks]
                y = [mark.loss if math.isfinite(mark.loss) else math.nan for mark in curve.marks]
                axis.plot(x, y, label=curve.name, **curve.style)
            set_axes(axis, title, x_title, "held-out loss (mean per sample)", log=log)
            if log:
                log_ticks(axis.yaxis, min(losses), max(losses))

        return draw

    rows = [
        (curve.name, mark.samples, mark.samples / curve.rate, mark.loss, mark.metric)
        for curve in drawn
        for mark in curve.marks
    ]
    total = sum(1 for probe in state.probes.values() if bool(probe.origin) == (state.reference is not None))
    looks = LOOKS if any("winner" in curve.name.partition(":")[0] for curve in drawn) else ""
    which = f"The best {len(drawn)} of {total} probes are drawn. " if total > len(drawn) else ""
    return [
        Figure(
            "curves",
            "Loss of the probes",
            f"Loss of the averaged weights on the validation split, since {begin}. {which}{looks}"
            "A sample is worth more if its curve falls faster on the left; the right one decides.",
            [
                panel("Over samples", f"samples since {begin}", lambda curve, mark: mark.samples),
                panel(
                    "Over predicted time",
                    f"predicted time since {begin} ({unit})",
                    lambda curve, mark: mark.samples / curve.rate / unit_s,
                ),
            ],
            ReportTable("curves", ("probe", "samples", "time (s)", "loss", state.target.metric), rows, {}),
            3.8,
        )
    ]


def _drawn(state: SearchState, verdict: Verdict) -> list[ProbeCurve]:
    """Returns the curves: the reference, the winner, the runner-up, and the best others. Before there is a reference,
    the runs of the cold start."""
    if state.reference is None:
        probes = [probe for probe in state.probes.values() if state.outcomes[probe.name].marks]
        return [
            ProbeCurve(named(probe.by_key), state.rate(probe.by_key), state.marks(probe), look(i))
            for i, probe in enumerate(probes[:MOST])
        ]
    by_settings = {probe.settings: probe for probe in state.probes.values() if probe.origin}
    roles = {"reference": state.reference.settings}
    roles |= {role: key_of(finalist.settings) for role, finalist in verdict.roles.items()}
    order = [*roles.values(), *(key_of(estimate.settings) for estimate in state.estimates())]
    found: list[ProbeCurve] = []
    for key in dict.fromkeys(order):
        probe = by_settings.get(key)
        if probe is not None and len(found) < MOST and state.outcomes[probe.name].marks:
            parts = [role for role, its in roles.items() if its == key]
            found.append(_curve(state, probe, parts, len(found)))
    return found


def _curve(state: SearchState, probe: Probe, parts: Sequence[str], place: int) -> ProbeCurve:
    """Returns the curve of a probe with its parts in the answer."""
    style = look(place)
    if not {"reference", "winner"} & {*parts}:
        others = [colour for i, colour in enumerate(COLOURS) if i not in (4, 6)]
        style |= {"color": others[place % len(others)], "linewidth": 1.3}
    if "reference" in parts:
        style |= {"color": COLOURS[6], "linestyle": "-", "linewidth": 4.5, "zorder": 1.5}
    if "winner" in parts:
        style = {"linewidth": 3.2, **style, "color": COLOURS[4], "linestyle": "-", "zorder": 5}
    name = f"{' and '.join(parts)}: {named(probe.by_key)}" if parts else named(probe.by_key)
    return ProbeCurve(name, state.rate(probe.by_key), state.marks(probe), style)
