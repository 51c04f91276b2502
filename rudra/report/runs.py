"""Contents of a report: runs read from their files, and the runs' studies."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError

from protocols import Protocol, rule_of
from rudra.errors import ConfigError, ResultsError, printable
from rudra.explain.findings import expected_staleness
from rudra.files import SWEEP_INDEX
from rudra.job.tables import kinds_of
from rudra.report.curve_styles import Blocks, Course, Numbers, blocks_of, flat, rate_of
from rudra.report.topology import Cast, of_results
from rudra.report.workers import Workers, workers_of
from rudra.results.reader import Results, open_results
from rudra.results.summary import protocol_label

_MOST_BLOCKS = 2000
_LONGEST_LABEL = 60


@dataclass(frozen=True)
class Run:
    """One run, or one that is missing.

    Attributes:
        file: result file of the run.
        label: name of the run in tables and figures.
        status: status of the run, or "missing", or "unreadable".
        reason: why the run failed, or cannot be read.
        overrides: keys of the job that a sweep changed.
        summary: see `Results.summary`. It, `attributes` and `job` are empty if the file cannot be read.
        attributes: attributes of the result file.
        job: the resolved job.
        epoch: numbers of the epochs that have ended, shape (epochs,). The following arrays match it. NaN: unknown.
        epoch_end_s: end of each epoch.
        test_error: error on the test set in percent, like all errors.
        test_loss: mean loss over the samples of the test set.
        train_error: error of the applied gradients.
        train_loss: loss of the applied gradients.
        learning_rate: learning rate of each epoch's last update.
        metrics: further metrics of the evaluations: name -> values.
        rate: learning rate over epochs.
        staleness: staleness over updates.
        distance: distance of replicas from the weights, over updates. None: learners have no replicas.
        bytes_per_sample: bytes of replicas that a learner sends for each sample. 0: it has no replica.
        update_s: time in the optimiser's steps.
        evaluation_s: time in evaluations.
        cast: roles of the run, if the file records them.
        workers: work of each worker, if learners are heterogeneous. None: all learners are alike.
        expected_staleness: staleness that the protocol predicts for this run. None: the user's own rule decides it, and
            a report imports no user code.
    """

    file: Path
    label: str
    status: str
    reason: str = ""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)
    attributes: Mapping[str, Any] = field(default_factory=dict)
    job: Mapping[str, Any] = field(default_factory=dict)
    epoch: Numbers = field(default_factory=lambda: np.zeros(0))
    epoch_end_s: Numbers = field(default_factory=lambda: np.zeros(0))
    test_error: Numbers = field(default_factory=lambda: np.zeros(0))
    test_loss: Numbers = field(default_factory=lambda: np.zeros(0))
    train_error: Numbers = field(default_factory=lambda: np.zeros(0))
    train_loss: Numbers = field(default_factory=lambda: np.zeros(0))
    learning_rate: Numbers = field(default_factory=lambda: np.zeros(0))
    metrics: Mapping[str, Numbers] = field(default_factory=dict)
    rate: Course = field(default_factory=lambda: Course(np.zeros(0), np.zeros(0), np.zeros(0)))
    staleness: Blocks | None = None
    distance: Blocks | None = None
    bytes_per_sample: float = 0.0
    update_s: float = 0.0
    evaluation_s: float = 0.0
    cast: Cast | None = None
    workers: Workers | None = None
    expected_staleness: float | None = None

    @property
    def known(self) -> bool:
        """Whether there is anything to show of the run."""
        return bool(self.summary)

    @property
    def finished(self) -> bool:
        return self.status == "finished"

    @property
    def virtual(self) -> bool:
        return bool(self.summary.get("driver") == "simulation")

    @property
    def learners(self) -> int:
        return int(self.summary["learners"])

    @property
    def minibatch_size(self) -> int:
        return int(self.summary["minibatch_size"])

    @property
    def n(self) -> int | None:
        """The splitting parameter: λ for async, and none for a protocol that takes one gradient of each learner."""
        n = self.summary["n"]
        return None if self._rule.ordered or n is None else int(n)

    @property
    def _rule(self) -> type[Protocol]:
        return rule_of(str(self.summary["protocol"]))

    @property
    def protocol(self) -> str:
        return protocol_label(dict(self.summary))

    @property
    def family(self) -> str:
        """Name of the protocol's curve over λ: `λ-softsync` if n is the number of learners, which is async's rule."""
        return self._rule.family(self.protocol, self.n, self.learners)

    @property
    def time_s(self) -> float:
        return float(self.summary["wall_time_s"])

    @property
    def effective_rate(self) -> float | None:
        """The initial learning rate with the protocol's modulation."""
        rate = self.summary.get("learning_rate")
        return None if rate is None else float(rate)

    @property
    def stale(self) -> bool:
        """Whether any gradient was stale."""
        return bool(self.histogram[1:].any())

    @property
    def error(self) -> float | None:
        """Test error of the last evaluation in percent."""
        return _last(self.test_error)

    @property
    def loss(self) -> float | None:
        """Loss of the last evaluation."""
        return _last(self.test_loss)

    def metric(self, name: str) -> Numbers:
        """Returns a metric's values, one for each epoch."""
        return self.metrics.get(name, np.full(len(self.epoch), np.nan))

    @property
    def seconds_per_sample(self) -> float | None:
        samples = self.summary["samples"]
        return self.time_s / samples if samples and self.time_s > 0 else None

    @property
    def triple(self) -> str:
        """(σ, μ, λ) with the nominal staleness, as the paper names a configuration."""
        return f"({self.n or 0 if self.learners > 1 else 0}, {self.minibatch_size}, {self.learners})"

    @cached_property
    def histogram(self) -> Numbers:
        """Share of the gradients with σ = 0, 1, …, in percent."""
        counts = np.asarray(self.summary.get("staleness_histogram", ()), float)
        return 100 * counts / max(1.0, float(counts.sum()))


@dataclass(frozen=True)
class Study:
    """Runs that belong together.

    Attributes:
        title: title of the study's part of the report.
        runs: all runs, including missing ones.
        figure: what to show first, as in `rudra.job.tables.StudyTable`.
        quick: whether this is the smaller variant of an experiment.
        paper: rows of published numbers to compare with.
    """

    title: str
    runs: tuple[Run, ...]
    figure: str = "table"
    quick: bool = False
    paper: tuple[Mapping[str, Any], ...] = ()

    @property
    def known(self) -> list[Run]:
        return [run for run in self.runs if run.known]

    def of(self, row: Mapping[str, Any]) -> Run | None:
        """The run that a row of the paper describes, if there is one."""
        return next((run for run in self.known if row.get("file") and run.file.name == row["file"]), None)


class _Point(BaseModel):
    file: str
    overrides: dict[str, Any] = {}
    label: str = ""


class _Index(BaseModel):
    """The keys of `sweep.json` that a report needs."""

    title: str = ""
    job: str = ""
    figure: str = "table"
    quick: bool = False
    points: list[_Point] = []
    paper: list[dict[str, Any]] = []


def collect(paths: Sequence[Path]) -> list[Study]:
    """Returns one study for each directory, and one for all named files.

    Raises:
        ConfigError: there is no run, or a `sweep.json` is damaged.
        ResultsError: a named file cannot be read.
    """
    if not paths:
        raise ConfigError("no result file to report on")
    files = [path for path in paths if not os.path.isdir(path)]
    studies = [study for path in paths if os.path.isdir(path) for study in _directory(path)]
    if files:
        runs = _labelled([read(path) for path in dict.fromkeys(files)])
        names = dict.fromkeys(str(run.summary["name"]) for run in runs)
        studies.append(Study(" and ".join(names) if len(names) <= 3 else f"{len(runs)} runs", runs))
    return studies


def _directory(path: Path) -> Iterator[Study]:
    """Returns the sweep or the files in a directory. If it has neither, uses its subdirectories."""
    if os.path.isfile(path / SWEEP_INDEX):
        yield _sweep(path)
        return
    files = sorted(path.glob("*.h5"))
    if files:
        yield Study(path.resolve().name, _labelled([_tolerant(file) for file in files]))
        return
    folders = [folder for folder in sorted(path.iterdir()) if os.path.isdir(folder)]
    inner = [folder for folder in folders if os.path.isfile(folder / SWEEP_INDEX) or any(folder.glob("*.h5"))]
    if not inner:
        raise ConfigError(f"{path}: has neither a result file nor a {SWEEP_INDEX}")
    for directory in inner:
        yield from _directory(directory)


def _sweep(path: Path) -> Study:
    try:
        index = _Index.model_validate_json((path / SWEEP_INDEX).read_bytes())
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{path / SWEEP_INDEX}: damaged: {where + ': ' if where else ''}{first['msg']}") from None
    except OSError as error:
        raise ConfigError(f"{path / SWEEP_INDEX}: cannot read: {error.strerror or error}") from None
    runs = [
        replace(_tolerant(path / point.file), label=_short(point.label or point.file), overrides=point.overrides)
        for point in index.points
    ]
    if not runs:
        raise ConfigError(f"{path / SWEEP_INDEX}: has no points")
    title = index.title or index.job or path.resolve().name
    return Study(title, tuple(runs), index.figure, index.quick, tuple(index.paper))


def _tolerant(path: Path) -> Run:
    """Reads a point of a sweep. A missing or damaged point is shown with this status."""
    if not os.path.isfile(path):
        return Run(path, _short(path.stem), "missing", "not run yet, or stopped before it began")
    try:
        return read(path)
    except ResultsError as error:
        return Run(path, _short(path.stem), "unreadable", str(error).removeprefix(f"{path}: "))


def read(path: Path) -> Run:
    """Reads one result file in any state.

    Raises:
        ResultsError: the file cannot be read.
    """
    with open_results(path) as results:
        summary, epochs, updates = results.summary(), results.epochs, results.updates
        timing_only = results.job.get("simulation", {}).get("tensors") is False and summary["driver"] == "simulation"
        tested = epochs["evaluated"] != 0
        learned = np.full(len(epochs), not timing_only)
        metrics = {name: np.array(found, float) for name, found in summary["metrics"].get("test", {}).items()}
        ran = epochs["evaluation_s"][tested]

        def where(there: Any, values: Numbers) -> Numbers:
            return np.where(there, values, np.nan)

        return Run(
            path,
            _short(path.stem),
            str(summary["status"]),
            summary["reason"] or "",
            {},
            summary,
            results.attributes,
            flat(results.job),
            epochs["epoch"].astype(float),
            epochs["time_s"],
            where(learned & tested, 100.0 * epochs["test_error"]),
            where(learned & tested, epochs["test_loss"]),
            where(learned, 100.0 * epochs["train_error"]),
            where(learned, epochs["train_loss"]),
            where(learned, epochs["learning_rate"]),
            {name: where(learned, found) for name, found in metrics.items()},
            Course(np.zeros(0), np.zeros(0), np.zeros(0)) if timing_only else rate_of(results),
            blocks_of(updates["timestamp"], updates["mean_staleness"], _MOST_BLOCKS),
            *_replicas(results),
            float(updates["update_s"].sum()),
            float(ran[np.isfinite(ran)].sum()),
            of_results(results),
            workers_of(results),
            expected_staleness(results),
        )


def _replicas(results: Results) -> tuple[Blocks | None, float]:
    """Returns the distance of replicas from the weights, and the bytes of replicas that a learner sends per sample."""
    rows, gradients = results.averages, results.gradients
    distance: NDArray[np.float64] = rows["distance"]
    rows = rows[np.isfinite(distance)]
    if not len(rows) or not len(gradients):
        return None, 0.0
    timestamps, places, counts = np.unique(rows["timestamp"], return_inverse=True, return_counts=True)
    means = np.bincount(places, rows["distance"]) / counts  # over learners
    size = results.layout[-1].offset + results.layout[-1].size
    sent = 4.0 * size / float(gradients["samples"].mean())
    plan = results.plan()
    if plan.sharing != "nothing" and max(map(len, plan.groups)) > 1:  # also exchanged at each mini-batch
        sent += 4.0 * size / float(results.attributes["minibatch_size"])
    return blocks_of(timestamps, means, _MOST_BLOCKS), sent


def _labelled(runs: Sequence[Run]) -> tuple[Run, ...]:
    """Names runs by protocol, μ and λ, and if that is ambiguous also by other differences of their jobs or files."""
    names = names_of(runs)
    if len(set(names)) < len(names) or max(map(len, names), default=0) > _LONGEST_LABEL:
        unique = len({run.file.stem for run in runs}) == len(runs)
        names = [run.file.stem if unique else str(run.file.with_suffix("")) for run in runs]
    return tuple(replace(run, label=_short(name)) for run, name in zip(runs, names, strict=True))


def names_of(runs: Sequence[Run]) -> list[str]:
    """Names runs by protocol, μ and λ, and by the differences of their jobs that resolve the remaining ambiguities."""
    names = [f"{r.protocol}, μ = {r.minibatch_size}, λ = {r.learners}" if r.known else r.label for r in runs]
    if len(set(names)) == len(names):
        return names
    shown = {"protocol.name", "protocol.n", "training.minibatch_size", "cluster.learners", "name"}
    keys = [key for key in varying(runs) if key not in shown and not follows(key, names, runs)]
    extra = [", ".join(words(k, r.job[k]) for k in keys if k in r.job) for r in runs]
    return [f"{name}, {more}" if more else name for name, more in zip(names, extra, strict=True)]


def follows(key: str, names: Sequence[Any], runs: Sequence[Run]) -> bool:
    """Whether runs of the same name have the same value of a key of the job."""
    found: dict[Any, set[str]] = {}
    for name, run in zip(names, runs, strict=True):
        if run.known:
            found.setdefault(name, set()).add(text(run.job.get(key)))
    return all(len(values) == 1 for values in found.values())


_WORDS = {"optimizer.learning_rate": "α0 = {}", "averaging.period": "τ = {}", "averaging.momentum": "outer momentum {}"}


def words(key: str, value: Any) -> str:
    """Returns a key of the job and its value in readable form."""
    return _WORDS.get(key, key.partition(".")[2].replace("_", " ") + " {}").format(text(value))


def varying(runs: Sequence[Run]) -> list[str]:
    """Returns the keys of the job that differ between the runs."""
    jobs = [run.job for run in runs if run.known]
    keys = dict.fromkeys(key for job in jobs for key in job)
    return [key for key in keys if len({text(job.get(key)) for job in jobs}) > 1]


def text(value: Any) -> str:
    """Returns a value of a job in readable form."""
    return value if isinstance(value, str) else kinds_of(value) or json.dumps(value, ensure_ascii=False)


def _last(values: Numbers) -> float | None:
    known = values[np.isfinite(values)]
    return float(known[-1]) if len(known) else None


def _short(label: str) -> str:
    """Makes a name printable and short. The end of a long name is more informative than its beginning."""
    label = printable(label)
    return label if len(label) <= _LONGEST_LABEL else "…" + label[1 - _LONGEST_LABEL :]
