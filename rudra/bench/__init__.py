"""Benchmarks of Rudra itself: each beside its alternative in one run, as ratios, with the physical bound."""

import argparse
import importlib
import json
import os
import platform
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from rudra.bench.phases import PLACES
from rudra.errors import unknown
from rudra.findings import Report
from rudra.log import log
from rudra.machine import cores

BENCHMARKS = {  # name -> what it compares, and the goal
    "overhead": (
        "Rudra's own time per step at one learner, against a plain torch loop",
        "<= 3 % of the step at μ = 16",
    ),
    "ddp": (
        "hardsync by allreduce and through the server, against torch DDP on gloo",
        ">= 2.0, 1.5, 1.1 times its steps/s at μ = 4, 16, 64, and 1.2 for 289 MB, by allreduce; >= 1.0 by the server",
    ),
    "overlap": (
        "communication that hides behind computation: base and adv* with a 289 MB model",
        "one learner: overlap >= 99.5 % and 0.95 of compute alone; behind 10 Gbit/s: 95 % and 0.7",
    ),
    "pingpong": ("push and pull of a 289 MB model, against raw MPI ping-pong", ">= 0.9 of its bandwidth"),
    "requests": (
        "pushes/s of 1.7 MB that a server takes from 1, 2 and 4 senders, and how evenly",
        "each sender within 5 % of the mean",
    ),
    "update": ("the server's update of a 289 MB model, against memory bandwidth", ">= 0.9 of the bound"),
    "memory": ("peak memory of learner and server, in model sizes", "learner <= 4; server <= 4, +1 with a snapshot"),
    "input": (
        "how long a learner waits for its mini-batches, with and without an input thread, and the steps/s of both",
        "< 2 % of a step of lenet and resnet32, in the way that a run draws them",
    ),
    "compile": ("gradients by torch.compile (training.compile), against the same without it", ">= 1.3 for lenet"),
    "evaluation": ("samples/s with the tests of each epoch's weights on and off", "no goal"),
    "recording": ("what it costs to record a run so that it can be replayed", "<= 1 % of the run"),
    "checkpoint": ("what a checkpoint costs the training beside it", "<= 2 % at one a minute"),
    "simulator": (
        "a simulation against its bare gradients; timing-only runs of up to 4,096 learners",
        "<= 10 % over; >= 200,000 messages/s; 4.1 M pushes in < 120 s",
    ),
    "prediction": ("predicted against measured time per epoch here, calibrated in the same run", "within 10 %"),
    "momentum": (
        "the momentum that asynchrony alone adds, against Omnivore's 1 - 1/g; simulated, real gradients",
        "within 0.05 for exponential step times",
    ),
    "groups": (
        "time per iteration of g compute groups, against Omnivore's model; simulated, and on real ranks",
        "within 15 %",
    ),
    "paper": ("the times of the paper's Tables 2, 3 and 4, against those that the preset p775 predicts", "within 20 %"),
    "topologies": (
        "overlap, minutes per epoch and staleness of base, adv and adv*, against the paper's Tables 1 and 4",
        "overlap within 10 points, adv* >= 99.5 %; times within 20 %",
    ),
    "studies": (
        "test errors of the paper's Figure 5 and Table 2 on few images, three seeds; needs CIFAR-10 in data/cifar-10",
        "the paper's order at every seed",
    ),
    "faults": (
        "learners, servers and whole jobs killed at random moments, on real ranks: who survives, and what is left",
        "all survive or recover, within 10 s, every file readable",
    ),
    "scaling": ("time per epoch in virtual time, 4 to 4,096 learners, every topology: where it saturates", "no goal"),
}

DESCRIPTION = """\
Measures Rudra against what torch, MPI and memory give on this machine, in one run, as ratios.

The machine should have nothing else to do: compared things take turns, and each ratio is the
median over the turns, with the smallest and the largest behind it."""


def main(argv: Sequence[str]) -> int:
    """Runs the benchmarks that the command line names.

    Args:
        argv: arguments after `rudra bench`.

    Returns:
        0 whether goals are reached or not; a benchmark that cannot run raises.

    Raises:
        RudraError: it failed.
    """
    listing = [f"  {name:12}{what}\n{'':14}goal: {goal}" for name, (what, goal) in BENCHMARKS.items()]
    listed = "benchmarks:\n" + "\n".join(listing)
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("rudra bench", description=DESCRIPTION, epilog=listed, formatter_class=raw)
    parser.add_argument("names", nargs="*", metavar="NAME", help="which to run; without one they are listed")
    parser.add_argument("--quick", action="store_true", help="smallest sizes: shows that it works, not how fast")
    parser.add_argument("--json", action="store_true", help="one JSON object per benchmark and line, for scripts")
    about = "of faults: kill every role at every phase of a run, on these topologies, or on all"
    parser.add_argument("--phases", nargs="*", metavar="TOPOLOGY", help=about)
    arguments = parser.parse_args(argv)
    if arguments.phases is not None and arguments.names != ["faults"]:
        parser.error("--phases is an option of faults alone")
    if strange := set(arguments.phases or ()) - PLACES.keys():
        parser.error(f"--phases: topology {unknown(min(strange), PLACES)}")
    for name in arguments.names:
        if name not in BENCHMARKS:
            parser.error(f"benchmark {unknown(name, BENCHMARKS)}")
    if not arguments.names:
        print(listed)
    more = {} if arguments.phases is None else {"phases": arguments.phases}
    for name in arguments.names:
        load = os.getloadavg()[0]
        if load > 0.3 * cores() and not arguments.quick:
            log.warning(f"warning: the machine is busy (load {load:.1f}); figures may be off")
        report: Report = importlib.import_module(f"rudra.bench.{name}").run(quick=arguments.quick, **more)
        if arguments.json:
            print(json.dumps({"benchmark": name, "quick": arguments.quick, **_machine(load), **report.as_dict()}))
        else:  # what is so small says nothing of goals
            text = report.as_text(goals=not arguments.quick)
            print(f"{name}: {BENCHMARKS[name][0]}\n\n{text}\n", flush=True)
    return 0


def _machine(load: float) -> dict[str, Any]:
    versions = {f"{name}_version": metadata.version(name) for name in ("torch", "numpy", "mpi4py")}
    return {"cores": cores(), "load": load, "processor": platform.processor() or platform.machine(), **versions}
