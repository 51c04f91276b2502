"""Where a run begins: at the start, at a checkpoint of its own, or with all of another run's checkpoint."""

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
"""In place of a result file whose name is still to be reserved."""


class StartRequest(NamedTuple):
    """What the user says of a run's beginning.

    Attributes:
        output: result file; None: no name is given.
        resume: checkpoint or result file to continue from; True: that of `output`, if there is one; False: none.
        force: whether an existing result file may be replaced.
        origin: checkpoint of another run, with all of which this one begins unless it continues.
        weights: checkpoint or result file of another run, with the weights of which this one begins.
        temporary: whether `output` was chosen by Rudra, as if it were None.
    """

    output: Path | None
    resume: Path | bool = False
    force: bool = False
    origin: Path | None = None
    weights: Path | None = None
    temporary: bool = False


class StartDecision(NamedTuple):
    """Where a run begins, and what follows from that.

    Attributes:
        output: result file.
        checkpoint: to continue from; None: the run begins.
        position: of the checkpoint.
        decided: keys whose values the checkpoint and the request decide.
        overwrite: whether the result file may be replaced.
        finished: whether nothing is left to do.
        replanned: what would have been different so far, had this job been the one that ran; often empty.
        branched: whether the checkpoint is another run's, of which this one has the rows up to there.
        text: what to tell the user.
        run: identity of the run.
        temporary: whether nobody named the result file, so that the last checkpoint is removed at the end of the run.
        fingerprints: of the data so far, as `rudra.data.fingerprint.plain` gives them.
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
    """Decides where a run begins.

    Args:
        job: as written.
        asked: what the user says of it. Without a name for the result file, one is reserved with an empty file, which
            `rudra.results.writer.remove_if_empty` removes again.

    Raises:
        RudraError: the checkpoint is missing, damaged, or of another job; or the result file exists and may not be
            replaced.
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
    """At the start."""
    output = UNNAMED if asked.output is None else checked_name(asked.output)
    temporary = asked.temporary or asked.output is None
    return StartDecision(output, overwrite=asked.force or asked.output is None, temporary=temporary)


def _found(name: str, job: Tables, asked: StartRequest) -> tuple[StartDecision, SavedState | None]:
    """Where the files say that a run begins; and its checkpoint, if it begins with one."""
    begin, state = (_fresh(asked), None) if asked.resume is False else _resumed(name, job, asked)
    if asked.origin is None or begin.checkpoint is not None or begin.finished:
        return begin, state
    return _branched(name, job, begin, asked.origin)


def _resumed(name: str, job: Tables, asked: StartRequest) -> tuple[StartDecision, SavedState | None]:
    """At a checkpoint of the run itself; at the start, where there is none yet."""
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
        text=f"{name}: goes on from {path}: update {position.timestamp}, epoch {position.epoch + 1}",
        run=str(state.attributes.get("run", "")) if same else "",  # with rows of its own it is another run
        temporary=bool(state.attributes.get("temporary", False)),
        fingerprints=state.attributes.get("data_fingerprints", {}),
    )
    return begin, state


def _without_checkpoint(name: str, job: Tables, output: Path, asked: StartRequest) -> StartDecision:
    """At the start, because there is no checkpoint yet."""
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
    """With all of another run's checkpoint."""
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
    """Checks a checkpoint against the job that continues from it, and says what that job would have planned otherwise.

    Raises:
        CheckpointError: the protocol does not take the state that the checkpoint has of it.
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
    """Raises ConfigError where nothing is left to train from a checkpoint on."""
    if (epochs := found.epochs) <= state.position.epoch:
        raise ConfigError(
            f"[training] epochs = {epochs} is not supported with {state.path}, which is at epoch "
            f"{state.position.epoch}; use more epochs"
        )


def _replanned(state: SavedState, job: Job) -> str:
    """Says what a schedule would have made otherwise of the rates so far, had the job always been as long."""
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
    """Raises CheckpointError where a checkpoint is of another job than the one that it was compared with."""
    if found.differences:
        key, then, now = found.differences[0]
        text = f"{state.path}: belongs to another job: {key} was {then}, but is {now} now"
        raise CheckpointError(f"{text}; use another --output, or rudra resume")


def is_over(state: SavedState, found: JobComparison) -> bool:
    """Whether a run is finished, and how long it trains is as it was."""
    return found.as_long and finished(checkpoint.results_of(state.path))


def onwards(state: SavedState) -> str:
    """Says what else can be done with a checkpoint of a finished run."""
    if checkpoint.is_kept(state.path):
        return f"to begin another run there: rudra run JOB --from {state.path} --carry all"
    return f"to train further, set training.epochs above {state.position.epoch}"
