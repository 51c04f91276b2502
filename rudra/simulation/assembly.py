"""Puts a job's roles into virtual time."""

from collections.abc import Callable

from rudra import roles
from rudra.compute.schedule import schedule_of
from rudra.core.events import Save
from rudra.core.messages import tensor_bytes
from rudra.core.training_state import BEGINNING, TrainingState
from rudra.job.job import Job
from rudra.roles import Machine
from rudra.simulation.costs import CostModel
from rudra.simulation.driver import Check, RowSink, Simulation
from rudra.simulation.timing_only import Tensors
from topologies import Plan

Make = Callable[[int, Plan, TrainingState], Machine]
"""Makes the machine of a role of a plan, for a beginning there."""


def machines_of(
    job: Job, plan: Plan, training_samples: int, position: TrainingState = BEGINNING
) -> tuple[dict[int, Machine], Make]:
    """The state machines of all roles, and what makes others for another plan; arguments as of `assemble`."""
    schedule = schedule_of(job, plan, training_samples)

    def make(role: int, plan: Plan, position: TrainingState) -> Machine:
        return roles.make(role, job, plan, training_samples, schedule, position)

    return {i: make(i, plan, position) for i in range(len(plan.roles))}, make


def assemble(
    job: Job,
    plan: Plan,
    tensors: Tensors,
    recorder: RowSink,
    *,
    training_samples: int,
    size_bytes: int,
    position: TrainingState = BEGINNING,
    save: Callable[[int, Save], None] | None = None,
    check: Check | None = None,
) -> Simulation:
    """A simulation of a job, ready to run.

    Args:
        job: resolved, with its costs read in.
        plan: who is who.
        tensors: what computes.
        recorder: what takes the statistics server's rows.
        training_samples: of one epoch.
        size_bytes: of a gradient or the weights on the wire.
        position: where training begins.
        save: see `Simulation`, as is the next.
        check: called after every event.

    Raises:
        ConfigError: the job's schedule gives no rates.
    """
    machines, make = machines_of(job, plan, training_samples, position)
    return Simulation(
        plan,
        machines,
        tensors,
        recorder,
        CostModel(
            job.simulation, plan, job.training.minibatch_size, job.cluster.parts, size_bytes=tensor_bytes(size_bytes)
        ),
        size_bytes=size_bytes,
        seed=job.training.seed + position.timestamp,
        gradient_share=job.cluster.gradient_share,
        make=make,
        save=save,
        check=check,
    )
