"""The JSON schema of job files: what editors and shells know of tables, keys and values, without pydantic or torch."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("schema.json")
"""Written from the tables by `python -m tests.unit.schema`."""


def text() -> str:
    return FILE.read_text(encoding="utf-8")


def job_keys() -> dict[str, dict[str, Any]]:
    """The schema of each key, by `table.key`, also of tables in tables; hooks are no table."""
    return dict(_keys(json.loads(text())["properties"], ""))


def _keys(schemas: dict[str, dict[str, Any]], prefix: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for key, schema in schemas.items():
        if "properties" in schema:
            yield from _keys(schema["properties"], f"{prefix}{key}.")
        elif prefix:
            yield prefix + key, schema


def named(key: dict[str, Any]) -> Iterator[str]:
    """The values that a key's schema names: those of an enumeration, or true and false; perhaps none."""
    if key.get("type") == "boolean":
        yield from ("true", "false")
    yield from key.get("enum", [key["const"]] if "const" in key else [])
    for either in key.get("anyOf", []):
        yield from named(either)
