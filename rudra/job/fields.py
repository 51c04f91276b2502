"""The tables of a job, and nothing else."""

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
    """The tables that a job has.

    Attributes:
        name: name of the job, by which result files are called.
        model: table `[model]`: the network.
        data: table `[data]`: the training and test sets.
        augment: table `[augment]`: random changes of the training inputs.
        task: table `[task]`: the loss, and what tests measure.
        training: table `[training]`: epochs, mini-batch size, seed, tests, target.
        optimizer: table `[optimizer]`: the update rule and the learning rate.
        protocol: table `[protocol]`: how many gradients make an update, and the modulation of the learning rate.
        hogbatch: table `[hogbatch]`: assignment of samples to heterogeneous workers, which update the weights.
        averaging: table `[averaging]`: how learners average replicas of their own.
        placement: table `[placement]`: which layers a stage server has.
        topology: table `[topology]`: which roles exchange gradients and weights.
        cluster: table `[cluster]`: learners, threads and devices.
        simulation: table `[simulation]`: what takes how long in virtual time.
        fault_tolerance: table `[fault_tolerance]`: what a run does about ranks that die or wait.
        results: table `[results]`: what the result file records.
        hooks: tables `[[hooks]]`: code of the user that roles call.
        changes: tables `[[changes]]`: what has other values after an epoch.
        study: table `[study]`: what `rudra sweep` makes of the job.
    """

    name: str = Field("job", description="what result files are called; default: the name of the job file")
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
