"""JSON schema of job files, from which editors and shells complete keys and values without pydantic or torch."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("schema.json")
"""Path of the schema, which `python -m tests.unit.schema` writes from the tables."""


def text() -> str:
    """Returns the schema as JSON."""
    return FILE.read_text(encoding="utf-8")


def job_keys() -> dict[str, dict[str, Any]]:
    """Returns `table.key` -> schema of the key, also for nested tables, but not for lists of tables such as hooks."""
    return dict(_keys(json.loads(text())["properties"], ""))


def _keys(schemas: dict[str, dict[str, Any]], prefix: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for key, schema in schemas.items():
        if "properties" in schema:
            yield from _keys(schema["properties"], f"{prefix}{key}.")
        elif prefix:
            yield prefix + key, schema


def named(key: dict[str, Any]) -> Iterator[str]:
    """Yields the values that a key's schema lists: the members of an enumeration, or true and false."""
    if key.get("type") == "boolean":
        yield from ("true", "false")
    yield from key.get("enum", [key["const"]] if "const" in key else [])
    for either in key.get("anyOf", []):
        yield from named(either)
