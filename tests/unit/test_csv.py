"""CSV files against pandas and by hand, and what is said of wrong ones; tables with mean 0 and deviation 1."""

import bz2
import gzip
import lzma
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from numpy.typing import NDArray

from rudra.cli.main import main
from rudra.data.load import Data, load
from rudra.data.readers import csv
from rudra.errors import ConfigError, DataError, RudraError
from rudra.job.tables import DataTable

ROOT = Path(__file__).parents[2]
SMALL = b"""age, colour, kind\r
30, red, b
2.5e1, "green, light", a

-4, red, b
"""
INPUTS = [[30, 0, 1], [25, 1, 0], [-4, 0, 1]]


def zstandard(content: bytes) -> bytes:
    """Two frames, as of files that were put together."""
    compress = pytest.importorskip("zstandard").compress
    return bytes(compress(content[:20]) + compress(content[20:]))


def read(path: Path, **options: Any) -> tuple[list[Any], list[Any], Data]:
    """All training inputs and targets, and everything."""
    loaded = load(DataTable(name="csv", path=path, options={"test": path.name, **options}))
    x, y = loaded.training.batch(np.arange(len(loaded.training)))
    assert x.dtype == torch.float32
    return x.tolist(), y.tolist(), loaded


@pytest.mark.parametrize(
    ("suffix", "compress"),
    [("", bytes), (".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress), (".zst", zstandard)],
)
def test_a_file_plain_or_compressed(suffix: str, compress: Callable[[bytes], bytes], tmp_path: Path) -> None:
    file = tmp_path / f"a.csv{suffix}"
    file.write_bytes(compress(SMALL))
    x, y, loaded = read(file)
    assert (x, y) == (INPUTS, [1, 0, 1]), "colours and kinds in the order of their names"
    assert (loaded.info.input_shape, loaded.info.classes) == ((3,), 2)
    assert (loaded.info.training_samples, loaded.info.test_samples) == (3, 3)


def test_a_zst_file_that_was_cut_or_damaged_is_told(tmp_path: Path) -> None:
    for name, content in {"cut": zstandard(SMALL * 50)[:-4], "damaged": zstandard(SMALL) + b"1234567890"}.items():
        (tmp_path / f"{name}.zst").write_bytes(content)
        with pytest.raises(DataError, match=rf"{name}\.zst: cannot be read, perhaps truncated or corrupt: "):
            read(tmp_path / f"{name}.zst")


@pytest.mark.parametrize(
    ("text", "options", "x", "y"),
    [
        (b"1,2,7\n3,4,9\n", {"header": False}, [[1, 2], [3, 4]], [0, 1]),
        (b"0,1,2\n1,2,7\n3,4,9\n", {"header": True}, [[1, 2], [3, 4]], [0, 1]),
        (b"1,1, 7\n3,4,9\n", {}, [[1, 1], [3, 4]], [0, 1]),
        (b'a,b\n"1,5",0\n"2,5",1\n', {"categorical": ["a"]}, [[1, 0], [0, 1]], [0, 1]),
        (b'a,b\n"1,5",0\nx,1\n', {}, [[1, 0], [0, 1]], [0, 1]),
        (b"\n1,2,7\n\n3,4,9", {"header": False, "target": 0}, [[2, 7], [4, 9]], [0, 1]),
        (b"a,b,c\n1,2,7\n3,4,9\n", {"target": "b"}, [[1, 7], [3, 9]], [0, 1]),
        (b"a,b,c\n1,2,7\n3,4,9\n", {"target": -2}, [[1, 7], [3, 9]], [0, 1]),
        (b"a;b\n1;x\n2;w\n", {"delimiter": ";"}, [[1], [2]], [1, 0]),
        (b"a\tb\n1\t10\n2\t9\n", {"delimiter": "\t"}, [[1], [2]], [1, 0]),
        (b"a,b\n1,1\n2,1.0\n3,2\n", {}, [[1], [2], [3]], [0, 0, 1]),
        (b"a,b\n1,0.5\n2,-3\n", {"regression": True}, [[1], [2]], [0.5, -3]),
        (b"a,b\n10,0\n9,1\n", {"categorical": ["a"]}, [[0, 1], [1, 0]], [0, 1]),
        (b"a,b,c\nx1,1,0\nx2,2,1\n", {"left_out": ["a"]}, [[1], [2]], [0, 1]),
        ("\ufeffä,b\nü,0\nö,1\n".encode(), {"target": "b"}, [[0, 1], [1, 0]], [0, 1]),
        (b'"a","b"\n"1","x\ny"\n"2","z"\n', {}, [[1], [2]], [0, 1]),
    ],
)
def test_what_a_file_means(text: bytes, options: dict[str, Any], x: list[Any], y: list[Any], tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(text)
    found = read(tmp_path / "a", **options)
    assert found[:2] == (x, y)


def test_the_test_file_has_the_names_of_the_training_file(tmp_path: Path) -> None:
    (tmp_path / "train").write_bytes(b"c,y\nred,dog\nblue,cat\ngreen,owl\n")
    (tmp_path / "test").write_bytes(b"c,y\ngreen,cat\n")
    table = DataTable(name="csv", path=tmp_path / "train", options={"test": "test"})
    loaded = load(table)
    x, y = loaded.test.batch(np.arange(1))
    assert (x.tolist(), y.tolist(), loaded.info.classes) == ([[0, 1, 0]], [0], 3)
    for asked in ({"train": False}, {"test": False}, {"train": False, "test": False}):
        assert load(table, **asked).info == loaded.info


def test_pieces_of_a_long_file_are_those_of_pandas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csv, "_ROWS", 7)
    rng = np.random.default_rng(3)
    frame = pandas.DataFrame(rng.standard_normal((50, 3)), columns=["a", "b", "c"])
    frame.insert(1, "name", rng.choice(["x", "y", "z"], 50))
    frame["label"] = rng.integers(0, 4, 50)
    frame.to_csv(tmp_path / "a.csv", index=False)
    x, y, _ = read(tmp_path / "a.csv")
    expected = pandas.get_dummies(frame, columns=["name"], dtype=float)
    assert np.array(x) == pytest.approx(expected[["a", "name_x", "name_y", "name_z", "b", "c"]].to_numpy(), rel=1e-6)
    assert y == frame["label"].tolist()


HEAD = b"age,city,y\n1,a,0\n"
WRONG = [
    (HEAD + b"\n2,,1\n", {}, "line 4: column 'city': the value is missing"),
    (HEAD + b"?,b,1\n", {}, "line 3: column 'age': the value is missing"),
    (HEAD + b"2,b,NA\n", {}, "line 3: column 'y': the value is missing"),
    (b"1,a,0\nnull,b,1\n", {"header": False}, "line 2: column 0: the value is missing"),
    (HEAD + b'2,"b\n b",1\n3,c,\n', {}, "line 5: column 'y': the value is missing"),
    (HEAD + b"2,b\n", {}, "line 3: has 2 values, not 3"),
    (HEAD + b"2,b,1,1\n", {}, "line 3: has 4 values, not 3"),
    (HEAD + b"2,b,1,1,1\n", {}, "line 3: has 5 values, not 3"),
    (HEAD + b"x,b,1\n", {}, "line 3: column 'age': 'x' is not a number; columns of names go into data.options.categor"),
    (HEAD + b"1e39,b,1\n", {}, "line 3: column 'age': '1e39' is not a number"),
    (HEAD + b"inf,b,1\n", {}, "line 3: column 'age': 'inf' is not a number"),
    (HEAD + b"2,b,x\n", {"regression": True}, "line 3: column 'y': 'x' is not a number"),
    (
        HEAD + b"2,b,0.5\n",
        {},
        "line 3: column 'y': 0.5 is not a whole number; for real targets set data.options.regression",
    ),
    (HEAD + b'2,"b,1\n', {}, "line 3: has 2 values, not 3"),
    (HEAD, {}, "all targets are the same"),
    (b"5,6\n1,2\n2,3\n", {}, "if these are names set data.options.header = true; for a file without names"),
    (b"a,2021\n1,2\n2,3\n", {}, "line 1: a column is named '2021'; if these are names set data.options.header = true"),
    (b'a,b\n"1,250",0\n900,1\n', {}, "column 'a': '1,250' is a number with a separator; write numbers as 1250 and 1.5"),
    (b"0;1,5\n1;2\n", {"header": False, "delimiter": ";"}, "column 1: '1,5' is a number with a separator"),
    (b'a,b\n900,0\n"1,250",1\n', {}, "column 'a': '1,250' is not a number; write numbers as 1250 and 1.5"),
    (b"5,6\n1,2\n2,3\n", {}, "line 1: a column is named '5'; if these are names"),
    (b"a,a\n1,2\n2,3\n", {}, "line 1: two columns are named 'a'; for a file without names"),
    (
        b"a;b\n1;2\n",
        {},
        "line 1: has a single column, so there is nothing to predict it from; data.options.delimiter = ';'",
    ),
    (b"a,b\n", {}, "there is no line with a sample"),
    (b"", {}, "there is no line with a sample"),
    (HEAD + b"2,b,1\n", {"target": "z"}, "[data] options.target: "),
    (HEAD + b"2,b,1\n", {"target": "z"}, "has no column 'z'; valid: age, city, y, or 0 to 2"),
    (HEAD + b"2,b,1\n", {"categorical": [3]}, "has no column 3; valid: age, city, y, or 0 to 2"),
    (HEAD + b"2,b,1\n", {"left_out": [0, 1]}, "[data] options.left_out leaves no column of "),
    (HEAD + b"2,b,1\n", {"target": 1.5}, "[data] options.target must be the name of a column or its number"),
    (HEAD + b"2,b,1\n", {"delimiter": ",,"}, "[data] options.delimiter "),
    (HEAD + b"2,b,1\n", {"tset": "x"}, "[data.options] unknown key 'tset'; valid: test, target, header, delimiter"),
]


@pytest.mark.parametrize(("content", "options", "message"), WRONG)
def test_what_is_wrong_is_named(content: bytes, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(RudraError) as raised:
        read(tmp_path / "a", **options)
    assert message in str(raised.value)
    assert message.startswith("[") or str(tmp_path / "a") in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"age,city,y\n1,a,0\n\n2,b,0\n", "test: line 4: column 'city': 'b' is not in the training file; valid: a"),
        (b"age,city,y\n1,a,7\n", "test: line 2: column 'y': '7' is not in the training file; valid: 0, 1"),
        (b"age,town,y\n1,a,0\n", "test: line 1: has a column 'town', but the training file has 'city'"),
    ],
)
def test_a_test_file_that_does_not_fit(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "train").write_bytes(HEAD + b"2,a,1\n")
    (tmp_path / "test").write_bytes(content)
    with pytest.raises(DataError) as raised:
        read(tmp_path / "train", test="test")
    assert str(raised.value).endswith(message)


def test_a_column_of_identifiers_is_told(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"id,b,y\n" + b"".join(b"n%d,%d,%d\n" % (i, i, i % 2) for i in range(1001)))
    with pytest.raises(
        DataError, match=r"column 'id' has 1,001 different names, more than 1,000; data.options.left_out"
    ):
        read(tmp_path / "a")
    assert len(read(tmp_path / "a", left_out=["id"])[0]) == 1001


def test_a_wrong_line_of_a_long_file_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csv, "_ROWS", 10)
    lines = [b"a,y", *(b"%d,%d" % (i, i % 2) for i in range(100))]
    lines[57] = b",1"
    (tmp_path / "a").write_bytes(b"\n".join(lines))
    with pytest.raises(DataError, match="line 58: column 'a': the value is missing"):
        read(tmp_path / "a")


@pytest.mark.parametrize(
    ("library", "name", "said"),
    [
        ("pandas", "a.csv", "[data] name = csv needs pandas: pip install 'rudra[csv]'"),
        ("zstandard", "a.zst", "a.zst: needs zstandard: pip install 'rudra[csv]'"),
    ],
)
def test_what_is_not_installed_is_one_line(
    library: str,
    name: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / name).write_bytes(SMALL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, library, None)
    table = ["data.name=csv", f"data.path={name}", "data.test_split=0.5", "model.name=mlp", "training.epochs=1"]
    assert main(["simulate", "digits", "--quiet", "-o", "run.h5", *(f"--set={each}" for each in table)]) == 2
    assert capsys.readouterr().err == f"rudra: {said}\n"


LOADING = """
import sys, time
from rudra.data.load import load
from rudra.memory import memory_bytes
from rudra.job.tables import DataTable
before = time.process_time()
info = load(DataTable(name="csv", path=sys.argv[1], test_split=0.2, standardise=True, options={"header": False})).info
assert (info.training_samples + info.test_samples, info.input_shape, info.classes) == (581_012, (54,), 7), info
print(time.process_time() - before, memory_bytes("VmHWM"))  # ru_maxrss would begin with the parent's
"""


@pytest.mark.campaign
@pytest.mark.slow
def test_half_a_million_rows_take_seconds_and_less_than_a_gigabyte(tmp_path: Path) -> None:
    """As large as covertype, 581,012 rows and 55 columns; seconds of the processor, and all of a process's memory."""
    rng = np.random.default_rng(0)
    rows = [",".join(map(str, row)) for row in rng.integers(0, 4000, (1000, 54))]
    with (tmp_path / "a.csv").open("w") as file:
        file.writelines(f"{rows[i % 1000]},{i % 7}\n" for i in range(581_012))
    line = [sys.executable, "-c", LOADING, str(tmp_path / "a.csv")]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    seconds, peak = map(float, done.stdout.split())
    assert seconds < 10
    assert 0 < peak < 1e9


# Mean 0 and deviation 1, of any table.


def written(name: str, place: Path, x: NDArray[np.float64], y: NDArray[np.int64]) -> dict[str, Any]:
    """A table in a format: what a job says of it."""
    path = place / "data"
    if name == "libsvm":
        lines = (
            f"{t} " + " ".join(f"{c + 1}:{v!r}" for c, v in enumerate(map(float, r)) if v)
            for r, t in zip(x, y, strict=True)
        )
        path.write_text("\n".join(lines))
        return {"path": path, "options": {"features": x.shape[1]}}
    if name == "arff":
        head = ["@relation r", *(f"@attribute a{c} numeric" for c in range(x.shape[1])), "@attribute y {0,1}", "@data"]
        rows = (",".join(map(repr, [*map(float, r), int(t)])) for r, t in zip(x, y, strict=True))
        path.write_text("\n".join([*head, *rows]))
        return {"path": path, "options": {}}
    if name == "npz":
        np.savez(path, x_train=x, y_train=y)
        return {"path": path.with_suffix(".npz")}
    if name == "hdf5":
        import h5py

        with h5py.File(path, "w") as file:
            file.create_dataset("x_train", data=x, chunks=(7, x.shape[1]))
            file["y_train"] = y
        return {"path": path}
    pandas.DataFrame(np.column_stack([x, y])).to_csv(path, index=False, header=False)
    return {"path": path, "options": {"header": False}}


def table_of_numbers() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((60, 6)).astype(np.float32) * [1, 100, 1e-3, 1, 1, 1] + [0, 5e3, -2, 0, 0, 0]
    x[:, 3] = 0.1  # constant, and no power of 2
    x[:, 4] = 0
    x[:, 5] = rng.random(60) < 0.1  # mostly 0
    return x.astype(np.float32).astype(np.float64), rng.integers(0, 2, 60)


@pytest.mark.parametrize("validation", [None, 0.25])
@pytest.mark.parametrize("name", ["csv", "libsvm", "arff", "npz", "hdf5"])
def test_training_inputs_have_mean_0_and_deviation_1(
    name: str, validation: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rudra.data.load._BLOCK", 50)
    x, y = table_of_numbers()
    keys = {"name": name, "test_split": 0.3, "validation_split": validation, **written(name, tmp_path, x, y)}
    plain, loaded = load(DataTable(**keys)), load(DataTable(**keys, standardise=True))
    drawn = []
    for each in (plain, loaded):
        splits = (each.training, each.test, each.validation or each.test)
        drawn.append([s.batch(np.arange(len(s)))[0].double().numpy() for s in splits if s is not None])
    raw, found = drawn[0][0], drawn[1][0]
    assert found.mean(0) == pytest.approx(np.zeros(6), abs=2e-6)
    assert found.std(0) == pytest.approx([1, 1, 1, 0, 0, 1], abs=1e-5)
    deviation = np.where([1, 1, 1, 0, 0, 1], raw.std(0), 1)
    for before, after in zip(drawn[0], drawn[1], strict=True):
        assert after == pytest.approx((before - raw.mean(0)) / deviation, rel=1e-4, abs=1e-4), "with the same numbers"
    alone = load(DataTable(**keys, standardise=True), train=False)
    assert np.array_equal(alone.test.batch(np.arange(5))[0], drawn[1][1][:5].astype(np.float32))


def test_a_constant_column_stays_finite_where_the_test_differs(tmp_path: Path) -> None:
    np.savez(
        tmp_path / "a.npz",
        x_train=np.full((9, 1), 0.1),
        y_train=np.arange(9) % 2,
        x_test=np.array([[0.1], [3.1]]),
        y_test=np.arange(2),
    )
    loaded = load(DataTable(name="npz", path=tmp_path / "a.npz", standardise=True))
    assert loaded.test.batch(np.arange(2))[0][:, 0].tolist() == pytest.approx([0, 3], abs=1e-6)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {"name": "digits"},
            r"standardise: the inputs of digits are arrays of shape \(1, 8, 8\), not a table of numbers",
        ),
        (
            {"name": "text", "path": "t"},
            "standardise: the inputs of text are tokens, not a table of numbers; valid: false",
        ),
        ({"name": "builtins:list"}, "standardise is for the tables that Rudra reads; your own dataset scales its"),
    ],
)
def test_what_is_no_table_is_not_standardised(
    keys: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t").write_text("Words and words. " * 99)
    for asked in ({}, {"train": False}, {"test": False}):
        with pytest.raises(ConfigError, match=rf"^\[data\] {said}"):
            load(DataTable(standardise=True, **keys), **asked)


@pytest.mark.parametrize("other", [{"scale": 2.0}, {"subtract_mean": False}])
def test_there_is_one_mean_and_one_scale(other: dict[str, Any]) -> None:
    from rudra import Job

    key = next(iter(other))
    with pytest.raises(ConfigError, match=rf"standardise = true is not supported with {key}; remove {key}, or use fa"):
        Job(data={"name": "csv", "standardise": True, **other})
