"""Going on with a run that ended early: from its checkpoint, under the same name, with the same rows."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from protocols import restored
from rudra.core.digest import digest_of, sample
from rudra.core.phases import phase_at
from rudra.core.training_state import BEGINNING, TrainingState
from rudra.errors import CheckpointError, ConfigError, ResultsError
from rudra.files import check_output
from rudra.job.job import Job
from rudra.job.jobfiles import parsed
from rudra.job.table import named
from rudra.results import checkpoint
from rudra.results.checkpoint import SavedState
from rudra.results.reader import Results, open_results
from rudra.results.writer import checked_name
from rudra.trust import admit, new_run

_INDIFFERENT = ("name", "simulation", "fault_tolerance", "results", "hooks", "study")
"""Parts of a job that do not change the weights."""

DECISIVE_LISTS = ("changes",)
"""Lists of tables that change the weights; each is compared as a whole."""

DECISIVE = tuple(name for name in Job.model_fields if name not in (*_INDIFFERENT, *DECISIVE_LISTS))
"""Tables that change the weights, except for the keys of `RESUME_MAY_CHANGE`."""

RESUME_MAY_CHANGE = (
    "data.path",
    "training.warm_start",
    "training.evaluate",
    "training.evaluate_training_set",
    "training.evaluation_batch_size",
    "cluster.learners_per_rank",
    "cluster.node_memory",
)

LENGTH = (
    "training.epochs",
    "training.target",
    "training.target_window",
    "training.stop_at_target",
    "training.patience",
)
"""These decide how long it trains, and may change, too."""

UNUSED = ("name", "simulation", "study")
"""What a run that goes on takes nothing from."""


class StartDecision(NamedTuple):
    """What `--resume` comes to.

    Attributes:
        output: result file.
        checkpoint: to go on from; None: begin.
        position: where.
        decided: keys that the checkpoint decides, by table.
        overwrite: whether the result file may be replaced.
        finished: there is nothing left to do.
        replanned: what would have been otherwise so far, had it all been this job's; often nothing.
        branched: the checkpoint is another run's, of which this one has the rows up to there.
        text: what to tell the user of it.
        run: identity of the run.
        temporary: nobody named the result file, so that the run's last checkpoint is removed when it finishes.
        fingerprints: of the data so far, as `rudra.data.fingerprint.plain` gives them.
    """

    output: Path
    checkpoint: Path | None = None
    position: TrainingState = BEGINNING
    decided: dict[str, Any] | None = None
    overwrite: bool = False
    finished: bool = False
    replanned: str = ""
    branched: bool = False
    text: str = ""
    run: str = ""
    temporary: bool = False
    fingerprints: Mapping[str, Any] = {}


def decide(
    job: Job,
    output: Path | None,
    wanted: Path | bool,
    *,
    force: bool,
    named: Callable[[], Path],
    origin: Path | None = None,
    temporary: bool = False,
) -> StartDecision:
    """Where a run begins.

    Args:
        job: what to run.
        output: result file, if the user named one.
        wanted: a checkpoint or result file to go on from; True: that of `output`, if there is one.
        force: an existing result file may be replaced.
        named: reserves a name for a result file, with an empty file that the run may replace.
        origin: a checkpoint of another run with which this one begins, where it does not go on.
        temporary: nobody named `output`, as if it were None.

    Raises:
        RudraError: the checkpoint is missing, damaged, or of another job; or `output` exists and may not be replaced.
    """
    found = _decide(job, output, wanted, force, named)
    if found.checkpoint is None:
        found = found._replace(temporary=temporary or output is None)
    if origin is not None and found.checkpoint is None and not found.finished:
        found = _branched(job, found, origin)
    return found._replace(run=found.run or new_run())


def _branched(job: Job, begin: StartDecision, origin: Path) -> StartDecision:
    """Begins a run with all of another one's checkpoint, instead of at the start."""
    if origin.suffix != checkpoint.SUFFIX:
        raise ConfigError(
            f"--from {origin}: a result file has no optimiser state; valid with --carry all: a checkpoint, FILE.ckpt"
        )
    state = _read(origin)
    results, position = checkpoint.results_of(origin), state.position
    if not results.is_file():
        raise CheckpointError(f"{origin}: {results} is not there, whose rows are carried, too")
    if results.resolve() == begin.output.resolve():
        raise ConfigError(f"--from {origin}: is of {begin.output} itself; give another --output, or use rudra resume")
    check_output(begin.output, begin.overwrite)
    if unfit := _unfit(state.job, job):
        key, then, now = unfit
        raise CheckpointError(
            f"{origin}: does not fit: {key} was {then}, and is {now} in this job; valid: the same, or --carry weights"
        )
    _check_longer(job, state)
    decided = _decided(state, job)
    text = f"{job.name}: begins with {origin}: update {position.timestamp}, epoch {position.epoch + 1}"
    fitting = job.with_(**decided)
    _check_protocol(state, fitting)
    other = ""
    if differences := _differences(state.job, fitting):
        other = f"up to update {position.timestamp} it is {origin.name} of another job, of which {differences[0][0]}"
        other += f" was {differences[0][1]}"
    replanned = other or _replanned(state, fitting)
    about: dict[str, Any] = {"overwrite": begin.overwrite, "replanned": replanned, "branched": True, "text": text}
    about["fingerprints"] = state.attributes.get("data_fingerprints", {})
    return StartDecision(begin.output, origin, position, decided, **about, temporary=begin.temporary)


def _unfit(then: Mapping[str, Any], job: Job) -> tuple[str, Any, Any] | None:
    """A key of a job for which a checkpoint of another one cannot be used whole: its name, value then, value now."""
    now, ran = json.loads(job.to_json()), decisive(then)
    learners = now["cluster"]["learners"]
    places = [(table, key) for table in ("model", "data") for key in now[table] if key != "path"]
    places += [("optimizer", key) for key in ("name", "momentum_form", "options", "groups")]
    for table, key in places:
        if now[table][key] != ran[table][key]:
            return f"{table}.{key}", ran[table][key], now[table][key]
    if learners not in (None, ran["cluster"]["learners"]):
        return "cluster.learners", ran["cluster"]["learners"], learners
    momenta = ran["optimizer"]["momentum"], now["optimizer"]["momentum"]
    return None if bool(momenta[0]) == bool(momenta[1]) else ("optimizer.momentum", *momenta)


def _check_longer(job: Job, state: SavedState) -> None:
    """Raises ConfigError where nothing is left to train from a checkpoint on."""
    if job.training.epochs <= state.position.epoch:
        raise ConfigError(
            f"[training] epochs = {job.training.epochs}: {state.path} is at epoch {state.position.epoch} already; "
            "valid: more than that"
        )


def _check_protocol(state: SavedState, job: Job) -> None:
    """Raises CheckpointError where the protocol does not take the state that the checkpoint has of it."""
    position, now = state.position, job.at(state.position.epoch)
    if position.protocol_state and position.protocol == named(now.protocol.name):
        try:
            restored(now.make_protocol(), position.protocol_state)
        except ValueError as error:
            raise CheckpointError(f"{state.path}: protocol {position.protocol}: {error}") from None


def _decide(
    job: Job, output: Path | None, wanted: Path | bool, force: bool, named: Callable[[], Path]
) -> StartDecision:
    output = None if output is None else checked_name(output)
    if wanted is False:
        return StartDecision(output or named(), overwrite=force or output is None)
    if wanted is True and output is None:
        raise ConfigError("--resume goes on with a result file: say which, by --output FILE.h5 or --resume FILE.h5")
    path = source(wanted) if isinstance(wanted, Path) else checkpoint.path_of(output or Path())
    output = output or checkpoint.results_of(path)
    if wanted is True and not path.exists() and not checkpoint.previous_of(path).exists():
        if finished(output):
            return StartDecision(output, finished=True, text=f"{output}: is finished; nothing is left to do")
        if output.exists() and not replaceable(output, job):
            check_output(output, force)
        return StartDecision(
            output, overwrite=True, text=f"{output}: has no checkpoint yet; {job.name} starts from the beginning"
        )
    if wanted is True and not path.exists():  # the run was killed between two names
        path = checkpoint.previous_of(path)
    state = _read(path)
    position, decided = state.position, fitted(state, job)
    _check_protocol(state, job.with_(**decided))
    if _is_over(state, job):
        if output != checkpoint.results_of(path):
            raise ConfigError(f"{path}: is of a finished run; {_onwards(state)}")
        return StartDecision(output, finished=True, text=f"{output}: is finished; nothing is left to do")
    _check_longer(job, state)
    text = f"{job.name}: goes on from {path}: update {position.timestamp}, epoch {position.epoch + 1}"
    replanned = _replanned(state, job.with_(**decided))
    text += f"; {replanned}" if replanned else ""
    same = output == checkpoint.results_of(path)
    run = str(state.attributes.get("run", "")) if same else ""  # with rows of its own it is another run
    temporary = bool(state.attributes.get("temporary", False))
    about: dict[str, Any] = {"overwrite": force, "replanned": replanned, "text": text, "temporary": temporary}
    about["fingerprints"] = state.attributes.get("data_fingerprints", {})
    return StartDecision(output, path, position, decided, **about, run=run)


def _read(path: Path) -> SavedState:
    """A checkpoint, if it is of the run whose result file is beside it.

    Raises:
        CheckpointError: it is missing, damaged, or of another run.
    """
    state, tensors = checkpoint.read(path)
    beside = checkpoint.results_of(path)
    if beside.is_file():
        with open_results(beside) as results:
            if reason := _foreign(state, tensors.get("weights"), results):
                valid = "valid: the checkpoint that this run wrote"
                raise CheckpointError(f"{path}: is of another run than {beside}: {reason}; {valid}")
    return state


def _foreign(state: SavedState, weights: NDArray[np.float32] | None, results: Results) -> str:
    """Why a checkpoint is not of the run of a result file; empty if it is, as far as the two tell."""
    runs = state.attributes.get("run"), results.attributes.get("run")
    if all(runs):
        return "" if runs[0] == runs[1] else f"their identities are {str(runs[0])[:8]}… and {str(runs[1])[:8]}…"
    then, now = decisive(state.job), decisive(results.job)
    for table, keys in then.items():
        for key, value in keys.items():
            name = f"{table}.{key}"
            if value != now[table].get(key) and name not in {*RESUME_MAY_CHANGE, *LENGTH}:
                return f"{name} is {value} in the checkpoint and {now[table].get(key)} in the result file"
    return _different_weights(state, weights, results)


def _different_weights(state: SavedState, weights: NDArray[np.float32] | None, results: Results) -> str:
    """Why a checkpoint is not of a result file by its weights; empty if it may be."""
    update, digest = state.position.timestamp, 0
    for piece in results.pieces("updates"):
        digest = int(next(iter(piece["digest"][piece["timestamp"] == update]), digest))
    if weights is None or not digest or digest == digest_of(weights[sample(update, len(weights))].tobytes()):
        return ""
    plan = results.plan()
    if state.job.get("changes") or plan.parted or plan.window or plan.averaging:  # other digests
        return ""
    return f"the weights of update {update} differ"


def source(given: Path) -> Path:
    """The checkpoint that a user means by a checkpoint or a result file."""
    return given if given.suffix == checkpoint.SUFFIX else checkpoint.path_of(given)


def finished(output: Path) -> bool:
    """Whether a result file holds a finished run; an empty one, of a reserved name, does not."""
    if not output.is_file() or not output.stat().st_size:
        return False
    with open_results(output) as results:
        return results.status == "finished"


def replaceable(output: Path, job: Job) -> bool:
    """Whether a result file is empty, or is of this job and ended before its first checkpoint."""
    try:
        if output.is_file() and not output.stat().st_size:
            return True
        with open_results(output) as results:
            return results.status != "finished" and not _differences(results.job, job)
    except ResultsError:
        return False


def resumable(given: Path, overrides: Sequence[str] = (), *, trust: bool = False) -> tuple[Job, Path, Path]:
    """The job, the checkpoint and the result file of a run that is to go on.

    Args:
        given: its result file, or a checkpoint of it.
        overrides: texts `table.key=value`; keys that decide how long it trains, or nothing.
        trust: import the code that the checkpoint names, whoever wrote it.

    Raises:
        TrustError: another user's checkpoint names code.
        RudraError: there is no whole checkpoint; a change would do nothing, or too much; or it is finished.
    """
    path = source(given)
    output = checkpoint.results_of(path)
    if given != path and not path.exists() and finished(given):
        with open_results(given) as results:
            simulated = results.attributes["driver"] == "simulation"
        why = "a simulation leaves none" if simulated else "it was removed, or results.checkpoint_every = 'never'"
        why += "" if simulated else "; a run without --output removes its own"
        raise ConfigError(f"{given}: is finished, and there is no checkpoint to go on from: {why}")
    state = _read(path)
    job = job_of(state, overrides, trust=trust)
    valid = f"valid: {', '.join((*LENGTH, *RESUME_MAY_CHANGE))}, and the tables fault_tolerance and results"
    different = {key: then for key, then, _ in _differences(state.job, job)}
    for override in overrides:
        key, table = parsed(override).key, override.partition(".")[0]
        if table in UNUSED:
            raise ConfigError(f"--set {override}: a resumed run takes no change of {table}; {valid}")
        for decisive_key, then in different.items():
            if f"{key}.".startswith(f"{decisive_key}."):
                text = f"--set {override}: changes what the run computes, and was {then} so far"
                raise ConfigError(f"{text}; {valid}")
    if _is_over(state, job):
        raise ConfigError(f"{given}: is finished; {_onwards(state)}")
    return job, path, output


def _onwards(state: SavedState) -> str:
    """What else there is to be done with a checkpoint of a finished run."""
    if checkpoint.is_kept(state.path):
        return f"to begin another run there: rudra run JOB --from {state.path} --carry all"
    return f"to train further, set training.epochs above {state.position.epoch}"


def _is_over(state: SavedState, job: Job) -> bool:
    """Whether a run is finished, and how long it trains is as it was."""
    if not finished(checkpoint.results_of(state.path)):
        return False
    now, then = json.loads(job.to_json())["training"], decisive(state.job)["training"]
    return all(now[key] == then[key] for _, key in (name.split(".") for name in LENGTH))


def _replanned(state: SavedState, job: Job) -> str:
    """What a schedule would have made otherwise of the rates so far, had the job always been as long."""
    epochs = decisive(state.job)["training"]["epochs"]
    from rudra.compute.schedule import phases_of  # and torch, which who starts ranks does without

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


def job_of(state: SavedState, overrides: Sequence[str] = (), *, trust: bool = False) -> Job:
    """The job that a checkpoint holds, changed as in `Job.load`.

    Raises:
        ConfigError: it was made of Python objects, which no file holds.
        TrustError: another user's checkpoint names code, and `trust` is not set.
    """
    if given := state.attributes.get("python_objects"):
        raise ConfigError(
            f"{state.path}: {given} was given as a Python object, which a file cannot hold; from Python, "
            "rudra.run(job, output=…, resume=True) takes the job that has it"
        )
    admit(state.path, state.signed_job, state.job, state.attributes, trust=trust)
    return Job.of(state.path, state.job, [parsed(override) for override in overrides])


def fitted(state: SavedState, job: Job) -> dict[str, Any]:
    """What the checkpoint decides of a job, by table: what bits depend on, but no device or layer that the job names.

    Raises:
        CheckpointError: it is of another job.
    """
    if differences := _differences(state.job, job):
        key, then, now = differences[0]
        text = f"{state.path}: is of another job: {key} was {then}, and is {now} now"
        raise CheckpointError(f"{text}; give another --output, or the job of the checkpoint (rudra resume)")
    return _decided(state, job)


def _decided(state: SavedState, job: Job) -> dict[str, Any]:
    keys = ["learners", "threads_per_rank"]
    keys += [key for key in ("device", "shares") if getattr(job.cluster, key) == "auto"]
    then = decisive(state.job)
    found: dict[str, Any] = {"cluster": {key: then["cluster"][key] for key in keys}}
    if job.placement.by_rule:
        found["placement"] = {"cut": then["placement"]["cut"]}
    if job.training.gradients == "auto":
        found["training"] = {"gradients": then["training"]["gradients"]}
    return found


def decisive(job: Mapping[str, Any]) -> dict[str, Any]:
    """The `DECISIVE` tables of a job that a file holds; a key that is younger than the file has its default."""
    whole = completed(job)
    return {table: whole[table] for table in DECISIVE}


def completed(job: Mapping[str, Any]) -> dict[str, Any]:
    """Adds the defaults of keys that are younger than the file to the tables of its job."""
    return _with_defaults(job, json.loads(Job().to_json()))


def _with_defaults(keys: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    inner = {
        key: _with_defaults(keys[key], default)
        for key, default in defaults.items()
        if isinstance(default, Mapping) and default and isinstance(keys.get(key), Mapping)
    }
    return {**defaults, **keys, **inner}


def _differences(then: Mapping[str, Any], job: Job) -> list[tuple[str, Any, Any]]:
    """Decisive keys that a job has otherwise than a run: key, value then, value now."""
    now, ran = json.loads(job.to_json()), decisive(then)
    found = []
    for table in DECISIVE:
        for key, value in now[table].items():
            name, before = f"{table}.{key}", ran[table][key]
            measured = key == "shares" and value == "auto" and before  # then, whatever they came to
            open_ = table == "cluster" and (value is None or key == "device" or measured)
            chosen = name == "placement.cut" and job.placement.by_rule  # then, whichever layer or none
            chosen |= name == "training.gradients" and value == "auto"
            if value != before and name not in {*RESUME_MAY_CHANGE, *LENGTH} and not open_ and not chosen:
                found.append((name, before, value))
    found += [(key, then.get(key, []), now[key]) for key in DECISIVE_LISTS if now[key] != then.get(key, [])]
    return found
