"""Tables of a job. They declare the description, the valid values and the default of every key.

Unknown keys are refused with a list of the valid ones. `rudra.job.rules` has the rules for combinations of tables.
"""

from rudra.job.tables.averaging import AveragingTable, OuterTable
from rudra.job.tables.cluster import PLACEMENT_RULES, ClusterTable, FaultToleranceTable, PlacementTable, TopologyTable
from rudra.job.tables.hogbatch import HogbatchTable, WorkersTable, kinds_of
from rudra.job.tables.optimizer import OPTIMIZERS, WITH_MOMENTUM, OptimizerTable, ParameterGroup
from rudra.job.tables.protocol import ArgumentsTable, ProtocolTable
from rudra.job.tables.results import Hook, ResultsTable, StudyTable
from rudra.job.tables.training import AugmentTable, DataTable, ModelTable, TaskTable, TrainingTable

__all__ = [
    "OPTIMIZERS",
    "PLACEMENT_RULES",
    "WITH_MOMENTUM",
    "ArgumentsTable",
    "AugmentTable",
    "AveragingTable",
    "ClusterTable",
    "DataTable",
    "FaultToleranceTable",
    "HogbatchTable",
    "Hook",
    "ModelTable",
    "OptimizerTable",
    "OuterTable",
    "ParameterGroup",
    "PlacementTable",
    "ProtocolTable",
    "ResultsTable",
    "StudyTable",
    "TaskTable",
    "TopologyTable",
    "TrainingTable",
    "WorkersTable",
    "kinds_of",
]
