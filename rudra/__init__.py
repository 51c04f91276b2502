"""Rudra: distributed training over MPI whose synchronisation you can choose, measure and trust.

>>> import rudra
>>> job = rudra.Job.load("digits")
>>> results = rudra.simulate(job)
>>> results.summary()["final_test_error"]
"""

import sys

if sys.argv[:1] == ["-m"] or (sys.argv and sys.argv[0].endswith("/rudra")):  # this process runs the command line
    from rudra import interrupts

    interrupts.leave_at_once()

import importlib
from typing import TYPE_CHECKING, Any

from rudra import package_check as _package_check  # noqa: F401  first: checks that protocols and topologies belong to Rudra

if TYPE_CHECKING:
    from rudra.api import run, simulate
    from rudra.compute.sparse import SparseLinear
    from rudra.core.hooks import Moment
    from rudra.errors import RudraError
    from rudra.job.job import Job
    from rudra.job.jobfiles import shipped_jobs
    from rudra.results.reader import Results, open_results
    from rudra.simulation.replay import replay
    from rudra.tuning.tune import tune

__all__ = [
    "Job",
    "Moment",
    "Results",
    "RudraError",
    "SparseLinear",
    "open_results",
    "replay",
    "run",
    "shipped_jobs",
    "simulate",
    "tune",
]

_LATE = {
    "Job": "job.job",
    "Moment": "core.hooks",
    "Results": "results.reader",
    "RudraError": "errors",
    "SparseLinear": "compute.sparse",
    "open_results": "results.reader",
    "replay": "simulation.replay",
    "run": "api",
    "shipped_jobs": "job.jobfiles",
    "simulate": "api",
    "tune": "tuning.tune",
}
"""Modules of the names that are imported on first use. Some need torch or h5py."""


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module 'rudra' has no attribute {name!r}")
    return getattr(importlib.import_module(f"rudra.{_LATE[name]}"), name)
