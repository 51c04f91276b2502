"""Communication that hides behind computation, on real ranks: Rudra-base against adv*, 72 M parameters, μ = 4.

Where ranks read each other's memory, and by messages; both in turns.

Overlap is compute / (compute + what the learner waited for communication), as in Table 1 of the paper. It flatters: a
thread that spins in MPI hides its transfer and stretches the computation meanwhile. So steps per second, and the time
of a gradient, stand beside it against computing alone.

Behind a link of 10 Gbit/s: two hosts in network namespaces, with a token bucket between them; servers on one,
learners on the other. That takes root, and `ip` and `tc`; without them these rows are missing, and the report says
so.
"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rudra.bench.behind import behind_a_link, turn_is_over
from rudra.bench.hosts import missing
from rudra.bench.ranks import LEARNER, alexnet_job, on_ranks, train
from rudra.compute.first_gradient import settled
from rudra.compute.learners import LearnerExecutor
from rudra.compute.making import make_executors
from rudra.core.events import GRADIENT, WEIGHTS, Compute
from rudra.core.records import TIMES
from rudra.data.load import load
from rudra.findings import Goal, Report, Spread, ratios, spread
from rudra.job.job import Job
from rudra.mpi.session import rest
from topologies import Plan, base

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpi4py import MPI

GBIT_S = 10
BY_MESSAGES = ", by messages"
WARM_UP = 2  # steps that do not count
GOALS = {"1": (0.995, 0.97), "2": (None, 0.97), f"1, {GBIT_S} Gbit/s": (0.95, 0.72)}
"""Overlap of adv*, and steps/s as a multiple of computing alone."""


class Direct:
    """adv* whose tree has no servers between: with one learner, there is nothing to average."""

    @staticmethod
    def plan(nodes: "Sequence[int]") -> Plan:
        return replace(base.plan(nodes), overlapped=True)


def run(*, quick: bool) -> Report:
    """Measures one and two learners of one torch thread each over shared memory, and one behind the link."""
    about: dict[str, Any] = {"size": 4, "steps": 10, "rounds": 6, "options": {}}
    if quick:
        about = {"size": 1, "steps": 5, "rounds": 1, "options": {"width": 64}}
    figures = {
        str(count): _slowest(on_ranks(measure, count, count=count, link=False, **about))
        for count in ((1,) if quick else (1, 2))
    }
    lacking = missing()
    if not quick and not lacking:
        there = {"gbit_s": GBIT_S, "learners": 1, "away": 1, "turns": about["rounds"]}
        figures[f"1, {GBIT_S} Gbit/s"] = _slowest(behind_a_link(measure, **there, count=1, link=True, **about))
    columns = ["topology", "overlap", "steps/s", "compute alone, steps/s", "/ alone", "gradient / alone"]
    report = Report([f"{'289 MB, μ = 4':14}", *columns, "by messages, / alone", "/ messages"])
    for where, by_topology in figures.items():
        alone = [1 / s for s in by_topology["alone"]["step_s"]]
        for topology in ("base", "adv*"):
            found, messages = by_topology[topology], by_topology[f"{topology}{BY_MESSAGES}"]
            rates, slow = ([1 / s for s in way["step_s"]] for way in (found, messages))
            slower = ratios(found["compute_s"], by_topology["alone"]["step_s"])
            overlap, share = spread(found["overlap"]), ratios(rates, alone)
            cells = (_percent(overlap), spread(rates), spread(alone), share, slower)
            report.rows.append((where, topology, *cells, ratios(slow, alone), ratios(rates, slow)))
            if where not in GOALS:
                continue
            least, rate = GOALS[where]
            if topology == "adv*" and least is not None:
                report.goals.append(Goal(f"{where}: overlap >= {least:.1%}", [overlap.median], at_least=least))
            if topology == "adv*" or where in {"1", "2"}:
                text = f"{where}, {topology}: steps/s >= {rate} of compute alone"
                report.goals.append(Goal(text, [share.median], at_least=rate))
    report.notes = [
        "learners: one torch thread each; alone: the same learners at the same time compute the same gradients only",
        "gradient / alone: how much longer a gradient takes while threads communicate",
    ]
    if lacking:
        report.notes.append(f"no rows behind a link: {lacking}")
    return report


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
    *,
    link: bool,
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
        link: the ranks are on two hosts.
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
        if link:
            turn_is_over(comm)
        rest(comm)
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
    import time

    loaded = load(job.data, test=False, seed=job.training.seed)
    plan = job.plan()
    role = plan.learners[learner]
    executor = make_executors(settled(job, plan, loaded), plan, (role,), loaded, prefetch=True)[role]
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
