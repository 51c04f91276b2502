"""How a job's protocol and topology are made of its tables."""

from __future__ import annotations

from typing import Any

import protocols
import topologies
from rudra import plugins
from rudra.job.fields import JobFields
from rudra.job.table import named
from rudra.job.tables import WorkersTable


def factory_of(job: JobFields) -> Any:
    """What makes the job's protocol: a class as a rule.

    Raises:
        ConfigError: there is no such protocol.
    """
    return plugins.choose("[protocol] name", job.protocol.name, protocols.shipped())


def make_protocol(job: JobFields, plan: topologies.Plan, lost: int = 0) -> protocols.Protocol:
    """The job's protocol, made for the workers of a plan; `Job.make_protocol` says more."""
    table = job.protocol
    left = plan.workers - lost
    factory = factory_of(job)
    averages = getattr(factory, "averages", False)
    if job.averaging.given and not averages:
        valid = f"valid with protocol {named(table.name)}: no keys"
        raise ValueError(f"[averaging] is for {protocols.averaging_names()}; {valid}")
    options = table.options | job.averaging.given
    schedules = getattr(factory, "schedules", False)
    if not schedules and (key := next(iter([*table.of_hogbatch, *(["[[workers]]"] if job.workers else [])]), "")):
        where = key if key.startswith("[") else f"[protocol] {key}"
        raise ValueError(f"{where} is for hogbatch; valid with protocol {named(table.name)}: none")
    if schedules:
        for key in table.options.keys() & {"rule", "lr_scaling", "workers", "window"}:
            own = _ELSEWHERE.get(key, f"{key} is a key of [protocol] itself")
            raise ValueError(f"[protocol] options.{key} is not possible; {own}")
        options |= table.of_hogbatch | {"workers": [table.worker for table in team(job, plan.learner_numbers)]}
        options["window"] = job.weights.update if job.weights.at == "window" else ""
    if averages:
        options["served"] = plan.averaging and plan.served
        if plan.sharing == "reference":
            options["blocks"] = [*map(len, plan.groups)]
    return protocols.make(
        factory,
        learners=left,
        minibatch_size=job.training.minibatch_size * len(plan.learners) / plan.workers,
        n=min(table.n, left) if table.n and (lost or plan.gone) else table.n,
        modulation=plugins.choose("[protocol] modulation", table.modulation, {"auto": None, **protocols.MODULATIONS}),
        reference_batch_size=table.reference_batch_size,
        scale_invariant_optimizer=job.optimizer.name if job.optimizer.scale_invariant else None,
        options=options,
    )


def make_topology(job: JobFields) -> topologies.Topology:
    """The job's topology, with its options bound; `Job.make_topology` says more."""
    topology = plugins.choose("[topology] name", job.topology.name, topologies.shipped())
    per_rank, staged = job.cluster.learners_per_rank, job.placement.servers if job.placement.given else 0
    scheduled = getattr(factory_of(job), "schedules", False)
    how = {"scheduled": scheduled, "window": scheduled and job.weights.at == "window"}
    return topologies.load(topology, job.topology.options, per_rank, staged=staged, **how)


def explicit_momentum(job: JobFields, plan: topologies.Plan) -> float:
    """The momentum that the optimiser uses; `Job.explicit_momentum` says more."""
    if job.optimizer.momentum_correction == "none":
        return job.optimizer.momentum
    asynchrony = 1 + make_protocol(job, plan).expected_staleness
    return max(0.0, job.optimizer.momentum - (1 - 1 / asynchrony))


def team(job: JobFields, learners: int) -> tuple[WorkersTable, ...]:
    """The table `[[workers]]` of each learner, by its number, where a coordinator deals the samples out.

    Raises:
        ValueError: the tables `[[workers]]` do not name each learner once.
    """
    if not job.workers:
        raise ValueError(
            "[protocol] name: hogbatch needs tables [[workers]], which say what batches its learners take; "
            'valid, for example: kind = "small"'
        )
    table_of: dict[int, int] = {}
    for place, table in enumerate(job.workers):
        for learner in table.ranks or ():
            if not 0 <= learner < learners:
                raise ValueError(f"[workers] {place}.ranks names learner {learner}; valid: 0 to {learners - 1}")
            if learner in table_of:
                raise ValueError(f"[workers] {place}.ranks names learner {learner} a second time; valid: once")
            table_of[learner] = place
    rest = [place for place, table in enumerate(job.workers) if table.ranks is None]
    if len(rest) > 1:
        raise ValueError(f"[workers] {rest[1]}.ranks is missing: one table can be of all that no other names")
    others = [learner for learner in range(learners) if learner not in table_of]
    if others and not rest:
        raise ValueError(f"[workers] no table names learner {others[0]}; valid: ranks of all {learners} learners")
    if rest and not others:
        raise ValueError(f"[workers] {rest[0]}: other tables name all {learners} learners; valid: one less")
    table_of |= dict.fromkeys(others, *rest)
    return tuple(job.workers[table_of[learner]] for learner in range(learners))


_ELSEWHERE = {"workers": "[[workers]] is a list of tables", "window": "[weights] at says whether there is one"}
"""What Hogbatch is told and [protocol] has no key for."""
