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
    """The schema of each key, by `table.key`; hooks are no table."""
    tables = json.loads(text())["properties"]
    return {
        f"{table}.{key}": about
        for table, schema in tables.items()
        for key, about in schema.get("properties", {}).items()
    }


def named(key: dict[str, Any]) -> Iterator[str]:
    """The values that a key's schema names: those of an enumeration, or true and false; perhaps none."""
    if key.get("type") == "boolean":
        yield from ("true", "false")
    yield from key.get("enum", [key["const"]] if "const" in key else [])
    for either in key.get("anyOf", []):
        yield from named(either)
