"""Included hooks: measurements of a run as a CSV file or for TensorBoard."""

import csv as csv_format
import io
import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rudra.files import written

if TYPE_CHECKING:
    from rudra.core.hooks import Moment


class _Journal(NamedTuple):
    """State of a CSV file after this process wrote to it."""

    size: int
    columns: list[str]
    last: int


_journals: dict[Path, _Journal] = {}
_writers: dict[str, tuple[int, Any]] = {}
"""Directory -> last written step, and torch's `SummaryWriter`."""


def csv(moment: "Moment", file: str = "{job}-{role}-{at}.csv") -> None:
    """Appends a line to a CSV file with the numbers and texts of the moment.

    It replaces lines of the same or later moments that were written before a resume or by an earlier run.

    Args:
        moment: Any moment.
        file: File name. `{job}`, `{output}` (the result file's name without suffix), `{role}` and `{at}` are
            replaced. Roles must not share a file.
    """
    path, (key, number), values = Path(_named(file, moment)), _number(moment), _values(moment)
    before = _journals.get(path)
    whole = before is not None and path.exists() and path.stat().st_size == before.size
    if before is not None and whole and before.last < number and values.keys() <= set(before.columns):
        columns = before.columns
        with path.open("a", newline="", encoding="utf-8") as lines:
            csv_format.DictWriter(lines, columns).writerow(values)
    else:
        rows, columns = _earlier(path, key, number)
        columns += [name for name in values if name not in columns]
        with suppress(OSError):  # writing the file will report the error
            path.parent.mkdir(parents=True, exist_ok=True)
        with written(path) as stream:
            lines = io.TextIOWrapper(stream, "utf-8", newline="")
            writer = csv_format.DictWriter(lines, columns)
            writer.writeheader()
            writer.writerows([*rows, values])
            lines.detach()
    _journals[path] = _Journal(path.stat().st_size, columns, number)


def tensorboard(moment: "Moment", directory: str = "tensorboard/{job}-{role}") -> None:
    """Writes the numbers of the moment for TensorBoard, with names such as `epoch/test_error`.

    Args:
        moment: Any moment.
        directory: Directory for `tensorboard --logdir`. Names are replaced as in `csv`.
    """
    from torch.utils.tensorboard import SummaryWriter

    place, (_, number) = _named(directory, moment), _number(moment)
    place = f"{place}/{moment.at}"
    last, writer = _writers.get(place, (number, None))
    if writer is None or last >= number:  # this step and later ones are repeated
        if writer is not None:
            writer.close()
        writer = SummaryWriter(place, purge_step=number)
    for name, value in _values(moment).items():
        if isinstance(value, int | float) and math.isfinite(value):
            writer.add_scalar(f"{moment.at}/{name}", value, number)
    writer.flush()
    _writers[place] = number, writer


tensorboard.requires = {"tensorboard": "rudra[tensorboard]"}  # type: ignore[attr-defined]


def _named(text: str, moment: "Moment") -> str:
    return text.format(job=moment.job, role=moment.role.replace(" ", "-"), at=moment.at, output=moment.output)


def _number(moment: "Moment") -> tuple[str, int]:
    """Returns the key that numbers moments of this kind, and the number of this moment."""
    key = "epoch" if moment.at == "epoch" else "timestamp"
    if moment.at == "update" and moment.learning_rate is None:  # a learner that does not update weights
        key = "step"
    return key, getattr(moment, key) or 0


def _values(moment: "Moment") -> dict[str, Any]:
    names = ("timestamp", "time_s", "epoch", "samples", "learning_rate", "step", "loss", "errors")
    own = {name: value for name in names if (value := getattr(moment, name)) is not None}
    metrics = {f"{split}_{name}": value for split, found in moment.metrics.items() for name, value in found.items()}
    return own | moment.row | metrics


def _earlier(path: Path, key: str, number: int) -> tuple[list[Mapping[str, Any]], list[str]]:
    """Returns the rows of a file before a moment, and the file's columns. Incomplete rows are ignored."""
    if not path.exists():
        return [], []
    with path.open(newline="", encoding="utf-8") as lines:
        reader = csv_format.DictReader(lines)
        rows = [row for row in reader if (row.get(key) or "").isdigit() and int(row[key]) < number]
        return list(rows), list(reader.fieldnames or ()) if rows else []
