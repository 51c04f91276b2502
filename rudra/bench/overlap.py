"""Communication that hides behind computation, on real ranks: Rudra-base against adv*, 72 M parameters, μ = 4.

Where ranks read each other's memory, and by messages; both in turns.

Overlap is compute / (compute + what the learner waited for communication), as in Table 1 of the paper. It flatters: a
thread that spins in MPI hides its transfer and stretches the computation meanwhile. So steps per second, and the time
of a gradient, stand beside it against computing alone.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rudra.bench.ranks import LEARNER, alexnet_job, on_ranks, train
from rudra.compute.first_gradient import try_first_gradient
from rudra.compute.learners import LearnerExecutor
from rudra.compute.making import make_executors
from rudra.core.events import GRADIENT, WEIGHTS, Compute
from rudra.core.records import TIMES
from rudra.data.load import load
from rudra.findings import Goal, Report, Spread, ratios, spread
from rudra.job.job import Job
from rudra.mpi.agreement import rest
from rudra.prepare.resolve import settle
from topologies import Plan, base

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpi4py import MPI

BY_MESSAGES = ", by messages"
WARM_UP = 2  # steps that do not count
SIZES: dict[str, Any] = {"size": 4, "steps": 10, "rounds": 6, "options": {}}
SMALLEST: dict[str, Any] = {"size": 1, "steps": 5, "rounds": 1, "options": {"width": 64}}


class Direct:
    """adv* whose tree has no servers between: with one learner, there is nothing to average."""

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
    """A report without rows."""
    columns = ["topology", "overlap", "steps/s", "compute alone, steps/s", "/ alone", "gradient / alone"]
    report = Report([f"{'289 MB, μ = 4':14}", *columns, "by messages, / alone", "/ messages"])
    report.notes = [
        "learners: one torch thread each; alone: the same learners at the same time compute the same gradients only",
        "gradient / alone: how much longer a gradient takes while threads communicate",
    ]
    return report


def add(
    report: Report, where: str, ranks: list[dict[str, Any]], *, overlap: float | None, rates: dict[str, float]
) -> None:
    """Adds the rows and goals of some learners.

    Args:
        report: what gets them.
        where: name of the rows.
        ranks: what `measure` returned on each rank.
        overlap: goal for adv*; None: there is none.
        rates: topology -> goal for steps/s as a share of computing alone.
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
            text = f"{where}, {topology}: steps/s >= {rate} of compute alone"
            report.goals.append(Goal(text, [share.median], at_least=rate))


def _percent(overlap: Spread) -> str:
    return f"{overlap.median:.2%} ({overlap.low:.2%}–{overlap.high:.2%})"


def _slowest(ranks: list[dict[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """Topology -> name -> one figure for each round, of the slowest learner."""
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
    """Takes turns; on learners: topology -> name -> one figure for each round but the first, if there are several.

    Args:
        comm: the servers' ranks, and then the learners'.
        directory: for files.
        count: of learners.
        size: of a mini-batch.
        steps: of a run.
        rounds: how many turns there are.
        options: of the model.
        over: is called on all ranks at the end of each turn, and waits for them.
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
    """Overlap, time of a step and of a gradient, without the first few and the last."""
    pushed = rows[rows["step"] >= 0][WARM_UP:-1]
    waited = sum(pushed[name].sum() for name in TIMES[1:])
    begins = pushed["time_s"] - pushed["compute_s"]
    return {
        "step_s": float((begins[-1] - begins[0]) / (len(begins) - 1)),
        "overlap": float(pushed["compute_s"].sum() / (pushed["compute_s"].sum() + waited)),
        "compute_s": float(pushed["compute_s"].mean()),
    }


def _alone(job: Job, learner: int, steps: int) -> float:
    """Seconds that a gradient takes where nothing is exchanged."""
    loaded = load(job.data, test=False, seed=job.training.seed)
    plan = job.plan()
    role = plan.learners[learner]
    job = settle(job, gradients=try_first_gradient(job, plan, loaded))
    executor = make_executors(job, plan, (role,), loaded, prefetch=True)[role]
    assert isinstance(executor, LearnerExecutor)
    executor.buffer(WEIGHTS).vector.copy_(torch.randn(executor.size) * 0.01)
    torch.set_flush_denormal(True)
    for step in range(WARM_UP):
        next(executor.perform(Compute(step, executor.source.work.after(step), WEIGHTS, GRADIENT)))
    began = time.perf_counter()
    for step in range(WARM_UP, steps):
        next(executor.perform(Compute(step, executor.source.work.after(step), WEIGHTS, GRADIENT)))
    taken = (time.perf_counter() - began) / (steps - WARM_UP)
    executor.close()
    return taken
