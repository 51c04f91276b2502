"""Roles: what learners and servers do, as state machines without I/O.

`handle(event, now)` takes what happened and returns what should be done; drivers do it (`rudra.mpi.driver` on
real ranks, `rudra.simulation.driver` in virtual time). A role sees no clock but `now`, no randomness, no tensor.
"""

from rudra.core.schedule import Schedule
from rudra.core.training_state import BEGINNING, TrainingState
from rudra.job.job import Job
from rudra.roles.group import GroupLearner, Replica
from rudra.roles.learner import Learner
from rudra.roles.machine import Machine
from rudra.roles.overlapped import OverlappedLearner
from rudra.roles.server import ParameterServer
from rudra.roles.statistics import StatisticsServer
from rudra.roles.tree import TreeServer
from topologies import Plan
from topologies.plan import LEARNER, PARAMETER_SERVER, TREE_SERVER

__all__ = [
    "GroupLearner",
    "Learner",
    "Machine",
    "OverlappedLearner",
    "ParameterServer",
    "Replica",
    "StatisticsServer",
    "TreeServer",
    "make",
]


def make(
    role: int, job: Job, plan: Plan, training_samples: int, schedule: Schedule, position: TrainingState = BEGINNING
) -> Machine:
    """The state machine of one role of a plan.

    Args:
        role: id in the plan.
        job: resolved.
        plan: who is who.
        training_samples: size of the training set, by which epochs are counted.
        schedule: the learning rates, for whoever owns weights.
        position: where training begins.
    """
    kind = plan.roles[role].kind
    if kind == LEARNER:
        if not plan.served:
            return Replica(role, plan, job, training_samples, schedule, position)
        cls = OverlappedLearner if plan.overlapped else GroupLearner if plan.groups else Learner
        return cls(role, plan, job.fault_tolerance, job.results, position)
    if kind == PARAMETER_SERVER:
        return ParameterServer(role, plan, job, training_samples, schedule, position)
    if kind == TREE_SERVER:
        return TreeServer(role, plan, job, position)
    return StatisticsServer(role, plan, job, position)
