"""The tables of a job, as the code declares them: keys, what is allowed, defaults, meaning."""

import inspect
import types
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from rudra.compute.networks import MODELS
from rudra.job.job import Job
from rudra.job.jobfiles import shipped_jobs
from rudra.job.table import Table
from tests.docs import markdown
from tests.docs.markdown import code, plain

_LARGE = 2**15
"""Bounds above are those of the file format, and nobody's concern."""


def tables() -> dict[str, type[Table]]:
    """Every table that a job may have, also inside another one: `optimizer`, `optimizer.groups`, …"""
    found: dict[str, type[Table]] = {}

    def add(prefix: str, kind: type[Table]) -> None:
        for key, field in kind.model_fields.items():
            for inner in _kinds(field.annotation):
                if isinstance(inner, type) and issubclass(inner, Table):
                    found[prefix + key] = inner
                    add(f"{prefix}{key}.", inner)

    add("", Job)
    return found


def table(name: str) -> list[str]:
    """The keys of one table."""
    kind = tables()[name]
    rows = [
        (code(key), allowed(field), default(field), plain(field.description or ""))
        for key, field in kind.model_fields.items()
    ]
    return markdown.table(["key", "value", "default", "meaning"], rows)


def file(name: str) -> list[str]:
    """Returns the text of a shipped job, as a block of code."""
    return ["```toml", *shipped_jobs()[name].read_text(encoding="utf-8").rstrip().split("\n"), "```"]


def models() -> list[str]:
    """The options of the networks that come with Rudra."""
    rows = []
    for name, factory in MODELS.items():
        options = list(inspect.signature(factory).parameters.values())[2:]  # after input_shape and classes
        given = ", ".join(code(f"{option.name} = {_toml(option.default)}") for option in options)
        rows.append((code(name), given, plain((inspect.getdoc(factory) or "").partition("\n")[0])))
    return markdown.table(["`model.name`", "`model.options` and their defaults", "network"], rows)


def default(field: FieldInfo) -> str:
    """What a key is where a job leaves it out; empty where nothing stands for it."""
    if field.is_required() or field.validate_default:  # the latter would be refused
        return "must be given"
    return "" if field.default is None or isinstance(field.default, Table) else code(_toml(field.default))


def allowed(field: FieldInfo) -> str:
    """What a key may be: words, or a kind of value and its bounds."""
    if isinstance(field.annotation, type) and issubclass(field.annotation, Table):
        return "table"
    kinds = [kind for kind in _kinds(field.annotation) if kind is not type(None)]
    if words := [code(_toml(word)) for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]:
        lists = [f"or {text}" for kind in kinds if (text := _several(kind))]
        return ", ".join([*(["`true`, `false`"] if bool in kinds else []), *words, *lists])
    named = [_KINDS[kind] for kind in kinds if kind in _KINDS]
    named += [text for kind in kinds if (text := _several(kind))]
    if field.annotation is Any:
        return "text"
    return " or ".join(dict.fromkeys(named)) + _bounds(field)


_KINDS: dict[Any, str] = {
    bool: "`true`, `false`",
    int: "whole number",
    float: "number",
    str: "text",
    Path: "path",
}


def _several(kind: Any) -> str:
    """What lists and tables are called; nothing where it is neither."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is dict:
        return "table"
    if origin in {list, tuple}:
        each = _kinds(inner[0])
        if any((isinstance(part, type) and issubclass(part, Table)) or get_origin(part) is dict for part in each):
            return "list of tables"
        if get_origin(inner[0]) is tuple:
            return "list of pairs"
        return f"list of {_KINDS[next(part for part in each if part in _KINDS)]}s"
    return ""


def _bounds(field: FieldInfo) -> str:
    signs = {Ge: ("≥", "ge"), Gt: (">", "gt"), Le: ("≤", "le"), Lt: ("<", "lt")}
    bounds = []
    for bound in (each for each in field.metadata if type(each) in signs):
        sign, attribute = signs[type(bound)]
        number = getattr(bound, attribute)
        if number < _LARGE or type(bound) is Le:
            bounds.append(f"{sign} {number:,}")
    return f" {' and '.join(bounds)}" if bounds else ""


def _kinds(annotation: Any) -> tuple[Any, ...]:
    """The kinds of value that an annotation allows."""
    if get_origin(annotation) is Annotated:
        return _kinds(get_args(annotation)[0])
    if get_origin(annotation) in {Union, types.UnionType}:
        return tuple(inner for part in get_args(annotation) for inner in _kinds(part))
    if get_origin(annotation) in {tuple, list}:
        inner = get_args(annotation)[0]
        if isinstance(inner, type) and issubclass(inner, Table):
            return (annotation, inner)
    return (annotation,)


def _toml(value: Any) -> str:
    """A value as a job file writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        short = f"{value:g}".replace("e+", "e")
        return short if "e" in short or "." in short else f"{short}.0"
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return str(value)
