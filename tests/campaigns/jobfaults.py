"""A campaign on real ranks and the user's own jobs: what is hit, when and by what is drawn.

A run that was hit has to end in time, say why in a line, leave nothing behind and lose nothing. One that did not finish
is resumed, if it has a checkpoint, and has to finish; what finished is replayed, bit for bit.
"""

import random
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from rudra.errors import RudraError
from rudra.findings import Goal, Report
from rudra.job.job import Job
from rudra.results.checkpoint import path_of
from rudra.results.reader import open_results
from tests.campaigns.faults import adds_up
from tests.campaigns.phases import AT_ONCE, SAID, End, hit
from tests.campaigns.strikes import LAUNCHERS, PHASES, Strike
from topologies import Plan

RANK, MPIRUN, RUDRA = "a rank", *LAUNCHERS

SETTINGS = (
    'results.checkpoint_every="8 updates"',
    "results.flush_s=0.1",
    "results.report_s=0.0",
    "fault_tolerance.stall_warning_s=6",
    "fault_tolerance.stall_limit_s=12",
)
"""Of every run, so that there is something to go back to, and nobody waits for long."""

LIMIT_S, LATE_S = 12.0, 45.0
"""How long a run may wait, and may take to end when it has been hit: a rest of training, and all that it tries."""

PAUSE_S = 2.0
AFTER_S = 240.0
"""How long a resumed run, or a replay, may take."""

DRAWS = 6
"""Moments that are drawn until one comes before the run's end."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What a run is hit by.

    Attributes:
        whom: a rank, or what started it.
        number: the signal.
        pause_s: seconds after which it may go on; None: never.
    """

    whom: str
    number: int
    pause_s: float | None = None


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


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a run.

    Attributes:
        end: of the run that was hit.
        resumed: whether it was resumed.
        replayed: whether what finished was replayed.
        wrong: what must not be, for people; empty if all is well.
    """

    end: End
    resumed: bool = False
    replayed: bool = False
    wrong: str = ""


def run(jobs: Sequence[str], *, times: int | None = None, quick: bool) -> Report:
    """Hits each job by each kind of fault once, in an order that is drawn; the seed in the notes draws the same again.

    Args:
        jobs: as `rudra run` takes them.
        times: so many of these faults; None: all.
        quick: the first job is killed once.
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
    with (
        tempfile.TemporaryDirectory(prefix="rudra-bench-") as name,
        ThreadPoolExecutor(AT_ONCE) as pool,
        tqdm(total=len(faults), unit=" faults", leave=False, disable=None) as bar,
        ExitStack() as stack,
    ):
        stack.callback(pool.shutdown, cancel_futures=True)  # Ctrl-C waits for those under way alone

        def one(place: int) -> tuple[str, Outcome]:
            job, kind = faults[place]
            return _hit(Path(name), random.Random(f"{seed} {place}"), job, plans[job], FAULTS[kind])

        for (job, kind), (when, outcome) in zip(faults, pool.map(one, range(len(faults))), strict=True):
            outcomes.setdefault(kind, []).append(outcome)
            if outcome.wrong:
                report.notes.append(f"{Path(job).stem}, {kind}, {when}: {outcome.wrong}")
                bar.write(report.notes[-1], file=sys.stderr)
            bar.update()
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
    """Runs a job, and hits it at a moment that comes; says whom and when, too."""
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
                return when, Outcome(end, wrong=f"code {end.code} before it was hit: {_shown(end.said)}")
    return when, Outcome(end, wrong=f"none of {DRAWS} moments came")


def _judged(output: Path, fault: Fault, rank: int | None, end: End) -> Outcome:
    """Looks at the end of a run, has it go on, and repeats it."""
    if wrong := _at_end(output, fault, rank, end):
        return Outcome(end, wrong=f"{wrong}: {_shown(end.said)}")
    resumed = not _finished(output) and path_of(output).exists()
    if resumed and (wrong := _after("resume", output)):
        return Outcome(end, resumed, wrong=wrong)
    replayed = _finished(output)
    wrong = _accounts(output) or _after("replay", output) if replayed else ""
    return Outcome(end, resumed, replayed, wrong)


def _at_end(output: Path, fault: Fault, rank: int | None, end: End) -> str:
    """What is wrong about the end of a run that was hit; empty: nothing."""
    if end.code is None:
        return "it hung"
    killed = fault.whom == RUDRA and fault.number == signal.SIGKILL  # nobody is left to say or to remove anything
    explained = killed or not end.code or any(line.startswith("rudra: ") for line in end.lines)
    falsely_dead = _named_dead(end.lines) - {rank} if rank is not None else set()
    wrong = {
        f"left over: {', '.join(end.left)}": end.left,
        f"it took {end.seconds:.0f} s": end.seconds > LATE_S,
        "a traceback": "Traceback" in end.said,
        f"code {end.code}": end.code not in {0, 1, 3, -signal.SIGKILL if killed else 0},
        f"code {end.code} without a word": not explained,
        f"code {end.code} after a pause": fault.pause_s is not None and end.code,
        f"code {end.code}, but the file is finished": end.code and not killed and _finished(output),
        f"code {end.code}, but the file is not finished": end.code == 0 and not _finished(output),
        f"ranks {falsely_dead} are said to have died": falsely_dead,
        "files were left over": not killed and any(output.parent.glob(".*")),
    }
    return "; ".join(text for text, found in wrong.items() if found)


def _named_dead(lines: Iterable[str]) -> set[int]:
    """World ranks of which a run says that they have died."""
    named = [line.partition(" died")[0].rpartition(": ")[2] for line in lines if " died" in line]
    return {int(rank) for text in named for rank in re.findall(r"rank (\d+)", text)}


def _finished(output: Path) -> bool:
    with suppress(RudraError), open_results(output) as results:
        return results.status == "finished"
    return False


def _accounts(output: Path) -> str:
    with open_results(output) as results:
        return "" if adds_up(results) else "its accounts do not add up"


def _after(command: str, output: Path) -> str:
    """What is wrong about a resumed run, or a replay; empty: nothing."""
    asked = [sys.executable, "-m", "rudra", command, str(output), "--quiet"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=AFTER_S, check=False)
    except subprocess.TimeoutExpired:
        return f"{command} hung"
    said = done.stdout + done.stderr
    if command == "replay" and done.returncode == 2 and "cannot be replayed" in said:  # as of workers that race
        return ""
    if done.returncode or "Traceback" in said or (command == "resume" and not _finished(output)):
        return f"{command} ended with code {done.returncode}: {_shown(said)}"
    return ""


def _shown(said: str) -> str:
    return " | ".join(line for line in said.splitlines() if line)[-SAID:] or "nothing was said"
