"""Stand-ins for what takes time beside communication: the roles and the driver are real, gradients come at once."""

import gc
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from rudra.compute.executor import Executor
from rudra.compute.learners import LearnerExecutor, StatisticsExecutor
from rudra.compute.owners import ServerExecutor
from rudra.compute.schedule import schedule_of
from rudra.compute.vectors import Memory
from rudra.core.events import Accumulate, Compute, Computed, Finish, Record, Update, Updated
from rudra.errors import RunError
from rudra.job.job import Job
from rudra.mpi.agreement import rest
from rudra.results.recorder import Recorder
from rudra.roles import make
from topologies import Plan

if TYPE_CHECKING:
    from mpi4py import MPI

    from rudra.mpi.arena import Arena

Maker = Callable[[Memory | None], Executor]
"""Makes a stand-in whose buffers lie in that memory."""

TOUCHED, RESERVED = 4, 16
"""Buffers that each stand-in has before it begins, so that none is made meanwhile; and that it may ever have."""


class StubLearner(LearnerExecutor):
    """Has its gradient at once, so that push and pull are all there is."""

    def __init__(self, floats: int, memory: Memory | None = None) -> None:
        Executor.__init__(self, (), floats, floats, 1, memory=memory)

    def compute(self, action: Compute) -> Iterator[Computed]:
        yield Computed(action.step, 0.0, 0, action.work.count)

    def close(self) -> None:
        """There is no input thread."""


class StubServer(ServerExecutor):
    """Updates take no time."""

    def __init__(self, floats: int, memory: Memory | None = None) -> None:
        Executor.__init__(self, (), floats, floats, 1, memory=memory)

    def accumulate(self, action: Accumulate) -> None: ...

    def update(self, action: Update) -> Updated:
        return Updated(action.timestamp, 0, 0.0)


class AveragingServer(StubServer):
    """Averages each gradient in, and updates nothing."""

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
    """Keeps the learners' accounts and no file."""

    def __init__(self) -> None:
        self.learners: list[dict[str, float]] = []

    def idle(self) -> None:
        """There is no file."""

    def record(self, action: Record) -> None: ...

    def finish(self, role: int, action: Finish) -> None:
        names = ("pushed", "pulls", "push_s", "wait_s", "pull_s")
        time_s = float(action.totals["time_s"][0])
        self.learners = [{**{name: float(row[name]) for name in names}, "time_s": time_s} for row in action.learners]


def stub_job(learners: int, **tables: Any) -> Job:
    """A job under async whose learners push a gradient for each sample, and which nobody tests."""
    return Job(
        data={"classes": 2},
        training={"epochs": 1, "minibatch_size": 1, "evaluate": False},
        protocol={"name": "async"},
        cluster={"learners": learners, "threads_per_rank": 1},
        **tables,
    )


def kept(executor: Executor) -> Maker:
    """Gives the same stand-in to every run, so that its memory is warm; for those that go by messages."""
    return lambda memory: executor


def drive(
    comm: "MPI.Comm", job: Job, plan: Plan, make_executor: Maker, steps: int, *, spins: bool = True
) -> list[dict[str, float]]:
    """Trains; on the statistics server's rank: the account of each learner, and how long the training took."""
    from rudra.mpi.arena import Arena
    from rudra.mpi.driver import Rank

    account = Account()
    (role,) = plan.on_rank(comm.rank)
    recorder = account if role == plan.statistics else None
    mine = comm.Dup()
    machines = {role: make(role, job, plan, steps, schedule_of(job, plan, steps))}
    arena = Arena()
    executor = make_executor(arena.allocate if job.cluster.node_memory else None)
    if job.cluster.node_memory:
        _meet(mine, arena, executor)
    spins = spins and recorder is None  # as in a session
    Rank(mine, plan, machines, {role: executor}, recorder, spins=spins, arena=arena).run()
    arena.close()
    del machines, executor, arena
    gc.collect()  # the next run needs the memory before Python finds the cycles that hold it
    rest(mine)
    mine.Free()
    return account.learners


def _meet(comm: "MPI.Comm", arena: "Arena", executor: Executor) -> None:
    """Has the ranks of the node map each other's memory, as a session does."""
    from mpi4py import MPI

    names = [f"touched {i}" for i in range(TOUCHED)]
    for use in (executor.buffer, executor.release):
        for name in names:
            use(name)
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    failure = arena.meet(node, comm.rank, RESERVED * (executor.size * 4 + executor.tail))
    node.Free()
    if failure:
        raise RunError(f"ranks cannot read each other's memory here: {failure}")
