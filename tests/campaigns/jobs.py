"""A campaign on real ranks and the user's own jobs: victim, moment and fault are drawn at random.

A run that was hit must end in time, give the reason in a line, leave nothing behind and lose nothing. A run that did
not finish is resumed if it has a checkpoint, and must then finish. A finished run is replayed, bitwise.
"""

import random
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from rudra.benchmark_report import Goal, Report
from rudra.job.job import Job
from rudra.results.checkpoint import path_of
from tests.campaigns.ends import (
    MPIRUN,
    RANK,
    RUDRA,
    End,
    Fault,
    Outcome,
    accounts,
    at_end,
    environment,
    finished,
    hit,
    shown,
)
from tests.campaigns.progress import side_by_side
from tests.campaigns.strikes import PHASES, Strike
from topologies import Plan

SETTINGS = (
    'results.checkpoint_every="8 updates"',
    "results.flush_s=0.1",
    "results.report_s=0.0",
    "fault_tolerance.stall_warning_s=6",
    "fault_tolerance.stall_limit_s=12",
)
"""Settings of every run, so that it has checkpoints, and waits are short."""

PAUSE_S = 2.0
AFTER_S = 240.0
"""Limit for a resumed run, and for a replay."""

DRAWS = 6
"""Moments that are drawn at most until one comes before the end of the run."""

FAULTS = {
    "a rank killed": Fault(RANK, signal.SIGKILL),
    "a rank stopped": Fault(RANK, signal.SIGSTOP),
    "a rank paused": Fault(RANK, signal.SIGSTOP, PAUSE_S),
    "a rank terminated": Fault(RANK, signal.SIGTERM),
    "a rank interrupted": Fault(RANK, signal.SIGINT),
    "a rank warned (USR1)": Fault(RANK, signal.SIGUSR1),
    "mpirun killed": Fault(MPIRUN, signal.SIGKILL),
    "mpirun stopped": Fault(MPIRUN, signal.SIGSTOP),
    "mpirun terminated": Fault(MPIRUN, signal.SIGTERM),
    "rudra killed": Fault(RUDRA, signal.SIGKILL),
    "rudra terminated": Fault(RUDRA, signal.SIGTERM),
    "rudra interrupted": Fault(RUDRA, signal.SIGINT),
}


def run(jobs: Sequence[str], *, times: int | None = None, quick: bool) -> Report:
    """Hits each job by each kind of fault once, in random order. The notes of the report name the seed.

    Args:
        jobs: jobs as for `rudra run`.
        times: limit of the number of faults; None: all.
        quick: kill only the first job, once.
    """
    seed = random.SystemRandom().randrange(1 << 32)
    faults = [(job, kind) for job in jobs for kind in FAULTS]
    if quick:
        faults = faults[:1]
    else:
        random.Random(seed).shuffle(faults)
    faults = faults[:times]
    plans = {job: Job.load(job).plan() for job in jobs}
    outcomes: dict[str, list[Outcome]] = {}
    report = Report(["hit", "times", "exit codes", "resumed", "replayed", "s to end (longest)", "wrong"])
    with tempfile.TemporaryDirectory(prefix="rudra-campaign-") as name:

        def one(task: tuple[int, str, str]) -> tuple[str, Outcome]:
            place, job, kind = task
            return _hit(Path(name), random.Random(f"{seed} {place}"), job, plans[job], FAULTS[kind])

        def tell(task: tuple[int, str, str], found: tuple[str, Outcome]) -> str:
            return f"{Path(task[1]).stem}, {task[2]}, {found[0]}: {found[1].told}"

        tasks = [(place, *fault) for place, fault in enumerate(faults)]
        for task, (when, outcome) in side_by_side(one, tasks, tell):
            outcomes.setdefault(task[2], []).append(outcome)
            if outcome.wrong:
                report.notes.append(tell(task, (when, outcome)))
    for kind, found in outcomes.items():
        codes = " ".join(f"{code}:{n}" for code, n in sorted(_counted(each.end.code for each in found).items()))
        again = [sum(each.resumed for each in found), sum(each.replayed for each in found)]
        longest = f"{max(each.end.seconds for each in found):.1f}"
        report.rows.append([kind, len(found), codes, *again, longest, sum(bool(each.wrong) for each in found)])
    report.notes.append(f"seed {seed}")
    every = [each for found in outcomes.values() for each in found]
    report.goals += [
        Goal("hangs = 0", [float(sum(each.end.code is None for each in every))], at_most=0.0),
        Goal("wrong = 0", [float(sum(bool(each.wrong) for each in every))], at_most=0.0),
    ]
    return report


def _counted(codes: Iterable[int | None]) -> dict[str, int]:
    return dict(Counter("-" if code is None else str(code) for code in codes))


def _hit(directory: Path, chance: random.Random, job: str, plan: Plan, fault: Fault) -> tuple[str, Outcome]:
    """Runs a job and hits it at a random moment; returns victim and moment, and the outcome."""
    when = ""
    for _ in range(DRAWS):
        role, phase = chance.choice(plan.roles), chance.choice(PHASES)
        victim, rank = (role.name, role.world_rank) if fault.whom == RANK else (fault.whom, None)
        when = f"{victim}, {phase}"
        with tempfile.TemporaryDirectory(dir=directory) as home:
            output = Path(home, "out.h5")
            settings = [argument for setting in SETTINGS for argument in ("--set", setting)]
            strike = Strike(victim, phase, fault.number, Path(home, "mark"))
            asked = ("run", job, "--output", str(output), "--quiet", *settings)
            end = hit(Path(home), strike, asked, pause_s=fault.pause_s)
            if end.struck:
                return when, _judged(output, fault, rank, end)
            if end.code:
                return when, Outcome(end, wrong=f"code {end.code} before it was hit: {shown(end.said)}")
    return when, Outcome(end, wrong=f"none of {DRAWS} moments came")


def _judged(output: Path, fault: Fault, rank: int | None, end: End) -> Outcome:
    """Checks the end of a run, resumes the run, and replays it."""
    if wrong := at_end(output, fault, rank, end):
        return Outcome(end, wrong=f"{wrong}: {shown(end.said)}")
    resumed = not finished(output) and path_of(output).exists()
    if resumed and (wrong := _after("resume", output)):
        return Outcome(end, resumed, wrong=wrong)
    replayed = finished(output)
    wrong = accounts(output) or _after("replay", output) if replayed else ""
    return Outcome(end, resumed, replayed, wrong)


def _after(command: str, output: Path) -> str:
    """Runs `resume` or `replay`; describes what is wrong about it, empty if nothing is."""
    asked = [sys.executable, "-m", "rudra", command, str(output), "--quiet"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=AFTER_S, check=False, env=environment())
    except subprocess.TimeoutExpired:
        return f"{command} hung"
    said = done.stdout + done.stderr
    if command == "replay" and done.returncode == 2 and "cannot be replayed" in said:  # workers that race
        return ""
    if done.returncode or "Traceback" in said or (command == "resume" and not finished(output)):
        return f"{command} ended with code {done.returncode}: {shown(said)}"
    return ""
