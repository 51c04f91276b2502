"""A campaign of faults on real ranks: SIGKILLs at random moments, and what comes of the runs.

Learners and servers of a tree are killed while others train, the two other servers with a checkpoint to go back to, and
whole jobs, which are resumed until they are done. Every file is read afterwards, and every account added up.
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
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from rudra.errors import RudraError, RunError
from rudra.findings import Goal, Report
from rudra.mpi.failures import ranks_below
from rudra.results.checkpoint import path_of
from rudra.results.reader import Results, open_results
from topologies.kinds import LEARNER, PARAMETER_SERVER, STATISTICS_SERVER, TREE_SERVER

LEARNERS = 4
CALM = 3
"""Runs under each of the settings that nobody disturbs."""

LATE = 10
"""Kills in a row that find a learner done with its work, until the campaign gives up."""

LIMIT_S = 120.0
"""A run that takes longer has hung: none needs a third of it."""

SETTINGS: dict[str, Sequence[str]] = {
    "softsync": ("protocol.name=softsync",),
    "async": ("protocol.name=async",),
    "softsync, 17 MB": ("protocol.name=softsync", "model.name=mlp", "model.options.hidden=[2048, 2048]"),
    "softsync, tree": ("protocol.name=softsync", "topology.name=adv", "topology.options.fan_out=2"),
    "async, adv*": ("protocol.name=async", "topology.name=adv*", "topology.options.fan_out=2"),
    "async, groups": ("protocol.name=async", "topology.name=groups", "topology.options.groups=2"),
}
"""Learners are killed under these."""

TREE = "softsync, tree"
COMMON = (
    f"cluster.learners={LEARNERS}",
    "results.flush_s=0.1",
    "results.report_s=0.02",
    "optimizer.learning_rate=0.01",
    "optimizer.momentum=0",
    "cluster.device=cpu",
)
SERVERS = (PARAMETER_SERVER, STATISTICS_SERVER)


@dataclass(slots=True)
class Tally:
    """What became of one kind of fault."""

    faults: int = 0
    survived: int = 0
    seconds: list[float] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    unreadable: int = 0
    texts: list[str] = field(default_factory=list)  # of what went wrong


def run(
    *, quick: bool, phases: Sequence[str] | None = None, jobs: Sequence[str] | None = None, times: int | None = None
) -> Report:
    """Runs the campaign; a seed that the notes give tells every moment again, as far as a machine repeats itself."""
    if jobs is not None:
        from rudra.bench import jobfaults

        return jobfaults.run(jobs, times=times, quick=quick)
    if phases is not None:
        from rudra.bench import phases as campaign_by_phases

        return campaign_by_phases.run(phases, quick=quick)
    seed = random.SystemRandom().randrange(1 << 32)
    chance = random.Random(seed)
    learners, servers, whole = (2, 1, 1) if quick else (100, 50, 20)
    settings = dict(list(SETTINGS.items())[: 1 if quick else None])
    report = Report(["killed", "times", "survived or recovered", "s to notice or end", "files unreadable"])
    with (
        tempfile.TemporaryDirectory(prefix="rudra-bench-") as name,
        tqdm(total=learners + servers + whole, unit=" kills", leave=False, disable=None) as bar,
        closing(Campaign(Path(name), chance, bar, quick=quick)) as campaign,
    ):
        calm = {name: [campaign.undisturbed(s) for _ in range(1 if quick else CALM)] for name, s in settings.items()}
        each = -(-learners // len(settings))
        outlived = {f"learners, {name}": campaign.outlived(LEARNER, s, each) for name, s in settings.items()}
        ending = {
            role: campaign.servers(role, SETTINGS[TREE], servers // 3 + 1) for role in SERVERS[: 1 if quick else None]
        }
        if not quick:
            outlived["servers of a tree"] = campaign.outlived(TREE_SERVER, SETTINGS[TREE], servers // 3 + 1)
        ending["whole job, hardsync"] = campaign.jobs(whole)
        tallies = outlived | ending
    for kind, tally in tallies.items():
        took = f"{statistics.median(tally.seconds):.2f} ({max(tally.seconds):.2f})" if tally.seconds else "-"
        report.rows.append([kind, tally.faults, tally.survived, took, tally.unreadable])
        report.notes += [f"{kind}: {text}" for text in tally.texts]
    worse = []  # points of test error by which the middle one of the disturbed runs exceeds all that nobody disturbed
    for name, undisturbed in calm.items():
        errors = outlived[f"learners, {name}"].errors
        if errors:
            middle, shown = statistics.median(errors), f"{min(undisturbed):.2%} to {max(undisturbed):.2%} undisturbed"
            killed = f"{min(errors):.2%} to {max(errors):.2%} with learners killed, median {middle:.2%}"
            report.notes.append(f"test error, {name}: {shown}, {killed}")
            worse.append(100 * max(0.0, middle - max(undisturbed)))
    report.notes.append(f"seed {seed}")
    faults, survived = (sum(getattr(tally, name) for tally in tallies.values()) for name in ("faults", "survived"))
    report.goals += [
        Goal("all survived or recovered", [survived / faults], at_least=1.0),
        Goal("noticed within 2 s", [_longest(outlived)], at_most=2.0),
        Goal("ended within 10 s", [_longest(ending)], at_most=10.0),
        Goal("test error within a point of undisturbed runs", [max(worse, default=math.nan)], at_most=1.0),
        Goal("files unreadable = 0", [float(sum(tally.unreadable for tally in tallies.values()))], at_most=0.0),
    ]
    return report


def _longest(tallies: Mapping[str, Tally]) -> float:
    return max((s for tally in tallies.values() for s in tally.seconds), default=math.nan)


class Campaign:
    """Runs and kills.

    Args:
        directory: for results.
        chance: draws victims and moments.
        bar: counts the kills.
        quick: shorter runs.
    """

    def __init__(self, directory: Path, chance: random.Random, bar: "tqdm[None]", *, quick: bool = False) -> None:
        self._directory, self._chance, self._bar = directory, chance, bar
        self._common = (*COMMON, f"training.epochs={3 if quick else 6}")
        self._runs = 0
        self._last: subprocess.Popen[str] | None = None

    def close(self) -> None:
        """Ends what still runs, because the campaign was broken off."""
        if self._last is not None and self._last.poll() is None:
            _finish(self._last, within_s=0.0)

    def undisturbed(self, settings: Sequence[str]) -> float:
        """Final test error of a run that nobody disturbs."""
        output = self._output()
        code, said = _finish(self._start(output, settings))
        if code:
            raise RunError(f"a run that nobody disturbed failed: {said}")
        return _final_error(output)

    def outlived(self, kind: str, settings: Sequence[str], kills: int) -> Tally:
        """Kills roles of a kind while the others go on, one or two in a run."""
        tally, late = Tally(), 0
        while tally.faults < kills:
            output = self._output()
            process = self._start(output, settings)
            first = {role: rank for role, rank in _ranks(output, process).items() if role.startswith(kind)}
            victims = self._chance.sample(sorted(first), min(2, kills - tally.faults))
            killed = []
            for place, victim in enumerate(victims):
                self._wait(output, process, 8 + 25 * place)
                _kill(process, first[victim])
                killed.append(time.time())
            code, said = _finish(process)
            with suppress(RudraError), open_results(output) as results:
                lost = results.events[results.events["kind"] == b"lost"]
                if code == 0 and len(lost) < len(victims) and adds_up(results) and late < LATE:
                    late += 1  # it had left already, and nothing is missing: no fault
                    continue
                late = 0
                self._count(tally, len(victims))
                if code == 0 and len(lost) == len(victims) and adds_up(results):
                    tally.survived += len(victims)
                    tally.seconds += [float(row["wall_s"]) - began for row, began in zip(lost, killed, strict=True)]
                    tally.errors.append(_final_error(output))
                    continue
                tally.texts.append(f"exit code {code}, {len(lost)} of {len(victims)} noticed: {said[-300:]}")
                continue
            self._count(tally, len(victims))
            tally.unreadable += 1
        return tally

    def _count(self, tally: Tally, faults: int) -> None:
        tally.faults += faults
        self._bar.update(faults)

    def servers(self, role: str, settings: Sequence[str], kills: int) -> Tally:
        """Kills a role without which nothing goes on; the run is to begin again from its checkpoint."""
        tally = Tally()
        settings = (*settings, "fault_tolerance.restarts=1", "results.checkpoint_every=3 updates")
        for _ in range(kills):
            output = self._output()
            process = self._start(output, settings)
            rank = _ranks(output, process)[role]
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
            self._bar.update()
            tally.faults += 1
            try:
                with open_results(output) as results:
                    back = results.events[results.events["kind"] == b"restart"]["timestamp"]
                    if code == 0 and len(back) == 1 and back[0] >= kept and adds_up(results):
                        tally.survived += 1
                    else:
                        text = f"exit code {code}, back to {list(back)}, had checkpoint {kept}"
                        tally.texts.append(f"{text}: {''.join(lines)[-300:]}{said[-300:]}")
            except RudraError:
                tally.unreadable += 1
        return tally

    def jobs(self, kills: int) -> Tally:
        """Kills one job again and again, and resumes it, until it is done; then compares its weights."""
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
            self._bar.update()
            try:
                with open_results(output) as results:
                    update = max(update, len(results.updates))
            except RudraError:
                tally.unreadable += 1
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
        self._last = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        return self._last

    def _output(self) -> Path:
        self._runs += 1
        return self._directory / f"{self._runs}.h5"

    def _wait(self, output: Path, process: "subprocess.Popen[str]", updates: int) -> None:
        """Until the run has made so many updates, and a random moment longer."""
        deadline = time.monotonic() + LIMIT_S
        while process.poll() is None and time.monotonic() < deadline and _updates(output) < updates:
            time.sleep(0.01)
        time.sleep(self._chance.uniform(0.0, 0.3))


def _finish(process: "subprocess.Popen[str]", within_s: float = LIMIT_S) -> tuple[int, str]:
    try:
        _, said = process.communicate(timeout=within_s)
        return process.returncode, said
    except subprocess.TimeoutExpired:
        return -1, "it hung"
    finally:
        process.kill()
        process.wait()


def _ranks(output: Path, process: "subprocess.Popen[str]") -> dict[str, int]:
    """World rank of each role, when the run has begun."""
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
    """Timestamp of the last checkpoint that the file speaks of, and that is there."""
    with suppress(RudraError), open_results(output) as results:
        events = results.events  # once: the file grows
        made = events["timestamp"][events["kind"] == b"checkpoint"]
        return int(made.max()) if len(made) and path_of(output).exists() else 0
    return 0


def adds_up(results: Results) -> bool:
    """Whether a run is complete: every gradient accounted for, none applied twice."""
    if results.status != "finished":
        return False
    totals, gradients = results.totals[0], results.gradients
    counted = totals["pushed"] == sum(totals[name] for name in ("applied", "pending", "discarded", "lost"))
    pairs = set(zip(gradients["learner"].tolist(), gradients["step"].tolist(), strict=True))
    return bool(counted) and len(pairs) == len(gradients) == totals["applied"]


def _final_error(output: Path) -> float:
    with open_results(output) as results:
        return float(results.summary()["final_test_error"])
