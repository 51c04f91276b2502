"""Gradients and weights in buckets in virtual time: moments of a backward pass when parts of a gradient may be sent.

Then moments of the next forward pass when parts of an average, or of weights from a server, are needed.
"""

from collections.abc import Sequence
from itertools import accumulate

from rudra.core.backward import WHOLE, BackwardPass, Leads, after_s
from rudra.core.bucket_rules import at_once_because, group_parts, passes_early, pull_parts, pulling, push_parts, pushing
from rudra.core.buckets import auto_size, copied
from rudra.core.forward import EarlyTimes, ForwardTimes, arrivals_s, early_times, pulled_times
from rudra.core.layout import Placed
from rudra.job.job import Job
from rudra.prepare.cut import known
from rudra.prepare.nodes import network_of
from topologies import Plan


class Overlap:
    """Gradients of a job's learners that are sent in buckets while they are computed, and weights that come in buckets.

    Args:
        job: Resolved job with its cost file read. If its costs say when parts of a gradient are final, or have the
            times of layers, they count. Otherwise parts become final at a constant rate.
        plan: Role assignment.
        size: Number of elements of a gradient of the whole model.
        buffers: Number of them that are not parameters.
        placed: How the model is divided between learners and a stage server.

    Attributes:
        share: Fraction of a gradient's time that the backward pass takes.
    """

    def __init__(self, job: Job, plan: Plan, size: int, buffers: int = 0, placed: Placed | None = None) -> None:
        self._job, self._plan, trained = job, plan, size - buffers
        self._auto = auto_of(job, plan, size, placed)
        if placed is not None and plan.stage is not None:
            size, buffers = round(size * placed.front), round(size * placed.buffers)
        self._size, self._parameters = size, size - buffers
        self._pass = _backward_pass(job, trained, self._parameters)
        self._next = _forward_times(job, self._parameters)
        self.share = self._pass.share

    def of_group(
        self, members: Sequence[int], transfer_s: float, backward_s: float, update_s: float
    ) -> tuple[float, EarlyTimes | None]:
        """Returns the time from the end of a backward pass to the arrival of the average of a group's gradients.

        With it come the times of the next forward pass, if it begins before.

        Args:
            members: Members of the group.
            transfer_s: Time of the average if it begins after the pass.
            backward_s: Time of the pass.
            update_s: Time of the update by the average.
        """
        job, plan = self._job, self._plan
        if at_once_because(job):
            return after_s(WHOLE, transfer_s, backward_s), None
        parts = group_parts(job, plan, self._size, self._parameters, self._auto, members, self._pass.starts)
        if len(parts) < 2 or not may_pass_early(job, plan, members):
            return after_s(self._pass.leads(parts), transfer_s, backward_s), None
        arrived_s = arrivals_s(parts, [-self._pass.left(part) * backward_s for part in parts], transfer_s)
        seconds = backward_s / self.share if self.share else 0.0
        return max(arrived_s), early_times(self._next, parts, arrived_s, _copies(job), update_s, seconds=seconds)

    def of_pushes(self, node: Sequence[int], owner: int) -> tuple[tuple[int, ...], Leads]:
        """Returns the learners that push to a role in buckets, and the moments when more of a gradient may be sent.

        Args:
            node: Node of every role.
            owner: Id of the role that takes the gradients.
        """
        senders, its = pushing(self._job, self._plan, node, owner), self._slice(owner)
        parts = push_parts(self._job, *self._sizes(its), self._auto, len(senders))
        return (senders, self._pass.leads(_placed(its, parts))) if parts else ((), WHOLE)

    def of_pulls(self, node: Sequence[int], owner: int) -> tuple[tuple[int, ...], EarlyTimes | None]:
        """Returns the learners that get weights from a role in buckets, and the times of their next forward passes.

        All servers of a learner must give their parts of the weights in buckets.

        Args:
            node: Node of every role.
            owner: Id of the role that gives the weights.
        """
        if not (learners := pulling(self._job, self._plan, node, owner)):
            return (), None
        sources = self._plan.front_owners if self._plan.sharded else (owner,)
        given = {source: pull_parts(self._job, *self._sizes(self._slice(source)), self._auto) for source in sources}
        if not all(given.values()):
            return (), None
        return learners, pulled_times(self._next, _placed(self._slice(owner), given[owner]))

    def _sizes(self, its: slice) -> tuple[int, int]:
        """Returns the number of elements of a slice of a gradient, and the number of parameters among them."""
        return its.stop - its.start, min(self._parameters, its.stop) - its.start

    def _slice(self, owner: int) -> slice:
        """Returns the slice of a gradient that a role takes.

        Several owners hold equal numbers of parameters, and the last one also the buffers.
        """
        owners = self._plan.front_owners
        if not self._plan.sharded or owner not in owners:
            return slice(0, self._size)
        number, count = owners.index(owner), len(owners)
        stop = self._parameters * (number + 1) // count if number + 1 < count else self._size
        return slice(self._parameters * number // count, stop)


def _placed(its: slice, parts: Sequence[slice]) -> list[slice]:
    """Returns parts of a slice of a vector as parts of the whole vector."""
    return [slice(its.start + part.start, its.start + part.stop) for part in parts]


def auto_of(job: Job, plan: Plan, size: int, placed: Placed | None) -> int:
    """Returns the number of elements of a bucket that ranks would choose on the job's network.

    Args:
        job: Resolved job with its cost file read.
        plan: Role assignment.
        size: Number of elements of the weights.
        placed: How the model is divided between learners and a stage server.
    """
    front = 1.0 if plan.stage is None or placed is None else placed.front
    return auto_size(network_of(job), round(size * front), copies=early_copies(job, plan))


def early_copies(job: Job, plan: Plan) -> float:
    """Returns the number of vectors that are copied if `may_pass_early` holds for any group. 0: it holds for none."""
    early = any(may_pass_early(job, plan, members) for members in plan.groups)
    return _copies(job) if early else 0.0


def _copies(job: Job) -> float:
    return copied(job.optimizer.state_vectors)


def may_pass_early(job: Job, plan: Plan, members: Sequence[int]) -> bool:
    """Returns whether forward passes of a group may begin before all buckets of an average are there, as far as is
    known without the model: its layers may prevent it, too.

    Args:
        job: Resolved job.
        plan: Role assignment.
        members: Members of the group.
    """
    hooked = {role for hook in job.hooks for role in hook.roles(plan)}
    return hooked.isdisjoint(members) and passes_early(job, plan, members)


def _backward_pass(job: Job, trained: int, parameters: int) -> BackwardPass:
    """Returns the pass over the first `parameters` of the `trained` parameters of a model.

    Costs of another model do not count.
    """
    final_at, layers = job.simulation.final_at, known(job.simulation, job.training.minibatch_size)
    if final_at and sum(count for count, _ in final_at) == trained:
        return BackwardPass.measured(final_at, parameters)
    sizes = [*accumulate(layer.parameters_bytes for layer in layers)]
    count = sum(size <= 4 * parameters for size in sizes)
    if count and sizes[count - 1] == 4 * parameters:
        return BackwardPass.of_layers(layers[:count])
    return BackwardPass(parameters)


def _forward_times(job: Job, parameters: int) -> ForwardTimes:
    """Returns the times of the pass over a model. Costs of another model do not count."""
    table, layers = job.simulation, known(job.simulation, job.training.minibatch_size)
    if table.needed_at and sum(count for count, _ in table.needed_at) == parameters:
        return ForwardTimes(parameters, table.needed_at, table.forward_share)
    if sum(layer.parameters_bytes for layer in layers) == 4 * parameters:
        return ForwardTimes.of_layers(layers)
    return ForwardTimes(parameters)
