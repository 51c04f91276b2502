"""A campaign on real ranks: SIGKILLs at random moments.

Learners and servers of a tree are killed while the others train. The two other servers are killed in runs with a
checkpoint, from which they restart. Whole jobs are killed and resumed until they finish. The campaign then reads every
result file and checks its accounts.

With checksums, ranks are killed while other ranks read gradients and weights in their memory. The reader compares the
checksum of a tensor when it takes the tensor and when it returns it. A tensor that changed in between ends the run with
an error, and is counted.
"""

import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

from rudra.benchmark_report import Goal, Report
from rudra.errors import RudraError, RunError
from rudra.mpi.failures import ranks_below
from rudra.results.checkpoint import path_of
from rudra.results.reader import open_results
from tests.campaigns.ends import adds_up, environment
from tests.campaigns.progress import Progress
from topologies.kinds import LEARNER, PARAMETER_SERVER, STATISTICS_SERVER, TREE_SERVER

LEARNERS = 4
LATE = 10
"""Kills in a row that may come after the end of the victim's work, until the campaign counts them as failures."""

LIMIT_S = 120.0
"""A run that takes longer has hung: a run needs less than a third of it."""

COMMON = (
    f"cluster.learners={LEARNERS}",
    "results.flush_s=0.1",
    "results.report_s=0.02",
    "optimizer.learning_rate=0.01",
    "optimizer.momentum=0",
    "cluster.device=cpu",
)
SERVERS = (PARAMETER_SERVER, STATISTICS_SERVER)
"""Without one of these servers a run restarts from its checkpoint."""

SOFTSYNC, ASYNC = ("protocol.name=softsync",), ("protocol.name=async",)
TREE = (*SOFTSYNC, "topology.name=adv", "topology.options.fan_out=2")
OVERLAPPED = (*ASYNC, "topology.name=adv*", "topology.options.fan_out=2")
GROUPS = (*ASYNC, "topology.name=groups", "topology.options.groups=2")
WINDOW = (
    "protocol.name=hogbatch",
    "hogbatch.workers=[{kind = 'small', threads = 2, min = 8, max = 8}]",
    "hogbatch.weights=shared",
)
CHECKED = "model.name=tests.campaigns.points:checked_mlp"
SMALL = (CHECKED, "model.options.hidden=[625, 625]")
LARGE = (
    CHECKED,
    "model.options.hidden=[8400, 8400]",
    "data.train_limit=96",
    "training.minibatch_size=4",
    "training.epochs=3",
)
CHANGED, HUNG, UNREADABLE = "has changed during the transfer", "it hung", "the result file cannot be read"


@dataclass(frozen=True, slots=True)
class Case:
    """Victims of one kind under one job.

    Attributes:
        kind: kind of the role that is killed.
        settings: settings of the job.
        kills: number of roles that are killed. A run continues without a learner or a server of a tree, and restarts
            from a checkpoint without another server.
        calm: number of undisturbed runs.
    """

    kind: str
    settings: Sequence[str]
    kills: int
    calm: int = 0


CASES = {
    "learners, softsync": Case(LEARNER, SOFTSYNC, 17, calm=3),
    "learners, async": Case(LEARNER, ASYNC, 17, calm=3),
    "learners, softsync, 17 MB": Case(
        LEARNER, (*SOFTSYNC, "model.name=mlp", "model.options.hidden=[2048, 2048]"), 17, calm=3
    ),
    "learners, softsync, tree": Case(LEARNER, TREE, 17, calm=3),
    "learners, async, adv*": Case(LEARNER, OVERLAPPED, 17, calm=3),
    "learners, async, groups": Case(LEARNER, GROUPS, 17, calm=3),
    "servers of a tree": Case(TREE_SERVER, TREE, 17),
    "parameter server": Case(PARAMETER_SERVER, TREE, 17),
    "statistics server": Case(STATISTICS_SERVER, TREE, 17),
    "workers, racing window": Case(LEARNER, (*WINDOW, "hogbatch.locking=false"), 15),
    "workers, locked window": Case(LEARNER, (*WINDOW, "hogbatch.locking=true"), 15),
}
QUICK = {"learners, softsync": Case(LEARNER, SOFTSYNC, 1), "parameter server": Case(PARAMETER_SERVER, TREE, 1)}
WITH_CHECKSUMS = {
    "1.7 MB, learners, softsync": Case(LEARNER, (*SOFTSYNC, *SMALL), 16, calm=1),
    "1.7 MB, learners, hardsync": Case(LEARNER, ("protocol.name=hardsync", *SMALL), 14, calm=1),
    "1.7 MB, learners of a tree": Case(LEARNER, (*TREE, *SMALL), 12, calm=1),
    "1.7 MB, servers of a tree": Case(TREE_SERVER, (*TREE, *SMALL), 10, calm=1),
    "1.7 MB, learners, adv*": Case(LEARNER, (*OVERLAPPED, *SMALL), 14, calm=1),
    "1.7 MB, members of groups": Case(LEARNER, (*GROUPS, *SMALL), 14, calm=1),
    "1.7 MB, parameter server": Case(PARAMETER_SERVER, (*SOFTSYNC, *SMALL), 12, calm=1),
    "289 MB, learners, async": Case(LEARNER, (*ASYNC, *LARGE), 4, calm=1),
    "289 MB, parameter server": Case(PARAMETER_SERVER, (*ASYNC, *LARGE), 4, calm=1),
}
QUICK_WITH_CHECKSUMS = {"1.7 MB, learners, softsync": Case(LEARNER, (*SOFTSYNC, *SMALL), 1)}
WHOLE_JOB, JOB_KILLS = "whole job, hardsync", 20


@dataclass(slots=True)
class Tally:
    """The outcomes of one case.

    Attributes:
        faults: number of kills.
        survived: number of kills that the run survived, or recovered from.
        seconds: times until a death was noticed, or until the run ended or restarted.
        errors: final test errors of disturbed runs.
        calm: final test errors of undisturbed runs.
        texts: descriptions of what went wrong.
    """

    faults: int = 0
    survived: int = 0
    seconds: list[float] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    calm: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    def said(self, word: str) -> int:
        """Returns the number of texts that contain a word."""
        return sum(word in text for text in self.texts)

    @property
    def told(self) -> str:
        """A description in a few words."""
        return f"{self.survived} of {self.faults} survived"


def run(*, checksums: bool = False, quick: bool) -> Report:
    """Runs the campaign. The notes of the report name the seed of victims and moments.

    Args:
        checksums: kill ranks while others read their memory, and check what is read.
        quick: only a few kills, and no goals for times and errors.
    """
    if checksums:
        cases, job_kills = (QUICK_WITH_CHECKSUMS if quick else WITH_CHECKSUMS), 0
    else:
        cases, job_kills = (QUICK, 1) if quick else (CASES, JOB_KILLS)
    seed = random.SystemRandom().randrange(1 << 32)
    tallies: dict[str, Tally] = {}
    with (
        tempfile.TemporaryDirectory(prefix="rudra-campaign-") as name,
        closing(Progress(sum(case.kills for case in cases.values()) + job_kills)) as progress,
        closing(Campaign(Path(name), random.Random(seed), progress, quick=quick)) as campaign,
    ):
        for about, case in cases.items():
            tallies[about] = campaign.case(about, case)
        if job_kills:
            tallies[WHOLE_JOB] = campaign.jobs(WHOLE_JOB, job_kills)
    heads = ["survived or recovered", "changed while read", "hung", "files unreadable", "s to notice or end"]
    report = Report(["killed", "times", *heads])
    for about, tally in tallies.items():
        took = f"{statistics.median(tally.seconds):.2f} ({max(tally.seconds):.2f})" if tally.seconds else "-"
        hits = map(tally.said, (CHANGED, HUNG, UNREADABLE))
        report.rows.append([about, tally.faults, tally.survived, *hits, took])
        report.notes += [f"{about}: {text}" for text in tally.texts]
    every = tallies.values()
    survived = sum(tally.survived for tally in every) / sum(tally.faults for tally in every)
    report.goals = [
        Goal("all survived or recovered", [survived], at_least=1.0),
        Goal("hangs = 0", [float(sum(tally.said(HUNG) for tally in every))], at_most=0.0),
        Goal("files unreadable = 0", [float(sum(tally.said(UNREADABLE) for tally in every))], at_most=0.0),
    ]
    if checksums:
        changed = float(sum(tally.said(CHANGED) for tally in every))
        report.goals.append(Goal("changed while read = 0", [changed], at_most=0.0))
    elif not quick:
        outlived = {about for about, case in cases.items() if case.kind not in SERVERS}
        noticed = [tally for about, tally in tallies.items() if about in outlived]
        ended = [tally for about, tally in tallies.items() if about not in outlived]
        report.goals += [
            Goal("noticed within 2 s", [_longest(noticed)], at_most=2.0),
            Goal("ended within 10 s", [_longest(ended)], at_most=10.0),
            Goal("test error within a point of undisturbed runs", [_compare(report, tallies)], at_most=1.0),
        ]
    report.notes.append(f"seed {seed}")
    return report


def _longest(tallies: Iterable[Tally]) -> float:
    return max((s for tally in tallies for s in tally.seconds), default=math.nan)


def _compare(report: Report, tallies: Mapping[str, Tally]) -> float:
    """Notes test errors; returns by how many points the median of disturbed runs exceeds all undisturbed runs."""
    worse = []
    for about, tally in tallies.items():
        if tally.errors and tally.calm:
            middle = statistics.median(tally.errors)
            calm = f"{min(tally.calm):.2%} to {max(tally.calm):.2%} undisturbed"
            killed = f"{min(tally.errors):.2%} to {max(tally.errors):.2%} with learners killed, median {middle:.2%}"
            report.notes.append(f"test error, {about}: {calm}, {killed}")
            worse.append(100 * max(0.0, middle - max(tally.calm)))
    return max(worse, default=math.nan)


class Campaign:
    """Runs of jobs, and kills of their processes.

    Args:
        directory: directory of the result files.
        chance: source of victims and moments.
        progress: counter of the kills.
        quick: whether runs are shorter.
    """

    def __init__(self, directory: Path, chance: random.Random, progress: Progress, *, quick: bool = False) -> None:
        self._directory, self._chance, self._progress = directory, chance, progress
        self._common = (*COMMON, f"training.epochs={2 if quick else 6}")
        self._runs = 0
        self._last: subprocess.Popen[str] | None = None

    def close(self) -> None:
        """Ends the run that is left if the campaign is interrupted."""
        if self._last is not None and self._last.poll() is None:
            _finish(self._last, within_s=0.0)

    def case(self, about: str, case: Case) -> Tally:
        """Runs a case; `about` is its name."""
        calm = [self._undisturbed(case.settings) for _ in range(case.calm)]
        kill = self._servers if case.kind in SERVERS else self._outlived
        tally = kill(about, case)
        tally.calm = calm
        return tally

    def _undisturbed(self, settings: Sequence[str]) -> float:
        """Returns the final test error of an undisturbed run."""
        output = self._output()
        code, said = _finish(self._start(output, settings))
        if code:
            raise RunError(f"a run that nobody disturbed failed: {said}")
        return _final_error(output)

    def _outlived(self, about: str, case: Case) -> Tally:
        """Kills roles while the others continue, one or two in a run."""
        tally, late = Tally(), 0
        while tally.faults < case.kills:
            output = self._output()
            process = self._start(output, case.settings)
            first = {role: rank for role, rank in _ranks(output, process).items() if role.startswith(case.kind)}
            victims = self._chance.sample(sorted(first), min(2, case.kills - tally.faults))
            killed = []
            for place, victim in enumerate(victims):
                self._wait(output, process, 8 + 25 * place)
                _kill(process, first[victim])
                killed.append(time.time())
            code, said = _finish(process)
            tally.faults += len(victims)
            try:
                with open_results(output) as results:
                    lost, complete = results.events[results.events["kind"] == b"lost"], adds_up(results)
            except RudraError as error:
                tally.texts.append(f"{UNREADABLE}: {error}")
            else:
                if code == 0 and len(lost) < len(victims) and complete and late < LATE:
                    late += 1  # it had left already, and nothing is missing: no fault
                    tally.faults -= len(victims)
                    continue
                late = 0
                if code == 0 and len(lost) == len(victims) and complete:
                    tally.survived += len(victims)
                    tally.seconds += [float(row["wall_s"]) - began for row, began in zip(lost, killed, strict=True)]
                    tally.errors.append(_final_error(output))
                else:
                    tally.texts.append(f"exit code {code}, {len(lost)} of {len(victims)} noticed: {said[-300:]}")
            self._progress.done(f"{about}: {tally.told}", len(victims))
        return tally

    def _servers(self, about: str, case: Case) -> Tally:
        """Kills a role that the run needs; the run must restart from its checkpoint."""
        tally = Tally()
        settings = (*case.settings, "fault_tolerance.restarts=1", "results.checkpoint_every=3 updates")
        for _ in range(case.kills):
            output = self._output()
            process = self._start(output, settings)
            rank = _ranks(output, process)[case.kind]
            self._wait(output, process, 8)
            kept = _checkpoints(output)
            _kill(process, rank)
            killed = time.monotonic()
            assert process.stderr is not None
            lines = []
            for line in process.stderr:
                lines.append(line)
                if line.startswith("rudra: restart"):
                    tally.seconds.append(time.monotonic() - killed)
                    break
            code, said = _finish(process)
            tally.faults += 1
            try:
                with open_results(output) as results:
                    back = results.events[results.events["kind"] == b"restart"]["timestamp"]
                    if code == 0 and len(back) == 1 and back[0] >= kept and adds_up(results):
                        tally.survived += 1
                    else:
                        text = f"exit code {code}, back to {list(back)}, had checkpoint {kept}"
                        tally.texts.append(f"{text}: {''.join(lines)[-300:]}{said[-300:]}")
            except RudraError as error:
                tally.texts.append(f"{UNREADABLE}: {error}")
            self._progress.done(f"{about}: {tally.told}")
        return tally

    def jobs(self, about: str, kills: int) -> Tally:
        """Kills and resumes one job again and again; compares its final weights with an undisturbed run."""
        tally = Tally()
        settings = (
            "protocol.name=hardsync",
            "optimizer.momentum=0.9",
            "optimizer.milestones=[2, 4]",
            "results.checkpoint_every=2 updates",
        )
        output, calm = self._output(), self._output()
        update = 0
        for _ in range(kills):
            process = self._start(output, settings, "--resume")
            self._wait(output, process, update + 4)
            number = self._chance.choice([signal.SIGKILL, signal.SIGTERM])
            began = time.monotonic()
            process.send_signal(number)
            _finish(process)
            tally.seconds.append(time.monotonic() - began)
            tally.faults += 1
            self._progress.done(f"{about}: killed {tally.faults} times")
            try:
                with open_results(output) as results:
                    update = max(update, len(results.updates))
            except RudraError as error:
                tally.texts.append(f"{UNREADABLE}: {error}")
        codes = [_finish(self._start(output, settings, "--resume"))[0], _finish(self._start(calm, settings))[0]]
        with open_results(output) as killed, open_results(calm) as whole:
            same = killed.state["weights_sha256"] == whole.state["weights_sha256"] != ""
            if codes == [0, 0] and same and adds_up(killed):
                tally.survived = kills
            else:
                tally.texts.append(f"exit codes {codes}, the same weights: {same}")
        return tally

    def _start(self, output: Path, settings: Sequence[str], *more: str) -> "subprocess.Popen[str]":
        keys = (*self._common, *settings)
        sets = [argument for key in keys for argument in ("--set", key)]
        command = [sys.executable, "-m", "rudra", "run", "digits", "--output", str(output), "--quiet", *sets, *more]
        self._last = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment()
        )
        return self._last

    def _output(self) -> Path:
        self._runs += 1
        return self._directory / f"{self._runs}.h5"

    def _wait(self, output: Path, process: "subprocess.Popen[str]", updates: int) -> None:
        """Waits until the run has made this number of updates, and then a random moment."""
        deadline = time.monotonic() + LIMIT_S
        while process.poll() is None and time.monotonic() < deadline and _updates(output) < updates:
            time.sleep(0.01)
        time.sleep(self._chance.uniform(0.0, 0.3))


def _finish(process: "subprocess.Popen[str]", within_s: float = LIMIT_S) -> tuple[int, str]:
    try:
        _, said = process.communicate(timeout=within_s)
        return process.returncode, said
    except subprocess.TimeoutExpired:
        return -1, HUNG
    finally:
        process.kill()
        process.wait()


def _ranks(output: Path, process: "subprocess.Popen[str]") -> dict[str, int]:
    """Returns the world rank of each role, as soon as the run has begun."""
    deadline = time.monotonic() + LIMIT_S
    while process.poll() is None and time.monotonic() < deadline:
        with suppress(RudraError), open_results(output) as results:
            return {role.name: role.world_rank for role in results.plan().roles}
        time.sleep(0.02)
    raise RunError(f"a run did not begin: {_finish(process)[1]}")


def _kill(process: "subprocess.Popen[str]", rank: int) -> None:
    with suppress(KeyError, ProcessLookupError):
        os.kill(ranks_below(process.pid)[rank], signal.SIGKILL)


def _updates(output: Path) -> int:
    with suppress(RudraError), open_results(output) as results:
        return len(results.updates)
    return 0


def _checkpoints(output: Path) -> int:
    """Returns the timestamp of the last checkpoint that the result file names; 0 if the checkpoint does not exist."""
    with suppress(RudraError), open_results(output) as results:
        events = results.events  # once: the file grows
        made = events["timestamp"][events["kind"] == b"checkpoint"]
        return int(made.max()) if len(made) and path_of(output).exists() else 0
    return 0


def _final_error(output: Path) -> float:
    with open_results(output) as results:
        return float(results.summary()["final_test_error"])
