"""Result files with anything in them, given to everything that reads them."""

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rudra.cli.main import main
from rudra.report import topology, watch
from rudra.results.reader import open_results
from tests.unit.fuzzing import TEXTS, VALUES, cases, command, fresh, survived

pytestmark = pytest.mark.slow

TABLES = ["gradients", "updates", "minibatches", "epochs", "metrics", "roles", "learners", "totals", "state"]
TABLES += [f"weights/{name}" for name in ("final", "epochs", "kept", "layout", "names")]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run."""
    path = tmp_path_factory.mktemp("recorded") / "run.h5"
    tables = {"data.train_limit": 64, "data.test_limit": 32, "training.epochs": 2, "model.options.hidden": [2]}
    tables |= {"training.minibatch_size": 8, "model.name": "mlp", "cluster.learners": 2, "cluster.threads_per_rank": 1}
    tables |= {"results.keep_every": 1}
    options = [f"--set={key}={value}" for key, value in tables.items()]
    assert main(["simulate", "digits", "--quiet", "--output", str(path), *options]) == 0
    return path


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("results") / "case"


NUMBERS = st.sampled_from([-1, 0, 1, 2, 3, 77, 2**20, 2**31 - 1, 2**53, 2**63 - 1, -(2**63), 1e12, 1e300, 0.5, -0.5])
NUMBERS |= st.sampled_from([float("nan"), float("inf"), -float("inf"), 5e-324])
SMALL = st.text(max_size=8).map(lambda text: text.encode("utf-8", "replace")) | st.binary(max_size=8)


def some_table(draw: Any, file: h5py.File) -> str:
    """One that no other change has taken away."""
    left = [name for name in TABLES if isinstance(file.get(name, getlink=True), h5py.HardLink)]
    return str(draw(st.sampled_from([name for name in left if isinstance(file[name], h5py.Dataset)])))


def change_value(draw: Any, file: h5py.File) -> None:
    name = some_table(draw, file)
    rows = file[name][()]
    if not len(rows):
        return
    place = draw(st.integers(0, len(rows) - 1)) if draw(st.booleans()) else slice(None)
    column = draw(st.sampled_from(rows.dtype.names)) if rows.dtype.names else ()
    kind = rows[column].dtype.kind
    with np.errstate(all="ignore"):
        value = draw(SMALL) if kind == "S" else np.array(draw(NUMBERS)).astype(rows[column].dtype)
    rows[column][place] = value
    file[name][...] = rows


def change_attribute(draw: Any, file: h5py.File) -> None:
    name = draw(st.sampled_from(sorted(file.attrs)))
    value = draw(st.one_of(NUMBERS, TEXTS, st.lists(st.integers(-1, 9), max_size=3), st.just(None), SMALL))
    if value is None:
        del file.attrs[name]
        return
    try:
        file.attrs[name] = value
    except (ValueError, TypeError, OSError):  # HDF5 cannot hold it
        return


def change_job(draw: Any, file: h5py.File) -> None:
    job = json.loads(file.attrs["job"])
    table = draw(st.sampled_from(sorted(job)))
    value = draw(VALUES.filter(lambda v: not isinstance(v, str) or ":" not in v))
    if isinstance(job[table], dict) and job[table] and draw(st.integers(0, 3)):
        key = draw(st.sampled_from(sorted(job[table])))
        if draw(st.booleans()):
            job[table][key] = value
        else:
            del job[table][key]
    else:
        job[table] = value
    try:
        text = json.dumps(job, default=str)
    except ValueError:  # a number of too many digits
        text = draw(st.sampled_from(["", "{", "[" * 9999, "1", "null", '{"a": 1e999}', "[]", '{"cluster": {}}']))
    file.attrs["job"] = np.bytes_(text.encode("utf-8", "replace"))


SHAPES = ["gone", "rows", "huge", "type", "group", "soft", "external", "scalar", "matrix", "raw"]


def change_shape(draw: Any, file: h5py.File) -> None:
    name = some_table(draw, file)
    old = file[name]
    dtype, maximum = old.dtype, old.maxshape
    how = draw(st.sampled_from(SHAPES))
    if how == "rows" and maximum == (None,):
        old.resize((draw(st.integers(0, 40)),))
        return
    if how == "huge" and maximum == (None,):
        old.resize((draw(st.sampled_from([2**31, 2**40, 2**50])),))
        return
    del file[name]
    if how == "group":
        file.create_group(name)
    elif how == "soft":
        file[name] = h5py.SoftLink(draw(st.sampled_from(["/" + name, "/state", "/nowhere"])))
    elif how == "external":
        file[name] = h5py.ExternalLink("/etc/passwd", "/x")
    elif how == "type":
        file.create_dataset(name, data=np.zeros(3, draw(st.sampled_from(["i4", "f8", "S5", "i8,f4"]))))
    elif how == "scalar":
        file.create_dataset(name, data=np.zeros((), dtype))
    elif how == "matrix":
        file.create_dataset(name, data=np.zeros((2, 2), dtype))
    elif how == "raw":
        file.create_dataset(name, (4,), dtype, external=[("/etc/passwd", 0, 4 * dtype.itemsize)])


CHANGES = st.lists(
    st.sampled_from([change_value] * 6 + [change_attribute] * 3 + [change_job] * 2 + [change_shape]),
    min_size=1,
    max_size=3,
)
READERS = ["show", "show --json", "topology", "watch --once", "timeline"] * 4 + ["replay --quiet"] * 6
READERS += ["replay --until=3 --quiet", "plot"] + ["warm start"] * 3
READERS += ["export -o model.pt", "export -o model.pt --epoch 1", "export -o model.safetensors --epoch 1"] * 2


@cases(40)
@given(draw=st.data())
def test_files_that_hold_anything(recorded: Path, here: Path, draw: st.DataObject, monkeypatch: Any) -> None:
    with fresh(here):
        monkeypatch.chdir(here)
        file = shutil.copy(recorded, here / "run.h5")
        with h5py.File(file, "r+") as opened:
            for change in sorted(draw.draw(CHANGES), key=lambda change: change is change_shape):
                change(draw.draw, opened)
        before = file.read_bytes()
        what = draw.draw(st.sampled_from(READERS))
        if what == "warm start":
            keys = ["training.warm_start=run.h5", "data.train_limit=16", "training.epochs=1", "model.name=mlp"]
            keys += ["model.options.hidden=[2]", "data.test_limit=16", "cluster.threads_per_rank=1"]
            options = [f"--set={key}" for key in keys]
            said = command("simulate", "digits", "--quiet", "--output=new.h5", *options)
        else:
            name, *options = what.split()
            said = command(name, file, *options)
        assert said.code != 2 or "run.h5" in said.err or "[" in said.err
        assert file.read_bytes() == before
        assert said.code == 0 or os.listdir(here) == ["run.h5"]
        monkeypatch.chdir(here.parent)


@cases(2)
@given(draw=st.data())
def test_reports_of_files_that_hold_anything(recorded: Path, here: Path, draw: st.DataObject) -> None:
    """Apart, because a page takes seconds."""
    with fresh(here):
        file = shutil.copy(recorded, here / "run.h5")
        with h5py.File(file, "r+") as opened:
            draw.draw(st.sampled_from([change_value, change_value, change_attribute, change_job]))(draw.draw, opened)
        said = command("report", file, "-o", here / "page.html")
        assert said.code == 0 or os.listdir(here) == ["run.h5"]


def read(path: Path) -> None:
    """Everything that reads a file and takes little time."""
    with open_results(path) as results:
        results.summary()
        np.size(results.weights)
        str(results.layout)
        results.state_dict(1)
        topology.of_results(results)
        watched = watch.Watched(results)
        watched.read()
        watched.frame(80, 40, time.time())


def test_damaged_bytes(recorded: Path, tmp_path: Path) -> None:
    assert survived("tests.unit.test_fuzz_results:read", recorded, tmp_path, cases(30).max_examples) == "[]\n"
