"""Tables of a job. They declare the description, the valid values and the default of every key.

Unknown keys are refused with a list of the valid ones. `rudra.job.fields` has the table of each name, and
`rudra.job.rules` the rules for combinations of tables. Here are the names that other packages import.
"""

from rudra.job.tables.averaging import AveragingTable
from rudra.job.tables.cluster import BANK_KEYS, PLACEMENT_RULES, ClusterTable, FaultToleranceTable
from rudra.job.tables.decisions import DecisionsTable
from rudra.job.tables.hogbatch import HogbatchTable, kinds_of
from rudra.job.tables.optimizer import OPTIMIZERS, WITH_MOMENTUM, OptimizerTable, ParameterGroup
from rudra.job.tables.protocol import ArgumentsTable
from rudra.job.tables.results import Hook
from rudra.job.tables.training import IN_16_BITS, AugmentTable, DataTable, ModelTable, TaskTable, TrainingTable

__all__ = [
    "BANK_KEYS",
    "IN_16_BITS",
    "OPTIMIZERS",
    "PLACEMENT_RULES",
    "WITH_MOMENTUM",
    "ArgumentsTable",
    "AugmentTable",
    "AveragingTable",
    "ClusterTable",
    "DataTable",
    "DecisionsTable",
    "FaultToleranceTable",
    "HogbatchTable",
    "Hook",
    "ModelTable",
    "OptimizerTable",
    "ParameterGroup",
    "TaskTable",
    "TrainingTable",
    "kinds_of",
]
