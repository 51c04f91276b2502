"""Rudra: distributed training over MPI whose synchronisation you can choose, measure and trust.

>>> import rudra
>>> job = rudra.Job.load("digits")
>>> results = rudra.simulate(job)
>>> results.summary()["final_test_error"]
"""

import importlib
from typing import TYPE_CHECKING, Any

from rudra import siblings as _siblings  # noqa: F401  first: makes sure that protocols and topologies are ours
from rudra.config import Job
from rudra.errors import RudraError
from rudra.jobfiles import shipped_jobs

if TYPE_CHECKING:
    from rudra.api import run, simulate
    from rudra.hooks import Moment
    from rudra.replayer import replay
    from rudra.results import Results, open_results

__all__ = ["Job", "Moment", "Results", "RudraError", "open_results", "replay", "run", "shipped_jobs", "simulate"]

_LATE = {
    "Moment": "hooks",
    "Results": "results",
    "open_results": "results",
    "replay": "replayer",
    "run": "api",
    "simulate": "api",
}
"""What needs NumPy, torch or h5py, which `import rudra` does not load."""


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module 'rudra' has no attribute {name!r}")
    return getattr(importlib.import_module(f"rudra.{_LATE[name]}"), name)
