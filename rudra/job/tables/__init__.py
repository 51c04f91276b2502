"""The tables of a job, with every key, declared once: what it means, what is allowed, what it is by default.

Unknown keys are refused with the list of valid ones. Rules that span tables stand in `rudra.job.rules`.
"""

from rudra.job.tables.averaging import AveragingTable, OuterTable
from rudra.job.tables.cluster import PLACEMENT_RULES, ClusterTable, FaultToleranceTable, PlacementTable, TopologyTable
from rudra.job.tables.hogbatch import HogbatchTable, WorkersTable, kinds_of
from rudra.job.tables.optimizer import OPTIMIZERS, OptimizerTable, ParameterGroup
from rudra.job.tables.protocol import ArgumentsTable, ProtocolTable
from rudra.job.tables.results import Hook, ResultsTable, StudyTable
from rudra.job.tables.training import AugmentTable, DataTable, ModelTable, TaskTable, TrainingTable

__all__ = [
    "OPTIMIZERS",
    "PLACEMENT_RULES",
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
