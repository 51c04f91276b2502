"""Batch scripts: their text, what the command line refuses, and what the shell in them does with fake launchers."""

import os
import re
import shlex
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from rudra.cli.main import main
from rudra.studies.slurm import ArrayElement, BatchJob, script, time_limit_s
from tests.waiting import eventually

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "slurm").glob("*.sh"))
BATCH = BatchJob(
    about="four",
    command=("rudra", "slurm", "digits"),
    file="a.sh",
    name="a",
    job="digits",
    options=(),
    output="a.h5",
    resources={"nodes": "2", "ntasks-per-node": "4"},
    warning_s=60,
    restarts=3,
)


@pytest.fixture(autouse=True)
def _in_a_place_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an environment .venv; and whatever MPI this machine has, srun would find Open MPI's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rudra.studies.submit._mpi_of", lambda environment: "pmix")
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "rudra").touch()


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda file: file.name)
def test_examples_are_what_their_command_makes(example: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are kept by hand: where a change is meant, run that command in a checkout with --force, and read them."""
    text = example.read_text(encoding="utf-8")
    (command,) = re.findall(r"^# Made by: rudra (.*)$", text, re.MULTILINE)
    assert main([*shlex.split(command), "--print"]) == 0
    assert capsys.readouterr().out == text
    assert example.stat().st_mode & 0o111
    subprocess.run(["bash", "-n", example], check=True, timeout=120)


def test_there_is_an_example_for_each_way() -> None:
    names = {"openmpi-mpirun", "openmpi-srun", "mpich-srun", "several-per-node", "array", "time-limit"}
    assert {example.stem for example in EXAMPLES} == names


@pytest.mark.parametrize(
    ("changes", "holds", "lacks"),
    [
        ({}, ["#SBATCH --signal=B:USR1@60", "#SBATCH --requeue", "max_restarts=3"], ["srun --mpi=pmix", "--array"]),
        (
            {},
            [
                "outlive=(--with-ft ulfm)",
                'mpirun -n "$SLURM_NTASKS" --bind-to none "${outlive[@]}" "${run[@]}" &',
                "PATH=$PWD/.venv/bin:$PATH",
            ],
            [],
        ),
        ({"mpi": "pmi2"}, ['mpirun -n "$SLURM_NTASKS" "${run[@]}" &'], ["bind-to", "outlive"]),
        (
            {"launcher": "srun"},
            ["#SBATCH --signal=USR1@60", "srun --mpi=pmix --cpu-bind=none --kill-on-bad-exit=1 bash"],
            ["mpirun ", "cpus-per-task"],
        ),
        ({"launcher": "srun", "mpi": "pmi2"}, ["srun --mpi=pmi2 "], ["pmix"]),
        (
            {"launcher": "srun", "resources": {"cpus-per-task": "2"}},
            ["#SBATCH --cpus-per-task=2", "--kill-on-bad-exit=1 --cpus-per-task=2 bash"],
            [],
        ),
        ({"restarts": 0}, ["#SBATCH --no-requeue", "max_restarts=0"], ["--requeue"]),
        ({"environment": "/opt/my env"}, ["PATH='/opt/my env'/bin:$PATH"], []),
        ({"options": ("--set", "model.options={a = 1}")}, ["--set 'model.options={a = 1}'"], []),
        ({"resources": {"exclusive": None}}, ["#SBATCH --exclusive\n"], []),
        (
            {
                "points": (ArrayElement(("--set", "a.b=1"), "1.h5"), ArrayElement(("--set", "a.b=x y"), "2.h5")),
                "output": "d",
            },
            [
                "--array=0-1",
                "  1) results=d/2.h5 point=(--set 'a.b=x y') ;;",
                '"${point[@]}"',
                "%A_%a.log",
                "mkdir -p d",
            ],
            [],
        ),
        ({"options": ("--set", "data.path=@run@")}, ["data.path=@run@"], []),
    ],
)
def test_text(changes: dict[str, object], holds: list[str], lacks: list[str]) -> None:
    text = script(replace(BATCH, **changes))  # type: ignore[arg-type]
    assert [part for part in holds if part not in text] == []
    assert [part for part in lacks if part in text] == []
    assert text.startswith("#!/usr/bin/env bash\n")
    subprocess.run(["bash", "-n"], input=text, text=True, check=True, timeout=120)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30", 1800), ("1:30", 90), ("4:00:00", 14_400), ("1-0", 86_400), ("1-12:30", 131_400), ("2-01:00:01", 176_401)],
)
def test_time_limits(text: str, seconds: int) -> None:
    assert time_limit_s(text) == seconds


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ("--launcher aprun", r"--launcher aprun: must be mpirun or srun"),
        ("--mpi pmix", r"--mpi is an option of srun: add --launcher srun, or leave it out"),
        ("--launcher srun --mpi pmi3", r"--mpi pmi3: must be pmix or pmi2"),
        ("--nodes 0", r"--nodes 0: must be a whole number >= 1"),
        ("--ntasks-per-node many", r"--ntasks-per-node many: must be a whole number >= 1"),
        ("--nodes 2 --ntasks-per-node 2 --ntasks 6", r"--ntasks 6 is more than --nodes 2 times --ntasks-per-node 2"),
        ("--nodes 9 --ntasks 6", r"--ntasks 6 is less than --nodes 9: some nodes would have none"),
        ("--ntasks 2", r"2 ranks are too few for topology base; start 3 or more"),
        (
            "--ntasks 9 --learners 4",
            r"4 learners with topology base need 6 ranks, .*; start 6, or set cluster.learners = 7",
        ),
        ("--time soon", r"--time soon: must be minutes, .*"),
        ("--time 1:2:3:4", r"--time 1:2:3:4: must be minutes, .*"),
        ("--time 0", r"--time 0: a time limit must be longer than that"),
        ("--time 1 --warning 60", r"--warning 60: must be less than --time 1, which is 60 s"),
        ("--warning 0", r"--warning 0: must be a whole number >= 1"),
        ("--restarts=-1", r"--restarts -1: must be a whole number >= 0"),
        ("--partition 'a b'", r"--partition a b: must be one word of .*"),
        ("--sbatch signal=KILL", r"--sbatch signal=KILL: the script sets signal itself; edit it there"),
        ("--sbatch=--time=3", r"--sbatch --time=3: use --time, which is checked"),
        ("--sbatch Qos", r"--sbatch Qos: must read KEY or KEY=VALUE, each KEY once"),
        ("--sbatch qos=a --sbatch qos=b", r"--sbatch qos=b: must read KEY or KEY=VALUE, each KEY once"),
        ("--environment nowhere", r"--environment nowhere: no Rudra is installed there: nowhere/bin/rudra is missing"),
        ("--print --submit", r"--print and --submit exclude each other"),
        ("--set 'data.path=a\nrm'", r"an option has a line break or a control character, .*"),
        ("--set training.epoch=1", r".*\[training\] unknown key 'epoch'; .*"),
        ("--grid protocol.name=fast", r".*'fast' is unknown.*"),
        ("--grid cluster.learners=4,5", r"5 learners with topology base need 7 ranks, .*"),
    ],
)
def test_a_mistake_is_one_line(options: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["slurm", "digits", *shlex.split(options)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert re.fullmatch(f"rudra: {line}\n", said.err)
    assert [file.name for file in tmp_path.iterdir()] == [".venv"]


@pytest.mark.parametrize("tasks", ["--ntasks 10", "--nodes 2 --ntasks-per-node 5"])
def test_tasks_that_are_asked_for_go_before_the_learners_of_the_job(
    tasks: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["slurm", "digits", *tasks.split(), "--print"]) == 0
    text = capsys.readouterr().out
    assert "# digits by mpirun: 1 parameter server, 1 statistics server, 8 learners\n" in text
    assert "run=(rudra run digits --set cluster.learners= --output" in text
    assert main(["slurm", "digits", "--ntasks", "6", "--learners", "4", "--print"]) == 0
    assert "--set cluster.learners=4 --output" in capsys.readouterr().out


def test_a_script_is_written_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["slurm", "digits", "--output", "soft.h5", "--environment", str(tmp_path / ".venv")]
    assert main(command) == 0
    assert capsys.readouterr().out == "wrote soft.sh; submit it with: sbatch soft.sh\n"
    text = (tmp_path / "soft.sh").read_text()
    assert "PATH=$PWD/.venv/bin:$PATH" in text
    assert "results=soft.h5" in text
    assert main(command) == 0, "the same again"
    (tmp_path / "soft.sh").write_text(text + "# edited\n")
    assert main(command) == 2
    assert "soft.sh exists and is another script: give another --script, or --force" in capsys.readouterr().err
    assert main([*command, "--force"]) == 0
    assert (tmp_path / "soft.sh").read_text() == text


def test_an_array_has_the_directory_of_a_sweep(tmp_path: Path) -> None:
    assert main(["slurm", "digits", "--grid", "training.minibatch_size=4,16"]) == 0
    assert (tmp_path / "digits-sweep" / "sweep.json").is_file()
    assert "results=digits-sweep/minibatch_size=16.h5" in (tmp_path / "digits-sweep.sh").read_text()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("--set cluster.device=cuda", "cluster.device is 'cuda', but no GPUs are requested; set --gpus"),
        ("--set cluster.device=cuda --gpus 2", None),
        ("--set cluster.device=cuda --sbatch gres=gpu:2", None),
        ("--set cluster.device=auto --gpus 2", None),
        ("--gpus 2", "GPUs are requested, but cluster.device is 'cpu'"),
        ("", None),
    ],
)
def test_gpus_and_the_job_that_uses_them(options: str, told: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["slurm", "digits", "--print", *shlex.split(options)]) == 0
    said = capsys.readouterr()
    assert said.err == ("" if told is None else f"rudra: digits: {told}\n")
    assert ("#SBATCH --gpus=2\n" in said.out) is ("--gpus" in options)


def test_tasks_without_a_role_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    Path("free.toml").write_text('[topology]\nname = "adv"\noptions = { fan_out = 3 }\n')
    assert main(["slurm", "free.toml", "--ntasks", "7", "--print"]) == 0
    said = capsys.readouterr()
    assert said.err == "rudra: free.toml: 1 of 7 tasks have no role\n"
    assert "# free.toml by mpirun: 1 parameter server, 1 statistics server, 1 tree server, 3 learners\n" in said.out


@pytest.mark.parametrize(
    ("code", "said"), [(0, "submitted as job 12"), (1, "sbatch did not accept digits.sh: no such partition")]
)
def test_submitting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: int, said: str
) -> None:
    _fake(tmp_path / "sbatch", f"[ {code} = 0 ] && echo '12;cluster' || echo no such partition >&2\nexit {code}")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert main(["slurm", "digits", "--submit"]) == (2 if code else 0)
    told = capsys.readouterr()
    assert said in (told.err if code else told.out)


def test_submitting_where_there_is_no_slurm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["slurm", "digits", "--submit"]) == 2
    assert capsys.readouterr().err.startswith("rudra: --submit: there is no sbatch here")
    assert not (tmp_path / "digits.sh").exists()


def _fake(file: Path, body: str) -> None:
    file.write_text(f"#!/usr/bin/env bash\n{body}\n")
    file.chmod(0o755)


def _start(directory: Path, launcher: str, body: str, env: dict[str, str]) -> subprocess.Popen[str]:
    """A batch script with a launcher that does this, and a scontrol that leaves word of what it is asked for."""
    programs = directory / "bin"
    programs.mkdir()
    _fake(programs / "mpirun", f'[ "${{@: -1}}" != --version ] || exit 0\n{body}')
    ranks = f'while [ "$1" != bash ]; do shift; done\n"${{@:1:4}}" bash -c {shlex.quote(body)}'
    _fake(programs / "srun", f'if [ "${{@: -1}}" = true ]; then [ ! -e lost ]; exit; fi\n{ranks}')
    _fake(programs / "rudra", '[ "$*" = "show a.h5 --json" ] && cat state')
    _fake(programs / "scontrol", 'echo "$@" >asked')
    (directory / "state").write_text('  "status": "finished",\n')
    text = script(replace(BATCH, launcher=launcher, environment=str(directory)))  # type: ignore[arg-type]
    given = {**os.environ, "SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_NNODES": "2", **env}
    return subprocess.Popen(["bash", "-c", text], cwd=directory, env=given, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("launcher", ["mpirun", "srun"])
@pytest.mark.parametrize(
    ("code", "env", "asked"),
    [
        (0, {}, None),
        (1, {}, None),
        (2, {}, None),
        (137, {}, None),
        (3, {}, "requeue 7"),
        (3, {"SLURM_RESTART_COUNT": "2"}, "requeue 7"),
        (3, {"SLURM_RESTART_COUNT": "3"}, None),
        (3, {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "0"}, "requeue 7_0"),
    ],
)
def test_what_queues_itself_again(
    tmp_path: Path, launcher: str, code: int, env: dict[str, str], asked: str | None
) -> None:
    process = _start(tmp_path, launcher, f"exit {code}", env)
    said = process.communicate(timeout=120)[1]
    word = tmp_path / "asked"
    assert (word.read_text().strip() if word.exists() else None) == asked
    assert process.returncode == (0 if asked else code)
    assert ("submit the job again to go on" in said) == (code == 3 and asked is None)
    assert not list(tmp_path.glob(".stopped*"))


@pytest.mark.parametrize(
    ("launcher", "code", "state", "lost", "asked"),
    [
        ("mpirun", 0, "running", False, True),  # as Open MPI's does
        ("mpirun", 255, "running", True, True),  # as MPICH's does
        ("mpirun", 255, "running", False, False),
        ("mpirun", 1, "failed", True, True),
        ("mpirun", 0, "failed", True, True),
        ("mpirun", 0, "failed", False, False),  # a server was lost: its daemon was told to end the run
        ("mpirun", 0, "finished", True, False),
        ("mpirun", 2, "running", True, False),
        ("srun", 1, "running", True, True),
        ("srun", 0, "finished", True, False),
    ],
)
def test_lost_nodes_and_daemons(tmp_path: Path, launcher: str, code: int, state: str, lost: bool, asked: bool) -> None:
    (tmp_path / "lost").touch() if lost else None
    process = _start(tmp_path, launcher, f'echo \'"status": "{state}"\' >state; exit {code}', {})
    process.communicate(timeout=120)
    assert (tmp_path / "asked").exists() == asked
    assert process.returncode == (0 if asked or state == "finished" else code or 1)


@pytest.mark.parametrize(
    ("number", "code", "asked"),
    [
        (signal.SIGUSR1, 0, False),  # it had finished by then
        (signal.SIGUSR1, 1, False),
        (signal.SIGUSR1, 3, True),
        (signal.SIGUSR1, 137, True),  # not quick enough, but an earlier checkpoint may be there
        (signal.SIGTERM, 3, False),  # scancel
        (signal.SIGTERM, 143, False),
    ],
)
def test_mpirun_is_told_of_the_end(tmp_path: Path, number: int, code: int, asked: bool) -> None:
    body = f"trap 'sleep 0.2; exit {code}' USR1 TERM\n: >ready\nwhile :; do sleep 0.05; done"
    process = _start(tmp_path, "mpirun", body, {})
    assert eventually((tmp_path / "ready").exists, 20)
    process.send_signal(number)
    process.communicate(timeout=120)
    assert (tmp_path / "asked").exists() == asked
    assert process.returncode == (0 if asked else 3 if code > 2 else code)


def test_srun_tasks_that_are_told_end_in_order(tmp_path: Path) -> None:
    """SLURM signals the shell around a rank as well as the rank."""
    body = "trap 'sleep 0.2; exit 3' USR1\n: >ready\nwhile :; do sleep 0.05; done"
    process = _start(tmp_path, "srun", body, {})
    assert eventually((tmp_path / "ready").exists, 20)
    shells = [child for child in _below(process.pid) if child not in _below(process.pid, 1)]
    for pid in shells:
        os.kill(pid, signal.SIGUSR1)
    process.communicate(timeout=120)
    assert (tmp_path / "asked").read_text() == "requeue 7\n"


def _below(pid: int, generations: int = 9) -> list[int]:
    """Processes below one, those of the next generations only."""
    children = [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return children + [each for child in children if generations > 1 for each in _below(child, generations - 1)]
