"""Protocol and topology of a job, made from its tables."""

from __future__ import annotations

from typing import Any

import protocols
import topologies
from rudra import plugins
from rudra.job.fields import JobFields
from rudra.job.tables import ArgumentsTable


def factory_of(job: JobFields) -> Any:
    """Finds the class, or another callable, that makes the job's protocol.

    Raises:
        ConfigError: there is no such protocol.
    """
    return plugins.choose("[protocol] name", job.protocol.name, protocols.shipped())


def table_of(job: JobFields) -> ArgumentsTable | None:
    """Returns the table of the job whose keys belong to its protocol, or None if the protocol has no table."""
    found: ArgumentsTable | None = getattr(job, getattr(factory_of(job), "table", ""), None)
    return found


def make_protocol(job: JobFields, plan: topologies.Plan, lost: int = 0) -> protocols.Protocol:
    """Makes the job's protocol for the workers of a plan: see `Job.make_protocol`."""
    table, factory = job.protocol, factory_of(job)
    left = plan.workers - lost
    own = table_of(job)
    arguments = {} if own is None else own.arguments(plan)
    for key in table.options.keys() & arguments.keys():
        raise ValueError(f"[protocol] options.{key} is not supported; use the keys of [{factory.table}]")
    return protocols.make(
        factory,
        learners=left,
        minibatch_size=job.training.minibatch_size * len(plan.learners) / plan.workers,
        n=min(table.n, left) if table.n and (lost or plan.gone) else table.n,
        modulation=plugins.choose("[protocol] modulation", table.modulation, {"auto": None, **protocols.MODULATIONS}),
        reference_batch_size=table.reference_batch_size,
        scale_invariant_optimizer=job.optimizer.name if job.optimizer.scale_invariant else None,
        options={**table.options, **arguments},
    )


def topology_of(job: JobFields) -> str:
    """Returns the name of the topology that "auto" selects for the job's protocol."""
    return str(getattr(factory_of(job), "topology", "base"))


def make_topology(job: JobFields) -> topologies.Topology:
    """Binds the job's topology to its options: see `Job.make_topology`."""
    topology = plugins.choose("[topology] name", job.topology.name, {"auto": "", **topologies.shipped()})
    per_rank, staged = job.cluster.learners_per_rank, job.placement.servers if job.placement.given else 0
    scheduled = getattr(factory_of(job), "schedules", False)
    how = {"scheduled": scheduled, "window": scheduled and job.hogbatch.shares_weights}
    return topologies.load(topology, job.topology.options, per_rank, staged=staged, **how)


def explicit_momentum(job: JobFields, plan: topologies.Plan) -> float:
    """Returns the momentum that the optimiser uses: see `Job.explicit_momentum`."""
    if job.optimizer.momentum_correction == "none":
        return job.optimizer.momentum
    asynchrony = 1 + make_protocol(job, plan).expected_staleness
    return max(0.0, job.optimizer.momentum - (1 - 1 / asynchrony))
