"""Search, reading and overrides of job files, before validation."""

import copy
import importlib.metadata
import os
import re
import tomllib
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from rudra.errors import ConfigError, meant, printable

PAPER = "paper.toml"
"""Name of a file next to job files that is not a job: it contains numbers printed in a paper."""

_NAMED_FILES = 8  # of a directory that was given instead of a job

_DEEPEST = 50  # levels of nested tables and lists
_LONG_KEY = re.compile(rf"""(?<![\w"'-])(?:[\w"'-]++[ \t]*+\.[ \t]*+){{{_DEEPEST}}}""")


def shipped_jobs() -> dict[str, Path]:
    """Lists the jobs that come with Rudra.

    Returns:
        Name such as `"rudra/figure5"` -> path of the TOML file, sorted by name. `Job.load` accepts names and paths.
    """
    files = data_files("jobs", ".toml")
    root = Path(os.path.commonpath([file.parent for file in files])) if files else Path()
    jobs = sorted(file for file in files if file.name != PAPER)
    return {file.relative_to(root).with_suffix("").as_posix(): file for file in jobs}


def data_files(directory: str, suffix: str) -> list[Path]:
    """Lists data files that come with Rudra, from a checkout or an installed wheel.

    Args:
        directory: directory of the files, which may be nested, in the checkout or below the wheel's `share/rudra`.
        suffix: suffix of their names.
    """
    checkout = Path(__file__).resolve().parents[2]
    if (checkout / "setup.cfg").is_file():
        return list((checkout / directory).rglob(f"*{suffix}"))
    listed = importlib.metadata.distribution("rudra").files or []
    located = (Path(str(f.locate())).resolve() for f in listed if f"share/rudra/{directory}/" in f.as_posix())
    return [file for file in located if file.suffix == suffix]


def _find(job: str | Path) -> Path:
    path = Path(job)
    shipped = shipped_jobs()
    if os.path.isdir(path) and str(job) not in shipped:
        inside = sorted(str(file) for file in path.glob("*.toml") if file.name != PAPER)
        several = ", ".join([*inside[:_NAMED_FILES], *(["…"] if len(inside) > _NAMED_FILES else [])])
        raise ConfigError(f"{path}: is a directory; use {several or 'a TOML file; this directory has none'}")
    if path.suffix == ".toml" or os.path.isfile(path):
        if not os.path.isfile(path):  # os.path: the method of Path raises an error for impossible names
            raise ConfigError(f"{path}: no such job file")
        return path
    if str(job) not in shipped:
        valid = f"use a TOML file or one of: {', '.join(shipped)}{meant(str(job), shipped)}"
        raise ConfigError(f"{job}: no such job; {valid}")
    return shipped[str(job)]


def read_job(job: str | Path) -> tuple[Path, dict[str, Any]]:
    """Reads a job file or a shipped job, without validation. Returns its path and its tables.

    Raises:
        ConfigError: there is no such job, or the file is not TOML.
    """
    path = _find(job)
    return path, read_toml(path)


def read_toml(path: Path) -> dict[str, Any]:
    """Reads the tables of a TOML file.

    Raises:
        ConfigError: the file cannot be read, or is not TOML.
    """
    text = ""
    try:
        text = path.read_text(encoding="utf-8-sig")  # editors of Windows begin a file with a mark
        return copy.deepcopy(_tables_of(text))
    except (OSError, ValueError) as error:  # also a number of more than 4,300 digits
        raise ConfigError(f"{path}: {_at_its_line(str(error), text)}") from None
    except RecursionError:
        raise ConfigError(f"{path}: too many nested tables and lists; use {_DEEPEST} levels at most") from None


@lru_cache(maxsize=32)
def _tables_of(text: str) -> dict[str, Any]:
    """Returns the tables of a TOML text. The points of a study read the same files again and again."""
    if _LONG_KEY.search(text):  # the time of tomllib grows with the square of the number of parts of a key
        raise RecursionError
    tables = tomllib.loads(text)
    level: list[Any] = [tables]
    for _ in range(_DEEPEST):
        level = [inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer)]
        level = [inner for inner in level if isinstance(inner, dict | list)]
    if level:
        raise RecursionError
    return tables


def _at_its_line(said: str, text: str) -> str:
    """Returns an error of tomllib with the line of the text that it names."""
    if found := re.fullmatch(r"(.*) \(at line (\d+), column \d+\)", said, re.DOTALL):
        line = text.split("\n")[int(found[2]) - 1].strip()
        return f"line {found[2]}: {found[1]}: {printable(line[:80])}"
    return said


LISTS = ("hogbatch.workers", "hooks", "changes")
"""Keys of a job whose values are lists of tables."""


class Change(NamedTuple):
    """Change of one key of a job.

    Attributes:
        key: Dotted name of the key.
        value: New value. None: the default.
        said: Option or place that requests the change, for errors.
    """

    key: str
    value: Any
    said: str


def parsed(override: str) -> Change:
    """Parses `table.key=value`. The value is read as TOML, else as a plain string. An empty value gives None."""
    key, equals, text = override.partition("=")
    said = f"--set {override}"
    if not equals:
        raise ConfigError(f"{said}: must read table.key=value")
    if not text.strip():
        return Change(key, None, said)
    try:
        return Change(key, tomllib.loads(f"value = {text}")["value"], said)
    except (ValueError, RecursionError):
        return Change(key, text.strip(), said)


def apply(tables: dict[str, Any], change: Change) -> None:
    """Applies a change to a job's tables. It replaces a list of tables, or changes one of them, named by its number.

    Raises:
        ConfigError: the key does not name a key of a table.
    """
    *tables_, last = (part.strip() for part in change.key.split("."))
    if not (last and all(tables_) and (tables_ or last in LISTS)):
        raise ConfigError(f"{change.said}: must read table.key=value")
    place: Any = tables
    for depth, part in enumerate(tables_):
        if not isinstance(place, list):
            place = place.setdefault(part, {})
        elif part.isdecimal() and int(part) < len(place):
            place = place[int(part)]
        else:
            whole = ".".join(tables_[:depth])
            raise ConfigError(f"{change.said}: {whole} has no table {part}; valid: 0 to {len(place) - 1}")
        here = ".".join(tables_[: depth + 1])
        if not isinstance(place, dict) and not (here in LISTS and isinstance(place, list)):
            raise ConfigError(f"{change.said}: {here} is not a table")
    if not isinstance(place, dict):
        raise ConfigError(f"{change.said}: must name one of the tables, such as {'.'.join(tables_)}.0.{last}")
    if change.value is None:
        place.pop(last, None)
    else:
        place[last] = change.value


def possible(key: str, value: Any) -> bool:
    """Returns whether a top-level key of a job can have this type of value."""
    return isinstance(value, str if key == "name" else list if key in LISTS else dict)


def flattened(value: Any, prefix: str = "") -> Any:
    """Converts nested tables to one table with dotted keys. Other values are returned unchanged."""
    if not isinstance(value, dict):
        return value
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        flat |= flattened(inner, f"{prefix}{key}.") if isinstance(inner, dict) else {f"{prefix}{key}": inner}
    return flat
