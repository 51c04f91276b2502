"""Roles: what learners and servers do, as state machines without I/O.

`handle(event, now)` takes what happened and returns what should be done; drivers do it (`rudra.mpi.driver` on
real ranks, `rudra.simulation.driver` in virtual time). A role sees no clock but `now`, no randomness, no tensor.
Which kind of role has which machine is told in `topologies.kinds`.
"""

from collections.abc import Callable, Collection

from rudra import plugins
from rudra.core.phases import Phases, phase_at
from rudra.core.schedule import Schedule
from rudra.core.training_state import BEGINNING, TrainingState
from rudra.job.job import Job
from rudra.roles.machine import Machine, Setup
from topologies import Plan

__all__ = ["Machine", "make", "make_in_phase"]


def make_in_phase(
    role: int, phases: Phases, gone: Collection[int], training_samples: int, position: TrainingState
) -> Machine:
    """The state machine of a role in the part of a run that a position is in.

    Args:
        role: id in the plan.
        phases: of the run.
        gone: ids of roles that are no more.
        training_samples: size of the training set, by which epochs are counted.
        position: where training begins.
    """
    phase = phase_at(phases, position.epoch)
    plan = phase.plan.without(gone) if gone else phase.plan
    return make(role, phase.job, plan, training_samples, phase.schedule, position, phases)


def make(
    role: int,
    job: Job,
    plan: Plan,
    training_samples: int,
    schedule: Schedule,
    position: TrainingState = BEGINNING,
    phases: Phases = (),
) -> Machine:
    """The state machine of one role of a plan.

    Args:
        role: id in the plan.
        job: resolved.
        plan: who is who.
        training_samples: size of the training set, by which epochs are counted.
        schedule: the learning rates, for whoever owns weights.
        position: where training begins.
        phases: all parts of the run, where the job changes.
    """
    kind: Callable[[int, Setup], Machine] = plugins.resolve(plan.about(role).machine)  # type: ignore[assignment]
    return kind(role, Setup(job, plan, training_samples, schedule, position, phases))
