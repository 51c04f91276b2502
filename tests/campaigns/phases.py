"""A campaign on real ranks: each role is killed at each phase of a run; no run may hang or leave processes behind."""

import signal
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rudra.benchmark_report import Goal, Report
from rudra.job.job import Job
from tests.campaigns.ends import LATE_S, RANK, Fault, Outcome, accounts, at_end, hit, shown
from tests.campaigns.progress import side_by_side
from tests.campaigns.strikes import PHASES, Strike
from topologies.kinds import PARAMETER_SERVER, STATISTICS_SERVER

TIMES = 5
"""Kills of each role at each phase."""


def job_text(topology: str, learners: int, protocol: str = "async", epochs: int = 4) -> str:
    """Returns the text of a job of a few seconds; `topology` has the keys of `[topology]`."""
    return f"""
[model]
name = "mlp"
options.hidden = [16]
[data]
name = "tests.campaigns.points:points"
[training]
epochs = {epochs}
minibatch_size = 4
[optimizer]
learning_rate = 0.01
[protocol]
name = "{protocol}"
[cluster]
learners = {learners}
[topology]
{topology}
[results]
checkpoint_every = "8 updates"
report_s = 0.0
flush_s = 0.1
"""


@dataclass(frozen=True, slots=True)
class Place:
    """A topology with few ranks, and its victims: each server, and one learner of each kind."""

    topology: str
    options: str
    learners: int
    victims: tuple[str, ...]

    def job(self) -> str:
        return job_text(f'name = "{self.topology}"\n{self.options}', self.learners)


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


def run(topologies: Sequence[str] = (), *, quick: bool) -> Report:
    """Runs the campaign. Each cell of its table has the exit codes, and `-` for a run that hung.

    Args:
        topologies: names of the topologies; empty: all.
        quick: only a few kills of one learner.
    """
    report = Report(["killed", *PHASES])
    places = [PLACES[name] for name in topologies or PLACES]
    kills = [(place, victim, phase) for place in places for victim in place.victims for phase in PHASES] * TIMES
    if quick:
        kills = [(places[0], places[0].victims[-1], phase) for phase in ("accounts",)]
    rows: dict[str, dict[str, str]] = {}
    every: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="rudra-campaign-") as name:

        def tell(task: tuple[Place, str, str], one: Outcome) -> str:
            return f"{task[0].topology}, {task[1]}, {task[2]}: {one.told}"

        for task, one in side_by_side(lambda task: kill(Path(name), *task), kills, tell):
            place, victim, phase = task
            row = rows.setdefault(f"{place.topology}, {victim}", dict.fromkeys(PHASES, ""))
            row[phase] = f"{row[phase]} {'-' if one.end.code is None else one.end.code}".lstrip()
            if one.wrong:
                report.notes.append(tell(task, one))
            every.append(one)
    report.rows += [[who, *cells.values()] for who, cells in rows.items()]
    report.goals += [
        Goal("hangs = 0", [float(sum(one.end.code is None for one in every))], at_most=0.0),
        Goal("processes left over after 10 s = 0", [float(sum(len(one.end.left) for one in every))], at_most=0.0),
        Goal("else wrong = 0", [float(sum(bool(one.wrong) for one in every))], at_most=0.0),
        Goal("ended within 60 s", [max(one.end.seconds for one in every)], at_most=LATE_S),
    ]
    return report


def kill(directory: Path, place: Place, victim: str, phase: str, number: int = signal.SIGKILL) -> Outcome:
    """Runs a job and kills one of its roles.

    Args:
        directory: directory for the files of the run.
        place: topology of the run.
        victim: name of the role.
        phase: one of `PHASES`.
        number: number of the signal.
    """
    with tempfile.TemporaryDirectory(dir=directory) as name:
        home = Path(name)
        (home / "job.toml").write_text(place.job())
        output = home / "out.h5"
        run = ("run", str(home / "job.toml"), "--output", str(output), "--quiet", "--verbose")
        end = hit(home, Strike(victim, phase, number, home / "mark"), run)
        if not end.struck:
            return Outcome(end, wrong=f"it ended before it was killed, with code {end.code}: {shown(end.said)}")
        rank = next(role.world_rank for role in Job.load(home / "job.toml").plan().roles if role.name == victim)
        wrong = at_end(output, Fault(RANK, number), rank, end)
        if wrong:
            return Outcome(end, wrong=f"{wrong}: {shown(end.said)}")
        return Outcome(end, wrong=accounts(output) if end.code == 0 else "")
