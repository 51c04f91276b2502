"""Measures the costs of a job's model on this machine, and writes them as a cost file for other jobs.

Short real runs of async at several μ, with one learner and with several busy learners, give times with every overhead
of a real run. Async does not add gradients, and these runs evaluate no weights. Both are measured in this process.
"""

import json
import math
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray
from tqdm import tqdm

from rudra.core.actions import Accumulate, Compute, Copy, Correct, Evaluate
from rudra.core.buffer_names import GRADIENT, SNAPSHOT, WEIGHTS
from rudra.core.messages import Rows
from rudra.core.wire import tensor_bytes
from rudra.data.load import load
from rudra.errors import EXIT_STOPPED, ConfigError, RunError
from rudra.job.job import Job
from rudra.job.tables import BANK_KEYS, AveragingTable, ClusterTable, HogbatchTable
from rudra.log import only_errors
from rudra.machine import cores
from rudra.mpi.launch import launch
from rudra.prepare.profile import as_toml, final_at, final_toml, needed_at, needed_toml, profile
from rudra.prepare.start import StartRequest
from rudra.results.reader import open_results
from rudra.results.recorder import arithmetic
from rudra.simulation.predict import outline
from rudra.studies.bank_costs import NO_BANKS, BankCosts, measure_banks
from rudra.studies.tcp_cost import cpu_s_per_byte
from topologies import base

if TYPE_CHECKING:
    from rudra.compute.learners import LearnerExecutor, StatisticsExecutor

Runs = Sequence[tuple[Job, StartRequest]]
"""Jobs, each with its beginning."""

Execute = Callable[[Runs], int]
"""Runs several jobs, and returns the exit code."""

LEARNERS = 2
SECONDS = 2.0
"""Computing time of each run. The whole run takes two or three times as long."""

BANK = 8
"""Largest number of learners of a bank that is measured."""

STEPS = 40
"""Minimum number of mini-batches of each learner in a run."""

HARDLY = 1e-12
"""Learning rate of the timed runs. A model that diverges, or learns, might have other costs."""

_WARM = 5  # first mini-batches of each learner, which are left out
_KEPT = 0.98  # share of the times that counts, the shortest first


@dataclass(frozen=True, slots=True)
class TimedRun:
    """Times of one run.

    Attributes:
        minibatch_size: μ.
        learners: λ.
        minibatches: rows of `records.MINIBATCH`.
        updates: rows of `records.UPDATE`.
    """

    minibatch_size: int
    learners: int
    minibatches: Rows
    updates: Rows

    @property
    def steady(self) -> Rows:
        """Pushed mini-batches, without the first ones of each learner."""
        rows = self.minibatches[self.minibatches["step"] >= _WARM]
        return rows[rows["push_s"] > 0]

    @property
    def compute_s(self) -> float:
        return _mean(self.steady["compute_s"])

    @property
    def cycle_s(self) -> float:
        """Mean time from one gradient to the next."""
        return _mean(sum(self.steady[f"{name}_s"] for name in ("compute", "push", "wait", "pull")))

    @property
    def variation(self) -> float:
        """Standard deviation of one learner's compute time from step to step, as a fraction of its mean.

        It uses differences of neighbouring steps, so that a slow drift of the whole machine does not count.
        """
        squares: list[float] = []
        learners: NDArray[np.int32] = self.steady["learner"]
        for learner in range(self.learners):
            compute_s: NDArray[np.float64] = np.sort(self.steady[learners == learner], order="step")["compute_s"]
            squares += (np.diff(compute_s) ** 2 / 2).tolist()
        return math.sqrt(_mean(squares)) / self.compute_s


@dataclass(frozen=True, slots=True)
class Alone:
    """Times measured in a single process.

    Attributes:
        compute_s: μ -> approximate seconds for one gradient, used to choose the length of a run.
        gradient_s: time to add a gradient.
        copy_s: time to copy the weights.
        evaluation_s: time to evaluate the weights.
        samples: number of training samples.
        correction_s: time of the job's correction of a gradient. 0: the job has none.
        cpu_s_per_byte: core's time for a byte that TCP sends or receives.
    """

    compute_s: dict[int, float]
    gradient_s: float
    copy_s: float
    evaluation_s: float
    samples: int
    correction_s: float = 0.0
    cpu_s_per_byte: float = 0.0


def calibrate(
    job: Job,
    *,
    learners: int = LEARNERS,
    sizes: Sequence[int] | None = None,
    bank: int = BANK,
    seconds: float | None = None,
    show: bool = True,
    execute: Execute | None = None,
) -> str:
    """Measures the costs of a job's model.

    Args:
        job: job that defines model, data and optimiser. Its protocol does not matter.
        learners: number of learners that compute at once in the runs with several learners.
        sizes: values of μ to measure, by default a quarter of the job's, the job's, and four times the job's, or as
            many as the training set has.
        bank: largest number of learners of a bank to measure. 1: banks are not measured.
        seconds: computing time of each run, by default `SECONDS`.
        show: show a progress bar.
        execute: runs the timed jobs on ranks that exist. None: ranks are started.

    Returns:
        Text of the cost file.

    Raises:
        RudraError: a mistake in the job, or a run failed.
        KeyboardInterrupt: a run was stopped.
    """
    own = job.training.minibatch_size
    threads = job.cluster.threads_per_rank or max(1, cores() // learners)
    form, job = job.cluster, _timed(job).resolved(learners=1, threads_per_rank=threads)
    info = load(job.data, train=False, test=False, seed=job.training.seed, ignored=job.task.ignored).info
    sizes = sorted(set(sizes or (max(1, own // 4), own, max(own, min(own * 4, info.training_samples)))))
    job.with_(training={"minibatch_size": sizes[-1]}).check_samples(info.training_samples)
    cases = [(size, count) for size in sizes for count in sorted({1, learners})]
    with tqdm(total=1 + len(cases), desc="calibrating: one process", disable=not show, leave=False) as bar:
        alone = measure_alone(job, sizes)
        try:
            layers = as_toml(profile(job, seconds=seconds))
        except ConfigError:  # the model cannot be taken apart
            layers = final_toml(final_at(job, seconds=seconds))
        layers += f"\n{needed_toml(*needed_at(job, seconds=seconds))}"
        banks = measure_banks(job, form, sizes, bank, seconds or SECONDS) if bank > 1 else NO_BANKS
        bar.update()
        plain = job.with_(protocol={"correction": None, "correction_options": {}})  # which is timed by itself
        probes = _probe(plain, cases, alone, seconds or SECONDS, bar, execute)
    return cost_file(job, derive(probes, alone), outline(job).size_bytes, learners, layers, banks)


_NO_BANKS = {key: ClusterTable.model_fields[key].default for key in BANK_KEYS}


def _timed(job: Job) -> Job:
    """Returns the job to time, without unrelated work and with weights that hardly change."""
    rate: dict[str, Any] = {"learning_rate": HARDLY, "schedule": "step", "schedule_options": {}, "milestones": ()}
    return job.without_tests().with_(
        hooks=(),
        changes=(),
        placement={"cut": None},
        topology={"name": "base", "options": {}},
        cluster={"learners_per_rank": 1, "cpu_learners": 0, "shares": (), **_NO_BANKS},
        protocol={"name": "async", "n": None, "modulation": "none", "options": {}},
        hogbatch=HogbatchTable().model_dump(),
        averaging=AveragingTable().model_dump(),
        optimizer={**rate, "warm_up": 0.0, "momentum_correction": "none"},
        training={"epochs": 1, "warm_start": None},
        results={"minibatches": True, "checkpoint_every": "never", "keep_every": None},
        fault_tolerance={"non_finite_loss": "warn", "straggler_timeout_s": None},
    )


def _probe(
    job: Job, cases: Sequence[tuple[int, int]], alone: Alone, seconds: float, bar: Any, execute: Execute | None
) -> list[TimedRun]:
    """Runs all pairs (μ, λ), one after the other on the same ranks."""
    with tempfile.TemporaryDirectory(prefix="rudra-") as name:
        directory, runs = Path(name), []
        for place, (size, learners) in enumerate(cases):
            wanted = max(STEPS, math.ceil(seconds / alone.compute_s[size])) * size * learners
            epochs = math.ceil(wanted / alone.samples)
            about = {"minibatch_size": size, "epochs": epochs}
            own = job.with_(cluster={"learners": learners}, training=about, data={"train_limit": wanted // epochs})
            runs.append((own, StartRequest(directory / f"{place}.h5")))
        with _followed(directory, cases, bar):
            code = _launched(job, cases, directory, runs) if execute is None else execute(runs)
        if code == EXIT_STOPPED:
            raise KeyboardInterrupt
        if code:
            raise RunError(f"{job.name}: a timed run ended with exit code {code}; stderr says why")
        found = []
        for (size, learners), (_, start) in zip(cases, runs, strict=True):
            assert start.output is not None
            with open_results(start.output) as results:
                found.append(TimedRun(size, learners, results.minibatches, results.updates))
        return found


def _launched(job: Job, cases: Sequence[tuple[int, int]], directory: Path, runs: Runs) -> int:
    """Starts ranks for all runs, and returns the exit code."""
    roles = [role.name for role in base.plan([0] * max(learners for _, learners in cases)).roles]
    outcome = launch(job, directory / "runs", roles=roles, payload=partial(run_quietly, runs))
    return EXIT_STOPPED if outcome.stopped else outcome.code


def run_quietly(runs: Runs) -> int:
    """Takes part in several runs as one rank, and reports only errors. Returns the exit code."""
    from rudra.mpi.session import run_all

    with only_errors():
        return run_all(runs)


@contextmanager
def _followed(directory: Path, cases: Sequence[tuple[int, int]], bar: Any) -> Iterator[None]:
    """Shows the run in progress."""
    over = threading.Event()

    def follow() -> None:
        done = -1
        while not over.wait(0.1):
            if (now := len(list(directory.glob("*.done")))) != done:
                bar.update(now - max(done, 0))
                done = now
                if now < len(cases):
                    bar.set_description("calibrating: μ = {}, λ = {}".format(*cases[now]))

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def measure_alone(job: Job, sizes: Sequence[int]) -> Alone:
    """Measures, in this process only, costs that need no other process.

    Args:
        job: resolved job.
        sizes: values of μ.
    """
    from rudra.compute.device.placement import placing, virtual
    from rudra.compute.executor import torch_as_in
    from rudra.compute.first_gradient import try_first_gradient
    from rudra.compute.learners import LearnerExecutor, StatisticsExecutor
    from rudra.compute.making import make_executors
    from rudra.compute.owners import OwnerExecutor
    from rudra.prepare.resolve import settle

    device = virtual(job.cluster.device, window=job.hogbatch.shares_weights)
    plan = job.with_(topology={"name": "base", "options": {}}, cluster={"learners": 1}).plan()
    compute_s = {}
    with torch_as_in(job.cluster):
        loaded = load(job.data, seed=job.training.seed, ignored=job.task.ignored)
        info = loaded.info
        for size in sizes:
            sized = job.with_(training={"minibatch_size": size})
            made = make_executors(
                settle(sized, gradients=try_first_gradient(sized, plan, loaded, device)),
                plan,
                tuple(range(len(plan.roles))),
                loaded,
                prefetch=False,
                device=device,
                placing=placing(device, plan, transport=None),
                rows=False,  # the cost file describes whole vectors
            )
            weights = made[plan.server].buffer(WEIGHTS).vector
            for role in (plan.learners[0], plan.statistics):
                made[role].buffer(WEIGHTS).vector.copy_(weights)
            learner = made[plan.learners[0]]
            assert isinstance(learner, LearnerExecutor)
            compute_s[size] = _median_s(partial(_compute, learner), 4)
        server, statistics = made[plan.server], made[plan.statistics]
        server.buffer(GRADIENT).vector.fill_(1.0)
        gradient_s = _median_s(lambda turn: server.perform(Accumulate("sum", GRADIENT, 0.5, 1.0)), 30)
        copy_s = _median_s(lambda turn: server.perform(Copy(WEIGHTS, SNAPSHOT)), 30)
        correction_s = 0.0
        if isinstance(server, OwnerExecutor) and server.corrector is not None:
            held = WEIGHTS if job.make_correction().needs_pulled_weights else ""
            correction_s = _median_s(
                lambda turn: server.perform(Correct(GRADIENT, WEIGHTS, held, 0, turn, 0, 1, 1)), 30
            )
        assert isinstance(statistics, StatisticsExecutor)
        evaluation_s = _evaluation_s(statistics)
    return Alone(compute_s, gradient_s, copy_s, evaluation_s, info.training_samples, correction_s, cpu_s_per_byte())


def _compute(learner: "LearnerExecutor", step: int) -> None:
    from rudra.compute.device.streams import finished

    finished(learner.perform(Compute(step, learner.source.work.after(step), WEIGHTS, GRADIENT)))


def _evaluation_s(statistics: "StatisticsExecutor") -> float:
    """Returns the time of one evaluation, extrapolated from the batches of one second."""
    from rudra.compute.device.streams import Pending

    began, done = time.perf_counter(), 0
    for found in statistics.perform(Evaluate(WEIGHTS)):
        done += not isinstance(found, Pending)
        if time.perf_counter() - began > 1.0:
            break
    return (time.perf_counter() - began) * max(1.0, statistics.batches / done)


def _mean(times: npt.ArrayLike) -> float:
    """Returns the mean, because rates follow from it, without the slowest times, which other users may cause."""
    taken = np.sort(np.asarray(times, np.float64))
    return float(taken[: max(1, math.ceil(len(taken) * _KEPT))].mean())


def _median_s(do: Callable[[int], object], times: int) -> float:
    """Returns the median duration. The first call, which warms up, does not count."""
    taken = []
    for turn in range(times + 1):
        began = time.perf_counter()
        do(turn)
        taken.append(time.perf_counter() - began)
    return float(np.median(taken[1:]))


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs derived from the measurements, in seconds. Most are keys of `[simulation]`, some per byte there.

    Attributes:
        transfer_s: time to send the model from one rank to another.
    """

    compute_s: dict[int, float]
    node_slowdown: float
    jitter: float
    transfer_s: float
    latency_s: float
    message_s: float
    gradient_s: float
    update_s: float
    copy_s: float
    evaluation_s: float
    correction_s: float
    cpu_s_per_byte: float


def derive(probes: Sequence[TimedRun], alone: Alone) -> Costs:
    """Splits the runs' times into costs.

    With one learner nothing waits for anything else, so each part of a step is one cost. A push is latency plus
    transfer, and a pull is a transfer. Between them the server handles the gradient, updates and answers.

    Args:
        probes: runs with one learner at every μ, and possibly runs with several learners.
        alone: measurements of this process.
    """
    single = {p.minibatch_size: p for p in probes if p.learners == 1}
    several = [p for p in probes if p.learners > 1]
    rows = np.concatenate([p.steady for p in single.values()])
    push_s, wait_s, pull_s = (_mean(rows[f"{name}_s"]) for name in ("push", "wait", "pull"))
    update_s = _mean(np.concatenate([p.updates["update_s"][_WARM:] for p in single.values()]))
    # However the exchange is split into parts, its total must be right, because a rate depends on it.
    transfer_s = max(min(push_s, pull_s), 1e-9)
    rest_s = max(0.0, push_s + wait_s + pull_s - 2 * transfer_s - update_s)
    latency_s = min(push_s - transfer_s, rest_s / 2)
    # This uses the whole cycle: with more ranks than cores, learners also slow each other's exchange down.
    slower = [
        (p.cycle_s - alone_.cycle_s) / alone_.compute_s / (p.learners - 1)
        for p in several
        if (alone_ := single.get(p.minibatch_size))
    ]
    variation = float(np.median([p.variation for p in several or single.values()]))
    return Costs(
        compute_s={size: p.compute_s for size, p in sorted(single.items())},
        node_slowdown=max(0.0, float(np.mean(slower))) if slower else 0.0,
        jitter=min(0.9, math.sqrt(3) * variation),  # the half-width of a uniform distribution
        transfer_s=transfer_s,
        latency_s=latency_s,
        message_s=rest_s - 2 * latency_s,
        gradient_s=alone.gradient_s,
        update_s=update_s,
        copy_s=alone.copy_s,
        evaluation_s=alone.evaluation_s,
        correction_s=alone.correction_s,
        cpu_s_per_byte=alone.cpu_s_per_byte,
    )


def cost_file(
    job: Job, found: Costs, size_bytes: int, learners: int, layers: str = "", banks: BankCosts = NO_BANKS
) -> str:
    """Returns the text of a cost file.

    Args:
        job: measured job, resolved.
        found: costs of the job.
        size_bytes: size of its model on the wire.
        learners: largest number of learners that were busy at once.
        layers: costs of the model's layers, when parts of a gradient are final, and when a forward pass needs its
            parameters, as TOML.
        banks: times of the learners of a bank.
    """
    model = job.model.name if isinstance(job.model.name, str) else job.model.name.__name__
    held = max(1, tensor_bytes(size_bytes))
    corrected = f"\ncorrection_s_per_byte = {found.correction_s / held:.3g}" if found.correction_s else ""
    points = ", ".join(f"{size} = {seconds:.4g}" for size, seconds in found.compute_s.items())
    threads = job.cluster.threads_per_rank or 1
    measured = {
        "date": date.today().isoformat(),
        "processor": arithmetic()["processor"],
        "cores": cores(),
        "learners": learners,
        "threads_per_rank": threads,
        "model_bytes": size_bytes,
        **{f"{name}_version": metadata.version(name) for name in ("torch", "mpi4py")},
    }
    about = "\n".join(f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in measured.items())
    return f"""\
# Measured by `rudra calibrate`. A job of this model finds this file in ~/.cache/rudra, on such a machine. From another
# place, or for another job, name it: [simulation] costs = "THIS FILE"
# One node. For a cluster of such nodes set `nodes`, `latency_s` and `bandwidth_bytes_per_s` of its network too.

nodes = 1
servers_on_first_node = true
cores_per_node = {max(1, cores() // threads)}  # with {threads} thread(s) for each learner
cpu_s_per_byte = {found.cpu_s_per_byte:.3g}  # of TCP
local_latency_s = {found.latency_s:.3g}
local_bandwidth_bytes_per_s = {size_bytes / found.transfer_s:.4g}  # {found.transfer_s * 1e3:.3g} ms for the model
message_s = {found.message_s:.3g}

[models.{json.dumps(model)}]
compute_s = {{ {points} }}  # one learner only{banks.as_toml(found.compute_s)}
node_slowdown = {found.node_slowdown:.3f}  # what each further learner adds
jitter = {found.jitter:.3f}
gradient_s_per_byte = {found.gradient_s / held:.3g}  # {found.gradient_s * 1e3:.3g} ms for all of it
update_s_per_byte = {found.update_s / held:.3g}  # {found.update_s * 1e3:.3g} ms
copy_s_per_byte = {found.copy_s / held:.3g}  # {found.copy_s * 1e3:.3g} ms{corrected}
evaluation_s = {found.evaluation_s:.3g}
evaluation_core_s = {found.evaluation_s:.3g}
{layers}

[measured]
{about}
"""
