"""Template of a job file: every table and key with its description. Rarely needed keys are commented out."""

import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rudra.job.job import Job
from rudra.job.table import Table, tables_in

WIDTH, COLUMN = 120, 32
"""Length of lines, and column of the descriptions, unless the value of a key reaches beyond it."""

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
"""Keys that most jobs set. The template writes them with their defaults if the job does not set them."""

HEAD = """\
# A line `#key = value` shows a default, and `#key =` a key that has none: remove the first # to set the key.
"""


def commented(tables: Mapping[str, Any], about: str) -> str:
    """Returns the text of a job file.

    Args:
        tables: tables and keys that the job sets, in the types of TOML.
        about: description of the job.
    """
    lines = [*_wrapped(about), HEAD, *_line("name", Job.model_fields["name"], tables, set())]
    for name, kind, several in tables_in(Job):
        given = tables.get(name, [] if several else {})
        lines += _several(name, kind, given) if several else _section(name, kind, given, COMMON.get(name, set()))
    return "\n".join(lines) + "\n"


def _section(name: str, kind: type[Table], given: Mapping[str, Any], common: set[str]) -> Iterator[str]:
    """Yields the lines of a table and of its inner tables. The header of an empty inner table is commented out."""
    yield from ("", *_wrapped((kind.__doc__ or "").partition("\n")[0]))
    yield f"{'' if given or '.' not in name else '#'}[{name}]"
    yield from _keys(kind, given, common)
    for key, inner, several in tables_in(kind):
        if several:
            yield from _several(f"{name}.{key}", inner, given.get(key, []))
        else:
            yield from _section(f"{name}.{key}", inner, given.get(key, {}), set())


def _several(name: str, kind: type[Table], given: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yields the lines of a list of tables."""
    yield from ("", *_wrapped((kind.__doc__ or "").partition("\n")[0]))
    for each in given or [{}]:
        yield f"{'' if given else '#'}[[{name}]]"
        yield from _keys(kind, each, set())


def _keys(kind: type[Table], given: Mapping[str, Any], common: set[str]) -> Iterator[str]:
    """Yields the lines of the keys of a table, except inner tables: first keys with a value, then the others."""
    tables = {key for key, _, _ in tables_in(kind)}
    keys = {key: field for key, field in kind.model_fields.items() if key not in tables}
    for key, field in sorted(keys.items(), key=lambda each: each[0] not in given.keys() | common):
        yield from _line(key, field, given, common)


def _line(key: str, field: Any, given: Mapping[str, Any], common: set[str]) -> list[str]:
    """Returns the lines of a key: value and description, which is above the key if there is no space after it."""
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
    """Returns a key and its value: one line, or several lines if one is too long."""
    line = f"{key} = {toml(value)}"
    if len(line) > WIDTH and isinstance(value, Mapping):
        return [f"{key}.{inner} = {toml(each)}" for inner, each in _dotted(value)]
    if len(line) > WIDTH and isinstance(value, list):
        return [f"{key} = [", *(f"    {toml(each)}," for each in value), "]"]
    return [line]


def _wrapped(text: str) -> list[str]:
    """Returns a text as lines of comments."""
    return textwrap.wrap(text, WIDTH, initial_indent="# ", subsequent_indent="# ")


def toml(value: Any) -> str:
    """Returns a value in the syntax of TOML."""
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
    """Yields keys in the syntax of TOML, with dots before the keys of inner tables, and their values."""
    for key, value in table.items():
        name = key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else toml(key)
        if isinstance(value, Mapping) and value:
            yield from ((f"{name}.{inner}", each) for inner, each in _dotted(value))
        else:
            yield name, value
