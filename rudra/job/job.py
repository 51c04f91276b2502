"""The job: one immutable, validated description of a run.

A job comes from a TOML file, from the name of a shipped job, or from code. Its tables are those of `rudra.job.tables`;
rules that span them stand together in `Job._check_across_tables`.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from pydantic import Field, ValidationError, model_validator

import protocols
import topologies
from rudra import plugins
from rudra.errors import ConfigError
from rudra.job.changes import MAY_CHANGE, JobChange
from rudra.job.jobfiles import Change, apply, parsed, read_job
from rudra.job.simulation import PER_BYTE, SimulationTable
from rudra.job.table import Named, Table, explain
from rudra.job.tables import (
    AugmentTable,
    AveragingTable,
    ClusterTable,
    DataTable,
    FaultToleranceTable,
    Hook,
    ModelTable,
    OptimizerTable,
    PlacementTable,
    ProtocolTable,
    ResultsTable,
    StudyTable,
    TaskTable,
    TopologyTable,
    TrainingTable,
    WeightsTable,
    WorkersTable,
)
from topologies.plan import TREE_SERVER


class Job(Table):
    """The complete description of a run, checked when it is made.

    A job cannot be changed; `with_` makes a changed copy. `load` reads a job from a file; from Python each table is a
    dictionary: `Job(training={"epochs": 5}, cluster={"learners": 2})`. Tables and keys that are left out have their
    defaults. A key that names a callable takes the callable itself, too. `docs/job-reference.md` lists every key, with
    what is allowed.

    Attributes:
        name: name of the job, by which result files are called.
        model: table `[model]`: the network.
        data: table `[data]`: the training and test sets.
        augment: table `[augment]`: random changes of the training inputs.
        task: table `[task]`: the loss, and what tests measure.
        training: table `[training]`: epochs, mini-batch size, seed, tests, target.
        optimizer: table `[optimizer]`: the update rule and the learning rate.
        protocol: table `[protocol]`: how many gradients make an update, and the modulation of the learning rate.
        weights: table `[weights]`: where the weights are, and how workers update them.
        averaging: table `[averaging]`: how learners average replicas of their own.
        placement: table `[placement]`: which layers a stage server has.
        topology: table `[topology]`: which roles exchange gradients and weights.
        cluster: table `[cluster]`: learners, threads and devices.
        simulation: table `[simulation]`: what takes how long in virtual time.
        fault_tolerance: table `[fault_tolerance]`: what a run does about ranks that die or wait.
        results: table `[results]`: what the result file records.
        workers: tables `[[workers]]`: what batches the learners take to which a coordinator deals samples out.
        hooks: tables `[[hooks]]`: code of the user that roles call.
        changes: tables `[[changes]]`: what has other values after an epoch.
        study: table `[study]`: what `rudra sweep` makes of the job.

    Raises:
        ConfigError: an unknown table or key, a wrong type, or keys that contradict each other.
    """

    name: str = Field("job", description="what result files are called; default: the name of the job file")
    model: ModelTable = ModelTable()
    data: DataTable = DataTable()
    augment: AugmentTable = AugmentTable()
    task: TaskTable = TaskTable()
    training: TrainingTable = TrainingTable()
    optimizer: OptimizerTable = OptimizerTable()
    protocol: ProtocolTable = ProtocolTable()
    weights: WeightsTable = WeightsTable()
    averaging: AveragingTable = AveragingTable()
    placement: PlacementTable = PlacementTable()
    topology: TopologyTable = TopologyTable()
    cluster: ClusterTable = ClusterTable()
    simulation: SimulationTable = SimulationTable()
    fault_tolerance: FaultToleranceTable = FaultToleranceTable()
    results: ResultsTable = ResultsTable()
    workers: tuple[WorkersTable, ...] = ()
    hooks: tuple[Hook, ...] = ()
    changes: tuple[JobChange, ...] = ()
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
                    _check_same_roles(first.plan(), after.plan())
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
            self._check_pair(plan)
            self._check_hooks(plan, placed=True)
            for change in self.changes:
                self.at(change.at_epoch)._check_pair(self.plan_after(change.at_epoch, plan))
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
        _check_same_roles(plan, drawn)
        places = zip(drawn.roles, plan.roles, strict=True)
        roles = (replace(role, world_rank=there.world_rank, node=there.node) for role, there in places)
        return replace(drawn, roles=tuple(roles))

    def _check_pair(self, plan: topologies.Plan) -> None:
        protocol = self.make_protocol(plan)
        _check_pair(protocol, plan, self.topology.name)
        if self.placement.given:
            self._check_placement(plan, protocol)
        if plan.averaging:
            self._check_averaging(plan)
        if plan.scheduled:
            self._check_scheduled(plan)
        elif self.training.evaluate == "workers":
            raise ValueError(
                "[training] evaluate = 'workers': a coordinator deals the test out; valid: with protocol hogbatch"
            )
        if self.weights.at == "window":
            self._check_window(plan, protocol)
        if self.cluster.gpu_aware_mpi and (plan.groups or self.cluster.gradient_format == "float16"):
            what = "compute groups add gradients" if plan.groups else "gradient_format float16 converts them"
            raise ValueError(f"[cluster] gpu_aware_mpi: {what} in main memory; valid there: false")
        if plan.sharded:
            self._check_parts()
        hosted = {(plan.roles[i].world_rank, plan.roles[i].group) for i in plan.learners}
        if plan.reduction == "mpi" and len({rank for rank, _ in hosted}) < len(hosted):
            raise ValueError(
                f"[topology] name: {self.topology.name} puts learners of several groups on a rank, whose gradients "
                "the MPI library cannot add; valid there: reduction = 'ordered' or 'nodes'"
            )
        if self.cluster.shares:
            self._check_shares(plan, protocol)
        if self.fault_tolerance.straggler_timeout_s is not None and self.cluster.learners_per_rank > 1:
            raise ValueError(
                "[fault_tolerance] straggler_timeout_s: learners that share a rank wait for each other, so none can be "
                "dropped alone; valid with cluster.learners_per_rank = 1"
            )
        if self.fault_tolerance.straggler_timeout_s is not None and (plan.groups or not protocol.ordered):
            raise ValueError(
                "[fault_tolerance] straggler_timeout_s: only a server that waits for each of its learners can drop one;"
                " valid with protocol hardsync and topology base or adv"
            )

    def _check_averaging(self, plan: topologies.Plan) -> None:
        """Raises ValueError for what has no sense where learners average replicas."""
        if plan.served and self.optimizer.plateau is not None:
            raise ValueError(
                "[optimizer] schedule = 'plateau': learners that exchange with a server alone do not hear of tests; "
                "valid there: other schedules"
            )
        if plan.served and self.cluster.gradient_format != "float32":
            raise ValueError("[cluster] gradient_format = 'float16' is for gradients, not replicas; valid: float32")
        if self.changes:
            raise ValueError("[[changes]]: replicas that are averaged cannot begin anew; valid: no changes")
        if self.simulation.batching == "big-batch":
            raise ValueError(
                "[simulation] batching = 'big-batch' is for learners that share one vector of weights, which replicas "
                "do not; valid: none, vmap"
            )

    def _check_scheduled(self, plan: topologies.Plan) -> None:
        """Raises ValueError for what cannot be where a coordinator deals the samples out."""
        on, batching = "[protocol] name: hogbatch", self.simulation.batching
        plain = all(plan.roles[i].parent == plan.server for i in plan.learners) and not plan.groups
        if not plan.served or not plain or plan.overlapped or plan.averaging or plan.parted:
            raise ValueError(f"{on}: not with topology {named(self.topology.name)} so far; valid: base")
        refused = {
            "[[changes]]: a coordinator cannot begin anew; valid: no changes": self.changes,
            "[cluster] shares: the coordinator says what each learner takes; valid: none": self.cluster.shares,
            f"[simulation] batching = '{batching}': batches of different sizes cannot be computed together; "
            "valid: none": batching != "none",
        }
        _refuse(refused, on)

    def _check_window(self, plan: topologies.Plan, protocol: protocols.Protocol) -> None:
        """Raises ValueError for what cannot be where workers update the weights themselves."""
        on, optimizer, kept = "[weights] at = 'window'", self.optimizer, self.results.kept_interval
        nodes = len({plan.roles[i].node for i in plan.learners})
        state = optimizer.name != "sgd" or optimizer.momentum or optimizer.options.get("nesterov")
        refused = {
            "only workers of protocol hogbatch update the weights themselves; valid: server": not plan.scheduled,
            f"[weights] update = 'locked': updates on {nodes} nodes have no order; valid: racing, or one node": (
                nodes > 1 and self.weights.update == "locked"
            ),
            "[optimizer] workers keep no state, so they step by plain SGD; valid: name sgd, momentum 0": state,
            "[optimizer] weight_decay, clip_norm, groups and options are not for a window so far; valid: none": (
                optimizer.weight_decay or optimizer.clip_norm is not None or optimizer.groups or optimizer.options
            ),
            f"[protocol] modulation = '{protocol.modulation.name}': workers do not know how stale their gradients will "
            "be; valid: none": protocol.modulation.name != "none",
            "[cluster] device = 'cuda': small workers of a racing window compute where the weights are; "
            'valid: device = "cpu" in their [[workers]]': (
                self.cluster.device == "cuda"
                and self.weights.update == "racing"
                and any(table.kind == "small" and table.device != "cpu" for table in self.workers)
            ),
            "[cluster] gradient_format = 'float16': no gradient travels; valid: float32": (
                self.cluster.gradient_format != "float32"
            ),
            "[hooks] at = 'update': no role sees the weights of an update; valid: epoch, end": any(
                hook.at == "update" for hook in self.hooks
            ),
            "[results] keep_checkpoints: they are made at epochs' ends; valid: epochs": (
                kept is not None and kept[1] == "update"
            ),
        }
        _refuse(refused, on)

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

    def _check_placement(self, plan: topologies.Plan, protocol: protocols.Protocol) -> None:
        """Raises ValueError for what cannot be where layers are placed."""
        on, table, optimizer = "[placement] cut", self.placement, self.optimizer
        if plan.averaging or plan.scheduled:
            raise ValueError(
                f"{on}: learners with replicas of their own, and workers, have all layers; valid: topologies base, "
                "sharded, adv, adv*, groups, and protocols that push gradients"
            )
        together = protocol.ordered and protocol.waits and protocol.gradients_per_update == plan.workers
        if table.rule == "synchronous" and not together:
            raise ValueError(
                "[placement] rule = 'synchronous': its updates take one gradient of each learner, in learner order; "
                "valid: protocol hardsync, or rule merged"
            )
        if table.momentum is not None and optimizer.name not in ("sgd", "rmsprop"):
            raise ValueError(f"[placement] momentum: {optimizer.name} has none; valid: sgd and rmsprop")
        merged = table.rule == "merged"
        if table.servers > len(plan.learners):
            raise ValueError(
                f"[placement] servers = {table.servers}: each has learners of its own, of whom there are "
                f"{len(plan.learners)}; valid: 1 to {len(plan.learners)}"
            )
        several = f"[placement] servers = {table.servers}"
        refused = {
            f"{several}: with rule merged each mini-batch is an update of its own, for which all servers would have to "
            "wait; valid: 1, or rule synchronous": merged and table.servers > 1,
            f"{several}: the gradients of a compute group are averaged at one stage server; valid: 1": (
                bool(plan.groups) and table.servers > 1
            ),
            f"{several}: where a server of a tree dies all begin anew, which several stage servers cannot; valid: 1": (
                any(role.about.relays for role in plan.roles) and table.servers > 1
            ),
            f"{on}: [optimizer] clip_norm: learners that update weights of their own do not know the norm of the last "
            "layers; valid: none, or a topology with a parameter server": (
                not merged and not plan.served and optimizer.clip_norm
            ),
            f"{on}: [[changes]]: a stage server cannot begin anew with another job so far; valid: none": self.changes,
            "[placement] rule = 'merged': [optimizer] schedule = 'plateau' goes by tests, of which the stage server "
            "does not hear; valid: other schedules": merged and optimizer.plateau,
            f"{on}: [cluster] gradient_format = 'float16' is for gradients alone; valid: float32": (
                self.cluster.gradient_format != "float32"
            ),
            f"{on}: [cluster] device = '{self.cluster.device}': placed layers compute on CPUs so far; valid: cpu": (
                self.cluster.device != "cpu"
            ),
            f"{on}: [cluster] shares = 'auto' measures learners that compute all layers; valid: a list": (
                self.cluster.shares == "auto"
            ),
            f"{on}: [training] compile = true compiles whole models; valid: false": self.training.compile,
            f"{on}: [training] precision = '{self.training.precision}': valid so far: float32": (
                self.training.precision != "float32"
            ),
            f"{on}: [simulation] batching computes whole models; valid: none": self.simulation.batching != "none",
            f"{on}: [fault_tolerance] straggler_timeout_s: a learner may wait for the stage server; valid: none": (
                self.fault_tolerance.straggler_timeout_s
            ),
        }
        _refuse(refused)

    def _check_parts(self) -> None:
        """Raises ValueError for what needs all of a gradient, or of the weights, in one place."""
        on = "[topology] name: sharded"
        if self.optimizer.clip_norm is not None:
            raise ValueError(
                f"{on}: [optimizer] clip_norm goes by the norm of the whole gradient, of which each server has a part; "
                "valid: no clip_norm, or topology base"
            )
        if self.cluster.gradient_format != "float32":
            raise ValueError(
                f"{on}: [cluster] gradient_format = 'float16' scales a gradient as a whole, but it travels in parts; "
                "valid: float32"
            )
        if self.cluster.gpu_aware_mpi:
            raise ValueError(f"{on}: [cluster] gpu_aware_mpi sends vectors as a whole, not in parts; valid: false")
        if self.simulation.batching == "big-batch":
            raise ValueError(
                f"{on}: [simulation] batching = 'big-batch' is for learners that share one vector of weights, which "
                "parts are not; valid: none, vmap"
            )

    def _check_shares(self, plan: topologies.Plan, protocol: protocols.Protocol) -> None:
        shares, learners = self.cluster.parts, plan.learner_numbers
        if len(shares) != learners:
            raise ValueError(f"[cluster] shares: {len(shares)} numbers for {learners} learners; valid: one for each")
        if not all(0 < share < math.inf for share in shares):
            raise ValueError(f"[cluster] shares: {list(shares)}; valid: numbers > 0")
        if not plan.groups and not protocol.waits:
            raise ValueError(
                "[cluster] shares: only learners whose gradients are of the same weights can share a batch; valid with "
                "protocol hardsync or topology groups"
            )
        if self.simulation.batching != "none":
            raise ValueError(
                "[cluster] shares: parts of different sizes cannot be computed together; valid: batching = 'none'"
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
            raise ValueError(f"[averaging] is for {_averaging()}; valid with protocol {named(table.name)}: no keys")
        options = table.options | self.averaging.given
        schedules = _is_a(factory, protocols.Hogbatch)
        if not schedules and (key := next(iter([*table.of_hogbatch, *(["[[workers]]"] if self.workers else [])]), "")):
            where = key if key.startswith("[") else f"[protocol] {key}"
            raise ValueError(f"{where} is for hogbatch; valid with protocol {named(table.name)}: none")
        if schedules:
            for key in table.options.keys() & {"rule", "lr_scaling", "workers"}:
                own = "[[workers]] is a list of tables" if key == "workers" else f"{key} is a key of [protocol] itself"
                raise ValueError(f"[protocol] options.{key} is not possible; {own}")
            options |= table.of_hogbatch | {"workers": [table.worker for table in self.team(plan.learner_numbers)]}
        if averages:
            options["served"] = plan.averaging and plan.served
            if plan.sharing == "reference":
                options["blocks"] = [*map(len, plan.groups)]
        return protocols.make(
            factory,
            learners=left,
            minibatch_size=self.training.minibatch_size * len(plan.learners) / plan.workers,
            n=min(table.n, left) if table.n and (lost or plan.gone) else table.n,
            modulation=table.modulation,
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
        return json.dumps(self.model_dump(exclude={"study"}), default=_name_of, sort_keys=True)


def _is_a(factory: Any, rule: type[protocols.Protocol]) -> bool:
    """Whether a protocol, not yet made, is of a kind."""
    return isinstance(factory, type) and issubclass(factory, rule)


def _refuse(wanted: Mapping[str, Any], on: str = "") -> None:
    """Raises ValueError with the first text whose thing is wanted, and what it does not go with."""
    for text in (text for text, value in wanted.items() if value):
        raise ValueError(f"{on}: {text}" if on else text)


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


def averaging_pairs() -> list[protocols.Pair]:
    """On which topologies learners average replicas, and by which of the shipped protocols."""
    rules = protocols.shipped().items()
    return protocols.pairs({name: rule for name, rule in rules if issubclass(rule, protocols.Averaging)})


def _averaging(on: str = "replicas") -> str:
    """Names of the shipped protocols by which learners average replicas on a topology."""
    return ", ".join(pair.protocol for pair in averaging_pairs() if pair.shape == on)


def _check_pair(protocol: protocols.Protocol, plan: topologies.Plan, topology: Named) -> None:
    """Raises ValueError where a protocol cannot work on a topology."""
    name, on = type(protocol).__name__.lower(), f"[topology] name: {topology}"
    if plan.averaging != isinstance(protocol, protocols.Averaging):
        if plan.averaging:
            raise ValueError(f"{on}: learners average replicas there; valid protocols: {_averaging()}")
        shapes = ", ".join(dict.fromkeys(pair.shape for pair in averaging_pairs() if not pair.shape.partition(",")[2]))
        raise ValueError(f"{on}: protocol {name} averages replicas of the learners; valid: {shapes}")
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
    if not plan.served and not plan.averaging and protocol.gradients_per_update > 1:
        raise ValueError(
            f"{on}: one compute group alone updates by each of its averages, but protocol {name} wants "
            f"{protocol.gradients_per_update} for an update; valid: more groups, or a protocol that takes one"
        )
    if any(role.about.relays for role in plan.roles):
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


def _check_same_roles(before: topologies.Plan, after: topologies.Plan) -> None:
    """Raises ValueError where a run could not go on by another plan with the ranks that it has."""
    who = [[(role.kind, role.index, plan.about(i)) for i, role in enumerate(plan.roles)] for plan in (before, after)]
    if who[0] != who[1]:
        raise ValueError("[topology] options: roles must be those of before; valid: options that keep them")
    if after.reduction == "mpi":
        raise ValueError("[topology] options.reduction = 'mpi' cannot begin anew; valid: 'ordered', 'nodes'")


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
