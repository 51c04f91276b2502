"""What a result file holds, as the code declares it."""

import numpy as np

from rudra.core.records import EVENT_KINDS, MEANING
from rudra.results.recorder import ATTRIBUTES
from rudra.results.validation import DTYPES
from rudra.results.writer import LAYOUT, NAMES, OBJECTS
from tests.docs import markdown
from tests.docs.markdown import code, plain

_WITHOUT_DTYPE = {  # whose texts are as long as the longest
    "weights/layout": (LAYOUT, ["text", "text", "int32", "int64 (8,) or more", "int64", "int64"]),
    "weights/names": (NAMES, ["text", "text", "text"]),
}


def objects() -> list[str]:
    """Every data set of a file."""
    rows = [(code(f"/{name}"), plain(row), plain(holds)) for name, (row, holds) in OBJECTS.items()]
    return markdown.table(["object", "one row for each", "holds"], rows)


def columns(name: str) -> list[str]:
    """The columns of a data set."""
    if name in _WITHOUT_DTYPE:
        texts, types = _WITHOUT_DTYPE[name]
    else:
        dtype = DTYPES[name]
        texts = MEANING[dtype]
        types = [_type(dtype[column]) for column in texts]
    rows = [
        (code(column), kind, unit(column), plain(text))
        for (column, text), kind in zip(texts.items(), types, strict=True)
    ]
    return markdown.table(["column", "type", "unit", "meaning"], rows)


def event_kinds() -> list[str]:
    """Returns the kinds of events."""
    return markdown.table(("kind", "meaning"), [(code(kind), text) for kind, text in EVENT_KINDS.items()])


def attributes() -> list[str]:
    """The attributes at a file's root."""
    return markdown.table(["attribute", "meaning"], [(code(name), plain(text)) for name, text in ATTRIBUTES.items()])


def with_columns() -> list[str]:
    """Data sets that have columns."""
    return [name for name in OBJECTS if name in _WITHOUT_DTYPE or DTYPES.get(name, np.dtype("f4")).names]


def unit(column: str) -> str:
    """The unit of a column: names say it."""
    return "s" if column.endswith("_s") else "fraction" if column.endswith("_error") else ""


def _type(dtype: np.dtype[np.generic]) -> str:
    return f"text, {dtype.itemsize} bytes" if dtype.kind == "S" else dtype.name
