"""Rule that says which gradients and weights travel in buckets between learners and servers."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rudra.core.bucket_rules import pull_parts, pulling, push_parts, pushing
from rudra.job.job import Job
from topologies import Plan


def nodes_of(plan: Plan, places: Sequence[int]) -> list[int]:
    """Returns the node of every role. `places` has the first rank of the node of every rank."""
    return [places[role.world_rank] for role in plan.roles]


@dataclass(frozen=True, slots=True)
class BucketRule:
    """Rule that says which gradients and weights travel in buckets, the same on all ranks.

    Attributes:
        job: job that determines the buckets.
        plan: role assignment.
        node: node of every role.
        auto: number of elements of a bucket that the ranks chose.
        pulls: whether MPI and the model let a forward pass begin before all its weights are there.
        whole: ranks whose learners send and receive whole vectors, because theirs are on a GPU.
    """

    job: Job
    plan: Plan
    node: Sequence[int]
    auto: int
    pulls: bool
    whole: Collection[int] = ()

    def senders(self, owner: int) -> tuple[int, ...]:
        """Returns the learners that push large gradients to a role in buckets."""
        return self._in_parts(pushing(self.job, self.plan, self.node, owner))

    def _in_parts(self, learners: Sequence[int]) -> tuple[int, ...]:
        return tuple(learner for learner in learners if self.plan.roles[learner].world_rank not in self.whole)

    def push_parts(self, owner: int, size: int, parameters: int) -> list[slice]:
        """Returns the parts of gradients for a role. Empty: they come as a whole.

        Args:
            owner: id of the role that takes them.
            size: number of elements that it takes of a gradient.
            parameters: number of parameters among them.
        """
        return push_parts(self.job, size, parameters, self.auto, len(self.senders(owner)))

    def receivers(self, owner: int) -> tuple[int, ...]:
        """Returns the learners that get large weights from a role in buckets."""
        return self._in_parts(pulling(self.job, self.plan, self.node, owner)) if self.pulls else ()

    def pull_parts(self, size: int, parameters: int) -> list[slice]:
        """Returns the parts of weights from a role. Empty: they come as a whole.

        Args:
            size: number of elements that the role gives.
            parameters: number of parameters among them.
        """
        return pull_parts(self.job, size, parameters, self.auto)
