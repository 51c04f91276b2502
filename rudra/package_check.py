"""Makes sure that `protocols` and `topologies` are the packages that came with this `rudra`.

Both names are generic: another package, or the directory where Python was started, may use them. `rudra`
imports this module before anything else.
"""

import importlib
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
"""Directory of the sibling packages, which is the root of a checkout."""

SIBLINGS = ("protocols", "topologies")


def load(name: str) -> ModuleType:
    """Imports a sibling from the directory of this package, whatever else is on `sys.path`.

    Raises:
        ImportError: a different package of that name has already been imported.
    """
    sys.path.insert(0, str(ROOT))
    try:
        module = importlib.import_module(name)
    finally:
        sys.path.remove(str(ROOT))
    found = module.__file__
    if found is None or Path(found).resolve().parent != ROOT / name:
        raise ImportError(
            f"rudra needs its own package {name!r} in {ROOT}, but {found} is in its place; "
            "install rudra into an environment of its own, and import it first"
        )
    return module


for _name in SIBLINGS:
    load(_name)
