"""Readers of known data sets: they turn files into sources, and report damage in one readable line.

A reader takes the data table and the wanted splits, and returns `Arrays`. Without a wanted split it reads only the
shapes and the number of samples. Each module in this package lists the names of its readers in `READERS`.
"""

import importlib
import pkgutil
from collections.abc import Callable, Collection

from rudra.data.readers.common import SPLITS, Arrays, check_labels
from rudra.job.tables import DataTable

__all__ = ["READERS", "SPLITS", "Arrays", "Reader", "check_labels"]

Reader = Callable[[DataTable, Collection[str]], Arrays]

_MODULES = [importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]

READERS: dict[str, Reader] = {
    name: reader for module in _MODULES for name, reader in getattr(module, "READERS", {}).items()
}
