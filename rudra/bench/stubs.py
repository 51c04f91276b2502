"""Stand-ins for what takes time beside communication: the roles and the driver are real, gradients come at once."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from rudra.compute.executor import Executor, LearnerExecutor, ServerExecutor, StatisticsExecutor
from rudra.compute.flat import sha256
from rudra.compute.optim import UpdateRule
from rudra.compute.schedule import schedule_of
from rudra.core.events import Accumulate, Compute, Computed, Finish, Record, Update, Updated
from rudra.job.job import Job
from rudra.job.tables import OptimizerTable
from rudra.mpi.session import rest
from rudra.results.recorder import Recorder
from rudra.roles import make
from topologies import Plan

if TYPE_CHECKING:
    from mpi4py import MPI


class StubLearner(LearnerExecutor):
    """Has its gradient at once, so that push and pull are all there is."""

    def __init__(self, floats: int) -> None:
        Executor.__init__(self, (), floats, floats, 1)

    def compute(self, action: Compute) -> Iterator[Computed]:
        yield Computed(action.step, 0.0, 0, action.work.count)

    def close(self) -> None:
        """There is no input thread."""


class StubServer(ServerExecutor):
    """Updates take no time."""

    def __init__(self, floats: int) -> None:
        Executor.__init__(self, (), floats, floats, 1)

    def accumulate(self, action: Accumulate) -> None: ...

    def update(self, action: Update) -> Updated:
        return Updated(action.timestamp, 0, 0.0)


class UpdatingServer(ServerExecutor):
    """Averages and updates as in a run: SGD with momentum; all weights, or a part of them."""

    def __init__(self, floats: int, part: slice | None = None) -> None:
        length = floats if part is None else part.stop - part.start
        Executor.__init__(self, (), length, length, 1)
        self._part, self._of, self._first_sha256 = part, floats, sha256(np.zeros(floats, np.float32))
        table = OptimizerTable(learning_rate=1e-6, momentum=0.9)
        self._rule = UpdateRule(table, self.buffer("weights").vector)
        self.prepare()


class StubStatistics(StatisticsExecutor):
    def __init__(self, floats: int) -> None:
        Executor.__init__(self, (), floats, floats, 1)


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


def drive(
    comm: "MPI.Comm", job: Job, plan: Plan, executor: Executor, steps: int, *, spins: bool = True
) -> list[dict[str, float]]:
    """Trains; on the statistics server's rank: the account of each learner, and how long the training took."""
    from rudra.mpi.driver import Rank

    account = Account()
    (role,) = plan.on_rank(comm.rank)
    recorder = account if role == plan.statistics else None
    mine = comm.Dup()
    machines = {role: make(role, job, plan, steps, schedule_of(job, plan, steps))}
    Rank(mine, plan, machines, {role: executor}, recorder, spins=spins).run()
    rest(mine)
    mine.Free()
    return account.learners
