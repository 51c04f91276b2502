"""What shells are told, by argcomplete's protocol, and the code that makes them ask."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import protocols
from rudra.bench import known
from rudra.cli.main import main, names
from rudra.job import schema
from rudra.job.jobfiles import shipped_jobs

ROOT = Path(__file__).resolve().parents[2]
MODULATIONS = ["auto", "gradient_staleness", "mean_staleness", "n", "none", "sqrt"]


CASES: list[tuple[str, list[str]]] = [
    ("rudra ", names()),
    ("rudra re", ["replay", "report", "resume"]),
    ("rudra plot", ["plot"]),
    ("rudra run ", [*shipped_jobs(), "deep/", "my-job.toml"]),
    ("rudra run d", ["deep/", "delicious", "digits"]),
    ("rudra run deep/", ["deep/other.toml"]),
    ("rudra validate nowhere/", []),
    ("rudra run digits ", []),
    ("rudra run digits --le", ["--learners"]),
    ("rudra run digits --learners ", []),
    ("rudra run digits -o s", ["soft.h5"]),
    ("rudra resume ", ["deep/", "soft.ckpt", "soft.h5"]),
    ("rudra show ", ["deep/", "soft.h5"]),
    ("rudra plot soft.h5 deep/", ["deep/a.h5"]),
    ("rudra topology m", ["my-job.toml"]),
    ("rudra topology s", ["shakespeare", "soft.h5"]),
    ("rudra sweep digits -o ", ["deep/"]),
    ("rudra jobs ", [*shipped_jobs()]),
    ("rudra init --from .h", [".hidden.toml"]),
    ("rudra slurm digits --launcher ", ["mpirun", "srun"]),
    ("rudra bench sp", ["sparse"]),
    ("rudra bench ", [*known()]),
    ("rudra completion ", ["bash", "fish", "zsh"]),
    ("rudra run digits --set ", [f"{key}=" for key in schema.job_keys()]),
    ("rudra run digits --set task.", ["task.name=", "task.metrics=", "task.options="]),
    ("rudra run digits --set protocol.modulation=", [f"protocol.modulation={name}" for name in MODULATIONS]),
    ("rudra run digits --set=topology.name=ad", [f"--set=topology.name={name}" for name in ("adv", r"adv\*")]),
    ("rudra run digits --set augment.flip=", ["augment.flip=false", "augment.flip=true"]),
    ("rudra run digits --set training.epochs=", []),
    ("rudra run digits --set no.such=", []),
    (
        "rudra sweep w8a --grid protocol.name=async,",
        [f"protocol.name=async,{name}" for name in list(protocols.shipped())[1:]],
    ),
]  # fmt: skip

FORKS = """
import os, sys
from rudra.cli.main import main
for number, line in enumerate(sys.argv[1:]):
    if not os.fork():
        os.environ |= {"COMP_LINE": line, "COMP_POINT": str(len(line))}
        os.environ["_ARGCOMPLETE_STDOUT_FILENAME"] = f"{number}.said"
        main([])
        os._exit(1)
    assert os.wait()[1] == 0
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with files of every kind."""
    place = tmp_path_factory.mktemp("place")
    for name in ("my-job.toml", "soft.h5", "soft.ckpt", "notes.txt", ".hidden.toml", "deep/other.toml", "deep/a.h5"):
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).touch()
    return place


@pytest.fixture(scope="module")
def said(place: Path) -> dict[str, str]:
    """Line -> what a shell is told; each in a process of its own, as there."""
    lines = [line for line, _ in CASES]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n"}
    command = [sys.executable, "-c", FORKS, *lines]
    done = subprocess.run(command, cwd=place, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    return {line: (place / f"{number}.said").read_text(encoding="utf-8") for number, line in enumerate(lines)}


@pytest.mark.parametrize(("line", "words"), CASES)
def test_what_may_come_next(line: str, words: list[str], said: dict[str, str]) -> None:
    assert sorted(word.strip() for word in said[line].split("\n") if word) == sorted(words)


def test_bash_completes_with_the_code_that_is_printed(place: Path) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash")
    lines = ("rudra sch", "rudra run digits --set protocol.name=ha")
    ask = 'COMP_LINE="{0}"; COMP_POINT=${{#COMP_LINE}}; _python_argcomplete rudra; echo "${{COMPREPLY[@]}}"\n'
    code = f'rudra() {{ "{sys.executable}" -m rudra "$@"; }}\nsource <(rudra completion bash)\n'
    code += "complete -p rudra\n" + "".join(map(ask.format, lines))
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [bash, "-c", code], cwd=place, env=env, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split("\n") == [
        "complete -o bashdefault -o nospace -F _python_argcomplete rudra",
        "schema ",
        "hardsync ",
        "",
    ]


@pytest.mark.parametrize(("shell", "line"), [("zsh", "#compdef rudra"), ("fish", "complete --command rudra -f -a ")])
def test_code_for_other_shells(shell: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    assert line in capsys.readouterr().out


def test_without_argcomplete(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name in ("argcomplete", "argcomplete.shell_integration"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["completion", "bash"]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "rudra: completion needs argcomplete: pip install 'rudra[completion]'\n")
    monkeypatch.setenv("_ARGCOMPLETE", "1")  # a shell that still asks is told nothing
    monkeypatch.setenv("COMP_LINE", "rudra run digits")
    assert main([]) == 1
    assert capsys.readouterr() == ("", "")
