"""The pages that teach, run as their readers would: every file, command and block of code."""

import csv
import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from pages import blocks, files, names_in, page
from processes import ROOT
from sklearn.datasets import load_digits

import rudra
from tests import forks
from tests.selection import covering

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(600)]

TUTORIAL, COMPARE, PORT = map(page, ("tutorial.md", "compare.md", "from-pytorch.md"))
MODEL, RULES, HOOKS = map(page, ("own-model.md", "own-rules.md", "hooks.md"))
SHORTER = {
    "README.md": {
        "epochs = 10": "epochs = 2",
        "--learners 30": "--learners 6",
        "epochs=5": 'epochs=1", "data.train_limit=400',
        "run mine.toml ": "run mine.toml --set training.epochs=2 ",
        "rudra calibrate job.toml ": "rudra calibrate job.toml --seconds 0.05 --sizes 16 -o costs.toml ",
    },
    "own-rules.md": {
        "sweep delays.toml": "sweep delays.toml --quick --set training.epochs=1 --workers 1",
        "--output strict.h5": "--set training.epochs=1 --output strict.h5",
        "--output lion.h5": "--learners 2 --set training.epochs=1 --output lion.h5",
    },
    "own-model.md": {"stop_at_target = true": 'stop_at_target = true\nevaluate = "always"'},
    "tutorial.md": {"epochs = 10": 'epochs = 5\nevaluate = "always"', "epochs=15": "epochs=6"},
    "compare.md": {
        "epochs = 10": 'epochs = 2\nevaluate = "always"',
        "--learners 8 --output": "--learners 8 --set training.epochs=5 --output",
        "=0.005,0.02,0.08,0.2 --output": "=0.02 --workers 1 --output",
        "first.toml --learners 8 --set protocol.modulation=none --set optimizer": (
            "first.toml --learners 4 --set protocol.modulation=none --set optimizer"
        ),
    },
    "from-pytorch.md": {
        "= 12, ": "= 2, ",
        "{ learners = 1 }": "{ learners = 1, threads_per_rank = 1 }",
        "epochs=2": "epochs=1",
    },
}
"""What is changed in a page, so that its runs take less time."""
NO_LAYOUT = "import matplotlib.layout_engine as m; m.ConstrainedLayoutEngine.execute = lambda *_: None"
BEFORE = {"report": NO_LAYOUT}
"""What a command executes first: figures that `tests/browser` looks at take half of a report's time to be laid out."""


def shorter(name: str) -> str:
    """A page whose runs take less time."""
    text = page(name)
    for long, short in SHORTER.get(name, {}).items():
        assert long in text
        text = text.replace(long, short)
    return text


def done(directory: Path, name: str) -> str:
    """Does what a page says in a directory: writes its files and runs its commands; all that these print."""
    text = shorter(name)
    for file, content in files(text).items():
        (directory / file).write_text(content)
    lines = "".join(blocks("sh", text)).replace("\\\n", "").splitlines()
    commands = [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("rudra ")]
    assert commands
    return "".join(said(directory, *forks.rudra(BEFORE.get(words[0], "pass")), *words) for words in commands)


def said(directory: Path, *line: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    for _ in range(3):
        end = subprocess.run(line, cwd=directory, **both, text=True, env=env, timeout=500, check=False)
        # A process of gloo's aborts now and then as it connects or ends (pytorch/pytorch#188266, #179291).
        if "torch.distributed.run" not in line or "Signal 6 (SIGABRT)" not in end.stdout:
            break
    assert end.returncode == 0, (line, end.stdout)
    return end.stdout


def kind(line: str) -> str:
    """A line without its numbers, the picture that tests do not draw, and what is said of some runs alone."""
    told = re.sub(r"(, [\w-]+\.png| \(best .*\)|, \S+ discarded)$|\b[0-9a-f]{64}\b", "", line)
    return " ".join(re.sub(r"\d[\d.,:]*( (ms|s|min|h)\b)?", "#", told).split())


def shown(text: str, printed: str) -> None:
    """Makes sure that what a page shows of outputs is printed so, but for its numbers."""
    lines = set(map(kind, printed.splitlines()))
    for line in "".join(blocks("text", text)).splitlines():
        assert kind(line) in lines or line.strip() in {"", "…"}, line


@pytest.fixture(scope="module")
def tutorial(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    directory = tmp_path_factory.mktemp("tutorial")
    return directory, done(directory, "tutorial.md")


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    directory = tmp_path_factory.mktemp("compare")
    return directory, done(directory, "compare.md")


def test_the_first_run_prints_what_it_shows(tutorial: tuple[Path, str]) -> None:
    shown(TUTORIAL, tutorial[1])
    assert "first.h5: identical: " in tutorial[1]


def test_the_comparison_prints_what_it_shows(compared: tuple[Path, str]) -> None:
    shown(COMPARE, compared[1])


def test_the_first_run_and_the_comparison_learn(tutorial: tuple[Path, str], compared: tuple[Path, str]) -> None:
    directory = compared[0]
    for name, learners, epochs in (("first.h5", 2, 6), ("eight.h5", 8, 5), ("winner.h5", 4, 2)):
        with rudra.open_results((tutorial[0] if name == "first.h5" else directory) / name) as results:
            summary = results.summary()
        assert (summary["learners"], summary["epochs"]) == (learners, epochs)
        assert summary["final_test_error"] < 0.4
    assert (directory / "report.html").stat().st_size > 100_000
    for picture in re.findall(r"\]\((images/.+?)\)", COMPARE):
        assert (ROOT / "docs" / picture).stat().st_size < 150_000


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    shown(MODEL, done(directory, "own-model.md"))
    return directory


def test_ones_own_model_data_loss_and_metric(own: Path) -> None:
    with rudra.open_results(own / "own.h5") as results:
        summary = results.summary()
    assert summary["target_epoch"] is not None, "the target is reached, which ends the run"
    assert summary["epochs"] < 30
    assert summary["metrics"]["validation"]["accuracy"][-1] > 0.85


def test_results_are_read(own: Path) -> None:
    (reading,) = (block for block in blocks("python", MODEL) if block.startswith("import rudra\n"))
    (own / "reading.py").write_text(reading)
    printed = said(own, *forks.script("reading.py"))
    assert printed.startswith("validation accuracy >= 0.9: after ")
    assert "learning rate of the last update 0.02\n" in printed


def test_hugging_face(own: Path) -> None:
    """As far as it is installed."""
    compile(files(MODEL)["reviews.py"], "reviews.py", "exec")
    rudra.Job.load(own / "reviews.toml")
    if find_spec("transformers") and find_spec("datasets"):
        said(own, *forks.rudra(), "simulate", "reviews.toml", "--quiet")


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    directory = tmp_path_factory.mktemp("rules")
    return directory, done(directory, "own-rules.md") + curves(directory)


def curves(directory: Path) -> str:
    """Runs the hooks of the page, and the shipped ones."""
    for file, content in files(HOOKS).items():
        (directory / file).write_text(content)
    (shipped,) = (block for block in blocks("toml", HOOKS) if 'call = "csv"' in block)
    with (directory / "curve.toml").open("a") as job:
        job.write(shipped)
    return said(directory, *forks.rudra(), "run", "curve.toml", "--output", "curve.h5")


def test_rules_print_what_the_page_shows(rules: tuple[Path, str]) -> None:
    shown(RULES + HOOKS, rules[1])


def test_ones_own_rules_are_checked_in_every_case(rules: tuple[Path, str]) -> None:
    assert rules[1].count(" 0 FAILED") == 3
    for topology in ("sharded", r"adv \(fan_out = 2\)"):
        assert re.search(rf"^ok +7 learners on 3 nodes, {topology}$", rules[1], re.MULTILINE), "one that has a state"


def test_ones_own_protocol(rules: tuple[Path, str]) -> None:
    """Figures of virtual time are those of the page."""
    text = " ".join(RULES.split())
    sentences = (("async", "it pushed", "169, and the"), ("bounded", "`Bounded` it pushed", "136. The"))
    for name, pushed, others in sentences:
        with rudra.open_results(rules[0] / f"{name}.h5") as results:
            counts, most = results.learners["pushed"], results.gradients["staleness"].max()
        assert set(counts[1:]) == {int(others[:3])}
        assert f"{pushed} {counts[0]}" in text
        assert f"{others} largest staleness was {most}" in text
    with rudra.open_results(rules[0] / "strict.h5") as results:
        assert results.summary()["protocol"] == "bounded:Bounded"
        assert results.gradients["staleness"].max() <= 3, "each of the others pushes one more at most meanwhile"
    assert len(files(RULES)["bounded.py"].splitlines()) < 25


def test_ones_own_topology(rules: tuple[Path, str]) -> None:
    for name, servers in (("racks.h5", 2), ("rack.h5", 1)):
        with rudra.open_results(rules[0] / name) as results:
            kinds = [kind.decode() for kind in results.roles["kind"]]
            assert results.summary()["final_test_error"] < 0.5
        assert kinds.count("tree server") == servers


def test_ones_own_hooks(rules: tuple[Path, str]) -> None:
    directory, printed = rules
    curve = np.loadtxt(directory / "curve.csv", delimiter=",")
    with rudra.open_results(directory / "curve.h5") as results:
        for column, name in enumerate(("epoch", "time_s", "train_loss", "test_error")):
            assert np.array_equal(curve[:, column], results.epochs[name], equal_nan=True)
        tested, updates = results.epochs["test_error"], len(results.updates)
    called = [len(re.findall(rf"^{at} \d+: ", printed, re.MULTILINE)) for at in ("epoch", "update")]
    assert called == [3, updates // 50]
    with (directory / "curve-epoch.csv").open() as lines:
        assert np.allclose([float(row["test_error"]) for row in csv.DictReader(lines)], tested, equal_nan=True)
    assert list((directory / "tensorboard" / "curve" / "update").glob("events.*"))


def patched(before: str, diff: str) -> str:
    """A file, changed as a unified diff says; the lines that the diff takes away must be there."""
    lines, after, at = before.splitlines(keepends=True), list[str](), 0
    for hunk in re.split(r"^@@ .*\n", diff, flags=re.MULTILINE)[1:]:
        old = [line[1:] or line for line in hunk.splitlines(keepends=True) if line[0] in "\n -"]
        found = next(i for i in range(at, len(lines)) if lines[i : i + len(old)] == old)
        after += lines[at:found] + [line[1:] or line for line in hunk.splitlines(keepends=True) if line[0] in "\n +"]
        at = found + len(old)
    return "".join(after + lines[at:])


def changed(diff: str) -> tuple[int, int]:
    """Lines that a diff takes away, and that it brings."""
    lines = diff.splitlines()[2:]
    return sum(line.startswith("-") for line in lines), sum(line.startswith("+") for line in lines)


def last_error(printed: str) -> float:
    return float(re.findall(r"^epoch 2: training loss \S+, test error (.+)%$", printed, re.MULTILINE)[-1])


def stand_in(directory: Path) -> None:
    """Puts scikit-learn's digits there without scikit-learn, which each rank would import for more than a second."""
    package = directory / "sklearn"
    package.mkdir()
    (package / "__init__.py").touch()
    np.savez(package / "digits.npz", *load_digits(return_X_y=True))
    (package / "datasets.py").write_text(LOADING)


LOADING = """
import numpy, pathlib
def load_digits(*, return_X_y):
    with numpy.load(pathlib.Path(__file__).with_name("digits.npz")) as file:
        return file["arr_0"], file["arr_1"]
"""


def scripts() -> dict[str, tuple[str, str]]:
    """The page's scripts of one process and of DDP, each with the diff that ports it."""
    alone, ddp = blocks("diff", PORT)
    old_ddp = "".join(f"{line[1:]}\n" for line in ddp.splitlines()[3:] if not line.startswith("+"))
    return {"train.py": (files(PORT)["train.py"], alone), "train_ddp.py": (old_ddp, ddp)}


def test_diffs_are_of_the_scripts() -> None:
    for script, diff in scripts().values():
        count, (away, come) = len(script.splitlines()), changed(diff)
        assert re.search(rf"Of its {count} lines, {away} are removed and {come} added", " ".join(PORT.split()))
        compile(patched(script, diff), "after.py", "exec")


@pytest.mark.parametrize("name", covering(["train.py"], ["train.py", "train_ddp.py"]))
def test_scripts_are_ported(tmp_path: Path, name: str) -> None:
    """The first script runs with scikit-learn itself."""
    original, tmp_path = tmp_path / "original", tmp_path / "ported"
    original.mkdir()
    tmp_path.mkdir()
    stand_in(tmp_path)
    done(tmp_path, "from-pytorch.md")
    modules = names_in(PORT, "train.py")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    begin = {"train.py": forks.script("train.py"), "train_ddp.py": [*torchrun, "train_ddp.py"]}[name]
    old, diff = scripts()[name]
    for script, command in ((old, begin), (patched(old, diff), forks.script(name))):
        short = script.replace("= 12, ", "= 2, ").replace('"learners": 1', '"learners": 1, "threads_per_rank": 1')
        place = original if command is begin and name == "train.py" else tmp_path
        (place / name).write_text(short)
        assert last_error(said(place, *command)) < 20
        state = torch.load(place / "network.pt", weights_only=True)
        modules["Network"]().load_state_dict(state)
        (place / "network.pt").unlink()


def test_the_readme(tmp_path: Path) -> None:
    assert "identical: " in done(tmp_path, "README.md")
    assert (tmp_path / "report.html").is_file()
    (script,) = blocks("python", shorter("README.md"))
    (tmp_path / "script.py").write_text(script)
    printed = said(tmp_path, *forks.script("script.py"))
    assert re.search(r"^test error [\d.]+%$", printed, re.MULTILINE)
    assert re.search(r"^mean staleness [\d.]+ updates$", printed, re.MULTILINE)
