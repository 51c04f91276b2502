"""Checks and measurements of a GPU. Each row is printed and written down as soon as it is measured."""

import json
import math
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu_accuracy, gpu_banks, gpu_bus, gpu_checks, gpu_speed
from benchmarks.gpu_device import MACHINES, Machine
from benchmarks.gpu_rows import Found, Section, Setting, measured
from rudra.benchmark_report import Goal, Report, Spread
from rudra.errors import ConfigError, ResultsError, unknown

BUDGET_S = 480.0
FILE = Path("gpu.jsonl")

SECTIONS = [  # in order of worth
    Section("checks", gpu_checks.rows),
    Section("speed", gpu_speed.rows),
    Section("289 MB", gpu_bus.rows),
    Section("time to accuracy", gpu_accuracy.rows),
    Section("banks", gpu_banks.rows),
    Section("other mini-batches", gpu_speed.more_rows),
]

GOALS = [  # pattern of rows, figure, and lower limit, all for a GPU
    (r"lenet, .*: graph", "Rudra / graph", 0.9),
    (r"resnet32, .*: graph", "Rudra / graph", 0.95),
    (r".*, μ = 16: eager", "Rudra / eager", 2.0),
    (r".*, μ = 16: DDP", "Rudra / DDP", 2.0),
    (r"two ranks", "ipc / staged", 10.0),
    (r".*: Rudra compiled", "Rudra compiled / reduce-overhead", 1.0),
    (r"lenet, μ = 4, m = 8: best", "times m = 1", 4.0),
    (r"lenet, μ = 4, m = 8: best", "best / one batch", 0.4),
    (r"resnet32, μ = 16, m = 8: best", "times m = 1", 2.5),
    (r"resnet32, μ = 16, m = 8: best", "best / one batch", 0.6),
    (r"resnet32, μ = 64, m = 4: best", "times m = 1", 1.3),
]


def run(
    *,
    quick: bool,
    budget: float = BUDGET_S,
    device: str | None = None,
    keep: Path | None = None,
    show: Callable[[str], object] = print,
) -> Report:
    """Measures all sections that fit into the budget.

    Args:
        quick: Whether to use the smallest sizes, on the host if no device is given.
        budget: Seconds that the benchmark may take.
        device: Name in `MACHINES`. None: "cuda".
        keep: File that gets one line of JSON for each row, after the lines that it has. None: `FILE`.
        show: Prints a line.

    Raises:
        ConfigError: There is no such device, or the budget is not positive.
        ResultsError: The file cannot be written.
    """
    if not (budget > 0 and math.isfinite(budget)):
        raise ConfigError(f"bench gpu: --budget {budget:g}; valid: seconds > 0")
    chosen = device or ("host" if quick else "cuda")
    if chosen not in MACHINES:
        raise ConfigError(f"bench gpu: --device {unknown(chosen, MACHINES)}")
    deadline = time.monotonic() + budget
    machine = MACHINES[chosen]()
    machine.set_exact()
    journal = _Journal(keep or FILE, machine, show)
    with tempfile.TemporaryDirectory(prefix="rudra-bench-") as directory:
        scale: Any = "quick" if quick else "small" if machine.is_host else "full"
        setting = Setting(machine, scale, Path(directory), deadline)
        report = Report(["section", "rows", "failed", "left out", "seconds"])
        for section in SECTIONS:
            report.rows.append(_measure(section, setting, journal))
    report.notes = [f"rows: {journal.path}", *journal.left_out]
    report.failures = [found.row for found in journal.found if found.failed]
    report.goals = [Goal("no row fails", [len(report.failures)], at_most=0), *_goals(journal.found, scale)]
    return report


def _measure(section: Section, setting: Setting, journal: "_Journal") -> tuple[str, int, int, int, float]:
    """Measures a section. Returns its row of the report."""
    began, found = time.monotonic(), []
    for each in section.rows(setting):
        since = time.monotonic()
        for outcome in measured(each, setting):
            journal.add(section.name, outcome, time.monotonic() - since)
            found.append(outcome)
            since = time.monotonic()
    failed = sum(each.failed for each in found)
    without = sum(bool(each.problem) for each in found) - failed
    if found and without == len(found):
        journal.left_out.append(f"section left out: {section.name}")
    return section.name, len(found) - failed - without, failed, without, time.monotonic() - began


def _goals(found: list[Found], scale: str) -> list[Goal]:
    """Returns the goals whose rows were measured on a GPU."""
    goals = []
    for pattern, figure, limit in GOALS if scale == "full" else ():
        values = [each.figures[figure] for each in found if re.fullmatch(pattern, each.row) and figure in each.figures]
        medians = [value.median for value in values if isinstance(value, Spread)]
        if medians:
            goals.append(Goal(f"{pattern}: {figure} >= {limit:g}", medians, at_least=limit))
    return goals


@dataclass
class _Journal:
    """Prints outcomes, and appends each to a file as a line of JSON.

    Attributes:
        path: The file.
        machine: The measured device, whose name is part of every line.
        show: Prints a line.
        found: Outcomes of the rows until now.
        left_out: Notes about sections that were left out.
    """

    path: Path
    machine: Machine
    show: Callable[[str], object]
    found: list[Found] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.show(f"{self.machine.about()}, torch {torch.__version__}")
        self._append("")

    def add(self, section: str, outcome: Found, seconds: float) -> None:
        """Prints and writes an outcome."""
        self.found.append(outcome)
        self.show(f"{section}: {outcome}")
        figures = {name: v._asdict() if isinstance(v, Spread) else v for name, v in outcome.figures.items()}
        about = {"device": self.machine.about(), "torch": torch.__version__, "section": section, "row": outcome.row}
        problem = {"problem": outcome.problem} if outcome.problem else {}
        trace = {"trace": outcome.trace} if outcome.trace else {}
        line = {**about, "figures": figures, **problem, **trace, "seconds": round(seconds, 3), "time": time.time()}
        self._append(json.dumps(line, ensure_ascii=False) + "\n")

    def _append(self, text: str) -> None:
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise ResultsError(f"{self.path}: cannot write: {error.strerror}") from None
