"""Beginning of a run: the start, a checkpoint of its own, or another run's complete checkpoint."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from protocols import restored
from rudra.core.buffer_names import REPLICA
from rudra.core.training_state import BEGINNING, TrainingState
from rudra.errors import CheckpointError, ConfigError
from rudra.files import check_output
from rudra.job.job import Job
from rudra.job.table import named
from rudra.results import checkpoint
from rudra.results.checkpoint import SavedState
from rudra.results.identity import (
    JobComparison,
    check_ranks_ran,
    compare,
    completed,
    decisive,
    finished,
    read_own,
    replaceable,
    source,
    tables_of,
)
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
        rows: Whether this run also begins with the recorded rows of `origin`.
        weights: Checkpoint or result file of another run whose weights this run begins with.
        temporary: Whether Rudra chose `output`, as if it were None.
    """

    output: Path | None
    resume: Path | bool = False
    force: bool = False
    origin: Path | None = None
    rows: bool = True
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
        branched: Whether the checkpoint belongs to another run.
        same_job: Whether this job is the job of the checkpoint. Else changes that its run decided do not apply.
        rows: Whether this run begins with the rows that were recorded up to the checkpoint.
        averages: Whether the checkpoint belongs to a run that averages replicas.
        cut: Layer where the model of the checkpoint's run was cut, or None.
        names: Names of the checkpoint's tensors, if it belongs to another run.
        keeps_protocol: Whether the protocol accepts its state from the checkpoint.
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
    same_job: bool = True
    rows: bool = True
    averages: bool = False
    cut: Any = None
    names: tuple[str, ...] = ()
    keeps_protocol: bool = True
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
    begin = _fresh(asked) if asked.resume is False and asked.origin is None else _found(job, asked)
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


def _found(job: Job, asked: StartRequest) -> StartDecision:
    """Returns the decision according to the files: the checkpoint of the run itself comes before another run's."""
    begin, own = _own(asked)
    if begin.finished:
        return begin
    tables, path = tables_of(job), own or asked.origin
    if asked.resume is not False and own is None and begin.output.exists() and not replaceable(begin.output, tables):
        check_output(begin.output, asked.force)
    if path is None:
        return begin._replace(text=f"{begin.output}: has no checkpoint yet; {job.name} starts from the beginning")
    if own is None and path.suffix != checkpoint.SUFFIX:
        raise ConfigError(
            f"--from {path}: a result file has no optimiser state; use a checkpoint FILE.ckpt, or --carry weights"
        )
    state = read_own(path)
    found = compare(state.job, tables)
    if own is not None:
        begin = _resumed(begin, state, found, force=asked.force)
    else:
        begin = _branched(begin._replace(rows=asked.rows), state, found, job)
    return begin if begin.finished else _checked(begin, state, job.with_(**begin.decided))


def _own(asked: StartRequest) -> tuple[StartDecision, Path | None]:
    """Returns the decision without a checkpoint, and the checkpoint of the run itself if it has one to resume from."""
    begin, wanted = _fresh(asked), asked.resume
    if wanted is False:
        return begin, None
    if not isinstance(wanted, Path) and asked.output is None:
        raise ConfigError("--resume needs a result file; use --output FILE.h5 or --resume FILE.h5")
    path = source(wanted) if isinstance(wanted, Path) else checkpoint.path_of(begin.output)
    output = checkpoint.results_of(path) if asked.output is None else begin.output
    begin = begin._replace(output=output, overwrite=True)
    if wanted is True and not path.exists():
        path = checkpoint.previous_of(path)  # the run was killed between two names
        if not path.exists():
            return _nothing_left(begin) if finished(output) else begin, None
    return begin, path


def _nothing_left(begin: StartDecision) -> StartDecision:
    return begin._replace(finished=True, text=f"{begin.output}: is finished; nothing is left to do")


def _resumed(begin: StartDecision, state: SavedState, found: JobComparison, *, force: bool) -> StartDecision:
    """Returns the decision to resume the run from its own checkpoint."""
    path, position = state.path, state.position
    check_ranks_ran(path)
    same = begin.output == checkpoint.results_of(path)
    check_same(state, found)
    if is_over(state, found):
        if not same:
            raise ConfigError(f"{path}: belongs to a finished run; {onwards(state)}")
        return _nothing_left(begin)
    _check_longer(state, found)
    return begin._replace(
        checkpoint=path,
        position=position,
        decided=found.decided,
        overwrite=force,
        text=f"continues from {path}: update {position.timestamp}, epoch {position.epoch + 1}",
        run=str(state.attributes.get("run", "")) if same else "",  # with rows of its own it is another run
        temporary=bool(state.attributes.get("temporary", False)),
        fingerprints=state.attributes.get("data_fingerprints", {}),
    )


def _branched(begin: StartDecision, state: SavedState, found: JobComparison, job: Job) -> StartDecision:
    """Returns the decision to begin with another run's complete checkpoint."""
    origin, position = state.path, state.position
    results = checkpoint.results_of(origin)
    if begin.rows and not results.is_file():
        raise CheckpointError(f"{origin}: its result file {results} is missing; restore it, or use --carry state")
    if results.resolve() == begin.output.resolve():
        raise ConfigError(f"--from {origin}: belongs to {begin.output} itself; use another --output, or rudra resume")
    if begin.output != UNNAMED:
        check_output(begin.output, begin.overwrite)
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
    tables, decided = completed(state.job), found.decided
    if other and bool(tables["placement"]["cut"]) != bool(job.placement.cut):  # layers move, perhaps by a rule
        decided = {"cluster": decided["cluster"]}
    old = any(name.startswith(REPLICA) for name in state.names) or tables["protocol"]["name"] == "easgd"
    return begin._replace(
        checkpoint=origin,
        position=position,
        decided=decided,
        replanned=other,
        branched=True,
        same_job=not other,
        averages=bool(state.attributes.get("averages", old)),  # missing in older checkpoints
        cut=tables["placement"]["cut"],
        names=state.names,
        text=f"begins with {origin}: update {position.timestamp}, epoch {position.epoch + 1}",
        fingerprints=state.attributes.get("data_fingerprints", {}),
    )


def _check_longer(state: SavedState, found: JobComparison) -> None:
    """Raises ConfigError if no training is left after a checkpoint."""
    if (epochs := found.epochs) <= state.position.epoch:
        raise ConfigError(
            f"[training] epochs = {epochs} is not supported with {state.path}, which is at epoch "
            f"{state.position.epoch}; use more epochs"
        )


def _checked(begin: StartDecision, state: SavedState, job: Job) -> StartDecision:
    """Checks a checkpoint against the job that continues from it, and adds the differences of the schedules.

    Raises:
        CheckpointError: The protocol does not accept its state from the checkpoint.
    """
    begin, position = begin._replace(text=f"{job.name}: {begin.text}"), state.position
    now = job.with_decided(position.in_effect if begin.same_job else ()).at(position.epoch, position.timestamp)
    epochs = decisive(state.job)["training"]["epochs"]
    if position.protocol_state and position.protocol == named(now.protocol.name):
        try:
            restored(now.make_protocol(), position.protocol_state)
        except ValueError as error:
            if begin.branched:
                return begin._replace(keeps_protocol=False)
            raise CheckpointError(f"{begin.checkpoint}: protocol {position.protocol}: {error}") from None
    if (
        not begin.rows
        or begin.replanned
        or epochs == job.training.epochs
        or job.optimizer.schedule in ("step", "plateau")
    ):
        return begin
    from rudra.prepare.phases import replanned  # and torch, which a process that starts ranks does without

    with open_results(checkpoint.results_of(state.path)) as results:
        text = replanned(job, job.plan(), epochs, position, int(results.attributes["training_samples"]))
    if not text:
        return begin
    return begin._replace(replanned=text, text=begin.text if begin.branched else f"{begin.text}; {text}")


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
