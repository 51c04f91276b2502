"""Reader of a text, for models that predict the next character."""

from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from rudra.data.readers.common import Arrays, class_count, content_of, path_of
from rudra.data.sources import TokenWindows
from rudra.errors import DataError
from rudra.job.table import Table, checked
from rudra.job.tables import DataTable

_CODE_POINTS = 0x110000


class TextOptions(Table):
    length: int = Field(64, ge=1, description="T: characters of a sample")
    test: float = Field(0.1, gt=0, lt=1, description="fraction of the text, at its end, that is the test set")
    unit: Literal["characters", "bytes"] = Field("characters", description="of UTF-8; or bytes of any file")


def read_text(table: DataTable, wanted: Collection[str]) -> Arrays:
    """A text file, plain or compressed with gzip, bzip2 or xz, in windows that follow one another.

    Samples are T characters, and their targets are the same window shifted by one character. Characters are numbered in
    the order of all characters in the file.
    """
    options = checked(TextOptions, table.options, "data", "options")
    file = path_of(table)
    text, vocabulary = _numbered(file, options.unit)
    end = len(text) - round(len(text) * options.test)
    parts = {"train": text[:end], "test": text[end:]}
    arrays = Arrays((options.length,), 0, 1.0)
    for split, part in parts.items():
        count = (len(part) - 1) // options.length
        if count < 1:
            needed = f"a sample has {options.length} (data.options.length), and the one after it"
            raise DataError(f"{file}: too short: {len(part)} {options.unit} for the {split} set; {needed}")
        arrays.counts[split] = count
        if split in wanted:
            windows = (TokenWindows(part, options.length, offset, count) for offset in (0, 1))
            arrays.pairs[split] = next(windows), next(windows)
    arrays.classes = class_count(table, vocabulary, str(file))
    return arrays


def _numbered(file: Path, unit: str) -> tuple[NDArray[Any], int]:
    """Returns a file's characters as indices in its vocabulary, and the vocabulary's size.

    Raises:
        DataError: The file cannot be read, or is not UTF-8.
    """
    content = content_of(file)
    if unit == "characters":
        try:
            content = bytearray(content.decode("utf-8"), "utf-32-le")
        except UnicodeDecodeError as error:
            told = f"byte {error.start} is not UTF-8 ({error.reason}); data.options.unit = 'bytes' reads any file"
            raise DataError(f"{file}: {told}") from None
    points = np.frombuffer(content, "<u4" if unit == "characters" else np.uint8)
    there = np.zeros(_CODE_POINTS, bool)
    there[points] = True
    count = int(there.sum())
    numbers = np.cumsum(there) - 1
    return numbers.astype(np.min_scalar_type(max(0, count - 1)))[points], count


READERS = {"text": read_text}
