"""Tables of a result file as pandas data frames."""

from typing import Any

from numpy.typing import NDArray

from rudra.errors import ConfigError, unknown
from rudra.results.tables import RunTables
from rudra.results.writer import GROWING

TABLES = (*GROWING, "roles", "learners")


def frame(results: RunTables, table: str) -> Any:
    """See `Results.frame`."""
    if table not in TABLES:
        raise ConfigError(f"table {unknown(table, TABLES)}")
    try:
        import pandas
    except ImportError:
        raise ConfigError("data frames need pandas: pip install 'rudra[pandas]'") from None
    rows = getattr(results, table)
    return pandas.DataFrame({name: _column(rows[name]) for name in rows.dtype.names if name != "pad"})


def _column(values: NDArray[Any]) -> NDArray[Any] | list[str]:
    return values if values.dtype.kind != "S" else [text.decode("utf-8", "replace") for text in values.tolist()]
