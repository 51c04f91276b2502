"""Phrases that lines of several rules have in common."""

from rudra.job.fields import JobFields

PLACED = "[placement] cut is not supported with"
HOGBATCH = "[protocol] name = 'hogbatch' is not supported with"
AVERAGE = "[optimizer] average is not supported with"


def either(*names: str) -> str:
    """Returns the names as a choice: `a, b or c`."""
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last


def library_key(job: JobFields) -> tuple[str, str]:
    """Returns table and key that let a library add in compute groups."""
    if job.cluster.nccl:
        return "cluster", "transport = 'nccl'"
    return "topology", "options.reduction = 'mpi'"


def ordered_values(job: JobFields | None) -> str:
    """Returns the values of that key that let ranks add in an order of the plan."""
    return "transport = 'auto'" if job is not None and job.cluster.nccl else "'ordered' or 'nodes'"
