"""A job file to start from: every table and key, with what it means; keys that few jobs need are commented out."""

import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from rudra.job.job import Job
from rudra.job.table import Table

WIDTH, COLUMN = 120, 32
"""How long lines are, and where what a key means begins, unless its value reaches beyond that."""

COMMON = {
    "model": {"name", "options"},
    "data": {"name"},
    "task": {"name"},
    "training": {"epochs", "minibatch_size", "seed"},
    "optimizer": {"name", "learning_rate", "momentum", "weight_decay", "milestones"},
    "protocol": {"name", "modulation"},
    "topology": {"name"},
    "cluster": {"device"},
}
"""Keys that most jobs set: they stand with their defaults where a job does not set them."""

HEAD = """\
# A line `#key = value` shows a default, and `#key =` a key that has none: remove the first # to set the key.
"""


def commented(tables: Mapping[str, Any], about: str) -> str:
    """The text of a job file.

    Args:
        tables: the keys that the job sets, as TOML has them.
        about: what the job is for.
    """
    lines = [*_wrapped(about), HEAD, *_line("name", Job.model_fields["name"], tables, set())]
    for name, field in Job.model_fields.items():
        kind: Any = field.annotation
        if isinstance(kind, type) and issubclass(kind, Table):
            lines += ["", *_about(kind), f"[{name}]", *_keys(kind, tables.get(name, {}), COMMON.get(name, set()))]
        elif entry := get_args(kind):  # a list of tables
            given = tables.get(name, [])
            lines += ["", *_about(entry[0])]
            for each in given or [{}]:
                lines += [f"{'' if given else '#'}[[{name}]]", *_keys(entry[0], each, set())]
    return "\n".join(lines) + "\n"


def _about(kind: type[Table]) -> list[str]:
    return _wrapped((kind.__doc__ or "").partition("\n")[0])


def _keys(kind: type[Table], given: Mapping[str, Any], common: set[str]) -> Iterator[str]:
    """Keys of a table: first those that have a value, then those that are commented out."""
    for key, field in sorted(kind.model_fields.items(), key=lambda each: each[0] not in given.keys() | common):
        yield from _line(key, field, given, common)


def _line(key: str, field: Any, given: Mapping[str, Any], common: set[str]) -> list[str]:
    """A key, its value, and beside that what it means, or above where there is no space."""
    if key in given:
        assigned = _assigned(key, given[key])
    else:
        default = None if field.is_required() else field.default
        assigned = [f"{'' if key in common else '#'}{key} ={'' if default is None else f' {toml(default)}'}"]
    if len(assigned) > 1 or len(assigned[0]) >= COLUMN:
        return [*_wrapped(field.description), *assigned]
    first, *more = textwrap.wrap(field.description, WIDTH - COLUMN - 2)
    return [f"{assigned[0]:{COLUMN}}# {first}", *(f"{'#':{COLUMN}}# {line}" for line in more)]


def _assigned(key: str, value: Any) -> list[str]:
    """A key and its value: one line, or several where it is too long for one."""
    line = f"{key} = {toml(value)}"
    if len(line) > WIDTH and isinstance(value, Mapping):
        return [f"{key}.{inner} = {toml(each)}" for inner, each in _dotted(value)]
    if len(line) > WIDTH and isinstance(value, list):
        return [f"{key} = [", *(f"    {toml(each)}," for each in value), "]"]
    return [line]


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="# ", subsequent_indent="# ")


def toml(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        inner = ", ".join(f"{key} = {toml(each)}" for key, each in _dotted(value))
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, Sequence):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, float) and "e" in (short := f"{value:g}") and float(short) == value:
        return short
    return str(value)


def _dotted(table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Keys as TOML writes them, those of inner tables behind a dot, and their values."""
    for key, value in table.items():
        name = key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else toml(key)
        if isinstance(value, Mapping) and value:
            yield from ((f"{name}.{inner}", each) for inner, each in _dotted(value))
        else:
            yield name, value
