"""Choice of the size of buckets, and whether weights may come in buckets, by all ranks together."""

from collections.abc import Mapping, Sequence
from typing import Any

from mpi4py import MPI

from rudra.compute.executor import Executor
from rudra.compute.learners import ReplicaExecutor
from rudra.compute.pulled_pass import PullingExecutor
from rudra.core.bucket_rules import pairs_of_nodes, passes_early, pulling
from rudra.core.buckets import LEAST_COPIED, NetworkSpeed, auto_size, copied
from rudra.core.phases import Phases
from rudra.job.job import Job
from rudra.mpi.bucket_rule import nodes_of
from rudra.mpi.job_ranks import JobRanks
from rudra.mpi.network_test import in_turns, measure, worst
from rudra.results.recorder import about_buckets
from topologies import Plan


class BucketChoice:
    """Size of buckets that all ranks have agreed on. Each method is collective: all ranks call it together.

    Args:
        ranks: the ranks of the job.
        places: first rank of the node of every rank.

    Attributes:
        auto: number of elements of a bucket that the ranks chose. 0: none.
        pulls: whether a forward pass may begin before all weights have arrived. MPI and the model must support it.
    """

    def __init__(self, ranks: JobRanks, places: Sequence[int]) -> None:
        self._ranks, self._places = ranks, places
        self.auto, self.pulls = 0, False
        self._pairs: list[tuple[int, int]] = []
        # Speed between nodes if it is needed, and whether forward passes after averages may begin early.
        self._network: tuple[NetworkSpeed | None, float] = None, 0.0

    def test_network(self, phases: Phases) -> None:
        """Measures the network between the nodes that exchange gradients, if this decides the size of buckets."""
        pairs = {
            pair
            for phase in phases
            for pair in pairs_of_nodes(phase.job, phase.plan, nodes_of(phase.plan, self._places))
        }
        self._pairs = in_turns(pairs, self._places)
        self._network = measure(self._ranks, self._pairs), 0.0

    def choose(self, job: Job, plan: Plan, executors: Mapping[int, Executor]) -> None:
        """Adopts the size of buckets that rank 0 chooses for the slowest network."""
        if not self._pairs:
            return
        learning = [executor for role, executor in executors.items() if plan.traits(role).trains]
        early = any(passes_early(job, plan, members) for members in plan.groups)
        early &= all(isinstance(each, ReplicaExecutor) and each.can_pass_early for each in learning)
        mine = self._network[0], max((executor.size for executor in learning), default=0), early
        found, chosen = self._ranks.comm.gather(mine), None
        if found is not None:
            network = worst([its for its, _, _ in found if its is not None])
            size, early = max(size for _, size, _ in found), all(early for *_, early in found)
            copies = copied(job.optimizer.state_vectors) if early else 0.0
            chosen = (network, copies), auto_size(network, size, copies=copies)
        self._network, self.auto = self._ranks.comm.bcast(chosen)

    def try_to_pull(self, phases: Phases, executors: Mapping[int, Executor]) -> None:
        """Finds out whether MPI and the learners' model let weights come in buckets, if the job does."""
        if any(
            pulling(phase.job, phase.plan, nodes_of(phase.plan, self._places), owner)
            for phase in phases
            for owner in range(len(phase.plan.roles))
        ):
            learning = [executor for executor in executors.values() if isinstance(executor, PullingExecutor)]
            mine = MPI.Query_thread() >= MPI.THREAD_MULTIPLE and all(each.can_pass_early for each in learning)
            self.pulls = self._ranks.comm.allreduce(mine, MPI.LAND)

    @property
    def facts(self) -> dict[str, Any]:
        """Attributes of the result file about buckets."""
        network, copies = self._network
        return about_buckets(network, self.auto, copies=copies or LEAST_COPIED * self.pulls)
