"""The batch script of a job from the templates in `slurm/templates`. Its text is a pure function of a `BatchJob`."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rudra.errors import ConfigError
from rudra.job.jobfiles import data_files
from rudra.mpi.failures import ULFM

Launcher = Literal["mpirun", "srun"]
Mpi = Literal["pmix", "pmi2"]

WARNING_S = 120
"""How long before the time limit a run gets the signal. With short limits it is a quarter of the limit."""

NAMED = ("partition", "account", "gpus", "mem")
"""sbatch options that `rudra slurm` takes by name, in addition to tasks and time."""

_TIME = re.compile(r"(?:(\d+)-(\d+)(?::(\d+))?(?::(\d+))?|(?:(\d+):)?(\d+):(\d+)|(\d+))", re.ASCII)


@dataclass(frozen=True, slots=True)
class ArrayElement:
    """One element of a job array: its additional options of `rudra run`, and the name of its result file."""

    options: Sequence[str]
    file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchJob:
    """Contents of a batch script.

    Attributes:
        about: short description of what the script runs.
        command: command line that made the script.
        file: name of the script.
        name: name of the job in the queue.
        job: job as given to `rudra run`.
        options: options of `rudra run`, for every point.
        output: result file, or directory of the points' result files.
        points: elements of a job array. Empty: the script is no array.
        resources: options of sbatch, in order. None: an option without a value.
        launcher: program that starts the ranks.
        mpi: how srun and the MPI library find each other: pmix for Open MPI, pmi2 for MPICH.
        environment: directory of the environment with Rudra. A relative path starts at the directory of submission.
        warning_s: how long before the time limit the run gets the signal.
        restarts: how often the job may queue itself again.
    """

    about: str
    command: Sequence[str]
    file: str
    name: str
    job: str
    options: Sequence[str]
    output: str
    points: Sequence[ArrayElement] = ()
    resources: Mapping[str, str | None]
    launcher: Launcher = "mpirun"
    mpi: Mpi = "pmix"
    environment: str = ".venv"
    warning_s: int
    restarts: int


def script(batch: BatchJob) -> str:
    """Returns the text of the batch script."""
    texts = {file.stem: file.read_text(encoding="utf-8") for file in data_files("slurm/templates", ".sh")}
    environment = shlex.quote(batch.environment)
    values = {
        "about": batch.about,
        "command": shlex.join(batch.command),
        "file": shlex.quote(batch.file),
        "directives": "\n".join(_directives(batch)),
        "environment": environment if batch.environment.startswith("/") else f"$PWD/{environment}",
        "restarts": str(batch.restarts),
        "run": "\n".join(_run_lines(batch)),
        "mpirun": 'mpirun -n "$SLURM_NTASKS"' + (' --bind-to none "${outlive[@]}"' if batch.mpi == "pmix" else ""),
        "ulfm": shlex.join(ULFM),
        "srun": _srun(batch),
    }
    launch = texts[batch.launcher].rstrip("\n")
    if batch.launcher == "mpirun" and batch.mpi == "pmix":
        launch = texts["ulfm"] + "\n" + launch
    values["launch"] = _filled(launch, values)
    return _filled(texts["job"], values)


def _filled(template: str, values: Mapping[str, str]) -> str:
    return re.sub(r"@(\w+)@", lambda found: values[found[1]], template)


def _directives(batch: BatchJob) -> list[str]:
    told = "B:" if batch.launcher == "mpirun" else ""  # signals either the script or the ranks, see the templates
    options: dict[str, str | None] = {"job-name": batch.name, **batch.resources}
    if batch.points:
        options["array"] = f"0-{len(batch.points) - 1}"
    options["signal"] = f"{told}USR1@{batch.warning_s}"
    options["requeue" if batch.restarts else "no-requeue"] = None
    options["open-mode"] = "append"
    options["output"] = "%x-%A_%a.log" if batch.points else "%x-%j.log"
    return [f"#SBATCH --{key}" + ("" if value is None else f"={value}") for key, value in options.items()]


def _run_lines(batch: BatchJob) -> list[str]:
    run = shlex.join(["rudra", "run", batch.job, *batch.options])
    if not batch.points:
        return [f"results={shlex.quote(batch.output)}", f'run=({run} --output "$results" --resume)']
    names = [shlex.quote(f"{batch.output}/{point.file}") for point in batch.points]
    cases = [
        f"  {i}) results={name} point=({shlex.join(point.options)}) ;;"
        for i, (name, point) in enumerate(zip(names, batch.points, strict=True))
    ]
    last = f'run=({run} "${{point[@]}}" --output "$results" --resume)'
    return [f"mkdir -p {shlex.quote(batch.output)}", "case $SLURM_ARRAY_TASK_ID in", *cases, "esac", last]


def _srun(batch: BatchJob) -> str:
    # Ranks are not bound to cores, as with mpirun: the job defines the threads of each rank.
    options = [f"--mpi={batch.mpi}", "--cpu-bind=none", "--kill-on-bad-exit=1"]
    cpus = batch.resources.get("cpus-per-task")
    options += [] if cpus is None else [f"--cpus-per-task={cpus}"]  # newer versions do not inherit it from sbatch
    return " ".join(["srun", *options])


def time_limit_s(text: str) -> int:
    """Returns the seconds of a time limit in sbatch's format.

    Raises:
        ConfigError: the text is no time limit.
    """
    found = _TIME.fullmatch(text)
    if found is None:
        forms = "minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes:seconds"
        raise ConfigError(f"--time {text}: must be {forms}")
    days, day_hours, day_minutes, day_seconds, hours, minutes, seconds, alone = (int(n or 0) for n in found.groups())
    hours += 24 * days + day_hours
    total = (60 * hours + minutes + day_minutes + alone) * 60 + seconds + day_seconds
    if not total:
        raise ConfigError(f"--time {text}: a time limit must be longer than that")
    return total
