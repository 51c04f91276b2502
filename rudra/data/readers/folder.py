"""Image files in a directory for each class."""

import importlib.util
import os
from collections.abc import Collection
from pathlib import Path

import numpy as np
from pydantic import Field

from rudra.data.readers.common import Arrays, class_count, entries_in, path_of
from rudra.data.sources import Dense, Images, picture
from rudra.errors import DataError
from rudra.job.table import Table, checked
from rudra.job.tables import DataTable
from rudra.machine import cores

_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".ppm", ".tif", ".tiff")


class Options(Table):
    size: int = Field(224, ge=1, le=1 << 14, description="width and height that images are brought to")
    test: str | None = Field(None, description="directory of the test set; default: test, or val if that is missing")
    threads: int | None = Field(None, ge=1, le=256, description="that decode; default: as many as cores, up to 4")


def read_folder(table: DataTable, wanted: Collection[str]) -> Arrays:
    """Images in path/train/CLASS/ and path/test/CLASS/ or path/val/CLASS/, decoded when they are drawn.

    Images in directories below that of a class belong to the class, too. Classes are numbered in the order of
    their directories' names in train.
    """
    options = checked(Options, table.options, "data", "options")
    root = path_of(table)
    directories = {"train": root / "train"}
    if not os.path.isdir(root / "train"):
        raise DataError(f"{root}: there is no directory train, with a directory for each class")
    tests = [name for name in ("test", "val") if os.path.isdir(root / name)] if options.test is None else [options.test]
    if tests:
        directories["test"] = root / tests[0]
    numbers = {name: number for number, name in enumerate(_classes(directories["train"]))}
    count = class_count(table, len(numbers), str(directories["train"]))
    arrays = Arrays((3, options.size, options.size), count, 1 / 255)
    for split, directory in directories.items():
        files, labels = _files(directory, numbers)
        arrays.counts[split] = len(files)
        if split in wanted:
            _check_header(files[0])
            images = Images(files, options.size, options.threads or min(4, cores()))
            arrays.pairs[split] = images, Dense(np.array(labels, np.int64))
    return arrays


def _classes(directory: Path) -> list[str]:
    """Names of the directories in one."""
    found = [
        entry.name for entry in entries_in(directory) if os.path.isdir(entry.path) and not entry.name.startswith(".")
    ]
    if not found:
        raise DataError(f"{directory}: there is no directory of a class")
    return found


def _files(directory: Path, numbers: dict[str, int]) -> tuple[list[str], list[int]]:
    """All images of a split by class and name, and the number of each one's class."""
    files: list[str] = []
    labels: list[int] = []
    for name in _classes(directory):
        if name not in numbers:
            raise DataError(f"{directory / name}: the training set has no class of this name")
        found = _images(str(directory / name))
        if not found:
            raise DataError(f"{directory / name}: there is no image; valid: {', '.join(_SUFFIXES)}")
        files += found
        labels += [numbers[name]] * len(found)
    return files, labels


def _images(directory: str, above: tuple[str, ...] = ()) -> list[str]:
    """All images in a directory, and then in those below it, by name; `above` it are these real paths."""
    path = (*above, os.path.realpath(directory))
    if path[-1] in above:
        return []  # a link leads back
    paths = [entry.path for entry in entries_in(Path(directory)) if not entry.name.startswith(".")]
    files = [each for each in paths if each.lower().endswith(_SUFFIXES) and not os.path.isdir(each)]
    return files + [file for each in paths if os.path.isdir(each) for file in _images(each, path)]


def _check_header(file: str) -> None:
    """Raises DataError where there is no Pillow, or a file is no image."""
    if importlib.util.find_spec("PIL") is None:
        raise DataError("[data] name = folder needs Pillow: pip install 'rudra[images]'")
    with picture(file):
        pass


READERS = {"folder": read_folder}
