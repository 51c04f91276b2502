"""`rudra bench`."""

import argparse
from inspect import signature
from pathlib import Path

from rudra.bench import known, listing, measure, module_of, tables
from rudra.errors import EXIT_FAILED, ConfigError, meant, unknown

SUMMARY = "measure Rudra against torch, MPI and memory on this machine"

MORE = f"""\
Each benchmark measures Rudra and its reference in turns, in one run, and prints their ratio: the
median over the turns, with the smallest and the largest in parentheses. The machine should be otherwise idle.
A checkout of Rudra has more benchmarks than an installed package.

{listing()}"""

EXAMPLES = {
    "rudra bench": "list the benchmarks with their goals",
    "rudra bench overhead ddp": "run two of them",
    "rudra bench pingpong --quick": "try one on the smallest sizes, without goals",
    "rudra bench gpu --budget 300": "check and measure a GPU within five minutes",
}

OPTIONS = ("only", "keep", "budget", "device")
"""Options of some benchmarks."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="BENCHMARK", help="benchmarks to run; without one, list them")
    parser.add_argument(
        "--quick", action="store_true", help="use the smallest sizes, only to show that the benchmark works"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object for each benchmark")
    about = "for some benchmarks: only runs with these words, such as sma ddp 32; a wrong word lists the valid ones"
    parser.add_argument("--only", nargs="+", metavar="WORD", help=about)
    about = "for some benchmarks: keep finished runs there, and do not repeat them. gpu: append its rows"
    parser.add_argument("--keep", type=Path, metavar="PATH", help=about)
    about = "gpu: seconds after which it ends, and names what it has left out. Default: 480"
    parser.add_argument("--budget", type=float, metavar="S", help=about)
    about = "gpu: cuda, or host for small sizes on the CPU. Default: cuda, or host with --quick"
    parser.add_argument("--device", metavar="NAME", help=about)


def execute(arguments: argparse.Namespace) -> int:
    for name in arguments.names:
        if name not in known() and len(tables()) > 1:
            raise ConfigError(f"benchmark {unknown(name, known())}")
        if name not in known():
            there = f"installed: {', '.join(known())}"
            raise ConfigError(f"benchmark '{name}' needs a checkout of Rudra; {there}{meant(name, known())}")
    more = {name: value for name in OPTIONS if (value := getattr(arguments, name)) is not None}
    for name in arguments.names:
        for option in more:
            if option not in signature(module_of(name).run).parameters:
                raise ConfigError(f"--{option} is not an option of benchmark {name}")
    if not arguments.names:
        if more:
            raise ConfigError(f"--{next(iter(more))} needs a benchmark; `rudra bench` lists them")
        print(listing())
    measured = [measure(name, quick=arguments.quick, as_json=arguments.json, **more) for name in arguments.names]
    return 0 if all(measured) else EXIT_FAILED
