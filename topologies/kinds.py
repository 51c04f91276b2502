"""Kinds of roles, and the traits of all roles of a kind."""

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
"""Fan-out of the tree that carries weights down a compute group."""

ELSEWHERE = -1
"""Node of servers that need not be near a learner: a node of their own in a simulation, else the first one with a free
rank."""

EVERYBODY = -1
"""Number of the group of all learners, if the compute groups average with each other."""

Reduction = Literal["ordered", "nodes", "mpi"]
"""Order of addition in a compute group. "mpi": a library's own order. It is the MPI library, or NCCL."""

Sharing = Literal["nothing", "replica", "reference"]


class Variant(Enum):
    """Variant of a role in a plan, which decides its state machine and the executor of its local actions.

    Tables of those packages map a variant to both (`rudra.roles.MACHINES`, `rudra.compute.making.EXECUTORS`). A variant
    whose name begins with `FIRST_STAGE` has only the first layers, because a stage server has the last ones.
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
    """Traits of all roles of a variant.

    Attributes:
        variant: The variant.
        numbered: Whether there may be several such roles, with numbers in their names.
        serves: Whether it handles messages of several roles, one at a time.
        trains: Whether it computes gradients.
        tests: Whether it evaluates weights. No other role gets gradients or weights from it.
        updates: Whether it updates weights.
        pushes_at_once: Whether its weights are always current, and it pushes a gradient as soon as it is ready.
        overlaps: Whether it pushes and pulls in parallel with computing.
        concludes: Whether it computes the last layers for learners, and so needs the training set.
        takes_rows: Whether it exchanges the gradient of a sparse first layer as rows, or exchanges no gradient.
        pushes_in_parts: Whether it may push a large gradient in parts while it computes the rest.
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
    takes_rows: bool = False
    pushes_in_parts: bool = False

    @property
    def relays(self) -> bool:
        """Whether it forwards gradients to a server above it."""
        return self.serves and not self.updates


_STAGE = RoleTraits(Variant.STAGE_SERVER, serves=True, updates=True, concludes=True)

KINDS = {
    PARAMETER_SERVER: RoleTraits(Variant.PARAMETER_SERVER, serves=True, updates=True, takes_rows=True),
    SHARD: RoleTraits(Variant.PARAMETER_SHARD, serves=True, updates=True, numbered=True, takes_rows=True),
    STAGE_SERVER: _STAGE,
    STAGE_REPLICA: _STAGE._replace(numbered=True),
    TREE_SERVER: RoleTraits(Variant.TREE_SERVER, serves=True, numbered=True, takes_rows=True),
    STATISTICS_SERVER: RoleTraits(Variant.STATISTICS_SERVER, tests=True, takes_rows=True),
    LEARNER: RoleTraits(
        Variant.LEARNER, numbered=True, trains=True, pushes_at_once=True, takes_rows=True, pushes_in_parts=True
    ),
}
"""All kinds of roles, by their names in files."""

_PUSHES = KINDS[LEARNER]._replace(pushes_at_once=False)
_TRAINS = _PUSHES._replace(takes_rows=False, pushes_in_parts=False)
_DECIDES = KINDS[PARAMETER_SERVER]

OVERLAPPED = _PUSHES._replace(variant=Variant.OVERLAPPED_LEARNER, overlaps=True)
GROUPED = _TRAINS._replace(variant=Variant.GROUP_LEARNER)
REPLICA = _TRAINS._replace(variant=Variant.REPLICA, updates=True)
"""Traits of `LEARNER` in plans that overlap, with compute groups, and without a parameter server."""

AVERAGERS: dict[Sharing, RoleTraits] = {
    "nothing": REPLICA._replace(variant=Variant.AVERAGER),
    "replica": REPLICA._replace(variant=Variant.REPLICA_SHARER),
    "reference": REPLICA._replace(variant=Variant.REFERRER),
}
ELASTIC = _TRAINS._replace(variant=Variant.ELASTIC_LEARNER)
CENTRAL = _DECIDES._replace(variant=Variant.CENTRAL_SERVER, takes_rows=False)
"""Traits of `LEARNER` if learners average replicas: without a server, by what the learners of a group share, and with a
server, together with the traits of that server."""

WORKER = _TRAINS._replace(variant=Variant.WORKER, takes_rows=True)
WINDOW_WORKER = _TRAINS._replace(variant=Variant.WINDOW_WORKER)
COORDINATOR = _DECIDES._replace(variant=Variant.COORDINATOR)
WINDOW_COORDINATOR = _DECIDES._replace(variant=Variant.WINDOW_COORDINATOR, takes_rows=False)
"""Traits of `LEARNER` and `PARAMETER_SERVER` if the server assigns the samples, and if learners apply their gradients
in a window."""

SHARDED = _PUSHES._replace(variant=Variant.SHARDED_LEARNER)
FIRST_SHARD = _DECIDES._replace(variant=Variant.FIRST_SHARD)
"""Traits of `LEARNER` and `PARAMETER_SERVER` if several servers hold parts of the weights."""

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
    """Returns the traits of a role with the first layers, if a stage server has the last ones."""
    return traits._replace(variant=_OF_FIRST_STAGE[traits.variant], pushes_at_once=False)
