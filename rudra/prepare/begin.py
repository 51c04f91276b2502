"""State that the roles of a run begin with: of its own checkpoint, or of another run's. For both drivers."""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import Protocol

from msgspec import structs

from rudra.compute.carried import carried_state
from rudra.compute.executor import Executor
from rudra.compute.owners import OwnerExecutor
from rudra.core.decisions import MeasuredBanks, from_events, measurements
from rudra.core.hooks import RoleHooks
from rudra.core.training_state import TrainingState
from rudra.data.fingerprint import Fingerprint, from_plain
from rudra.errors import CheckpointError
from rudra.job.job import Job
from rudra.log import log
from rudra.prepare.branch import Takeover, position_for, takeover_of
from rudra.prepare.start import StartDecision
from rudra.results import checkpoint
from rudra.results.carry import Carried, carried, moved, started_with, uncarried
from rudra.results.reader import open_results
from rudra.results.summary import tests
from rudra.results.warm_start import first_difference
from topologies import Plan


class Recalling(Protocol):
    """Statistics server that knows earlier evaluations."""

    @property
    def split(self) -> str: ...
    def recall(
        self,
        tests: Mapping[int, Mapping[str, float | None]],
        kept: Collection[int],
        decisions: Sequence[str],
        measured: Sequence[MeasuredBanks],
    ) -> None: ...


def first_position(start: StartDecision, job: Job, plan: Plan) -> TrainingState:
    """Returns the training state that all roles begin with.

    Args:
        start: Beginning of the run.
        job: Resolved job.
        plan: Role assignment.
    """
    if not start.branched or start.same_job:
        return start.position
    position = structs.replace(start.position, decided=())
    return position_for(position, *_part_at(position, job, plan))


def _part_at(position: TrainingState, job: Job, plan: Plan) -> tuple[Job, Plan]:
    """Returns the job and the plan of the part of a run that contains a position."""
    job = job.with_decided(position.in_effect)
    begun = takewhile(lambda part: part[0].is_reached(position.epoch, position.timestamp), job.parts(plan))
    *_, (_, now, its_plan) = begun
    return now, its_plan


def takeover(start: StartDecision, job: Job, plan: Plan) -> Takeover:
    """Returns how the roles of a run take over the state of another run's checkpoint.

    Args:
        start: Beginning of the run.
        job: Resolved job.
        plan: Role assignment.
    """
    if not start.branched:
        return Takeover(adapted=False)
    position = start.position if start.same_job else structs.replace(start.position, decided=())
    about = _part_at(position, job, plan)
    same = {"same_cut": start.cut == job.placement.cut, "same_job": start.same_job}
    found = takeover_of(start.names, *about, averages=start.averages, **same)
    if start.keeps_protocol:
        return found
    text = f"the state of protocol {start.position.protocol} is left out"
    return found._replace(left_out=(*found.left_out, text))


def say_lost(start: StartDecision, job: Job, plan: Plan) -> None:
    """Logs a warning about state of the checkpoint that the run starts without."""
    if lost := takeover(start, job, plan).lost:
        log.warning(f"{job.name}: starts with {start.checkpoint}, but {lost}")


def check_data(start: StartDecision, prints: Mapping[str, Fingerprint]) -> None:
    """Raises CheckpointError if data differ from the data of the checkpoint.

    Args:
        start: Beginning of the run.
        prints: Fingerprints of the data by split.
    """
    for split, then in from_plain(start.fingerprints).items():
        if split in prints and (what := prints[split].difference(then)):
            text = f"{start.checkpoint}: [data] the {split} set has changed since: {what}"
            raise CheckpointError(f"{text}; {SAME_DATA}")


SAME_DATA = "valid: the same order in every process, not the order of a set of texts or of an unsorted directory"
"""Remedy if data differ."""


def restore(executors: Iterable[Executor], start: StartDecision, job: Job, plan: Plan) -> None:
    """Gives the state of the checkpoint to the owners of weights. Call it after their `prepare`.

    Args:
        executors: Executors of some roles.
        start: Beginning of the run.
        job: Resolved job.
        plan: Role assignment.

    Raises:
        CheckpointError: The checkpoint has changed since the decision, belongs to another model or optimiser, or has
            state without a place in the run that `--carry all` wants.
    """
    owners = [executor for executor in executors if isinstance(executor, OwnerExecutor)]
    if start.checkpoint is None or not owners:
        return
    state, tensors = checkpoint.read(start.checkpoint)
    if state.position != start.position:
        raise CheckpointError(f"{state.path}: changed while this run started: is another run still writing it?")
    if start.branched and (other := first_difference(state.attributes.get("layout"), owners[0].layout)):
        raise CheckpointError(f"{state.path}: holds another model: {other}; use a checkpoint of this model")
    found = takeover(start, job, plan)
    if start.rows and found.left_out:
        raise CheckpointError(f"{state.path}: --carry all is not possible: {found.left_out[0]}; use --carry state")
    for owner in owners:
        if found.adapted:
            owner.begin_with(carried_state(tensors, job.optimizer, owner.layout, averages=start.averages))
        else:
            owner.restore(tensors)


@contextmanager
def first_rows(start: StartDecision, job: Job, plan: Plan) -> Iterator[Carried | None]:
    """Yields the rows that begin the result file, or None if the run begins at the start.

    Args:
        start: Beginning of the run.
        job: Resolved job.
        plan: Role assignment.
    """
    if start.checkpoint is None:
        yield None
        return
    learners, lost = plan.learner_numbers, takeover(start, job, plan).lost
    if not start.rows:
        yield uncarried(start.position, learners, started_with(start.position, start.checkpoint, lost))
        return
    with open_results(checkpoint.results_of(start.checkpoint)) as results:
        why = start.replanned or moved(results.plan(), job, plan)
        yield carried(results, start.position, why, start.branched, lost, learners, start.same_job)


def recall(start: StartDecision, statistics: Recalling, hooks: RoleHooks | None) -> None:
    """Passes what is known of earlier epochs to the statistics server, and to the user's functions that it calls.

    The statistics server decides by their evaluations about targets and the best epoch.

    Args:
        start: Beginning of the run.
        statistics: Machine of the statistics server.
        hooks: Hooks of the statistics server.
    """
    if start.checkpoint is None or not start.rows:
        return
    with open_results(checkpoint.results_of(start.checkpoint)) as results:
        events, epochs, position = results.events, results.epochs, start.position
        earlier = events[events["timestamp"] <= position.timestamp]
        earlier = earlier if start.same_job else earlier[:0]
        decisions = [*map(json.dumps, from_events(earlier, b"decision"))]
        evaluations = tests(results, statistics.split, position.epoch)
        statistics.recall(evaluations, results.kept_epochs, decisions, measurements(earlier))
        if hooks is not None:
            hooks.recall(epochs[epochs["epoch"] <= position.epoch])
