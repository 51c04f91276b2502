"""Reader of LIBSVM's format: each line has a label, and index:value of each element that is not 0."""

import io
import itertools
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from rudra.data.readers.common import Arrays, blocks, class_count, files_of, is_number, numbers_of, shown, some
from rudra.data.sources import Dense, Source, Sparse
from rudra.errors import ConfigError, DataError
from rudra.job.table import Table, checked
from rudra.job.tables import DataTable

_MOST = 2**31 - 1  # largest index
_LARGEST = float(np.finfo(np.float32).max)
_EXACT = 2.0**53  # whole numbers up to this one are exact
_SPACES = bytes.maketrans(b":", b" ")
_LEFT_OUT = re.compile(rb"#[^\n]*|(?<=\s)qid:\S*")
_LABELS = re.compile(rb"^[^\S\n]*([^\s:]+(?!\S)|(?=\S))", re.MULTILINE)  # of lines that are not blank


class LibsvmOptions(Table):
    test: str | None = Field(None, description="test file, next to the training file")
    regression: bool = Field(False, description="labels are real numbers, not classes")
    zero_based: bool | None = Field(None, description="whether the first index is 0. Default: if there is a 0")
    features: int | None = Field(None, ge=1, le=_MOST, description="width. Default: the largest index of both files")
    multilabel: bool = Field(False, description="a line may have several labels, as 1,3, or none")


@dataclass(slots=True)
class _Rows:
    """Rows of a file, or of a part of a file.

    Attributes:
        labels: (labels,) float64: labels of all rows, one after the other.
        label_counts: (N,) int64: number of labels of each row, which is 1 unless rows may have several.
        lengths: (N,) int64: number of elements of each row.
        columns: (elements,) int32: indices as in the file, ascending in each row.
        values: (elements,) float32.
    """

    labels: NDArray[np.float64]
    label_counts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    columns: NDArray[np.int32]
    values: NDArray[np.float32]


def read_libsvm(table: DataTable, wanted: Collection[str]) -> Arrays:
    """A file in LIBSVM's format, and one next to it for the test set; each plain or compressed with gzip, bzip2 or xz.

    Classes are numbered in the order of their labels. Rows stay sparse until they are drawn. With `multilabel` the
    targets of a sample are 1 for each of its labels and 0 for the others.
    """
    options = checked(LibsvmOptions, table.options, "data", "options")
    if options.regression and options.multilabel:
        raise ConfigError("[data] options.regression and options.multilabel are both true; valid: one of them")
    files = files_of(table, options.test)
    found = {split: _read(file, options.regression, options.multilabel) for split, file in files.items()}
    width = _number_columns(found, files, options)
    if options.regression:
        classes = 1
        targets: dict[str, Source] = {split: Dense(rows.labels.astype(np.float32)) for split, rows in found.items()}
    else:
        classes, targets = _number_classes(table, found, files, options.multilabel)
    counts = {split: len(rows.lengths) for split, rows in found.items()}
    density = len(found["train"].values) / (width * counts["train"])
    arrays = Arrays((width,), classes, 1.0, counts, density=density)
    for split, rows in found.items():
        if split in wanted:
            starts = np.concatenate([[0], np.cumsum(rows.lengths)])
            arrays.pairs[split] = Sparse(rows.values, rows.columns, starts, width), targets[split]
    return arrays


def _number_columns(found: dict[str, _Rows], files: dict[str, Path], options: LibsvmOptions) -> int:
    """Renumbers all columns from 0, and returns their number."""
    zero_based = options.zero_based
    if zero_based is None:
        zero_based = not all(rows.columns.all() for rows in found.values())
    largest = max(int(rows.columns.max(initial=0)) for rows in found.values())
    width = options.features or largest + zero_based
    if width == 0:
        raise DataError(f"{files['train']}: there is no feature in any line")
    for split, rows in found.items():
        first, last = (0, width - 1) if zero_based else (1, width)
        wrong = np.flatnonzero((rows.columns < first) | (rows.columns > last))
        if len(wrong):
            row = int(np.searchsorted(np.cumsum(rows.lengths), wrong[0], side="right"))
            text = f"index {rows.columns[wrong[0]]}; valid: {first} to {last}"
            raise DataError(f"{files[split]}: line {_line(files[split], row)}: {text}")
        rows.columns -= first
    return width


def _number_classes(
    table: DataTable, found: dict[str, _Rows], files: dict[str, Path], several: bool
) -> tuple[int, dict[str, Source]]:
    """Returns the number of classes, and each row's class (with several labels per row, 0 or 1 for each class)."""
    known = np.unique(found["train"].labels)
    if not len(known):
        raise DataError(f"{files['train']}: no line has a label")
    targets: dict[str, Source] = {}
    for split, rows in found.items():
        classes = np.minimum(np.searchsorted(known, rows.labels), len(known) - 1)
        unknown = np.flatnonzero(known[classes] != rows.labels)
        owners = np.repeat(np.arange(len(rows.lengths)), rows.label_counts)
        if len(unknown):
            where = f"{files[split]}: line {_line(files[split], int(owners[unknown[0]]))}"
            valid = some([f"{label:.0f}" for label in known])
            raise DataError(f"{where}: label {rows.labels[unknown[0]]:.0f} is not in the training set; valid: {valid}")
        if several:
            rows_of, columns = np.divmod(np.unique(owners * len(known) + classes), len(known))  # each label once
            starts = np.searchsorted(rows_of, np.arange(len(rows.lengths) + 1))
            targets[split] = Sparse(np.ones(len(columns), np.float32), columns.astype(np.int32), starts, len(known))
        else:
            targets[split] = Dense(classes)
    return len(known) if several else class_count(table, len(known), str(files["train"])), targets


def _read(file: Path, regression: bool, several: bool = False) -> _Rows:
    parts: list[_Rows] = []
    line = 1
    for block in blocks(file):
        part = _parsed_several(block) if several else _parsed(block)
        if part is None or not (regression or _whole(part.labels).all()):
            _complain(block, regression, file, line, several)
        parts.append(part)
        line += block.count(b"\n")
    if not sum(len(part.lengths) for part in parts):
        raise DataError(f"{file}: there is no line with a sample")
    joined: Any = [np.concatenate([getattr(part, name) for part in parts]) for name in _Rows.__slots__]
    return _Rows(*joined)


def _whole(numbers: NDArray[np.float64]) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = (numbers == np.floor(numbers)) & (np.abs(numbers) <= _EXACT)
    return found


def _parsed(block: bytes) -> _Rows | None:
    """Parses whole lines. Returns None if they are not in the format.

    All numbers are parsed at once. Then the positions of labels, indices and values are checked.
    """
    if b"#" in block or b"qid:" in block:
        block = _LEFT_OUT.sub(b"", block)
    text = np.frombuffer(block, np.uint8)
    colons = text == ord(":")
    gaps = (text <= ord(" ")) | colons
    begins = ~gaps
    begins[1:] &= gaps[:-1]
    places = np.flatnonzero(begins)  # starts of the numbers
    numbers = numbers_of(block.translate(_SPACES))
    if numbers is None or len(numbers) != len(places) or not _paired(colons, gaps):
        return None
    is_value, is_index = np.zeros((2, len(places)), bool)
    is_value[1:] = colons[places[1:] - 1]
    is_index[:-1] = is_value[1:]
    is_first = np.zeros(len(places) + 1, bool)  # first number of its line
    is_first[np.searchsorted(places, np.append(0, np.flatnonzero(text == ord("\n"))))] = True
    is_label = ~(is_value | is_index)
    if (is_value & is_index).any() or not np.array_equal(is_label, is_first[:-1]):
        return None
    lengths = np.diff(np.flatnonzero(is_label), append=len(places)) // 2
    labels, indices, values = numbers[is_label], numbers[is_index], numbers[is_value]
    rising = np.diff(indices, prepend=-1) > 0
    rising[(np.cumsum(lengths) - lengths)[lengths > 0]] = True  # at the start of a row
    right = _whole(indices) & (indices >= 0) & (indices <= _MOST) & rising & (np.abs(values) <= _LARGEST)
    if not (right.all() and (np.abs(labels) <= _LARGEST).all()):
        return None
    return _Rows(labels, np.ones_like(lengths), lengths, indices.astype(np.int32), values.astype(np.float32))


def _parsed_several(block: bytes) -> _Rows | None:
    """Parses like `_parsed`, for lines with any number of labels."""
    texts: list[bytes] = []

    def taken(found: re.Match[bytes]) -> bytes:
        texts.append(found[1])
        return b"0 "

    rows = _parsed(_LABELS.sub(taken, _LEFT_OUT.sub(b"", block)))
    labels = [text.split(b",") if text else [] for text in texts]
    if rows is None or not all(is_number(label, _LARGEST) for each in labels for label in each):
        return None
    rows.labels = np.array([float(label) for each in labels for label in each], np.float64)
    rows.label_counts = np.array([len(each) for each in labels], np.int64)
    return rows


def _paired(colons: NDArray[np.bool_], gaps: NDArray[np.bool_]) -> bool:
    """Returns whether every colon has text directly before and after it."""
    found = np.flatnonzero(colons)
    if not len(found):
        return True
    inside = found[0] > 0 and found[-1] < len(colons) - 1
    return bool(inside and not gaps[found - 1].any() and not gaps[found + 1].any())


def _complain(block: bytes, regression: bool, file: Path, first: int, several: bool = False) -> NoReturn:
    """Finds the error in lines that `_parsed` refused, by parsing them one by one.

    Raises:
        DataError: The error, with its line. `first` is the number of the first line.
    """
    for number, line in enumerate(io.BytesIO(block), first):
        label, *fields = _LEFT_OUT.sub(b"", line).split() or [b"0"]
        labels = [label]
        if several:
            fields, labels = ([label, *fields], []) if b":" in label else (fields, label.split(b","))
        for label in labels:
            text = None if is_number(label, _LARGEST) else "is no label"
            if text is None and not (regression or _whole(np.array(float(label)))):
                text = "is not a whole number; for real labels set data.options.regression = true"
            elif text is not None and fields and all(is_number(each, _LARGEST) for each in label.split(b",")):
                text += "; for lines with several labels set data.options.multilabel = true"
            if text is not None:
                raise DataError(f"{file}: line {number}: {shown(label)} {text}{_perhaps_csv(line)}")
        last = -1.0
        for field in fields:
            index, _, value = field.partition(b":")
            if not (is_number(index, _MOST) and is_number(value, _LARGEST)):
                raise DataError(f"{file}: line {number}: {shown(field)} is not an index:value pair{_perhaps_csv(line)}")
            if not (float(index) >= 0 and float(index).is_integer()):
                raise DataError(f"{file}: line {number}: index {shown(index)} is not a whole number from 0 to {_MOST}")
            if float(index) <= last:
                raise DataError(f"{file}: line {number}: index {shown(index)} after {last:.0f}; they must ascend")
            last = float(index)
    raise DataError(f"{file}: line {first} or one after it: not in LIBSVM's format")


def _perhaps_csv(line: bytes) -> str:
    """Returns a hint if a line has values but no pairs."""
    csv = b":" not in line and any(mark in line.strip() for mark in (b",", b";", b"\t"))
    return '; a table of values is read by data.name = "csv"' if csv else ""


def _line(file: Path, row: int) -> int:
    """Returns the number of the line with a row."""
    lines = (line for block in blocks(file) for line in io.BytesIO(block))
    held = (number for number, line in enumerate(lines, 1) if _LEFT_OUT.sub(b"", line).strip())
    return next(itertools.islice(held, row, None))


READERS = {"libsvm": read_libsvm}
