"""Rows of an earlier run that start the result file of a resumed run or a branch."""

import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rudra.core.actions import TableName
from rudra.core.decisions import in_events, taken_effect
from rudra.core.messages import Rows
from rudra.core.records import EVENT, LEARNER, TIMES
from rudra.core.training_state import TrainingState
from rudra.errors import ResultsError
from rudra.job.job import Job
from rudra.results.reader import Results
from rudra.results.writer import NORMS_EVERY
from topologies import Plan

BEGINS_AT = "begins_at"
"""Attribute of a result file without the rows of earlier updates: number of these updates."""

KEPT = ("initial_weights_sha256", "started")
"""Attributes of the result file that a restart keeps. If the first part cannot be replayed, neither can the whole
run."""


class Carried(NamedTuple):
    """Initial content of a resumed run's result file.

    Attributes:
        rows: Rows of each table.
        weights: Numbers and weights of stored epochs.
        attributes: Attributes that are kept.
        learners: Totals of the learners, as far as rows contain them: `records.LEARNER`.
    """

    rows: dict[TableName, Iterable[Rows]]
    weights: Iterable[tuple[int, NDArray[np.float32]]]
    attributes: dict[str, Any]
    learners: Rows


def moved(before: Plan, job: Job, plan: Plan) -> str:
    """Returns why a resumed run cannot be replayed as a whole, or an empty string.

    Args:
        before: Plan of the earlier part.
        job: Resolved job.
        plan: Current plan.
    """
    nodes = ([of.roles[i].node for i in of.learners] for of in (before, plan))
    then, now = ([each.index(node) for node in each] for each in nodes)
    if then == now or all(its_plan.reduction != "nodes" for _, _, its_plan in job.parts(plan)):
        return ""
    return "reduction = 'nodes', and the restart placed learners on other nodes"


def uncarried(position: TrainingState, learners: int, text: str) -> Carried:
    """Returns the initial content of a result file that begins with another run's state, without its rows.

    Args:
        position: Training state of the checkpoint.
        learners: Number of learners of the run.
        text: Description of the checkpoint.
    """
    why = f"its earlier updates are not in this file: it {text}"
    attributes = {BEGINS_AT: position.timestamp, "replayable": False, "not_replayable": why}
    return Carried({"events": [_event(b"branch", position, text)]}, (), attributes, np.zeros(learners, LEARNER))


def started_with(position: TrainingState, path: Path, lost: str) -> str:
    """Returns a text about the checkpoint that a run began with, and the state that it began without."""
    return f"starts with update {position.timestamp} of {path.name}" + (f"; {lost}" if lost else "")


def _event(kind: bytes, position: TrainingState, text: str) -> Rows:
    about = (position.timestamp, position.applied, position.time_s, time.time())
    return np.array([(kind, -1, 0, *about, text.encode()[:512])], EVENT)


def carried(
    results: Results,
    position: TrainingState,
    replanned: str = "",
    branched: bool = False,
    lost: str = "",
    learners: int | None = None,
    same_job: bool = True,
) -> Carried:
    """Returns the rows of a run up to a checkpoint. They are read in pieces while the new file is written.

    Args:
        results: Results of the run, which must stay open until all rows are read.
        position: Training state of the checkpoint.
        replanned: Reason why the run cannot be replayed, or an empty string.
        branched: Whether another run continues from the rows.
        lost: State of the checkpoint that the other run starts without, as text. Empty: none.
        learners: Number of learners of the run that continues, by default as many as before.
        same_job: Whether the run that continues has the same job. Else changes that were decided do not apply.

    Raises:
        ResultsError: Rows are missing.
    """
    steps = np.array(position.steps)
    count = len(steps) if learners is None else learners
    totals = np.zeros(max(len(steps), count), LEARNER)
    before = int(results.attributes.get(BEGINS_AT, 0))
    kept, dropped = before, 0
    for piece in results.pieces("updates"):
        later = int((piece["timestamp"] > position.timestamp).sum())
        kept, dropped = kept + len(piece) - later, dropped + later
    if kept != position.timestamp:
        raise ResultsError(
            f"{results.path}: holds {kept - before} updates, but the checkpoint is of update {position.timestamp}"
        )

    def kept_steps(piece: Rows) -> Rows:
        step: NDArray[np.int64] = piece["step"]
        learner: NDArray[np.int32] = piece["learner"]
        return piece[step < steps[learner]]

    def minibatches() -> Iterator[Rows]:
        for piece in results.pieces("minibatches"):
            rows = kept_steps(piece)
            for name in TIMES:
                totals[name] += np.bincount(rows["learner"], rows[name], len(totals))
            yield rows[rows["learner"] < count]

    def gradients() -> Iterator[Rows]:
        for rows in upto("gradients", "update"):
            totals["samples"] += np.bincount(rows["learner"], rows["samples"], len(totals)).astype(np.int64)
            yield rows

    def upto(table: TableName, column: str = "timestamp", last: int = position.timestamp) -> Iterator[Rows]:
        for piece in results.pieces(table):
            yield piece[piece[column] <= last]

    def stages() -> Iterator[Rows]:
        for piece in map(kept_steps, results.pieces("stages")):
            yield piece[piece["learner"] < count]

    def events() -> Iterator[Rows]:
        left_out = [b"decided"]  # the position has what took effect
        left_out += [] if same_job else [b"decision", b"measured"]
        lowered = 0  # rate drops, of which those after the checkpoint will be recorded again
        for piece in upto("events"):
            piece = piece[~np.isin(piece["kind"], left_out)]
            plateau = piece["kind"] == b"plateau"
            yield piece[~plateau | (np.cumsum(plateau) + lowered <= len(position.lowered))]
            lowered += int(plateau.sum())
        for decided in position.in_effect if same_job else ():
            text = taken_effect(decided)
            yield in_events(b"decided", text, position.timestamp, position.applied, position.time_s)
        state = results.state
        ended = {"running": "was killed", "finished": "was finished"}.get(state["status"], state["status"])
        ended += f": {state['reason']}" if state["reason"] else ""
        text = f"resumes from the checkpoint of update {position.timestamp}; {dropped} updates after it are repeated"
        if not branched:
            yield _event(b"restart", position, f"{text}; it {ended}")
        else:
            yield _event(b"branch", position, started_with(position, results.path, lost))

    def gradient_norms() -> Iterator[Rows]:
        for piece in map(kept_steps, results.pieces("gradient_norms")):
            yield piece[piece["learner"] < count]

    rows: dict[TableName, Iterable[Rows]] = {
        "gradients": gradients(),
        "updates": upto("updates"),
        "minibatches": minibatches(),
        "epochs": upto("epochs"),
        "metrics": upto("metrics", "epoch", position.epoch),
        "events": events(),
        "averages": (rows[rows["learner"] < count] for rows in upto("averages")),
        "stages": stages(),
    }
    if results.has_norms:
        rows |= {"gradient_norms": gradient_norms(), "update_norms": upto("update_norms")}
    weights = ((epoch, results.weights_of(epoch)) for epoch in results.kept_epochs if epoch <= position.epoch)
    stay = KEPT if results.attributes["replayable"] else (*KEPT, "replayable", "not_replayable")
    attributes = {name: results.attributes[name] for name in stay}
    attributes |= {BEGINS_AT: before} if before else {}
    attributes |= {NORMS_EVERY: every} if (every := results.attributes.get(NORMS_EVERY)) else {}
    if replanned:
        attributes |= {"replayable": False, "not_replayable": replanned}
    return Carried(rows, weights, attributes, totals[:count])
