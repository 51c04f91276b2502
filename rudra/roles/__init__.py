"""Roles of learners and servers, as state machines without I/O.

`handle(event, now)` takes an event and returns actions. A driver carries them out: `rudra.mpi.driver` on real ranks,
`rudra.simulation.driver` in virtual time. A role has no clock except `now`, no randomness and no tensors.
`MACHINES` maps each variant of a role (`topologies.kinds`) to its machine.
"""

from collections.abc import Callable, Collection

from rudra.core.phases import Phases, phase_at
from rudra.core.schedule import Schedule
from rudra.core.training_state import BEGINNING, TrainingState
from rudra.job.job import Job
from rudra.roles.averaging import Averager
from rudra.roles.coordinator import Coordinator
from rudra.roles.elastic import ElasticLearner
from rudra.roles.group_learner import GroupLearner
from rudra.roles.learner import Learner
from rudra.roles.machine import Machine, Setup
from rudra.roles.overlapped import OverlappedLearner
from rudra.roles.replica import Replica
from rudra.roles.server import ParameterServer
from rudra.roles.sharded import FirstShard, Shard, ShardedLearner
from rudra.roles.stage_server import StageServer
from rudra.roles.statistics import StatisticsServer
from rudra.roles.tree import TreeServer
from rudra.roles.window_coordinator import WindowCoordinator
from rudra.roles.window_worker import WindowWorker
from rudra.roles.worker import Worker
from topologies import Plan
from topologies.kinds import Variant

__all__ = ["MACHINES", "Machine", "make", "make_in_phase"]

MACHINES: dict[Variant, type[Machine]] = {
    Variant.PARAMETER_SERVER: ParameterServer,
    Variant.PARAMETER_SHARD: Shard,
    Variant.FIRST_SHARD: FirstShard,
    Variant.CENTRAL_SERVER: ParameterServer,
    Variant.COORDINATOR: Coordinator,
    Variant.WINDOW_COORDINATOR: WindowCoordinator,
    Variant.TREE_SERVER: TreeServer,
    Variant.STAGE_SERVER: StageServer,
    Variant.STATISTICS_SERVER: StatisticsServer,
    Variant.LEARNER: Learner,
    Variant.OVERLAPPED_LEARNER: OverlappedLearner,
    Variant.GROUP_LEARNER: GroupLearner,
    Variant.SHARDED_LEARNER: ShardedLearner,
    Variant.REPLICA: Replica,
    Variant.AVERAGER: Averager,
    Variant.REPLICA_SHARER: Averager,
    Variant.REFERRER: Averager,
    Variant.ELASTIC_LEARNER: ElasticLearner,
    Variant.WORKER: Worker,
    Variant.WINDOW_WORKER: WindowWorker,
    Variant.FIRST_STAGE_PARAMETER_SERVER: ParameterServer,
    Variant.FIRST_STAGE_PARAMETER_SHARD: Shard,
    Variant.FIRST_STAGE_FIRST_SHARD: FirstShard,
    Variant.FIRST_STAGE_LEARNER: Learner,
    Variant.FIRST_STAGE_OVERLAPPED_LEARNER: OverlappedLearner,
    Variant.FIRST_STAGE_GROUP_LEARNER: GroupLearner,
    Variant.FIRST_STAGE_SHARDED_LEARNER: ShardedLearner,
    Variant.FIRST_STAGE_REPLICA: Replica,
}
"""The state machine of each variant of a role."""


def make_in_phase(
    role: int, phases: Phases, gone: Collection[int], training_samples: int, position: TrainingState
) -> Machine:
    """Returns the state machine of a role in the phase of the run that contains a position.

    Args:
        role: id in the plan.
        phases: all phases of the run.
        gone: ids of roles that are no longer in the run.
        training_samples: number of samples in the training set, and so in an epoch.
        position: state of training at the start.
    """
    phase = phase_at(phases, position)
    plan = phase.plan.without(gone) if gone else phase.plan
    return make(role, phase.job, plan, training_samples, phase.schedule, position, phases)


def make(
    role: int,
    job: Job,
    plan: Plan,
    training_samples: int,
    schedule: Schedule,
    position: TrainingState = BEGINNING,
    phases: Phases = Phases(),  # noqa: B008
) -> Machine:
    """Returns the state machine of one role of a plan.

    Args:
        role: id in the plan.
        job: resolved job.
        plan: roles of the run and their connections.
        training_samples: number of samples in the training set, and so in an epoch.
        schedule: learning rates, for roles that own weights.
        position: state of training at the start.
        phases: all phases of the run, if the job changes.
    """
    machine: Callable[[int, Setup], Machine] = MACHINES[plan.traits(role).variant]
    return machine(role, Setup(job, plan, training_samples, schedule, position, phases))
