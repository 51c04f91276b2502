"""The job: one immutable, validated description of a run.

A job comes from a TOML file, from the name of a shipped job, or from code. Its tables are those of `rudra.job.tables`;
rules that span them stand together in `Job._check_across_tables`.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError, model_validator

import protocols
import topologies
from rudra import plugins
from rudra.errors import ConfigError
from rudra.job.jobfiles import Change, apply, parsed, read_job
from rudra.job.simulation import SimulationTable
from rudra.job.table import Named, Table, explain
from rudra.job.tables import (
    AugmentTable,
    ClusterTable,
    DataTable,
    FaultToleranceTable,
    Hook,
    ModelTable,
    OptimizerTable,
    ProtocolTable,
    ResultsTable,
    StudyTable,
    TaskTable,
    TopologyTable,
    TrainingTable,
)
from topologies.plan import TREE_SERVER


class Job(Table):
    """A run, completely described. Immutable; `resolved` fills in what depends on the ranks."""

    name: str = "job"
    model: ModelTable = ModelTable()
    data: DataTable = DataTable()
    augment: AugmentTable = AugmentTable()
    task: TaskTable = TaskTable()
    training: TrainingTable = TrainingTable()
    optimizer: OptimizerTable = OptimizerTable()
    protocol: ProtocolTable = ProtocolTable()
    topology: TopologyTable = TopologyTable()
    cluster: ClusterTable = ClusterTable()
    simulation: SimulationTable = SimulationTable()
    fault_tolerance: FaultToleranceTable = FaultToleranceTable()
    results: ResultsTable = ResultsTable()
    hooks: tuple[Hook, ...] = ()
    study: StudyTable = StudyTable()

    def __init__(self, **tables: Any) -> None:
        try:
            super().__init__(**tables)
        except ValidationError as error:
            texts = (explain(e, type(self)) for e in error.errors())
            raise ConfigError("; ".join(dict.fromkeys(texts))) from None

    @model_validator(mode="after")
    def _check_across_tables(self) -> Self:
        self.make_topology()
        if self.training.compile and self.simulation.batching != "none":
            raise ValueError("[training] compile = true computes one gradient at a time; valid: batching = 'none'")
        if self.training.compile and self.training.precision != "float32":
            raise ValueError("[training] compile = true computes in float32 so far; valid: precision = 'float32'")
        if self.training.stop_at_target and self.training.target is None:
            raise ValueError("[training] stop_at_target = true, but there is no target")
        if not self.training.evaluate:
            by_tests = {"[results] keep_best": self.results.keep_best, "[training] patience": self.training.patience}
            by_tests["[optimizer] schedule = 'plateau'"] = self.optimizer.plateau
            for key in (key for key, wanted in by_tests.items() if wanted):
                raise ValueError(f"{key} goes by tests, but [training] evaluate = false: nothing is tested")
        if self.optimizer.momentum_correction != "none" and not (
            self.optimizer.name == "sgd" and self.optimizer.momentum
        ):
            raise ValueError("[optimizer] momentum_correction corrects the momentum of sgd, and there is none")
        if self.training.precision == "float16" and self.simulation.batching == "vmap":
            raise ValueError(
                "[simulation] batching = 'vmap' looks for no scale of the loss, but [training] precision = 'float16' "
                "needs one; valid: batching none or big-batch, precision bfloat16"
            )
        if self.cluster.learners is not None:
            plan = self.plan()
            self._check_pair(plan)
            self._check_hooks(plan, placed=False)
            named = {key: list(getattr(self.simulation, key)) for key in ("slowdown", "learner_jitter")}
            named["faults"] = [fault.learner for fault in self.simulation.faults if fault.learner is not None]
            for key, learners in named.items():
                for learner in learners:
                    if not 0 <= learner < self.cluster.learners:
                        raise ValueError(
                            f"[simulation] {key} names learner {learner}; valid: 0 to {self.cluster.learners - 1}"
                        )
        return self

    @classmethod
    def load(cls, job: str | Path, overrides: Sequence[str] = ()) -> Job:
        """Reads a job file or a shipped job.

        Args:
            job: path of a TOML file, or a name that `shipped_jobs` lists.
            overrides: texts `table.key=value`; a value is TOML, or a plain string where it is no TOML; without a value
                the key has its default.

        Raises:
            ConfigError: no such job, no TOML, an unknown key, a wrong type or a contradiction.
        """
        path, tables = read_job(job)
        return cls.of(path, tables, [parsed(override) for override in overrides])

    @classmethod
    def of(cls, path: Path, tables: dict[str, Any], changes: Sequence[Change] = ()) -> Job:
        """The job of a file's tables, with changes; a ConfigError names the file, or the change that brought it in."""
        stages = [tables]
        for change in changes:
            if "." not in change.key and (
                places := [f"{table}.{change.key}" for table in _tables_with(cls, change.key)]
            ):
                raise ConfigError(f"{change.said}: must read table.key=value; did you mean {' or '.join(places)}?")
            stages.append(copy.deepcopy(stages[-1]))
            apply(stages[-1], change)
        try:
            return cls(**{"name": path.stem, **stages[-1]})
        except ConfigError as error:
            valid = [_is_valid(cls, stage) for stage in stages]
            last = max((i for i, good in enumerate(valid) if good), default=None)
            where = path if last is None else changes[last].said
            raise ConfigError(f"{where}: {error}") from None

    def with_(self, *, hooks: Sequence[Hook | Mapping[str, Any]] | None = None, **tables: Mapping[str, Any]) -> Job:
        """A copy in which the given keys of the given tables, or all hooks, are replaced, and everything is checked."""
        merged = {field: getattr(self, field) for field in type(self).model_fields}
        merged["hooks"] = self.hooks if hooks is None else hooks
        for table, keys in tables.items():
            if not isinstance(merged.get(table), Table):
                valid = ", ".join(name for name in merged if name != "name")
                raise ConfigError(f"unknown table '{table}'; valid: {valid}")
            merged[table] = {**_as_dict(merged[table]), **keys}
        return type(self)(**{k: _as_dict(v) if isinstance(v, Table) else v for k, v in merged.items()})

    def resolved(self, *, learners: int | None = None, threads_per_rank: int | None = None, cores: int = 1) -> Job:
        """The job with everything filled in that the launch decides: learners and threads."""
        learners = learners or self.cluster.learners or 4
        threads = threads_per_rank or self.cluster.threads_per_rank or max(1, cores // learners)
        return self.with_(cluster={"learners": learners, "threads_per_rank": threads})

    @property
    def learners(self) -> int:
        """λ of a resolved job."""
        if self.cluster.learners is None:
            raise ConfigError("[cluster] learners is not resolved yet")
        return self.cluster.learners

    def plan(self, nodes: Sequence[int] | None = None) -> topologies.Plan:
        """Who is who in the resolved job; `nodes` of the learners, by default one for all."""
        plan = self.make_topology().plan(self.learners, nodes)
        if nodes is not None:
            self.check(plan)
            servers = sum(role.kind == TREE_SERVER for role in plan.roles)
            for fault in self.simulation.faults:
                if fault.tree_server is not None and not 0 <= fault.tree_server < servers:
                    valid = f"0 to {servers - 1}" if servers else "none, there is no tree of servers"
                    raise ConfigError(f"[simulation] faults names tree server {fault.tree_server}; valid: {valid}")
        return plan

    def check(self, plan: topologies.Plan) -> None:
        """Raises ConfigError where the job's protocol or hooks cannot work on a plan of its topology."""
        try:
            self._check_pair(plan)
            self._check_hooks(plan, placed=True)
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def _check_pair(self, plan: topologies.Plan) -> None:
        protocol = self.make_protocol(plan)
        _check_pair(protocol, plan, self.topology.name)
        if self.cluster.gpu_aware_mpi and (plan.groups or self.cluster.gradient_format == "float16"):
            what = "compute groups add gradients" if plan.groups else "gradient_format float16 converts them"
            raise ValueError(f"[cluster] gpu_aware_mpi: {what} in main memory; valid there: false")
        if self.fault_tolerance.straggler_timeout_s is not None and (plan.groups or not protocol.ordered):
            raise ValueError(
                "[fault_tolerance] straggler_timeout_s: only a server that waits for each of its learners can drop one;"
                " valid with protocol hardsync and topology base or adv"
            )

    def _check_hooks(self, plan: topologies.Plan, *, placed: bool) -> None:
        """Raises ValueError where a hook is of no role; servers of a tree depend on where all are placed."""
        for place, hook in enumerate(self.hooks):
            if placed or hook.at != "end" or not str(hook.role).startswith(TREE_SERVER):
                try:
                    hook.roles(plan)
                except ValueError as error:
                    raise ValueError(f"[hooks] {place}.role {error}") from None

    def make_protocol(self, plan: topologies.Plan | None = None, lost: int = 0) -> protocols.Protocol:
        """The job's protocol, for the workers that the resolved job has: learners or compute groups.

        Args:
            plan: who is who.
            lost: workers that are no more; n is then at most what is left.
        """
        table = self.protocol
        plan = self.plan() if plan is None else plan
        left = plan.workers - lost
        return protocols.make(
            plugins.choose("[protocol] name", table.name, protocols.shipped()),
            learners=left,
            minibatch_size=self.training.minibatch_size * len(plan.learners) / plan.workers,
            n=min(table.n, left) if table.n and (lost or plan.gone) else table.n,
            modulation=table.modulation,
            reference_batch_size=table.reference_batch_size,
            scale_invariant_optimizer=self.optimizer.name if self.optimizer.scale_invariant else None,
            options=table.options,
        )

    def gradients_per_update(self, plan: topologies.Plan) -> int:
        """Learners' gradients that make an update; a group's average stands for those of its members."""
        return self.make_protocol(plan).gradients_per_update * len(plan.learners) // plan.workers

    def explicit_momentum(self, plan: topologies.Plan | None = None) -> float:
        """What is left of the momentum that the job wants, once asynchrony has given its share.

        With g workers that update independently, gradients arrive as if there were momentum 1 - 1/g (Omnivore,
        theorem 1: for step times that are exponential, and no explicit momentum). g is what the weights see, ⟨σ⟩ + 1:
        nearly 2 under 1-softsync, although all workers together make an update. That the two momenta add up is a rule
        of thumb.
        """
        if self.optimizer.momentum_correction == "none":
            return self.optimizer.momentum
        asynchrony = 1 + self.make_protocol(plan).expected_staleness
        return max(0.0, self.optimizer.momentum - (1 - 1 / asynchrony))

    def make_topology(self) -> topologies.Topology:
        """The job's topology."""
        topology = plugins.choose("[topology] name", self.topology.name, topologies.shipped())
        return topologies.load(topology, self.topology.options)

    def to_json(self) -> str:
        """The job as one line of JSON; callables appear as `module:name`. A study is no part of a run."""
        return json.dumps(self.model_dump(exclude={"study"}), default=_name_of, sort_keys=True)


def _tables_with(job: type[Job], key: str) -> list[str]:
    """Tables that have a key."""
    kinds = {name: field.annotation for name, field in job.model_fields.items()}
    return [name for name, kind in kinds.items() if isinstance(kind, type) and key in getattr(kind, "model_fields", ())]


def _is_valid(job: type[Job], tables: Mapping[str, Any]) -> bool:
    try:
        job(**{"name": "job", **tables})
    except ConfigError:
        return False
    return True


def _check_pair(protocol: protocols.Protocol, plan: topologies.Plan, topology: Named) -> None:
    """Raises ValueError where a protocol cannot work on a topology."""
    name, on = type(protocol).__name__.lower(), f"[topology] name: {topology}"
    if plan.overlapped and protocol.waits:
        raise ValueError(
            f"{on}: its learners never wait for a server, but with protocol {name} they must; valid: softsync, async, "
            "or topology adv"
        )
    most = len(plan.learners) * (plan.outstanding or math.inf)
    if most < protocol.gradients_per_update:
        raise ValueError(
            f"{on}: options.outstanding = {plan.outstanding} lets {most} gradients be under way, but protocol {name} "
            f"wants {protocol.gradients_per_update} for an update"
        )
    if not plan.served and protocol.gradients_per_update > 1:
        raise ValueError(
            f"{on}: one compute group alone updates by each of its averages, but protocol {name} wants "
            f"{protocol.gradients_per_update} for an update; valid: more groups, or a protocol that takes one"
        )
    if any(role.kind == TREE_SERVER for role in plan.roles):
        if protocol.waits and protocol.grants_on_push:
            raise ValueError(
                f"{on}: protocol {name} decides by what every learner has pushed, which servers of a tree do not know; "
                "valid: topology base, or a rule by timestamps alone (grants_on_push = False)"
            )
        if protocol.modulation.weighs:
            raise ValueError(
                f"{on}: modulation 'gradient_staleness' weighs each gradient where weights are updated, but a tree has "
                "averaged them by then; valid: topology base, or modulation 'mean_staleness'"
            )


def _as_dict(table: Table) -> dict[str, Any]:
    return {key: getattr(table, key) for key in table.model_fields_set}


def named(value: Named) -> str:
    """What a job names, as a text: the name itself, or `module:name` of a Python object."""
    return value if isinstance(value, str) else _name_of(value)


def _name_of(value: Any) -> str:
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}:{value.__qualname__}"
    return f"{type(value).__module__}:{type(value).__qualname__}"
