"""What comes with Rudra, for `docs/shipped.md`, and the command that writes it: `python -m tests.unit.shipped`."""

import importlib
import inspect
from collections.abc import Mapping
from pathlib import Path

import protocols
import topologies
from rudra.bench import BENCHMARKS
from rudra.cli.main import names
from rudra.compute.networks import MODELS
from rudra.compute.tasks import TASKS
from rudra.data.readers import READERS
from rudra.job.jobfiles import shipped_jobs

FILE = Path(__file__).resolve().parents[2] / "docs" / "shipped.md"

HEAD = """\
# What comes with Rudra

Of everything below, a job may also name one of your own, as `package.module:callable`. This page is written by
`python -m tests.unit.shipped`, from what each file says of itself.
"""


def text() -> str:
    """The page."""
    rules = {name: inspect.getmodule(rule) for name, rule in protocols.shipped().items()}
    commands = {name: importlib.import_module(f"rudra.cli.{name}").SUMMARY for name in names()}
    jobs = {name: file.read_text(encoding="utf-8").partition("\n")[0][2:] for name, file in shipped_jobs().items()}
    return "\n".join(
        [
            HEAD,
            *_table("Protocols", "`[protocol] name`", _described(rules)),
            *_table("Topologies", "`[topology] name`", _described(topologies.shipped())),
            *_table("Data", "`[data] name`", _described(READERS)),
            *_table("Models", "`[model] name`", _described(MODELS)),
            *_table("Tasks", "`[task] name`", _described(TASKS)),
            *_table("Jobs", "`rudra run`, `simulate` and `sweep`", jobs),
            *_table("Commands", "`rudra`", commands),
            *_table("Benchmarks", "`rudra bench`", {name: what for name, (what, _) in BENCHMARKS.items()}),
        ]
    )


def _described(found: Mapping[str, object]) -> dict[str, str]:
    return {name: (inspect.getdoc(thing) or "").partition("\n")[0] for name, thing in found.items()}


def _table(title: str, key: str, rows: Mapping[str, str]) -> list[str]:
    lines = [
        f"| `{name}` | {what[0].upper() if what[1].isalpha() else what[0]}{what[1:]} |" for name, what in rows.items()
    ]
    return [f"## {title}", "", f"| {key} | |", "|---|---|", *lines, ""]


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
