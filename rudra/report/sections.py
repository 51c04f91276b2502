"""Parts of a report, one for each study: facts, tables and figures, without the page around them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rudra.job.simulation import DEFAULTS, UNMEASURED
from rudra.report.answer import Answer, answer_of
from rudra.report.charts import figures
from rudra.report.cluster_diagram import drawings
from rudra.report.curve_styles import matters
from rudra.report.panels import Figure
from rudra.report.runs import Run, Study, text, varying
from rudra.report.tables import ReportTable, comparison, summary


@dataclass(frozen=True)
class Section:
    """One study, ready to be written to the page.

    Attributes:
        slug: name for links and files.
        title: heading.
        facts: facts about the runs: name -> text.
        job: settings that all runs share, as lines of a job file.
        varied: key of the job -> its values, for keys that differ between runs.
        answer: which run is best, and why it took its time.
        notes: remarks to read first.
        summary: one row for each run.
        paper: our numbers next to the paper's, if the paper has any.
        figures: figures, the most important one first.
    """

    slug: str
    title: str
    facts: Mapping[str, str]
    job: str
    varied: Mapping[str, str]
    answer: Answer
    notes: Sequence[str]
    summary: ReportTable
    paper: ReportTable | None
    figures: Sequence[Figure]

    @property
    def tables(self) -> list[ReportTable]:
        return [self.summary, *([self.paper] if self.paper else []), *(figure.table for figure in self.figures)]


def sections_of(studies: Sequence[Study], *, log: bool = False) -> list[Section]:
    """Returns one part for each study. `log`: logarithmic axes for errors, losses and learning rates."""
    everything = [run for study in studies for run in study.known]
    slugs: list[str] = []
    for study in studies:
        slug = re.sub(r"[^a-z0-9]+", "-", study.title.lower()).strip("-")[:40].strip("-") or "runs"
        slugs.append(slug if slug not in slugs else f"{slug}-{len(slugs) + 1}")
    return [_section(study, slug, everything, log) for study, slug in zip(studies, slugs, strict=True)]


def _section(study: Study, slug: str, everything: Sequence[Run], log: bool) -> Section:
    runs = study.known
    differing = varying(runs)
    return Section(
        slug,
        study.title,
        _facts(runs) if runs else {},
        _job_text({key: value for key, value in runs[0].job.items() if key not in differing}) if runs else "",
        {key: _values(run.job.get(key) for run in runs) for key in varying(runs)},
        answer_of(study),
        _notes(study),
        summary(study),
        comparison(study),
        [*figures(study, everything, log=log), *drawings(study)],
    )


def _facts(runs: Sequence[Run]) -> dict[str, str]:
    """Returns facts about the runs: their settings, machines and versions."""

    def each(name: str) -> str:
        return _values(run.attributes.get(name) for run in runs if run.attributes.get(name) not in (None, ""))

    drivers = {"mpi": "MPI ranks, wall-clock time", "simulation": "simulated in one process; times are virtual"}
    hosts = dict.fromkeys(host for run in runs for host in run.attributes.get("hosts") or ())
    started = sorted(
        str(run.attributes["started"])[:16].replace("T", " ") for run in runs if "started" in run.attributes
    )
    versions = {name: each(f"{name}_version") for name in ("rudra", "torch", "numpy", "mpi4py")}
    facts = {
        "job": each("name"),
        "runs": str(len(runs)),
        "driver": "; ".join(
            dict.fromkeys(drivers.get(str(r.summary["driver"]), str(r.summary["driver"])) for r in runs)
        ),
        "model": _values(run.job.get("model.name") for run in runs),
        "data": f"{_values(run.job.get('data.name') for run in runs)}, {each('training_samples')} training samples",
        "topology": each("topology"),
        "seed": each("seed"),
        "hosts": _values(hosts),
        "processor": each("processor"),
        "threads per learner": each("threads_per_rank"),
        "device": each("device"),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items() if version),
        "started": " to ".join(dict.fromkeys((f"{started[0]} UTC", f"{started[-1]} UTC"))) if started else "",
    }
    return {name: value for name, value in facts.items() if value}


def _values(values: Any, most: int = 12) -> str:
    found = list(dict.fromkeys("unset" if value is None else text(value) for value in values))
    return ", ".join(found[:most]) + (", …" if len(found) > most else "")


def _job_text(job: Mapping[str, Any]) -> str:
    """Returns the settings in the form of a job file, without keys that are not set."""
    lines: list[str] = []
    table = ""
    for key, value in job.items():
        if value is None or value == {} or value == []:
            continue
        own, _, name = key.rpartition(".")
        if own != table:
            lines += ["", f"[{own}]"]
            table = own
        lines.append(f"{name} = {_toml(value)}")
    return "\n".join(lines).strip()


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(inner)}" for key, inner in value.items() if inner is not None) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"' if isinstance(value, str) else text(value)


def _notes(study: Study) -> list[str]:
    notes = []
    if study.quick:
        notes.append("The quick variant of this study: fewer samples or epochs than the full one.")
    runs = study.known
    if runs and all(run.virtual for run in runs):
        notes.append("All times are virtual: they come from the cost model in the job's table [simulation].")
    elif any(run.virtual for run in runs):
        notes.append("Times of simulated runs are virtual: they come from the cost model in the job's [simulation].")
    if guessed := [run for run in runs if run.virtual and run.summary.get("costs") == DEFAULTS]:
        whose = "These" if len(guessed) == len(runs) else f"The times of {_values(run.label for run in guessed)}"
        notes.append(f"{whose} come from its defaults, {UNMEASURED}.")
    if any(run.job.get("simulation.tensors") is False and run.virtual for run in runs):
        notes.append("Runs without tensors simulate times and staleness only: they have no test error.")
    stale = [run for run in runs if run.histogram.any()]
    if stale and not any(run.stale for run in stale):
        begun = "Nothing is stale" if all(run.finished for run in study.runs) else "Nothing is stale yet"
        notes.append(f"{begun}: σ = 0 in all gradients.")
    notes += [*_seeds(runs), *_warm_up(runs)]
    notes += _rates(runs)
    bad = [run for run in study.runs if not run.finished]
    if bad:
        kinds = {run.status: sum(other.status == run.status for other in bad) for run in bad}
        what = ", ".join(f"{count} {status}" for status, count in kinds.items())
        notes.append(
            f"{len(bad)} of {len(study.runs)} runs did not finish ({what}): figures show only what was recorded."
        )
    return notes


def _seeds(runs: Sequence[Run]) -> list[str]:
    """Returns a note if the compared runs all have the same seed."""
    if len(runs) < 2 or len({text(run.job.get("training.seed")) for run in runs}) > 1:
        return []
    return ["All runs have the same seed: small differences may be chance. Several seeds show how large chance is."]


def _warm_up(runs: Sequence[Run]) -> list[str]:
    """Returns a note if a schedule's options may count updates, and the runs differ in updates per epoch."""
    counting = [r for r in runs if r.job.get("optimizer.schedule_every") == "update"]
    counting = [r for r in counting if r.job.get("optimizer.schedule_options")]
    if len({r.minibatch_size * (r.attributes.get("gradients_per_update") or 0) for r in counting}) < 2:
        return []
    return [
        "The learning rate changes with each update, and runs make different numbers of updates in an epoch. An option "
        "of the schedule that counts updates, such as a warm-up, lasts for more epochs in some runs than in others."
    ]


_OF_THE_RATE = ("optimizer.", "protocol.modulation", "protocol.reference_batch_size")


def _rates(runs: Sequence[Run]) -> list[str]:
    """Returns a note if effective learning rates differ although the study does not compare them.

    A study compares rates if it tried the same set of rates for every combination of the other settings.
    """
    keys = [key for key in varying(runs) if not key.startswith(_OF_THE_RATE) and matters(key)]
    tried: dict[str, set[float]] = {}
    for run in runs:
        if run.effective_rate is not None:
            other = text([run.protocol, run.learners, [text(run.job.get(key)) for key in keys]])
            tried.setdefault(other, set()).add(float(f"{run.effective_rate:.6g}"))
    rates = {rate for found in tried.values() for rate in found}
    if len({tuple(sorted(found)) for found in tried.values()}) < 2:
        return []
    what = ", ".join(keys[:3]) + (", …" if len(keys) > 3 else "")
    return [
        f"Effective learning rates differ ({min(rates):.4g} to {max(rates):.4g}) between runs that are compared by "
        f"{what or 'something else'}: differences may come from the learning rate."
    ]
