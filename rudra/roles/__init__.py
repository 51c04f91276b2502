"""Roles: what learners and servers do, as state machines without I/O.

`handle(event, now)` takes what happened and returns what should be done; drivers do it (`rudra.mpi` on
real ranks, `rudra.sim` in virtual time). A role sees no clock but `now`, no randomness, no tensor.
"""

from rudra.config import Job
from rudra.roles.learner import Learner
from rudra.roles.machine import Machine
from rudra.roles.server import ParameterServer
from rudra.roles.statistics import StatisticsServer
from topologies import Plan
from topologies.plan import LEARNER, PARAMETER_SERVER

__all__ = ["Learner", "Machine", "ParameterServer", "StatisticsServer", "make"]


def make(role: int, job: Job, plan: Plan, training_samples: int) -> Machine:
    """The state machine of one role of a plan.

    Args:
        role: id in the plan.
        job: resolved.
        plan: who is who.
        training_samples: size of the training set, by which epochs are counted.
    """
    kind = plan.roles[role].kind
    if kind == LEARNER:
        return Learner(role, plan, job.faults, job.results)
    if kind == PARAMETER_SERVER:
        return ParameterServer(role, plan, job, training_samples)
    return StatisticsServer(role, plan, job)
