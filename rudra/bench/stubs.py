"""Stubs for slow work other than communication: roles and driver are real, gradients are ready at once."""

import gc
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from rudra.compute.executor import Executor
from rudra.compute.learners import LearnerExecutor, StatisticsExecutor
from rudra.compute.owners import ServerExecutor
from rudra.compute.schedule import schedule_of
from rudra.compute.vectors import Memory
from rudra.core.actions import Accumulate, Compute, Finish, Record, Update
from rudra.core.events import Computed, Updated
from rudra.errors import RunError
from rudra.job.job import Job
from rudra.mpi.quiet import rest
from rudra.results.recorder import Recorder
from rudra.roles import make
from topologies import Plan

if TYPE_CHECKING:
    from mpi4py import MPI

    from rudra.mpi.arena import Arena

Maker = Callable[[Memory | None], Executor]
"""Creates a stub whose buffers are in that memory."""

TOUCHED, RESERVED = 4, 16
"""Number of buffers that each stub allocates in advance, and number of buffers that it may have at most."""


class StubLearner(LearnerExecutor):
    """A learner whose gradient is ready at once, so that only push and pull take time."""

    def __init__(self, floats: int, memory: Memory | None = None) -> None:
        Executor.__init__(self, (), floats, floats, 1, memory=memory)

    def compute(self, action: Compute) -> Iterator[Computed]:
        yield Computed(action.step, 0.0, 0, action.work.count)

    def close(self) -> None:
        """Does nothing, because there is no input thread."""


class StubServer(ServerExecutor):
    """A server whose updates take no time."""

    def __init__(self, floats: int, memory: Memory | None = None) -> None:
        Executor.__init__(self, (), floats, floats, 1, memory=memory)

    def accumulate(self, action: Accumulate) -> None: ...

    def update(self, action: Update) -> Updated:
        return Updated(action.timestamp, 0, 0.0)


class AveragingServer(StubServer):
    """A server that averages gradients in but updates no weights."""

    def __init__(self, floats: int, memory: Memory | None = None) -> None:
        super().__init__(floats, memory)
        self._average = torch.full((floats,), 0.0)

    def update(self, action: Update) -> Updated:
        self._average.lerp_(self.buffer(action.gradient).vector, 0.5)
        return super().update(action)


class StubStatistics(StatisticsExecutor):
    def __init__(self, floats: int, memory: Memory | None = None) -> None:
        Executor.__init__(self, (), floats, floats, 1, memory=memory)


class Account(Recorder):
    """A recorder that keeps the learners' totals and writes no file."""

    def __init__(self) -> None:
        self.learners: list[dict[str, float]] = []

    def idle(self) -> None:
        """Does nothing, because there is no file."""

    def record(self, action: Record) -> None: ...

    def finish(self, role: int, action: Finish) -> None:
        names = ("pushed", "pulls", "push_s", "wait_s", "pull_s")
        time_s = float(action.totals["time_s"][0])
        self.learners = [{**{name: float(row[name]) for name in names}, "time_s": time_s} for row in action.learners]


def stub_job(learners: int, **tables: Any) -> Job:
    """Returns a job under async whose learners push a gradient for each sample, without evaluation."""
    return Job(
        data={"classes": 2},
        training={"epochs": 1, "minibatch_size": 1, "evaluate": False},
        protocol={"name": "async"},
        cluster={"learners": learners, "threads_per_rank": 1},
        **tables,
    )


def kept(executor: Executor) -> Maker:
    """Returns a maker that gives every run the same stub with warm memory. Only runs by messages may use it."""
    return lambda memory: executor


def drive(
    comm: "MPI.Comm", job: Job, plan: Plan, make_executor: Maker, steps: int, *, spins: bool = True
) -> list[dict[str, float]]:
    """Trains and returns, on the statistics server's rank, each learner's totals and the training time."""
    from mpi4py import MPI

    from rudra.mpi.arena import Arena
    from rudra.mpi.bucket_rule import BucketRule, nodes_of
    from rudra.mpi.driver import Rank

    account = Account()
    (role,) = plan.on_rank(comm.rank)
    recorder = account if role == plan.statistics else None
    mine = comm.Dup()
    node = mine.Split_type(MPI.COMM_TYPE_SHARED)
    places = mine.allgather(node.bcast(mine.rank))
    machines = {role: make(role, job, plan, steps, schedule_of(job, plan, steps))}
    arena = Arena()
    executor = make_executor(arena.allocate if job.cluster.node_memory else None)
    if job.cluster.node_memory:
        _meet(node, mine.rank, arena, executor)
    node.Free()
    Rank(
        mine,
        plan,
        machines,
        {role: executor},
        recorder,
        spins=spins and recorder is None,  # as in a session
        arena=arena,
        job=job,
        places=places,
        bucket_rule=lambda plan: BucketRule(job, plan, nodes_of(plan, places), 0, False),
    ).run()
    arena.close()
    del machines, executor, arena
    gc.collect()  # the next run needs the memory before Python finds the cycles that hold it
    rest(mine)
    mine.Free()
    return account.learners


def _meet(node: "MPI.Comm", rank: int, arena: "Arena", executor: Executor) -> None:
    """Lets the ranks of a node map each other's memory, as a session does."""
    names = [f"touched {i}" for i in range(TOUCHED)]
    for use in (executor.buffer, executor.release):
        for name in names:
            use(name)
    failure = arena.meet(node, rank, RESERVED * (executor.size * 4 + executor.tail))
    if failure:
        raise RunError(f"ranks cannot read each other's memory here: {failure}")
