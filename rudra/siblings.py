"""Makes sure that `protocols` and `topologies` are the packages that came with this `rudra`.

Both names are generic: another package, or a directory where Python was started, may have them too. The package
imports this module before anything else.
"""

import importlib
import sys
from pathlib import Path

SIBLINGS = ("protocols", "topologies")


def load() -> None:
    """Imports the siblings from beside this package, whatever else is on `sys.path`.

    Raises:
        ImportError: somebody else's package of that name was imported before.
    """
    root = Path(__file__).resolve().parent.parent
    sys.path.insert(0, str(root))
    try:
        for name in SIBLINGS:
            found = importlib.import_module(name).__file__
            if found is None or Path(found).resolve().parent != root / name:
                raise ImportError(
                    f"rudra needs its own package {name!r} in {root}, but {found} is in its place; "
                    "install rudra into an environment of its own, and import it first"
                )
    finally:
        sys.path.remove(str(root))


load()
