"""A grid of runs, `rudra sweep`: its points, their result files, and the points that remain to be run.

A sweep's directory has one result file for each point, named after the settings of the point. `sweep.json` describes
the points (`rudra report` reads both). A point is finished if its file says so. Any other file, such as one from a
killed worker, is replaced.
"""

import dataclasses
import hashlib
import itertools
import json
import os
import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from protocols import Averaging
from rudra.errors import ConfigError, ResultsError, printable
from rudra.files import SWEEP_INDEX, written
from rudra.job.job import Job
from rudra.job.jobfiles import PAPER, Change, flattened, parsed, read_job, read_toml
from rudra.job.table import named
from rudra.job.tables import PLACEMENT_RULES, kinds_of
from rudra.machine import cores
from rudra.prepare import cost_files
from rudra.results.identity import completed

FORMAT = 1
_SYMBOLS = {
    "model.name": "{}",
    "training.minibatch_size": "μ = {}",
    "cluster.learners": "λ = {}",
    "protocol.n": "n = {}",
    "protocol.name": "{}",
    "optimizer.learning_rate": "α0 = {}",
    "topology.name": "{}",
    "simulation.machines": "",
}
_PAPERS = {"async": "softsync"}  # the paper calls it λ-softsync
_LONGEST_NAME = 120  # of a file, without the part that makes it unique

Driver = Literal["simulation", "mpi"]


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """One run of a sweep.

    Attributes:
        overrides: settings that distinguish the point from the others: key of the job -> value.
        job: job to run.
        file: name of its result file in the sweep's directory.
        label: name of the point in figures.
    """

    overrides: Mapping[str, Any]
    job: Job
    file: str
    label: str


@dataclasses.dataclass(frozen=True, slots=True)
class Sweep:
    """All points of a sweep, validated. `plan` makes a sweep.

    Attributes:
        name: name of the job.
        title: title of the report.
        quick: whether this is the quick variant of a study.
        driver: driver that runs the points.
        figure: first figure of the report, see `rudra.job.tables.StudyTable`.
        grid: key -> values, if the points are combinations.
        paper: rows of the paper's numbers. `file` is the matching point, or None.
    """

    name: str
    title: str
    quick: bool
    driver: Driver
    figure: str
    grid: Mapping[str, Sequence[Any]]
    points: tuple[Point, ...]
    paper: tuple[Mapping[str, Any], ...]

    def write_index(self, directory: Path) -> None:
        """Writes `sweep.json` atomically."""
        points = [{"file": p.file, "overrides": dict(p.overrides), "label": p.label} for p in self.points]
        own = {"title": self.title, "job": self.name, "quick": self.quick, "driver": self.driver}
        index = {"format": FORMAT, **own, "grid": self.grid, "figure": self.figure}
        text = json.dumps({**index, "points": points, "paper": self.paper}, indent=1, ensure_ascii=False, default=str)
        with written(directory / SWEEP_INDEX) as file:
            file.write(text.encode() + b"\n")

    def finished(self, directory: Path, *, force: bool = False) -> set[str]:
        """Returns the files of the points that need not be run again.

        Raises:
            ConfigError: there are finished points or an index of another job. `force` replaces them.
        """
        index = directory / SWEEP_INDEX
        if not force and os.path.lexists(index) and (other := _indexed(index)) != self.name:
            what = "is not the index of a sweep" if other is None else f"is of a sweep of {printable(other)}"
            raise ConfigError(f"{index} {what}; give another --output, or --force to replace it")
        done: set[str] = set()
        for point in self.points:
            found = _finished(directory / point.file)
            if found is None:
                continue
            driver, job = found
            differences = _differences(job, json.loads(point.job.to_json()), self.driver)
            differences += [f"driver is {driver}, not {self.driver}"] if driver != self.driver else []
            if not differences:
                done.add(point.file)
            elif not force:
                what = "; ".join(differences[:2]) + ("; …" if len(differences) > 2 else "")
                hint = "give another --output, or --force to replace it"
                raise ConfigError(f"{directory / point.file} is of another job: {what}; {hint}")
        return done


def plan(
    job: str | Path,
    *,
    grid: Mapping[str, Sequence[Any]] | None = None,
    quick: bool = False,
    overrides: Sequence[str] = (),
    driver: Driver = "simulation",
) -> Sweep:
    """Validates all points of a sweep, without running anything.

    Args:
        job: path of a TOML file, or a name that `shipped_jobs` lists.
        grid: job key -> values. Every combination is a point. By default the job's own `[study]` defines the points.
        quick: the study's quick variant.
        overrides: texts `table.key=value`, for all points. They take precedence over the study's `quick`.
        driver: "simulation", or "mpi" for real ranks.

    Raises:
        ConfigError: a mistake in the job, the study or one of the points, which the text names.
    """
    path, tables = read_job(job)
    study = Job.of(path, {"study": tables.pop("study", {})}).study
    given = {change.key: change for change in map(parsed, overrides)}
    where = f"{path}: [study]" if grid is None else "--grid"
    if grid is None:
        quick_points = quick and (study.quick_grid or study.quick_points)
        grid = study.quick_grid if quick_points else study.grid
        listed = study.quick_points if quick_points else study.points
        figure, title = study.figure, study.title
    else:
        listed, figure, title = [], "table", f"{path.stem} over {' and '.join(grid)}"
    if quick and not (study.quick or study.quick_grid or study.quick_points):
        raise ConfigError(f"{path}: [study] has no quick variant; leave out --quick")
    varied = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())] if grid else []
    varied += listed
    if not varied:
        raise ConfigError(
            f"{path}: has no [study] with a grid or points; give the keys to vary: --grid table.key=v1,v2"
        )
    for key in given.keys() & {key for point in varied for key in point}:
        raise ConfigError(f"--set {key}: the points of the sweep differ in it; use --grid {key}=… instead")
    common = [*_changes(f"{path}: [study] quick", study.quick if quick else {}), *given.values()]
    points = tuple(_point(path, tables, common, _changes(where, point), driver) for point in varied)
    for first, second in itertools.combinations(points, 2):
        if first.file == second.file:
            raise ConfigError(f"{path}: [study] has the point {first.label} twice")
    rows = tuple(_paper_rows(path, study.paper, points))
    return Sweep(path.stem, title or path.stem, quick, driver, figure, dict(grid), points, rows)


def parse_grid(options: Sequence[str]) -> dict[str, list[Any]]:
    """Returns key -> values of options `table.key=v1,v2`. Values are TOML, or plain strings if they are not valid TOML.

    An empty value between commas is the key's default, None.

    Raises:
        ConfigError: an option has another form, or repeats a key or a value.
    """
    grid: dict[str, list[Any]] = {}
    for option in options:
        key, equals, text = (part.strip() for part in option.partition("="))
        if not equals or "." not in key:
            raise ConfigError(f"--grid {option}: must read table.key=v1,v2")
        try:
            if not all(part.strip() for part in text.split(",")):  # an empty value means the default
                raise ValueError
            values = tomllib.loads(f"values = [{text}]")["values"]
        except (ValueError, RecursionError):
            values = [parsed(f"value={value}").value for value in text.split(",")]
        if key in grid or any(value in values[:i] for i, value in enumerate(values)):
            raise ConfigError(f"--grid {option}: each key once, and each of its values once")
        grid[key] = values
    return grid


def _changes(where: str, overrides: Mapping[str, Any]) -> list[Change]:
    """Returns the changes of points or of a quick study. `where` is their origin, for messages."""
    told = {key: "" if value is None else _text(value) for key, value in overrides.items()}
    return [Change(key, value, f"{where} {key}={told[key]}") for key, value in overrides.items()]


def _point(
    path: Path, tables: dict[str, Any], common: Sequence[Change], own: Sequence[Change], driver: Driver
) -> Point:
    overrides = {change.key: change.value for change in own}
    try:
        job = Job.of(path, tables, [*common, *own])
        if driver == "simulation":  # one thread each, because several points run at a time
            job = cost_files.load(job.resolved(threads_per_rank=job.cluster.threads_per_rank or 1))
        else:
            job = job.with_(cluster={"learners": job.cluster.learners or 4})
    except ConfigError as error:
        raise ConfigError(f"point {_name(overrides)}: {error}") from None
    told = _gathered(overrides, job.learners)
    said = (_SYMBOLS.get(k, k.rpartition(".")[2] + " {}").format(_said(k, v)) for k, v in told.items())
    return Point(dict(overrides), job, _file_name(_name(told)), ", ".join(filter(None, said)))


def _name(overrides: Mapping[str, Any]) -> str:
    return ",".join(f"{key}={_text(value)}" for key, value in _short_keys(overrides).items())


def _gathered(overrides: Mapping[str, Any], learners: int) -> dict[str, Any]:
    """Replaces equal values for all learners (`table.key.0` and so on) by one value of `table.key`."""
    told: dict[str, Any] = {}
    for key, value in overrides.items():
        of = key.rpartition(".")[0]
        alike = all(f"{of}.{i}" in overrides and overrides[f"{of}.{i}"] == value for i in range(learners))
        told[of if alike else key] = value
    return told


def _said(key: str, value: Any) -> str:
    """Returns a value as figures show it."""
    if key == "model.name":
        return _text(value).rpartition(":")[2]
    if key == "simulation.background_jobs":
        kinds = Counter(_kind_beside(keys) for keys in value)
        return " and ".join(f"{count} {kind}" for kind, count in kinds.items())
    return _text(value)


def _kind_beside(keys: Mapping[str, Any]) -> str:
    """Returns model and form of a background job, if they differ from the main job's."""
    keys = flattened(keys)
    model = _said("model.name", keys.get("model.name", "")) or "alike"
    return model if "placement.cut" not in keys else f"{model} {'placed' if keys['placement.cut'] else 'whole'}"


def _short_keys(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Returns keys without their table if they remain unique. `protocol.name` becomes `protocol`."""
    last = [key.rpartition(".")[2] for key in overrides]
    short: dict[str, Any] = {}
    for key, value in overrides.items():
        table, _, end = key.rpartition(".")
        short[table if end == "name" else end if last.count(end) == 1 else key] = value
    return short


def _file_name(name: str) -> str:
    """Returns a safe file name. If characters are lost, a digest keeps the name unique."""
    safe = re.sub(r"[^\w.,=+-]+", "-", name).strip("-.")[:_LONGEST_NAME]
    return f"{safe}.h5" if safe == name else f"{safe}-{hashlib.sha256(name.encode()).hexdigest()[:8]}.h5"


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "default" if value is None else kinds_of(value) or json.dumps(value, default=str)


def _paper_rows(path: Path, names: Sequence[str], points: Sequence[Point]) -> Iterator[dict[str, Any]]:
    """Returns the rows of the named tables, each with the file of the point that it describes, or None.

    Raises:
        ConfigError: `paper.toml` is missing or damaged, or has no such table.
    """
    if not names:
        return
    file = path.parent / PAPER
    tables = read_toml(file)
    for name in names:
        if name not in tables:
            raise ConfigError(f"{path}: [study] paper: '{name}' is not in {file}; valid: {', '.join(tables)}")
        common = {key: value for key, value in tables[name].items() if key != "rows"}
        for row in tables[name]["rows"]:
            told = {**common, **row}
            other = {"against": _file_of({**told, **told["against"]}, points)} if "against" in told else {}
            yield {**told, **other, "file": _file_of(told, points)}


def _file_of(row: Mapping[str, Any], points: Sequence[Point]) -> str | None:
    return next((point.file for point in points if _describes(row, point.job)), None)


def _describes(row: Mapping[str, Any], job: Job) -> bool:
    """Whether a row of the paper matches this job in all settings that the row names, such as protocol, μ and λ."""
    protocol = job.make_protocol()
    name = job.protocol.name if isinstance(job.protocol.name, str) else ""
    alike = job.learners == 1  # with one learner all protocols are the same
    modulation = protocol.default_modulation if job.protocol.modulation == "auto" else job.protocol.modulation
    ours = {
        "protocol": row.get("protocol") if alike else _PAPERS.get(name, name),
        "n": row.get("n") if alike else protocol.n,
        "minibatch_size": job.training.minibatch_size,
        "learners": job.learners,
        "modulation": modulation,
        "topology": job.topology.name,
        "nodes": job.simulation.nodes,
        "model": _said("model.name", named(job.model.name)),
        **_beside(job),
        "merged": job.placement.given,
        "momentum": job.optimizer.momentum,
        "learning_rate": job.optimizer.learning_rate,
    }
    if protocol.schedules:
        kinds = "+".join(worker.kind for worker in job.hogbatch.team(job.learners))
        ours |= {"rule": job.hogbatch.rule, "kinds": kinds}
    if protocol.averages:
        ours |= {"period": protocol.period, "outer_momentum": Averaging.of(protocol).outer.momentum}
    told = {"modulation": protocol.default_modulation, "topology": "base", **row}
    return all(told[key] == value for key, value in ours.items() if key in told)


def _beside(job: Job) -> dict[str, Any]:
    """Returns model and form of the last background job. "": a model like the job's own. "nobody": no such job."""
    if not job.simulation.background_jobs:
        return {"background_job": "nobody", "background_merged": None}
    keys = job.simulation.background_jobs[-1]
    model = _said("model.name", keys.get("model.name", ""))
    return {"background_job": model, "background_merged": bool(keys.get("placement.cut", job.placement.given))}


def _finished(file: Path) -> tuple[str, dict[str, Any]] | None:
    """Returns driver and job of a finished result file. None: the file is missing or not finished."""
    from rudra.results.reader import open_results

    try:
        with open_results(file) as results:
            return (results.attributes["driver"], results.job) if results.status == "finished" else None
    except ResultsError:
        return None


def _indexed(file: Path) -> str | None:
    """Returns the job in a sweep's index."""
    try:
        return str(json.loads(file.read_text(encoding="utf-8"))["job"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _differences(found: Mapping[str, Any], wanted: Mapping[str, Any], driver: Driver) -> list[str]:
    """Returns differences of a result file's job from the wanted job, except for settings that a run itself decides."""
    decided = {("cluster", "device")} if wanted["cluster"]["device"] == "auto" else set()
    decided |= set() if wanted["simulation"]["tensors"] else {("training", "evaluate")}
    if driver == "mpi" and wanted["cluster"]["threads_per_rank"] is None:
        decided.add(("cluster", "threads_per_rank"))
    if wanted["cluster"]["shares"] == "auto" and found.get("cluster", {}).get("shares"):
        decided.add(("cluster", "shares"))
    if wanted["placement"]["cut"] in PLACEMENT_RULES:
        decided.add(("placement", "cut"))
    if wanted["training"]["gradients"] == "auto":
        decided.add(("training", "gradients"))
    found = completed(found)
    return [
        f"[{table}] {key} is {json.dumps(found.get(table, {}).get(key))}, not {json.dumps(value)}"
        for table, keys in wanted.items()
        if isinstance(keys, Mapping)
        for key, value in keys.items()
        if (table, key) not in decided and found.get(table, {}).get(key) != value
    ]


def workers_for(sweep: Sweep, asked: int | None) -> int:
    """Returns how many points may run at a time: no more threads than cores, and only one job on real ranks.

    Raises:
        ConfigError: more points were requested.
    """
    threads = max(point.job.cluster.threads_per_rank or 1 for point in sweep.points)
    most = 1 if sweep.driver == "mpi" else max(1, cores() // threads)
    if asked is not None and not 1 <= asked <= most:
        why = "with --mpi" if sweep.driver == "mpi" else f"with {threads} thread(s) each on {cores()} cores"
        raise ConfigError(f"--workers {asked}: valid {why}: 1{f' to {most}' if most > 1 else ''}")
    return min(asked or most, len(sweep.points))
