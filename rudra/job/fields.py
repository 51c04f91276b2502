"""The tables of a job, without rules or methods."""

from pydantic import Field

from rudra.job.changes import JobChange
from rudra.job.simulation import SimulationTable
from rudra.job.table import Table
from rudra.job.tables import (
    AugmentTable,
    AveragingTable,
    ClusterTable,
    DataTable,
    FaultToleranceTable,
    HogbatchTable,
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
)


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
        changes: Tables `[[changes]]`: keys that get other values after an epoch.
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
    study: StudyTable = StudyTable()
