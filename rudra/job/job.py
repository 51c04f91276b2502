"""The job: one immutable, validated description of a run.

A job comes from a TOML file, from the name of a shipped job, or from code. Its tables are those of `rudra.job.tables`;
rules that span them stand together in `Job._check_across_tables`.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError, model_validator

import protocols
import topologies
from rudra import plugins
from rudra.errors import ConfigError
from rudra.job import pairing
from rudra.job.changes import MAY_CHANGE, JobChange
from rudra.job.fields import JobFields
from rudra.job.jobfiles import Change, apply, parsed, read_job
from rudra.job.simulation import PER_BYTE
from rudra.job.table import Table, explain, name_of, named
from rudra.job.tables import (
    Hook,
    WorkersTable,
)
from topologies.kinds import TREE_SERVER


class Job(JobFields):
    """The complete description of a run, checked when it is made.

    A job cannot be changed; `with_` makes a changed copy. `load` reads a job from a file; from Python each table is a
    dictionary: `Job(training={"epochs": 5}, cluster={"learners": 2})`. Tables and keys that are left out have their
    defaults. A key that names a callable takes the callable itself, too. `docs/job-reference.md` lists every key, with
    what is allowed, and `JobFields` says what each table is for.

    Raises:
        ConfigError: an unknown table or key, a wrong type, or keys that contradict each other.
    """

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
                raise ValueError(f"{key} depends on tests, but [training] evaluate = false")
        if self.training.evaluate_training_set and self.training.evaluate != "workers":
            raise ValueError("[training] evaluate_training_set: workers do that; valid: with evaluate = 'workers'")
        if self.optimizer.momentum_correction != "none" and not (
            self.optimizer.name == "sgd" and self.optimizer.momentum
        ):
            raise ValueError("[optimizer] momentum_correction corrects the momentum of sgd, and there is none")
        if self.training.precision == "float16" and self.simulation.batching == "vmap":
            raise ValueError(
                "[simulation] batching = 'vmap' chooses no loss scale, but [training] precision = 'float16' "
                "needs one; valid: batching none or big-batch, precision bfloat16"
            )
        for key, per_byte in PER_BYTE.items():
            default = type(self.simulation).model_fields[key].default  # which stands in the file of every run
            if getattr(self.simulation, per_byte) is not None and getattr(self.simulation, key) != default:
                raise ValueError(f"[simulation] has {key} and {per_byte}; valid: one of them")
        if self.simulation.sharing == "equal":
            self._check_sharing()
        if self.cluster.learners is not None:
            plan = self.plan()
            pairing.check(self, plan, self.make_protocol(plan))
            pairing.check_hooks(self, plan, placed=False)
            numbers = {key: list(getattr(self.simulation, key)) for key in ("slowdown", "learner_jitter")}
            numbers["faults"] = [fault.learner for fault in self.simulation.faults if fault.learner is not None]
            for key, learners in numbers.items():
                for learner in learners:
                    if not 0 <= learner < self.cluster.learners:
                        raise ValueError(
                            f"[simulation] {key} names learner {learner}; valid: 0 to {self.cluster.learners - 1}"
                        )
        self._check_changes()
        return self

    def _check_sharing(self) -> None:
        """Raises ValueError for what may not be where a link carries several tensors at once, also of other jobs."""
        refused = {
            "[simulation] blocking_servers": self.simulation.blocking_servers,
            "[simulation] faults": self.simulation.faults,
            "[fault_tolerance] straggler_timeout_s": self.fault_tolerance.straggler_timeout_s,
            "[[changes]]": self.changes,
            "[weights] at = 'window'": self.weights.at == "window",
        }
        for key in (key for key, wanted in refused.items() if wanted):
            raise ValueError(f"[simulation] sharing = 'equal': not with {key} so far; valid: sharing = 'turns'")

    def _check_changes(self) -> None:
        """Raises ValueError unless the job is one after each change, too, with the same roles and optimiser."""
        if not self.changes:
            return
        epochs, before, first = self.training.epochs, 0, self.at(0)
        if self.optimizer.schedule_every == "update":
            raise ValueError("[[changes]]: schedule_every = 'update' counts updates of one protocol; valid: 'epoch'")
        if self.simulation.batching == "big-batch":
            raise ValueError("[[changes]]: batching = 'big-batch' is of one mini-batch size; valid: none, vmap")
        for change in self.changes:
            where = f"[[changes]] at_epoch = {change.at_epoch}"
            if not before < change.at_epoch < epochs:
                raise ValueError(f"{where}: must be ascending, and less than training.epochs = {epochs}")
            before = change.at_epoch
            if change.cluster.get("shares") == "auto":
                raise ValueError(f"{where}: cluster.shares = 'auto' is measured before training; valid: a list")
            try:
                after = self.at(before)
                if self.cluster.learners is not None:
                    if first.plan().parted:
                        raise ValueError("servers that share the weights cannot begin anew; valid: other topologies")
                    pairing.check_same_roles(first.plan(), after.plan())
                    if first.explicit_momentum() != after.explicit_momentum():
                        raise ValueError("[optimizer] momentum_correction would change the momentum; valid: 'none'")
            except (ConfigError, ValueError) as error:
                raise ValueError(f"{where}: {error}") from None

    def at(self, epoch: int) -> Job:
        """The job of a part of a run: a job without changes.

        Args:
            epoch: how many epochs are complete. What changes after them, or earlier, has its new values.
        """
        if not self.changes:
            return self
        tables: Any = {table: _as_dict(getattr(self, table)) for table in MAY_CHANGE}
        for change in self.changes:
            if change.at_epoch <= epoch:
                tables = change.applied(tables)
        return self.with_(changes=(), **tables)

    @classmethod
    def load(cls, job: str | Path, overrides: Sequence[str] = ()) -> Job:
        """Reads a job file or a shipped job.

        Args:
            job: path of a TOML file, or a name that `shipped_jobs` lists.
            overrides: changes, each a text `table.key=value`, applied in this order. A value is read as TOML, and as a
                plain string where it is not TOML. Without a value (`table.key=`) the key has its default.

        Returns:
            The job, whose name is that of the file unless the file says otherwise.

        Raises:
            ConfigError: there is no such job, the file is not TOML, a key is unknown, or a value is not allowed.
        """
        path, tables = read_job(job)
        return cls.of(path, tables, [parsed(override) for override in overrides])

    @classmethod
    def of(cls, path: Path, tables: dict[str, Any], changes: Sequence[Change] = ()) -> Job:
        """Makes a job of the tables of a file that was read.

        Args:
            path: of the file, for the job's name and for errors.
            tables: table -> key -> value.
            changes: keys and their new values, applied in this order.

        Raises:
            ConfigError: as in `load`; the text names the file, or the change that is wrong.
        """
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

    def with_(
        self,
        *,
        workers: Sequence[WorkersTable | Mapping[str, Any]] | None = None,
        hooks: Sequence[Hook | Mapping[str, Any]] | None = None,
        changes: Sequence[JobChange | Mapping[str, Any]] | None = None,
        **tables: Mapping[str, Any],
    ) -> Job:
        """A copy with other values, checked as a whole: `job.with_(training={"epochs": 3})`.

        Args:
            workers: all tables `[[workers]]` of the copy; None: those of this job.
            hooks: all hooks of the copy; None: those of this job.
            changes: all changes of the copy; None: those of this job.
            tables: table -> key -> new value; keys that are not named keep their values.

        Raises:
            ConfigError: there is no such table or key, or the copy contradicts itself.
        """
        merged = {field: getattr(self, field) for field in type(self).model_fields}
        merged["workers"] = self.workers if workers is None else workers
        merged["hooks"] = self.hooks if hooks is None else hooks
        merged["changes"] = self.changes if changes is None else changes
        for table, keys in tables.items():
            if not isinstance(merged.get(table), Table):
                valid = ", ".join(name for name in merged if name != "name")
                raise ConfigError(f"unknown table '{table}'; valid: {valid}")
            merged[table] = {**_as_dict(merged[table]), **keys}
        return type(self)(**{k: _as_dict(v) if isinstance(v, Table) else v for k, v in merged.items()})

    def without_tests(self) -> Job:
        """The job without tests of its weights, nor what goes by them: where only time counts."""
        return self.with_(
            training={
                "evaluate": False,
                "evaluate_training_set": False,
                "target": None,
                "stop_at_target": False,
                "patience": None,
            },
            results={"keep_best": False},
            optimizer={"schedule": "step", "schedule_options": {}} if self.optimizer.plateau is not None else {},
        )

    def resolved(self, *, learners: int | None = None, threads_per_rank: int | None = None, cores: int = 1) -> Job:
        """A copy with the keys filled in that the launch decides, `cluster.learners` and `cluster.threads_per_rank`.

        Args:
            learners: λ; None: as the job says, else 4.
            threads_per_rank: threads of torch on each learner; None: as the job says, else `cores` divided by the
                number of ranks on which learners compute, at least 1.
            cores: processor cores that the learners share.

        Raises:
            ConfigError: the job does not allow so many learners.
        """
        learners = learners or self.cluster.learners or 4
        at_once = -(-learners // self.cluster.learners_per_rank)
        threads = threads_per_rank or self.cluster.threads_per_rank or max(1, cores // at_once)
        return self.with_(cluster={"learners": learners, "threads_per_rank": threads})

    @property
    def learners(self) -> int:
        """λ, the number of learners.

        Raises:
            ConfigError: the job leaves it open, and is not `resolved` yet.
        """
        if self.cluster.learners is None:
            raise ConfigError("[cluster] learners is not resolved yet")
        return self.cluster.learners

    def plan(self, nodes: Sequence[int] | None = None) -> topologies.Plan:
        """The roles of the job, and which of them exchange gradients and weights. The number of learners must be known.

        Args:
            nodes: node of every learner, λ numbers in ascending order; None: all learners are on one node. With nodes
                the protocol, hooks and simulated faults are checked against the plan, too.

        Raises:
            ConfigError: the number of learners is not known, or protocol, hooks or faults do not fit the plan.
            ValueError: options of the topology do not fit these learners.
        """
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
        """Checks the job's protocol and hooks against a plan.

        Args:
            plan: roles of the job, as `plan` makes them or as they are on real ranks.

        Raises:
            ConfigError: the protocol cannot work on the plan, or a hook names a role that is not in it.
        """
        try:
            pairing.check(self, plan, self.make_protocol(plan))
            pairing.check_hooks(self, plan, placed=True)
            for change in self.changes:
                later, its_plan = self.at(change.at_epoch), self.plan_after(change.at_epoch, plan)
                pairing.check(later, its_plan, later.make_protocol(its_plan))
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def plan_after(self, epoch: int, plan: topologies.Plan) -> topologies.Plan:
        """The plan of a part of a run, on the ranks and nodes that the run has.

        Args:
            epoch: how many epochs are complete.
            plan: of the first part.

        Raises:
            ValueError: options of the topology do not fit, or do not keep the roles.
        """
        drawn = self.at(epoch).make_topology().plan(len(plan.learners), [plan.roles[i].node for i in plan.learners])
        pairing.check_same_roles(plan, drawn)
        places = zip(drawn.roles, plan.roles, strict=True)
        roles = (replace(role, world_rank=there.world_rank, node=there.node) for role, there in places)
        return replace(drawn, roles=tuple(roles))

    def team(self, learners: int) -> tuple[WorkersTable, ...]:
        """The table `[[workers]]` of each learner, by its number, where a coordinator deals the samples out.

        Raises:
            ValueError: the tables `[[workers]]` do not name each learner once.
        """
        if not self.workers:
            raise ValueError(
                "[protocol] name: hogbatch needs tables [[workers]], which say what batches its learners take; "
                'valid, for example: kind = "small"'
            )
        table_of: dict[int, int] = {}
        for place, table in enumerate(self.workers):
            for learner in table.ranks or ():
                if not 0 <= learner < learners:
                    raise ValueError(f"[workers] {place}.ranks names learner {learner}; valid: 0 to {learners - 1}")
                if learner in table_of:
                    raise ValueError(f"[workers] {place}.ranks names learner {learner} a second time; valid: once")
                table_of[learner] = place
        rest = [place for place, table in enumerate(self.workers) if table.ranks is None]
        if len(rest) > 1:
            raise ValueError(f"[workers] {rest[1]}.ranks is missing: one table can be of all that no other names")
        others = [learner for learner in range(learners) if learner not in table_of]
        if others and not rest:
            raise ValueError(f"[workers] no table names learner {others[0]}; valid: ranks of all {learners} learners")
        if rest and not others:
            raise ValueError(f"[workers] {rest[0]}: other tables name all {learners} learners; valid: one less")
        table_of |= dict.fromkeys(others, *rest)
        return tuple(self.workers[table_of[learner]] for learner in range(learners))

    def learners_on_cpu(self, plan: topologies.Plan) -> frozenset[int]:
        """Roles of the learners that compute on the CPU, wherever others do."""
        team = self.team(plan.learner_numbers) if self.workers else ()
        return frozenset(role for role in plan.learners if team and team[plan.roles[role].index].device == "cpu")

    def make_protocol(self, plan: topologies.Plan | None = None, lost: int = 0) -> protocols.Protocol:
        """The job's protocol, made for its workers: the learners, or the compute groups where there are any.

        Args:
            plan: roles of the job; None: `plan()`.
            lost: how many workers have died; n is then at most the number of those that are left.

        Raises:
            ConfigError: there is no such protocol.
            ValueError: an option, n or the modulation does not fit the protocol.
        """
        table = self.protocol
        plan = self.plan() if plan is None else plan
        left = plan.workers - lost
        factory = plugins.choose("[protocol] name", table.name, protocols.shipped())
        averages = _is_a(factory, protocols.Averaging)
        if self.averaging.given and not averages:
            raise ValueError(
                f"[averaging] is for {pairing.averaging_protocols()}; valid with protocol {named(table.name)}: no keys"
            )
        options = table.options | self.averaging.given
        schedules = _is_a(factory, protocols.Hogbatch)
        if not schedules and (key := next(iter([*table.of_hogbatch, *(["[[workers]]"] if self.workers else [])]), "")):
            where = key if key.startswith("[") else f"[protocol] {key}"
            raise ValueError(f"{where} is for hogbatch; valid with protocol {named(table.name)}: none")
        if schedules:
            for key in table.options.keys() & {"rule", "lr_scaling", "workers", "window"}:
                own = _ELSEWHERE.get(key, f"{key} is a key of [protocol] itself")
                raise ValueError(f"[protocol] options.{key} is not possible; {own}")
            options |= table.of_hogbatch | {"workers": [table.worker for table in self.team(plan.learner_numbers)]}
            options["window"] = self.weights.update if self.weights.at == "window" else ""
        if averages:
            options["served"] = plan.averaging and plan.served
            if plan.sharing == "reference":
                options["blocks"] = [*map(len, plan.groups)]
        return protocols.make(
            factory,
            learners=left,
            minibatch_size=self.training.minibatch_size * len(plan.learners) / plan.workers,
            n=min(table.n, left) if table.n and (lost or plan.gone) else table.n,
            modulation=plugins.choose(
                "[protocol] modulation", table.modulation, {"auto": None, **protocols.MODULATIONS}
            ),
            reference_batch_size=table.reference_batch_size,
            scale_invariant_optimizer=self.optimizer.name if self.optimizer.scale_invariant else None,
            options=options,
        )

    def gradients_per_update(self, plan: topologies.Plan) -> int:
        """How many learners' gradients make an update. The average of a compute group counts as one of each member.

        Args:
            plan: roles of the job.
        """
        return self.make_protocol(plan).gradients_per_update * len(plan.learners) // plan.workers

    def explicit_momentum(self, plan: topologies.Plan | None = None) -> float:
        """The momentum that the optimiser uses: what is left of `optimizer.momentum` after `momentum_correction`.

        With g workers that update independently, gradients arrive as if there were momentum 1 - 1/g (Omnivore,
        theorem 1: for step times that are exponential, and no explicit momentum). g is what the weights see, ⟨σ⟩ + 1:
        nearly 2 under 1-softsync, although all workers together make an update. That the two momenta add up is a rule
        of thumb.

        Args:
            plan: roles of the job; None: `plan()`.

        Returns:
            The explicit momentum, at least 0; `optimizer.momentum` itself without a correction.
        """
        if self.optimizer.momentum_correction == "none":
            return self.optimizer.momentum
        asynchrony = 1 + self.make_protocol(plan).expected_staleness
        return max(0.0, self.optimizer.momentum - (1 - 1 / asynchrony))

    def make_topology(self) -> topologies.Topology:
        """The job's topology, with its options bound.

        Raises:
            ConfigError: there is no such topology.
            ValueError: it does not take these options.
        """
        topology = plugins.choose("[topology] name", self.topology.name, topologies.shipped())
        per_rank, staged = self.cluster.learners_per_rank, self.placement.servers if self.placement.given else 0
        factory = plugins.choose("[protocol] name", self.protocol.name, protocols.shipped())
        scheduled = _is_a(factory, protocols.Hogbatch)
        how = {"scheduled": scheduled, "window": scheduled and self.weights.at == "window"}
        return topologies.load(topology, self.topology.options, per_rank, staged=staged, **how)

    def to_json(self) -> str:
        """The job as one line of JSON, without the table `[study]`; a callable appears as `module:name`."""
        return json.dumps(self.model_dump(exclude={"study"}), default=name_of, sort_keys=True)


def _is_a(factory: Any, rule: type[protocols.Protocol]) -> bool:
    """Whether a protocol, not yet made, is of a kind."""
    return isinstance(factory, type) and issubclass(factory, rule)


def hogbatch_of(tables: Mapping[str, Any], learners: int) -> protocols.Hogbatch:
    """The rule by which a coordinator dealt samples out to so many learners, from what a file says of its job.

    Raises:
        ConfigError: the file says nothing of the kind.
    """
    about = {
        key: value for key, value in tables.get("protocol", {}).items() if key in ("rule", "lr_scaling", "options")
    }
    job = Job(protocol={"name": "hogbatch", **about}, workers=tables.get("workers", []), cluster={"learners": learners})
    made = job.make_protocol()
    assert isinstance(made, protocols.Hogbatch)
    return made


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


def _as_dict(table: Table) -> dict[str, Any]:
    return {key: getattr(table, key) for key in table.model_fields_set}


_ELSEWHERE = {"workers": "[[workers]] is a list of tables", "window": "[weights] at says whether there is one"}
"""What Hogbatch is told and [protocol] has no key for."""
