"""Start of a run from a checkpoint of another family of roles: what it takes over, and what it starts without.

Momentum goes to the roles that step. The state of everything that was under way is not in a checkpoint.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from msgspec import structs

import protocols
from protocols import Averaging
from rudra.core.buffer_names import AVERAGE, REFERENCE, REPLICA, WEIGHTS
from rudra.core.state_names import CORRECTION, OPTIMIZER, VELOCITY
from rudra.core.training_state import TrainingState
from rudra.core.work import DEALT, portion
from rudra.job.job import Job
from rudra.job.table import named
from topologies import Plan


class Takeover(NamedTuple):
    """Way in which the roles of a run take over the state of a checkpoint.

    Attributes:
        adapted: Whether the state must be distributed again, because the roles keep it in another form.
        new: Texts about state that the run begins anew, because the checkpoint has none that fits.
        left_out: Texts about state of the checkpoint that has no place in the run.
    """

    adapted: bool
    new: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def lost(self) -> str:
        """State that the run starts without, as text for people. Empty: it takes over all."""
        return "; ".join((*self.new, *self.left_out))


def takeover_of(
    names: Collection[str], job: Job, plan: Plan, *, averages: bool, same_cut: bool, same_job: bool = False
) -> Takeover:
    """Compares the tensors of a checkpoint with the roles of a run.

    Args:
        names: Names of the tensors.
        job: Job of the run.
        plan: Role assignment.
        averages: Whether the checkpoint belongs to a run that averages replicas.
        same_cut: Whether the checkpoint belongs to a run whose layers were placed as here.
        same_job: Whether the checkpoint belongs to a run of the same job. If learners begin with its update, it has no
            replicas for them, and they start from the weights.
    """
    of_replicas = [name for name in names if name.startswith(REPLICA)]
    corrected = [name for name in names if name.startswith(CORRECTION) or f".{CORRECTION}" in name]
    stepped = [
        name
        for name in (of_replicas if averages else names)
        if not name.endswith((WEIGHTS, REFERENCE, AVERAGE)) and name not in corrected
    ]
    had = any(f".{VELOCITY}." in name for name in stepped)
    has_outer = averages and any(name.startswith(OPTIMIZER + VELOCITY) for name in names)
    wanted, wants_outer = _momenta(job, plan)
    elastic = plan.averaging and plan.served
    new, left_out = [], []
    if elastic and (stepped or wanted or job.optimizer.scale_invariant):
        new.append("the optimiser state of the learners starts at zero")
    elif wanted and not had:
        new.append("the momentum starts at zero, because the checkpoint has none")
    elif job.optimizer.scale_invariant and not stepped:
        new.append("the state of the optimiser starts at zero, because the checkpoint has none")
    elif had and not wanted:
        left_out.append("the momentum is left out, because this run has none")
    if wants_outer and not has_outer:
        new.append("the outer momentum starts at zero")
    elif has_outer and not wants_outer:
        left_out.append("the outer momentum is left out")
    replicas, own = _replicas(of_replicas), _keepers(plan)
    if replicas and replicas != own and not same_job:
        (new if own else left_out).append("all replicas start from the weights" if own else "the replicas are left out")
    momenta = (elastic or wanted == had) and wants_outer == has_outer
    alike = averages == plan.averaging and same_cut and momenta and replicas == own
    if corrected and not (alike and job.protocol.correction is not None):
        left_out.append("the state of the correction is left out")
    if job.optimizer.average.given and AVERAGE not in names:
        new.append("the average over time starts from the weights")
    elif AVERAGE in names and not job.optimizer.average.given:
        left_out.append("the average over time is left out")
    return Takeover(not (alike or same_job), tuple(new), tuple(left_out))


def _momenta(job: Job, plan: Plan) -> tuple[bool, bool]:
    """Returns whether roles step by gradients with momentum, and whether the outer optimiser has momentum."""
    if plan.averaging:
        name, momentum, _ = Averaging.of(job.make_protocol(plan)).outer
        return bool(job.optimizer.momentum), name == "sgd" and bool(momentum)
    own = job.placement.momentum if plan.stage is not None else None
    return bool(job.explicit_momentum(plan) or (job.optimizer.momentum if own is None else own)), False


def _replicas(names: Collection[str]) -> set[str]:
    """Returns the names of replicas and references."""
    return {name for name in names if name.endswith((f".{WEIGHTS}", f".{REFERENCE}"))}


def _keepers(plan: Plan) -> set[str]:
    """Returns the names of the replicas and references that the checkpoints of a run hold."""
    if plan.served or not plan.averaging:
        return set()
    found = [f"{REPLICA}{plan.roles[i].index}.{WEIGHTS}" for i in plan.keepers]
    if plan.sharing == "reference":
        found += [f"{REPLICA}{plan.roles[members[0]].index}.{REFERENCE}" for members in plan.groups]
    return set(found)


def position_for(position: TrainingState, job: Job, plan: Plan) -> TrainingState:
    """Returns the training state of a checkpoint with counters for the learners of a run.

    Learners that reduce together have the same number of mini-batches. If the counters of the checkpoint do not suit
    the learners, all learners begin with the same number. Each stream then continues where it would be if these
    learners had trained from the start.

    Args:
        position: Training state of the checkpoint.
        job: Resolved job of the run, in the phase of the position.
        plan: Role assignment in that phase.
    """
    position = _with_known_protocol(position, job, plan)
    counts, steps = plan.learner_numbers, position.steps
    if len(steps) == counts and bool(position.sizes) == plan.scheduled and not _is_uneven(steps, position, plan):
        return position
    begun = max(*steps, 0 if plan.served else position.timestamp)
    return structs.replace(
        position,
        steps=(begun,) * counts,
        learned=position.learned if len(steps) == counts else (0,) * counts,
        drawn=_drawn(position.samples, job, plan),
        again=position.again if plan.scheduled else (),
        sizes=(),
        counts=(),
    )


def _with_known_protocol(position: TrainingState, job: Job, plan: Plan) -> TrainingState:
    """Returns the position without the state of the protocol, if the run's protocol does not accept it."""
    if position.protocol_state and position.protocol == named(job.protocol.name):
        try:
            protocols.restored(job.make_protocol(plan), position.protocol_state)
        except ValueError:
            return structs.replace(position, protocol="", protocol_state="")
    return position


def _is_uneven(steps: Sequence[int], position: TrainingState, plan: Plan) -> bool:
    """Returns whether learners that reduce together are at different mini-batches, or learners are behind replicas."""
    together = plan.groups if plan.served else (plan.learners,)
    uneven = any(len({steps[plan.roles[i].index] for i in members}) > 1 for members in together)
    return uneven or (not plan.served and min(steps[plan.roles[i].index] for i in plan.learners) < position.timestamp)


def _drawn(samples: int, job: Job, plan: Plan) -> tuple[int, ...]:
    """Returns the position of each stream after a number of samples of all learners together."""
    found = [0] * plan.learner_numbers
    if plan.scheduled:
        found[DEALT] = samples
        return tuple(found)
    size, parts = job.training.minibatch_size, job.cluster.parts
    batches = {each.stream: each.batch for each in (portion(plan, i, size, parts) for i in plan.learners)}
    for stream, batch in batches.items():
        found[stream] = samples * batch // sum(batches.values())
    return tuple(found)
