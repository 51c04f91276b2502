"""A campaign on real ranks: every role is killed at every phase of a run, and nothing may hang or be left over."""

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from rudra.errors import RudraError
from rudra.findings import Goal, Report
from rudra.results.reader import open_results
from tests.campaigns.faults import adds_up
from tests.campaigns.strikes import PHASES, Strike, command
from topologies.kinds import PARAMETER_SERVER, STATISTICS_SERVER

TIMES = 5
"""How often each role is killed at each phase."""

AT_ONCE = 2
"""Runs side by side, because each waits now and then; more of them would only be slow."""

SAID = 1500
"""Of a run that did not end well, so many characters of what it said, and MPI."""

BEGIN_S, HANG_S, LEFT_S = 300.0, 180.0, 10.0
"""How long a run may take to come to the phase, and to end after it, and its processes after that."""

JOB = """
[model]
name = "mlp"
options.hidden = [16]
[data]
name = "tests.campaigns.points:points"
[training]
epochs = 4
minibatch_size = 4
[optimizer]
learning_rate = 0.01
[protocol]
name = "async"
[results]
checkpoint_every = "8 updates"
report_s = 0.0
flush_s = 0.1
"""


@dataclass(frozen=True, slots=True)
class Place:
    """Where roles are killed: a topology of few ranks, and who there; of learners of several kinds, one of each."""

    topology: str
    options: str
    learners: int
    victims: tuple[str, ...]

    def job(self) -> str:
        return f'{JOB}[topology]\nname = "{self.topology}"\n{self.options}\n[cluster]\nlearners = {self.learners}\n'


SHARD = "parameter shard 1"
SERVERS = (PARAMETER_SERVER, STATISTICS_SERVER)

PLACES = {
    place.topology: place
    for place in (
        Place("base", "", 2, (*SERVERS, "learner 1")),
        Place("sharded", "options.shards = 2", 2, (*SERVERS, SHARD, "learner 1")),
        Place("adv", "options.fan_out = 2", 3, (*SERVERS, "tree server 1", "learner 2")),
        Place("adv*", "options.fan_out = 2", 3, (*SERVERS, "learner 0", "learner 2")),
        Place("groups", "options.groups = 2", 3, (*SERVERS, "learner 0", "learner 1")),
    )
}


@dataclass(frozen=True, slots=True)
class Found:
    """What became of a run.

    Attributes:
        code: exit code; None: it hung.
        seconds: from the kill to the end.
        left: processes that were there later than they may be.
        wrong: what must not be, for people; empty if all is well.
    """

    code: int | None
    seconds: float
    left: int
    wrong: str


def run(topologies: Sequence[str] = (), *, quick: bool) -> Report:
    """Runs the campaign; each cell of its table has the exit codes, `-` for a run that hung.

    Args:
        topologies: on which; none: on all.
        quick: a few kills of one learner.
    """
    report = Report(["killed", *PHASES])
    places = [PLACES[name] for name in topologies or PLACES]
    kills = [(place, victim, phase) for place in places for victim in place.victims for phase in PHASES] * TIMES
    if quick:
        kills = [(places[0], places[0].victims[-1], phase) for phase in ("mid", "accounts")]
    every: list[Found] = []
    rows: dict[str, dict[str, str]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="rudra-bench-") as name,
        ThreadPoolExecutor(AT_ONCE) as pool,
        tqdm(total=len(kills), unit=" kills", leave=False, disable=None) as bar,
        ExitStack() as stack,
    ):
        stack.callback(pool.shutdown, cancel_futures=True)  # Ctrl-C waits for those under way alone
        found = pool.map(lambda each: kill(Path(name), *each), kills)
        for (place, victim, phase), one in zip(kills, found, strict=True):
            row = rows.setdefault(f"{place.topology}, {victim}", dict.fromkeys(PHASES, ""))
            row[phase] = f"{row[phase]} {'-' if one.code is None else one.code}".lstrip()
            if one.wrong:
                report.notes.append(f"{place.topology}, {victim}, {phase}: {one.wrong}")
                bar.write(report.notes[-1])
            every.append(one)
            bar.update()
    report.rows += [[who, *cells.values()] for who, cells in rows.items()]
    report.goals += [
        Goal("hangs = 0", [float(sum(one.code is None for one in every))], at_most=0.0),
        Goal("processes left over after 10 s = 0", [float(sum(one.left for one in every))], at_most=0.0),
        Goal("else wrong = 0", [float(sum(bool(one.wrong) for one in every))], at_most=0.0),
        Goal("ended within 60 s", [max(one.seconds for one in every)], at_most=60.0),
    ]
    return report


def kill(directory: Path, place: Place, victim: str, phase: str, number: int = signal.SIGKILL) -> Found:
    """Runs a job and kills one of its roles.

    Args:
        directory: for what belongs to the run.
        place: where.
        victim: name of the role.
        phase: one of `PHASES`.
        number: the signal.
    """
    with tempfile.TemporaryDirectory(dir=directory) as name:
        home = Path(name)
        (home / "job.toml").write_text(place.job())
        output = home / "out.h5"
        run = ("run", str(home / "job.toml"), "--output", str(output), "--quiet", "--verbose")
        end = hit(home, Strike(victim, phase, number, home / "mark"), run)
        return Found(end.code, end.seconds, len(end.left), _wrong(output, end))


@dataclass(frozen=True, slots=True)
class End:
    """How a run ended that was hit.

    Attributes:
        code: exit code; None: it hung.
        said: on standard error.
        seconds: from the hit to the end.
        left: the processes that were there later than they may be, for people.
        struck: whether it was hit before it ended.
    """

    code: int | None
    said: str
    seconds: float
    left: Sequence[str]
    struck: bool

    @property
    def lines(self) -> list[str]:
        """What was said, without empty lines."""
        return [line for line in self.said.splitlines() if line]


def hit(home: Path, strike: Strike, argv: Sequence[str], *, pause_s: float | None = None) -> End:
    """Runs a command line of `rudra`, which is hit.

    Args:
        home: directory of the run, by which its processes are known.
        strike: what hits it.
        argv: the command line, without `rudra`.
        pause_s: seconds after which whoever is stopped may go on; None: never.
    """
    process = subprocess.Popen(
        command(strike, argv),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "RUDRA_HIT": str(home)},
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


def _wrong(output: Path, end: End) -> str:
    """What is wrong about the end of a run."""
    code, said = end.code, " | ".join(end.lines)[-SAID:]
    if code is None:
        return "it hung"
    if not end.struck:
        return f"it ended before it was killed, with code {code}: {said}"
    if end.left:
        return f"left over: {', '.join(end.left)}"
    explained = any(line.startswith("rudra: ") for line in end.lines)
    if code not in {0, 1, 3} or "Traceback" in end.said or (code and not explained):
        return f"it ended with code {code}, and said: {said or 'nothing'}"
    try:
        with open_results(output) as results:
            if code == 0 and not adds_up(results):
                return "its accounts do not add up"
    except RudraError as error:
        return str(error) if code == 0 else ""  # it may have ended before there was a file
    return ""


def _left(name: str, within_s: float) -> list[str]:
    """The processes of a run that are there when that time is over: what they run, and in which state they are."""
    deadline = time.monotonic() + within_s
    while (left := _processes(name)) and time.monotonic() < deadline:
        time.sleep(0.05)
    found = []
    for process in left:
        with suppress(OSError):  # it has ended meanwhile
            about = Path("/proc", str(process))
            words = (about / "cmdline").read_text().split("\0")
            state = (about / "stat").read_text().rpartition(")")[2].split()[0]
            found.append(f"{process} {state} {' '.join(words)[:200]}")
            os.kill(process, signal.SIGKILL)
    return found


def _processes(name: str) -> Sequence[int]:
    """Those whose command line or environment names a directory."""
    found = []
    for entry in os.listdir("/proc"):
        with suppress(OSError):  # it has ended meanwhile
            about = Path("/proc", entry)
            if entry.isdigit() and name.encode() in (about / "cmdline").read_bytes() + (about / "environ").read_bytes():
                found.append(int(entry))
    return found
