"""Base class of the tables of a job, and one-line messages for mistakes in them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator
from pydantic_core import ErrorDetails

from rudra.errors import ConfigError, meant

Named = str | Callable[..., Any]
"""Name of a shipped object, `package.module:callable`, or (in code) the callable itself."""


class Table(BaseModel):
    """Immutable table of a job, which refuses unknown keys and silent conversions.

    Attributes:
        decides_weights: Class attribute. Whether a run's weights may depend on the keys. If they do, a resumed run and
            a replay need the same values.
    """

    decides_weights: ClassVar[bool] = True

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True, allow_inf_nan=False)

    @property
    def non_defaults(self) -> dict[str, Any]:
        """Keys whose values differ from the defaults, with these values."""
        fields = type(self).model_fields
        return {key: value for key in fields if (value := getattr(self, key)) != fields[key].default}

    @field_validator("*", mode="before")
    @classmethod
    def _unconverted(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuses values that would be converted silently: "16" and true are not numbers, 1 is not true."""
        wanted, texts, is_table = _kinds(cls, info.field_name or "")
        if value is None and type(None) in wanted:
            return value
        if bool in wanted and not isinstance(value, bool) and value not in texts:
            raise ValueError(f"must be {', '.join(['true', *map(repr, texts)])} or false, not {short(value)}")
        if wanted & {int, float} and dict not in wanted and isinstance(value, bool | str) and value not in texts:
            others = f"; also valid: {', '.join(map(repr, texts))}" if texts else ""
            raise ValueError(f"must be a {'whole ' if int in wanted else ''}number, not {short(value)}{others}")
        if not is_table and any(abs(n) >= 2**63 for n in _whole_numbers(value)):
            raise ValueError(f"must be below 2**63, not {short(value)}")
        return value


@cache
def _kinds(table: type[Table], key: str) -> tuple[set[Any], list[str], bool]:
    """Returns the types that a key may have, the texts among its values, and whether it is a table itself."""
    annotation = table.model_fields[key].annotation
    wanted = {annotation, *get_args(annotation)}
    texts = [text for kind in wanted for text in get_args(kind) if isinstance(text, str)]
    return wanted, texts, Table in getattr(annotation, "__mro__", ())


AnyTable = TypeVar("AnyTable", bound=Table)


def tables_in(kind: type[Table]) -> Iterator[tuple[str, type[Table], bool]]:
    """Yields the tables in a table: key, class of the table, and whether the key is a list of tables."""
    for key, field in kind.model_fields.items():
        for inner in (field.annotation, *get_args(field.annotation)[:1]):
            if isinstance(inner, type) and issubclass(inner, Table):
                yield key, inner, inner is not field.annotation


def explain(error: ErrorDetails, model: type[BaseModel]) -> str:
    """Returns a line for a validation error: the key, the wrong value and the valid ones."""
    kinds = ("dict[", "float", "int")  # pydantic adds the part of a union after table and key
    union = next((i for i, part in enumerate(error["loc"]) if i > 1 and str(part).startswith(kinds)), None)
    if union is not None:
        table, *keys = (str(part) for part in error["loc"][:union])
        return f"[{table}] {'.'.join(keys)} must be a number, or a table of numbers"
    unions = {"str", "callable"} if error["type"] in {"string_type", "callable_type"} else set()
    *tables, key = [str(part) for part in error["loc"] if part not in unions | {"[key]"}] or [""]
    for table in tables:
        field = model.model_fields.get(table)
        for kind in () if field is None else (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                model = kind
    where = f"[{tables[0]}] {'.'.join([*tables[1:], key])}" if tables else key
    where += " as a key" if "[key]" in error["loc"] else ""
    if error["type"] == "extra_forbidden":
        place = f"[{'.'.join(tables)}] unknown key" if tables else "unknown table or key"
        valid = model.model_fields
        hint = meant(key, valid) or (f"; an option is written options.{key}" if "options" in valid else "")
        return f"{place} '{key}'; valid: {', '.join(valid)}{hint}"
    if error["type"] == "value_error":
        return " ".join([where, *error["msg"].removeprefix("Value error, ").split()]).strip()
    if error["type"] == "missing":
        named = next(part for part in (key, *reversed(tables)) if part in model.model_fields)  # the rest are positions
        return f"{where} is missing: {model.model_fields[named].description}"
    wanted = _WANTED.get(error["type"]) or error["msg"].removeprefix("Input should be ")
    wanted = wanted.format(**error.get("ctx", {})) + ("" if tables or wanted != "a list" else " of tables")
    return f"{where} must be {wanted}, not {short(error['input'])}"


def checked(kind: type[AnyTable], options: Mapping[str, Any], *where: str) -> AnyTable:
    """Validates options of the job, whose names and types depend on another key.

    Args:
        kind: table of the valid options.
        options: options in the job.
        where: table and key that contain the options, for the error's text.

    Raises:
        ConfigError: an option is unknown or has a wrong type.
    """
    try:
        return kind(**options)
    except ValidationError as error:
        texts = (explain({**e, "loc": (*where, *e["loc"])}, kind) for e in error.errors())
        raise ConfigError("; ".join(dict.fromkeys(texts))) from None


_WANTED = {
    "model_type": "a table",
    "dict_type": "a table",
    "string_type": "a text",
    "callable_type": "a text",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "tuple_type": "a list",
    "path_type": "a path",
    "greater_than": "> {gt:g}",
    "greater_than_equal": ">= {ge:g}",
    "less_than": "< {lt:,.12g}",
    "less_than_equal": "<= {le:,}",
}
"""Type of a validation error -> text for the valid values. Other types use the message of pydantic."""


def _whole_numbers(value: Any) -> Iterator[int]:
    """Yields the whole numbers in a value, at any depth."""
    if isinstance(value, int):
        yield value
    elif isinstance(value, dict | list | tuple):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _whole_numbers(inner)


_INTERVAL = re.compile(r"0*([1-9][0-9]{0,9}) *(update|epoch|s)s?")


def interval(text: str) -> tuple[int, str] | None:
    """Returns an interval such as `2 epochs` as a number and a unit: update, epoch or s. None: it is no interval."""
    found = _INTERVAL.fullmatch(text)
    return None if found is None else (int(found[1]), found[2])


def short(value: Any) -> str:
    """Returns a value as text on one line, cut to 60 characters."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # Python converts no number of more than 4,300 digits to text
        return "a number that long"
    return text if len(text) <= 60 else text[:57] + "..."


def named(value: Named) -> str:
    """Returns the name in a job as a text: the name itself, or `module:name` of a Python object."""
    return value if isinstance(value, str) else name_of(value)


def name_of(value: Any) -> str:
    """Returns `module:name` of a Python object, or a path as text."""
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}:{value.__qualname__}"
    return f"{type(value).__module__}:{type(value).__qualname__}"
