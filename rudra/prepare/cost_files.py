"""Files with the costs of virtual time: presets, and measurements of `rudra calibrate`."""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rudra.errors import ConfigError, meant
from rudra.files import cache_directory
from rudra.job.job import Job
from rudra.job.jobfiles import read_toml
from rudra.job.simulation import DEFAULTS, PER_BYTE, SimulationTable
from rudra.job.table import named
from rudra.machine import cores, processor
from rudra.prepare import run_costs
from rudra.prepare.points import BankSeconds, at, bank_at

PRESETS = Path(__file__).parent / "presets"

MEASURED = cache_directory()
"""Directory where files of `rudra calibrate` are found without a name."""


def source(job: Job) -> str | None:
    """Returns the source of a job's costs: a preset, a file, or "the job". None: unmeasured defaults."""
    table = job.simulation
    if table.costs is not None:
        return None if table.costs == DEFAULTS else table.costs
    teams = job.hogbatch.workers
    if "compute_s" in table.model_fields_set or (teams and all(team.compute_s for team in teams)):
        return "the job"
    path = measured_path(job)
    return str(path) if path.is_file() else None


def measured_path(job: Job) -> Path:
    """Returns the path where `rudra calibrate` stores the measured costs of a job's model on this machine.

    Its name has the model's name and a digest of all keys that decide the time of a mini-batch, except μ.
    """
    name, data, training = named(job.model.name), job.data, job.training
    decides = [job.model.options, named(data.name), data.options, training.precision, training.compile]
    decides += [job.cluster.device, job.optimizer.name, processor(), cores()]
    digest = hashlib.sha256(json.dumps(decides, default=str, sort_keys=True).encode()).hexdigest()[:12]
    return MEASURED / f"{re.sub('[^0-9A-Za-z_.]', '-', name)}-{digest}.toml"


def load(job: Job) -> Job:
    """Returns the job with the keys of its cost file. Keys that the job gives itself stay.

    Raises:
        ConfigError: The preset or file does not exist, is no cost file, or does not contain the job's model.
    """
    table, found = job.simulation, source(job)
    if found is None or (found == "the job" and table.costs is None):
        return job
    path = find(found)
    keys, models = (_keys_of_run(costs_of_run(path, job)), {}) if run_costs.is_run(found) else _read(path)
    model = job.model.name if isinstance(job.model.name, str) else getattr(job.model.name, "__name__", "")
    beside = [
        {f"simulation.{key}": value for key, value in models.get(str(each.get("model.name")), {}).items()} | each
        for each in table.background_jobs
    ]
    own = {key: getattr(table, key) for key in table.model_fields_set} | {"costs": found, "background_jobs": beside}
    if models and model not in models and "compute_s" not in keys | own:
        raise ConfigError(f"{path}: has no model '{model}', only {', '.join(models)}; set [simulation] compute_s")
    try:
        return job.with_(simulation=_nearest(keys, models.get(model, {}), own))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the keys of a cost file, and model -> its keys."""
    keys = read_toml(path)
    models = keys.pop("models", {})
    if not isinstance(models, dict) or not all(isinstance(model, dict) for model in models.values()):
        raise ConfigError(f"{path}: models must be tables [models.NAME] with keys of [simulation]")
    keys.pop("measured", None)  # what a calibration says of itself
    return keys, models


def costs_of_run(path: Path, job: Job) -> run_costs.RunCosts:
    """Returns the costs of a run, completed by a calibration of the model on this machine.

    Args:
        path: Result file of the run.
        job: Job of the same model.

    Raises:
        ConfigError: The run is of another model, or has too few rows.
        ResultsError: The file cannot be read.
    """
    known: dict[str, Any] = {}
    if (calibrated := measured_path(job)).is_file():
        common, models = _read(calibrated)
        known = _nearest(common, *models.values())
    return run_costs.costs_of(path, job, known)


def _keys_of_run(found: run_costs.RunCosts) -> dict[str, Any]:
    ((size, alone_s),) = found.keys["compute_s"].items()
    banks = _banks_of_run(found, size, alone_s)
    alone_s = bank_at(banks, 1, size) if banks else alone_s
    scaled = _scaled(found.known.get("compute_s"), size, alone_s)
    return _nearest(found.known, found.layout, found.keys, scaled, {"bank_s": banks} if banks else {})


def _banks_of_run(found: run_costs.RunCosts, size: int, alone_s: float) -> BankSeconds:
    """Returns the times of the run's banks, and known times of other banks and mini-batch sizes, scaled to the run."""
    own = {m: seconds[size] for m, seconds in found.keys.get("bank_s", {}).items()}
    known = SimulationTable(bank_s=found.known.get("bank_s", {})).bank_s
    if not known:
        return {m: {size: seconds} for m, seconds in own.items()}
    sizes = {size}.union(*(seconds for seconds in known.values() if isinstance(seconds, Mapping)))
    most = max(own, default=1)
    scale = own.get(most, alone_s) / bank_at(known, most, size)
    scales = {m: own[m] / bank_at(known, m, size) if m in own else scale for m in {*known, *own}}
    return {m: {of: scales[m] * bank_at(known, m, of) for of in sorted(sizes)} for m in sorted(scales)}


def _scaled(compute_s: float | Mapping[int, float] | None, size: int, seconds: float) -> dict[str, Any]:
    """Returns known times of other mini-batch sizes, scaled to the time of one size. Empty: no others are known."""
    if compute_s is None:
        return {}
    if not isinstance(compute_s, Mapping):
        return {"compute_s": seconds}
    points = {int(of): taken for of, taken in compute_s.items()}
    scale = seconds / at(points, size)
    return {"compute_s": {of: taken * scale for of, taken in points.items()} | {size: seconds}}


def _nearest(*levels: Mapping[str, Any]) -> dict[str, Any]:
    """Merges keys of several levels. A later level replaces keys of earlier ones, including the same quantity in
    another unit."""
    instead = PER_BYTE | {per_byte: key for key, per_byte in PER_BYTE.items()}
    found: dict[str, Any] = {}
    for level in levels:
        for key in level.keys() & instead.keys():
            found.pop(instead[key], None)
        found |= level
    return found


def find(costs: str) -> Path:
    """Returns the path of a preset, or of a file that a job names.

    Raises:
        ConfigError: The preset or file does not exist.
    """
    path = PRESETS / f"{costs}.toml"
    if not os.path.isfile(path):
        path = Path(costs)
    if not os.path.isfile(path):
        hint = f"use a file or one of {', '.join(presets())}{meant(costs, presets())}"
        raise ConfigError(f"[simulation] costs = '{costs}' is neither a file nor a preset; {hint}")
    return path


def presets() -> list[str]:
    """Returns the names of the clusters that come with Rudra."""
    return sorted(path.stem for path in PRESETS.glob("*.toml"))
