"""Lookup of a topology by name, and fitting of its plan to real ranks."""

import importlib
import inspect
import pkgutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from topologies.kinds import ELSEWHERE, STAGE_REPLICA, STAGE_SERVER
from topologies.plan import Plan, Role


@dataclass(frozen=True, slots=True)
class Topology:
    """Function of a topology with the user's options.

    Attributes:
        name: Name in the job.
        function: Function that makes a plan from the node of every learner.
        per_rank: Largest number of learners on a rank.
        staged: Number of stage servers, which hold the last layers.
        scheduled: Whether the parameter server assigns the samples.
        window: Whether learners update shared weights.
        one_rank: Whether one rank hosts all roles.
    """

    name: str
    function: Callable[[Sequence[int]], Plan]
    per_rank: int = 1
    staged: int = 0
    scheduled: bool = False
    window: bool = False
    one_rank: bool = False

    def draw(self, nodes: Sequence[int]) -> Plan:
        """Returns the plan for the node of every learner. Callers use `plan` or `fit` instead.

        Raises:
            ValueError: As in `plan`.
        """
        plan = self.function(nodes)
        if self.scheduled:
            plan = replace(plan, scheduled=True, window=self.window)
        if self.staged:
            plan = with_stage_servers(plan, self.staged)
        if self.one_rank:
            return on_one_rank(plan)
        if self.per_rank == 1:
            return plan
        hosted = Counter(role.world_rank for role in plan.roles)
        if any(hosted[plan.roles[learner].world_rank] > 1 for learner in plan.learners):
            raise ValueError(
                f"[cluster] learners_per_rank = {self.per_rank} is not supported with topology {self.name}, which "
                "assigns several roles to a learner's rank; use 1"
            )
        return sharing_ranks(plan, self.per_rank)

    def plan(self, learners: int, nodes: Sequence[int] | None = None) -> Plan:
        """Places the roles of a job.

        Args:
            learners: λ.
            nodes: Node of every learner, in ascending order. By default all are on one node.

        Raises:
            ValueError: The options of the topology do not fit these learners.
        """
        return self.draw([0] * learners if nodes is None else nodes)

    def fit(self, places: Sequence[int], learners: int | None = None) -> Plan:
        """Returns the plan for real ranks: as many learners as possible, and each role on a rank of its node.

        The order of the ranks does not matter, and nodes may have different numbers of ranks. If servers and learners
        do not fit exactly, some ranks have no role.

        Args:
            places: Node of every rank, any numbers.
            learners: λ, if the job gives it.

        Raises:
            ValueError: There are too few ranks, or their number does not fit the number of learners.
        """
        if self.one_rank:
            return self.plan(learners or 1)
        order = {node: i for i, node in enumerate(dict.fromkeys(places))}
        ranks: list[list[int]] = [[] for _ in order]
        for rank, node in enumerate(places):
            ranks[order[node]].append(rank)
        plan = self._filling([len(on_node) for on_node in ranks])
        if plan is not None and learners is not None:
            plan = self._with_fewer(plan, learners, [len(on_node) for on_node in ranks])
        found = 0 if plan is None else len(plan.learners)
        if plan is None or learners not in {None, found}:
            least, total = self.plan(learners or 1).ranks, len(places)
            if learners is None or not found:
                enough = "" if learners else " or more"
                raise ValueError(f"{total} ranks are too few for topology {self.name}; start {least}{enough}")
            raise ValueError(
                f"{learners} learners with topology {self.name} need {least} ranks, but the launcher started {total}; "
                f"start {least}, or set cluster.learners = {found}"
            )
        free = [iter(on_node) for on_node in ranks]
        nodes = _nodes_of_ranks(plan, [len(on_node) for on_node in ranks])
        real = {rank: next(free[node]) for rank, node in nodes.items()}
        return replace(plan, roles=tuple(replace(role, world_rank=real[role.world_rank]) for role in plan.roles))

    def _filling(self, sizes: Sequence[int]) -> Plan | None:
        """Returns the plan with the most learners for nodes with these numbers of ranks. None: no learner fits."""
        starts: list[tuple[list[int], Plan]] = []
        errors: list[ValueError] = []  # of a topology whose options need more learners
        for each in dict.fromkeys((self.per_rank, 1)):
            for at_once in (True, False):
                try:
                    start = self._down(sizes, each, at_once=at_once)
                except ValueError as error:
                    errors.append(error)
                    continue
                if start is not None:
                    starts.append(start)
                    break
        if errors and not starts:
            raise errors[0]
        if not starts:  # they may have missed the node that has room for one
            for alone in (node for node, size in enumerate(sizes) if size):
                plan, spare = self._drawn(one := [int(node == alone) for node in range(len(sizes))], sizes)
                if min(spare) >= 0:
                    starts.append((one, plan))
                    break
        return self._grown(*max(starts, key=lambda start: len(start[1].learners)), sizes) if starts else None

    def _grown(self, on_node: list[int], plan: Plan, sizes: Sequence[int]) -> Plan:
        """Returns the plan with more learners, as long as ranks are free, because fewer learners may need fewer
        servers."""
        for step in dict.fromkeys((self.per_rank, 1)):
            grows = True
            while grows:
                grows = False
                for node, size in enumerate(sizes):
                    most = self.per_rank * size - step
                    while on_node[node] <= most and (plan.ranks < sum(sizes) or self._has_room(plan)):
                        more = [count + step * (i == node) for i, count in enumerate(on_node)]
                        larger, spare = self._drawn(more, sizes)
                        if min(spare) < 0:
                            break
                        on_node, plan, grows = more, larger, True
        return plan

    def _down(self, sizes: Sequence[int], each: int, *, at_once: bool) -> tuple[list[int], Plan] | None:
        """Returns the first plan that fits, for a falling number of learners on a rank. None: none does.

        Nodes with too few ranks lose learners, either all such nodes in one step, or only the first of them.
        """
        on_node = [each * size for size in sizes]
        while any(on_node):
            plan, spare = self._drawn(on_node, sizes)
            if min(spare) >= 0:
                return on_node, plan
            # A quarter of what is too much, because each learner less may need fewer servers, too.
            fewer = [each * ((3 - min(0, more)) // 4) for more in spare]
            first = next((node for node, less in enumerate(fewer) if less and on_node[node]), None)
            if first is None:
                break
            on_node = [
                max(0, count - (less if at_once or node == first else 0))
                for node, (count, less) in enumerate(zip(on_node, fewer, strict=True))
            ]
        return None

    def _has_room(self, plan: Plan) -> bool:
        """Returns whether some rank could host one more learner."""
        return len(plan.learners) < self.per_rank * len({plan.roles[i].world_rank for i in plan.learners})

    def _with_fewer(self, plan: Plan, learners: int, sizes: Sequence[int]) -> Plan:
        """Returns the plan for fewer learners if it needs the same ranks, else the plan itself."""
        on_node = Counter(plan.roles[i].node for i in plan.learners)
        best = plan
        for node in sorted(on_node, reverse=True) if self.per_rank > 1 else ():
            while len(best.learners) > learners and on_node[node] > 1:
                fewer = [on_node[i] - (i == node) for i in range(len(sizes))]
                smaller, spare = self._drawn(fewer, sizes)
                if smaller.ranks < plan.ranks or min(spare) < 0:
                    break
                on_node[node], best = fewer[node], smaller
        return best if len(best.learners) == learners else plan

    def _drawn(self, on_node: Sequence[int], sizes: Sequence[int]) -> tuple[Plan, list[int]]:
        """Returns the plan for a number of learners on each node, and the number of ranks that it leaves free there."""
        plan = self.draw([node for node, count in enumerate(on_node) for _ in range(count)])
        used = Counter(_nodes_of_ranks(plan, sizes).values())
        return plan, [size - used[node] for node, size in enumerate(sizes)]


def with_stage_servers(plan: Plan, count: int) -> Plan:
    """Returns a plan with additional ranks, whose roles have the last layers.

    Args:
        plan: Plan whose learners have all layers.
        count: Number of additional roles. The first one owns the last layers, and the others keep replicas.
    """
    servers = (Role(STAGE_REPLICA if i else STAGE_SERVER, i, plan.ranks + i) for i in range(count))
    return replace(plan, roles=(*plan.roles, *servers))


def on_one_rank(plan: Plan) -> Plan:
    """Returns a plan whose roles are all on rank 0.

    Raises:
        ValueError: The learners are on several nodes.
    """
    if len({plan.roles[learner].node for learner in plan.learners}) > 1:
        raise ValueError("[cluster] one_rank = true: the learners are on several nodes; use one_rank = false")
    return replace(plan, roles=tuple(replace(role, world_rank=0) for role in plan.roles))


def sharing_ranks(plan: Plan, per_rank: int) -> Plan:
    """Returns a plan whose learners share ranks with their neighbours in the same node and compute group.

    So a rank belongs to one group, and groups stay independent of each other.

    Args:
        plan: Plan with a rank for every learner.
        per_rank: Largest number of learners on a rank.
    """
    ranks = [role.world_rank for role in plan.roles]
    block: list[int] = []
    for id_ in plan.learners:
        role, first = plan.roles[id_], plan.roles[block[0] if block else id_]
        if len(block) == per_rank or (role.node, role.group) != (first.node, first.group):
            block.clear()
        block.append(id_)
        ranks[id_] = ranks[block[0]]
    dense = {rank: place for place, rank in enumerate(sorted(set(ranks)))}
    roles = (replace(role, world_rank=dense[rank]) for role, rank in zip(plan.roles, ranks, strict=True))
    return replace(plan, roles=tuple(roles))


def _nodes_of_ranks(plan: Plan, sizes: Sequence[int]) -> dict[int, int]:
    """Returns the node of each rank of a plan, for nodes with these numbers of ranks.

    Servers without a fixed node are on the first node with a free rank. If no node has one, they are on the first node
    with a learner.
    """
    wanted: dict[int, int] = {}
    for role in plan.roles:
        wanted[role.world_rank] = max(role.node, wanted.get(role.world_rank, ELSEWHERE))
    used = Counter(wanted.values())
    room = [node for node, size in enumerate(sizes) for _ in range(size - used[node])]
    full = plan.roles[plan.learners[0]].node
    anywhere = iter(room)
    return {rank: next(anywhere, full) if node == ELSEWHERE else node for rank, node in wanted.items()}


def load(
    topology: Any,
    options: Mapping[str, Any] | None = None,
    per_rank: int = 1,
    *,
    staged: int = 0,
    scheduled: bool = False,
    window: bool = False,
    one_rank: bool = False,
    library: bool = False,
) -> Topology:
    """Binds a topology to its options.

    Args:
        topology: Object with the function `plan`, or the name of a shipped topology.
        options: Keyword arguments for it.
        per_rank: Largest number of learners on a rank.
        staged: Number of stage servers, which hold the last layers.
        scheduled: Whether the parameter server assigns the samples.
        window: Whether learners update shared weights.
        one_rank: Whether one rank hosts all roles.
        library: Whether a library reduces in compute groups if the options do not say who does.

    Raises:
        KeyError: The name is unknown.
        ValueError: The object lacks the function, or does not accept the options.
    """
    source = shipped()[topology] if isinstance(topology, str) else topology
    bound = dict(options or {})
    own = {id(of): name for name, of in shipped().items()}
    text = str(own.get(id(source)) or getattr(source, "__name__", type(source).__name__))
    if not callable(getattr(source, "plan", None)):
        raise ValueError(f"[topology] name: {text} has no function plan; define plan(nodes)")
    plan = source.plan
    signature = _signature(plan) if isinstance(plan, FunctionType) else inspect.signature(plan)
    try:
        signature.bind([0], **bound)
    except TypeError as error:
        valid = ", ".join([*signature.parameters][1:]) or "none"
        raise ValueError(f"[topology] options: {text}.plan: {error}; valid: {valid}") from None
    if library and "reduction" in signature.parameters:
        bound.setdefault("reduction", "mpi")
    return Topology(text, partial(source.plan, **bound), per_rank, staged, scheduled, window, one_rank)


_signature = lru_cache(maxsize=64)(inspect.signature)  # a job makes its topology many times


@cache
def shipped() -> dict[str, ModuleType]:
    """Returns name -> module of the topologies in this package ("adv*" cannot name a module, so its module is
    adv_star)."""
    names = sorted(module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)]))
    modules = {name.replace("_star", "*"): importlib.import_module(f"topologies.{name}") for name in names}
    return {name: module for name, module in modules.items() if callable(getattr(module, "plan", None))}
