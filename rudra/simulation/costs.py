"""What things cost in virtual time: one model for the simulator and for predictions.

Computing takes a time that depends on μ, on who else computes on the node, and on luck; a message takes latency; a
tensor also occupies the sender's way out and the receiver's way in, so that a server's link serialises what many
learners send it; and a server handles one message after the other.

Source: Rudra §3.3 (contention at one receiver) and §5.2 (GEMM at small μ); Omnivore §4 (hardware efficiency).
"""

import itertools
import math
import random
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from protocols import Hogbatch
from rudra.core.events import (
    Accumulate,
    AverageGroup,
    BackpropFirstStage,
    ComputeEvaluationPart,
    Copy,
    Evaluate,
    ExecutorAction,
    PullReplica,
    RunFirstStage,
    RunLastStage,
    StepReplica,
    TrainInPlace,
    Update,
)
from rudra.core.layout import Placed
from rudra.core.work import by_speed, portion, speeds_text
from rudra.errors import ConfigError
from rudra.job.job import Job
from rudra.job.simulation import SimulationTable
from rudra.log import log
from rudra.prepare.cost_files import at
from topologies import Plan
from topologies.kinds import ELSEWHERE


class Link(NamedTuple):
    """The way from one role to another.

    Attributes:
        latency_s: of every message.
        seconds_per_byte: of a tensor.
        out: name of the port that a tensor occupies where it leaves.
        into: and where it arrives.
        blocking: ends that move one tensor at a time, be it in or out.
    """

    latency_s: float
    seconds_per_byte: float
    out: tuple[str, int]
    into: tuple[str, int]
    blocking: tuple[tuple[str, int], ...] = ()


class Pace(NamedTuple):
    """How long a worker takes for parts of batches, which have any size.

    Attributes:
        compute_s: of one thread, as `at` takes it.
        threads: that compute at once, so that parts, which come one after another, take so much less.
        size: of the first part.
    """

    compute_s: float | Mapping[int, float]
    threads: int
    size: int

    def seconds(self, samples: int) -> float:
        """For a part of so many samples."""
        return at(self.compute_s, samples) / self.threads


def paces_of(job: Job, plan: Plan) -> dict[int, Pace]:
    """The pace of each learner's role, where a coordinator deals samples out to them; else nothing."""
    if not plan.scheduled:
        return {}
    protocol = Hogbatch.of(job.make_protocol(plan))
    team, common = job.hogbatch.team(plan.learner_numbers), job.simulation.compute_s
    found = {}
    for role in plan.learners:
        number = plan.roles[role].index
        own = team[number].compute_s
        found[role] = Pace(common if own is None else own, team[number].threads, protocol.first_sizes[number])
    return found


class CostModel:
    """Durations in one cluster.

    Args:
        table: with its cost file read in (`load`).
        plan: who is who.
        minibatch_size: μ.
        shares: of the learners (`rudra.core.work.portion`).
        size_bytes: of the weights, and of a gradient, in memory.
        placed: the pieces of a model of which a stage server has the last layers.
        paces: of learners whose batches have any size; `compute_s` is that of their first one.

    Attributes:
        paces: as given.
        node: of every role.
        compute_s: mean duration of a mini-batch, for every learner's role.
        guessed: of which mini-batch sizes nobody has measured `compute_s`, and what stands for it; or nothing.
        pieces: the part of that duration that each kind of computation of a learner takes.
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
    ) -> None:
        self.paces = paces or {}
        self.table, self.plan, self.size_bytes = table, plan, size_bytes
        self._placed = placed = placed or Placed()
        # A backward pass has twice the operations of a forward pass.
        self.pieces: dict[type[ExecutorAction], float] = {
            RunFirstStage: (1 - placed.back) / 3,
            BackpropFirstStage: (1 - placed.back) * 2 / 3,
        }
        self.pieces[ComputeEvaluationPart] = (
            1 / 3
        )  # of a worker's first batch; the clock of the training stands still meanwhile
        self._conclude_s = placed.back * at(table.compute_s, minibatch_size) if plan.stage is not None else 0.0
        node = list(plan.nodes(near=table.servers_on_first_node))
        for place, owner in enumerate((*plan.owners, *plan.stages[1:])):
            if node[owner] == ELSEWHERE:  # each has a node, and a link, of its own
                node[owner] -= place
        self.node = _on_machines(node, table.machines) if table.machines else tuple(node)
        self.compute_s = self._compute_times(minibatch_size, shares)
        self._local_s: dict[type[ExecutorAction], tuple[float, float]] = {
            Accumulate: _affine(table.gradient_s, table.gradient_s_per_byte),
            Update: _affine(table.update_s, table.update_s_per_byte),
            StepReplica: _affine(table.update_s, table.update_s_per_byte),
            TrainInPlace: _affine(table.update_s, table.update_s_per_byte),  # its update
            PullReplica: _affine(0.0, table.copy_s_per_byte),
            Copy: _affine(0.0, table.copy_s_per_byte),
            Evaluate: _affine(table.evaluation_s, None),
        }
        self._local_s_of: dict[float, dict[type[ExecutorAction], float]] = {}  # by the part of the weights

    def local_seconds(self, kind: type[ExecutorAction]) -> float:
        """How long a local action on whole vectors takes; a computation has its own (`computation`)."""
        fixed_s, per_byte_s = self._local_s.get(kind, _NOTHING)
        return fixed_s + per_byte_s * self.size_bytes

    def local_s(self, role: int) -> dict[type[ExecutorAction], float]:
        """How long each local action of a role takes, of whatever it holds; those that are not here take no time."""
        part = self.part(role)
        if part not in self._local_s_of:
            taken = {kind: self.local_seconds(kind) * part for kind in self._local_s}
            self._local_s_of[part] = {kind: seconds for kind, seconds in taken.items() if seconds}
        if role not in self.plan.stages:
            return self._local_s_of[part]
        added_s = self._local_s_of[part].get(Accumulate, 0.0) * (max(map(len, self.plan.groups), default=1) - 1)
        own: dict[type[ExecutorAction], float] = {RunLastStage: self._conclude_s, AverageGroup: added_s}
        return self._local_s_of[part] | {kind: seconds for kind, seconds in own.items() if seconds}

    def part(self, role: int) -> float:
        """How much of the weights, and of each gradient, a role holds, or sends and gets."""
        if self.plan.stage is not None:
            front = self._placed.front
            if role == self.plan.statistics or role in self.plan.stages:
                return 1.0 if role == self.plan.statistics else 1 - front
        else:
            front = 1.0
        return front / len(self.plan.front_owners) if role in self.plan.front_owners else front

    def travelling(self, sender: int, receiver: int) -> float:
        """How much travels when one of two roles sends the other a tensor, compared with the weights."""
        ends = {sender, receiver}
        if not ends.isdisjoint(self.plan.stages) and not ends.isdisjoint(self.plan.learners):
            return self._placed.crossing
        # All that goes to an owner of weights, or comes from it, is its part of a tensor.
        return min(self.part(sender), self.part(receiver))

    def _compute_times(self, minibatch_size: int, shares: tuple[float, ...]) -> dict[int, float]:
        table, plan = self.table, self.plan
        if self.paces:
            own_s = {role: pace.seconds(pace.size) for role, pace in self.paces.items()}
            self.guessed = ""
        else:
            counts = {role: portion(plan, role, minibatch_size, shares).count for role in plan.learners}
            alone_s = {count: at(table.compute_s, count) for count in {*counts.values()}}
            own_s = {role: alone_s[counts[role]] for role in plan.learners}
            self.guessed = guessed(table.compute_s, alone_s)
        computers = {plan.roles[role].world_rank: self.node[role] for role in plan.learners}
        on_node = Counter(computers.values())  # those of a rank take turns, so they are as one
        return {
            role: own_s[role]
            * (1 + table.node_slowdown * (on_node[self.node[role]] - 1))
            * table.slowdown.get(plan.roles[role].index, 1.0)
            for role in plan.learners
        }

    def computation(self, role: int, source: random.Random) -> Callable[[], float]:
        """What gives the duration of each mini-batch of a learner, in seconds."""
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
        """How much longer a learner takes for so many samples than `compute_s` says."""
        pace = self.paces.get(role)
        return 1.0 if pace is None else pace.seconds(samples) / pace.seconds(pace.size)

    def link(self, sender: int, receiver: int) -> Link:
        """The way from one role to another: a node's link between nodes, a role's own copying inside one."""
        table, here, there = self.table, self.node[sender], self.node[receiver]
        # With learners that overlap, pushes and pulls have threads of their own (§3.3).
        ends = (sender, receiver) if table.blocking_servers and not self.plan.overlapped else ()
        blocking = tuple(("role", i) for i in ends if self.plan.roles[i].kind_traits.serves)
        if here != there:
            return Link(table.latency_s, 1 / table.bandwidth_bytes_per_s, ("node", here), ("node", there), blocking)
        latency_s = table.latency_s if table.local_latency_s is None else table.local_latency_s
        bandwidth = table.local_bandwidth_bytes_per_s or table.bandwidth_bytes_per_s
        return Link(latency_s, 1 / bandwidth, ("role", sender), ("role", receiver), blocking)

    def reduction_s(self, members: Sequence[int], size_bytes: float) -> float:
        """Time in which a compute group adds up its gradients: slices are exchanged and added, then gathered.

        By nodes, those of a node do so among themselves, and then each node once with the others; and so do groups.
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
            # Through the link of a node of m go a sum for each slice of others, and its own slices for each other node.
            between = max(max(k - count, count * (parts - 1)) for count in counts) / k
            seconds = self._exchange_s(within, (most - 1) / most, size_bytes)
            seconds += self._exchange_s([members[of[0]] for of in sums], between, size_bytes)
            return seconds + adding_s * ((most - 1) / most + (parts - 1) / k)
        if len(on_node) > 1:  # those of a node share its link
            share = max(count * (k - count) for count in on_node.values()) / k
        return self._exchange_s(members, share, size_bytes) + adding_s * (k - 1) / k

    def _exchange_s(self, roles: Sequence[int], share: float, size_bytes: float) -> float:
        """Time in which roles send, and get, such a share of a vector in each of two phases."""
        links = [self.link(a, b) for a, b in itertools.pairwise(roles)]
        if not links:
            return 0.0
        slowest = max(links, key=lambda link: link.seconds_per_byte)
        return 2 * (max(link.latency_s for link in links) + share * size_bytes * slowest.seconds_per_byte)


def expected_shares(job: Job, plan: Plan) -> tuple[float, ...]:
    """Shares in proportion to the learners' speeds, as the costs tell them.

    Args:
        job: resolved, with its costs read in.
        plan: who is who.
    """
    size = job.training.minibatch_size
    compute_s = CostModel(job.simulation, plan, size, job.cluster.parts).compute_s
    seconds = [compute_s[role] for role in plan.learners]
    shares = by_speed(seconds)
    log.info(f"{job.name}: by these costs {speeds_text(seconds, size, shares)}")
    return shares


def guessed(compute_s: float | Mapping[int, float], sizes: Collection[int]) -> str:
    """Which of these mini-batch sizes are none that `compute_s` has, and what `at` goes by instead; or nothing."""
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
    """The machine of each role.

    Args:
        nodes: of the roles; those that servers have of their own are -1, -2 and so on.
        machines: of the nodes, theirs at the end.

    Raises:
        ConfigError: there are more or fewer nodes.
    """
    learning, own = max(nodes) + 1, -min(0, *nodes)
    if len(machines) != learning + own:
        raise ConfigError(
            f"[simulation] machines has {len(machines)} numbers; valid: {learning} of the nodes with learners, and "
            f"{own} of those that servers have of their own"
        )
    return tuple(machines[node if node >= 0 else learning - 1 - node] for node in nodes)


_NOTHING = (0.0, 0.0)


def _affine(seconds: float, per_byte_s: float | None) -> tuple[float, float]:
    """Seconds, and seconds per byte."""
    return (seconds, 0.0) if per_byte_s is None else (0.0, per_byte_s)


def _uniform(source: random.Random, width: float) -> float:
    return 1.0 + width * (2.0 * source.random() - 1.0)


def _lognormal(source: random.Random, width: float) -> float:
    """Median 1."""
    return math.exp(source.gauss(0.0, width))


def _exponential(source: random.Random, width: float) -> float:
    """Never faster than 1; slower by `width` on average."""
    return 1.0 - width * math.log(1.0 - source.random())


def _memoryless(source: random.Random, width: float) -> float:
    """Mean 1, whatever the width: how long it has taken says nothing of how long it will (omnivore.txt §IV-C, A2)."""
    return -math.log(1.0 - source.random())


_DISTRIBUTIONS: dict[str, Callable[[random.Random, float], float]] = {
    "uniform": _uniform,
    "lognormal": _lognormal,
    "exponential": _exponential,
    "memoryless": _memoryless,
}
