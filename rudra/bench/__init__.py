"""Benchmarks of an installed Rudra: users run them on their own machines in order to decide something.

A benchmark is a module with a function `run(*, quick)`. It measures Rudra and an alternative in turns, in one run, and
returns a `Report` with their ratios. A checkout has more benchmarks, in its directory `benchmarks`.
"""

import importlib
import json
import os
import platform
import sys
from collections.abc import Mapping
from functools import partial
from importlib import metadata
from inspect import signature
from typing import Any

from rudra import package_check
from rudra.benchmark_report import Report
from rudra.log import log
from rudra.machine import cores

BENCHMARKS = {  # name -> description and goal
    "ddp": (
        "hardsync by allreduce and through the server, against torch DDP on gloo",
        ">= 2.0, 1.5, 1.1 times its steps/s at μ = 4, 16, 64, and 1.2 for 289 MB, by allreduce, and 0.88, 0.95, 0.97, "
        "0.97 of the rate without communication; by the server >= 1.0, and 0.75, 0.88, 0.93, 0.93 of that rate",
    ),
    "overhead": (
        "Rudra's own time per step at one learner, against a plain torch loop",
        "<= 3 % of the step at μ = 16",
    ),
    "pingpong": (
        "push, average and pull of a 289 MB model, against raw MPI ping-pong and that average",
        ">= 1.8 times its bandwidth",
    ),
    "overlap": (
        "communication that hides behind computation: base and adv* with a 289 MB model",
        "overlap >= 99.5 %; 0.97 of the rate without communication, also with two learners",
    ),
    "prediction": ("predicted against measured time per epoch here, calibrated in the same run", "within 10 %"),
    "evaluation": ("samples/s with and without an evaluation of each epoch's weights", "no goal"),
}
IN_CHECKOUT = "benchmarks"


def tables() -> dict[str, Mapping[str, tuple[str, str]]]:
    """Returns the tables of the available benchmarks, by the package of their modules."""
    found: dict[str, Mapping[str, tuple[str, str]]] = {__name__: BENCHMARKS}
    if (package_check.ROOT / IN_CHECKOUT / "__init__.py").is_file():
        found[IN_CHECKOUT] = package_check.load(IN_CHECKOUT).BENCHMARKS
    return found


def known() -> dict[str, str]:
    """Returns the names of the available benchmarks, each with a text about what it compares."""
    return {name: what for table in tables().values() for name, (what, _) in table.items()}


def listing() -> str:
    """Returns the available benchmarks and their goals, as text."""
    lines = []
    for package, table in tables().items():
        lines += ["", f"benchmarks{' of a checkout' * (package == IN_CHECKOUT)}:"]
        lines += [f"  {name:12}{what}\n{'':14}goal: {goal}" for name, (what, goal) in table.items()]
    return "\n".join(lines[1:])


def module_of(name: str) -> Any:
    """Imports the module of a benchmark."""
    package = next(package for package, table in tables().items() if name in table)
    return importlib.import_module(f"{package}.{name}")


def measure(name: str, *, quick: bool, as_json: bool, **more: Any) -> bool:
    """Runs a benchmark and prints its results, whether it reaches its goals or not.

    A benchmark whose function `run` has an argument `show` gets a function that prints a line before the results.

    Args:
        name: name of the benchmark.
        quick: whether to use the smallest sizes.
        as_json: whether to print one JSON object.
        more: keyword arguments that only this benchmark accepts.

    Returns:
        Whether all rows were measured: no error has ended one.

    Raises:
        RudraError: the benchmark failed.
    """
    load = os.getloadavg()[0]
    if load > 0.3 * cores() and not quick:
        log.warning(f"warning: the machine is busy (load {load:.1f}); figures may be off")
    if (root := str(package_check.ROOT)) not in sys.path[:1]:
        sys.path.insert(0, root)  # ranks import the benchmark from here
    run = module_of(name).run
    if "show" in signature(run).parameters:
        more["show"] = (lambda line: None) if as_json else partial(print, flush=True)
    report: Report = run(quick=quick, **more)
    if as_json:
        print(json.dumps({"benchmark": name, "quick": quick, **_machine(load), **report.as_dict()}), flush=True)
    else:  # the smallest sizes cannot show whether goals are reached
        print(f"{name}: {known()[name]}\n\n{report.as_text(goals=not quick)}\n", flush=True)
    return not report.failures


def _machine(load: float) -> dict[str, Any]:
    versions = {f"{name}_version": metadata.version(name) for name in ("torch", "numpy", "mpi4py")}
    return {"cores": cores(), "load": load, "processor": platform.processor() or platform.machine(), **versions}
