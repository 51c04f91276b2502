"""`rudra bench`."""

import argparse
from pathlib import Path

from rudra.bench import BENCHMARKS, listing
from rudra.cli.options import at_least
from rudra.errors import ConfigError, unknown

SUMMARY = "measure Rudra against torch, MPI and memory on this machine"

MORE = f"""\
Each benchmark measures Rudra and what it is compared with in turns, in one run, and prints their ratio: the
median over the turns, with the smallest and the largest in parentheses. The machine should be otherwise idle.

{listing()}"""

EXAMPLES = {
    "rudra bench": "list the benchmarks with their goals",
    "rudra bench overhead ddp": "run two of them",
    "rudra bench update --quick": "try one on the smallest sizes, for which no goal counts",
}

OPTIONS = {"phases": ["faults"], "jobs": ["faults"], "times": ["faults"], "only": ["tta", "unlike"], "keep": ["tta"]}
"""Whose benchmarks' they are."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="BENCHMARK", help="benchmarks to run; without one, list them")
    parser.add_argument("--quick", action="store_true", help="smallest sizes: show that it works, not how fast")
    parser.add_argument("--json", action="store_true", help="print one JSON object for each benchmark")
    about = "for `faults`: kill every role at every phase of a run, on these topologies or on all"
    parser.add_argument("--phases", nargs="*", metavar="TOPOLOGY", help=about)
    about = "for `faults`: hit each of these jobs by every kind of fault, each at a random moment, resume and replay it"
    parser.add_argument("--jobs", nargs="+", metavar="JOB", help=about)
    parser.add_argument("--times", type=at_least(1), metavar="N", help="with --jobs: no more than N of these faults")
    about = (
        "for `tta`: only these data, contestants, mini-batch sizes, rates, schedules, such as sma ddp 32 64 cosine; "
    )
    about += "for `unlike`: only these data, scalings, and `virtual` or `ranks`, such as w8a sqrt virtual"
    parser.add_argument("--only", nargs="+", metavar="WORD", help=about)
    about = "for `tta`: keep runs in this file; those that it has are not made again"
    parser.add_argument("--keep", type=Path, metavar="FILE", help=about)


def execute(arguments: argparse.Namespace) -> int:
    from rudra import bench

    for name in arguments.names:
        if name not in BENCHMARKS:
            raise ConfigError(f"benchmark {unknown(name, BENCHMARKS)}")
    more = {name: value for name in OPTIONS if (value := getattr(arguments, name)) is not None}
    for name in more:
        if len(arguments.names) != 1 or arguments.names[0] not in OPTIONS[name]:
            raise ConfigError(f"--{name} is an option of the benchmark {' or '.join(OPTIONS[name])} alone")
    if arguments.times and not arguments.jobs:
        raise ConfigError("--times says how often --jobs are hit; valid: with --jobs")
    if arguments.phases:
        from rudra.bench.phases import PLACES

        for name in arguments.phases:
            if name not in PLACES:
                raise ConfigError(f"--phases: topology {unknown(name, PLACES)}")
    if not arguments.names:
        print(listing())
    for name in arguments.names:
        bench.measure(name, quick=arguments.quick, as_json=arguments.json, **more)
    return 0
