"""Benchmarks of Rudra itself: each beside its alternative in one run, as ratios, with the physical bound."""

import importlib
import json
import os
import platform
from importlib import metadata
from typing import Any

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
        ">= 2.0, 1.5, 1.1 times its steps/s at μ = 4, 16, 64, and 1.2 for 289 MB, by allreduce, and 0.88, 0.95, 0.97, "
        "0.97 of what is possible without communication; by the server >= 1.0, and 0.75, 0.88, 0.93, 0.93 of it",
    ),
    "tta": (
        "time to accuracy of two learners, by protocol, against torch DDP; needs Fashion-MNIST or CIFAR-10",
        "the best of ours >= 1.5 times as fast as the best DDP",
    ),
    "averaging": (
        "averages of replicas with every mini-batch (sma), of 18 MB and 289 MB, against what memory allows",
        ">= 0.9 of the bound",
    ),
    "overlap": (
        "communication that hides behind computation: base and adv* with a 289 MB model",
        "overlap >= 99.5 %; 0.97 of compute alone, with two learners, too; behind 10 Gbit/s: 95 % and 0.72",
    ),
    "pingpong": (
        "push, average and pull of a 289 MB model, against raw MPI ping-pong and that average",
        ">= 1.8 times its bandwidth",
    ),
    "requests": (
        "pushes/s of 1.7 MB that a server takes from 1, 2 and 4 senders, and how evenly",
        ">= 2.0 times those by messages; each sender within 5 % of the mean",
    ),
    "shards": (
        "pushes/s that several servers take which share the weights (topology sharded), against one",
        ">= 3 times with 4 servers behind 10 Gbit/s, in virtual time; >= 0.9 with 2 on the ranks of this machine",
    ),
    "reduction": (
        "hardsync by allreduce on two hosts behind 1 Gbit/s: gradients added on each node first, against all to all",
        'steps/s of reduction = "nodes" >= those of "ordered"',
    ),
    "islands": (
        "DiLoCo, an average every 50 mini-batches, against hardsync by allreduce; two hosts behind 100 Mbit/s",
        ">= 5 times its samples/s, in whichever order hardsync adds",
    ),
    "placed": (
        "layers on a stage server (RALP, merged) against whole models: behind 100 Mbit/s, 1 Gbit/s, and on one host",
        ">= 5 times the samples/s of base behind 100 Mbit/s, 0.8 of what bytes foretell; >= 0.9 on one host",
    ),
    "update": ("the server's update of a 289 MB model, against memory bandwidth", ">= 0.9 of the bound"),
    "sparse": (
        "sparse inputs (44 of 8,315 features) against dense ones: the first layer, and the step of 8,315-512x4-2",
        ">= 20 times as fast, and >= 5 times",
    ),
    "memory": ("peak memory of learner and server, in model sizes", "learner <= 3.5; server <= 4, +1 with a snapshot"),
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
        "test errors of the paper's Figure 5 and Table 2 on few images, three seeds; needs CIFAR-10 (data/cifar-10)",
        "the paper's order at every seed",
    ),
    "ralp": (
        "the RALP paper's Tables 1 to 4 and Figure 2 beside ours, and how well its rule and `auto` cut",
        "Tables 1 and 2 to two decimals; auto within 5 % of the better of placed and whole",
    ),
    "faults": (
        "learners, servers and whole jobs killed at random moments, on real ranks: who survives, and what is left",
        "all survive or recover, within 10 s, every file readable",
    ),
    "neighbours": (
        "learners, servers and group members killed while others read their memory, with checksums",
        "nothing changed while it was read; no hang; all runs go on, or begin again",
    ),
    "hogbatch": (
        "workers that share weights in a window: two against one and against torch's Hogwild; workers killed",
        ">= 1.7 times the samples/s of one; >= 1.5 times torch's at μ = 1 and 8; <= 3 % waiting; all go on",
    ),
    "unlike": (
        "who is first to 95 % of the drop in loss: small workers, large ones, or both under each rule; needs data",
        "fixed and adaptive before either kind alone, the small worker with >= 95 % and 45 to 60 % of the updates",
    ),
    "scaling": ("time per epoch in virtual time, 4 to 4,096 learners, every topology: where it saturates", "no goal"),
}


def listing() -> str:
    """The benchmarks with their goals."""
    lines = [f"  {name:12}{what}\n{'':14}goal: {goal}" for name, (what, goal) in BENCHMARKS.items()]
    return "\n".join(["benchmarks:", *lines])


def measure(name: str, *, quick: bool, as_json: bool, **more: Any) -> None:
    """Runs a benchmark and prints what it found, whether it reaches its goals or not.

    Args:
        name: which one.
        quick: the smallest sizes.
        as_json: prints one JSON object.
        more: keyword arguments of this benchmark alone.

    Raises:
        RudraError: it failed.
    """
    load = os.getloadavg()[0]
    if load > 0.3 * cores() and not quick:
        log.warning(f"warning: the machine is busy (load {load:.1f}); figures may be off")
    report: Report = importlib.import_module(f"rudra.bench.{name}").run(quick=quick, **more)
    if as_json:
        print(json.dumps({"benchmark": name, "quick": quick, **_machine(load), **report.as_dict()}), flush=True)
    else:  # what is so small says nothing of goals
        print(f"{name}: {BENCHMARKS[name][0]}\n\n{report.as_text(goals=not quick)}\n", flush=True)


def _machine(load: float) -> dict[str, Any]:
    versions = {f"{name}_version": metadata.version(name) for name in ("torch", "numpy", "mpi4py")}
    return {"cores": cores(), "load": load, "processor": platform.processor() or platform.machine(), **versions}
