"""`rudra slurm`: checks the command line together with the job before a batch job waits in the queue."""

import argparse
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rudra.errors import ConfigError, LaunchError, ResultsError
from rudra.files import locked
from rudra.job.job import Job
from rudra.job.jobfiles import parsed
from rudra.log import log
from rudra.mpi.launch import find_mpirun, is_open_mpi
from rudra.studies.slurm import NAMED, WARNING_S, ArrayElement, BatchJob, Launcher, Mpi, script, time_limit_s

if TYPE_CHECKING:
    from rudra.studies.sweep import Sweep

_WORD = re.compile(r"[\w.,:;=/@%+*&|()\[\]-]+")
_OURS = {"signal", "requeue", "no-requeue", "open-mode", "array", "job-name", "output"}
_T = TypeVar("_T", bound=str)


def main(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Prints, writes or submits the script, and returns the exit code."""
    if arguments.print and arguments.submit:
        raise ConfigError("--print and --submit exclude each other")
    batch, study, notes = plan(arguments, overrides)
    text = script(batch)
    for note in notes:
        log.warning(f"{arguments.job}: {note}")
    if arguments.print:
        print(text, end="")
        return 0
    sbatch = _sbatch() if arguments.submit else ""
    file = Path(batch.file)
    _write(file, text, force=arguments.force)
    if study is not None:  # for `rudra report`
        with locked(Path(batch.output), "sweep"):
            study.write_index(Path(batch.output))
    if arguments.submit:
        print(f"wrote {file}, submitted as job {_submit(sbatch, file)}")
    else:
        print(f"wrote {file}; submit it with: sbatch {shlex.quote(str(file))}")
    return 0


def plan(arguments: argparse.Namespace, overrides: Sequence[str]) -> tuple[BatchJob, "Sweep | None", list[str]]:
    """Turns a command line into a batch job.

    Args:
        arguments: parsed arguments. `argv` is the command line itself.
        overrides: texts `table.key=value` for the job.

    Returns:
        The batch job, the sweep if it is an array, and notes about things that work but may be unintended.

    Raises:
        ConfigError: a mistake in an option, or options that contradict each other.
        TopologyError: the job's topology does not support this number of ranks.
    """
    argv = [word for word in arguments.argv if word not in {"--print", "--submit", "--force"}]
    if not all(word.isprintable() for word in argv):
        raise ConfigError("an option has a line break or a control character, which a script cannot contain")
    from rudra.results.writer import checked_name  # imports HDF5, and --help should not wait for it

    launcher: Launcher = _one_of("--launcher", arguments.launcher, ("mpirun", "srun"))
    if arguments.mpi and launcher == "mpirun":
        raise ConfigError("--mpi is an option of srun: add --launcher srun, or leave it out")
    environment = _environment(arguments.environment)
    mpi: Mpi = _one_of("--mpi", arguments.mpi, ("pmix", "pmi2")) if arguments.mpi else _mpi_of(environment)
    job = Job.load(arguments.job, overrides)
    named = any(override.startswith("cluster.learners=") for override in overrides)
    if job.cluster.learners is not None and not named and sum(_tasks(arguments, job)[1]) != job.plan().ranks:
        overrides = [*overrides, "cluster.learners="]  # the command line overrides the job's file
        job = Job.load(arguments.job, overrides)
    output = arguments.output or Path(f"{job.name}-sweep" if arguments.grid else f"{job.name}.h5")
    output = output if arguments.grid else checked_name(output)
    points, study = _points(arguments, overrides)
    jobs = [Job.load(arguments.job, [*overrides, *settings]) for settings, _ in points]
    resources, sizes = _resources(arguments, job)
    about, notes = _fitted(jobs or [job], sizes)
    asked = bool(arguments.gpus) or any("gpu" in option for option in arguments.sbatch)
    if asked and job.cluster.device == "cpu":
        notes.append("GPUs are requested, but cluster.device is 'cpu'")
    if not asked and job.cluster.accelerated:
        notes.append(f"cluster.device is '{job.cluster.device}', but no GPUs are requested; set --gpus")
    batch = BatchJob(
        about=f"{arguments.job} by {launcher}: {about}",
        command=("rudra", *argv),
        file=str(arguments.script or Path(f"{output.stem}.sh")),
        name=re.sub(r"[^\w.,=+-]+", "-", output.stem, flags=re.ASCII),
        job=arguments.job,
        options=_set(overrides),
        output=str(output),
        points=[ArrayElement(_set(settings), file) for settings, file in points],
        resources=resources,
        launcher=launcher,
        mpi=mpi,
        environment=environment,
        warning_s=_warning_s(arguments),
        restarts=_whole("--restarts", arguments.restarts, least=0),
    )
    return batch, study, notes


def _one_of(option: str, value: str, allowed: tuple[_T, ...]) -> _T:
    for each in allowed:
        if each == value:
            return each
    raise ConfigError(f"{option} {value}: must be {' or '.join(allowed)}")


def _whole(option: str, text: str, least: int = 1) -> int:
    if not (text.isascii() and text.isdigit() and int(text) >= least):
        raise ConfigError(f"{option} {text}: must be a whole number >= {least}")
    return int(text)


def _environment(directory: Path | None) -> str:
    """Returns a path, relative if the environment is below the directory of submission: then both can move together."""
    place = Path(sys.prefix) if directory is None else directory
    if directory is not None and not (place / "bin" / "rudra").is_file():
        raise ConfigError(f"--environment {place}: no Rudra is installed there: {place / 'bin' / 'rudra'} is missing")
    return str(place.relative_to(Path.cwd()) if place.is_relative_to(Path.cwd()) else place)


def _mpi_of(environment: str) -> Mpi:
    """Returns the protocol between srun and the MPI library of an environment."""
    try:
        found = shutil.which("mpirun", path=f"{environment}/bin")
        return "pmix" if is_open_mpi(find_mpirun() if found is None else Path(found)) else "pmi2"
    except LaunchError:
        return "pmix"  # a module provides the MPI, most often Open MPI


def _set(overrides: Sequence[str]) -> list[str]:
    return [word for override in overrides for word in ("--set", override)]


def _points(
    arguments: argparse.Namespace, overrides: Sequence[str]
) -> tuple[list[tuple[list[str], str]], "Sweep | None"]:
    """Returns the options and result file of each element of an array, and the sweep that the elements form."""
    from rudra.studies import sweep

    if not arguments.grid:
        return [], None
    grid = sweep.parse_grid(arguments.grid)
    study = sweep.plan(arguments.job, grid=grid, overrides=overrides, driver="mpi")
    return [([_setting(*item) for item in point.overrides.items()], point.file) for point in study.points], study


def _setting(key: str, value: object) -> str:
    """Returns the text `table.key=value` that is read as this value."""
    plain = f"{key}={value}"
    same = isinstance(value, str) and parsed(plain).value == value
    return plain if same else f"{key}={json.dumps(value, default=str)}"


def _resources(arguments: argparse.Namespace, job: Job) -> tuple[dict[str, str | None], list[int]]:
    """Returns options of sbatch in the script's order, and the number of tasks on each node."""
    given = {name: getattr(arguments, name.replace("-", "_")) for name in (*NAMED, "time")}
    resources: dict[str, str | None] = {key: given[key] for key in ("partition", "account") if given[key] is not None}
    counts, sizes = _tasks(arguments, job)
    resources |= {key: str(value) for key, value in counts.items()}
    resources |= {key: given[key] for key in ("gpus", "mem", "time") if given[key] is not None}
    for option in arguments.sbatch:
        key, equals, value = option.removeprefix("--").partition("=")
        if key in _OURS:
            raise ConfigError(f"--sbatch {option}: the script sets {key} itself; edit it there")
        if key in {*given, "nodes", "ntasks", "ntasks-per-node", "cpus-per-task"}:
            raise ConfigError(f"--sbatch {option}: use --{key}, which is checked")
        if not re.fullmatch(r"[a-z][a-z-]+", key) or key in resources:
            raise ConfigError(f"--sbatch {option}: must read KEY or KEY=VALUE, each KEY once")
        resources[key] = value if equals else None
    for key, value in resources.items():
        if value is not None and not _WORD.fullmatch(value):
            raise ConfigError(f"--{key} {value}: must be one word of letters, digits and .,:;=/@%+*&|()[]_-")
    return resources, sizes


def _tasks(arguments: argparse.Namespace, job: Job) -> tuple[dict[str, int], list[int]]:
    """Returns the sbatch options for the number of tasks, and the number of tasks on each node."""
    names = ("nodes", "ntasks", "ntasks-per-node", "cpus-per-task")
    texts = {name: getattr(arguments, name.replace("-", "_")) for name in names}
    counts = {name: _whole(f"--{name}", text) for name, text in texts.items() if text is not None}
    nodes, total, each = (counts.get(name) for name in names[:3])
    if each is not None:
        if total is None:
            counts["nodes"] = nodes = nodes or 1
            total = nodes * each
        elif total > (nodes or total) * each:
            raise ConfigError(f"--ntasks {total} is more than --nodes {nodes} times --ntasks-per-node {each}")
    elif total is None:
        counts["ntasks"] = total = job.resolved().plan().ranks
    on_node = each or -(-total // (nodes or 1))
    if nodes is not None and total < nodes:
        raise ConfigError(f"--ntasks {total} is less than --nodes {nodes}: some nodes would have none")
    sizes = [min(on_node, total - begin) for begin in range(0, total, on_node)]
    return {name: counts[name] for name in names if name in counts}, sizes


def _fitted(jobs: Sequence[Job], sizes: Sequence[int]) -> tuple[str, list[str]]:
    """Describes the roles of the jobs on this number of ranks, and returns notes about unused tasks."""
    from rudra.report import topology

    casts = [topology.of_job(job, sum(sizes), sizes) for job in jobs]
    told = dict.fromkeys(topology.counted(cast.plan, range(len(cast.plan.roles))) for cast in casts)
    notes = [f"{len(cast.idle)} of {sum(sizes)} tasks have no role" for cast in casts if cast.idle]
    return (f"{len(jobs)} times " if len(jobs) > 1 else "") + " or ".join(told), notes[:1]


def _warning_s(arguments: argparse.Namespace) -> int:
    """Returns how long before its time limit the run gets the signal."""
    limit_s = None if arguments.time is None else time_limit_s(arguments.time)
    if arguments.warning is None:
        return WARNING_S if limit_s is None else min(WARNING_S, max(1, limit_s // 4))
    warning_s = _whole("--warning", arguments.warning)
    if limit_s is not None and warning_s >= limit_s:
        raise ConfigError(f"--warning {warning_s}: must be less than --time {arguments.time}, which is {limit_s} s")
    return warning_s


def _write(file: Path, text: str, *, force: bool) -> None:
    try:
        if file.exists() and not force and file.read_text(encoding="utf-8", errors="replace") != text:
            raise ConfigError(f"{file} exists and is another script: give another --script, or --force to replace it")
        file.write_text(text, encoding="utf-8")
        file.chmod(file.stat().st_mode | 0o111 & ~0o022)
    except OSError as error:
        raise ResultsError(f"{file}: cannot write it: {error.strerror}") from None


def _sbatch() -> str:
    found = shutil.which("sbatch")
    if found is None:
        raise ConfigError(
            "--submit: there is no sbatch here; without it the script is written, for sbatch on the cluster"
        )
    return found


def _submit(sbatch: str, file: Path) -> str:
    """Submits the script, and returns the number of the job."""
    done = subprocess.run([sbatch, "--parsable", str(file)], capture_output=True, text=True, check=False)
    if done.returncode:
        said = " ".join((done.stderr or done.stdout or "it printed nothing").split())
        raise ConfigError(f"sbatch did not accept {file}: {said}")
    return done.stdout.strip().partition(";")[0]
