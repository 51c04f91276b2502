"""`rudra sweep`: which points there are, that they get done, and that no mishap spoils the directory."""

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import rudra
from rudra.cli.main import main
from rudra.errors import ConfigError
from rudra.job.job import Job
from rudra.job.jobfiles import flattened
from rudra.machine import cores
from rudra.results.reader import open_results
from rudra.studies import sweep
from tests import forks
from tests.waiting import eventually

ROOT = Path(__file__).resolve().parents[2]
JOB = """
[model]
name = "mlp"
options = { hidden = [8] }
[data]
train_limit = 64
test_limit = 32
[training]
epochs = 1
[cluster]
learners = 2
[simulation]
tensors = false
"""
STUDY = """
[study]
title = "two and two"
figure = "tradeoff"
grid = { protocol.n = [1, 2], "training.minibatch_size" = [4, 8] }
points = [{ protocol.name = "hardsync", cluster.learners = 3 }]
quick_grid = { protocol.n = [2] }
paper = ["table9"]
[study.quick]
training.epochs = 1
data.train_limit = 32
"""
PAPER = """
[table9]
source = "Table 9"
rows = [
  { sigma = 2, protocol = "softsync", n = 2, minibatch_size = 8, learners = 2, test_error = 0.25 },
  { sigma = 0, protocol = "hardsync", minibatch_size = 16, learners = 3, time_s = 7 },
  { sigma = 2, protocol = "softsync", n = 2, modulation = "none", minibatch_size = 8, learners = 2, test_error = 0.9 },
  { sigma = 1, protocol = "softsync", n = 1, minibatch_size = 128, learners = 2, test_error = 0.5 },
]
"""
USER = """
import os, signal, time
from rudra.compute.networks import mlp

def fragile(input_shape, classes, fault):
    if fault == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "raises":
        raise ZeroDivisionError("by\\nzero")
    if fault == "sleeps":
        time.sleep(1000)
    return mlp(input_shape, classes, (8,))
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a job that has a study, and one that is up to the user's code."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text(JOB + STUDY)
    (tmp_path / "paper.toml").write_text(PAPER)
    (tmp_path / "mine.py").write_text(USER)
    fragile = JOB.replace('"mlp"', '"mine:fragile"').replace("hidden = [8]", 'fault = "none"')
    (tmp_path / "fragile.toml").write_text(fragile.replace("tensors = false", ""))
    return tmp_path


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`rudra sweep` in a process of its own, as workers are spawned from it."""
    with started(*arguments, command=forks.rudra()) as process:
        out, err = process.communicate(timeout=240)
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


def started(*arguments: str, command: Sequence[str] = (sys.executable, "-m", "rudra")) -> "subprocess.Popen[str]":
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    line = [*command, "sweep", *arguments]
    return subprocess.Popen(line, stdout=pipe, stderr=pipe, text=True, env=env, start_new_session=True)


def statuses(directory: Path) -> dict[str, str]:
    found = {}
    for file in sorted(directory.glob("*.h5")):
        with open_results(file) as results:
            found[file.stem] = results.status
    return found


def files(points: sweep.Sweep) -> list[str]:
    return [point.file for point in points.points]


def test_a_study_is_a_grid_and_further_points(here: Path) -> None:
    study = sweep.plan("job.toml")
    assert [dict(point.overrides) for point in study.points] == [
        {"protocol.n": 1, "training.minibatch_size": 4},
        {"protocol.n": 1, "training.minibatch_size": 8},
        {"protocol.n": 2, "training.minibatch_size": 4},
        {"protocol.n": 2, "training.minibatch_size": 8},
        {"protocol.name": "hardsync", "cluster.learners": 3},
    ]
    assert files(study)[::4] == ["n=1,minibatch_size=4.h5", "protocol=hardsync,learners=3.h5"]
    assert [point.label for point in study.points][::4] == ["n = 1, μ = 4", "hardsync, λ = 3"]
    last = study.points[-1].job
    assert (last.learners, last.protocol.name, last.cluster.threads_per_rank) == (3, "hardsync", 1)
    assert (study.title, study.figure, study.quick) == ("two and two", "tradeoff", False)


def test_what_wins_over_what(here: Path) -> None:
    """The points over `--set`, that over the quick variant, that over the job."""
    (quick,) = sweep.plan("job.toml", quick=True).points
    assert (quick.job.data.train_limit, quick.overrides) == (32, {"protocol.n": 2})
    (quick,) = sweep.plan("job.toml", quick=True, overrides=["data.train_limit=16", "training.seed=4"]).points
    assert (quick.job.data.train_limit, quick.job.training.seed) == (16, 4)
    given = sweep.plan("job.toml", grid={"training.seed": [1, 2, 3]}, overrides=["protocol.n=2"])
    assert [(p.job.training.seed, p.job.protocol.n) for p in given.points] == [(1, 2), (2, 2), (3, 2)]
    assert given.figure == "table"


def test_rows_of_the_paper_find_their_points(here: Path) -> None:
    rows = sweep.plan("job.toml").paper
    assert [row["file"] for row in rows] == [
        "n=2,minibatch_size=8.h5",
        "protocol=hardsync,learners=3.h5",
        None,  # another modulation
        None,  # no such point
    ]
    assert {row["source"] for row in rows} == {"Table 9"}
    alike = sweep.plan("job.toml", grid={"protocol.name": ["async"], "training.minibatch_size": [8]})
    assert alike.paper[0]["file"] == "protocol=async,minibatch_size=8.h5", "async is λ-softsync"


@pytest.mark.parametrize(
    ("options", "grid"),
    [
        (["training.seed=1,2"], {"training.seed": [1, 2]}),
        (["protocol.name=hardsync, async"], {"protocol.name": ["hardsync", "async"]}),
        (["a.b=1", "a.c=true,0.5"], {"a.b": [1], "a.c": [True, 0.5]}),
        (["optimizer.milestones=[1],[2, 3]"], {"optimizer.milestones": [[1], [2, 3]]}),
        (['data.path="a,b",c'], {"data.path": ['"a', 'b"', "c"]}),
        (['data.path="a,b","c"'], {"data.path": ["a,b", "c"]}),
    ],
)
def test_values_on_the_command_line(options: list[str], grid: dict[str, list[Any]]) -> None:
    assert sweep.parse_grid(options) == grid


def test_an_empty_value_of_a_grid_is_the_default(here: Path) -> None:
    grid = sweep.parse_grid(["protocol.n=,2"])
    assert grid == {"protocol.n": [None, 2]}
    made = sweep.plan("job.toml", grid=grid, overrides=["training.minibatch_size=4"])
    assert [(p.job.protocol.n, p.label, p.file) for p in made.points] == [
        (None, "n = default", "n=default.h5"),
        (2, "n = 2", "n=2.h5"),
    ]


def test_what_all_learners_have_alike_is_said_once(here: Path) -> None:
    """And of some of them only, or with unlike values, each by itself."""
    (here / "job.toml").write_text(
        JOB
        + """
[study]
points = [
  { cluster.learners = 3, simulation.slowdown = { 0 = 2.0, 1 = 2.0, 2 = 2.0 } },
  { cluster.learners = 3, simulation.slowdown = { 0 = 2.0, 1 = 2.0 } },
  { cluster.learners = 3, simulation.slowdown = { 1 = 2.0, 2 = 3.0 } },
]
"""
    )
    made = sweep.plan("job.toml")
    assert [(p.label, p.file) for p in made.points] == [
        ("λ = 3, slowdown 2.0", "learners=3,slowdown=2.0.h5"),
        ("λ = 3, 0 2.0, 1 2.0", "learners=3,0=2.0,1=2.0.h5"),
        ("λ = 3, 1 2.0, 2 3.0", "learners=3,1=2.0,2=3.0.h5"),
    ]


@pytest.mark.parametrize(
    ("nested", "flat"),
    [
        ({"a": {"b": 1}, "c.d": 2}, {"a.b": 1, "c.d": 2}),
        ({"a": {"b": {"c": [1, {"d": 2}]}}}, {"a.b.c": [1, {"d": 2}]}),
        (3, 3),
    ],
)
def test_dotted_keys_of_toml(nested: Any, flat: Any) -> None:
    assert flattened(nested) == flat


@pytest.mark.parametrize(
    "grid",
    [
        {"data.path": ["a/b", "a-b", "a b", "../a"]},
        {"data.path": ["x" * 300, "x" * 301]},
        {"data.path": ["ä", "ö", ""]},
        {"model.options": [{"hidden": [1]}, {"hidden": [2]}]},
        {"model.options.size": [1, 2], "data.options.size": [1, 2]},
    ],
)
def test_files_are_named_safely_and_differently(grid: dict[str, list[Any]], here: Path) -> None:
    names = files(sweep.plan("job.toml", grid=grid))
    assert len(set(names)) == len(names) > 1
    for name in names:
        assert re.fullmatch(r"[\w,=+][\w,=+.-]*\.h5", name)
        assert len(name.encode()) < 200
    assert names == files(sweep.plan("job.toml", grid=grid)), "the next call must find them"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("job.toml --grid training.seed", r"--grid training.seed: must read table.key=v1,v2"),
        ("job.toml --grid seed=1", r"--grid seed=1: must read table.key=v1,v2"),
        ("job.toml --grid training.seed=1,1", r"--grid training.seed=1,1: each key once, .*"),
        (
            "job.toml --grid training.sed=1,2",
            r"point sed=1: --grid training.sed=1: \[training\] unknown key 'sed'; valid: .*; did you mean seed\?",
        ),
        (
            "job.toml --grid protocol.n=1,9",
            r"point n=9: --grid protocol.n=9: .*\[protocol\] n = 9 is not supported with 2 learners; use 1 to 2",
        ),
        (
            "job.toml --grid training.epochs=1,many",
            r"point epochs=many: --grid training.epochs=many: \[training\] epochs .* not 'many'",
        ),
        ("job.toml --set protocol.n=2", r"--set protocol.n: the points of the sweep differ in it; .*"),
        (
            "job.toml --set protocol.m=2",
            r"point n=1,minibatch_size=4: --set protocol.m=2: \[protocol\] unknown key 'm'; .*",
        ),
        ("job.toml --workers 0", r"--workers 0: valid with 1 thread.*"),
        ("job.toml --workers 1000", r"--workers 1000: valid with 1 thread.*"),
        ("job.toml --mpi --workers 2", r"--workers 2: valid with --mpi: 1"),
        ("fragile.toml", r"fragile.toml: has no \[study\] with a grid or points; .*--grid.*"),
        ("fragile.toml --quick --grid training.seed=1", r"fragile.toml: \[study\] has no quick variant; .*"),
        ("digits --grid a.b=1 --output job.toml", r"point b=1: --grid a.b=1: unknown table or key 'a'; .*"),
        ("digits --grid training.seed=1 --output job.toml", r"job.toml: cannot write there: .*"),
    ],
)
def test_a_mistake_is_found_before_anything_runs(
    arguments: str, line: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = set(here.iterdir())
    assert main(["sweep", *arguments.split()]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert re.fullmatch(f"rudra: {line}\n", said.err)
    assert set(here.iterdir()) == before


@pytest.mark.parametrize(
    ("study", "line"),
    [
        ("grids = 1", r"\[study\] unknown key 'grids'; valid: title, .*"),
        ("figure = 'pie'", r"\[study\] figure must be .*'tradeoff'.*, not 'pie'"),
        ("grid = 3", r"\[study\] grid must be a table, not 3"),
        ("grid = {training.seed = 3}", r"\[study\] grid.training.seed must be .*list, not 3"),
        ("grid = {training.seed = []}", r"\[study\] grid training.seed must have one or more values.*"),
        ("points = [{training.seed = 1}, {training.seed = 1}]", r"\[study\] has the point seed 1 twice"),
        (
            "points = [{training.seed = 1}]\npaper = ['x']",
            r"\[study\] paper: 'x' is not in .*paper.toml; valid: table9",
        ),
    ],
)
def test_a_study_is_validated(study: str, line: str, here: Path) -> None:
    (here / "odd.toml").write_text(f"{JOB}[study]\n{study}\n")
    with pytest.raises(ConfigError) as error:
        sweep.plan("odd.toml")
    assert re.fullmatch(f"odd.toml: {line}", str(error.value))


def test_a_job_with_a_study_is_a_job(here: Path) -> None:
    job = Job.load("job.toml")
    assert json.loads(job.to_json()).get("study") is None, "a run does not depend on it"


@pytest.mark.slow
def test_a_sweep_does_what_is_missing_and_no_more(here: Path) -> None:
    done = run("job.toml")
    assert done.returncode == 0, done.stderr
    assert [line.split(":")[1].strip() for line in done.stderr.splitlines()].count("hardsync, λ = 3") == 1
    assert re.search(r"hardsync, λ = 3 .* 7.0+ s\n.*wrote job-sweep: 5 of 5", done.stdout, re.DOTALL), (
        "the paper's time"
    )
    directory = here / "job-sweep"
    assert set(statuses(directory).values()) == {"finished"}
    index = json.loads((directory / "sweep.json").read_text())
    assert (index["format"], index["title"], index["job"], index["quick"]) == (1, "two and two", "job", False)
    assert index["grid"] == {"protocol.n": [1, 2], "training.minibatch_size": [4, 8]}
    assert index["points"][4] == {
        "file": "protocol=hardsync,learners=3.h5",
        "overrides": {"protocol.name": "hardsync", "cluster.learners": 3},
        "label": "hardsync, λ = 3",
    }
    assert {point["file"] for point in index["points"]} == {file.name for file in directory.glob("*.h5")}
    assert index["paper"][0]["file"] == "n=2,minibatch_size=8.h5"
    assert {file.name for file in directory.iterdir() if file.suffix != ".h5"} == {"sweep.json", ".lock"}

    made = {file: file.stat().st_mtime_ns for file in directory.glob("*.h5")}
    unfinished = directory / "n=1,minibatch_size=4.h5"
    unfinished.write_bytes(unfinished.read_bytes()[:5000])
    again = run("job.toml", "--quiet")
    assert (again.returncode, again.stdout, again.stderr) == (0, "job-sweep\n", "")
    assert {file for file in made if file.stat().st_mtime_ns != made[file]} == {unfinished}

    other = sweep.plan("job.toml", overrides=["training.seed=7"])
    with pytest.raises(ConfigError, match=r"^job-sweep/n=1.*h5 is of another job: \[training\] seed is 0, not 7; "):
        other.finished(Path("job-sweep"))
    assert other.finished(Path("job-sweep"), force=True) == set()
    with pytest.raises(ConfigError, match="is of another job: driver is simulation, not mpi; "):
        sweep.plan("job.toml", driver="mpi").finished(Path("job-sweep"))
    assert len(sweep.plan("job.toml").finished(Path("job-sweep"))) == 5

    for content, what in (('{"job": "yours"}', "is of a sweep of yours"), ("mine", "is not the index of a sweep")):
        (directory / "sweep.json").write_text(content)
        with pytest.raises(ConfigError, match=f"sweep.json {what}; give another --output, or --force to replace it"):
            sweep.plan("job.toml").finished(Path("job-sweep"))
        assert sweep.plan("job.toml").finished(Path("job-sweep"), force=True)


@pytest.mark.slow
def test_a_failing_point_does_not_stop_the_others(here: Path) -> None:
    done = run("fragile.toml", "--grid", "model.options.fault=dies,none,raises", "--output", "out", "--workers", "1")
    assert done.returncode == 1
    failures = {line for line in done.stderr.splitlines() if line.startswith("rudra: ")}
    assert failures == {
        "rudra: point fault dies failed: its process was killed by signal 9; is there enough memory?",
        "rudra: point fault raises failed: ZeroDivisionError: by zero",
    }
    assert re.search(r"fault dies +failed", done.stdout)
    assert statuses(here / "out") == {"fault=none": "finished"}


def test_two_sweeps_do_not_meet_in_one_directory(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "job-sweep").mkdir()
    with (here / "job-sweep" / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert main(["sweep", "job.toml"]) == 2
    assert re.fullmatch("rudra: job-sweep: another sweep is running there; .*\n", capsys.readouterr().err)
    assert [file.name for file in (here / "job-sweep").iterdir()] == [".lock"]


@pytest.fixture
def stuck(here: Path) -> Iterator["subprocess.Popen[str]"]:
    """A sweep whose first point is finished and whose second one hangs."""
    process = started("fragile.toml", "--grid", "model.options.fault=none,sleeps", "--output", "out", "--workers", "1")
    assert "1/2 points" in process.stderr.readline()
    yield process
    if process.poll() is None:
        process.kill()
    process.communicate(timeout=120)


def workers_of(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                    found.append(int(entry.name))
            except (OSError, IndexError):
                continue
    return found


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pids: list[int]) -> bool:
    return eventually(lambda: not any(map(running, pids)), 120)


@pytest.mark.slow
@pytest.mark.parametrize("told", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_workers_and_keeps_what_is_finished(
    told: signal.Signals, stuck: "subprocess.Popen[str]", here: Path
) -> None:
    workers = workers_of(stuck.pid)
    assert workers
    os.killpg(stuck.pid, told)  # as a terminal and SLURM do
    _, err = stuck.communicate(timeout=120)  # the point would take longer
    assert (stuck.returncode, err) == (3, "rudra: fragile: stopped; the same command continues from out\n")
    assert gone(workers)
    assert statuses(here / "out") == {"fault=none": "finished"}


@pytest.mark.slow
def test_workers_die_with_a_killed_sweep_and_the_next_one_goes_on(stuck: "subprocess.Popen[str]", here: Path) -> None:
    workers = workers_of(stuck.pid)
    stuck.kill()
    stuck.communicate(timeout=120)
    assert gone(workers)
    (here / "mine.py").write_text(USER.replace("sleep(1000)", "sleep(0)"))
    done = run("fragile.toml", "--grid", "model.options.fault=none,sleeps", "--output", "out")
    assert done.returncode == 0, done.stderr
    assert "1 of 2 points run now" in done.stdout
    assert set(statuses(here / "out").values()) == {"finished"}


def test_shares_that_a_point_measures_are_its_own(here: Path) -> None:
    """The file has numbers, and is nonetheless what the sweep wants."""
    wanted = ["cluster.shares=auto", "protocol.name=hardsync", "simulation.slowdown.0=2"]
    study = sweep.plan("job.toml", grid={"training.seed": [1]}, overrides=wanted)
    (point,) = study.points
    with rudra.simulate(point.job, output=Path(point.file), progress="quiet") as results:
        assert results.job["cluster"]["shares"] == [1.0, 2.0]
    assert study.finished(Path()) == {point.file}
    without = sweep.plan("job.toml", grid={"training.seed": [1]}, overrides=wanted[1:])
    with pytest.raises(ConfigError, match=r"is of another job: \[cluster\] shares is \[1.0, 2.0\], not \[\]"):
        without.finished(Path())


def test_a_cut_that_a_rule_chose_is_the_points_own(here: Path) -> None:
    wanted = ["placement.cut=ralp", "protocol.name=hardsync"]
    study = sweep.plan("job.toml", grid={"training.seed": [1]}, overrides=wanted)
    (point,) = study.points
    with rudra.simulate(point.job, output=Path(point.file), progress="quiet") as results:
        assert results.job["placement"]["cut"] != point.job.placement.cut == "ralp"
    assert study.finished(Path()) == {point.file}


def test_no_more_threads_than_cores(here: Path) -> None:
    study = sweep.plan("job.toml")
    assert sweep.workers_for(study, None) == min(cores(), len(study.points))
    wide = sweep.plan("job.toml", overrides=[f"cluster.threads_per_rank={cores()}"])
    assert sweep.workers_for(wide, None) == 1
    assert sweep.workers_for(sweep.plan("job.toml", driver="mpi"), None) == 1
