"""Beginning of a run: the start, a checkpoint of its own, or another run's complete checkpoint."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from protocols import restored
from rudra.core.phases import phase_at
from rudra.core.training_state import BEGINNING, TrainingState
from rudra.errors import CheckpointError, ConfigError
from rudra.files import check_output
from rudra.job.job import Job
from rudra.job.table import named
from rudra.results import checkpoint
from rudra.results.checkpoint import SavedState
from rudra.results.identity import JobComparison, Tables, compare, decisive, finished, read_own, replaceable, source
from rudra.results.reader import open_results
from rudra.results.writer import checked_name, default_output
from rudra.trust import new_run

Decided = Mapping[str, Any]
"""Values of keys that the written job leaves open: table -> key -> value."""

UNNAMED = Path()
"""Placeholder for a result file whose name is not reserved yet."""


class StartRequest(NamedTuple):
    """User's request for the beginning of a run.

    Attributes:
        output: Result file. None: the user gave no name.
        resume: Checkpoint or result file to resume from. True: the checkpoint of `output`, if there is one. False:
            none.
        force: Whether an existing result file may be replaced.
        origin: Checkpoint of another run whose complete state this run begins with, unless it is resumed.
        weights: Checkpoint or result file of another run whose weights this run begins with.
        temporary: Whether Rudra chose `output`, as if it were None.
    """

    output: Path | None
    resume: Path | bool = False
    force: bool = False
    origin: Path | None = None
    weights: Path | None = None
    temporary: bool = False


class StartDecision(NamedTuple):
    """Decision about the beginning of a run.

    Attributes:
        output: Result file.
        checkpoint: Checkpoint to resume from. None: the run begins at the start.
        position: Position of the checkpoint in the training.
        decided: Keys whose values the checkpoint and the request decide.
        overwrite: Whether the result file may be replaced.
        finished: Whether the run is already finished.
        replanned: Differences between the past learning rates and the schedule of this job. Empty: there are none.
        branched: Whether the checkpoint belongs to another run, whose rows up to the checkpoint this run copies.
        text: Text for the user.
        run: Identity of the run.
        temporary: Whether the user gave no name for the result file, so that the last checkpoint is removed at the end.
        fingerprints: Fingerprints of the data, from `rudra.data.fingerprint.plain`.
    """

    output: Path
    checkpoint: Path | None = None
    position: TrainingState = BEGINNING
    decided: Mapping[str, Any] = {}
    overwrite: bool = False
    finished: bool = False
    replanned: str = ""
    branched: bool = False
    text: str = ""
    run: str = ""
    temporary: bool = False
    fingerprints: Mapping[str, Any] = {}


def decide(job: Job, asked: StartRequest) -> StartDecision:
    """Decides the beginning of a run.

    Args:
        job: Written job.
        asked: User's request. Without a name for the result file, an empty file reserves one, which
            `rudra.results.writer.remove_if_empty` removes again.

    Raises:
        RudraError: The checkpoint is missing, damaged, or belongs to another job, or the result file exists and may not
            be replaced.
    """
    if asked.resume is False and asked.origin is None:
        begin = _fresh(asked)
    else:
        begin, state = _found(job.name, json.loads(job.to_json()), asked)
        if state is not None:
            begin = _checked(begin, state, job.with_(**begin.decided))
    if asked.weights is not None:
        training = {**begin.decided.get("training", {}), "warm_start": asked.weights}
        begin = begin._replace(decided={**begin.decided, "training": training})
    if begin.output == UNNAMED:
        begin = begin._replace(output=default_output(job.name))
    return begin._replace(run=begin.run or new_run())


def _fresh(asked: StartRequest) -> StartDecision:
    """Returns the decision to begin at the start."""
    output = UNNAMED if asked.output is None else checked_name(asked.output)
    temporary = asked.temporary or asked.output is None
    return StartDecision(output, overwrite=asked.force or asked.output is None, temporary=temporary)


def _found(name: str, job: Tables, asked: StartRequest) -> tuple[StartDecision, SavedState | None]:
    """Returns the decision according to the files, and the checkpoint if the run begins with one."""
    begin, state = (_fresh(asked), None) if asked.resume is False else _resumed(name, job, asked)
    if asked.origin is None or begin.checkpoint is not None or begin.finished:
        return begin, state
    return _branched(name, job, begin, asked.origin)


def _resumed(name: str, job: Tables, asked: StartRequest) -> tuple[StartDecision, SavedState | None]:
    """Returns the decision to resume the run from its own checkpoint, or to begin at the start if there is none yet."""
    output, wanted = None if asked.output is None else checked_name(asked.output), asked.resume
    if not isinstance(wanted, Path) and output is None:
        raise ConfigError("--resume needs a result file; use --output FILE.h5 or --resume FILE.h5")
    path = source(wanted) if isinstance(wanted, Path) else checkpoint.path_of(output or Path())
    output = output or checkpoint.results_of(path)
    if wanted is True and not path.exists():
        path = checkpoint.previous_of(path)  # the run was killed between two names
        if not path.exists():
            return _without_checkpoint(name, job, output, asked), None
    state = read_own(path)
    position, found = state.position, compare(state.job, job)
    check_same(state, found)
    if is_over(state, found):
        if output != checkpoint.results_of(path):
            raise ConfigError(f"{path}: belongs to a finished run; {onwards(state)}")
        return _nothing_left(output, asked), None
    _check_longer(state, found)
    same = output == checkpoint.results_of(path)
    begin = StartDecision(
        output,
        path,
        position,
        found.decided,
        overwrite=asked.force,
        text=f"{name}: continues from {path}: update {position.timestamp}, epoch {position.epoch + 1}",
        run=str(state.attributes.get("run", "")) if same else "",  # with rows of its own it is another run
        temporary=bool(state.attributes.get("temporary", False)),
        fingerprints=state.attributes.get("data_fingerprints", {}),
    )
    return begin, state


def _without_checkpoint(name: str, job: Tables, output: Path, asked: StartRequest) -> StartDecision:
    """Returns the decision to begin at the start, because there is no checkpoint yet."""
    if finished(output):
        return _nothing_left(output, asked)
    if output.exists() and not replaceable(output, job):
        check_output(output, asked.force)
    text = f"{output}: has no checkpoint yet; {name} starts from the beginning"
    return StartDecision(output, overwrite=True, text=text, temporary=asked.temporary)


def _nothing_left(output: Path, asked: StartRequest) -> StartDecision:
    text = f"{output}: is finished; nothing is left to do"
    return StartDecision(output, finished=True, text=text, temporary=asked.temporary or asked.output is None)


def _branched(name: str, job: Tables, begin: StartDecision, origin: Path) -> tuple[StartDecision, SavedState]:
    """Returns the decision to begin with another run's complete checkpoint."""
    if origin.suffix != checkpoint.SUFFIX:
        raise ConfigError(
            f"--from {origin}: a result file has no optimiser state; use a checkpoint FILE.ckpt, or --carry weights"
        )
    state = read_own(origin)
    results, position = checkpoint.results_of(origin), state.position
    if not results.is_file():
        raise CheckpointError(f"{origin}: its result file {results} is missing; restore it, or use --carry weights")
    if results.resolve() == begin.output.resolve():
        raise ConfigError(f"--from {origin}: belongs to {begin.output} itself; use another --output, or rudra resume")
    if begin.output != UNNAMED:
        check_output(begin.output, begin.overwrite)
    found = compare(state.job, job)
    if found.unfit is not None:
        key, then, now = found.unfit
        raise CheckpointError(
            f"{origin}: does not fit: {key} was {then}, but is {now} in this job; use {then}, or --carry weights"
        )
    _check_longer(state, found)
    other = ""
    if found.still_different:
        key, then, _ = found.still_different[0]
        other = f"up to update {position.timestamp} it is {origin.name} of another job, of which {key} was {then}"
    begin = begin._replace(
        checkpoint=origin,
        position=position,
        decided=found.decided,
        replanned=other,
        branched=True,
        text=f"{name}: begins with {origin}: update {position.timestamp}, epoch {position.epoch + 1}",
        fingerprints=state.attributes.get("data_fingerprints", {}),
    )
    return begin, state


def _checked(begin: StartDecision, state: SavedState, job: Job) -> StartDecision:
    """Checks a checkpoint against the job that continues from it, and adds the differences of the schedules.

    Raises:
        CheckpointError: The protocol does not accept its state from the checkpoint.
    """
    position, now = state.position, job.at(state.position.epoch)
    if position.protocol_state and position.protocol == named(now.protocol.name):
        try:
            restored(now.make_protocol(), position.protocol_state)
        except ValueError as error:
            raise CheckpointError(f"{begin.checkpoint}: protocol {position.protocol}: {error}") from None
    if begin.replanned or not (replanned := _replanned(state, job)):
        return begin
    text = begin.text if begin.branched else f"{begin.text}; {replanned}"
    return begin._replace(replanned=replanned, text=text)


def _check_longer(state: SavedState, found: JobComparison) -> None:
    """Raises ConfigError if no training is left after a checkpoint."""
    if (epochs := found.epochs) <= state.position.epoch:
        raise ConfigError(
            f"[training] epochs = {epochs} is not supported with {state.path}, which is at epoch "
            f"{state.position.epoch}; use more epochs"
        )


def _replanned(state: SavedState, job: Job) -> str:
    """Returns the differences between past learning rates and those of this job, if it had had its present length from
    the start."""
    epochs = decisive(state.job)["training"]["epochs"]
    from rudra.prepare.phases import phases_of  # and torch, which who starts ranks does without

    if epochs == job.training.epochs or job.optimizer.schedule in ("step", "plateau"):
        return ""
    with open_results(checkpoint.results_of(state.path)) as results:
        samples = int(results.attributes["training_samples"])
    plan = job.plan()
    planned = [phases_of(long, plan, samples) for long in (job.with_(training={"epochs": epochs}), job)]
    position = state.position
    by_update = job.optimizer.schedule_every == "update"
    done = position.timestamp if by_update else -(-position.samples // samples)
    then, now = ([phase_at(phases, i).schedule.rate(i, math.inf, i) for i in range(done)] for phases in planned)
    if then == now:
        return ""
    text = f"schedule {job.optimizer.schedule!s} differs between {epochs} and {job.training.epochs} epochs"
    return f"{text}: the rate is {then[-1]:.4g} here, and would be {now[-1]:.4g} if all had been planned at first"


def check_same(state: SavedState, found: JobComparison) -> None:
    """Raises CheckpointError if a checkpoint belongs to another job than the compared one."""
    if found.differences:
        key, then, now = found.differences[0]
        text = f"{state.path}: belongs to another job: {key} was {then}, but is {now} now"
        raise CheckpointError(f"{text}; use another --output, or rudra resume")


def is_over(state: SavedState, found: JobComparison) -> bool:
    """Returns whether a run is finished and its length is unchanged."""
    return found.as_long and finished(checkpoint.results_of(state.path))


def onwards(state: SavedState) -> str:
    """Returns a text with other uses of the checkpoint of a finished run."""
    if checkpoint.is_kept(state.path):
        return f"to begin another run there: rudra run JOB --from {state.path} --carry all"
    return f"to train further, set training.epochs above {state.position.epoch}"
