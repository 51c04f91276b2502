"""Going on with a run that ended early: from its checkpoint, under the same name, with the same rows."""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rudra import checkpoint
from rudra.checkpoint import State
from rudra.config import Job
from rudra.errors import CheckpointError, ConfigError, ResultsError
from rudra.files import check_output
from rudra.jobfiles import apply, parsed
from rudra.position import BEGINNING, Position
from rudra.records import EVENT, LEARNER
from rudra.results import Results, open_results
from rudra.writer import Kind, Rows

DECISIVE = ("model", "data", "augment", "task", "training", "optimizer", "protocol", "topology", "cluster")
"""Tables of the job that decide what the weights become; of them these keys do not, or say where something is:"""

CHANGEABLE = ("data.path", "training.warm_start", "training.evaluate", "training.evaluation_batch_size")

KEPT = ("initial_weights_sha256", "started")
"""Attributes of the result file that a restart does not change. What cannot be replayed stays so, too."""


class Decision(NamedTuple):
    """What `--resume` comes to.

    Attributes:
        output: result file.
        checkpoint: to go on from; None: begin.
        position: where.
        cluster: keys of that table which the checkpoint decides.
        overwrite: whether the result file may be replaced.
        finished: there is nothing left to do.
        text: what to tell the user of it.
    """

    output: Path
    checkpoint: Path | None = None
    position: Position = BEGINNING
    cluster: dict[str, Any] | None = None
    overwrite: bool = False
    finished: bool = False
    text: str = ""


def decide(job: Job, output: Path | None, wanted: Path | bool, *, force: bool, named: Callable[[], Path]) -> Decision:
    """Where a run begins.

    Args:
        job: what to run.
        output: result file, if the user named one.
        wanted: a checkpoint or result file to go on from; True: that of `output`, if there is one.
        force: an existing result file may be replaced.
        named: gives a result file a name.

    Raises:
        RudraError: the checkpoint is missing, damaged, or of another job; or `output` exists and may not be replaced.
    """
    if wanted is False:
        return Decision(output or named(), overwrite=force)
    if wanted is True and output is None:
        raise ConfigError("--resume goes on with a result file: say which, by --output FILE.h5 or --resume FILE.h5")
    path = source(wanted) if isinstance(wanted, Path) else checkpoint.path_of(output or Path())
    output = output or checkpoint.results_of(path)
    if wanted is True and not path.exists() and not checkpoint.previous_of(path).exists():
        if finished(output):
            return Decision(output, finished=True, text=f"{output}: is finished; nothing is left to do")
        if output.exists() and not replaceable(output, job):
            check_output(output, force)
        return Decision(output, overwrite=True, text=f"{output}: has no checkpoint yet, so {job.name} begins")
    if wanted is True and not path.exists():  # the run was killed between two names
        path = checkpoint.previous_of(path)
    state, _ = checkpoint.read(path)
    cluster = fitted(state, job)
    text = f"{job.name}: goes on from {path}: update {state.position.timestamp}, epoch {state.position.epoch + 1}"
    return Decision(output, path, state.position, cluster, overwrite=force, text=text)


def source(given: Path) -> Path:
    """The checkpoint that a user means by a checkpoint or a result file."""
    return given if given.suffix == checkpoint.SUFFIX else checkpoint.path_of(given)


def finished(output: Path) -> bool:
    """Whether a result file holds a finished run."""
    if not output.is_file():
        return False
    with open_results(output) as results:
        return results.status == "finished"


def replaceable(output: Path, job: Job) -> bool:
    """Whether a result file is of this job and ended before its first checkpoint: then it may be begun anew."""
    try:
        with open_results(output) as results:
            return results.status != "finished" and not _differences(results.job, job)
    except ResultsError:
        return False


def resumable(given: Path, overrides: Sequence[str] = ()) -> tuple[Job, Path, Path]:
    """The job, the checkpoint and the result file of a run that is to go on.

    Args:
        given: its result file, or a checkpoint of it.
        overrides: texts `table.key=value`; keys that decide nothing.

    Raises:
        RudraError: there is no whole checkpoint; or it is finished.
    """
    path = source(given)
    if given != path and not path.exists() and finished(given):
        raise ConfigError(f"{given}: is finished; there is nothing to resume")
    state, _ = checkpoint.read(path)
    tables = dict(state.job)
    for override in overrides:
        apply(tables, *parsed(override), said=f"--set {override}")
    job = job_of(state._replace(job=tables))
    return job, path, checkpoint.results_of(path)


def job_of(state: State) -> Job:
    """The job that a checkpoint holds.

    Raises:
        ConfigError: it was made of Python objects, which no file holds.
    """
    if given := state.attributes.get("python_objects"):
        raise ConfigError(
            f"{state.path}: {given} was given as a Python object, which a file cannot hold; from Python, "
            "rudra.run(job, output=…, resume=True) takes the job that has it"
        )
    try:
        return Job(**state.job)
    except ConfigError as error:
        raise ConfigError(f"{state.path}: {error}") from None


def fitted(state: State, job: Job) -> dict[str, Any]:
    """What the checkpoint decides of a job's table [cluster]: what bits depend on, but no device that the job names.

    Raises:
        CheckpointError: it is of another job.
    """
    if differences := _differences(state.job, job):
        key, then, now = differences[0]
        text = f"{state.path}: is of another job: {key} was {then}, and is {now} now"
        raise CheckpointError(f"{text}; give another --output, or the job of the checkpoint (rudra resume)")
    decided = ("learners", "threads_per_rank", *(["device"] if job.cluster.device == "auto" else []))
    return {key: decisive(state.job)["cluster"][key] for key in decided}


def decisive(job: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The `DECISIVE` tables of a job that a file holds; a key that is younger than the file has its default."""
    default = json.loads(Job().to_json())
    return {table: {**default[table], **job.get(table, {})} for table in DECISIVE}


def _differences(then: Mapping[str, Any], job: Job) -> list[tuple[str, Any, Any]]:
    """Decisive keys that a job has otherwise than a run: key, value then, value now."""
    now, ran = json.loads(job.to_json()), decisive(then)
    found = []
    for table in DECISIVE:
        for key, value in now[table].items():
            name, before = f"{table}.{key}", ran[table][key]
            open_ = table == "cluster" and (value is None or key in {"threads_per_rank", "device"})
            if value != before and name not in CHANGEABLE and not open_:
                found.append((name, before, value))
    return found


class Carried(NamedTuple):
    """What the result file of a resumed run begins with.

    Attributes:
        rows: of each table.
        weights: of epochs that are kept, with their numbers.
        attributes: that stay.
        learners: account of the learners, as far as rows tell it: `records.LEARNER`.
    """

    rows: dict[Kind, Iterable[Rows]]
    weights: Iterable[tuple[int, NDArray[np.float32]]]
    attributes: dict[str, Any]
    learners: Rows


def carried(results: Results, position: Position) -> Carried:
    """The rows of a run up to a checkpoint, read piece by piece while they are written again.

    Args:
        results: of the run; stays open until that has been done.
        position: of the checkpoint.

    Raises:
        ResultsError: rows are missing.
    """
    steps = np.array(position.steps)
    learners = np.zeros(len(steps), LEARNER)
    kept = dropped = 0
    for piece in results.pieces("updates"):
        later = int((piece["timestamp"] > position.timestamp).sum())
        kept, dropped = kept + len(piece) - later, dropped + later
    if kept != position.timestamp:
        raise ResultsError(
            f"{results.path}: holds {kept} updates, and the checkpoint is of update {position.timestamp}"
        )

    def minibatches() -> Iterator[Rows]:
        for piece in results.pieces("minibatches"):
            rows = piece[piece["step"] < steps[piece["learner"]]]
            for name in ("compute_s", "push_s", "wait_s", "pull_s"):
                learners[name] += np.bincount(rows["learner"], rows[name], len(steps))
            yield rows

    def gradients() -> Iterator[Rows]:
        for piece in results.pieces("gradients"):
            rows = piece[piece["update"] <= position.timestamp]
            learners["samples"] += np.bincount(rows["learner"], rows["samples"], len(steps)).astype(np.int64)
            yield rows

    def upto(table: Kind) -> Iterator[Rows]:
        for piece in results.pieces(table):
            yield piece[piece["timestamp"] <= position.timestamp]

    def metrics() -> Iterator[Rows]:
        for piece in results.pieces("metrics"):
            yield piece[piece["epoch"] <= position.epoch]

    def events() -> Iterator[Rows]:
        lowered = 0  # those that the checkpoint does not know are told again
        for piece in upto("events"):
            plateau = piece["kind"] == b"plateau"
            yield piece[~plateau | (np.cumsum(plateau) + lowered <= len(position.lowered))]
            lowered += int(plateau.sum())
        state = results.state
        ended = f"{state['status']}: {state['reason']}" if state["reason"] else "was killed"
        text = f"goes on from the checkpoint of update {position.timestamp}; {dropped} updates after it are done again"
        about = (position.timestamp, position.applied, position.time_s, time.time())
        row = (b"restart", -1, 0, *about, f"{text}; it {ended}".encode()[:512])
        yield np.array([row], EVENT)

    rows: dict[Kind, Iterable[Rows]] = {
        "gradients": gradients(),
        "updates": upto("updates"),
        "minibatches": minibatches(),
        "epochs": upto("epochs"),
        "metrics": metrics(),
        "events": events(),
    }
    weights = ((epoch, results.weights_of(epoch)) for epoch in results.kept_epochs if epoch <= position.epoch)
    stay = KEPT if results.attributes["replayable"] else (*KEPT, "replayable", "not_replayable")
    return Carried(rows, weights, {name: results.attributes[name] for name in stay}, learners)
