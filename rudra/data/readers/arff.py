"""ARFF files as Weka and Mulan have them: a table with one class attribute, or with many labels."""

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
)
from rudra.data.sources import Dense, Source, Sparse
from rudra.errors import ConfigError, DataError, one_line
from rudra.job.table import Table, checked
from rudra.job.tables import DataTable

_LARGEST = float(np.finfo(np.float32).max)
_NAMES_BYTES = 1 << 26  # of a file of label names, at most
_SPACES = bytes.maketrans(b",", b" ")
_QUOTED = r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\""
_ATTRIBUTE = re.compile(rf"@attribute\s+({_QUOTED}|[^\s{{]+)\s*(.+)", re.IGNORECASE)
_VALUE = re.compile(rf"\s*({_QUOTED}|[^,]+)\s*(?:,|$)")


class Options(Table):
    train: str | None = Field(None, description="training file in path; default: the only *-train.arff there, or path")
    test: str | None = Field(None, description="test file beside it; default: the only *-test.arff in path")
    labels: int | None = Field(None, ge=1, description="how many of the last attributes are labels")
    xml: str | None = Field(None, description="Mulan's file of label names beside it, in place of labels")


@dataclass(frozen=True, slots=True)
class _Attribute:
    """A column: its name, its values if they are names, and the line that says so."""

    name: str
    values: tuple[str, ...]
    line: int = field(compare=False)

    def __str__(self) -> str:
        return f"'{self.name}' " + ("{" + ",".join(self.values) + "}" if self.values else "numeric")


@dataclass(frozen=True, slots=True)
class _Layout:
    """What the attributes are for.

    Attributes:
        attributes: of the file.
        inputs: numbers of those that samples are made of.
        targets: numbers of those to be predicted.
        several: the targets are labels of which a sample may have several; else there is one, the last attribute.
        classes: its names, numbered, if it has any.
    """

    attributes: list[_Attribute]
    inputs: list[int]
    targets: list[int]
    several: bool
    classes: dict[str, int]


@dataclass(slots=True)
class _Rows:
    """What stands after @data.

    Attributes:
        lines: (N,) int64: where each row stands.
        starts: (N + 1,) int64: row i has the elements starts[i] … starts[i + 1] - 1.
        columns: (elements,) int64; float64 until they were checked.
        values: (elements,) float64.
        sparse: what is 0 may be left out.
    """

    lines: NDArray[np.int64]
    starts: NDArray[np.int64]
    columns: NDArray[Any]
    values: NDArray[np.float64]
    sparse: bool

    def density(self, attributes: list[int]) -> float | None:
        """Which share of some of the attributes' values is stored; None: all are."""
        stored = int(np.isin(self.columns, attributes).sum()) if self.sparse else 0
        return stored / max(1, len(self.lines) * len(attributes)) if self.sparse else None

    def picked(self, attributes: list[int], of: int) -> Source:
        """Some of the attributes; `of` is the number of all."""
        if not self.sparse:
            return Dense(self.values.reshape(-1, of)[:, attributes].astype(np.float32))
        numbers = np.full(of, -1)
        numbers[attributes] = np.arange(len(attributes))
        columns = numbers[self.columns]
        kept = columns >= 0
        starts = np.concatenate([[0], np.cumsum(kept)])[self.starts]
        return Sparse(self.values[kept].astype(np.float32), columns[kept].astype(np.int32), starts, len(attributes))


def read_arff(table: DataTable, wanted: Collection[str]) -> Arrays:
    """A training file and a test file, dense or sparse, plain or compressed with gzip, bzip2 or xz.

    Without `labels` and `xml` the last attribute is the class, or what regression is for if it is numeric.
    """
    options = checked(Options, table.options, "data", "options")
    if options.labels is not None and options.xml is not None:
        raise ConfigError("[data] options.labels and options.xml are both given; valid: one of them")
    files = _files(path_of(table), options)
    names = None if options.xml is None else _label_names(files["train"].parent / options.xml)
    layouts: list[_Layout] = []
    arrays = Arrays((), 0, 1.0)
    densities: list[float | None] = []
    for split, file in files.items():
        lines = enumerate((line for block in blocks(file) for line in io.BytesIO(block)), 1)
        layout = _layout(list(_attributes(lines, file)), names, options.labels, file)
        layouts.append(layout)
        _check_alike(layouts[0], layout, file)
        rows = _rows(lines, layout, file)
        arrays.counts[split] = len(rows.lines)
        densities.append(rows.density(layout.inputs))
        if split in wanted:
            inputs = rows.picked(layout.inputs, len(layout.attributes))
            arrays.pairs[split] = inputs, _targets(rows, layout)
    arrays.input_shape = (len(layout.inputs),)
    arrays.density = None if None in densities else densities[0]
    arrays.classes = len(layout.targets)
    if layout.classes:
        arrays.classes = class_count(table, len(layout.classes), str(files["train"]))
    return arrays


def _files(path: Path, options: Options) -> dict[str, Path]:
    """Training and test file; no test file where none is named or found."""
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
    """Names out of a file of Mulan's."""
    try:
        root = ElementTree.fromstring(bytes(content_of(file, _NAMES_BYTES)))
    except (ElementTree.ParseError, ValueError, LookupError) as error:
        raise DataError(f"{file}: not XML: {one_line(error)}") from None
    names = [element.get("name", "") for element in root.iter() if element.tag.rpartition("}")[2] == "label"]
    if not names:
        raise DataError(f"{file}: there is no <label name=...>")
    return names


def _attributes(lines: Iterator[tuple[int, bytes]], file: Path) -> Iterator[_Attribute]:
    """Reads as far as the line of @data."""
    for number, line in lines:
        text = line.decode("utf-8", "replace").strip()
        if text.lower() == "@data":
            return
        if not text or text.startswith("%") or text.lower().startswith("@relation"):
            continue
        found = _ATTRIBUTE.fullmatch(text)
        if found is None:
            raise DataError(
                f"{file}: line {number}: '{text[:40]}' is neither an @attribute with name and type nor @data"
            )
        kind = found[2].strip()
        named = kind.startswith("{") and kind.endswith("}")
        values = tuple(_unquoted(value[1]) for value in _VALUE.finditer(kind[1:-1])) if named else ()
        if not values and kind.lower() not in {"numeric", "real", "integer"}:
            raise DataError(f"{file}: line {number}: attribute of type {kind[:40]}; valid: numeric, {{names}}")
        yield _Attribute(_unquoted(found[1]), values, number)
    raise DataError(f"{file}: there is no line with @data: truncated?")


def _unquoted(text: str) -> str:
    text = text.strip()
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return re.sub(r"\\(.)", r"\1", text[1:-1])
    return text


def _layout(attributes: list[_Attribute], names: list[str] | None, labels: int | None, file: Path) -> _Layout:
    places = {attribute.name: place for place, attribute in enumerate(attributes)}
    if names is not None:
        for name in names:
            if name not in places:
                raise DataError(f"{file}: there is no attribute '{name}', which data.options.xml names as a label")
        targets = [places[name] for name in names]
    else:
        targets = list(range(len(attributes)))[-(labels or 1) :]
    chosen, several = set(targets), names is not None or labels is not None
    inputs = [place for place in range(len(attributes)) if place not in chosen]
    if not inputs:
        raise DataError(f"{file}: its {len(attributes)} attributes are all labels; there must be others")
    for place in [*inputs, *targets] if several else inputs:
        attribute = attributes[place]
        if attribute.values != ("0", "1") and (attribute.values or place in chosen):
            valid = "{0,1}" if place in chosen else "numeric, {0,1}"
            raise DataError(f"{file}: line {attribute.line}: attribute {attribute}; valid: {valid}")
    classes = {} if several else {name: number for number, name in enumerate(attributes[-1].values)}
    return _Layout(attributes, inputs, targets, several, classes)


def _check_alike(first: _Layout, layout: _Layout, file: Path) -> None:
    if len(first.attributes) != len(layout.attributes):
        told = f"{len(layout.attributes)} attributes, and the training file {len(first.attributes)}"
        raise DataError(f"{file}: has {told}")
    for one, other in zip(first.attributes, layout.attributes, strict=True):
        if one != other:
            raise DataError(f"{file}: line {other.line}: attribute {other}, but {one} in the training file")


def _targets(rows: _Rows, layout: _Layout) -> Source:
    found = rows.picked(layout.targets, len(layout.attributes))
    if layout.several:
        return found
    return Dense(found.rows(np.arange(len(rows.lines)))[:, 0].astype(np.int64 if layout.classes else np.float32))


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
    """Raises DataError naming the first element whose index or value cannot be."""
    indices, values, attributes = rows.columns, rows.values, layout.attributes
    valid = (indices >= 0) & (indices < len(attributes)) & (indices == np.floor(indices))
    steps = np.diff(indices, prepend=-1) > 0
    steps[rows.starts[:-1][np.diff(rows.starts) > 0]] = True  # where a row begins
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
    """A row's values; of a sparse one index and value of what is not 0.

    Raises:
        ValueError: it is not like that.
    """
    if sparse:
        if not (text.startswith(b"{") and text.endswith(b"}")):
            raise ValueError("is not a row in braces, as the first one is")
        text = text[1:-1]
    if layout.classes:
        text = _with_number(text, layout, sparse)
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


def _with_number(text: bytes, layout: _Layout, sparse: bool) -> bytes:
    """A row with the number of its class in the place of the name, which is the last value.

    Raises:
        ValueError: there is no such class.
    """
    head, comma, last = text.rpartition(b",")
    *index, name = last.split(maxsplit=1) if sparse and last.strip() else [last]
    if sparse and index != [b"%d" % layout.targets[0]]:
        return text  # left out: the first class
    found = _unquoted(name.decode("utf-8", "replace"))
    if found not in layout.classes:
        raise ValueError(f"class {shown(name)}; valid: {', '.join(layout.classes)[:200]}")
    return b"%b%b%b %d" % (head, comma, b"".join(index), layout.classes[found])


READERS = {"arff": read_arff}
