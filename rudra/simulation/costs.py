"""Durations in virtual time: one cost model for the simulator and for predictions.

The time of a computation depends on μ, on other computations on the node, and on chance. A message takes latency. A
tensor also occupies the sender's outgoing and the receiver's incoming port, so a server's link serialises tensors from
many learners. A server handles one message after the other.

Source: Rudra §3.3 (contention at one receiver) and §5.2 (GEMM at small μ). Omnivore §4 (hardware efficiency).
"""

import itertools
import math
import random
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from protocols import Hogbatch
from rudra.core.actions import (
    Accumulate,
    AverageGroup,
    BackpropFirstStage,
    ComputeEvaluationPart,
    Copy,
    Correct,
    Evaluate,
    ExecutorAction,
    PullReplica,
    RunFirstStage,
    RunLastStage,
    StepReplica,
    TrainInPlace,
    Update,
)
from rudra.core.backward import SHARE, WHOLE, Leads
from rudra.core.forward import EarlyTimes
from rudra.core.layout import Placed
from rudra.core.priority import WEIGHT
from rudra.core.work import by_speed, portion, speeds_text
from rudra.errors import ConfigError
from rudra.job.job import Job
from rudra.job.simulation import SimulationTable
from rudra.log import log
from rudra.prepare.points import at, bank_at
from rudra.simulation.overlap import Overlap
from topologies import Plan
from topologies.kinds import ELSEWHERE


class Link(NamedTuple):
    """Link from one role to another.

    Attributes:
        latency_s: Latency of every message in seconds.
        seconds_per_byte: Transfer time of a tensor, in seconds per byte.
        out: Name of the port that a tensor occupies at the sender.
        into: Name of the port that a tensor occupies at the receiver.
        blocking: Ends that move only one tensor at a time, in or out.
    """

    latency_s: float
    seconds_per_byte: float
    out: tuple[str, int]
    into: tuple[str, int]
    blocking: tuple[tuple[str, int], ...] = ()


class Pace(NamedTuple):
    """Time that a worker takes for parts of batches, which may have any size.

    Attributes:
        compute_s: Computation time on one thread, as `at` accepts it.
        threads: Number of threads that compute in parallel. They divide the time of a part.
        size: Number of samples of the first part.
    """

    compute_s: float | Mapping[int, float]
    threads: int
    size: int

    def seconds(self, samples: int) -> float:
        """Returns the seconds for a part of `samples` samples."""
        return at(self.compute_s, samples) / self.threads


def paces_of(job: Job, plan: Plan) -> dict[int, Pace]:
    """Returns the pace of each learner's role if a coordinator assigns samples, otherwise an empty dict."""
    if not plan.scheduled:
        return {}
    protocol = Hogbatch.of(job.make_protocol(plan))
    team, common = job.hogbatch.team(plan.learner_numbers), job.simulation.compute_s
    found = {}
    for role in plan.whole.learners:
        number = plan.roles[role].index
        own = team[number].compute_s
        found[role] = Pace(common if own is None else own, team[number].threads, protocol.first_sizes[number])
    return found


class Crowded(NamedTuple):
    """Evaluation on a node whose learners use all cores.

    Attributes:
        node: The node.
        seconds: Duration of the evaluation.
        delay_s: Seconds that each learner of the node loses.
    """

    node: int
    seconds: float
    delay_s: float

    @property
    def slowdown(self) -> float:
        """Factor on the time of the learners during the evaluation."""
        return self.seconds / (self.seconds - self.delay_s)


class CostModel:
    """Durations in one cluster.

    Args:
        table: Simulation table with its cost file read (`load`).
        plan: Roles and their ranks.
        minibatch_size: μ.
        shares: The learners' shares (`rudra.core.work.portion`).
        size_bytes: Size of the weights, and of a gradient, in memory.
        placed: How the model is divided between learners and a stage server.
        paces: Paces of learners whose batches may have any size. `compute_s` then holds the time of the first batch.
        overlap: Gradients and weights that are sent in buckets. None: all are sent as a whole.
        banks: Whether the learners of a rank compute together (`ClusterTable.learners_per_device`).
        urgent: Whether evaluations have the priority of the training, because they decide.

    Attributes:
        paces: Paces by learner, as passed in.
        node: Node of every role.
        crowding: Node with learners -> factor on their times, because ranks share the node.
        evaluation: Evaluation on a node whose learners use all cores. None: no learner loses time.
        compute_s: Mean duration of a mini-batch, for every learner's role, also if it is dormant.
        guessed: Mini-batch sizes that `compute_s` does not list, and how `at` estimates them. Empty if it lists all.
        pieces: Fraction of that duration that each kind of a learner's computation takes.
        backward: Fraction of that duration that the backward pass takes. It finishes the gradient part by part.
    """

    def __init__(
        self,
        table: SimulationTable,
        plan: Plan,
        minibatch_size: int,
        shares: tuple[float, ...] = (),
        size_bytes: int = 0,
        placed: Placed | None = None,
        paces: Mapping[int, Pace] | None = None,
        overlap: Overlap | None = None,
        banks: bool = False,
        urgent: bool = True,
    ) -> None:
        self.paces, self._overlap = paces or {}, overlap
        self._pushers: dict[int, tuple[frozenset[int], Leads]] = {}  # by the role that takes gradients
        self._pullers: dict[int, tuple[frozenset[int], EarlyTimes | None]] = {}  # by the role that gives weights
        # By first member, number of members and size.
        self._reductions: dict[tuple[int, int, float], tuple[float, EarlyTimes | None]] = {}
        self.table, self.plan, self.size_bytes = table, plan, size_bytes
        self._placed = placed = placed or Placed()
        # A backward pass has twice the operations of a forward pass.
        self.pieces: dict[type[ExecutorAction], float] = {
            RunFirstStage: (1 - placed.back) / 3,
            BackpropFirstStage: (1 - placed.back) * 2 / 3,
        }
        whole_pass = SHARE if overlap is None else overlap.share
        self.backward = whole_pass if plan.stage is None else self.pieces[BackpropFirstStage]
        self.pieces[ComputeEvaluationPart] = 1 / 3  # first batch of a worker, with the training clock stopped
        self._conclude_s = placed.back * at(table.compute_s, minibatch_size) if plan.stage is not None else 0.0
        node = list(plan.nodes(near=table.servers_on_first_node))
        for place, owner in enumerate((*plan.owners, *plan.stages[1:])):
            if node[owner] == ELSEWHERE:  # each server has a node and a link of its own
                node[owner] -= place
        self.node = _on_machines(node, table.machines) if table.machines else tuple(node)
        computers = {plan.roles[role].world_rank: self.node[role] for role in plan.learners}
        ranks = Counter(computers.values())  # learners of one rank take turns, so they count once
        self.crowding = {place: 1 + table.node_slowdown * (count - 1) for place, count in ranks.items()}
        self._ranks = ranks
        self.evaluation = self.evaluation_of(urgent=urgent)
        self.compute_s = self._compute_times(minibatch_size, shares, banks=banks)
        self._local_s: dict[type[ExecutorAction], tuple[float, float]] = {
            Accumulate: _affine(table.gradient_s, table.gradient_s_per_byte),
            Update: _affine(table.update_s, table.update_s_per_byte),
            StepReplica: _affine(table.update_s, table.update_s_per_byte),
            TrainInPlace: _affine(table.update_s, table.update_s_per_byte),  # the time of its update
            PullReplica: _affine(0.0, table.copy_s_per_byte),
            Copy: _affine(0.0, table.copy_s_per_byte),
            Correct: _affine(0.0, table.correction_s_per_byte),
            Evaluate: _affine(table.evaluation_s, None),
        }
        self._local_s_of: dict[float, dict[type[ExecutorAction], float]] = {}  # by the fraction of the weights

    def local_seconds(self, kind: type[ExecutorAction]) -> float:
        """Returns the seconds of a local action on whole vectors. Computations have their own duration
        (`computation`)."""
        fixed_s, per_byte_s = self._local_s.get(kind, _NOTHING)
        return fixed_s + per_byte_s * self.size_bytes

    def local_s(self, role: int) -> dict[type[ExecutorAction], float]:
        """Returns the seconds of each local action of a role on its part of the weights. Missing actions take no
        time."""
        part = self.part(role)
        if part not in self._local_s_of:
            taken = {kind: self.local_seconds(kind) * part for kind in self._local_s}
            self._local_s_of[part] = {kind: seconds for kind, seconds in taken.items() if seconds}
        if self.evaluation is not None and role == self.plan.statistics:
            return self._local_s_of[part] | {Evaluate: self.evaluation.seconds}
        if role not in self.plan.stages:
            return self._local_s_of[part]
        added_s = self._local_s_of[part].get(Accumulate, 0.0) * (max(map(len, self.plan.groups), default=1) - 1)
        own: dict[type[ExecutorAction], float] = {RunLastStage: self._conclude_s, AverageGroup: added_s}
        return self._local_s_of[part] | {kind: seconds for kind, seconds in own.items() if seconds}

    def part(self, role: int) -> float:
        """Returns the fraction of the weights, and of each gradient, that a role holds, or sends and receives."""
        if self.plan.stage is not None:
            front = self._placed.front
            if role == self.plan.statistics or role in self.plan.stages:
                return 1.0 if role == self.plan.statistics else 1 - front
        else:
            front = 1.0
        return front / len(self.plan.front_owners) if role in self.plan.front_owners else front

    def travelling(self, sender: int, receiver: int) -> float:
        """Returns the size of a tensor sent between two roles, as a fraction of the weights."""
        ends = {sender, receiver}
        if not ends.isdisjoint(self.plan.stages) and not ends.isdisjoint(self.plan.learners):
            return self._placed.crossing
        # An owner of weights sends and receives only its part of a tensor.
        return min(self.part(sender), self.part(receiver))

    def evaluation_of(self, *, urgent: bool) -> Crowded | None:
        """Returns the cost of an evaluation among learners that use all cores of its node.

        Args:
            urgent: See `CostModel`.
        """
        cores, core_s, weight = self.table.cores_per_node, self.table.evaluation_core_s, 1.0 if urgent else WEIGHT
        if cores is None or not core_s:
            return None
        node = self.node[self.plan.statistics]
        wanted = self._ranks.get(node, 0)
        if wanted < cores:
            return None
        return Crowded(node, core_s * max(1.0, (wanted + weight) / (cores * weight)), core_s / wanted)

    def _compute_times(self, minibatch_size: int, shares: tuple[float, ...], *, banks: bool) -> dict[int, float]:
        table, plan, learners = self.table, self.plan, self.plan.whole.learners
        if self.paces:
            own_s = {role: pace.seconds(pace.size) for role, pace in self.paces.items()}
            self.guessed = ""
        else:
            counts = {role: portion(plan, role, minibatch_size, shares).count for role in learners}
            alone_s = {count: at(table.compute_s, count) for count in {*counts.values()}}
            own_s = {role: alone_s[counts[role]] for role in learners}
            own_s |= self._bank_times(counts) if banks else {}
            self.guessed = guessed(table.compute_s, alone_s)
        return {
            role: own_s[role]
            * self.crowding.get(self.node[role], 1.0)
            * table.slowdown.get(plan.roles[role].index, 1.0)
            for role in learners
        }

    def _bank_times(self, counts: Mapping[int, int]) -> dict[int, float]:
        """Returns the time that each learner of a bank adds to it: they compute together, which takes `bank_s`.

        Args:
            counts: Learner -> samples of its mini-batch.
        """
        table = self.table.bank_s
        hosts = {role: self.plan.roles[role].world_rank for role in self.plan.learners} if table else {}
        sizes = Counter(hosts.values())
        return {role: bank_at(table, sizes[rank], counts[role]) / sizes[rank] for role, rank in hosts.items()}

    def computation(self, role: int, source: random.Random) -> Callable[[], float]:
        """Returns a function that draws the duration in seconds of each mini-batch of a learner."""
        table, mean_s = self.table, self.compute_s[role]
        width = table.learner_jitter.get(self.plan.roles[role].index, table.jitter)
        draw, uniform = _DISTRIBUTIONS[table.distribution], source.random
        if table.straggler_probability:
            often, factor = table.straggler_probability, table.straggler_factor
            return lambda: mean_s * draw(source, width) * (factor if uniform() < often else 1.0)
        if table.distribution == "uniform":  # the common case, without two calls
            least_s, range_s = mean_s * (1.0 - width), 2.0 * mean_s * width
            return lambda: least_s + range_s * uniform()
        return lambda: mean_s * draw(source, width)

    def relative(self, role: int, samples: int) -> float:
        """Returns the time of a learner for `samples` samples, as a multiple of `compute_s`."""
        pace = self.paces.get(role)
        return 1.0 if pace is None else pace.seconds(samples) / pace.seconds(pace.size)

    def link(self, sender: int, receiver: int) -> Link:
        """Returns the link between two roles: the node's link between nodes, the role's own copying within one node."""
        table, here, there = self.table, self.node[sender], self.node[receiver]
        # With learners that overlap, pushes and pulls have threads of their own (§3.3).
        ends = (sender, receiver) if table.blocking_servers and not self.plan.overlapped else ()
        blocking = tuple(("role", i) for i in ends if self.plan.roles[i].kind_traits.serves)
        if here != there:
            return Link(table.latency_s, 1 / table.bandwidth_bytes_per_s, ("node", here), ("node", there), blocking)
        latency_s = table.latency_s if table.local_latency_s is None else table.local_latency_s
        bandwidth = table.local_bandwidth_bytes_per_s or table.bandwidth_bytes_per_s
        return Link(latency_s, 1 / bandwidth, ("role", sender), ("role", receiver), blocking)

    def core_s(self, sender: int, receiver: int, size_bytes: float) -> dict[int, float]:
        """Returns node -> seconds of a core that a tensor between two roles takes. Inside a node it is a copy."""
        here, there = self.node[sender], self.node[receiver]
        if here == there:
            return {here: size_bytes * self.link(sender, receiver).seconds_per_byte}
        return dict.fromkeys((here, there), size_bytes * self.table.cpu_s_per_byte)

    def reduction_s(self, members: Sequence[int], size_bytes: float) -> float:
        """Returns the time of a compute group's all-reduce after the last gradient is complete.

        Buckets begin in the backward pass.
        """
        return self._reduction(members, size_bytes)[0]

    def early(self, members: Sequence[int], size_bytes: float) -> EarlyTimes | None:
        """Returns the times of the forward passes after a compute group's all-reduce, if they begin before its end."""
        return self._reduction(members, size_bytes)[1]

    def _reduction(self, members: Sequence[int], size_bytes: float) -> tuple[float, EarlyTimes | None]:
        key = members[0], len(members), size_bytes
        if key not in self._reductions:
            whole_s = self._whole_reduction_s(members, size_bytes)
            backward_s = max(self.compute_s[role] for role in members) * self.backward
            update_s = self.local_seconds(Update) * self.part(members[0])
            self._reductions[key] = whole_s, None
            if self._overlap is not None:
                seconds, early = self._overlap.of_group(members, whole_s, backward_s, update_s)
                self._reductions[key] = seconds + self._delay_s(members, whole_s - seconds), early
        return self._reductions[key]

    def _delay_s(self, members: Sequence[int], hidden_s: float) -> float:
        """Returns the delay of a backward pass by transfers in parallel with it, which need time of the same cores.

        Args:
            members: Members of the group.
            hidden_s: Time of the transfers during the pass.
        """
        table, cores = self.table, self.table.cores_per_node
        nodes, on_node = {self.node[role] for role in members}, Counter(self.node[role] for role in self.plan.learners)
        if cores is None or len(nodes) < 2 or not table.cpu_s_per_byte or max(on_node[node] for node in nodes) < cores:
            return 0.0
        # A node sends as much as it receives. A network without limits transfers nothing during a pass.
        both_ways = 2 * table.bandwidth_bytes_per_s if table.bandwidth_bytes_per_s < math.inf else 0.0
        return table.cpu_s_per_byte * both_ways * max(hidden_s, 0.0) / cores

    def leads(self, sender: int, receiver: int) -> Leads:
        """Returns the moments of a backward pass when more of a learner's gradient for a role may be sent."""
        if sender not in self.compute_s or not self.plan.roles[receiver].kind_traits.serves or self._overlap is None:
            return WHOLE
        if receiver not in self._pushers:
            pushers, leads = self._overlap.of_pushes(self.node, receiver)
            self._pushers[receiver] = frozenset(pushers), leads
        senders, leads = self._pushers[receiver]
        return leads if sender in senders else WHOLE

    def pulled(self, sender: int, receiver: int) -> EarlyTimes | None:
        """Returns the times of a learner's forward passes that begin while weights from a server arrive.

        None: they begin after the last arrival.
        """
        if receiver not in self.compute_s:
            return None
        pullers, early = self._pulled_from(sender)
        return early if receiver in pullers else None

    def _pulled_from(self, owner: int) -> tuple[frozenset[int], EarlyTimes | None]:
        if owner not in self._pullers:
            pullers, early = ((), None) if self._overlap is None else self._overlap.of_pulls(self.node, owner)
            self._pullers[owner] = frozenset(pullers), early
        return self._pullers[owner]

    def any_early(self, size_bytes: float) -> bool:
        """Returns whether any forward passes begin before all their weights are there.

        Args:
            size_bytes: Size of the weights on the wire.
        """
        averaged = any(self.early(members, size_bytes) for members in self.plan.groups)
        return averaged or any(self._pulled_from(owner)[0] for owner in range(len(self.plan.roles)))

    def _whole_reduction_s(self, members: Sequence[int], size_bytes: float) -> float:
        """Returns the time of a reduction of whole gradients: slices are exchanged and added, then gathered.

        If gradients are added up by nodes, the members on a node do so first, and then each node once with the other
        nodes. Sums by group work the same way.
        """
        k = len(members)
        if k == 1:
            return 0.0
        part = self.part(members[0])
        size_bytes, adding_s = size_bytes * part, self.local_seconds(Accumulate) * part
        on_node = Counter(self.node[role] for role in members)
        share = (k - 1) / k  # of the vector that each member sends, and receives, in each of two phases
        if len(sums := self.plan.partial_sums(members)) > 1:
            counts, parts = [*map(len, sums)], len(sums)
            most = max(counts)
            within = [members[place] for place in max(sums, key=len)]
            # The link of a node of m carries one sum for each slice of other nodes, and its own slices to each other
            # node.
            between = max(max(k - count, count * (parts - 1)) for count in counts) / k
            seconds = self._exchange_s(within, (most - 1) / most, size_bytes)
            seconds += self._exchange_s([members[of[0]] for of in sums], between, size_bytes)
            return seconds + adding_s * ((most - 1) / most + (parts - 1) / k)
        if len(on_node) > 1:  # members on one node share its link
            share = max(count * (k - count) for count in on_node.values()) / k
        return self._exchange_s(members, share, size_bytes) + adding_s * (k - 1) / k

    def _exchange_s(self, roles: Sequence[int], share: float, size_bytes: float) -> float:
        """Returns the time of two phases. In each, roles send and receive a fraction `share` of a vector."""
        links = [self.link(a, b) for a, b in itertools.pairwise(roles)]
        if not links:
            return 0.0
        slowest = max(links, key=lambda link: link.seconds_per_byte)
        return 2 * (max(link.latency_s for link in links) + share * size_bytes * slowest.seconds_per_byte)


def expected_shares(job: Job, plan: Plan) -> tuple[float, ...]:
    """Returns shares in proportion to the learners' speeds according to the costs.

    Args:
        job: Resolved job with its cost file read.
        plan: Roles and their ranks.
    """
    size = job.training.minibatch_size
    banks = job.cluster.learners_per_device is not None
    compute_s = CostModel(job.simulation, plan, size, job.cluster.parts, banks=banks).compute_s
    seconds = [compute_s[role] for role in plan.whole.learners]
    shares = by_speed(seconds)
    log.info(f"{job.name}: by these costs {speeds_text(seconds, size, shares)}")
    return shares


def guessed(compute_s: float | Mapping[int, float], sizes: Collection[int]) -> str:
    """Describes mini-batch sizes that `compute_s` does not list, and their estimates. Empty if it lists all sizes."""
    if not isinstance(compute_s, Mapping):
        return ""
    known = sorted(compute_s)
    unknown = sorted({*sizes} - {*known})
    groups: dict[str, list[int]] = {}
    for size in unknown:
        place = min(max(1, bisect(known, size)), max(1, len(known) - 1))
        points = known[place - 1 : place + 1]
        how = "interpolated between" if points[0] < size < points[-1] else "extrapolated from"
        groups.setdefault(f"{how} {' and '.join(map(str, points))}", []).append(size)
    return "; ".join(
        f"compute_s of mini-batches of {', '.join(map(str, few[:3]))}{', …' if len(few) > 3 else ''} is {how}"
        for how, few in groups.items()
    )


def _on_machines(nodes: Sequence[int], machines: Sequence[int]) -> tuple[int, ...]:
    """Returns the machine of each role.

    Args:
        nodes: Nodes of the roles. Nodes used only by servers are -1, -2 and so on.
        machines: Machines of the nodes, with the servers' nodes at the end.

    Raises:
        ConfigError: The number of machines differs from the number of nodes.
    """
    learning, own = max(nodes) + 1, -min(0, *nodes)
    if len(machines) != learning + own:
        raise ConfigError(
            f"[simulation] machines has {len(machines)} numbers; valid: {learning} for the nodes with learners, and "
            f"{own} for the nodes with servers only"
        )
    return tuple(machines[node if node >= 0 else learning - 1 - node] for node in nodes)


_NOTHING = (0.0, 0.0)


def _affine(seconds: float, per_byte_s: float | None) -> tuple[float, float]:
    """Returns fixed seconds, and seconds per byte."""
    return (seconds, 0.0) if per_byte_s is None else (0.0, per_byte_s)


def _uniform(source: random.Random, width: float) -> float:
    return 1.0 + width * (2.0 * source.random() - 1.0)


def _lognormal(source: random.Random, width: float) -> float:
    """Draws a factor with median 1."""
    return math.exp(source.gauss(0.0, width))


def _exponential(source: random.Random, width: float) -> float:
    """Draws a factor of at least 1, with mean 1 + `width`."""
    return 1.0 - width * math.log(1.0 - source.random())


def _memoryless(source: random.Random, width: float) -> float:
    """Draws a factor with mean 1 for any width. The remaining time does not depend on the elapsed time (omnivore.txt
    §IV-C, A2)."""
    return -math.log(1.0 - source.random())


_DISTRIBUTIONS: dict[str, Callable[[random.Random, float], float]] = {
    "uniform": _uniform,
    "lognormal": _lognormal,
    "exponential": _exponential,
    "memoryless": _memoryless,
}
