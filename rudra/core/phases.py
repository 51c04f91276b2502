"""Phases of a run between the changes of its job: role assignment, learning rates and rules of each phase."""

from typing import NamedTuple

from rudra.core.schedule import Schedule
from rudra.job.job import Job
from topologies import Plan


class Phase(NamedTuple):
    """Phase of a run.

    Attributes:
        at_epoch: Number of complete epochs at its beginning. 0: the start of the run.
        job: Job of this phase, without changes.
        plan: Role assignment. All phases have the same roles on the same ranks.
        schedule: Learning rates before modulation.
        text: Description of the changes.
    """

    at_epoch: int
    job: Job
    plan: Plan
    schedule: Schedule
    text: str = ""


Phases = tuple[Phase, ...]
"""All phases of a run, in order."""


def phase_at(phases: Phases, epoch: int) -> Phase:
    """Returns the phase of a run after a number of complete epochs."""
    return next(phase for phase in reversed(phases) if phase.at_epoch <= epoch)
