"""Correction of the gradients that arrive at a server, and copies of the weights that their learners hold."""

from rudra.core.actions import Action, Copy, Correct
from rudra.core.buffer_names import PULLED, WEIGHTS
from rudra.core.messages import PushedGradient
from rudra.core.records import Gradient
from rudra.job.job import Job
from topologies import Plan


def pulled_name(child: int) -> str:
    """Returns the name of the server's buffer with the weights that a child holds."""
    return f"{PULLED} {child}"


def needs_pulled_weights(job: Job) -> bool:
    """Returns whether the job has a correction that needs the weights that each gradient was computed from."""
    return job.protocol.correction is not None and job.make_correction().needs_pulled_weights


def correct(
    job: Job, plan: Plan, buffer: str, gradients: tuple[Gradient, ...], weights: str, pulled: str, timestamp: int
) -> list[Action]:
    """Returns the action that corrects a gradient, or the average of a compute group. Empty: the job has no correction.

    Args:
        job: job of the present epoch.
        plan: roles of the run.
        buffer: buffer with the gradient.
        gradients: description of the gradient, or of each gradient in the average.
        weights: buffer with the present weights.
        pulled: buffer with the weights that the gradient was computed from.
        timestamp: timestamp of the present weights.
    """
    if job.protocol.correction is None:
        return []
    first, samples = gradients[0], sum(gradient.samples for gradient in gradients)
    learner = first.learner if len(gradients) == 1 else _group_of(plan, first.learner)
    about = (learner, first.step, first.timestamp, timestamp - first.timestamp, samples)
    return [Correct(buffer, weights, pulled, *about)]


def _group_of(plan: Plan, learner: int) -> int:
    groups = enumerate(plan.groups)
    return next(number for number, group in groups if any(plan.roles[role].index == learner for role in group))


class ServerCorrection:
    """Correction of the gradients of one server.

    A copy of weights is made only if a child still holds them when an update replaces them.

    Args:
        job: job of the present epoch.
        plan: roles of the run.
    """

    def __init__(self, job: Job, plan: Plan) -> None:
        self._job, self._plan = job, plan
        self._keeps = needs_pulled_weights(job)
        self._holding: dict[int, None] = {}  # children that hold the present weights, in the order of the answers

    def answered(self, *children: int) -> None:
        """Notes that children now hold the present weights."""
        if self._keeps:
            self._holding |= dict.fromkeys(children)

    def forget(self, child: int) -> None:
        """Notes that a child asks for weights: its next gradient belongs to the weights of the answer."""
        self._holding.pop(child, None)

    def keep(self) -> list[Action]:
        """Returns the actions that copy the present weights for the children that hold them, before an update."""
        holding, self._holding = self._holding, {}
        return [Copy(WEIGHTS, pulled_name(child)) for child in holding]

    def correct(self, buffer: str, message: PushedGradient, timestamp: int) -> list[Action]:
        """Returns the action that corrects a gradient that has arrived, if there is a correction."""
        fresh = message.gradients[0].timestamp == timestamp
        pulled = (WEIGHTS if fresh else pulled_name(message.sender)) if self._keeps else ""
        return correct(self._job, self._plan, buffer, message.gradients, WEIGHTS, pulled, timestamp)


def correction_of(job: Job, plan: Plan) -> ServerCorrection | None:
    """Returns the correction of a server's gradients. None: the job has none.

    Args:
        job: job of the present epoch.
        plan: roles of the run.
    """
    return None if job.protocol.correction is None else ServerCorrection(job, plan)
