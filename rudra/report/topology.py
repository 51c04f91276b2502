"""`rudra topology`: the roles of a job or a run, as text and as data for the drawing of a report."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from protocols import Hogbatch
from rudra.core.rows import form_of_gradients
from rudra.errors import ConfigError, ResultsError, TopologyError
from rudra.job.job import Job
from rudra.job.table import checked
from rudra.job.tables import HogbatchTable
from rudra.job.transports import parsed, transport_text
from rudra.machine import cores
from rudra.prepare import cost_files
from rudra.prepare.cut import with_cut
from rudra.prepare.resolve import RankFacts, fit, resolve, resolve_virtual
from rudra.report.plan_tree import Branch, by_gradients, by_weights
from rudra.results.reader import Results, open_results
from rudra.results.summary import protocol_label
from topologies import Plan
from topologies.kinds import ELSEWHERE, Reduction

_MOST_LINES = 40
_MOST_NODES = 12
_MOST_SPANS = 4


@dataclass(frozen=True)
class Cast:
    """A plan, and the nodes of its roles.

    Attributes:
        topology: name and options of the topology.
        protocol: protocol in the paper's notation.
        plan: roles and their connections.
        nodes: node of every role. ELSEWHERE: a node of its own.
        per_update: number of gradients in an update (c), counted as workers send them.
        hosts: names of nodes, as far as they are known.
        idle: world ranks without a role.
        node_memory: whether ranks of a node read each other's memory, if the job decides that. None: unknown.
        gradients: format of the gradients, if it is worth mentioning.
        transport: how tensors travel between ranks that compute on GPUs. Empty: there are none.
        cpu_learners: numbers of the learners that compute on the CPU while others use GPUs. Empty: there are none.
    """

    topology: str
    protocol: str
    plan: Plan
    nodes: tuple[int, ...]
    per_update: int
    hosts: Mapping[int, str] = field(default_factory=dict)
    idle: tuple[int, ...] = ()
    node_memory: bool | None = None
    gradients: str = ""
    transport: str = ""
    cpu_learners: str = ""


def of_job(job: Job, ranks: int | None = None, sizes: Sequence[int] = ()) -> Cast:
    """Returns the roles that a job would have.

    Args:
        job: job, which may be unresolved.
        ranks: number of ranks that a launcher would start. None: as many as the job needs.
        sizes: number of ranks on each node, instead of `ranks`. By default all ranks are on one node.

    Raises:
        ConfigError: `ranks` and `sizes` contradict each other, or the protocol does not work on this topology.
        TopologyError: the topology does not fit this number of ranks or learners.
    """
    if ranks is not None and sizes and sum(sizes) != ranks:
        raise ConfigError(f"--nodes {','.join(map(str, sizes))}: has {sum(sizes)} ranks, but -n is {ranks}")
    places = [node for node, size in enumerate(sizes or [ranks or 0]) for _ in range(size)]
    try:
        if places:
            decided = with_cut(job, {}, len(places))
            job, plan = fit(job, decided, [RankFacts(node, "", cores()) for node in places])
            idle = set(range(len(places))) - {role.world_rank for role in plan.roles}
            nodes = tuple(places[role.world_rank] for role in plan.roles)
            form, transport = form_of_gradients(job, plan, nodes), transport_text(job, plan, nodes)
            found = replace(_cast(job, plan, near=True), nodes=nodes, idle=tuple(sorted(idle)))
            return replace(found, gradients=form, transport=transport)
        simulated = job.simulation.nodes is not None or job.simulation.costs is not None
        if simulated:
            job, plan = resolve_virtual(cost_files.load(job), cores=cores())
        else:
            job, _ = resolve(job, {}, cores=cores())
            plan = job.plan([0] * job.learners)
    except ValueError as error:
        raise TopologyError(str(error)) from None
    return _cast(job, plan, near=job.simulation.servers_on_first_node or not simulated)


def _cast(job: Job, plan: Plan, *, near: bool) -> Cast:
    protocol = job.make_protocol(plan)
    name = getattr(job.protocol.name, "__name__", job.protocol.name)
    label = protocol_label({"protocol": name, "n": protocol.n})
    if plan.scheduled:
        label += f" ({protocol.text})"
    name = _with_options(job.make_topology().name, job.topology.options)
    nodes, shared = plan.nodes(near=near), job.cluster.node_memory
    form, transport = form_of_gradients(job, plan, nodes), transport_text(job, plan, nodes)
    about = name, label, plan, nodes, protocol.gradients_per_update
    on_cpu = job.cpu_learners_text(plan)
    return Cast(*about, node_memory=shared, gradients=form, transport=transport, cpu_learners=on_cpu)


def of_results(results: Results) -> Cast | None:
    """Returns the roles that a run had. None: the file does not record them."""
    rows, about, job = results.roles, results.attributes, results.job
    if not len(rows):
        return None
    plan = results.plan().with_active(job.get("cluster", {}).get("active_learners"))
    label = protocol_label({"protocol": about.get("protocol"), "n": about.get("n")})
    if plan.scheduled:
        table = checked(HogbatchTable, job.get("hogbatch", {}), "hogbatch")
        label += f" ({Hogbatch(plan.learner_numbers, **table.arguments(plan)).text})"
    name = _with_options(about["topology"], job.get("topology", {}).get("options", {}))
    names = list(about.get("hosts") or ())
    real = about.get("driver") == "mpi"
    near = real or bool(job.get("simulation", {}).get("servers_on_first_node"))
    nodes, used = plan.nodes(near=near), {role.world_rank for role in plan.roles}
    hosts = {}
    if real and len(names) > max(used):  # one name for each rank
        hosts = {node: names[role.world_rank] for role, node in zip(plan.roles, nodes, strict=True)}
    idle = tuple(sorted(set(range(len(names))) - used)) if hosts else ()
    shared = job.get("cluster", {}).get("node_memory") if real else None
    transports = parsed(about.get("transport") or "")
    text = "" if transports is None else transports.text(nodes, node_memory=bool(shared))
    found = Cast(name, label, plan, nodes, about["gradients_per_update"], hosts, idle, shared, transport=text)
    return replace(found, cpu_learners=about.get("cpu_learners") or "")


def of_file(path: Path) -> Cast:
    """Returns the roles that a run had, as `of_results`.

    Raises:
        ResultsError: the file does not exist, is damaged, or does not record the roles.
    """
    with open_results(path) as results:
        cast = of_results(results)
    if cast is None:
        raise ResultsError(f"{path}: does not record the roles of ranks")
    return cast


def _with_options(topology: str, options: Mapping[str, Any]) -> str:
    told = ", ".join(f"{key} = {value}" for key, value in options.items())
    return f"{topology} ({told})" if told else topology


def as_text(cast: Cast, *, everything: bool = False) -> str:
    """Returns trees, nodes and summary.

    Args:
        cast: roles to show.
        everything: also show every one of many similar siblings.
    """
    plan, most = cast.plan, None if everything else _MOST_LINES
    parts = [f"topology {cast.topology}, protocol {cast.protocol}", ""]
    trees = [_rows(cast, by_gradients(plan, most))]
    heads = [_way_of_gradients(plan)]
    if plan.overlapped:
        trees.append(_rows(cast, by_weights(plan, most)))
        heads.append("weights come down, on each edge the newest:")
    width = max(len(row[0]) for tree in trees for row in tree)
    for head, tree in zip(heads, trees, strict=True):
        parts += [head, *(f"  {name:{width}}  {rest}".rstrip() for name, rest in tree), ""]
    parts += ["nodes:", *_placement(cast, everything=everything), "", *summary(plan, cast.per_update)]
    parts += [f"gradients: {cast.gradients}"] if cast.gradients else []
    parts += [f"devices: learners on the CPU: {cast.cpu_learners}; the others on GPUs"] if cast.cpu_learners else []
    parts += [f"transport: {cast.transport}"] if cast.transport else []
    parts += [f"shared memory: {shared}"] if (shared := sharing(cast)) else []
    return "\n".join(parts)


_ADDED: dict[Reduction, str] = {
    "ordered": "in group_rank order",
    "nodes": "in group_rank order on each node, and then the nodes' sums",
    "mpi": "by a library's allreduce (not replayable)",
}


def _way_of_gradients(plan: Plan) -> str:
    way = _way_of_fronts(plan)
    if plan.stage is None:
        return way
    count = len(plan.stages)
    there = "the stage server, which has" if count == 1 else f"one of {count} stage servers, which have"
    sums = "" if count == 1 else ";\nthese servers add the gradients of their layers up one after the other"
    return (
        f"activations go to {there} the last layers, and their gradients come back{sums};\n"
        f"of the first layers, which learners have, {way}"
    )


def _way_of_fronts(plan: Plan) -> str:
    """Describes how gradients or replicas of the learners travel."""
    if plan.overlapped:
        return "gradients go up:"
    if plan.sharded:
        servers = len(plan.front_owners)
        return f"each of {servers} servers receives a part of every gradient, and sends a part of the weights:"
    if plan.averaging and plan.served:
        return "every learner trains its own replica; replicas go up one by one, and weights come back:"
    if plan.window:
        share = "the workers of a node share" if plan.window_leaders else "all share"
        return f"workers apply their gradients to weights that {share}, and get their work from above:"
    if not plan.groups:
        return "gradients go up, and weights come down:"
    added = _ADDED[plan.reduction]
    if plan.sharing == "replica":
        trains = f"each group trains a replica, by its gradients, added {added}"
        return f"{trains};\nthen differences are added, group by group:"
    if plan.sharing == "reference":
        corrects = "every learner trains a replica of its own, corrected by its block's reference"
        to_reference = f"differences from the reference are added {added}"
        return f"{corrects};\n{to_reference}; then differences of references from the weights:"
    if plan.averaging:
        return f"every learner trains a replica of its own; differences from the weights are added {added}:"
    within = f"inside a group, which has a communicator of its own, gradients are added {added}"
    if not plan.served:
        return f"{within};\nevery learner updates weights of its own:"
    return f"{within};\nits first learner pushes and pulls for all:"


def _rows(cast: Cast, branches: Sequence[Branch]) -> list[tuple[str, str]]:
    """Returns the name in the tree and the remaining text of each branch."""
    found: list[tuple[str, str]] = []

    def add(branch: Branch, lead: str, follow: str) -> None:
        found.append((lead + name_of(cast.plan, branch), about(cast, branch)))
        for i, child in enumerate(branch.below):
            last = i == len(branch.below) - 1
            add(child, follow + ("└─ " if last else "├─ "), follow + ("   " if last else "│  "))

    for branch in branches:
        add(branch, "", "")
    return found


def name_of(plan: Plan, branch: Branch) -> str:
    """Returns the name of a role, a group or a run of siblings."""
    if branch.groups:
        return f"{_block(plan)}{_s(len(branch.groups))} {spans(branch.groups)}"
    first = plan.roles[branch.roles[0]]
    indices = spans(plan.roles[role].index for role in branch.roles)
    return first.name if len(branch.roles) == 1 else f"{first.kind}s {indices}"


def about(cast: Cast, branch: Branch) -> str:
    """Describes ranks, nodes, and the roles below that are not shown."""
    if branch.groups and branch.below:
        return counted(cast.plan, branch.roles)
    more = [f"with {counted(cast.plan, branch.hidden)}"] if branch.hidden else []
    if branch.groups:
        more = [counted(cast.plan, branch.roles)]
    return ", ".join([where(cast, branch.roles), *more])


def where(cast: Cast, roles: Sequence[int]) -> str:
    """Describes the ranks and nodes of roles."""
    ranks = sorted({cast.plan.roles[role].world_rank for role in roles})
    nodes = sorted({cast.nodes[role] for role in roles})
    known = [node for node in nodes if node != ELSEWHERE]
    texts = ["a node of its own"] if ELSEWHERE in nodes else []
    texts += [f"node{_s(len(known))} {spans(known)}"] if known else []
    return f"rank{_s(len(ranks))} {spans(ranks)}, {', '.join(texts)}"


def counted(plan: Plan, roles: Iterable[int]) -> str:
    """Counts the roles of each kind, in the plan's order, learners last."""
    in_order = sorted(roles, key=lambda role: (plan.roles[role].kind_traits.trains, role))
    kinds = Counter(plan.roles[role].kind for role in in_order)
    return ", ".join(f"{count:,} {kind}{_s(count)}" for kind, count in kinds.items())


def _placement(cast: Cast, *, everything: bool) -> list[str]:
    """Returns one line for each node."""
    rows = [(place.name, place.text) for place in placed(cast, None if everything else _MOST_NODES)]
    rows += [("no role", f"rank{_s(len(cast.idle))} {spans(cast.idle)}")] if cast.idle else []
    width = max(len(name) for name, _ in rows)
    return [f"  {name:{width}}  {text}" for name, text in rows]


def sharing(cast: Cast) -> str:
    """Describes in one line which ranks read each other's memory. Empty: unknown."""
    if cast.node_memory is None:
        return ""
    if not cast.node_memory:
        return "none, as [cluster] node_memory = false says"
    found = []
    for place in placed(cast, _MOST_NODES):
        ranks = {cast.plan.roles[role].world_rank for role in place.roles}
        if len(ranks) > 1:
            where = "a node of its own" if place.name == "of its own" else f"node{'s' * place.several} {place.name}"
            found.append(f"ranks {spans(ranks)} on {'each of ' * place.several}{where}")
    if len(found) > _MOST_SPANS:
        found = [*found[: _MOST_SPANS - 1], f"… {found[-1]}"]
    alone = "there is one rank" if cast.plan.ranks == 1 else "each rank has its own node"
    return "; ".join(found) or f"none, as {alone}"


class ShownNode(NamedTuple):
    """A node, or several nodes shown as one: their numbers, their roles, and a text about the roles."""

    name: str
    several: bool
    roles: tuple[int, ...]
    text: str


def placed(cast: Cast, most: int | None) -> list[ShownNode]:
    """Returns all nodes. If there are more than `most`, the middle ones are shown as one."""
    on_node: dict[int, list[int]] = {}
    for role, node in enumerate(cast.nodes):
        on_node.setdefault(node, []).append(role)
    nodes = sorted(on_node)
    hidden = [] if most is None or len(nodes) <= most else nodes[most // 2 : -1]
    found: list[ShownNode] = []
    for node in nodes:
        if node not in hidden:
            host = f" ({cast.hosts[node]})" if node in cast.hosts else ""
            name = "of its own" if node == ELSEWHERE else f"{node}{host}"
            found.append(ShownNode(name, False, tuple(on_node[node]), _named(cast.plan, on_node[node])))
        elif node == hidden[0]:
            among = tuple(role for n in hidden for role in on_node[n])
            found.append(ShownNode(spans(hidden), True, among, counted(cast.plan, among)))
    return found


def _named(plan: Plan, roles: Sequence[int]) -> str:
    """Returns roles by kind, with their numbers."""
    kinds: dict[str, list[int]] = {}
    for role in roles:
        kinds.setdefault(plan.roles[role].kind, []).append(role)
    return ", ".join(name_of(plan, Branch(tuple(ids))) for ids in kinds.values())


def summary(plan: Plan, per_update: int) -> list[str]:
    """Summarises the plan in two lines: its roles, and its messages. Arguments as for `message`."""
    ranks = len({role.world_rank for role in plan.roles})
    of = "reference" if plan.sharing == "reference" else "replica" if plan.averaging else "gradient"
    update = f"{per_update:,} {of}{_s(per_update)} per update (c)"
    return [f"{ranks:,} rank{_s(ranks)}: {roles(plan)}", f"{update}; {message(plan, per_update)}"]


def roles(plan: Plan) -> str:
    """Counts the roles of each kind, and the workers that the protocol sees."""
    sizes = [len(group) for group in plan.groups]
    workers = f"{plan.workers:,} worker{_s(plan.workers)} of the protocol"
    if sizes:
        those = f"a {_block(plan)}" if len(sizes) == 1 else f"{_block(plan)}s"
        workers += f", {those} of {_either(sizes)} learner{_s(max(sizes))} (k)"
    most = max(Counter(plan.roles[i].world_rank for i in plan.learners).values())
    shared = f", up to {most} on a rank" if most > 1 else ""
    dormant = f", {len(plan.dormant):,} of them dormant" if plan.dormant else ""
    return f"{counted(plan, range(len(plan.roles)))} (λ){dormant}{shared}; {workers}"


def message(plan: Plan, per_update: int) -> str:
    """Describes the content of one message with a gradient.

    Args:
        plan: roles and their connections.
        per_update: number of gradients in an update (c), counted as workers send them.
    """
    if plan.stage is not None:
        return f"{_of_gradients(plan, per_update)}; activations of 1 mini-batch"
    return _of_gradients(plan, per_update)


def _of_gradients(plan: Plan, per_update: int) -> str:
    if not plan.served:
        return "no gradient goes to a server" if not plan.averaging else "an average goes to all, and to no server"
    if plan.groups:
        return f"a message carries the mean over a group's {_either(map(len, plan.groups))} gradients"
    if plan.sharded:
        return f"each of {len(plan.front_owners)} servers gets its part of a gradient"
    if plan.averaging:
        return "a message carries a replica"
    if plan.window:
        each = "; at each epoch's end every node's weights, and their mean" if plan.window_leaders else ""
        return f"no gradient is sent: workers report the gradients that they have applied{each}"
    relays = [i for i, role in enumerate(plan.roles) if role.kind_traits.relays and role.parent == plan.server]
    if not relays or plan.max_gradients_per_message == 1:
        return "a message carries 1 gradient"
    stands_for = {min(per_update, plan.learners_below(role)) for role in relays}
    gradients = f"{_either(stands_for)} gradient{_s(max(stands_for))}"
    return f"a message to the parameter server carries the mean of at least {gradients}"


def _block(plan: Plan) -> str:
    """Returns the name of a unit of learners."""
    return "block" if plan.sharing == "reference" else "group"


def _either(sizes: Iterable[int]) -> str:
    low, *_, high = sorted([*sizes] * 2)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _s(count: int) -> str:
    return "" if count == 1 else "s"


def spans(numbers: Iterable[int]) -> str:
    """Returns whole numbers as text: "0 to 3, 7"."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][-1] + 1:
            found[-1] = [found[-1][0], number]
        else:
            found.append([number])
    texts = [(" to " if span[-1] > span[0] + 1 else ", ").join(map(str, span)) for span in found]
    if len(texts) > _MOST_SPANS:
        texts = [*texts[: _MOST_SPANS - 1], f"… {texts[-1]}"]
    return ", ".join(texts)
