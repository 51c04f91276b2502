"""Plan of a topology: the roles of a run, and their edges for gradients and weights."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, groupby
from typing import Any, Self

from topologies.kinds import (
    AVERAGERS,
    BINARY,
    CENTRAL,
    COORDINATOR,
    ELASTIC,
    ELSEWHERE,
    EVERYBODY,
    FIRST_SHARD,
    GROUPED,
    KINDS,
    LEARNER,
    OVERLAPPED,
    PARAMETER_SERVER,
    REPLICA,
    SHARDED,
    WINDOW_COORDINATOR,
    WINDOW_WORKER,
    WORKER,
    Reduction,
    RoleTraits,
    Sharing,
    first_stage_of,
)

NAMED = 4
"""Most roles of a kind on a rank that messages name one by one."""

_RENAMED = {  # for topologies of yesterday
    "records": "max_gradients_per_message",
    "numbers": "learner_numbers",
    "giver": "weight_source",
    "way": "child_towards",
    "survives": "expendable",
}


@dataclass(frozen=True, slots=True)
class Role:
    """Role of a run. The role's id, which other roles use, is its place in `Plan.roles`.

    Attributes:
        kind: Kind of the role, a key of `KINDS`.
        index: Number of the role among roles of its kind, from 0. Shards and stage replicas count from 1, because the
            parameter server and the stage server are the first.
        world_rank: MPI rank that hosts the role. One rank may host several roles.
        parent: Id of the role that takes this role's gradients. None: there is none.
        source: Id of the role that gives this role weights. None: its parent does.
        node: Number of the role's node. -1 (`ELSEWHERE`): any node, for servers that need not be near a learner.
        group: Number of the learner's compute group. None: it belongs to none.
    """

    kind: str
    index: int
    world_rank: int
    parent: int | None = None
    source: int | None = None
    node: int = ELSEWHERE
    group: int | None = None

    @property
    def name(self) -> str:
        """Name of the role for people and files: `"learner 3"`, `"parameter server"`."""
        return f"{self.kind} {self.index}" if self.kind_traits.numbered else self.kind

    @property
    def title(self) -> str:
        """Name and rank, for messages."""
        return f"{self.name} (rank {self.world_rank})"

    @property
    def kind_traits(self) -> RoleTraits:
        """Traits of all roles of this kind, in any plan."""
        return KINDS[self.kind]


def _named(run: Sequence[Role]) -> list[str]:
    """Names roles of one kind with consecutive numbers."""
    if len(run) > NAMED:
        return [f"{run[0].kind}s {run[0].index} to {run[-1].index}"]
    return [role.name for role in run]


@dataclass(frozen=True)
class Plan:
    """Result of a topology: the roles of a run, and their edges for gradients and weights.

    Attributes:
        roles: All roles of the run. The place of a role in this tuple is its id.
        max_gradients_per_message: Largest number of gradients whose mean one message to the parameter server may carry.
            It is 1 unless servers of a tree or compute groups average gradients.
        replayable: Whether the order of addition of gradients is recorded, so that a replay is bitwise identical.
        overlapped: Whether learners push and pull in parallel with computing and never wait for a server. Weights then
            come down a tree of their own (`Role.source`).
        outstanding: Only with `overlapped`: number of a learner's own gradients that may be missing in its weights
            before the learner waits. None: it never waits.
        reduction: Order of addition in a compute group: `"ordered"`, in group_rank order; `"nodes"`, in that order on
            each node, then the sums of the nodes; or `"mpi"`, as the MPI library does.
        averaging: Whether each learner trains a replica, and replicas are averaged. The weights are then the central
            model. Without a parameter server every learner has a copy of it.
        sharing: State that the learners of a compute group share if they average: `"nothing"`; a `"replica"`, which
            they train by the mean of their gradients; or a `"reference"`, which corrects their replicas. The replicas,
            or references, of the groups are then averaged.
        scheduled: Whether the parameter server assigns the samples to learners that request work.
        window: Whether learners apply their gradients to shared weights in the memory of a node.
        gone: Ids of roles whose ranks have died. They are still in `roles`, and in no other attribute.
        active: Number of learners that take part: the first ones that live. The others are dormant. Several numbers:
            of each rank with learners. None: all take part.
        evenly: Whether the first learner of each rank comes first, then the second one of each, and so on. Otherwise
            learners come in their order.
        drawn: Roles as the topology made them, if roles are gone or dormant. Otherwise empty.
    """

    roles: tuple[Role, ...]
    max_gradients_per_message: int = 1
    replayable: bool = True
    overlapped: bool = False
    outstanding: int | None = None
    reduction: Reduction = "ordered"
    averaging: bool = False
    sharing: Sharing = "nothing"
    scheduled: bool = False
    window: bool = False
    gone: frozenset[int] = frozenset()
    active: int | tuple[int, ...] | None = None
    evenly: bool = False
    drawn: tuple[Role, ...] = field(default=(), repr=False, compare=False)

    def __new__(cls, *_: Any, **fields: Any) -> Self:
        for name in fields.keys() & _RENAMED.keys():
            raise ValueError(f"Plan has no {name}; use {_RENAMED[name]}")
        return super().__new__(cls)

    def __getattr__(self, name: str) -> Any:
        is_called = f"; use {_RENAMED[name]}" if name in _RENAMED else ""
        raise AttributeError(f"Plan has no {name}{is_called}", name=name, obj=self)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:  # once: all roles ask for what was worked out of their plan
        kinds = (self.overlapped, self.averaging, self.sharing, self.scheduled, self.window)
        return hash((self.roles, *kinds, self.gone, self.active))

    @property
    def ranks(self) -> int:
        """Number of MPI ranks that the plan needs."""
        return 1 + max(role.world_rank for role in self.roles)

    @property
    def local(self) -> bool:
        """Whether one rank hosts all roles, so that no tensor passes through MPI."""
        return self.ranks == 1

    @cached_property
    def server(self) -> int:
        """Id of the role that decides about the weights: the parameter server, or the first learner if there is none.

        It owns all weights, or the first part of them (`owners`).
        """
        return self.owners[0]

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """Ids of the roles that own the weights, in the order of their parts. Usually one role owns all of them.

        Without a parameter server it is the first learner, which keeps the counters for all replicas.
        """
        return self.front_owners if self.stage is None else (*self.front_owners, self.stage)

    @cached_property
    def front_owners(self) -> tuple[int, ...]:
        """Ids of the owners of the learners' layers: of all layers, or of the first ones if there is a stage server."""
        return self._parameter_servers or self.learners[:1]

    @cached_property
    def followers(self) -> tuple[int, ...]:
        """Ids of the servers that own parts of the weights and do what another owner decides."""
        return tuple(role for role in (*self.front_owners[1:], *self.stages))

    @cached_property
    def stage(self) -> int | None:
        """Id of the role that owns the last layers and computes with them. None: learners have all layers."""
        return next(iter(self.stages), None)

    @cached_property
    def stages(self) -> tuple[int, ...]:
        """Ids of all roles that have the last layers. The first one owns them, and the others keep replicas."""
        return self._those(lambda kind: kind.concludes)

    def stage_of(self, learner: int) -> int:
        """Returns the id of the role that has the last layers for a learner. Learners are divided in learner order.

        Args:
            learner: Id of the learner.
        """
        return self.stages[self.roles[learner].index * len(self.stages) // self.learner_numbers]

    @cached_property
    def keepers(self) -> tuple[int, ...]:
        """Ids of the roles that hold state for a checkpoint, the server's first."""
        if not self.averaging or self.served:
            return self.owners
        return tuple(members[0] for members in self.groups) if self.sharing == "replica" else self.learners

    @cached_property
    def parted(self) -> bool:
        """Whether several roles hold parts of the weights."""
        return len(self.owners) > 1

    @cached_property
    def sharded(self) -> bool:
        """Whether learners exchange parts with several servers."""
        return len(self.front_owners) > 1

    def in_parts(self, role: int, owner: int) -> bool:
        """Returns whether a role exchanges only a part of its tensor with an owner of weights.

        Args:
            role: Id of the role.
            owner: Id of the owner.
        """
        if role == self.statistics:
            return self.parted and owner in self.owners
        return self.sharded and owner in self.front_owners

    def unparted(self) -> tuple["Plan", dict[int, int]]:
        """Returns the equivalent plan with one server for all parts, and one stage server.

        Returns:
            The plan, and the id in it for the id of each role that is left.
        """
        left = [i for i in range(len(self.roles)) if i not in (*self.front_owners[1:], *self.stages[1:])]
        now: dict[int | None, int] = {before: id_ for id_, before in enumerate(left)}
        kept = map(self.whole.roles.__getitem__, left)
        roles = (replace(role, parent=now.get(role.parent), source=now.get(role.source)) for role in kept)
        plan = replace(self.whole, roles=tuple(roles))._present(frozenset(now[i] for i in self.gone), self.active)
        return plan, {before: id_ for id_, before in enumerate(left)}

    @cached_property
    def statistics(self) -> int:
        """Id of the statistics server."""
        return self._those(lambda kind: kind.tests)[0]

    @cached_property
    def learners(self) -> tuple[int, ...]:
        """Ids of the learners, in learner order."""
        return self._those(lambda kind: kind.trains)

    @cached_property
    def dormant(self) -> frozenset[int]:
        """Ids of the learners that live and do not take part. They are in no other attribute except `roles`."""
        if self.active is None:
            return frozenset()
        living = [i for i, role in enumerate(self.roles) if role.kind_traits.trains and i not in self.gone]
        if isinstance(self.active, tuple):
            return frozenset(chain.from_iterable(here[count:] for here, count in self._with_numbers(self.active)))
        if self.evenly:
            place: dict[int, int] = {}  # of each learner among those of its rank
            before: Counter[int] = Counter()
            for id_ in living:
                place[id_] = before[rank := self.roles[id_].world_rank]
                before[rank] += 1
            living.sort(key=place.__getitem__)
        return frozenset(living[self.active :])

    def _with_numbers(self, numbers: tuple[int, ...]) -> Iterator[tuple[list[int], int]]:
        """Yields, for each rank with learners, dead ones too, the ids of those that live, and its number."""
        learners = [(role.world_rank, i) for i, role in enumerate(self.roles) if role.kind_traits.trains]
        for rank, number in zip(sorted({rank for rank, _ in learners}), numbers, strict=False):
            yield [i for its, i in learners if its == rank and i not in self.gone], number

    @cached_property
    def whole(self) -> "Plan":
        """The plan with all roles, alive and taking part."""
        return replace(self, roles=self.drawn, gone=frozenset(), active=None, drawn=()) if self.drawn else self

    @cached_property
    def ranks_with_learners(self) -> frozenset[int]:
        """MPI ranks that host learners that take part."""
        return frozenset(self.roles[learner].world_rank for learner in self.learners)

    @cached_property
    def learner_numbers(self) -> int:
        """Number of learners, including dead and dormant ones. Learners have the numbers from 0 up to this."""
        return sum(role.kind_traits.trains for role in self.roles)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """For each role, by id: ids of the roles whose gradients it takes."""
        return self._below(lambda role: role.parent)

    @cached_property
    def receivers(self) -> tuple[tuple[int, ...], ...]:
        """For each role, by id: ids of the roles that get weights from it."""
        return self._below(self.weight_source)

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """For each compute group: ids of its learners in group_rank order. Empty: there are no groups."""
        members: dict[int, list[int]] = {}
        for id_ in self.learners:
            group = self.roles[id_].group
            if group is not None:
                members.setdefault(group, []).append(id_)
        return tuple(tuple(members[group]) for group in sorted(members))

    def group_of(self, role: int) -> tuple[int, ...]:
        """Returns the ids of the learners in a learner's compute group, including itself. Without groups it is only
        itself.

        Args:
            role: Id of the learner.
        """
        return self._groups_of.get(role, (role,))

    @cached_property
    def _groups_of(self) -> dict[int, tuple[int, ...]]:
        return {role: members for members in self.groups for role in members}

    def together(self, role: int, group: int | None) -> tuple[int, ...]:
        """Returns the ids of the learners of a reduction: a learner's compute group, or all learners.

        Args:
            role: Id of the learner.
            group: Number of its group, or `EVERYBODY`.
        """
        return self.learners if group == EVERYBODY else self.group_of(role)

    def partial_sums(self, members: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Returns the order of addition in a compute group, or among all learners.

        Args:
            members: Ids of the learners, from `together`.

        Returns:
            Partial sums in their order. Each is a tuple of places among the members, to be added in this order. Among
                all learners each group has a partial sum. In a group with reduction "nodes" each node has one. A rank
                is on one node, the node of its first learner.
        """
        by_group = len({self.roles[member].group for member in members}) > 1
        if not by_group and self.reduction != "nodes":
            return (tuple(range(len(members))),)
        node_of: dict[int, int] = {}
        places: dict[int | None, list[int]] = {}
        for place, member in enumerate(members):
            role = self.roles[member]
            node = node_of.setdefault(role.world_rank, role.node)
            places.setdefault(role.group if by_group else node, []).append(place)
        return tuple(map(tuple, places.values()))

    @cached_property
    def workers(self) -> int:
        """Number of learners that a protocol sees. A compute group counts as one, unless each learner averages for
        itself."""
        alone = self.averaging and self.sharing == "nothing"
        return len(self.learners) if alone else len(self.groups) or len(self.learners)

    @cached_property
    def served(self) -> bool:
        """Whether there is a parameter server. Without one, every learner updates its own weights, which stay equal."""
        return bool(self._parameter_servers)

    @cached_property
    def _parameter_servers(self) -> tuple[int, ...]:
        return self._those(lambda kind: kind.updates and not kind.trains and not kind.concludes)

    def traits(self, role: int) -> RoleTraits:
        """Returns the traits of a role in this plan, such as whether it trains or updates weights.

        Args:
            role: Id of the role.
        """
        own = KINDS[self.roles[role].kind]
        if own.trains:
            return self._learner_kind
        if own.updates and not own.concludes:
            if role == self.server:
                own = self._server_kind
            return own if self.stage is None else first_stage_of(own)
        return own

    @cached_property
    def _server_kind(self) -> RoleTraits:
        if self.scheduled:
            return WINDOW_COORDINATOR if self.window else COORDINATOR
        return FIRST_SHARD if self.sharded else CENTRAL if self.averaging else KINDS[PARAMETER_SERVER]

    @cached_property
    def _learner_kind(self) -> RoleTraits:
        if self.averaging:
            return ELASTIC if self.served else AVERAGERS[self.sharing]
        if self.scheduled:
            return WINDOW_WORKER if self.window else WORKER
        kind = OVERLAPPED if self.overlapped else GROUPED if self.groups else KINDS[LEARNER]
        kind = SHARDED if self.sharded else kind if self.served else REPLICA
        return kind if self.stage is None else first_stage_of(kind)

    def on_rank(self, world_rank: int) -> tuple[int, ...]:
        """Returns the ids of the roles on an MPI rank."""
        return tuple(i for i, role in enumerate(self.roles) if role.world_rank == world_rank)

    def names_on(self, world_rank: int) -> str:
        """Names the roles on an MPI rank for people: `"learner 0, learner 1"`. Many in a row: `"learners 0 to 7"`."""
        here = enumerate(self.roles[i] for i in self.on_rank(world_rank))
        runs = ([role for _, role in run] for _, run in groupby(here, lambda at: (at[1].kind, at[1].index - at[0])))
        return ", ".join(chain.from_iterable(map(_named, runs)))

    def weight_source(self, role: Role) -> int | None:
        """Returns the id of the role that gives a role weights. None: the role is the root, or a server of a tree if
        `overlapped`."""
        if self.overlapped and role.kind_traits.relays:
            return None
        return role.parent if role.source is None else role.source

    def nodes(self, *, near: bool) -> tuple[int, ...]:
        """Returns the node of every role, by id.

        Args:
            near: Whether servers without a fixed node are on node 0. Otherwise their node is -1 (`ELSEWHERE`).
        """
        return tuple(0 if near and role.node == ELSEWHERE else role.node for role in self.roles)

    @property
    def window_leaders(self) -> dict[int, list[int]]:
        """If several nodes have windows: the first learner of each, and the numbers of all learners there."""
        on_node: dict[int, list[int]] = {}
        for learner in self.learners if self.window else ():
            on_node.setdefault(self.roles[learner].node, []).append(learner)
        if len(on_node) < 2:
            return {}
        return {some[0]: [self.roles[learner].index for learner in some] for some in on_node.values()}

    def expendable(self, role: int) -> bool:
        """Returns whether all other roles can continue with this plan if a role is lost.

        This holds for a learner that no other role needs for an average or for weights, unless a dormant learner can
        take its place. After the loss of any other role the run needs a new plan (`without`).

        Args:
            role: Id of the role.
        """
        return self.roles[role].kind_traits.trains and not (self.groups or self.overlapped or self.dormant)

    def without(self, lost: Collection[int]) -> "Plan":
        """Returns the plan of the remaining roles after a loss.

        The nearest remaining ancestor takes over the roles below a lost one. A server of a tree without a learner below
        it loses its parent. If learners are dormant, the first of them take the places of lost learners.

        Args:
            lost: Ids of the lost roles.

        Raises:
            ValueError: The run cannot continue: an owner of the weights, the statistics server or all learners are
                lost.
        """
        gone = self.gone | frozenset(lost)
        for needed in dict.fromkeys((*self.owners, *self.stages, self.statistics)):
            if needed in gone:
                raise ValueError(f"no run continues without the {self.roles[needed].name}")
        if gone.issuperset((*self.learners, *self.dormant)):
            raise ValueError("no learner is left")
        return self.whole._present(gone, self.active)

    def with_active(self, learners: int | Sequence[int] | None, *, evenly: bool = False) -> "Plan":
        """Returns the plan with a number of active learners: the first ones that live.

        Args:
            learners: Number of learners, or numbers for each rank with learners. None: all.
            evenly: Whether each rank has as many of them as any other, or one fewer.
        """
        whole = self.whole
        learners = learners if learners is None or isinstance(learners, int) else tuple(learners)
        return (whole if whole.evenly == evenly else replace(whole, evenly=evenly))._present(self.gone, learners)

    def _present(self, gone: frozenset[int], active: int | tuple[int, ...] | None) -> "Plan":
        """Returns the plan of the roles that live and take part. Here all do."""
        if isinstance(active, tuple):
            whole = all(number >= len(here) for here, number in self._with_numbers(active))
        else:
            whole = active is not None and active >= self.learner_numbers
        active = None if whole else active
        if not gone and active is None:
            return self
        plan = replace(self, gone=gone, active=active, drawn=self.roles)
        absent, roles = plan.gone | plan.dormant, list(self.roles)

        def present(id_: int | None, above: Callable[[Role], int | None]) -> int | None:
            while id_ in absent:
                id_ = above(self.roles[id_])
            return id_

        for id_, role in enumerate(roles):
            if id_ not in absent:
                parent, source = present(role.parent, lambda r: r.parent), present(role.source, self.weight_source)
                roles[id_] = replace(role, parent=parent, source=source)
        for members in self.groups if self.served else (self.learners,):
            left = [id_ for id_ in members if id_ not in absent]
            for id_, (parent, source) in zip(left, group_tree(left, self.roles[members[0]].parent), strict=True):
                roles[id_] = replace(roles[id_], parent=parent, source=source)
        plan = replace(plan, roles=tuple(roles))
        for id_, role in enumerate(roles):
            if role.kind_traits.relays and not plan.learners_below(id_):
                roles[id_] = replace(role, parent=None)
        return replace(plan, roles=tuple(roles))

    def child_towards(self, role: int, server: int) -> int | None:
        """Returns the child of a server that passes on a role's gradients.

        Args:
            role: Id of the role with the gradients.
            server: Id of the server.

        Returns:
            Id of the child, which may be the role itself. None: the gradients do not reach this server.
        """
        parent = self.roles[role].parent
        return role if parent == server else None if parent is None else self.child_towards(parent, server)

    def learners_below(self, role: int) -> int:
        """Returns the number of learners whose gradients a role has or takes, including itself if it is a learner."""
        return int(self.roles[role].kind_traits.trains) + sum(map(self.learners_below, self.children[role]))

    def _those(self, wanted: Callable[[RoleTraits], bool]) -> tuple[int, ...]:
        absent = self.gone | self.dormant
        return tuple(i for i, role in enumerate(self.roles) if wanted(role.kind_traits) and i not in absent)

    def _below(self, above: Callable[[Role], int | None]) -> tuple[tuple[int, ...], ...]:
        found: list[list[int]] = [[] for _ in self.roles]
        absent = self.gone | self.dormant
        for id_, role in enumerate(self.roles):
            if id_ in absent or role.kind_traits.tests:
                continue
            if (parent := above(role)) is not None:
                found[parent].append(id_)
        return tuple(map(tuple, found))


def group_tree(members: Sequence[int], server: int | None) -> list[tuple[int | None, int | None]]:
    """Returns parent and source of each member of a compute group: the first one pushes for all, and weights go down a
    tree.

    Args:
        members: Ids of the members.
        server: Id of the parameter server, if there is one.
    """
    return [(members[0], members[(i - 1) // BINARY]) if i else (server, None) for i in range(len(members))]
