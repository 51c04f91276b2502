"""Signals that hit a run at a known moment: one of its ranks, or what started them; for campaigns and tests.

`arm` is called in the process that launches. What the ranks run is then wrapped: one of them notices the moment, by an
event or an action of a role that marks it, and signals the victim. Before there are roles the victim does it itself;
before there is MPI the launching process does, by what the kernel tells of the rank.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rudra.core.actions import Action, Halt
from rudra.core.events import Event, Hashed, Received, Updated
from rudra.core.messages import MessageKind
from rudra.mpi import launch
from rudra.mpi.failures import ranks_below, started_below
from rudra.mpi.forkserver import launcher
from rudra.mpi.launch import LaunchOutcome
from rudra.results.checkpoint import CheckpointWriter
from rudra.roles import Machine
from rudra.roles.ledger import Owner

LAUNCHERS = ("mpirun", "rudra")
"""What a signal can hit beside roles: the process that starts the ranks, and the one that the user started."""

MID = 12
"""Updates that have been made in the middle of a run."""

BEFORE = ("import", "start", "load", "set-up", "roles")
DURING = ("first update", "mid", "checkpoint", "evaluation")
ENDING = ("last epoch", "accounts", "done", "close", "exit")
PHASES = (*BEFORE, *DURING, *ENDING)
"""When a rank can be hit: while Python imports, MPI starts, data is loaded, the model is built, or roles are made; at
the first update, the `MID`-th, while the first checkpoint is written, or the weights are first tested; when all samples
are applied, the first account arrives, all is recorded, MPI's requests are closed, or the rank has done its part."""


@dataclass(frozen=True)
class Strike:
    """Who is hit, when, and by what; in a rank it knows the payload, too.

    Attributes:
        victim: name of the role, as in the plan, or one of `LAUNCHERS`, for which the first rank notices the phase.
        phase: one of `PHASES`.
        number: the signal.
        mark: file that gets the time when it happens, and the process that is hit.
    """

    victim: str
    phase: str
    number: int
    mark: Path

    def fall(self, process: int) -> None:
        """Hits."""
        part = self.mark.with_suffix(".part")
        part.write_text(f"{time.time()} {process}")
        part.rename(self.mark)
        with suppress(ProcessLookupError):
            os.kill(process, self.number)

    def arm(self) -> None:
        """Lets it hit the next run that this process launches."""
        plain = launch.launch

        def armed(*about: Any, payload: dict[str, Any], **more: Any) -> LaunchOutcome:
            launch.launch = plain
            named = [i for i, names in enumerate(more["roles"]) if self.victim in names.split(", ")]
            (rank,) = [0] if self.victim in LAUNCHERS else named
            if self.phase in {"import", "start"}:
                threading.Thread(target=self._watch, args=(rank,), daemon=True).start()
                return plain(*about, payload=payload, **more)
            return plain(*about, payload=Armed(self, rank, payload), **more)

        launch.launch = armed  # type: ignore[assignment]

    def _watch(self, rank: int) -> None:
        """Hits a rank as soon as it is there, or has loaded MPI's library, which starts then."""
        while True:
            process = ranks_below(os.getpid()).get(rank)
            if process is not None and (self.phase == "import" or _has_mpi(process)):
                mpirun = _parent(started_below(os.getpid()).get(rank, process))
                self.fall({"mpirun": mpirun, "rudra": os.getpid()}.get(self.victim, process))
                return
            time.sleep(0.005)


def _parent(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def _has_mpi(process: int) -> bool:
    with suppress(OSError):
        return "libmpi.so" in Path(f"/proc/{process}/maps").read_text()
    return False


def command(strike: Strike, argv: Sequence[str]) -> list[str]:
    """The command line of `rudra`, of which the first launch is hit."""
    code = """
import sys
from tests.campaigns.strikes import armed
from rudra.cli.main import main
sys.exit(main(armed(sys.argv[1:])))
"""
    about = (strike.victim, strike.phase, str(int(strike.number)), str(strike.mark))
    return [sys.executable, "-c", code, *about, *argv]


def armed(argv: Sequence[str]) -> list[str]:
    """Arms the strike that a command line of `command` begins with; gives the rest of it."""
    victim, phase, number, mark, *rest = argv
    Strike(victim, phase, int(number), Path(mark)).arm()
    return rest


@dataclass(frozen=True)
class Armed:
    """What a rank runs in place of its part alone.

    Attributes:
        strike: what is to happen.
        rank: of the victim.
        payload: arguments of `run_ranks`.
    """

    strike: Strike
    rank: int
    payload: dict[str, Any]

    def __call__(self) -> int:
        from rudra.mpi.session import run_ranks

        with ExitStack() as until:
            self._set(until)
            code: int = run_ranks(**self.payload)[0]
        if self.strike.phase == "exit" and self._own:
            self._fall()
        return code

    @property
    def _own(self) -> bool:
        return int(os.environ["OMPI_COMM_WORLD_RANK"]) == self.rank

    def _set(self, until: ExitStack) -> None:
        """Looks out for the moment, on the rank that notices it."""
        from rudra.mpi.driver import Rank
        from rudra.mpi.setup import RankSetup

        phase = self.strike.phase
        places: dict[str, tuple[type, str]] = {
            "load": (RankSetup, "_load"),
            "set-up": (RankSetup, "_restore"),
            "roles": (Rank, "__init__"),
            "close": (Rank, "_close"),
        }
        if phase in MOMENTS:
            self._before(Machine, "handle", MOMENTS[phase], until)
        elif phase == "checkpoint":
            self._before(CheckpointWriter, "save", _at_once, until)
        elif phase == "done" and self._own:
            self._before(Rank, "_do", _halts, until)
        elif phase in places and self._own:
            self._before(*places[phase], _at_once, until)

    def _before(self, kind: type, name: str, due: Callable[..., bool], until: ExitStack) -> None:
        """Hits when a method is first called with what is due."""
        plain, waiting = getattr(kind, name), [True]

        def call(*about: Any, **more: Any) -> Any:
            if waiting and due(*about):
                waiting.clear()
                self._fall()
            return plain(*about, **more)

        setattr(kind, name, call)
        until.callback(setattr, kind, name, plain)

    def _fall(self) -> None:
        mpirun, victim = launcher(), self.strike.victim
        if victim in LAUNCHERS:
            self.strike.fall(mpirun if victim == "mpirun" else _parent(mpirun))
        else:
            self.strike.fall(ranks_below(mpirun)[self.rank])


def _at_once(*about: Any) -> bool:
    return True


def _halts(rank: Any, role: int, action: Action) -> bool:
    return isinstance(action, Halt)


def _at_update(timestamp: int) -> Callable[[Machine, Event, float], bool]:
    def due(role: Machine, event: Event, now: float) -> bool:
        return role.id == role.plan.server and isinstance(event, Updated) and event.timestamp == timestamp

    return due


def _all_applied(role: Machine, event: Event, now: float) -> bool:
    return role.id == role.plan.server and isinstance(role, Owner) and role.ledger.over


def _first_account(role: Machine, event: Event, now: float) -> bool:
    return isinstance(event, Received) and event.message.kind is MessageKind.LEARNERS


def _first_test(role: Machine, event: Event, now: float) -> bool:
    return role.id == role.plan.statistics and isinstance(event, Hashed)


MOMENTS = {
    "first update": _at_update(1),
    "mid": _at_update(MID),
    "evaluation": _first_test,
    "last epoch": _all_applied,
    "accounts": _first_account,
}
