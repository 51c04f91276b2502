"""Reader of scikit-learn's handwritten digits."""

import importlib.util
import io
import warnings
from collections.abc import Collection
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rudra.data.readers.common import Arrays, check_labels, content_of, no_options
from rudra.data.sources import Dense
from rudra.errors import DataError, one_line
from rudra.job.tables import DataTable

_LARGEST = 1 << 26  # maximum bytes of the file


def read_digits(table: DataTable, wanted: Collection[str]) -> Arrays:
    """8x8 handwritten digits out of scikit-learn; every fifth sample of each class is for the test.

    scikit-learn's data file is read directly, because importing the library takes more than a second on each rank.
    """
    no_options(table)
    spec = importlib.util.find_spec("sklearn")
    if spec is None or not spec.submodule_search_locations:
        raise DataError("[data] name = digits needs scikit-learn: pip install 'rudra[digits]'")
    file = Path(spec.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"
    rows = _rows(file, bytes(content_of(file, _LARGEST)))
    images, labels = rows[:, :-1].reshape(-1, 1, 8, 8), rows[:, -1].astype(np.int64)
    check_labels(labels, 10, str(file))
    held_out = np.zeros(len(rows), bool)
    for label in range(10):
        held_out[np.flatnonzero(labels == label)[4::5]] = True
    arrays = Arrays((1, 8, 8), table.classes or 10, 1 / 16)
    for split, chosen in (("train", ~held_out), ("test", held_out)):
        arrays.counts[split] = int(chosen.sum())
        if split in wanted:
            arrays.pairs[split] = Dense(images[chosen]), Dense(labels[chosen])
    return arrays


@lru_cache(maxsize=1)
def _rows(file: Path, content: bytes) -> npt.NDArray[np.uint8]:
    """Returns one row for each sample: the pixels and the label. A process that makes many runs reads them once."""
    try:
        with warnings.catch_warnings(action="error"):
            return np.loadtxt(io.BytesIO(content), delimiter=",", dtype=np.uint8).reshape(-1, 65)
    except (ValueError, UserWarning) as error:
        raise DataError(f"{file}: not a table of digits: {one_line(error)}") from None


READERS = {"digits": read_digits}
