"""Numbers of a report: the tables of runs, and the data behind the figures."""

import csv
import io
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any

from rudra.report.curve_styles import matters
from rudra.report.runs import Run, Study

MOST_ROWS = 5000
SHOWN_ROWS = 60


@dataclass(frozen=True)
class ReportTable:
    """Columns and rows of plain values. None: unknown.

    Attributes:
        name: name of the table's file, without suffix.
        columns: heads, with units.
        rows: rows with one value for each column.
        shown: head -> function that formats a value for the page. By default `form_of` the column.
        thinned: whether rows were left out.
    """

    name: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[Any, ...]]
    shown: Mapping[str, Callable[[Any], str]]
    thinned: bool = False

    def csv(self) -> str:
        file = io.StringIO()
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows(["" if value is None else value for value in row] for row in self.rows)
        return file.getvalue()

    def cells(self, row: tuple[Any, ...]) -> list[tuple[str, Any, bool]]:
        """Returns text, value, and whether the column is numeric, for every cell."""
        return [
            ("–" if value is None else form(value), value, numeric and not isinstance(value, str))
            for value, (form, numeric) in zip(row, self._looks, strict=True)
        ]

    @cached_property
    def _looks(self) -> list[tuple[Callable[[Any], str], bool]]:
        """Format of each column, and whether it is numeric."""
        return [
            (self.shown.get(head) or form_of(column), any(isinstance(value, int | float) for value in column))
            for head, column in zip(self.columns, zip(*self.rows, strict=True), strict=True)
        ]


def number(value: Any) -> str:
    """Formats a number with a readable number of digits."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or abs(value) >= 10_000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def form_of(values: Iterable[Any]) -> Callable[[Any], str]:
    """Returns a format for numbers that are compared: equal decimals for all, as many as the small numbers need."""
    known = [abs(v) for v in values if isinstance(v, float) and math.isfinite(v) and v]
    if not known:
        return number
    most, least = (math.floor(math.log10(which(known))) for which in (max, min))
    digits = max(0, min(max(3 - most, 2 - least), 6 - most))
    while digits and all(f"{v:.{digits}f}".endswith("0") for v in known):
        digits -= 1
    return lambda value: f"{value:,.{digits}f}" if isinstance(value, float) else number(value)


def percent(value: float) -> str:
    return f"{value:.2f}"


def signed(value: float) -> str:
    return f"{value:+.2f}".replace("-", "−")


def summary(study: Study) -> ReportTable:
    """Returns one row for each run, including missing runs."""
    clock = clock_of(study.known)
    target = f"{clock} to target (s)"
    left_out = set() if any(run.summary["target"] for run in study.known) else {target, "epochs to target"}
    left_out |= set() if any(run.attributes.get("step_bytes") for run in study.known) else {"a step sends (MB)"}
    lossy = any(run.error is None and run.loss is not None for run in study.known)
    left_out |= set() if lossy else {"test loss"}
    left_out |= {"test error (%)"} if lossy and all(run.error is None for run in study.known) else set()
    rows = [_summary_row(run, clock, target) for run in study.runs]
    heads = tuple(head for head in rows[0] if head not in left_out) if rows else ()
    shown = {**dict.fromkeys(("test error (%)", "overlap (%)", "⟨σ⟩"), percent), "samples/s": "{:,.0f}".format}
    return ReportTable("runs", heads, [tuple(row[head] for head in heads) for row in rows], shown)


def _summary_row(run: Run, clock: str, target: str) -> dict[str, Any]:
    """Returns head -> value, in the order of the columns. A phone shows the first columns."""
    s = run.summary or defaultdict[str, Any](lambda: None)
    planned, last = s["planned_epochs"], s["epochs"] and s["epochs"] + s["earlier_epochs"]
    return {
        "run": run.label,
        "test error (%)": run.error,
        "test loss": run.loss,
        target: s["time_to_target_s"],
        "epochs to target": s["target_epoch"],
        f"{clock} (s)": run.time_s if run.known else None,
        "protocol": run.protocol if run.known else None,
        "⟨σ⟩": s["mean_staleness"],
        "μ": run.minibatch_size if run.known else None,
        "λ": run.learners if run.known else None,
        "learning rate": run.effective_rate,
        "epochs": last if planned in (None, last) else f"{last} of {planned}",
        "samples/s": s["samples_per_s"],
        "a step sends (MB)": run.attributes["step_bytes"] / 1e6 if run.attributes.get("step_bytes") else None,
        "overlap (%)": None if s["overlap"] is None else 100 * s["overlap"],
        **{name: s[name] for name in _COUNTS},
        "status": f"{run.status}: {run.reason}" if run.reason else run.status,
    }


_COUNTS = ("pushed", "applied", "discarded")


def clock_of(runs: Sequence[Run]) -> str:
    """Returns the name of the time axis, which always marks simulated time as virtual."""
    virtual = {run.virtual for run in runs}
    return {True: "virtual time", False: "training time"}[virtual == {True}] + (
        ", virtual in simulations" if len(virtual) == 2 else ""
    )


def comparison(study: Study) -> ReportTable | None:
    """Returns our numbers next to the paper's, one row for each number of the paper. None: the paper has none."""
    found = [row for paper in study.paper for row in _compare(study, paper)]
    heads = ("source", "(σ, μ, λ)", "quantity", "paper", "ours", "difference", "remark")
    return ReportTable("paper", heads, found, {}) if found else None


def _compare(study: Study, paper: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    run = study.of(paper)
    sigma, size = paper.get("sigma", "?"), paper.get("minibatch_size", "any")
    triple = f"({sigma}, {size}, {paper.get('learners', '?')})"
    where = (paper.get("source", "paper"), " ".join([triple, *([paper["topology"]] if "topology" in paper else [])]))
    if run is None or not run.finished:
        quantities = [name for key, name in _QUANTITIES.items() if isinstance(paper.get(key), int | float)]
        remark = "no such run here" if run is None else f"our run is {run.status}"
        return [(*where, ", ".join(quantities), None, None, None, remark)] if quantities else []
    rows = []
    for key, name in _QUANTITIES.items():
        theirs = paper.get(key)
        if isinstance(theirs, int | float):
            name, theirs, ours, remark = _pair(study, run, paper, key, name, float(theirs))
            fitted = _fitted(run, paper, key)
            difference = _difference(key, theirs, ours)
            difference = f"{difference} (fitted)" if difference and fitted else difference
            remark = "; ".join(filter(None, (remark, fitted)))
            rows.append((*where, name, *_shown(key, theirs, ours), difference, remark))
    return rows


def _fitted(run: Run, paper: Mapping[str, Any], key: str) -> str:
    """Returns a remark if the paper's time, or a result of it, was used to fit the preset of the run."""
    if key not in _TIMES or run.job.get("simulation.costs") not in {"p775", "crossbow", "ralp"}:
        return ""
    told = f"fitted ({paper['fitted']}): no evidence" if "fitted" in paper else ""
    base = f"relative to a time that is fitted ({paper['base_fitted']})" if "base_fitted" in paper else ""
    return "; ".join(filter(None, (told, base if key == "speed_up" else "")))


_TIMES = {"time_s", "minutes_per_epoch", "speed_up", "overlap", "samples_per_s", "samples_per_s_ratio"}

_QUANTITIES = {
    "test_error": "test error (%)",
    "time_s": "training time (s)",
    "minutes_per_epoch": "time per epoch (min)",
    "overlap": "overlap (%)",
    "speed_up": "speed-up",
    "mean_staleness": "⟨σ⟩",
    "staleness_max": "largest σ",
    "beyond_max": "share of larger σ (%)",
    "he_penalty": "P_HE",
    "iteration_s": "time per iteration (s)",
    "best_momentum": "best explicit momentum",
    "best_learning_rate": "best η",
    "small_share": "updates by small workers (%)",
    "large_utilisation": "utilisation of large workers (%)",
    "implicit_momentum": "⟨σ⟩ / (1 + ⟨σ⟩)",
    "samples_per_s": "samples/s",
    "samples_per_s_ratio": "samples/s, times as many",
    "target_epoch_ratio": "epochs to target, times as many",
    "time_to_target_s": "time to target (s)",
    "time_to_target_s_ratio": "time to target, times as long",
}
_RATIO = "_ratio"


def _pair(
    study: Study, run: Run, paper: Mapping[str, Any], key: str, name: str, theirs: float
) -> tuple[str, float, float | None, str]:
    """Returns the name, the paper's number, our number, and a remark on how the two numbers differ in meaning."""
    epochs, images = paper.get("epochs", 0), paper.get("training_samples", 0)
    work = (run.summary["epochs"], run.attributes.get("training_samples"))
    smaller = bool(epochs and images) and work != (epochs, images)
    remark = f"ours: {work[0]} epochs of {number(work[1])}; paper: {epochs} of {number(images)}" if smaller else ""
    counts = run.summary["staleness_histogram"]
    clock = "virtual " if run.virtual else ""
    match key:
        case "test_error":
            return name, 100 * theirs, run.error, remark
        case "time_s" if smaller:
            per_sample = run.seconds_per_sample
            ours = None if per_sample is None else 1e3 * per_sample
            return "time per sample (ms)", 1e3 * theirs / (epochs * images), ours, clock.strip()
        case "time_s":
            return name, theirs, run.time_s, clock.strip()
        case "minutes_per_epoch":
            per_sample = run.seconds_per_sample
            said = "; ".join(filter(None, (clock.strip(), remark)))
            return name, theirs, None if per_sample is None else per_sample * images / 60, said
        case "overlap":
            ours = run.summary["overlap"]
            return name, 100 * theirs, None if ours is None else 100 * ours, ""
        case "speed_up":
            return name, theirs, speed_up(run, study.known), clock + "against λ = 1"
        case "mean_staleness":
            return name, theirs, run.summary["mean_staleness"], "the paper's is a round number"
        case "he_penalty":
            return name, theirs, _penalty(run, study.known), clock + "against one compute group"
        case "iteration_s":
            return name, theirs, iteration_s(run), clock.strip()
        case "best_momentum" | "best_learning_rate":
            alike = [r for r in study.known if r.finished and _of_as_many(r, run)]
            best = best_of(alike)
            ours = best[0].job.get(f"optimizer.{key.removeprefix('best_')}") if best else None
            how = "fewest epochs to target" if _reached(best) else "smallest test error"
            return name, theirs, ours, f"of the runs with the {how} at this g"
        case "implicit_momentum":
            sigma = run.summary["mean_staleness"]
            # A run with one seed says nothing about the momentum itself.
            remark = "from staleness only; 1 - 1/g if it is geometric"
            return name, theirs, None if sigma is None else sigma / (1 + sigma), remark
        case "small_share" | "large_utilisation":
            share = key == "small_share"
            ours = run.workers and (run.workers.share("small") if share else run.workers.used("large"))
            return name, 100 * theirs, ours, ""  # from a figure without printed numbers
        case "samples_per_s" | "time_to_target_s":
            ours, seeds = _median(run, study, key)
            return name, theirs, ours, "; ".join(filter(None, (clock.strip(), seeds)))
        case _ if key.endswith(_RATIO):
            of = key.removesuffix(_RATIO)
            other = next((r for r in study.known if r.file.name == paper.get("against")), None)
            (ours, seeds), (base, _) = _median(run, study, of), _median(other, study, of) if other else (None, "")
            against = f"against {other.label if other else None}"
            return name, theirs, ours / base if ours and base else None, "; ".join(filter(None, (against, seeds)))
        case "staleness_max":
            ours = run.summary["max_staleness"]
            return name, theirs, None if ours is None else float(ours), ""
        case _:
            beyond = sum(counts[int(paper.get("staleness_max", 0)) + 1 :]) / max(1, sum(counts))
            return name, 100 * theirs, 100 * beyond, "the paper's is a bound"


def _median(run: Run, study: Study, key: str) -> tuple[float | None, str]:
    """Returns the median of a summary's number over all runs that differ only in the seed, and a remark on the seeds.

    A value of None did not happen, so it counts as larger than all others.
    """
    job = {name: value for name, value in run.job.items() if matters(name)}
    alike = [r for r in study.known if r.finished and all(r.job.get(name) == job[name] for name in job)]
    values = [r.summary[key] if r.summary[key] is not None else math.inf for r in alike]
    found = median(values) if values else math.inf
    return found if math.isfinite(found) else None, f"medians of {len(alike)} seeds" if len(alike) > 1 else ""


def _shown(key: str, *values: float | None) -> list[str | None]:
    """Formats numbers that are shown next to each other."""
    form = percent if key in ("test_error", "speed_up", "overlap") else form_of(values)
    return [None if value is None or not math.isfinite(value) else form(value) for value in values]


def _difference(key: str, theirs: float, ours: float | None) -> str | None:
    if ours is None or not math.isfinite(ours):
        return None
    if key in ("staleness_max", "beyond_max") and ours <= theirs:
        return "within"
    if key in ("time_s", "minutes_per_epoch", "speed_up", "best_learning_rate") and theirs:
        return f"{100 * (ours / theirs - 1):+.0f} %".replace("-", "−")
    return signed(ours - theirs) + (" points" if key in ("test_error", "overlap") else "")


def iteration_s(run: Run) -> float | None:
    """Returns the time per update, which is Omnivore's time per iteration if each gradient of a group is one update."""
    return run.time_s / run.summary["updates"] if run.summary["updates"] and run.time_s > 0 else None


def _penalty(run: Run, runs: Sequence[Run]) -> float | None:
    """Returns Omnivore's P_HE: time per iteration relative to a run with as many learners in one group.

    None: there is no such run. A group without a server is no reference for several groups with a server.
    """
    one = [r for r in runs if r.finished and r.n == 1 and r.learners == run.learners and _same_work(r, run)]
    alike = [r for r in one if _served(r) == _served(run)]
    ours, base = iteration_s(run), iteration_s(alike[0]) if alike else None
    return ours / base if ours and base else None


def _of_as_many(one: Run, other: Run) -> bool:
    """Whether both runs have the same number of learners and groups, and the same layers at a stage server."""
    placed = [run.job.get("placement.cut") for run in (one, other)]
    return (one.n, one.learners, placed[0]) == (other.n, other.learners, placed[1])


def best_of(runs: Sequence[Run]) -> list[Run]:
    """Returns the runs of all seeds with the momentum and learning rate that need the fewest epochs to the target.

    The comparison uses medians over seeds. The test error decides between equals and if there is no target.
    """
    tried: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        setting = tuple(run.job.get(f"optimizer.{key}") for key in ("momentum", "learning_rate"))
        tried.setdefault(setting, []).append(run)

    def worth(alike: list[Run]) -> tuple[float, float]:
        errors = [math.inf if run.error is None else run.error for run in alike]
        return median(map(epochs_to_target, alike)), median(errors)

    return min(tried.values(), key=worth, default=[])


def epochs_to_target(run: Run) -> float:
    """Returns the epochs to the target, infinite if there is no target or it was not reached."""
    reached = run.summary["target_epoch"]
    return math.inf if reached is None else float(reached)


def _reached(runs: Sequence[Run]) -> bool:
    return bool(runs) and math.isfinite(median(map(epochs_to_target, runs)))


def _served(run: Run) -> bool | None:
    """Whether the run has a parameter server. None: the file does not record it."""
    return None if run.cast is None else run.cast.plan.served


def base_of(run: Run, runs: Sequence[Run]) -> Run | None:
    """Returns the reference run for a speed-up: one learner with the same μ, preferably (0, μ, 1)."""
    alone = [r for r in runs if r.finished and r.learners == 1 and r.minibatch_size == run.minibatch_size]
    alike = [r for r in alone if r.seconds_per_sample and _same_work(r, run)]
    return min(alike, key=lambda r: r.summary["protocol"] != "hardsync", default=None)


def speed_up(run: Run, runs: Sequence[Run]) -> float | None:
    """Returns the speed-up of the time per sample over one learner. None: there is no such run."""
    base = base_of(run, runs)
    if base is None or not run.seconds_per_sample or not base.seconds_per_sample:
        return None
    return base.seconds_per_sample / run.seconds_per_sample


def _same_work(one: Run, other: Run) -> bool:
    return one.virtual == other.virtual and all(one.job.get(k) == other.job.get(k) for k in ("model.name", "data.name"))
