"""Reader of CSV files: tables of numbers and names, one sample in each line, with or without a header."""

import csv
import itertools
import re
import warnings
from collections.abc import Collection, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field

from rudra.data.readers.common import Arrays, class_count, existing, files_of, is_number, opened, shown, some
from rudra.data.sources import Dense
from rudra.errors import ConfigError, DataError
from rudra.job.table import Table, checked
from rudra.job.tables import DataTable

MISSING = ("", "?", "NA", "N/A", "NaN", "nan", "null", "NULL")
"""Texts that mean a missing value."""

_LARGEST = float(np.finfo(np.float32).max)
_PLAIN = "write numbers as 1250 and 1.5, without separators of thousands and with a decimal point"
_MOST = 1000  # maximum number of names in an input column: each name becomes an input
_SEPARATED = re.compile(r"[-+]?([0-9]{1,3}([,.'_ \u00a0\u202f][0-9]{3})+|[0-9]+)([.,][0-9]+)?")  # as 1,250.5 or 1,5
_ROWS = 1 << 16  # rows to parse at a time


def _is_column(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError("must be the name of a column or its number")
    return value


Column = Annotated[Any, BeforeValidator(_is_column)]


class CsvOptions(Table):
    test: str | None = Field(None, description="test file, next to the training file")
    target: Column = Field(-1, description="column to be predicted: its name, or its number from 0; -1: the last")
    header: bool | None = Field(
        None,
        description="whether the first line has names. Default: it has, unless it has only numbers, some of them twice",
    )
    delimiter: str = Field(",", min_length=1, max_length=1, description="between values")
    regression: bool = Field(False, description="targets are real numbers, not classes")
    categorical: tuple[Column, ...] = Field(
        (), description="columns of names, in addition to columns that begin with a name"
    )
    left_out: tuple[Column, ...] = Field((), description="columns that are not used")


@dataclass(frozen=True, slots=True)
class _Layout:
    """Roles of the columns of a file.

    Attributes:
        names: Names of all columns, or their indices if there is no header.
        header: Whether the first line has the names.
        numeric: Indices of the columns of numbers.
        named: Indices of the columns of names, which may include the target.
        target: Index of the target.
        categorical: Indices of the columns that the job declares as names.
    """

    names: tuple[str, ...]
    header: bool
    numeric: tuple[int, ...]
    named: tuple[int, ...]
    target: int
    categorical: frozenset[int] = frozenset()

    @property
    def inputs(self) -> list[int]:
        return sorted({*self.numeric, *self.named} - {self.target})

    def column(self, place: int) -> str:
        """Formats a column for users."""
        return f"column {shown(self.names[place].encode())}" if self.header else f"column {place}"


@dataclass(slots=True)
class _Names:
    """Column of names.

    Attributes:
        values: Distinct names, with their numbers.
        parts: (rows,) int32: numbers of the names, in pieces.
    """

    values: dict[str, int]
    parts: list[NDArray[np.int32]]

    @property
    def codes(self) -> NDArray[np.int32]:
        return np.concatenate(self.parts)


@dataclass(slots=True)
class _Rows:
    """Content of a file.

    Attributes:
        numbers: (rows, numeric columns) float32, in pieces.
        names: Index of a column -> its names.
        count: Number of rows.
    """

    numbers: list[NDArray[np.float32]]
    names: dict[int, _Names]
    count: int = 0


def read_csv(table: DataTable, wanted: Collection[str]) -> Arrays:
    """A CSV file, and one next to it for the test set; each plain or compressed with gzip, bzip2, xz or Zstandard.

    A column of names becomes one input for each name in the training file: one of them is 1, the others are 0.
    Classes are numbered in the order of their labels.
    """
    options = checked(CsvOptions, table.options, "data", "options")
    files = files_of(table, options.test)
    layout = _layout_of(files["train"], options)
    found = {split: _read(file, layout, options) for split, file in files.items()}
    known: dict[int, list[Any]] = {}
    places: dict[int, dict[str, NDArray[np.int64]]] = {}
    for column in layout.named:
        _check_separators(found["train"].names[column].values, files["train"], column, layout)
        known[column], places[column] = _numbered(column, found, files, layout, options)
        if column != layout.target and len(known[column]) > _MOST:
            text = f"{layout.column(column)} has {len(known[column]):,} different names, more than {_MOST:,}"
            remedy = f"data.options.left_out = [{layout.names[column]!r}] leaves it out"
            raise DataError(f"{files['train']}: {text}; {remedy}")
    classes = 1
    if not options.regression:
        classes = class_count(table, len(known[layout.target]), str(files["train"]))
    widths = [len(known[column]) if column in known else 1 for column in layout.inputs]
    arrays = Arrays((sum(widths),), classes, 1.0, {split: rows.count for split, rows in found.items()})
    for split in files:
        if split in wanted:
            own = {column: of[split] for column, of in places.items()}
            inputs, targets = _assembled(found.pop(split), layout, widths, own)
            arrays.pairs[split] = Dense(inputs), Dense(targets)
    return arrays


def _layout_of(file: Path, options: CsvOptions) -> _Layout:
    """Returns the roles of the training file's columns, from the job and the first sample."""
    with closing(_lines(file, options.delimiter)) as lines:
        line, first = next(lines, (0, []))
        numbers = [name for name in first if is_number(name.strip().encode())]
        header = options.header
        if header is None:
            header = len(numbers) < len(first) or len({name.strip() for name in numbers}) == len(first)
        sample = next(lines, (0, []))[1] if header else first
    if not sample:
        raise DataError(f"{file}: there is no line with a sample")
    names = tuple(name.strip() for name in first) if header else tuple(map(str, range(len(first))))
    if len(names) < 2:
        others = [repr(mark) for mark in ",;\t|" if mark != options.delimiter and mark in "".join(first)]
        text = f"; data.options.delimiter = {others[0]} may be right" if others else ""
        raise DataError(f"{file}: line {line}: has a single column, so there is nothing to predict it from{text}")
    twice = next((name for place, name in enumerate(names) if name in names[:place]), None)
    wrong = None if twice is None else f"two columns are named {twice!r}"
    if wrong is None and options.header is None and header and numbers:
        wrong = f"a column is named {numbers[0].strip()!r}; if these are names set data.options.header = true"
    if wrong is not None:
        raise DataError(f"{file}: line {line}: {wrong}; for a file without names set data.options.header = false")
    if len(sample) != len(names):
        _complain(file, _Layout(names, header, (), (), 0), options)

    def place(key: str, wanted: int | str) -> int:
        if isinstance(wanted, str) and wanted in names:
            return names.index(wanted)
        if isinstance(wanted, int) and -len(names) <= wanted < len(names):
            return wanted % len(names)
        valid = f"{some(names)}, or 0 to {len(names) - 1}"
        raise ConfigError(f"[data] options.{key}: {file} has no column {wanted!r}; valid: {valid}")

    target = place("target", options.target)
    categorical = {place("categorical", wanted) for wanted in options.categorical}
    used = set(range(len(names))) - {place("left_out", wanted) for wanted in options.left_out} | {target}
    if used == {target}:
        raise ConfigError(f"[data] options.left_out leaves no column of {file} but the target")
    named = {c for c in used if c in categorical or not (is_number(sample[c].strip().encode()) or sample[c] in MISSING)}
    named = named - {target} if options.regression else named | {target}
    return _Layout(names, header, tuple(sorted(used - named)), tuple(sorted(named)), target, frozenset(categorical))


def _check_separators(values: Collection[str], file: Path, column: int, layout: _Layout) -> None:
    """Raises DataError if a column has names that are numbers with separators."""
    texts = [value.strip() for value in values]
    separated = next((text for text in texts if not is_number(text.encode())), None)
    if separated is None or column in layout.categorical:
        return
    if all(is_number(text.encode()) or _SEPARATED.fullmatch(text) for text in texts):
        what = f"{layout.column(column)}: {shown(separated.encode())} is a number with a separator"
        place = layout.names[column] if layout.header else column
        raise DataError(f"{file}: {what}; {_PLAIN}, or set data.options.categorical = [{place!r}]")


def _read(file: Path, layout: _Layout, options: CsvOptions) -> _Rows:
    """Reads all rows of a file."""
    try:
        import pandas
    except ImportError:
        raise DataError("[data] name = csv needs pandas: pip install 'rudra[csv]'") from None
    skipped = _header(file, layout, options) if layout.header else 0
    rows, right = _Rows([], {column: _Names({}, []) for column in layout.named}), True
    kinds = dict.fromkeys(layout.numeric, "float64") | dict.fromkeys(layout.named, "category")
    beyond = len(layout.names)  # extra values of a line are put in a column of their own
    wrong = pandas.errors.ParserWarning  # otherwise pandas cuts lines that are too long
    with opened(file) as stream, warnings.catch_warnings(action="error", category=wrong):
        try:
            frames = pandas.read_csv(
                stream,
                sep=options.delimiter,
                header=None,
                skiprows=skipped,
                names=range(beyond + 1),
                dtype={column: kinds.get(column, "str") for column in range(beyond + 1)},
                index_col=False,
                skipinitialspace=True,
                keep_default_na=False,
                na_values=list(MISSING),
                encoding="utf-8-sig",
                encoding_errors="replace",
                chunksize=_ROWS,
            )
            for frame in frames:
                right = bool(frame[beyond].isna().all()) and _take(frame, layout, rows)
                if not right:
                    break
        except (ValueError, wrong):  # pandas does not give the line
            right = False
    if not right:
        _complain(file, layout, options, rows.count)
    if not rows.count:
        raise DataError(f"{file}: there is no line with a sample")
    return rows


def _take(frame: Any, layout: _Layout, rows: _Rows) -> bool:
    """Adds a piece of a file to its rows. Returns whether no value is missing or too large."""
    numbers = frame[list(layout.numeric)].to_numpy(np.float64)
    if not (np.abs(numbers) <= _LARGEST).all():
        return False
    rows.numbers.append(numbers.astype(np.float32))
    for column, names in rows.names.items():
        values = frame[column].array
        if (values.codes < 0).any():
            return False
        numbered = [names.values.setdefault(value, len(names.values)) for value in map(str, values.categories)]
        names.parts.append(np.array(numbered, np.int32)[values.codes])
    rows.count += len(frame)
    return True


def _numbered(
    column: int, found: dict[str, _Rows], files: dict[str, Path], layout: _Layout, options: CsvOptions
) -> tuple[list[Any], dict[str, NDArray[np.int64]]]:
    """Returns the training file's names in order, as numbers if all are numbers, and their index in every row."""
    values = {split: list(rows.names[column].values) for split, rows in found.items()}
    numbers = all(is_number(value.strip().encode()) for value in values["train"])
    keys: dict[str, list[Any]] = {s: [_key(value, numbers) for value in listed] for s, listed in values.items()}
    known = sorted(set(keys["train"]))
    if column == layout.target and numbers and any(not key.is_integer() for key in known):
        key = next(key for key in keys["train"] if not key.is_integer())
        where = _where(files["train"], found["train"], column, keys["train"].index(key), layout, options)
        raise DataError(f"{where}: {key:g} is not a whole number; for real targets set data.options.regression = true")
    order = {key: place for place, key in enumerate(known)}
    places = {}
    for split, rows in found.items():
        unknown = next((place for place, key in enumerate(keys[split]) if key not in order), None)
        if unknown is not None:
            valid = some([f"{key:g}" if numbers else str(key) for key in known])
            where = _where(files[split], rows, column, unknown, layout, options)
            what = shown(values[split][unknown].encode())
            raise DataError(f"{where}: {what} is not in the training file; valid: {valid}")
        places[split] = np.array([order[key] for key in keys[split]], np.int64)[rows.names[column].codes]
    return known, places


def _key(value: str, number: bool) -> Any:
    """Returns the key to compare a name by. If all names are numbers, 1 and 1.0 are equal."""
    return float(value) if number and is_number(value.strip().encode()) else value


def _where(file: Path, rows: _Rows, column: int, value: int, layout: _Layout, options: CsvOptions) -> str:
    """Returns file, line and column of the first occurrence of a name."""
    row = int(np.flatnonzero(rows.names[column].codes == value)[0]) + layout.header
    with closing(_lines(file, options.delimiter)) as lines:
        line, _ = next(itertools.islice(lines, row, None))
    return f"{file}: line {line}: {layout.column(column)}"


def _assembled(
    rows: _Rows, layout: _Layout, widths: Sequence[int], places: dict[int, NDArray[np.int64]]
) -> tuple[NDArray[np.float32], NDArray[Any]]:
    """Returns inputs (rows, sum of widths) float32, in the order of the columns, and targets."""
    inputs = np.zeros((rows.count, sum(widths)), np.float32)
    starts = dict(zip(layout.inputs, itertools.accumulate(widths, initial=0), strict=False))
    numeric = [column for column in layout.numeric if column != layout.target]
    into, chosen = [starts[column] for column in numeric], [layout.numeric.index(column) for column in numeric]
    real = np.empty(rows.count if layout.target in layout.numeric else 0, np.float32)
    first = 0
    while rows.numbers:  # each piece is freed after its copy
        part = rows.numbers.pop(0)
        inputs[first : first + len(part), into] = part[:, chosen]
        if len(real):
            real[first : first + len(part)] = part[:, layout.numeric.index(layout.target)]
        first += len(part)
    for column in layout.named:
        if column != layout.target:
            inputs[np.arange(rows.count), starts[column] + places[column]] = 1
    return inputs, real if len(real) else places[layout.target]


def _lines(file: Path, delimiter: str) -> Generator[tuple[int, Sequence[str]], None, None]:
    """Yields rows that are not blank as texts, with their first lines. It is slow, for the first row and for errors.

    Raises:
        DataError: The file cannot be read, or a line is not valid CSV.
    """
    with opened(existing(file)) as stream:
        texts = (line.decode("utf-8-sig" if not place else "utf-8", "replace") for place, line in enumerate(stream))
        reader = csv.reader(texts, delimiter=delimiter, skipinitialspace=True)
        line = 1
        while True:
            try:
                row = next(reader, None)
            except csv.Error as error:
                raise DataError(f"{file}: line {line}: is not CSV: {error}") from None
            if row is None:
                return
            if len(row) > 1 or any(map(str.strip, row)):
                yield line, row
            line = reader.line_num + 1


def _header(file: Path, layout: _Layout, options: CsvOptions) -> int:
    """Returns the number of lines before the samples. Raises DataError if the columns differ from the training file."""
    with closing(_lines(file, options.delimiter)) as lines:
        line, names = next(lines, (1, ()))
    pairs = itertools.zip_longest((name.strip() for name in names), layout.names, fillvalue="")
    wrong = next((pair for pair in pairs if pair[0] != pair[1]), None)
    if wrong is not None:
        raise DataError(f"{file}: line {line}: has a column {wrong[0]!r}, but the training file has {wrong[1]!r}")
    return line


def _complain(file: Path, layout: _Layout, options: CsvOptions, right: int = 0) -> NoReturn:
    """Finds the invalid line after `right` valid rows.

    Raises:
        DataError: The line is invalid.
    """
    with closing(_lines(file, options.delimiter)) as lines:
        for line, row in itertools.islice(lines, right + layout.header, None):
            if len(row) != len(layout.names) and row[len(layout.names) :] != [""]:
                raise DataError(f"{file}: line {line}: has {len(row)} values, not {len(layout.names)}")
            for column in sorted({*layout.numeric, *layout.named}):
                where, value = f"{file}: line {line}: {layout.column(column)}", row[column].strip()
                if value in MISSING:
                    raise DataError(f"{where}: the value is missing")
                if column in layout.numeric and not is_number(value.encode(), _LARGEST):
                    remedy = "" if column == layout.target else "; columns of names go into data.options.categorical"
                    remedy = f"; {_PLAIN}" if _SEPARATED.fullmatch(value) else remedy
                    raise DataError(f"{where}: {shown(value.encode())} is not a number{remedy}")
    raise DataError(f"{file}: is not a table of values with {options.delimiter!r} between them")


READERS = {"csv": read_csv}
