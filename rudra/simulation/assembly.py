"""Assembly of a job's roles into a simulation."""

from collections.abc import Callable
from typing import Any

from rudra import roles
from rudra.core.actions import Save
from rudra.core.layout import Placed
from rudra.core.phases import Phases, phase_at
from rudra.core.training_state import BEGINNING, TrainingState
from rudra.core.wire import tail_bytes, tensor_bytes
from rudra.errors import ConfigError
from rudra.job.boundary import Boundary
from rudra.job.job import Job
from rudra.prepare.nodes import nodes_of
from rudra.prepare.phases import phases_of
from rudra.roles import Machine
from rudra.simulation.background_jobs import ENDLESS, Unrecorded, job_beside
from rudra.simulation.cluster import without_tensors
from rudra.simulation.costs import CostModel, paces_of
from rudra.simulation.driver import Check, RowSink, Simulation
from rudra.simulation.overlap import Overlap
from rudra.simulation.regrouping import Make
from rudra.simulation.timing_only import Tensors
from rudra.simulation.windows import SimulatedWindows
from topologies import Plan


def machines_of(
    phases: Phases, training_samples: int, position: TrainingState = BEGINNING
) -> tuple[dict[int, Machine], Make]:
    """Returns the state machines of all roles, and a function that makes a machine for another starting state.

    Args:
        phases: Phases of the run.
        training_samples: Number of training samples per epoch.
        position: State at the start of training.
    """

    def make(role: int, plan: Plan, position: TrainingState) -> Machine:
        return roles.make_in_phase(role, phases, plan.gone, training_samples, position)

    plan = phase_at(phases, position).plan
    return {i: make(i, plan, position) for i in range(len(plan.roles))}, make


def prices_of(
    phases: Phases, size_bytes: int, placed: Placed | None = None, buffers: int = 0
) -> Callable[[TrainingState], CostModel]:
    """Returns a function that gives the cost model at a training state.

    Args:
        phases: Phases of the run.
        size_bytes: Size of a tensor on the wire.
        placed: How the model is divided between learners and a stage server.
        buffers: Number of elements of a gradient that are not parameters.
    """
    known: dict[Boundary, CostModel] = {}

    def price(position: TrainingState) -> CostModel:
        start, job, plan, *_ = phase_at(phases, position)
        if start not in known:
            size, bytes_ = job.training.minibatch_size, tensor_bytes(size_bytes)
            about: dict[str, Any] = {"size_bytes": bytes_, "placed": placed, "paces": paces_of(job, plan)}
            about |= {"urgent": job.evaluations_decide, "banks": job.cluster.learners_per_device is not None}
            about["overlap"] = Overlap(job, plan, bytes_ // 4, buffers, placed)
            known[start] = CostModel(job.simulation, plan, size, job.cluster.parts, **about)
        return known[start]

    return price


def assemble(
    job: Job,
    plan: Plan,
    tensors: Tensors,
    recorder: RowSink,
    *,
    training_samples: int,
    size_bytes: int,
    buffers: int = 0,
    position: TrainingState = BEGINNING,
    save: Callable[[int, Save], None] | None = None,
    check: Check | None = None,
    placed: Placed | None = None,
    beside: Simulation | None = None,
) -> Simulation:
    """Returns a simulation of a job, ready to run, with its background jobs.

    Args:
        job: Resolved job with its cost file read.
        plan: Initial plan.
        tensors: Tensors of all roles.
        recorder: Receiver of the statistics server's rows.
        training_samples: Number of training samples per epoch.
        size_bytes: Size of a gradient or the weights on the wire.
        buffers: Number of elements of a gradient that are not parameters.
        position: State at the start of training.
        save: See `Simulation`.
        check: Function called after every event.
        placed: How the model is divided between learners and a stage server.
        beside: Simulation of the main job, if this one is a background job.

    Raises:
        ConfigError: The job's schedule gives no rates, or a background job is invalid.
    """
    phases = phases_of(job, plan, training_samples)
    machines, make = machines_of(phases, training_samples, position)
    price = prices_of(phases, size_bytes, placed, buffers)
    simulation = Simulation(
        phase_at(phases, position).plan,
        machines,
        tensors,
        recorder,
        price(position),
        size_bytes=size_bytes,
        seed=job.training.seed + position.timestamp,
        gradient_share=job.cluster.gradient_share,
        make=make,
        price=price,
        save=save,
        check=check,
        beside=beside,
    )
    if plan.window:
        SimulatedWindows(simulation, job, plan)
    for number in range(len(job.simulation.background_jobs)):
        try:
            _put_beside(simulation, job_beside(job, number))
        except ConfigError as error:
            raise ConfigError(f"[simulation] background_jobs, table {number + 1}: {error}") from None
    return simulation


def _put_beside(simulation: Simulation, job: Job) -> None:
    """Starts the roles of a background job together with the main job, on the same machines."""
    plan = job.plan(nodes_of(job))
    cluster = without_tensors(job)
    assemble(
        job,
        plan,
        cluster.tensors,
        Unrecorded(),
        training_samples=ENDLESS,
        size_bytes=cluster.size * 4 + tail_bytes(1),
        buffers=cluster.buffers,
        placed=cluster.placed,
        beside=simulation,
    )
