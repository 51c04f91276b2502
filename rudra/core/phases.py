"""The parts of a run between the changes of its job: who is who in each, by which rates and rules."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from rudra.core.schedule import Schedule
from rudra.job.job import Job
from topologies import Plan


class Phase(NamedTuple):
    """A part of a run.

    Attributes:
        at_epoch: completed epochs from which it is; 0: from the start.
        job: of this part, without changes.
        plan: who is who; the same roles on the same ranks in all parts.
        schedule: the learning rates before modulation.
        text: what has changed.
    """

    at_epoch: int
    job: Job
    plan: Plan
    schedule: Schedule
    text: str = ""


Phases = tuple[Phase, ...]
"""All of a run, in order."""


def phase_at(phases: Phases, epoch: int) -> Phase:
    """The part that a run is in once so many epochs are complete."""
    return next(phase for phase in reversed(phases) if phase.at_epoch <= epoch)


def parts(job: Job, plan: Plan) -> Iterator[tuple[int, Job, Plan]]:
    """The parts of a run: the completed epochs from which each is, its job, and its plan.

    Args:
        job: resolved.
        plan: of the first part, on the ranks that there are.
    """
    starts = [0, *(change.at_epoch for change in job.changes)]
    plans = [plan, *(job.plan_after(start, plan) for start in starts[1:])]
    most = max(each.max_gradients_per_message for each in plans)  # which buffers have room for
    for start, its_plan in zip(starts, plans, strict=True):
        yield start, job.at(start), replace(its_plan, max_gradients_per_message=most)
