"""Faults, the ends of runs that they hit, and the checks of these ends."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rudra.errors import RudraError
from rudra.results.reader import Results, open_results
from tests.campaigns.strikes import LAUNCHERS, Strike, command

RANK, MPIRUN, RUDRA = "a rank", *LAUNCHERS

ROOT = Path(__file__).resolve().parents[2]
SAID = 1500
"""Characters of standard error that are shown of a run that did not end well."""

BEGIN_S, HANG_S, LEFT_S = 300.0, 180.0, 10.0
"""Limits for a run to reach the phase, then to end, and for its processes to end after it."""

LATE_S = 60.0
"""Limit for the end of a run after it was hit: the rest of training, and all attempts to recover."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A signal to a process of a run.

    Attributes:
        whom: the process: a rank, or one of the processes that started the ranks.
        number: number of the signal.
        pause_s: seconds after which a stopped process continues; None: it does not.
    """

    whom: str
    number: int
    pause_s: float | None = None


@dataclass(frozen=True, slots=True)
class End:
    """The end of a run that was hit.

    Attributes:
        code: exit code; None: the run hung.
        said: what the run wrote to standard error.
        seconds: time from the hit to the end.
        left: descriptions of processes that were left over.
        struck: whether the run was hit before it ended.
    """

    code: int | None
    said: str
    seconds: float
    left: Sequence[str]
    struck: bool

    @property
    def lines(self) -> list[str]:
        """The lines of `said` that are not empty."""
        return [line for line in self.said.splitlines() if line]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a run that was hit.

    Attributes:
        end: end of the run.
        resumed: whether the run was resumed.
        replayed: whether the finished run was replayed.
        wrong: description of what went wrong; empty if all went well.
    """

    end: End
    resumed: bool = False
    replayed: bool = False
    wrong: str = ""

    @property
    def told(self) -> str:
        """A description in a few words."""
        return self.wrong or f"code {self.end.code} after {self.end.seconds:.1f} s"


def environment(**more: str) -> dict[str, str]:
    """Returns the environment of a run whose ranks can import the modules of this checkout."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, **more}


def hit(home: Path, strike: Strike, argv: Sequence[str], *, pause_s: float | None = None) -> End:
    """Runs a command line of `rudra` and hits it.

    Args:
        home: directory of the run; it identifies the processes of the run.
        strike: victim, moment and signal.
        argv: the command line, without `rudra`.
        pause_s: seconds after which a stopped process continues; None: it does not.
    """
    process = subprocess.Popen(
        command(strike, argv),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(RUDRA_HIT=str(home)),
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + BEGIN_S
        while process.poll() is None and not strike.mark.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        began = time.monotonic()
        if pause_s is not None and strike.mark.exists():
            time.sleep(pause_s)
            with suppress(ProcessLookupError):
                os.kill(int(strike.mark.read_text().split()[1]), signal.SIGCONT)
        _, said = process.communicate(timeout=HANG_S)
        code: int | None = process.returncode
    except subprocess.TimeoutExpired:
        code, said = None, ""
    finally:
        process.kill()
        process.wait()
    seconds = time.monotonic() - began
    return End(code, said, seconds, _left(str(home), LEFT_S), strike.mark.exists())


def at_end(output: Path, fault: Fault, rank: int | None, end: End) -> str:
    """Describes what is wrong about the end of a run that was hit; empty if nothing is.

    Args:
        output: result file of the run, in a directory of its own.
        fault: the fault that hit the run.
        rank: world rank of the victim; None if the victim is no rank.
        end: end of the run.
    """
    if end.code is None:
        return "it hung"
    killed = fault.whom == RUDRA and fault.number == signal.SIGKILL  # no process is left to explain or to clean up
    explained = killed or not end.code or any(line.startswith("rudra: ") for line in end.lines)
    falsely_dead = _named_dead(end.lines) - {rank} if rank is not None else set()
    wrong = {
        f"left over: {', '.join(end.left)}": end.left,
        f"it took {end.seconds:.0f} s": end.seconds > LATE_S,
        "a traceback": "Traceback" in end.said,
        f"code {end.code}": end.code not in {0, 1, 3, -signal.SIGKILL if killed else 0},
        f"code {end.code} without a word": not explained,
        f"code {end.code} after a pause": fault.pause_s is not None and end.code,
        f"code {end.code}, but the file is finished": end.code and not killed and finished(output),
        f"code {end.code}, but the file is not finished": end.code == 0 and not finished(output),
        f"ranks {falsely_dead} are said to have died": falsely_dead,
        "files were left over": not killed and any(output.parent.glob(".*")),
    }
    return "; ".join(text for text, found in wrong.items() if found)


def _named_dead(lines: Iterable[str]) -> set[int]:
    """Returns the world ranks that died according to the lines of a run."""
    named = [line.partition(" died")[0].rpartition(": ")[2] for line in lines if " died" in line]
    return {int(rank) for text in named for rank in re.findall(r"rank (\d+)", text)}


def finished(output: Path) -> bool:
    """Returns whether the result file exists and its run has finished."""
    with suppress(RudraError), open_results(output) as results:
        return results.status == "finished"
    return False


def accounts(output: Path) -> str:
    """Describes what is wrong about the accounts of a finished run; empty if nothing is."""
    with open_results(output) as results:
        return "" if adds_up(results) else "its accounts do not add up"


def adds_up(results: Results) -> bool:
    """Returns whether a run is complete: every gradient is accounted for, and none was applied twice."""
    if results.status != "finished":
        return False
    totals, gradients = results.totals[0], results.gradients
    counted = totals["pushed"] == sum(totals[name] for name in ("applied", "pending", "discarded", "lost"))
    pairs = set(zip(gradients["learner"].tolist(), gradients["step"].tolist(), strict=True))
    return bool(counted) and len(pairs) == len(gradients) == totals["applied"]


def shown(said: str) -> str:
    """Returns the end of a run's standard error, on one line."""
    return " | ".join(line for line in said.splitlines() if line)[-SAID:] or "nothing was said"


def _left(name: str, within_s: float) -> list[str]:
    """Describes and kills the processes of a run that have not ended within this time."""
    deadline = time.monotonic() + within_s
    while (left := _processes(name)) and time.monotonic() < deadline:
        time.sleep(0.05)
    found = []
    for process in left:
        with suppress(OSError):  # the process has ended
            about = Path("/proc", str(process))
            words = (about / "cmdline").read_text().split("\0")
            state = (about / "stat").read_text().rpartition(")")[2].split()[0]
            found.append(f"{process} {state} {' '.join(words)[:200]}")
            os.kill(process, signal.SIGKILL)
    return found


def _processes(name: str) -> Sequence[int]:
    """Returns the ids of processes whose command line or environment names a directory."""
    found = []
    for entry in os.listdir("/proc"):
        with suppress(OSError):  # the process has ended
            about = Path("/proc", entry)
            if entry.isdigit() and name.encode() in (about / "cmdline").read_bytes() + (about / "environ").read_bytes():
                found.append(int(entry))
    return found
