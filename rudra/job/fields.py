"""The tables of a job, with the protocol and the topology that they make."""

from collections.abc import Collection
from typing import Any, Literal

from pydantic import Field

import protocols
import topologies
from rudra import plugins
from rudra.errors import ConfigError
from rudra.job.changes import JobChange
from rudra.job.simulation import SimulationTable
from rudra.job.table import Table
from rudra.job.tables.averaging import AveragingTable
from rudra.job.tables.cluster import ClusterTable, FaultToleranceTable, PlacementTable, TopologyTable
from rudra.job.tables.decisions import DecisionsTable
from rudra.job.tables.hogbatch import HogbatchTable
from rudra.job.tables.optimizer import OptimizerTable
from rudra.job.tables.protocol import ArgumentsTable, ProtocolTable
from rudra.job.tables.results import Hook, ResultsTable, StudyTable
from rudra.job.tables.training import AugmentTable, DataTable, ModelTable, TaskTable, TrainingTable


class JobFields(Table):
    """Tables of a job.

    Attributes:
        name: Name of the job, which is also the default name of its result files.
        model: Table `[model]`: the network.
        data: Table `[data]`: the training and test sets.
        augment: Table `[augment]`: random changes of the training inputs.
        task: Table `[task]`: the loss and the metrics of evaluations.
        training: Table `[training]`: epochs, mini-batch size, seed, evaluation, target.
        optimizer: Table `[optimizer]`: the update rule and the learning rate.
        protocol: Table `[protocol]`: number of gradients per update, and modulation of the learning rate.
        hogbatch: Table `[hogbatch]`: assignment of samples to heterogeneous workers, which update the weights.
        averaging: Table `[averaging]`: averaging of the learners' replicas.
        placement: Table `[placement]`: layers that a stage server holds.
        topology: Table `[topology]`: roles, and which of them exchange gradients and weights.
        cluster: Table `[cluster]`: learners, threads and devices.
        simulation: Table `[simulation]`: durations in virtual time.
        fault_tolerance: Table `[fault_tolerance]`: reaction to ranks that die or wait.
        results: Table `[results]`: contents of the result file, and checkpoints.
        hooks: Tables `[[hooks]]`: user code that roles call.
        changes: Tables `[[changes]]`: keys that get other values after an epoch, or at an update.
        decisions: Table `[decisions]`: user code that decides such changes during the run.
        study: Table `[study]`: variants of the job that `rudra sweep` runs.
    """

    name: str = Field("job", description="name of the job and of its result files. Default: the name of the job file")
    model: ModelTable = ModelTable()
    data: DataTable = DataTable()
    augment: AugmentTable = AugmentTable()
    task: TaskTable = TaskTable()
    training: TrainingTable = TrainingTable()
    optimizer: OptimizerTable = OptimizerTable()
    protocol: ProtocolTable = ProtocolTable()
    hogbatch: HogbatchTable = HogbatchTable()
    averaging: AveragingTable = AveragingTable()
    placement: PlacementTable = PlacementTable()
    topology: TopologyTable = TopologyTable()
    cluster: ClusterTable = ClusterTable()
    simulation: SimulationTable = SimulationTable()
    fault_tolerance: FaultToleranceTable = FaultToleranceTable()
    results: ResultsTable = ResultsTable()
    hooks: tuple[Hook, ...] = ()
    changes: tuple[JobChange, ...] = ()
    decisions: DecisionsTable = DecisionsTable()
    study: StudyTable = StudyTable()

    @property
    def learners(self) -> int:
        """λ, the number of learners.

        Raises:
            ConfigError: the job does not set it, and is not `resolved` yet.
        """
        if self.cluster.learners is None:
            raise ConfigError("[cluster] learners is not known yet; set it, or call job.resolved(learners=N) first")
        return self.cluster.learners

    @property
    def changing(self) -> str:
        """Table that changes keys during the run. Empty: none does."""
        if self.changes or self.decisions.given:
            return "[[changes]]" if self.changes else "[decisions]"
        return f"[cluster] {self.cluster.bank_key}" if self.cluster.grows else ""

    @property
    def decides(self) -> bool:
        """Whether changes may be decided during the run, by the user's function or for the growth of banks."""
        return self.decisions.given or self.cluster.grows

    @property
    def decided_at(self) -> Literal["epoch", "update"]:
        """When decided changes take effect, as in `[decisions] at`."""
        return "update" if self.cluster.grows else self.decisions.at

    @property
    def protocol_factory(self) -> Any:
        """Class, or another callable, that makes the job's protocol.

        Raises:
            ConfigError: there is no such protocol.
        """
        return plugins.choose("[protocol] name", self.protocol.name, protocols.shipped())

    @property
    def protocol_table(self) -> ArgumentsTable | None:
        """Table whose keys belong to the job's protocol. None: the protocol has no table."""
        found: ArgumentsTable | None = getattr(self, getattr(self.protocol_factory, "table", ""), None)
        return found

    @property
    def scheduled(self) -> bool:
        """Whether a coordinator assigns the samples, in mini-batches of any size."""
        return bool(getattr(self.protocol_factory, "schedules", False))

    def make_topology(self) -> topologies.Topology:
        """Makes the job's topology with its options.

        Raises:
            ConfigError: there is no such topology.
            ValueError: the topology does not take these options.
        """
        topology = plugins.choose("[topology] name", self.topology.name, {"auto": "", **topologies.shipped()})
        per_rank, staged = self.cluster.per_rank, self.placement.servers if self.placement.given else 0
        scheduled = self.scheduled
        how = {"scheduled": scheduled, "window": scheduled and self.hogbatch.shares_weights}
        how |= {"one_rank": self.cluster.one_rank is True, "library": self.cluster.nccl}
        return topologies.load(topology, self.topology.options, per_rank, staged=staged, **how)

    def active(self, plan: topologies.Plan) -> topologies.Plan:
        """Returns a plan in which the job's active learners take part. The others are dormant.

        A bank that grows begins with one learner.
        """
        active = self.cluster.active_learners
        if active is None and self.cluster.grows:
            active = len(plan.whole.ranks_with_learners)
        return plan.with_active(active, evenly=self.cluster.bank_size is not None)

    def learners_on_cpu(self, plan: topologies.Plan) -> frozenset[int]:
        """Returns the ids of the learners that compute on the CPU although others may use GPUs, dormant ones too."""
        plan, wanted = plan.whole, self.cluster.cpu_learners
        if isinstance(wanted, int) and wanted:
            on_nodes: dict[int, list[int]] = {}
            for learner in plan.learners:
                on_nodes.setdefault(plan.roles[learner].node, []).append(learner)
            return frozenset(learner for its in on_nodes.values() for learner in its[-wanted:])
        numbers = {*(wanted or self.hogbatch.on_cpu(plan.learner_numbers))}
        return frozenset(learner for learner in plan.learners if plan.roles[learner].index in numbers)

    def cpu_learners_text(self, plan: topologies.Plan) -> str:
        """Returns the numbers of the learners that compute on the CPU while others use GPUs. Empty: there are none."""
        found = self.learners_on_cpu(plan) if self.cluster.accelerated else ()
        return ", ".join(str(plan.roles[learner].index) for learner in sorted(found))

    def cpu_learners_unused(self) -> str:
        """Returns a line about `cpu_learners` if the key has no effect, because no learner uses a GPU. Else nothing."""
        wanted = self.cluster.cpu_learners
        if not wanted or self.cluster.device != "cpu":
            return ""
        value = list(wanted) if isinstance(wanted, tuple) else wanted
        return f"[cluster] cpu_learners = {value} has no effect with device = 'cpu'; use device = 'cuda', or remove it"

    def threads_of(self, plan: topologies.Plan, computing: Collection[int], cores: int) -> int:
        """Returns the number of torch threads of a rank, if the job does not set it.

        If some learners compute on the CPU and others on GPUs, each of the others takes one core.

        Args:
            plan: Role assignment.
            computing: Ranks of a node that compute gradients.
            cores: Number of cores that they share.
        """
        on_cpu = {plan.roles[role].world_rank for role in self.learners_on_cpu(plan) if self.cluster.accelerated}
        here = len(on_cpu.intersection(computing)) or len(computing)
        return max(1, (cores - len(computing) + here) // max(1, here))

    def make_correction(self) -> protocols.Correction:
        """Makes the job's correction of gradients, without a state.

        Raises:
            ConfigError: there is no such correction.
            ValueError: the correction does not take its options.
        """
        table = self.protocol
        factory = plugins.choose("[protocol] correction", table.correction, protocols.corrections())
        return protocols.make_correction(factory, table.correction_options)

    def make_protocol(self, plan: topologies.Plan | None = None, lost: int = 0) -> protocols.Protocol:
        """Makes the job's protocol for its workers: the learners, or the compute groups if the plan has any.

        Args:
            plan: roles of the job. None: `plan()`.
            lost: number of workers that have died. n is then at most the number of remaining workers.

        Raises:
            ConfigError: there is no such protocol.
            ValueError: an option, n or the modulation does not fit the protocol.
        """
        plan = self.active(self.make_topology().plan(self.learners)) if plan is None else plan
        table, factory, own = self.protocol, self.protocol_factory, self.protocol_table
        left = plan.workers - lost
        arguments = {} if own is None else own.arguments(plan)
        for key in table.options.keys() & arguments.keys():
            raise ValueError(f"[protocol] options.{key} is not supported; use the keys of [{factory.table}]")
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
            options={**table.options, **arguments},
        )

    def gradients_per_update(self, plan: topologies.Plan) -> int:
        """Returns the number of learners' gradients per update. The average of a group counts once for each member.

        Args:
            plan: roles of the job.
        """
        return self.make_protocol(plan).gradients_per_update * len(plan.learners) // plan.workers

    def explicit_momentum(self, plan: topologies.Plan | None = None) -> float:
        """Returns the momentum that the optimiser uses: `optimizer.momentum` minus the `momentum_correction`.

        Asynchrony of g workers that update independently acts like momentum 1 - 1/g. This is theorem 1 of Omnivore,
        for exponential step times and no explicit momentum. Here g is the effective number ⟨σ⟩ + 1. Under 1-softsync g
        is nearly 2, although all workers together make an update. The sum of the two momenta is a rule of thumb.

        Args:
            plan: roles of the job. None: `plan()`.

        Returns:
            The explicit momentum, at least 0. Without a correction it equals `optimizer.momentum`.
        """
        if self.optimizer.momentum_correction == "none":
            return self.optimizer.momentum
        asynchrony = 1 + self.make_protocol(plan).expected_staleness
        return max(0.0, self.optimizer.momentum - (1 - 1 / asynchrony))
