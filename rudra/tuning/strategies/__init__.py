"""Strategies of a search, one module each. `ask` returns the next round of probes, and an empty one ends the search.

Only the state decides. So a search that was killed continues as if it had not been.
"""

import importlib
import pkgutil

from rudra.tuning.state import Strategy


def shipped() -> dict[str, Strategy]:
    """Returns all strategies by name."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return {name.replace("_", "-"): importlib.import_module(f"{__name__}.{name}").ask for name in names}
