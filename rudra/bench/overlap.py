"""Communication that overlaps with computation, on real ranks: Rudra-base against adv*, 72 M parameters, μ = 4.

Both are measured in turns, with shared node memory and with messages.

Overlap is compute / (compute + the learner's wait for communication), as in Table 1 of the paper. This figure flatters:
a thread that spins in MPI hides its transfer, but slows down the computation. So the report also compares steps per
second and the time per gradient with computing without communication.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from rudra.bench.ranks import LEARNER, alexnet_job, on_ranks, train
from rudra.benchmark_report import Goal, Report, Spread, ratios, spread
from rudra.compute.device.streams import finished
from rudra.compute.first_gradient import try_first_gradient
from rudra.compute.learners import LearnerExecutor
from rudra.compute.making import make_executors
from rudra.core.actions import Compute
from rudra.core.buffer_names import GRADIENT, WEIGHTS
from rudra.core.records import TIMES
from rudra.data.load import load
from rudra.job.job import Job
from rudra.mpi.quiet import rest
from rudra.prepare.resolve import settle
from topologies import Plan, base

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpi4py import MPI

BY_MESSAGES = ", by messages"
WARM_UP = 2  # first steps, which are left out
SIZES: dict[str, Any] = {"size": 4, "steps": 10, "rounds": 6, "options": {}}
SMALLEST: dict[str, Any] = {"size": 1, "steps": 5, "rounds": 1, "options": {"width": 64}}


class Direct:
    """Topology adv* without intermediate servers: with one learner there are no gradients to average."""

    @staticmethod
    def plan(nodes: "Sequence[int]") -> Plan:
        return replace(base.plan(nodes), overlapped=True)


def run(*, quick: bool) -> Report:
    """Measures one and two learners of one torch thread each over shared memory."""
    report = new_report()
    for count, least in (1, 0.995), (2, None):
        if count == 1 or not quick:
            figures = on_ranks(measure, count, count=count, **(SMALLEST if quick else SIZES))
            add(report, str(count), figures, overlap=least, rates={"base": 0.97, "adv*": 0.97})
    return report


def new_report() -> Report:
    """Returns a report without rows."""
    columns = ["topology", "overlap", "steps/s", "compute only, steps/s", "/ compute only", "gradient / compute only"]
    report = Report([f"{'289 MB, μ = 4':14}", *columns, "by messages, / compute only", "/ messages"])
    report.notes = [
        "learners: one torch thread each; compute only: the same gradients without communication",
        "gradient / compute only: slowdown of a gradient while threads communicate",
    ]
    return report


def add(
    report: Report, where: str, ranks: list[dict[str, Any]], *, overlap: float | None, rates: dict[str, float]
) -> None:
    """Adds the rows and goals of some learners.

    Args:
        report: report to extend.
        where: name of the rows.
        ranks: results of `measure` on each rank.
        overlap: goal for adv*. None: no goal.
        rates: topology -> goal for steps/s relative to computing without communication.
    """
    by_topology = _slowest(ranks)
    alone = [1 / s for s in by_topology["alone"]["step_s"]]
    for topology in ("base", "adv*"):
        found, messages = by_topology[topology], by_topology[f"{topology}{BY_MESSAGES}"]
        quick, slow = ([1 / s for s in way["step_s"]] for way in (found, messages))
        slower = ratios(found["compute_s"], by_topology["alone"]["step_s"])
        hidden, share = spread(found["overlap"]), ratios(quick, alone)
        cells = (_percent(hidden), spread(quick), spread(alone), share, slower)
        report.rows.append((where, topology, *cells, ratios(slow, alone), ratios(quick, slow)))
        if topology == "adv*" and overlap is not None:
            report.goals.append(Goal(f"{where}: overlap >= {overlap:.1%}", [hidden.median], at_least=overlap))
        if (rate := rates.get(topology)) is not None:
            text = f"{where}, {topology}: steps/s >= {rate} of compute only"
            report.goals.append(Goal(text, [share.median], at_least=rate))


def _percent(overlap: Spread) -> str:
    return f"{overlap.median:.2%} ({overlap.low:.2%}–{overlap.high:.2%})"


def _slowest(ranks: list[dict[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """Returns topology -> name -> one value for each round, from the slowest learner."""
    learners = ranks[LEARNER:]
    return {
        topology: {
            name: [
                (min if name == "overlap" else max)(values)
                for values in zip(*(learner[topology][name] for learner in learners), strict=True)
            ]
            for name in figures
        }
        for topology, figures in learners[0].items()
    }


def measure(
    comm: "MPI.Comm",
    directory: Path,
    count: int,
    size: int,
    steps: int,
    rounds: int,
    options: dict[str, int],
    over: "Callable[[MPI.Comm], None]" = rest,
) -> dict[str, Any]:
    """Takes turns. Returns, on learners: topology -> name -> one value per round, without the first of several rounds.

    Args:
        comm: communicator of the servers' ranks, followed by the learners' ranks.
        directory: directory for files.
        count: number of learners.
        size: number of samples per mini-batch.
        steps: number of steps per run.
        rounds: number of turns.
        options: options of the model.
        over: function that all ranks call at the end of each turn, and that waits for all of them.
    """
    torch.set_num_threads(1)
    ways: list[tuple[str, Any, bool]] = []
    for name, topology in (("base", "base"), ("adv*", Direct)):
        ways += [(name, topology, True), (f"{name}{BY_MESSAGES}", topology, False)]
    figures: dict[str, Any] = {name: {"step_s": [], "overlap": [], "compute_s": []} for name, *_ in ways}
    figures["alone"] = {"step_s": []}
    plain = alexnet_job("softsync", count, size, steps, **options)
    for turn in range(rounds):
        for name, topology, near in ways:
            job = plain.with_(topology={"name": topology}, cluster={"node_memory": near})
            with train(job, directory / "run.h5") as results:
                rows, who = results.minibatches, comm.rank - LEARNER
            if who >= 0 and (turn or rounds == 1):  # the first one warms up
                for key, value in _of_learner(rows[rows["learner"] == who]).items():
                    figures[name][key].append(value)
        rest(comm)
        if comm.rank >= LEARNER:
            taken = _alone(plain, comm.rank - LEARNER, steps)
            if turn or rounds == 1:
                figures["alone"]["step_s"].append(taken)
        over(comm)
    return figures


def _of_learner(rows: np.ndarray[Any, np.dtype[np.void]]) -> dict[str, float]:
    """Returns overlap, time per step and time per gradient, without the first few steps and the last one."""
    pushed = rows[rows["step"] >= 0][WARM_UP:-1]
    waited = sum(pushed[name].sum() for name in TIMES[1:])
    ready: NDArray[np.float64] = pushed["time_s"]
    computed: NDArray[np.float64] = pushed["compute_s"]
    begins = ready - computed
    return {
        "step_s": float((begins[-1] - begins[0]) / (len(begins) - 1)),
        "overlap": float(pushed["compute_s"].sum() / (pushed["compute_s"].sum() + waited)),
        "compute_s": float(pushed["compute_s"].mean()),
    }


def _alone(job: Job, learner: int, steps: int) -> float:
    """Returns the seconds per gradient without any exchange."""
    loaded = load(job.data, test=False, seed=job.training.seed)
    plan = job.plan()
    role = plan.learners[learner]
    job = settle(job, gradients=try_first_gradient(job, plan, loaded))
    executor = make_executors(job, plan, (role,), loaded, prefetch=True)[role]
    assert isinstance(executor, LearnerExecutor)
    executor.buffer(WEIGHTS).vector.copy_(torch.randn(executor.size) * 0.01)
    torch.set_flush_denormal(True)
    for step in range(WARM_UP):
        finished(executor.perform(Compute(step, executor.source.work.after(step), WEIGHTS, GRADIENT)))
    began = time.perf_counter()
    for step in range(WARM_UP, steps):
        finished(executor.perform(Compute(step, executor.source.work.after(step), WEIGHTS, GRADIENT)))
    taken = (time.perf_counter() - began) / (steps - WARM_UP)
    executor.close()
    return taken
