"""What kinds of roles there are, and what is true of all roles of a kind."""

from functools import cache
from typing import Literal, NamedTuple

PARAMETER_SERVER = "parameter server"
SHARD = "parameter shard"
TREE_SERVER = "tree server"
STAGE_SERVER = "stage server"
STAGE_REPLICA = "stage replica"
STATISTICS_SERVER = "statistics server"
LEARNER = "learner"

BINARY = 2
"""Fan-out of the tree in which weights go down a compute group."""

ELSEWHERE = -1
"""The node of servers that need not be near a learner: of their own in a simulation, else the first with room."""

EVERYBODY = -1
"""Of all learners, in place of a compute group's number, where its groups average with each other."""

Reduction = Literal["ordered", "nodes", "mpi"]
Sharing = Literal["nothing", "replica", "reference"]


class RoleKind(NamedTuple):
    """What is true of all roles of a kind.

    Attributes:
        machine: its state machine, as `package.module:class`.
        executor: what does its local actions, named so, too.
        numbered: there may be several, which their names tell apart.
        serves: takes messages of many, one at a time, for each of which it has something to do.
        trains: computes gradients.
        tests: tests weights; nobody's gradients or weights come from it.
        updates: has weights that it updates.
        pushes_at_once: what it trains with is current, and a gradient is pushed as soon as it is ready.
        overlaps: pushes and pulls beside computing.
        concludes: finishes what learners begin, for which it needs the training set, too.
    """

    machine: str
    executor: str
    numbered: bool = False
    serves: bool = False
    trains: bool = False
    tests: bool = False
    updates: bool = False
    pushes_at_once: bool = False
    overlaps: bool = False
    concludes: bool = False

    @property
    def relays(self) -> bool:
        """Whether it only stands between others: what it is brought goes on to a server above it."""
        return self.serves and not self.updates


_SERVERS, _LEARNERS = "rudra.compute.owners", "rudra.compute.learners"

KINDS = {
    PARAMETER_SERVER: RoleKind(
        "rudra.roles.server:ParameterServer", f"{_SERVERS}:ServerExecutor", serves=True, updates=True
    ),
    SHARD: RoleKind(
        "rudra.roles.sharded:Shard", f"{_SERVERS}:ServerExecutor", serves=True, updates=True, numbered=True
    ),
    STAGE_SERVER: RoleKind(
        "rudra.roles.stages:StageServer",
        "rudra.compute.stages:BackExecutor",
        serves=True,
        updates=True,
        concludes=True,
    ),
    STAGE_REPLICA: RoleKind(
        "rudra.roles.stages:StageServer",
        "rudra.compute.stages:BackExecutor",
        serves=True,
        updates=True,
        concludes=True,
        numbered=True,
    ),
    TREE_SERVER: RoleKind("rudra.roles.tree:TreeServer", f"{_SERVERS}:AveragingExecutor", serves=True, numbered=True),
    STATISTICS_SERVER: RoleKind(
        "rudra.roles.statistics:StatisticsServer", f"{_LEARNERS}:StatisticsExecutor", tests=True
    ),
    LEARNER: RoleKind(
        "rudra.roles.learner:Learner", f"{_LEARNERS}:LearnerExecutor", numbered=True, trains=True, pushes_at_once=True
    ),
}
"""All kinds of roles that there are, as files and people name them."""

OVERLAPPED = KINDS[LEARNER]._replace(
    machine="rudra.roles.overlapped:OverlappedLearner", pushes_at_once=False, overlaps=True
)
GROUPED = KINDS[LEARNER]._replace(machine="rudra.roles.group:GroupLearner", pushes_at_once=False)
REPLICA = GROUPED._replace(machine="rudra.roles.group:Replica", executor=f"{_LEARNERS}:ReplicaExecutor", updates=True)
"""What `LEARNER` is in plans that overlap, with compute groups, and without a parameter server."""

_REPLICAS = "rudra.compute.replicas"
AVERAGER = REPLICA._replace(machine="rudra.roles.averaging:Averager", executor=f"{_REPLICAS}:AveragerExecutor")
SHARER = AVERAGER._replace(machine="rudra.roles.blocks:ReplicaSharer")
REFERRER = AVERAGER._replace(machine="rudra.roles.blocks:Referrer", executor=f"{_REPLICAS}:ReferrerExecutor")
ELASTIC = GROUPED._replace(machine="rudra.roles.elastic:ElasticLearner", executor=f"{_REPLICAS}:ElasticExecutor")
CENTRAL = KINDS[PARAMETER_SERVER]._replace(executor=f"{_REPLICAS}:CentralExecutor")
"""What `LEARNER` is where learners average replicas of their own: without a server, by what those of a group share, and
with one, and what that is."""

AVERAGERS: dict[Sharing, RoleKind] = {"nothing": AVERAGER, "replica": SHARER, "reference": REFERRER}

WORKER = KINDS[LEARNER]._replace(machine="rudra.roles.worker:Worker", pushes_at_once=False)
WINDOW_WORKER = WORKER._replace(
    machine="rudra.roles.window_worker:WindowWorker", executor="rudra.compute.hogwild:HogwildExecutor"
)
COORDINATOR = KINDS[PARAMETER_SERVER]._replace(machine="rudra.roles.coordinator:Coordinator")
WINDOW_COORDINATOR = COORDINATOR._replace(
    machine="rudra.roles.window:WindowCoordinator", executor="rudra.compute.hogwild:HogwildServerExecutor"
)
"""What `LEARNER` and `PARAMETER_SERVER` are where the server deals the samples out, and where the learners bring their
gradients into a window themselves."""

SHARDED = KINDS[LEARNER]._replace(machine="rudra.roles.sharded:ShardedLearner", pushes_at_once=False)
FIRST_SHARD = KINDS[PARAMETER_SERVER]._replace(machine="rudra.roles.sharded:FirstShard")
"""What `LEARNER` and `PARAMETER_SERVER` are where the weights lie in parts at several servers."""

_FRONT_EXECUTORS = {
    KINDS[PARAMETER_SERVER].executor: "rudra.compute.stages:FrontServerExecutor",
    KINDS[LEARNER].executor: "rudra.compute.stages:FrontExecutor",
    REPLICA.executor: "rudra.compute.stages:FrontReplicaExecutor",
}


@cache
def front_of(kind: RoleKind) -> RoleKind:
    """What a kind is where a stage server holds the last layers, and it has to do with the first ones.

    Learners and those who decide about weights are machines of their own then, called as `kind` has it behind "Front".
    """
    machine, executor = kind.machine, _FRONT_EXECUTORS.get(kind.executor, kind.executor)
    if kind.trains or machine in _DECIDE:
        machine = f"rudra.roles.fronts:Front{machine.partition(':')[2]}"
    return kind._replace(machine=machine, executor=executor, pushes_at_once=False)


_DECIDE = (KINDS[PARAMETER_SERVER].machine, FIRST_SHARD.machine)
