"""Hooks that come with Rudra: what a run measures, as a CSV file or for TensorBoard."""

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
    """A CSV file as this process left it."""

    size: int
    columns: list[str]
    last: int


_journals: dict[Path, _Journal] = {}
_writers: dict[str, tuple[int, Any]] = {}
"""Directory -> the step that was written last, and torch's `SummaryWriter`."""


def csv(moment: "Moment", file: str = "{job}-{role}-{at}.csv") -> None:
    """Appends a line to a CSV file: what the moment has in numbers and texts.

    Lines of the same moment or of later ones, from before a resume or of a run before, give way to it.

    Args:
        moment: any.
        file: `{job}`, `{output}` (the result file's name without suffix), `{role}` and `{at}` are replaced;
            roles that share a file get in each other's way.
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
        with suppress(OSError):  # whoever writes there says what is wrong
            path.parent.mkdir(parents=True, exist_ok=True)
        with written(path) as stream:
            lines = io.TextIOWrapper(stream, "utf-8", newline="")
            writer = csv_format.DictWriter(lines, columns)
            writer.writeheader()
            writer.writerows([*rows, values])
            lines.detach()
    _journals[path] = _Journal(path.stat().st_size, columns, number)


def tensorboard(moment: "Moment", directory: str = "tensorboard/{job}-{role}") -> None:
    """Writes what the moment has in numbers for TensorBoard, as `epoch/test_error` and the like.

    Args:
        moment: any.
        directory: to be shown by `tensorboard --logdir`; of the names as in `csv`.
    """
    from torch.utils.tensorboard import SummaryWriter

    place, (_, number) = _named(directory, moment), _number(moment)
    place = f"{place}/{moment.at}"
    last, writer = _writers.get(place, (number, None))
    if writer is None or last >= number:  # what is there of this step and of later ones is done again
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
    """What moments of this kind are numbered by, and the number of this one."""
    key = "epoch" if moment.at == "epoch" else "timestamp"
    if moment.at == "update" and moment.learning_rate is None:  # of a learner that does not update weights
        key = "step"
    return key, getattr(moment, key) or 0


def _values(moment: "Moment") -> dict[str, Any]:
    names = ("timestamp", "time_s", "epoch", "samples", "learning_rate", "step", "loss", "errors")
    own = {name: value for name in names if (value := getattr(moment, name)) is not None}
    metrics = {f"{split}_{name}": value for split, found in moment.metrics.items() for name, value in found.items()}
    return own | moment.row | metrics


def _earlier(path: Path, key: str, number: int) -> tuple[list[Mapping[str, Any]], list[str]]:
    """Rows of a file before a moment, and its columns; rows that are not whole count for nothing."""
    if not path.exists():
        return [], []
    with path.open(newline="", encoding="utf-8") as lines:
        reader = csv_format.DictReader(lines)
        rows = [row for row in reader if (row.get(key) or "").isdigit() and int(row[key]) < number]
        return list(rows), list(reader.fieldnames or ()) if rows else []
