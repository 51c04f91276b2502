"""`rudra plot`: one picture of several runs, made of the panels of a report."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rudra.errors import ConfigError, printable
from rudra.report.curves import overlay
from rudra.report.over_updates import over_updates, staleness_histogram, staleness_law
from rudra.report.panels import Figure, lines_of
from rudra.report.runs import Run, read
from rudra.report.svg import check_picture, save_figure
from rudra.report.tables import ReportTable


def plot(files: Sequence[str | Path], output: str | Path, *, log: bool = False, force: bool = False) -> None:
    """Draws errors and losses of evaluations and training, the learning rate, and staleness.

    Runs that differ only in the seed become one curve: their median, in a band from the lowest to the highest value.
    A quantity that no run has (errors, or staleness if no gradient is stale) gets no panel.

    Args:
        files: result files. Several are overlaid.
        output: picture to write. Its suffix is one of `svg.SUFFIXES`.
        log: logarithmic axes for errors, losses and learning rates.
        force: replace an existing picture.

    Raises:
        ConfigError: the suffix is not supported, no file is given, or matplotlib is missing.
        ResultsError: a file is not readable as a result file, or the picture exists or cannot be written.
    """
    if not files:
        raise ConfigError("no result file to plot")
    check_picture(Path(output), force=force)
    save_figure(picture(named([Path(file) for file in files]), log=log), Path(output))


def named(paths: Sequence[Path]) -> list[Run]:
    """Reads runs. A run's label consists of its file name, its protocol, λ and μ."""
    unique = len({path.stem for path in paths}) == len(paths)
    common = os.path.commonpath([path.absolute().parent for path in paths])
    runs = []
    for path in paths:
        run = read(path)
        name = path.stem if unique else os.path.relpath(path.absolute().with_suffix(""), common)
        label = f"{printable(name)} ({run.protocol}, λ = {run.learners}, μ = {run.minibatch_size})"
        runs.append(replace(run, label=label if run.finished else f"{label}, {run.status}"))
    return runs


def picture(runs: Sequence[Run], *, log: bool = False) -> Figure:
    """Makes one figure of all runs. Each panel shows all runs that have its data."""
    lines = lines_of(runs, overlaid=True)
    panels, left_out = overlay(lines, log=log)
    stale = [line for line in (line.of(lambda run: run.stale) for line in lines) if line.runs]
    notes = [lines[0].label] if len(lines) == 1 else []
    if stale:
        panels.append(over_updates("Mean staleness over updates", stale))
        panels.append(staleness_histogram("Staleness of gradients", stale))
        law = staleness_law([run for line in stale for run in line.runs])
        notes.append(f"{law}; dotted: 2n, which few gradients exceed.")
        left_out["σ = 0"] = [run.label for run in runs if not run.stale]
    elif any(run.summary["updates"] for run in runs):
        notes.append("Nothing is stale: σ = 0 in all gradients.")
    table = ReportTable("runs", (), (), {})
    return Figure("runs", "Runs", "", panels or [_nothing], table, left_out=left_out, notes=notes)


def _nothing(axis: Any) -> None:
    axis.set(xticks=[], yticks=[])
    axis.text(0.5, 0.5, "no update yet", ha="center", va="center", transform=axis.transAxes)
