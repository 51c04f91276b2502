"""A stop that reaches one rank stops the whole run in order: every signal, role and phase, on real ranks."""

import json
import os
import pickle
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import ROOT
from stop_series import Series

import rudra
from tests import forks
from tests.campaigns.phases import PLACES, job_text, kill
from tests.campaigns.strikes import DURING, Strike, command
from tests.selection import CAMPAIGN

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(600)]

SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1]
PHASES = [*DURING, "last epoch", "accounts", "done", "close"]
"""Once there are roles; before, see below."""

TREE = 'name = "adv"\noptions.fan_out = 2'
WHERE = {
    "base": ('name = "base"', ["parameter server", "statistics server", "learner 1"]),
    "adv": (TREE, ["parameter server", "statistics server", "tree server 1", "learner 2"]),
    "adv*": ('name = "adv*"', ["parameter server", "learner 0", "learner 2"]),
    "groups": ('name = "groups"\noptions.groups = 2', ["statistics server", "learner 0", "learner 1"]),
    "replicas": ('name = "groups"', ["statistics server", "learner 0", "learner 2"]),
}
"""Topology, and who is hit; groups of two learners, elsewhere there are three learners."""


def hits_of(victims: list[str], *, everybody: bool) -> Iterator[tuple[str, str, int]]:
    """Victim, phase and signal: everybody at every phase, or one after the other; signals take turns."""
    for number, phase in enumerate(PHASES):
        for place, victim in enumerate(victims):
            if everybody or place == number % len(victims):
                yield victim, phase, SIGNALS[(number + place) % len(SIGNALS)]


def job_file(directory: Path, topology: str, learners: int = 3, protocol: str = "async") -> Path:
    path = directory / "job.toml"
    path.write_text(job_text(topology, learners, protocol, epochs=8))
    return path


LAUNCH = """
import pickle, sys
from pathlib import Path
from rudra.mpi.launch import launch
series = pickle.loads(Path("series").read_bytes())
plan = series.job.plan()
roles = [", ".join(plan.roles[i].name for i in plan.on_rank(rank)) for rank in range(plan.ranks)]
sys.exit(launch(series.job, series.directory / "all.h5", roles=roles, payload=series, survivable=True).code)
"""


@pytest.mark.parametrize(
    ("where", "everybody"),
    [
        ("base", False),
        pytest.param("adv*", False, marks=CAMPAIGN),
        ("replicas", False),
        pytest.param("base", True, marks=CAMPAIGN),
        pytest.param("adv", False, marks=CAMPAIGN),
        pytest.param("groups", False, marks=CAMPAIGN),
    ],
)
def test_stop_of_one_rank_in_any_phase_stops_all_in_order(tmp_path: Path, where: str, *, everybody: bool) -> None:
    topology, victims = WHERE[where]
    learners, protocol = (4 if where == "groups" else 3), "hardsync" if where == "replicas" else "async"
    job = rudra.Job.load(job_file(tmp_path, topology, learners, protocol)).resolved(cores=1)
    hits = list(hits_of(victims, everybody=everybody))
    (tmp_path / "series").write_bytes(pickle.dumps(Series(job, hits, tmp_path)))
    (tmp_path / "launch.py").write_text(LAUNCH)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent)])}
    process = subprocess.Popen(
        forks.script("launch.py"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, cwd=tmp_path
    )
    try:
        _, err = process.communicate(timeout=550)
    except subprocess.TimeoutExpired:
        done = len(list(tmp_path.glob("*.json")))
        pytest.fail(f"{hits[done]} hung, after {done} others")
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, err
    wrong: list[Any] = []
    for place, (victim, phase, number) in enumerate(hits):
        codes = json.loads((tmp_path / f"{place}.json").read_text())
        hit = (tmp_path / f"{place}.mark").exists()
        with rudra.open_results(tmp_path / f"{place}.h5") as results:
            totals = results.totals[0]
            adds_up = totals["pushed"] == sum(totals[name] for name in ("applied", "pending", "discarded", "lost"))
            kept = (tmp_path / f"{place}.ckpt").exists()
            found = (hit, set(codes), results.status, results.state["reason"], kept, bool(adds_up))
        stopped = (True, {3}, "interrupted", "stopped on request", True, True)
        finished = (True, {0}, "finished", "", True, True)
        if found != (stopped if phase in DURING else finished):
            wrong.append(((victim, phase, signal.Signals(number).name), found))
    assert not wrong, "\n".join(map(str, wrong)) + err


EARLY = [
    ("import", signal.SIGTERM),
    pytest.param("start", signal.SIGUSR1, marks=CAMPAIGN),
    ("start", signal.SIGHUP),  # which MPI's libraries would keep to themselves
    ("load", signal.SIGINT),
    ("set-up", signal.SIGHUP),
]


@pytest.mark.parametrize(("phase", "number"), EARLY)
def test_a_stop_of_one_rank_before_training_ends_the_job_in_one_line(tmp_path: Path, phase: str, number: int) -> None:
    found = kill(tmp_path, PLACES["base"], "learner 1", phase, number)
    assert (found.end.code, found.end.left, found.wrong) == (1, [], "")


ENDS = [
    ("close", 0, "to end after training"),
    ("set-up", 1, "to get ready"),
    pytest.param("roles", 1, "to get ready", marks=CAMPAIGN),
]


@pytest.mark.parametrize(("phase", "code", "said"), ENDS)
def test_nobody_waits_longer_than_the_limit_for_a_rank_that_is_stopped(
    tmp_path: Path, phase: str, code: int, said: str
) -> None:
    """Neither before nor after training, in which ranks notice each other."""
    job, output = job_file(tmp_path, 'name = "base"'), tmp_path / "out.h5"
    limit = ["--set", "fault_tolerance.stall_limit_s=8"]
    asked = ["run", str(job), "--output", str(output), *limit]
    argv = command(Strike("learner 1", phase, signal.SIGSTOP, tmp_path / "mark"), asked)
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT)
    lines = [line for line in done.stderr.splitlines() if line.startswith("rudra: ") and "rudra resume" not in line]
    assert (done.returncode, len(lines)) == (code, 1), done.stderr  # mpirun ends a rank by letting it go on for a while
    assert re.search(
        rf"has waited \d+ s for .*learner 1.* {said}, longer than fault_tolerance\.stall_limit_s allows", lines[0]
    )
    if not code:
        assert lines[0].endswith(f"its results are complete: {output}")
        with rudra.open_results(output) as results:
            assert results.status == "finished"
