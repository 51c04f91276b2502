"""Jobs, cost files and sweeps with anything in them, run: results, or one line and nothing left behind."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rudra.prepare.cost_files import PRESETS
from tests import forks
from tests.unit.fuzzing import DEEP, KEYS, NAMES, TEXTS, VALUES, Said, cases, command, damaged, fresh, toml

ROOT = Path(__file__).resolve().parents[2]
BASE: dict[str, Any] = {
    "data": {"train_limit": 32, "test_limit": 8},
    "training": {"epochs": 1, "minibatch_size": 4, "evaluation_batch_size": 8},
    "model": {"name": "mlp", "options": {"hidden": [2]}},
    "cluster": {"learners": 3, "threads_per_rank": 1},
}
LONG = {("training", "epochs"), ("cluster", "learners"), ("training", "minibatch_size"), ("data", "path")}
LONG |= {("cluster", "threads_per_rank"), ("data", "name")}  # threads stay as many for the tests that follow
ODD = st.integers(0, 9) | st.floats(0, 3) | VALUES.filter(lambda v: not isinstance(v, str) or ":" not in v) | NAMES
OPTIONS = {
    ("topology", "adv"): ["fan_out"],
    ("topology", "adv*"): ["fan_out", "weight_fan_out", "outstanding"],
    ("topology", "groups"): ["groups", "reduction"],
    ("model", "mlp"): ["hidden", "activation"],
    ("model", "lenet"): ["hidden", "channels"],
    ("model", "resnet32"): ["blocks", "width"],
    ("optimizer", "sgd"): ["nesterov", "dampening", "maximize"],
    ("optimizer", "adam"): ["betas", "eps", "amsgrad"],
    ("optimizer", "rmsprop"): ["alpha", "eps", "centered"],
    ("optimizer", "adagrad"): ["lr_decay", "initial_accumulator_value"],
}


def with_options(of: tuple[tuple[str, str], list[str]]) -> st.SearchStrategy[tuple[tuple[str, str], Any]]:
    """A table with a name, and options that it knows with any values."""
    (table, name), keys = of
    value = ODD | st.lists(st.integers(-1, 9) | st.floats(0, 1), max_size=3)
    options = st.dictionaries(st.sampled_from(keys), value, min_size=1)
    return options.map(lambda made: ((table, ""), {"name": name, "options": made}))


CHANGES = st.lists(
    st.tuples(st.sampled_from([key for key in KEYS if key not in LONG]), ODD)
    | st.sampled_from(sorted(OPTIONS.items())).flatmap(with_options)
    | st.tuples(st.just(("training", "epochs")), st.integers(1, 2))
    | st.tuples(st.just(("cluster", "learners")), st.integers(1, 6))
    | st.tuples(st.just(("training", "minibatch_size")), st.integers(1, 40)),
    min_size=1,
    max_size=3,
)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs") / "case"


def job_file(place: Path, changes: list[tuple[tuple[str, str], Any]]) -> Path:
    tables = {table: dict(keys) for table, keys in BASE.items()}
    for (table, key), value in changes:
        tables[table] = {**tables.get(table, {}), **({key: value} if key else value)}
    file = place / "job.toml"
    file.write_text("\n".join(f"{toml(key)} = {toml(value)}" for key, value in tables.items()))
    return file


@cases(60)
@given(changes=CHANGES)
@pytest.mark.slow
def test_simulations(here: Path, changes: list[tuple[tuple[str, str], Any]]) -> None:
    with fresh(here):
        file = job_file(here, changes)
        said = command("simulate", file, "--quiet", "--output", here / "new.h5")
        assert said.code != 2 or os.listdir(here) == ["job.toml"], said
        if said.code != 2:
            assert command("show", here / "new.h5").code == 0


@cases(60)
@given(changes=CHANGES)
def test_predictions(here: Path, changes: list[tuple[tuple[str, str], Any]]) -> None:
    with fresh(here):
        assert command("predict", job_file(here, changes), "--samples=64", "--updates=20").code in {0, 2}


COSTS = (PRESETS / "p775.toml").read_bytes()
COST_KEYS = st.sampled_from([key for table, key in KEYS if table == "simulation"] + ["models", "measured"]) | TEXTS


@cases(150)
@given(content=damaged(COSTS) | DEEP | st.dictionaries(COST_KEYS, VALUES | st.dictionaries(TEXTS, VALUES)).map(
    lambda tables: "\n".join(toml({k: v})[1:-1] for k, v in tables.items()).encode()
))  # fmt: skip
def test_cost_files(here: Path, content: bytes) -> None:
    with fresh(here):
        (here / "costs.toml").write_bytes(content)
        said = command("topology", job_file(here, [(("simulation", "costs"), str(here / "costs.toml"))]))
        assert said.code == 0 or str(here / "costs.toml") in said.err


INDEX = {"format": 1, "title": "t", "job": "j", "quick": False, "driver": "mpi", "grid": {}, "figure": "table"}
POINT = {"file": "a.h5", "overrides": {"protocol.n": 1}, "label": "n = 1"}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)


def index(draw: Any) -> bytes:
    made: dict[str, Any] = {**INDEX, "points": [dict(POINT)], "paper": [{"file": "a.h5", "sigma": 1}]}
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.sampled_from([made, made["points"], made["paper"]]))
        if isinstance(place, list) and place and isinstance(place[0], dict):
            place = place[0]
        if isinstance(place, dict):
            place[draw(st.sampled_from([*INDEX, *POINT, "points", "paper"]) | TEXTS)] = draw(JSON)
    return json.dumps(made).encode()


@cases(60)
@given(draw=st.data())
def test_indices_of_sweeps(here: Path, draw: st.DataObject) -> None:
    with fresh(here):
        good = json.dumps({**INDEX, "points": [POINT], "paper": []}).encode()
        content = draw.draw(damaged(good)) if draw.draw(st.booleans()) else index(draw.draw)
        (here / "sweep.json").write_bytes(content)
        said = command("report", here, "-o", here / "page.html")
        assert said.code == 0 or os.listdir(here) == ["sweep.json"]
        if said.code:
            assert str(here) in said.err


def run(*arguments: object, cwd: Path) -> Said:
    """The command line in a process of its own."""
    done = subprocess.run(
        [*forks.rudra(), *map(str, arguments)],
        cwd=cwd, capture_output=True, text=True, timeout=100, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    return Said(done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize(
    "line",
    [
        "validate deep.toml",
        "simulate {long}",
        "simulate digits --set data.name=idx --set data.path=.",
        "simulate digits --set model.options.hidden=[0,-1]",
        "simulate digits --set training.minibatch_size=1000000000000000",
        "show binary.h5",
        "show pipe.h5",
        "topology loop.h5",
        "plot binary.h5 --output new.png",
        "timeline . -o new.json",
        "report binary.h5 -o new.html",
        "replay {long}.h5 --until 3",
        "sweep deep.toml --output new",
        "predict loop.toml",
    ],
)
@pytest.mark.slow
def test_the_program_itself_ends_with_one_line(line: str, tmp_path: Path) -> None:
    (tmp_path / "deep.toml").write_text("a = " + "[" * 5000)
    (tmp_path / "binary.h5").write_bytes(bytes(range(256)))
    os.mkfifo(tmp_path / "pipe.h5")
    for name in ("loop.h5", "loop.toml"):
        (tmp_path / name).symlink_to(name)
    before = sorted(os.listdir(tmp_path))
    said = run(*line.format(long="x" * 300).split(), cwd=tmp_path)
    assert said.code in {1, 2}
    assert (said.out, said.err.count("\n")) == ("", 1), said.err
    assert said.err.startswith("rudra: ")
    assert sorted(os.listdir(tmp_path)) == before
