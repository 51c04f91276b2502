"""Probes on real ranks: each in a launch of its own, or all in the launch that mpirun or srun made."""

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from rudra.errors import EXIT_STOPPED, ConfigError, ResultsError, RudraError, RunError, TopologyError
from rudra.files import written
from rudra.job.job import Job
from rudra.log import log, only_errors
from rudra.machine import cores, memory_limit
from rudra.mpi.launch import LaunchOutcome, launch
from rudra.mpi.loopback import is_one_machine
from rudra.prepare import cost_files
from rudra.prepare.resolve import resolve
from rudra.prepare.start import StartDecision, StartRequest, decide
from rudra.results.reader import Results, open_results
from rudra.studies import calibrate
from rudra.tuning.room import Room

T = TypeVar("T")

COSTS = "costs.toml"
"""Name of the file with the costs that a search has measured."""


class RankDied(RudraError):
    """A rank has died in a probe. The same search continues from its journal."""

    exit_code = EXIT_STOPPED


class ProbeFailed(RudraError):
    """A probe failed on its ranks, which have printed the reason."""

    exit_code = 1


class Ranks(ABC):
    """Real ranks, for probes that train one after the other.

    Attributes:
        TRIES: Number of times that a run starts if its ranks die.
    """

    TRIES = 1
    _threads: int | None = None

    def prepared(self, job: Job, directory: Path) -> tuple[Job, Job, Room]:
        """Returns the user's job with its number of learners, the same with measured costs, and the room of probes.

        Args:
            job: The user's job.
            directory: Directory of the search, which keeps the costs that this measures.

        Raises:
            RudraError: There are too few ranks, or the costs could not be measured.
        """
        self._threads = job.cluster.threads_per_rank
        job, room = self.fitted(job)
        return job, measured(job, directory / COSTS, self), room

    def execute(self, job: Job, output: Path, begin: Path | None) -> Results:
        """Trains the job of a probe. See `rudra.tuning.trainer.Execute`.

        Raises:
            RankDied: A rank died, again if the ranks have been started twice.
            ProbeFailed: The run failed.
            KeyboardInterrupt: The run was stopped.
            RunError: The loss is not finite.
        """
        job = job.with_(
            cluster={"threads_per_rank": self._threads},
            fault_tolerance={"restarts": 0, "on_learner_loss": "stop", "non_finite_loss": "warn"},
        )
        asked = StartRequest(output, force=True, origin=begin, rows=False)
        for left in reversed(range(self.TRIES)):
            outcome = self.train(job, asked)
            who = _dead(output, outcome)
            if not who:
                return _checked(job, output, outcome)
            if left:
                log.error(f"{job.name}: {who} died in a probe, which is started again")
        raise RankDied(f"{job.name}: {who} died in a probe; the same command continues the search")

    @abstractmethod
    def fitted(self, job: Job) -> tuple[Job, Room]:
        """Returns a job with its number of learners, and the room of probes."""

    @abstractmethod
    def train(self, job: Job, asked: StartRequest) -> LaunchOutcome:
        """Trains a job."""

    @abstractmethod
    def calibrated(self, job: Job) -> str:
        """Measures the costs of a job, and returns the text of a cost file."""


class Launches(Ranks):
    """Ranks that are started for each run, as `rudra run` does."""

    TRIES = 2

    def fitted(self, job: Job) -> tuple[Job, Room]:
        return job, Room(node_bytes=memory_limit())

    def train(self, job: Job, asked: StartRequest) -> LaunchOutcome:
        start = decide(job, asked)
        resolved, plan = resolve(job, start.decided, cores=cores())
        names = [plan.names_on(rank) for rank in range(plan.ranks)]
        payload = partial(_launched, resolved, start)
        return launch(resolved, start.output, roles=names, payload=payload, survivable=True)

    def calibrated(self, job: Job) -> str:
        return calibrate.calibrate(job, show=False)


class OneLaunch(Ranks):
    """The ranks of this launch, as rank 0 uses them. Every run trains on the first of them, and the others wait.

    Args:
        call: Executes a task on all ranks: see `rudra.mpi.followers`.
        ranks: Number of ranks.
    """

    def __init__(self, call: Callable[[Callable[[], int]], int], ranks: int) -> None:
        self._call, self._ranks = call, ranks

    def fitted(self, job: Job) -> tuple[Job, Room]:
        try:  # every rank that no server needs becomes a learner, as for `rudra run`
            plan = job.plan() if job.cluster.learners else job.make_topology().fit([0] * self._ranks)
        except ValueError as error:
            raise TopologyError(f"{job.name}: {error}") from None
        if plan.ranks > self._ranks:
            text = f"{job.name}: {job.learners} learners with topology {job.topology.name} need {plan.ranks} ranks"
            raise TopologyError(f"{text}, but the launcher started {self._ranks}; start {plan.ranks}")
        node_bytes = memory_limit() if is_one_machine(os.environ) else math.inf
        return job.with_(cluster={"learners": len(plan.learners)}), Room(self._ranks, node_bytes)

    def train(self, job: Job, asked: StartRequest) -> LaunchOutcome:
        code = self._call(partial(calibrate.run_quietly, [(job, asked)]))
        assert asked.output is not None
        asked.output.with_suffix(".done").unlink(missing_ok=True)
        return LaunchOutcome(code)

    def calibrated(self, job: Job) -> str:
        others = 2  # the servers of topology base
        if self._ranks <= others:
            raise ConfigError(
                f"{job.name}: its costs are not measured, and {self._ranks} ranks cannot measure them; run "
                f"rudra calibrate first, or start {others + 1} ranks or more"
            )
        learners = min(calibrate.LEARNERS, self._ranks - others)
        return calibrate.calibrate(
            job, learners=learners, show=False, execute=lambda runs: self._call(partial(calibrate.run_quietly, runs))
        )


def _launched(job: Job, start: StartDecision) -> int:
    """Part of a rank in a launch of its own."""
    from rudra.mpi.session import run_ranks

    with only_errors():
        return run_ranks(job, start, progress={"mode": "quiet"}, launched=True)[0]


def with_ranks(search: Callable[[Ranks], T]) -> T:
    """Calls a function that searches with real ranks.

    Under mpirun or srun every rank makes this call: rank 0 searches, the others follow, and all get the result.
    """
    from rudra.mpi.forkserver import fork_server
    from rudra.mpi.launch import world_size

    size = world_size()
    if size is None:
        with fork_server():
            return search(Launches())
    from rudra.mpi.followers import led_by_rank0

    return led_by_rank0(lambda call: search(OneLaunch(call, size)))


def measured(job: Job, path: Path, ranks: Ranks) -> Job:
    """Returns a job whose costs are measured. If they are not, this measures them.

    Args:
        job: The user's job.
        path: File for the costs. If it is there, an earlier part of the search has measured them.
        ranks: Ranks to measure with.
    """
    table = job.simulation
    if table.costs is not None or "compute_s" in table.model_fields_set:
        return job
    if not path.is_file():
        if cost_files.source(job) is not None:
            return job
        log.info(f"{job.name}: measuring the costs of its model")
        text = ranks.calibrated(job)
        with written(path) as file:
            file.write(text.encode())
    return job.with_(simulation={"costs": str(path)})


def _dead(path: Path, outcome: LaunchOutcome) -> str:
    """Returns the roles and ranks that died in a run. Empty: none."""
    try:
        with open_results(path) as results:
            events, roles = results.events, results.plan().roles
            lost = {int(row["role"]) for row in events if row["kind"] == b"lost"}
            names = [roles[i].title for i in sorted(lost)]
            reason = str(results.state["reason"])
    except ResultsError:
        names, reason = [], ""
    return ", ".join(names) or ((reason.partition(" died")[0] or "a rank") if outcome.lost else "")


def _checked(job: Job, path: Path, outcome: LaunchOutcome) -> Results:
    """Returns the results of a run without a death.

    Raises:
        RunError: The loss is not finite.
        ProbeFailed: The run failed.
        KeyboardInterrupt: The run was stopped.
    """
    if outcome.stopped or outcome.code == EXIT_STOPPED:
        raise KeyboardInterrupt
    if outcome.code:
        raise ProbeFailed(f"{job.name}: a probe ended with exit code {outcome.code}; the lines before say why")
    results = open_results(path)
    for row in results.epochs:
        if not math.isfinite(loss := row["train_loss"]):
            results.close()
            raise RunError(f"the training loss of epoch {row['epoch']} is {loss}: a smaller learning_rate may help")
    return results
