"""Readers of the data sets that Rudra knows: files to sources, and every damage to one readable line.

A reader takes the data table and which splits are wanted, and gives `Arrays`. Without a split it reads what tells their
shapes and numbers alone. A module beside this one says in `READERS` by which names jobs ask for its readers.
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
