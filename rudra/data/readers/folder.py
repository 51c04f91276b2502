"""Reader of image files in one directory per class."""

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

ANNOTATIONS = "val_annotations.txt"
"""File of Tiny ImageNet: a line for each image in `images`, with file name, class and a box, separated by tabs."""

_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".ppm", ".tif", ".tiff")


class FolderOptions(Table):
    size: int = Field(224, ge=1, le=1 << 14, description="width and height that images are brought to")
    test: str | None = Field(None, description="directory of the test set. Default: test, or val if that is missing")
    threads: int | None = Field(None, ge=1, le=256, description="that decode. Default: as many as cores, up to 4")


def read_folder(table: DataTable, wanted: Collection[str]) -> Arrays:
    """Images in path/train/CLASS/ and path/test/CLASS/ or path/val/CLASS/, decoded when they are drawn.

    Images in subdirectories of a class's directory also belong to the class. Classes are numbered in the order of
    their directories' names in train. Tiny ImageNet's test set is read in its original layout: all images in one
    directory, and their classes in a file.
    """
    options = checked(FolderOptions, table.options, "data", "options")
    root = path_of(table)
    directories = {"train": root / "train"}
    if not os.path.isdir(root / "train"):
        raise DataError(f"{root}: there is no directory train, with a directory for each class")
    tests = [name for name in ("test", "val") if os.path.isdir(root / name)] if options.test is None else [options.test]
    tests.sort(key=lambda name: not _is_annotated(root / name))  # Tiny ImageNet's directory test has no classes
    if tests:
        directories["test"] = root / tests[0]
    numbers = {name: number for number, name in enumerate(_classes(directories["train"]))}
    count = class_count(table, len(numbers), str(directories["train"]))
    arrays = Arrays((3, options.size, options.size), count, 1 / 255)
    for split, directory in directories.items():
        annotated = split == "test" and _is_annotated(directory)
        files, labels = (_annotated if annotated else _files)(directory, numbers)
        arrays.counts[split] = len(files)
        if split in wanted:
            _check_header(files[0])
            images = Images(files, options.size, options.threads or min(4, cores()))
            arrays.pairs[split] = images, Dense(np.array(labels, np.int64))
    return arrays


def _classes(directory: Path) -> list[str]:
    """Returns the names of the subdirectories."""
    visible = [entry for entry in entries_in(directory) if not entry.name.startswith(".")]
    found = [entry.name for entry in visible if os.path.isdir(entry.path)]
    if not found:
        raise DataError(f"{directory}: there is no directory of a class")
    return found


def _files(directory: Path, numbers: dict[str, int]) -> tuple[list[str], list[int]]:
    """Returns all images of a split by class and name, and the number of each image's class."""
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


def _is_annotated(directory: Path) -> bool:
    """Returns whether a file gives the classes of images that are not in directories of classes."""
    return os.path.isfile(directory / ANNOTATIONS) and os.path.isdir(directory / "images")


def _annotated(directory: Path, numbers: dict[str, int]) -> tuple[list[str], list[int]]:
    """Returns images and numbers of classes like `_files`, if a file gives the classes."""
    source = directory / ANNOTATIONS
    try:
        lines = source.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{source}: cannot read: {error}") from None
    files: list[str] = []
    labels: list[int] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        name, _, rest = line.partition("\t")
        kind = rest.partition("\t")[0].strip()
        file = directory / "images" / name
        if kind not in numbers:
            raise DataError(f"{source}:{number}: the training set has no class {kind!r}")
        if os.path.basename(name) != name or not os.path.isfile(file):
            raise DataError(f"{source}:{number}: there is no image {name!r} in {directory / 'images'}")
        files.append(str(file))
        labels.append(numbers[kind])
    if not files:
        raise DataError(f"{source}: names no image")
    return files, labels


def _images(directory: str, above: tuple[str, ...] = ()) -> list[str]:
    """Returns all images in a directory, then in its subdirectories, by name. `above` are the real paths of its
    parents."""
    path = (*above, os.path.realpath(directory))
    if path[-1] in above:
        return []  # a link to a parent
    paths = [entry.path for entry in entries_in(Path(directory)) if not entry.name.startswith(".")]
    files = [each for each in paths if each.lower().endswith(_SUFFIXES) and not os.path.isdir(each)]
    return files + [file for each in paths if os.path.isdir(each) for file in _images(each, path)]


def _check_header(file: str) -> None:
    """Raises DataError if Pillow is missing, or a file is not an image."""
    if importlib.util.find_spec("PIL") is None:
        raise DataError("[data] name = folder needs Pillow: pip install 'rudra[images]'")
    with picture(file):
        pass


READERS = {"folder": read_folder}
