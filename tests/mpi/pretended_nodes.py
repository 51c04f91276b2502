"""Runs on ranks that seem to be on several nodes."""

import os
import signal
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from runs_on_ranks import launch_calls, train_all, train_quietly


def on_nodes(comm: Any, nodes: list[int]) -> Any:
    """The communicator, as if its ranks were on these nodes."""
    from rudra.mpi.quiet import QuietComm

    class OnNodes(QuietComm):
        def Split_type(self, *_: Any, **__: Any) -> QuietComm:
            return self.Split(nodes[self.rank])

    return OnNodes(comm)


def train_on_nodes(comm: Any, directory: Path, jobs: dict[str, tuple[list[int], Any]]) -> dict[str, Any]:
    """As `train_all`, each job on as many ranks as it names the node of, for MPI and all who ask it."""
    from mpi4py import MPI

    from rudra.bench.ranks import rest

    for path, (nodes, job) in jobs.items():
        part = comm.Split(0 if comm.rank < len(nodes) else MPI.UNDEFINED)
        if part != MPI.COMM_NULL:
            train_quietly(job, path, on_nodes(part, nodes))
        rest(comm)
    return {}


def train_among_two_nodes(comm: Any, directory: Path, jobs: dict[str, Any]) -> dict[str, Any]:
    """As `train_all`, where every other rank seems to be on a second node."""
    from topologies import Topology

    fit = Topology.fit

    def interleaved(topology: Topology, places: list[int], learners: int | None = None) -> Any:
        return fit(topology, [rank % 2 for rank in range(len(places))], learners)

    Topology.fit = interleaved  # type: ignore[assignment, method-assign]
    return train_all(comm, directory, jobs)


def slow_network(ranks: list[int]) -> Any:
    """The slowest network that one of these ranks says that it has."""
    from rudra.core.buckets import NetworkSpeed

    return NetworkSpeed(1e-6 * (1 + max(ranks)), 1e6 / (1 + max(ranks)))


def train_on_slow_network(comm: Any, directory: Path, jobs: dict[str, tuple[list[int], Any]]) -> dict[str, Any]:
    """As `train_on_nodes`; where a path says so, ranks say that their network is slow. Returns what each chose."""
    from rudra.bench.ranks import rest
    from rudra.mpi import bucket_choice, session

    chosen, plain, measure = [], session.Rank, bucket_choice.measure

    def made(comm: Any, plan: Any, *about: Any, bucket_rule: Any, **more: Any) -> Any:
        chosen.append(bucket_rule(plan).auto)
        return plain(comm, plan, *about, bucket_rule=bucket_rule, **more)

    def slow(ranks: Any, pairs: Any) -> Any:
        measure(ranks, pairs)
        return slow_network([ranks.comm.rank]) if any(ranks.comm.rank in pair for pair in pairs) else None

    session.Rank = made  # type: ignore[misc, assignment]
    for path, (nodes, job) in jobs.items():
        bucket_choice.measure = slow if "slow" in path else measure
        train_quietly(job, path, on_nodes(comm, nodes))
        rest(comm)
    return dict(zip(jobs, chosen, strict=True))


class _Waits:
    """Share of waiting that is large after the first step."""

    is_large = True

    def begin(self, now: float) -> None:
        pass

    def end(self, now: float) -> bool:
        return True


def train_early_on_nodes(comm: Any, directory: Path, jobs: dict[str, tuple[list[int], Any]]) -> dict[str, Any]:
    """As `train_on_nodes`; also the number of forward passes of this rank that began early, for each file."""
    from rudra.compute.arrivals import Arrivals
    from rudra.compute.gradients import GradientSource
    from rudra.mpi import group_reduction

    Arrivals.worthwhile = lambda *about: True  # however soon these small gradients arrive
    group_reduction.WaitShare = _Waits
    return _counted(comm, directory, jobs, GradientSource, "gradient_of")


def train_replicas_on_nodes(comm: Any, directory: Path, jobs: dict[str, tuple[list[int], Any]]) -> dict[str, Any]:
    """As `train_on_nodes`; also the number of steps of replicas that began with their gradient, for each file."""
    from rudra.compute import step_ahead

    step_ahead.STEPPED = 64
    return _counted(comm, directory, jobs, step_ahead.StepAhead, "complete")


def _counted(
    comm: Any, directory: Path, jobs: dict[str, tuple[list[int], Any]], owner: type, method: str
) -> dict[str, Any]:
    """As `train_on_nodes`; also the number of calls of a method in this process, for each file."""
    used, plain = Counter[str](), getattr(owner, method)
    for path in jobs:

        def counted(*args: Any, path: str = path) -> Any:
            used[path] += 1
            return plain(*args)

        setattr(owner, method, counted)
        train_on_nodes(comm, directory, {path: jobs[path]})
    setattr(owner, method, plain)
    return {"early": {path: used[path] for path in jobs}}


def launch_on_nodes(nodes: list[int], dies: int | None = None) -> None:
    """Lets the ranks that this process launches be as if on these nodes. One may die while it measures the network."""
    launch_calls(partial(run_on_nodes, nodes, dies))


def run_on_nodes(nodes: list[int], dies: int | None, payload: dict[str, Any]) -> int:
    from mpi4py import MPI

    from rudra.mpi import network_test
    from rudra.mpi.session import run_ranks

    if MPI.COMM_WORLD.rank == dies:
        network_test._answer = network_test._round_trip_s = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    return run_ranks(**payload, comm=on_nodes(MPI.COMM_WORLD, nodes))[0]
