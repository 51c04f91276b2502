"""What comes with Rudra, by what each file says of itself."""

import importlib
import inspect
from collections.abc import Mapping

import benchmarks
import protocols
import topologies
from rudra import bench
from rudra.cli.main import names
from rudra.compute.networks import MODELS
from rudra.compute.tasks import TASKS
from rudra.data.readers import READERS
from rudra.job.jobfiles import shipped_jobs
from tests.docs import markdown
from tests.docs.markdown import code, plain, sentence


def sections() -> list[str]:
    """A table for each kind of thing that a job or a command line may name."""
    rules = {name: inspect.getmodule(rule) for name, rule in protocols.shipped().items()}
    corrections = {name: inspect.getmodule(rule) for name, rule in protocols.corrections().items()}
    commands = {name: importlib.import_module(f"rudra.cli.{name}").SUMMARY for name in names()}
    jobs = {name: file.read_text(encoding="utf-8").partition("\n")[0][2:] for name, file in shipped_jobs().items()}
    lines = [
        *_table("Protocols", "`[protocol] name`", _described(rules)),
        *_table("Corrections of gradients", "`[protocol] correction`", _described(corrections)),
        *_table("Topologies", "`[topology] name`", _described(topologies.shipped())),
        *_table("Data", "`[data] name`", _described(READERS)),
        *_table("Models", "`[model] name`", _described(MODELS)),
        *_table("Tasks", "`[task] name`", _described(TASKS)),
        *_table("Jobs", "`rudra run`, `simulate` and `sweep`", jobs),
        *_table("Commands", "`rudra`", commands),
        *_table("Benchmarks", "`rudra bench`", _compared(bench.BENCHMARKS)),
        *_table("Benchmarks of a checkout", "`rudra bench` there", _compared(benchmarks.BENCHMARKS)),
    ]
    return lines[:-1]


def _compared(table: Mapping[str, tuple[str, str]]) -> dict[str, str]:
    return {name: what for name, (what, _) in table.items()}


def _described(found: Mapping[str, object]) -> dict[str, str]:
    return {name: (inspect.getdoc(thing) or "").partition("\n")[0] for name, thing in found.items()}


def _table(title: str, key: str, rows: Mapping[str, str]) -> list[str]:
    listed = [(code(name), plain(sentence(what))) for name, what in rows.items()]
    return [f"## {title}", "", *markdown.table([key, "what it is"], listed), ""]
