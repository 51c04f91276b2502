"""The job: one immutable, validated description of a run.

A job comes from a TOML file, from the name of a shipped job, or from code. `rudra.job.tables` declares its tables.
`rudra.job.fields` holds them and makes the protocol and the topology. `rudra.job.rules` checks combinations of keys.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError, model_validator

import topologies
from rudra.errors import ConfigError
from rudra.job import rules
from rudra.job.boundary import START, Boundary
from rudra.job.changes import MAY_CHANGE, JobChange, with_decided
from rudra.job.fields import JobFields
from rudra.job.jobfiles import Change, apply, parsed, read_job
from rudra.job.renamed import answers
from rudra.job.table import Table, explain, name_of
from rudra.job.tables import Hook


class Job(JobFields):
    """Complete description of a run, checked when it is made.

    A job cannot be changed. `with_` makes a changed copy, and `load` reads a job from a file. From Python each table is
    a dictionary: `Job(training={"epochs": 5}, cluster={"learners": 2})`. Omitted tables and keys have their defaults. A
    key that names a callable also accepts the callable itself. `docs/job-reference.md` lists every key with its allowed
    values, and `JobFields` describes each table.

    Raises:
        ConfigError: an unknown table or key, a wrong type, or keys that contradict each other.
    """

    def __init__(self, **tables: Any) -> None:
        if renamed := answers(tables):
            raise ConfigError("; ".join(renamed))
        try:
            super().__init__(**tables)
        except ValidationError as error:
            texts = (explain(e, type(self)) for e in error.errors())
            raise ConfigError(*dict.fromkeys(texts)) from None

    @model_validator(mode="after")
    def _follows_the_rules(self) -> Self:
        if self.topology.name == "auto":
            name = str(getattr(self.protocol_factory, "topology", "base"))
            object.__setattr__(self, "topology", self.topology.with_name(name))
        self.make_topology()
        rules.check(rules.JOB_RULES, self)
        first = None if self.cluster.learners is None else self._part(self.plan())
        if first is not None:
            rules.check(rules.PART_RULES, first)
        if first is not None and self.decides:
            rules.check(rules.CHANGE_RULES, first, first)
        for number, change in enumerate(self.changes, 1):
            try:
                later = self.after(number)
                if first is not None:
                    rules.check(rules.CHANGE_RULES, first, later._part(later.plan()))
            except (ConfigError, ValueError) as error:
                raise ValueError(f"{change.where}: {error}") from None
        return self

    def _part(self, plan: topologies.Plan, *, placed: bool = False) -> rules.JobPart:
        return rules.JobPart(self, plan, self.make_protocol(plan), placed)

    def at(self, epoch: int, update: int = 0) -> Job:
        """Returns the job of a part of a run, which has no changes itself.

        Args:
            epoch: number of complete epochs.
            update: number of updates. Changes that one of the two numbers has reached are applied, in their order.
        """
        return self.after(sum(1 for _ in takewhile(lambda c: c.boundary.is_reached(epoch, update), self.changes)))

    def after(self, number: int) -> Job:
        """Returns the job after a number of its changes. It has no changes itself."""
        if not self.changes:
            return self
        if number not in self._made_after:
            tables: Any = {table: _as_dict(getattr(self, table)) for table in MAY_CHANGE}
            for change in self.changes[:number]:
                tables = change.applied(tables)
            self._made_after[number] = self.with_(changes=(), **tables)
        return self._made_after[number]

    @cached_property
    def _made_after(self) -> dict[int, Job]:
        """Results of `after`, which roles and rules ask for at each boundary."""
        return {}

    @classmethod
    def load(cls, job: str | Path, overrides: Sequence[str] = ()) -> Job:
        """Reads a job file or a shipped job.

        Args:
            job: path of a TOML file, or a name that `shipped_jobs` lists.
            overrides: changes, each a text `table.key=value`, applied in this order. A value is read as TOML, or as a
                plain string if it is not TOML. Without a value (`table.key=`) the key gets its default.

        Returns:
            The job. Its default name is the name of the file.

        Raises:
            ConfigError: there is no such job, the file is not TOML, a key is unknown, or a value is not allowed.
        """
        path, tables = read_job(job)
        return cls.of(path, tables, [parsed(override) for override in overrides])

    @classmethod
    def of(cls, path: Path, tables: dict[str, Any], changes: Sequence[Change] = ()) -> Job:
        """Makes a job from the tables of a file.

        Args:
            path: path of the file, for the job's name and for errors.
            tables: table -> key -> value.
            changes: keys and their new values, applied in this order.

        Raises:
            ConfigError: as in `load`. The text names, for each mistake, the file or the wrong change.
        """
        final = copy.deepcopy(tables) if changes else tables
        for change in changes:
            if "." not in change.key and (
                places := [f"{table}.{change.key}" for table in _tables_with(cls, change.key)]
            ):
                raise ConfigError(f"{change.said}: must read table.key=value; did you mean {' or '.join(places)}?")
            apply(final, change)
        try:
            return cls(**{"name": path.stem, **final})
        except ConfigError:
            stages = [tables]
            for change in changes:
                stages.append(copy.deepcopy(stages[-1]))
                apply(stages[-1], change)
            raise ConfigError(_with_sources([_mistakes(cls, stage) for stage in stages], path, changes)) from None

    def with_(
        self,
        *,
        hooks: Sequence[Hook | Mapping[str, Any]] | None = None,
        changes: Sequence[JobChange | Mapping[str, Any]] | None = None,
        **tables: Mapping[str, Any],
    ) -> Job:
        """Returns a copy with other values, checked as a whole: `job.with_(training={"epochs": 3})`.

        Args:
            hooks: all hooks of the copy. None: the hooks of this job.
            changes: all changes of the copy. None: the changes of this job.
            tables: table -> key -> new value; keys that are not named keep their values.

        Raises:
            ConfigError: there is no such table or key, or the copy contradicts itself.
        """
        merged = {field: getattr(self, field) for field in type(self).model_fields}
        merged["hooks"] = self.hooks if hooks is None else hooks
        merged["changes"] = self.changes if changes is None else changes
        if renamed := answers(tables):
            raise ConfigError("; ".join(renamed))
        for table, keys in tables.items():
            if not isinstance(merged.get(table), Table):
                valid = ", ".join(name for name in merged if name != "name")
                raise ConfigError(f"unknown table '{table}'; valid: {valid}")
            merged[table] = {**_as_dict(merged[table]), **keys}
        return type(self)(**{k: _as_dict(v) if isinstance(v, Table) else v for k, v in merged.items()})

    def without_decisions(self) -> Job:
        """Returns the job without a function that decides changes."""
        return self.with_(decisions={"call": None, "options": {}, "at": "epoch"})

    def without_growth(self) -> Job:
        """Returns the job whose banks begin in the same way, and do not grow by themselves. λ must be known."""
        m = self.cluster.bank_size
        if m is None or not self.cluster.grows:
            return self
        active: int | tuple[int, ...] = self.cluster.active_learners or self.learners // m
        fixed = {"learners_per_device": m, "most_learners_per_device": None, "growth": "double"}
        return self.with_(cluster={**fixed, "active_learners": active})

    @property
    def evaluations_decide(self) -> bool:
        """Whether evaluations decide when the training ends, or how it continues."""
        return bool(self.training.target or self.training.patience or self.optimizer.plateau or self.decisions.call)

    def without_tests(self) -> Job:
        """Returns the job without evaluations and the features that need them, for measurements of time."""
        return self.without_decisions().with_(
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
        """Returns a copy with values for `cluster.learners` and `cluster.threads_per_rank`, which the launch decides.

        Args:
            learners: λ. None: as in the job, else 4, or the next multiple of the size of a bank.
            threads_per_rank: number of torch threads of each learner. None: as in the job, else `cores` divided by the
                number of ranks that compute gradients, at least 1, or as `threads_of` divides them.
            cores: number of processor cores that the learners share.

        Raises:
            ConfigError: the job does not allow this number of learners.
        """
        bank = self.cluster.bank_size or 1
        learners = learners or self.cluster.learners or -(-4 // bank) * bank
        at_once = -(-learners // self.cluster.on_rank(learners))
        given = threads_per_rank or self.cluster.threads_per_rank
        threads = given or max(1, cores // at_once)
        settled = (learners, threads) == (self.cluster.learners, self.cluster.threads_per_rank)
        job = self if settled else self.with_(cluster={"learners": learners, "threads_per_rank": threads})
        if given or not job.cluster.accelerated:
            return job
        plan = job.make_topology().plan(learners)
        return job.with_(cluster={"threads_per_rank": job.threads_of(plan, plan.ranks_with_learners, cores)})

    def plan(self, nodes: Sequence[int] | None = None) -> topologies.Plan:
        """Returns the roles of the job and their connections. The number of learners must be known.

        Args:
            nodes: node of every learner, λ numbers in ascending order. None: all learners are on one node. With nodes,
                the protocol, hooks and simulated faults are also checked against the plan.

        Raises:
            ConfigError: the number of learners is not known, or protocol, hooks or faults do not fit the plan.
            ValueError: options of the topology do not fit these learners.
        """
        plan = self.active(self.make_topology().plan(self.learners, nodes))
        if nodes is not None:
            self.check(plan)
            try:
                rules.check(rules.SIMULATED_RULES, self, plan)
            except ValueError as error:
                raise ConfigError(str(error)) from None
        return plan

    def check(self, plan: topologies.Plan) -> None:
        """Checks the job's protocol and hooks against a plan.

        Args:
            plan: roles of the job, from `plan` or from real ranks.

        Raises:
            ConfigError: the protocol cannot work on the plan, or a hook names a role that is not in it.
        """
        try:
            rules.check(rules.PART_RULES, self._part(self.active(plan), placed=True))
            for _, later, its_plan in self._later_parts(plan):
                rules.check(rules.PART_RULES, later._part(its_plan, placed=True))
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def check_samples(self, training_samples: int) -> None:
        """Checks that the training set has enough samples for a mini-batch, at any epoch.

        Workers of Hogbatch get at most the samples that are left in the epoch, so their batches are never too large.

        Args:
            training_samples: size of the training set.

        Raises:
            ConfigError: a mini-batch has more samples than the training set.
        """
        if self.scheduled:
            return
        for number in range(len(self.changes) + 1):
            size = self.after(number).training.minibatch_size
            if size > training_samples:
                raise ConfigError(
                    f"[training] minibatch_size = {size} (μ) exceeds the training set; use 1 to {training_samples:,}"
                )

    def parts(self, plan: topologies.Plan) -> Iterator[tuple[Boundary, Job, topologies.Plan]]:
        """Yields the parts of a run, between its `changes`: boundary at its beginning, job, and plan.

        Args:
            plan: plan of the first part. Roles of later plans are on the same ranks and nodes.

        Raises:
            ValueError: options of the topology do not fit, or change the roles.
        """
        whole = [(START, self.after(0), self.active(plan)), *self._later_parts(plan)]
        most = max(its_plan.max_gradients_per_message for _, _, its_plan in whole)  # which buffers have room for
        for start, part, its_plan in whole:
            yield start, part, replace(its_plan, max_gradients_per_message=most)

    def _later_parts(self, plan: topologies.Plan) -> Iterator[tuple[Boundary, Job, topologies.Plan]]:
        plan = plan.whole
        nodes = [plan.roles[i].node for i in plan.learners]
        for number, change in enumerate(self.changes, 1):
            later = self.after(number)
            drawn = later.make_topology().plan(len(plan.learners), nodes)
            if len(plan.owners) < len(drawn.owners):  # a replay repeats the parts of weights at one server
                drawn, _ = drawn.unparted()
            drawn = replace(drawn, window=plan.window)
            rules.check([rules.other_roles], plan, drawn)
            places = zip(drawn.roles, plan.roles, strict=True)
            roles = (replace(role, world_rank=there.world_rank, node=there.node) for role, there in places)
            yield change.boundary, later, later.active(replace(drawn, roles=tuple(roles)))

    def with_decided(self, decided: Iterable[tuple[str, int] | tuple[str, int, bool]]) -> Job:
        """Returns the job with changes that were decided during a run, as if they had been planned.

        Args:
            decided: JSON of each change, the number of changes before it, and whether replicas restart.

        Raises:
            ConfigError: a change does not fit the job.
        """
        return self.with_(changes=with_decided(self.changes, decided))

    def to_json(self) -> str:
        """Returns the job as one line of JSON without the table `[study]`. A callable appears as `module:name`."""
        return json.dumps(self.model_dump(exclude={"study"}), default=name_of, sort_keys=True)


def _tables_with(job: type[Job], key: str) -> list[str]:
    """Returns the names of the tables that have a key."""
    kinds = {name: field.annotation for name, field in job.model_fields.items()}
    return [name for name, kind in kinds.items() if isinstance(kind, type) and key in getattr(kind, "model_fields", ())]


def _mistakes(job: type[Job], tables: Mapping[str, Any]) -> tuple[str, ...]:
    try:
        job(**{"name": "job", **tables})
    except ConfigError as error:
        return error.args
    return ()


def _with_sources(stages: Sequence[tuple[str, ...]], path: Path, changes: Sequence[Change]) -> str:
    """Returns the mistakes of the last stage, each after the file or the change that brought it.

    Args:
        stages: mistakes in the file's tables, and after each change.
        path: path of the file.
        changes: the changes, one fewer than stages.
    """
    valid = max((i for i, mistakes in enumerate(stages) if not mistakes), default=-1)  # a mistake cannot be older
    found: dict[int, list[str]] = {}
    for mistake in stages[-1]:
        without = max((i for i, mistakes in enumerate(stages) if mistake not in mistakes), default=-1)
        # With a single mistake, a later change may have altered its words.
        found.setdefault(without + 1 if len(stages[-1]) > 1 else valid + 1, []).append(mistake)
    sources = [str(path), *(change.said for change in changes)]
    return "; ".join(f"{sources[stage]}: {'; '.join(mistakes)}" for stage, mistakes in sorted(found.items()))


def _as_dict(table: Table) -> dict[str, Any]:
    values = ((key, getattr(table, key)) for key in sorted(table.model_fields_set))
    return {key: _as_dict(value) if isinstance(value, Table) else value for key, value in values}
