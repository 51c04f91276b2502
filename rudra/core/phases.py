"""Phases of a run: job, role assignment and learning rates between two changes of its job."""

from itertools import takewhile
from typing import NamedTuple

from rudra.core.schedule import Schedule
from rudra.core.training_state import TrainingState
from rudra.job.boundary import Boundary
from rudra.job.job import Job
from topologies import Plan


class Phase(NamedTuple):
    """Phase of a run.

    Attributes:
        start: Boundary that begins the phase. Until all earlier phases have begun, it waits.
        job: Job of this phase, without changes.
        plan: Role assignment. All phases have the same roles on the same ranks.
        schedule: Learning rates before modulation.
        text: Description of the changes.
    """

    start: Boundary
    job: Job
    plan: Plan
    schedule: Schedule
    text: str = ""


Phases = tuple[Phase, ...]
"""All phases of a run, in order."""


def phases_begun(phases: Phases, position: TrainingState) -> Phases:
    """Returns the phases of a run that have begun at a position. The last of them is the present phase."""
    return tuple(takewhile(lambda phase: phase.start.is_reached(position.epoch, position.timestamp), phases))


def phase_at(phases: Phases, position: TrainingState) -> Phase:
    """Returns the phase of a run at a position."""
    return phases_begun(phases, position)[-1]
