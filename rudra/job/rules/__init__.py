"""Rules about combinations of keys, protocols and plans of a job.

A rule is a small function that yields a line for each mistake. The line names the key, what is wrong, and what to use
instead. The decorator of a rule adds the rule to a list. The list decides which arguments the rule receives:

* `job_rule`: only the tables.
* `part_rule`: a part of the run with its plan and its protocol. The number of learners must be known.
* `change_rule`: the first part, and a part after `[[changes]]`.
* `simulated_rule`: a plan with the nodes of a simulation.

Only the first mistake is reported: in the order of the modules below, and in each module from top to bottom.
"""

# isort: off
from rudra.job.rules import tables, synchronisation, placement, parts, workers, devices, banks, learners, changes

# isort: on
from rudra.job.rules.banks import not_fused_because, not_graphed_because
from rudra.job.rules.changes import other_roles
from rudra.job.rules.registry import CHANGE_RULES, JOB_RULES, PART_RULES, SIMULATED_RULES, JobPart, check

__all__ = [
    "CHANGE_RULES",
    "JOB_RULES",
    "PART_RULES",
    "SIMULATED_RULES",
    "JobPart",
    "banks",
    "changes",
    "check",
    "devices",
    "learners",
    "not_fused_because",
    "not_graphed_because",
    "other_roles",
    "parts",
    "placement",
    "synchronisation",
    "tables",
    "workers",
]
