"""What kinds of roles there are, and what is true of all roles of a kind."""

from enum import Enum, auto
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


class Variant(Enum):
    """What a role is in a plan: which state machine it has, and which executor does its local actions.

    Both are told by tables of those packages (`rudra.roles.MACHINES`, `rudra.compute.making.EXECUTORS`). A variant
    whose name begins with `FIRST_STAGE` has to do with the first layers alone, as a stage server holds the last ones.
    """

    PARAMETER_SERVER = auto()
    PARAMETER_SHARD = auto()
    FIRST_SHARD = auto()
    CENTRAL_SERVER = auto()
    COORDINATOR = auto()
    WINDOW_COORDINATOR = auto()
    TREE_SERVER = auto()
    STAGE_SERVER = auto()
    STATISTICS_SERVER = auto()
    LEARNER = auto()
    OVERLAPPED_LEARNER = auto()
    GROUP_LEARNER = auto()
    SHARDED_LEARNER = auto()
    REPLICA = auto()
    AVERAGER = auto()
    REPLICA_SHARER = auto()
    REFERRER = auto()
    ELASTIC_LEARNER = auto()
    WORKER = auto()
    WINDOW_WORKER = auto()
    FIRST_STAGE_PARAMETER_SERVER = auto()
    FIRST_STAGE_PARAMETER_SHARD = auto()
    FIRST_STAGE_FIRST_SHARD = auto()
    FIRST_STAGE_LEARNER = auto()
    FIRST_STAGE_OVERLAPPED_LEARNER = auto()
    FIRST_STAGE_GROUP_LEARNER = auto()
    FIRST_STAGE_SHARDED_LEARNER = auto()
    FIRST_STAGE_REPLICA = auto()


class RoleTraits(NamedTuple):
    """What is true of all roles of a variant.

    Attributes:
        variant: which.
        numbered: there may be several, which their names tell apart.
        serves: takes messages of many, one at a time, for each of which it has something to do.
        trains: computes gradients.
        tests: tests weights; nobody's gradients or weights come from it.
        updates: has weights that it updates.
        pushes_at_once: what it trains with is current, and a gradient is pushed as soon as it is ready.
        overlaps: pushes and pulls beside computing.
        concludes: finishes what learners begin, for which it needs the training set, too.
    """

    variant: Variant
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


_STAGE = RoleTraits(Variant.STAGE_SERVER, serves=True, updates=True, concludes=True)

KINDS = {
    PARAMETER_SERVER: RoleTraits(Variant.PARAMETER_SERVER, serves=True, updates=True),
    SHARD: RoleTraits(Variant.PARAMETER_SHARD, serves=True, updates=True, numbered=True),
    STAGE_SERVER: _STAGE,
    STAGE_REPLICA: _STAGE._replace(numbered=True),
    TREE_SERVER: RoleTraits(Variant.TREE_SERVER, serves=True, numbered=True),
    STATISTICS_SERVER: RoleTraits(Variant.STATISTICS_SERVER, tests=True),
    LEARNER: RoleTraits(Variant.LEARNER, numbered=True, trains=True, pushes_at_once=True),
}
"""All kinds of roles that there are, as files and people name them."""

_TRAINS = KINDS[LEARNER]._replace(pushes_at_once=False)
_DECIDES = KINDS[PARAMETER_SERVER]

OVERLAPPED = _TRAINS._replace(variant=Variant.OVERLAPPED_LEARNER, overlaps=True)
GROUPED = _TRAINS._replace(variant=Variant.GROUP_LEARNER)
REPLICA = _TRAINS._replace(variant=Variant.REPLICA, updates=True)
"""What `LEARNER` is in plans that overlap, with compute groups, and without a parameter server."""

AVERAGERS: dict[Sharing, RoleTraits] = {
    "nothing": REPLICA._replace(variant=Variant.AVERAGER),
    "replica": REPLICA._replace(variant=Variant.REPLICA_SHARER),
    "reference": REPLICA._replace(variant=Variant.REFERRER),
}
ELASTIC = _TRAINS._replace(variant=Variant.ELASTIC_LEARNER)
CENTRAL = _DECIDES._replace(variant=Variant.CENTRAL_SERVER)
"""What `LEARNER` is where learners average replicas of their own: without a server, by what those of a group share, and
with one, and what that is."""

WORKER = _TRAINS._replace(variant=Variant.WORKER)
WINDOW_WORKER = _TRAINS._replace(variant=Variant.WINDOW_WORKER)
COORDINATOR = _DECIDES._replace(variant=Variant.COORDINATOR)
WINDOW_COORDINATOR = _DECIDES._replace(variant=Variant.WINDOW_COORDINATOR)
"""What `LEARNER` and `PARAMETER_SERVER` are where the server deals the samples out, and where the learners bring their
gradients into a window themselves."""

SHARDED = _TRAINS._replace(variant=Variant.SHARDED_LEARNER)
FIRST_SHARD = _DECIDES._replace(variant=Variant.FIRST_SHARD)
"""What `LEARNER` and `PARAMETER_SERVER` are where the weights lie in parts at several servers."""

_OF_FIRST_STAGE = {
    Variant.PARAMETER_SERVER: Variant.FIRST_STAGE_PARAMETER_SERVER,
    Variant.PARAMETER_SHARD: Variant.FIRST_STAGE_PARAMETER_SHARD,
    Variant.FIRST_SHARD: Variant.FIRST_STAGE_FIRST_SHARD,
    Variant.LEARNER: Variant.FIRST_STAGE_LEARNER,
    Variant.OVERLAPPED_LEARNER: Variant.FIRST_STAGE_OVERLAPPED_LEARNER,
    Variant.GROUP_LEARNER: Variant.FIRST_STAGE_GROUP_LEARNER,
    Variant.SHARDED_LEARNER: Variant.FIRST_STAGE_SHARDED_LEARNER,
    Variant.REPLICA: Variant.FIRST_STAGE_REPLICA,
}


def first_stage_of(traits: RoleTraits) -> RoleTraits:
    """What a role is where a stage server holds the last layers, and the role has to do with the first ones."""
    return traits._replace(variant=_OF_FIRST_STAGE[traits.variant], pushes_at_once=False)
