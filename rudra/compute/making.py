"""Creation of a process's executors, which share one model, and checks that the job can be computed."""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

import torch

from rudra.compute import models, tasks
from rudra.compute.averaging_executor import AveragingExecutor
from rudra.compute.correcting import corrector_of
from rudra.compute.device.devices import kind_of
from rudra.compute.device.kind import CPU
from rudra.compute.device.placement import Placing
from rudra.compute.executor import Executor
from rudra.compute.first_gradient import portion_of
from rudra.compute.flat import FlatModel, Gradients
from rudra.compute.gradients import GradientSource
from rudra.compute.hogwild import HogwildExecutor, HogwildServerExecutor, threads_of
from rudra.compute.learners import TRAIN, Examined, LearnerExecutor, ReplicaExecutor, StatisticsExecutor
from rudra.compute.memory_plan import ResidentSets, resident_sets
from rudra.compute.norms import meter_of_learner, meter_of_owner
from rudra.compute.optim import UpdateRule
from rudra.compute.owners import FirstWeights, OwnerExecutor, ServerExecutor
from rudra.compute.parts import cut
from rudra.compute.pulled_pass import PullingExecutor
from rudra.compute.replicas import AveragerExecutor, CentralExecutor, ElasticExecutor, ReferrerExecutor, outer_rule
from rudra.compute.speculation import RateAfter, SpeculativeSteps
from rudra.compute.stages import (
    FirstStageExecutor,
    FirstStageReplicaExecutor,
    FirstStageServerExecutor,
    LastStageExecutor,
    ModelCut,
    PieceExecutor,
    cut_model,
)
from rudra.compute.staging import Staging
from rudra.compute.statedict import entries_of
from rudra.compute.vectors import Memory
from rudra.core.hooks import hooks_of
from rudra.core.layout import Part
from rudra.core.rows import dense_because
from rudra.data.load import Data
from rudra.data.sparse import all_dense
from rudra.errors import ConfigError
from rudra.job.changes import JobChange
from rudra.job.job import Job
from rudra.job.table import named
from rudra.job.tables import OPTIMIZERS
from rudra.job.target import Target
from topologies import Plan
from topologies.kinds import RoleTraits, Variant

EXECUTORS: dict[Variant, type[Executor]] = {
    Variant.PARAMETER_SERVER: ServerExecutor,
    Variant.PARAMETER_SHARD: ServerExecutor,
    Variant.FIRST_SHARD: ServerExecutor,
    Variant.CENTRAL_SERVER: CentralExecutor,
    Variant.COORDINATOR: ServerExecutor,
    Variant.WINDOW_COORDINATOR: HogwildServerExecutor,
    Variant.TREE_SERVER: AveragingExecutor,
    Variant.STAGE_SERVER: LastStageExecutor,
    Variant.STATISTICS_SERVER: StatisticsExecutor,
    Variant.LEARNER: PullingExecutor,
    Variant.OVERLAPPED_LEARNER: LearnerExecutor,
    Variant.GROUP_LEARNER: LearnerExecutor,
    Variant.SHARDED_LEARNER: PullingExecutor,
    Variant.REPLICA: ReplicaExecutor,
    Variant.AVERAGER: AveragerExecutor,
    Variant.REPLICA_SHARER: AveragerExecutor,
    Variant.REFERRER: ReferrerExecutor,
    Variant.ELASTIC_LEARNER: ElasticExecutor,
    Variant.WORKER: LearnerExecutor,
    Variant.WINDOW_WORKER: HogwildExecutor,
    Variant.FIRST_STAGE_PARAMETER_SERVER: FirstStageServerExecutor,
    Variant.FIRST_STAGE_PARAMETER_SHARD: FirstStageServerExecutor,
    Variant.FIRST_STAGE_FIRST_SHARD: FirstStageServerExecutor,
    Variant.FIRST_STAGE_LEARNER: FirstStageExecutor,
    Variant.FIRST_STAGE_OVERLAPPED_LEARNER: FirstStageExecutor,
    Variant.FIRST_STAGE_GROUP_LEARNER: FirstStageExecutor,
    Variant.FIRST_STAGE_SHARDED_LEARNER: FirstStageExecutor,
    Variant.FIRST_STAGE_REPLICA: FirstStageReplicaExecutor,
}
"""Executor class of each variant of a role."""


def make_executors(
    job: Job,
    plan: Plan,
    roles: tuple[int, ...],
    data: Data,
    *,
    prefetch: bool,
    at_once: bool = False,
    device: torch.device = CPU,
    placing: Placing = "device",
    rows: bool = True,
    first_weights: FirstWeights | None = None,
    memory: Memory | None = None,
) -> dict[int, Executor]:
    """Creates executors for some roles of one process, which share one model.

    Args:
        job: Resolved job.
        plan: Role assignment.
        roles: Ids of the roles.
        data: Data that roles in this process need.
        prefetch: Whether each learner gets an input thread.
        at_once: Whether the learners may compute at the same time, each with a model of its own.
        device: Device for gradients and evaluation.
        placing: Placement of buffers. Servers and optimisers compute on the device of their buffers.
        rows: Whether gradients of sparse layers may be rows (`rudra.core.rows`).
        first_weights: Returns the weights of a warm start. Only jobs with a warm start need it.
        memory: Allocator for buffers in main memory, for roles that send buffers.

    Raises:
        ConfigError: The model does not fit the data, torch cannot compute it in the job's precision, the optimiser's
            options are wrong, or a hook does not exist.
    """
    task = tasks.make(job.task, data.info.classes)
    kinds = [plan.traits(role) for role in roles]
    trains = any(kind.trains for kind in kinds)
    compiled = job.training.compile and trains
    if trains and job.cluster.graphs == "on" and not kind_of(device).records:
        noun = kind_of(device).noun
        raise ConfigError(f"[cluster] graphs = 'on': a {noun} has no graphs; valid there: auto, off")
    if compiled and data.info.sparse:
        raise ConfigError("[training] compile = true: steps on sparse inputs cannot be compiled; valid: false")

    gradients: Gradients = "direct" if job.training.gradients == "direct" else "autograd"

    def model(roles: int = 1) -> FlatModel:
        module = models.build(job.model, data.info, job.training.seed).to(device)
        flat = FlatModel(module, task, roles, job.training.precision, compiled=compiled, gradients=gradients)
        if trains and kind_of(device).records and job.cluster.graphs != "off" and not job.cluster.fused:
            flat.record_passes()
        return flat

    def piece(roles: int, *, back: bool) -> tuple[FlatModel, ModelCut]:
        """Returns the layers on one side of the cut, with their own parameters."""
        found = cut_model(job, models.build(job.model, data.info, job.training.seed).to(device), data.info)
        return FlatModel(found.back if back else found.front, task, roles, gradients=gradients), found

    flat = model(len(roles))
    if not all(kind.serves for kind in kinds):
        check_output(job, task, flat, data)
    fronts = piece(len(roles), back=False) if plan.stage is not None else None
    sides = () if fronts is None else fronts[1].parts(job.optimizer, flat.layout)
    owned = _owned(job, plan, flat, flat if fronts is None else fronts[0], sides)
    ends = accumulate((part.size for part in owned.values()), initial=0)
    travelling = dict(zip(owned, (slice(start, stop) for start, stop in pairwise(ends)), strict=True))
    all_parts = list(job.parts(plan))
    for change, (_, its, its_plan) in zip(job.changes, all_parts[1:], strict=True):
        _check_optimizers(change, its, its_plan)
    learners = [role for role in roles if plan.traits(role).trains]
    _, first_job, first_plan = all_parts[0]
    portions = {role: portion_of(first_job, first_plan, role) for role in learners}
    most_gradients = first_plan.max_gradients_per_message
    form = flat.row_form if rows and data.info.sparse and flat.device.type == "cpu" else None
    if any(dense_because(its, its_plan) for _, its, its_plan in all_parts):
        form = None
    if form is not None and job.protocol.correction is not None:
        raise ConfigError(
            f"[protocol] correction = '{named(job.protocol.correction)}' is not supported with gradients in rows, as a "
            "sparse first layer has; use momentum > 0, or dense inputs"
        )
    fed = kind_of(device).apart and all_dense(data.info.sample)
    about = job, plan, data, device
    there = resident_sets(*about, trains=bool(learners)) if fed else ResidentSets(None, data.tests)
    hooks = hooks_of(job, plan.whole, roles, flat.layout)
    made: dict[int, Executor] = {}
    for role in roles:
        kind, part = plan.traits(role), owned.get(role)
        cls = Executor if kind.tests and data.test is None else EXECUTORS[kind.variant]
        own = flat if fronts is None else fronts[0]  # the model for gradients
        own = model() if at_once and kind.trains else own
        if sides and part is None and kind.updates:  # one of several replicas
            part = sides[kind.concludes]
        whole = flat if part is not None or kind.tests else own
        executor = _allocated(cls, kind, whole, part, most_gradients, placing, memory)
        if form is not None:
            executor.use_rows(form)
        if part is None and whole is flat:
            executor.slices_by_owner, executor.owner_parts = travelling, tuple(owned.values())
        elif part is None and plan.sharded:
            executor.slices_by_owner = {owner: travelling[owner] for owner in plan.front_owners}
        if isinstance(executor, PieceExecutor):
            executor.own_side(sides[kind.concludes])
        if isinstance(executor, OwnerExecutor):
            averages = job.optimizer.average.given and role in plan.owners
            executor.own(job, plan, flat, first_weights, part, averages=averages)
            executor.corrector = corrector_of(job, plan, role, flat.layout, executor.parameters, part)
            executor.update_norms = meter_of_owner(job, plan, flat.layout, part)
        if isinstance(executor, LearnerExecutor):
            assert data.training is not None
            work = portions[role].work(0)
            source = GradientSource(job, plan.roles[role].index, work, own, data.training, prefetch=prefetch)
            if fed and not isinstance(executor, HogwildExecutor | FirstStageExecutor):
                source.feed_device(there.training)
            executor.learn(source, pushes_at_once=kind.pushes_at_once)
            executor.norms = meter_of_learner(job, plan, own.layout)
            if job.training.evaluate == "workers":
                train = {TRAIN: data.training} if job.training.evaluate_training_set else {}
                executor.examined = Examined({**there.tests, **train}, job.training.evaluation_batch_size)
        if isinstance(executor, HogwildServerExecutor):
            executor.workers = {learner: plan.roles[learner].index for learner in plan.learners}
        if isinstance(executor, HogwildExecutor):
            assert data.training is not None
            _check_shared(flat)
            alone, split = (job, plan.roles[role].index, portions[role].work(0)), data.training
            more = (
                GradientSource(*alone, model(), split, prefetch=False) for _ in range(1, threads_of(job, plan, role))
            )
            executor.share(job, plan, role, [executor.source, *more])
        if isinstance(executor, FirstStageExecutor):
            assert fronts is not None
            executor.place(fronts[1], portions[role].count)
        if isinstance(executor, LastStageExecutor):
            assert data.training is not None
            executor.conclude_for(job, plan, data.training, *piece(1, back=True), role)
        if isinstance(executor, ElasticExecutor):
            executor.train_alone(job, plan.whole, role)
        if isinstance(executor, StatisticsExecutor):
            executor.test(job, flat, there.tests)
        if kind.tests and fronts is not None:
            executor.step_bytes = fronts[1].sent(job.training.minibatch_size) * job.learners
        if kind.tests:
            executor.state_dict = entries_of(flat.module, flat.layout)
        executor.hooks = hooks.get(role)
        made[role] = executor
    return made


def speculation_of(
    job: Job, plan: Plan, executors: Mapping[int, Executor], rate_after: RateAfter | None = None
) -> SpeculativeSteps | None:
    """Lets a device do steps before the roles of the only rank ask for them. None: these steps cannot be predicted.

    Args:
        job: Resolved job.
        plan: Role assignment.
        executors: Executor of each role. All of them are in this process.
        rate_after: As for `SpeculativeSteps`.
    """
    learner, owner = executors[plan.learners[0]], executors[plan.server]
    if len(plan.whole.learners) > 1 or type(learner) is not PullingExecutor or type(owner) is not ServerExecutor:
        return None
    source, kind = learner.source, kind_of(learner.device)
    records = kind.records and job.cluster.graphs != "off" and job.training.microbatches == 1
    in_place = learner.computes_in_place and source.resident is not None
    plain = in_place and job.optimizer.name in OPTIMIZERS and not source.model.scaled
    extras = (learner.hooks, owner.hooks, learner.norms, owner.update_norms, owner.corrector)
    averages = job.optimizer.average.given
    if not (records and plain) or averages or plan.parted or any(each is not None for each in extras):
        return None
    found = SpeculativeSteps(learner, owner, source, owner.in_place(), rate_after)
    for executor in (learner, owner):
        executor.speculation, executor.roll_back = found, found.roll_back
    return found


def _owned(job: Job, plan: Plan, flat: FlatModel, front: FlatModel, sides: Sequence[Part]) -> dict[int, Part]:
    """Returns the part of the flat vector that each owner has, if no single owner has all.

    Args:
        job: Resolved job.
        plan: Role assignment.
        flat: Model.
        front: Part of the model that learners have.
        sides: Parts on both sides of the cut, empty if there is no cut.
    """
    if not plan.parted:
        return {}
    parts = [sides[0]] if sides else [Part((slice(0, flat.size),))]
    if plan.sharded:
        groups = job.optimizer.groups_of([entry.name for entry in front.layout])
        table = job.optimizer.model_copy(update={"groups": groups}) if sides else job.optimizer
        parts = [parts[0].part(own) for own in cut(table, front.layout, len(plan.front_owners))]
    return dict(zip(plan.owners, [*parts, *sides[1:]], strict=True))


def _check_shared(flat: FlatModel) -> None:
    """Checks that workers can share all tensors that a model learns."""
    if flat.size > flat.parameter_count:
        raise ConfigError(
            f"[hogbatch] weights = 'shared': the model has buffers ({flat.layout[-1].name}), which workers "
            "cannot update together; valid: server, or models without BatchNorm and the like"
        )


def _check_optimizers(change: JobChange, job: Job, plan: Plan) -> None:
    """Checks that the optimisers of the roles accept their settings after a change, which gives this job and plan."""
    try:
        UpdateRule(job.optimizer, torch.zeros(1))
        if plan.averaging:
            outer_rule(job, plan, torch.zeros(1))
    except ConfigError as error:
        raise ConfigError(f"{change.where}: {error}") from None


def check_output(job: Job, task: tasks.Task, flat: FlatModel, data: Data) -> None:
    """Checks that the model fits the task and the data, and that the target names a metric that is evaluated."""
    output = models.check_model_output(flat.module, task, data.info)
    if job.training.target is not None and data.test is not None:
        measured = tasks.measured(task, output, data.info.sample[1])
        try:
            Target.parse(job.training.target).check(measured, data.tests)
        except ConfigError as error:
            raise ConfigError(f"[training] {error}") from None


def _allocated(
    cls: type[Executor],
    kind: RoleTraits,
    flat: FlatModel,
    part: Part | None,
    gradients: int,
    placing: Placing,
    memory: Memory | None,
) -> Executor:
    """Creates an executor of a role's kind, with memory for the whole vector or for the part that the role owns."""
    computes = not kind.serves
    stage = Staging(flat.size, flat.device) if placing == "staged" and computes else None
    direct = placing == "direct" and computes
    where = flat.device if placing == "device" or direct else CPU
    size, parameters = flat.size, flat.parameter_count
    if part is not None:
        first = part.stretches[0]
        size, parameters = part.size, min(first.stop, parameters) - first.start
    mine = None if kind.tests else memory
    return cls(flat.layout, size, parameters, gradients, where, stage, direct=direct, memory=mine)
