"""Settings of the optimisers of a role, which `[[changes]]` of the job may change."""

from protocols import Averaging
from rudra.core.actions import SetOptimizer
from rudra.core.buffer_names import REPLICA, WEIGHTS
from rudra.core.phases import Phases
from rudra.job.job import Job
from topologies import Plan


def settings_of(role: int, job: Job, plan: Plan) -> list[SetOptimizer]:
    """Returns actions that give the optimisers of a role their settings.

    Args:
        role: id of the role.
        job: job of a phase of the run.
        plan: plan of that phase.
    """
    traits, table = plan.traits(role), job.optimizer
    made = []
    if plan.averaging and traits.updates:
        _, momentum, options = Averaging.of(job.make_protocol(plan)).outer
        made.append(SetOptimizer(WEIGHTS, momentum, options))
    elif traits.updates:
        own = job.placement.momentum if traits.concludes else job.explicit_momentum(plan)
        made.append(SetOptimizer(WEIGHTS, table.momentum if own is None else own, table.options))
    if plan.averaging and traits.trains:
        made.append(SetOptimizer(REPLICA, table.momentum, table.options))
    return made


def changed_settings(role: int, phases: Phases, job: Job, plan: Plan) -> list[SetOptimizer]:
    """Returns the actions of `settings_of` if the settings differ between the phases of a run.

    Args:
        role: id of the role.
        phases: all phases of the run, with decided changes that have taken effect.
        job: job of the present phase.
        plan: plan of the present phase, perhaps without dead roles.
    """
    first, *others = (settings_of(role, phase.job, phase.plan) for phase in phases)
    return settings_of(role, job, plan) if any(other != first for other in others) else []
