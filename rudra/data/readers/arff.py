"""Reader of ARFF files of Weka and Mulan: a table with one class attribute, or with many labels."""

import io
import os
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from rudra.data.readers.common import (
    Arrays,
    blocks,
    class_count,
    content_of,
    entries_in,
    is_number,
    numbers_of,
    path_of,
    shown,
    some,
)
from rudra.data.sources import Dense, Source, Sparse
from rudra.errors import ConfigError, DataError, one_line
from rudra.job.table import Table, checked
from rudra.job.tables import DataTable

_LARGEST = float(np.finfo(np.float32).max)
_NAMES_BYTES = 1 << 26  # maximum bytes of a file of label names
_SPACES = bytes.maketrans(b",", b" ")
_QUOTED = r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\""
_ATTRIBUTE = re.compile(rf"@attribute\s+({_QUOTED}|[^\s{{]+)\s*(.+)", re.IGNORECASE)
_VALUE = re.compile(rf"\s*((?:[0-9]+\s+)?(?:{_QUOTED})|[^,]+)\s*(?:,|$)")  # the number is a sparse row's index
_MOST = 1000  # maximum number of names in an input: each name becomes an input


class ArffOptions(Table):
    train: str | None = Field(None, description="training file in path. Default: the only *-train.arff there, or path")
    test: str | None = Field(None, description="test file next to it. Default: the only *-test.arff in path")
    labels: int | None = Field(None, ge=1, description="how many of the last attributes are labels")
    xml: str | None = Field(None, description="Mulan's file of label names next to it, instead of labels")
    left_out: tuple[str, ...] = Field((), description="names of attributes that are not used")


@dataclass(frozen=True, slots=True)
class _Attribute:
    """Column: name, values if they are names, type as written in the file, and line of its declaration."""

    name: str
    values: tuple[str, ...]
    kind: str = field(compare=False)
    line: int = field(compare=False)

    @property
    def spread(self) -> bool:
        """Whether the attribute becomes an input for each of its values."""
        return bool(self.values) and self.values != ("0", "1")

    def __str__(self) -> str:
        return f"'{self.name}' " + ("{" + ",".join(self.values) + "}" if self.values else "numeric")


@dataclass(frozen=True, slots=True)
class _Layout:
    """Roles of the attributes.

    Attributes:
        attributes: Attributes of the file.
        inputs: Indices of the attributes that are inputs.
        targets: Indices of the attributes to predict.
        several: Whether a sample may have several labels as targets. If not, the last attribute is the target.
        classes: Numbered names of the class attribute, if it has any.
        codes: Index of an attribute -> its numbered names, for attributes whose names become numbers.
        left_out: Indices of attributes whose values are ignored.
    """

    attributes: list[_Attribute]
    inputs: list[int]
    targets: list[int]
    several: bool
    classes: dict[str, int]
    codes: dict[int, dict[str, int]]
    left_out: frozenset[int]


@dataclass(slots=True)
class _Rows:
    """Rows after @data.

    Attributes:
        lines: (N,) int64: line of each row.
        starts: (N + 1,) int64: row i has the elements starts[i] … starts[i + 1] - 1.
        columns: (elements,) int64, or float64 before the check.
        values: (elements,) float64.
        sparse: Whether rows may leave out elements that are 0 or the first name.
    """

    lines: NDArray[np.int64]
    starts: NDArray[np.int64]
    columns: NDArray[Any]
    values: NDArray[np.float64]
    sparse: bool

    def picked(self, attributes: list[int], of: int) -> Source:
        """Returns some of the attributes. `of` is the number of all attributes."""
        if not self.sparse:
            return Dense(self.values.reshape(-1, of)[:, attributes].astype(np.float32))
        numbers = np.full(of, -1)
        numbers[attributes] = np.arange(len(attributes))
        columns = numbers[self.columns]
        kept = columns >= 0
        starts = np.concatenate([[0], np.cumsum(kept)])[self.starts]
        return Sparse(self.values[kept].astype(np.float32), columns[kept].astype(np.int32), starts, len(attributes))

    def coded(self, attribute: int, of: int) -> NDArray[np.int64]:
        """Returns one attribute of every row, as whole numbers. `of` is the number of all attributes."""
        return self.picked([attribute], of).rows(np.arange(len(self.lines)))[:, 0].astype(np.int64)


def read_arff(table: DataTable, wanted: Collection[str]) -> Arrays:
    """A training file and a test file, dense or sparse, plain or compressed with gzip, bzip2 or xz.

    Without `labels` and `xml` the last attribute is the class, or the target of a regression if it is numeric. An
    attribute of names becomes one input for each name: one of them is 1, the others are 0. An attribute of {0,1} stays
    one input.
    """
    options = checked(ArffOptions, table.options, "data", "options")
    if options.labels is not None and options.xml is not None:
        raise ConfigError("[data] options.labels and options.xml are both given; valid: one of them")
    files = _files(path_of(table), options)
    names = None if options.xml is None else _label_names(files["train"].parent / options.xml)
    layouts: list[_Layout] = []
    arrays = Arrays((), 0, 1.0)
    densities: list[float | None] = []
    for split, file in files.items():
        lines = enumerate((line for block in blocks(file) for line in io.BytesIO(block)), 1)
        layout = _layout(list(_attributes(lines, file)), names, options, file)
        layouts.append(layout)
        _check_alike(layouts[0], layout, file)
        rows = _rows(lines, layout, file)
        arrays.counts[split] = len(rows.lines)
        inputs = _inputs(rows, layout)
        densities.append(inputs.density if isinstance(inputs, Sparse) else None)
        if split in wanted:
            arrays.pairs[split] = inputs, _targets(rows, layout)
        arrays.input_shape = inputs.shape[1:]
    arrays.density = None if None in densities else densities[0]
    arrays.classes = len(layout.targets)
    if layout.classes:
        arrays.classes = class_count(table, len(layout.classes), str(files["train"]))
    return arrays


def _files(path: Path, options: ArffOptions) -> dict[str, Path]:
    """Returns the training file, and the test file if one is named or found."""
    directory = path if os.path.isdir(path) else path.parent
    found = {"train": [path], "test": list[Path]()}
    if directory == path:
        names = [file.name for file in entries_in(path)]
        for split in found:
            fitting = re.compile(rf".+-{split}\.arff(\.gz|\.bz2|\.xz)?")
            found[split] = [directory / name for name in names if fitting.fullmatch(name)]
    for split, name in (("train", options.train), ("test", options.test)):
        if name is not None:
            found[split] = [directory / name]
        if len(found[split]) > 1:
            told = ", ".join(file.name for file in found[split])
            raise DataError(f"{path}: there are several *-{split}.arff: {told}; name one in data.options.{split}")
    if not found["train"]:
        raise DataError(f"{path}: there is no *-train.arff, plain or .gz, .bz2, .xz; name one in data.options.train")
    return {split: files[0] for split, files in found.items() if files}


def _label_names(file: Path) -> list[str]:
    """Returns the label names in a file of Mulan."""
    try:
        root = ElementTree.fromstring(bytes(content_of(file, _NAMES_BYTES)))
    except (ElementTree.ParseError, ValueError, LookupError) as error:
        raise DataError(f"{file}: not XML: {one_line(error)}") from None
    names = [element.get("name", "") for element in root.iter() if element.tag.rpartition("}")[2] == "label"]
    if not names:
        raise DataError(f"{file}: there is no <label name=...>")
    return names


def _attributes(lines: Iterator[tuple[int, bytes]], file: Path) -> Iterator[_Attribute]:
    """Yields the attributes, and reads up to the line of @data."""
    for number, line in lines:
        text = line.decode("utf-8", "replace").strip()
        if text.lower() == "@data":
            return
        if not text or text.startswith("%") or text.lower().startswith("@relation"):
            continue
        found = _ATTRIBUTE.fullmatch(text)
        if found is None:
            what = f"'{text[:40]}' is neither an @attribute with name and type nor @data"
            raise DataError(f"{file}: line {number}: {what}")
        kind = found[2].strip()
        named = kind.startswith("{") and kind.endswith("}")
        values = tuple(_unquoted(value[1]) for value in _VALUE.finditer(kind[1:-1])) if named else ()
        yield _Attribute(_unquoted(found[1]), values, kind, number)
    raise DataError(f"{file}: there is no line with @data: truncated?")


def _unquoted(text: str) -> str:
    text = text.strip()
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return re.sub(r"\\(.)", r"\1", text[1:-1])
    return text


def _layout(attributes: list[_Attribute], names: list[str] | None, options: ArffOptions, file: Path) -> _Layout:
    places = {attribute.name: place for place, attribute in enumerate(attributes)}
    for name in options.left_out:
        if name not in places:
            raise ConfigError(f"[data] options.left_out: {file} has no attribute {name!r}; valid: {some(places)}")
    left_out = frozenset(places[name] for name in options.left_out)
    used = [place for place in range(len(attributes)) if place not in left_out]
    if names is not None:
        for name in names:
            if name not in places:
                raise DataError(f"{file}: there is no attribute '{name}', which data.options.xml names as a label")
        targets = [places[name] for name in names]
        if left_out & set(targets):
            raise ConfigError("[data] options.left_out names a label; valid: attributes that are inputs")
    else:
        targets = used[-(options.labels or 1) :]
    chosen, several = set(targets), names is not None or options.labels is not None
    inputs = [place for place in used if place not in chosen]
    if not inputs:
        raise DataError(f"{file}: its {len(attributes)} attributes are all labels; there must be others")
    for place in used:
        attribute = attributes[place]
        line, remedy = attribute.line, f"data.options.left_out = [{attribute.name!r}] leaves it out"
        if not attribute.values and attribute.kind.lower() not in {"numeric", "real", "integer"}:
            text = f"attribute of type {attribute.kind[:40]}; valid: numeric, {{names}}"
            raise DataError(f"{file}: line {line}: {text}; {remedy}")
        if several and place in chosen and attribute.values != ("0", "1"):
            raise DataError(f"{file}: line {line}: attribute {attribute}; valid: {{0,1}}")
        if place not in chosen and len(attribute.values) > _MOST:
            text = f"attribute {attribute.name!r} has {len(attribute.values):,} names, more than {_MOST:,}"
            raise DataError(f"{file}: line {line}: {text}; {remedy}")
    named = [place for place in inputs if attributes[place].spread] + ([] if several else targets)
    codes = {place: {name: code for code, name in enumerate(attributes[place].values)} for place in named}
    codes = {place: of for place, of in codes.items() if of}
    classes = {} if several else codes.get(targets[0], {})
    return _Layout(attributes, inputs, targets, several, classes, codes, left_out)


def _check_alike(first: _Layout, layout: _Layout, file: Path) -> None:
    if len(first.attributes) != len(layout.attributes):
        told = f"{len(layout.attributes)} attributes, and the training file {len(first.attributes)}"
        raise DataError(f"{file}: has {told}")
    for one, other in zip(first.attributes, layout.attributes, strict=True):
        if one != other:
            raise DataError(f"{file}: line {other.line}: attribute {other}, but {one} in the training file")


def _inputs(rows: _Rows, layout: _Layout) -> Source:
    """Returns the inputs (N, width). An attribute of names has one column for each name."""
    of, count = len(layout.attributes), len(rows.lines)
    attributes = [layout.attributes[place] for place in layout.inputs]
    if not any(attribute.spread for attribute in attributes):
        return rows.picked(layout.inputs, of)
    widths = [len(attribute.values) if attribute.spread else 1 for attribute in attributes]
    width, firsts = sum(widths), dict(zip(layout.inputs, np.cumsum([0, *widths[:-1]]).tolist(), strict=True))
    plain = [place for place in layout.inputs if not layout.attributes[place].spread]
    hot = [rows.coded(place, of) + first for place, first in firsts.items() if layout.attributes[place].spread]
    each = np.arange(count)
    rest = rows.picked(plain, of)
    columns = np.array([firsts[place] for place in plain], np.int64)
    if isinstance(rest, Sparse):
        owners = np.concatenate([np.repeat(each, np.diff(rest.starts)), np.tile(each, len(hot))])
        places = np.concatenate([columns[rest.columns], *hot])
        values = np.concatenate([rest.values, np.ones(count * len(hot), np.float32)])
        order = np.lexsort((places, owners))
        starts = np.searchsorted(owners[order], np.arange(count + 1))
        return Sparse(values[order], places[order].astype(np.int32), starts, width)
    table = np.zeros((count, width), np.float32)
    table[:, columns] = rest.rows(each)
    for place in hot:
        table[each, place] = 1
    return Dense(table)


def _targets(rows: _Rows, layout: _Layout) -> Source:
    if layout.classes:
        return Dense(rows.coded(layout.targets[0], len(layout.attributes)))
    found = rows.picked(layout.targets, len(layout.attributes))
    return found if layout.several else Dense(found.rows(np.arange(len(rows.lines)))[:, 0])


def _rows(lines: Iterator[tuple[int, bytes]], layout: _Layout, file: Path) -> _Rows:
    numbers: list[NDArray[np.float64]] = []
    places: list[int] = []
    sparse = False
    for number, line in lines:
        text = line.strip()
        if text and not text.startswith(b"%"):
            sparse = sparse if numbers else text.startswith(b"{")
            try:
                numbers.append(_row(text, layout, sparse))
            except ValueError as error:
                raise DataError(f"{file}: line {number}: {error}") from None
            places.append(number)
    if not numbers:
        raise DataError(f"{file}: there is no row after @data")
    flat, each = np.concatenate(numbers), 2 if sparse else 1
    starts = np.concatenate([[0], np.cumsum([len(row) // each for row in numbers])])
    indices = flat[::2] if sparse else np.tile(np.arange(len(layout.attributes)), len(numbers))
    rows = _Rows(np.array(places), starts, indices, flat[each - 1 :: each], sparse)
    _check(rows, layout, file)
    rows.columns = indices.astype(np.int64)
    return rows


def _check(rows: _Rows, layout: _Layout, file: Path) -> None:
    """Raises DataError that names the first element with an invalid index or value."""
    indices, values, attributes = rows.columns, rows.values, layout.attributes
    valid = (indices >= 0) & (indices < len(attributes)) & (indices == np.floor(indices))
    steps = np.diff(indices, prepend=-1) > 0
    steps[rows.starts[:-1][np.diff(rows.starts) > 0]] = True  # at the start of a row
    binary = np.array([attribute.values == ("0", "1") for attribute in attributes])
    of_binary = binary[np.where(valid, indices, 0).astype(np.int64)]
    for wrong, text in (
        (~valid, f"index {{index:g}}; valid: 0 to {len(attributes) - 1}"),
        (~steps, "index {index:g} after a larger one or the same; they must ascend"),
        (of_binary & (values != 0) & (values != 1), "attribute {index:g} is {value:g}; valid: 0 and 1"),
        (~(np.abs(values) <= _LARGEST), "attribute {index:g} is {value:g}; valid: finite numbers of float32"),
    ):
        if wrong.any():
            place = int(np.argmax(wrong))
            line = rows.lines[np.searchsorted(rows.starts, place, side="right") - 1]
            raise DataError(f"{file}: line {line}: {text.format(index=indices[place], value=values[place])}")


def _row(text: bytes, layout: _Layout, sparse: bool) -> NDArray[np.float64]:
    """Parses the values of a row. For a sparse row, it parses index and value of each element that is not 0.

    Raises:
        ValueError: The row is not in this format.
    """
    if sparse:
        if not (text.startswith(b"{") and text.endswith(b"}")):
            raise ValueError("is not a row in braces, as the first one is")
        text = text[1:-1]
    if layout.codes or layout.left_out:
        text = _with_numbers(text.decode("utf-8", "replace"), layout, sparse).encode()
    text = text.translate(_SPACES)
    words = len(text.split())
    found = numbers_of(text)
    if found is None or len(found) != words:
        wrong = next((word for word in text.split() if not is_number(word)), text)
        raise ValueError("a value is missing: ?" if wrong == b"?" else f"{shown(wrong)} is not a number")
    expected = words + words % 2 if sparse else len(layout.attributes)
    if words != expected:
        raise ValueError("has an index without a value" if sparse else f"has {words} values; valid: {expected}")
    return found


def _with_numbers(text: str, layout: _Layout, sparse: bool) -> str:
    """Replaces names in a row by numbers, and ignored values by 0.

    Raises:
        ValueError: An attribute has no such name, or the row has more or fewer values than there are attributes.
    """
    quoted = "'" in text or '"' in text
    words = [value[1] for value in _VALUE.finditer(text)] if quoted else text.split(",")
    if sparse:
        pairs = [word.split(maxsplit=1) for word in words]
        for pair in pairs:
            if len(pair) == 2 and pair[0].isdecimal():
                pair[1] = _with_number(pair[1], int(pair[0]), layout)
        return ",".join(" ".join(pair) for pair in pairs)
    if len(words) != len(layout.attributes):
        raise ValueError(f"has {len(words)} values; valid: {len(layout.attributes)}")
    for place in (*layout.codes, *layout.left_out):
        words[place] = _with_number(words[place], place, layout)
    return ",".join(words)


def _with_number(word: str, place: int, layout: _Layout) -> str:
    """Returns a value as a number if it is a name, or 0 if it is ignored."""
    if place in layout.left_out:
        return "0"
    codes, name = layout.codes.get(place), _unquoted(word)
    if codes is None:
        return word
    if name not in codes:
        what = "class" if place in layout.targets else f"attribute '{layout.attributes[place].name}':"
        raise ValueError(f"{what} {shown(word.strip().encode())}; valid: {', '.join(codes)[:200]}")
    return str(codes[name])


READERS = {"arff": read_arff}
