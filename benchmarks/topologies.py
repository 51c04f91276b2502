"""Overlap of communication, time per epoch and staleness of the topologies, beside what the paper measured.

Source: Rudra, Table 1 (overlap, §3.3) and Table 4 (minutes per epoch, §5.5). Overlap is the time in which learners
compute, as a share of that and the time in which they push, wait and pull; transfers beside a computation do not count.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.paper import GRADIENTS, Row, imagenet, paper_tables, table4
from rudra.findings import Goal, Report
from rudra.simulation.predict import Prediction

VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "p775": {},
    "with 4.8 GB/s, the most that §3.3 allows": {"bandwidth_bytes_per_s": 4.8e9},
    "with servers that send while they receive": {"blocking_servers": False},
}
"""What becomes of Table 1 without the two things that decide it."""


def run(*, quick: bool) -> Report:
    """Predicts every row of both tables."""
    gradients = GRADIENTS // 10 if quick else GRADIENTS
    report = Report(["", "paper", "predicted", "⟨σ⟩", "largest σ", "compute", "push", "wait", "pull", ""])
    overlaps = _table_1(report, gradients)
    epochs = _table_4(report, gradients)
    report.notes = [
        'predicted: [simulation] costs = "p775", timing only, 72 M parameters; shares are of the learners\' time',
        "fitted rows are in no goal for their times",
        "Table 1's adv is none either: 125 min / 212 min of Table 4, both fitted, have it compute 59 % of the time",
    ]
    base, _, star = overlaps
    report.goals = [
        Goal("Table 1: overlap of base < adv*", [float(base[1] < star[1])], at_least=1.0),
        Goal("Table 1: base within 10 points", [abs(base[0] - base[1]) * 100], at_most=10),
        Goal("Table 1: adv* >= 99.5 %", [star[1] * 100], at_least=99.5),
        Goal(
            "Table 4: rows that are not fitted within 20 %",
            [abs(p.epoch_s / row.time_s - 1) for row, p in epochs if not row.fitted],
            at_most=0.2,
        ),
        Goal(
            "Table 4: order of times that are not fitted",
            [float(_falls([p.epoch_s for row, p in epochs if not row.fitted]))],
            at_least=1.0,
        ),
        Goal(
            "Table 4: staleness of softsync on base and adv within 0.15 of 1 (§5.5: close to 1)",
            [abs(p.mean_staleness - 1) for _, p in epochs[1:3]],
            at_most=0.15,
        ),
        Goal("Table 4: staler with adv*", [epochs[3][1].mean_staleness], at_least=1.3),
    ]
    return report


def _table_1(report: Report, gradients: int) -> list[tuple[float, float]]:
    """Adds the rows; returns the paper's overlap and ours, both as fractions."""
    pairs = []
    for variant, constants in VARIANTS.items():
        report.rows.append((f"Table 1, overlap in %, {variant}", *[""] * 9))
        for told in paper_tables()["table1"]["rows"]:
            row = Row("", told["sigma"], told["minibatch_size"], told["learners"], 0.0, told.get("topology", "base"))
            prediction = imagenet(row, gradients, **constants)
            cells = f"{told['overlap']:.2%}"[:-1], f"{prediction.shares['compute']:.2%}"[:-1]
            note = f"fitted: {told['fitted']}" if "fitted" in told else ""
            report.rows.append((f"  {_name(row)}", *cells, *_details(prediction), note))
            pairs.append((told["overlap"], prediction.shares["compute"]))
    return pairs[:3]


def _table_4(report: Report, gradients: int) -> list[tuple[Row, Prediction]]:
    found = [(row, imagenet(row, gradients)) for row in table4()]
    report.rows.append(("Table 4 and §5.5, min/epoch", *[""] * 9))
    for row, prediction in found:
        cells = f"{row.time_s / 60:,.0f}", f"{prediction.epoch_s / 60:,.0f}"
        note = f"fitted: {row.fitted}" if row.fitted else f"{prediction.epoch_s / row.time_s - 1:+.1%}"
        report.rows.append((f"  {_name(row)}", *cells, *_details(prediction), note))
    return found


def _name(row: Row) -> str:
    return f"{row.topology}, {'1-softsync' if row.sigma else 'hardsync'}, μ = {row.minibatch_size}, λ = {row.learners}"


def _details(prediction: Prediction) -> tuple[str, ...]:
    shares = (f"{prediction.shares[name]:.1%}" for name in ("compute", "push", "wait", "pull"))
    return f"{prediction.mean_staleness:.2f}", str(prediction.max_staleness), *shares


def _falls(values: Sequence[float]) -> bool:
    return all(a > b for a, b in itertools.pairwise(values))
