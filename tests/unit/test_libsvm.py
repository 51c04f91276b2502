"""LIBSVM's format, against scikit-learn's reader and one that is plain Python."""

import bz2
import codecs
import gzip
import lzma
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rudra.data.load import load
from rudra.data.readers import libsvm
from rudra.data.sources import Sparse
from rudra.errors import ConfigError, DataError
from rudra.job.tables import DataTable
from tests.unit.fuzzing import cases
from tests.unit.real_data import REAL, needs_real_data

SMALL = b"""# a comment
+1 1:0.5 3:-2e0 # and another
-1 qid:7 2:1
-1

+1\t4:.25\r
"""
DENSE = [[0.5, 0, -2, 0], [0, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0.25]]


def read(path: Path, **options: Any) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """All training inputs and targets, and the description."""
    train, _, info, _ = load(DataTable(name="libsvm", path=path, options={"test": path.name, **options}))
    return *train.batch(np.arange(len(train))), info


@pytest.mark.parametrize(
    ("suffix", "compress"), [("", bytes), (".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress)]
)
def test_a_file_plain_or_compressed(suffix: str, compress: Callable[[bytes], bytes], tmp_path: Path) -> None:
    file = tmp_path / f"a{suffix}"
    file.write_bytes(compress(SMALL))
    x, y, info = read(file)
    assert (x.tolist(), y.tolist()) == (DENSE, [1, 0, 0, 1])
    assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
    assert (info.training_samples, info.test_samples, info.input_shape, info.classes) == (4, 4, (4,), 2)


@pytest.mark.parametrize(
    ("text", "options", "width", "row"),
    [
        (b"1 1:7 2:8\n2", {}, 2, [7, 8]),
        (b"1 0:7 2:8\n2", {}, 3, [7, 0, 8]),
        (b"1 1:7 2:8\n2", {"zero_based": True}, 3, [0, 7, 8]),
        (b"1 1:7 2:8\n2", {"features": 4}, 4, [7, 8, 0, 0]),
        (b"1 1:7 2:8\n2", {"features": 3, "zero_based": True}, 3, [0, 7, 8]),
        (b"1\n2 1:1", {}, 1, [0]),
    ],
)
def test_what_indices_mean(text: bytes, options: dict[str, Any], width: int, row: list[float], tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(text)
    x, _, info = read(tmp_path / "a", **options)
    assert info.input_shape == (width,)
    assert x[0].tolist() == row


def test_the_test_file_shares_width_base_and_classes(tmp_path: Path) -> None:
    (tmp_path / "train").write_bytes(b"7 1:1\n-3 2:1\n10 1:2\n")
    (tmp_path / "test").write_bytes(b"10 0:1 5:1\n-3\n")
    table = DataTable(name="libsvm", path=tmp_path / "train", options={"test": "test"})
    train, test, info, _ = load(table)
    assert (info.input_shape, info.classes) == ((6,), 3)
    assert train.batch(np.arange(3))[1].tolist() == [1, 0, 2]
    x, y = test.batch(np.arange(2))
    assert (x.tolist(), y.tolist()) == ([[1, 0, 0, 0, 0, 1], [0] * 6], [2, 0])
    for asked in ({"train": False}, {"test": False}, {"train": False, "test": False}):
        assert load(table, **asked)[2] == info


def test_real_labels(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"0.5 1:1\n-2 1:2\n1e3\n")
    _, y, info = read(tmp_path / "a", regression=True)
    assert (y.tolist(), y.dtype, info.classes) == ([0.5, -2, 1000], torch.float32, 1)


def test_lines_with_several_labels_or_none(tmp_path: Path) -> None:
    text = b"7,3 1:0.5 2:1 # both\n\n5 1:1\n3,5,7,3 qid:1 2:2\n1:3 2:1\n  2:4\n7\n"
    (tmp_path / "a").write_bytes(codecs.BOM_UTF8 + text)
    x, y, info = read(tmp_path / "a", multilabel=True)
    assert y.tolist() == [[1, 0, 1], [0, 1, 0], [1, 1, 1], [0, 0, 0], [0, 0, 0], [0, 0, 1]]
    assert x.tolist() == [[0.5, 1], [1, 0], [0, 2], [3, 1], [0, 4], [0, 0]]
    assert (y.dtype, info.training_samples, info.classes) == (torch.float32, 6, 3)


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (b"1 1:1\n2,x 1:1\n", {"multilabel": True}, "line 2: 'x' is no label"),
        (b"1 1:1\n2, 1:1\n", {"multilabel": True}, "line 2: '' is no label"),
        (b"1 1:1\n2,0.5 1:1\n", {"multilabel": True}, "line 2: '0.5' is not a whole number"),
        (b"1,3 1:1\n2 3:1 4\n", {"multilabel": True}, "line 2: '4' is not an index:value pair"),
        (b"1:1\n2:1\n", {"multilabel": True}, "no line has a label"),
        (
            b"1 1:1\n2,3 1:1\n",
            {},
            "'2,3' is no label; for lines with several labels set data.options.multilabel = true",
        ),
        (
            b"1 1:1\n",
            {"multilabel": True, "regression": True},
            "options.regression and options.multilabel are both true",
        ),
    ],
)
def test_what_is_wrong_with_several_labels(
    content: bytes, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises((ConfigError, DataError)) as raised:
        read(tmp_path / "a", **options)
    assert message in str(raised.value)


def test_an_unknown_label_among_several_is_named(tmp_path: Path) -> None:
    (tmp_path / "train").write_bytes(b"1,2 1:1\n\n2 2:1\n")
    (tmp_path / "test").write_bytes(b"1,2 1:1\n\n1:1\n2,9 1:1\n")
    table = DataTable(name="libsvm", path=tmp_path / "train", options={"test": "test", "multilabel": True})
    with pytest.raises(DataError, match="test: line 4: label 9 is not in the training set; valid: 1, 2"):
        load(table)


WRONG = [
    (b"1 1:1\nx 1:1\n", "line 2: 'x' is no label"),
    (b"1 1:1\n\n# x\n1:1 2:2\n", "line 4: '1:1' is no label"),
    (b"1 1:1\n0.5 1:1\n", "line 2: '0.5' is not a whole number; for real labels set data.options.regression = true"),
    (b"1 1:1\n1e300 1:1\n", "line 2: '1e300' is no label"),
    (b"nan 1:1\n", "line 1: 'nan' is no label"),
    (b"1,2 1:1\n", "line 1: '1,2' is no label"),
    (b"1 1:1\n2 3:1 4\n", "line 2: '4' is not an index:value pair"),
    (b"1 1:1\n2 3:1 4:\n", "line 2: '4:' is not an index:value pair"),
    (b"1 1:1\n2 3:1 4: 5\n", "line 2: '4:' is not an index:value pair"),
    (b"1 1:1\n2 3:1 :5\n", "line 2: ':5' is not an index:value pair"),
    (b"1 1:1\n2 3:1 4:5:6\n", "line 2: '4:5:6' is not an index:value pair"),
    (b"1 1:1\n2 3:1 4::6\n", "line 2: '4::6' is not an index:value pair"),
    (b"1 1:1\n2 1:a\n", "line 2: '1:a' is not an index:value pair"),
    (b"1 1:1\n2 1:nan\n", "line 2: '1:nan' is not an index:value pair"),
    (b"1 1:1\n2 1:inf\n", "line 2: '1:inf' is not an index:value pair"),
    (b"1 1:1\n2 1:1e39\n", "line 2: '1:1e39' is not an index:value pair"),
    (b"1 1:1\n2 1:1-2\n", "line 2: '1:1-2' is not an index:value pair"),
    (b"1 1:1\n2 1:0x1\n", "line 2: '1:0x1' is not an index:value pair"),
    (b"1 1:1\n2 1:1_0\n", "line 2: '1:1_0' is not an index:value pair"),
    (b"1 1:1\n2 1:\xff\n", "line 2: '1:\ufffd' is not an index:value pair"),
    (b"1 1:1\n2 1:1\0\n", "line 2: '1:1\\x00' is not an index:value pair"),
    (b"1 1:1\n2 -1:1\n", "line 2: index '-1' is not a whole number from 0 to 2147483647"),
    (b"1 1:1\n2 1.5:1\n", "line 2: index '1.5' is not a whole number"),
    (b"1 1:1\n2 2147483648:1\n", "line 2: '2147483648:1' is not an index:value pair"),
    (b"1 1:1\n2 3:1 3:2\n", "line 2: index '3' after 3; they must ascend"),
    (b"1 1:1\n2 3:1 2:2\n", "line 2: index '2' after 3; they must ascend"),
    (b"1\n2\n", "there is no feature in any line"),
    (b"\n#\n", "there is no line with a sample"),
    (b"", "there is no line with a sample"),
    (b"3 1:1\n3 2:1\n", "all targets are the same"),
]


@pytest.mark.parametrize(("content", "message"), WRONG)
def test_what_is_wrong_is_named_with_file_and_line(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(DataError) as raised:
        read(tmp_path / "a")
    assert str(raised.value).startswith(f"{tmp_path / 'a'}: ")
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("content", "is_csv"),
    [
        (b"5.1,3.5,setosa\n", True),
        (b"sepal length,kind\n5.1,a\n", True),
        (b"1;2;3\n", True),
        (b"1\t2\t3\n", True),
        (b"1 1:1\n2,3\n", True),
        (b"1 2 3\n", False),
        (b"1 1:1\n2,3 1:1\n", False),
        (b"x\n", False),
    ],
)
def test_a_csv_file_is_told_what_reads_it(content: bytes, is_csv: bool, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(DataError) as raised:
        read(tmp_path / "a")
    assert str(raised.value).endswith('; a table of values is read by data.name = "csv"') == is_csv


@pytest.mark.parametrize(
    ("content", "options", "error", "message"),
    [
        (b"1 1:1\n2\n9 1:1\n", {}, DataError, "test: line 3: label 9 is not in the training set; valid: 1, 2"),
        (b"1 1:1\n\n2 0:1", {"zero_based": False}, DataError, "test: line 3: index 0; valid: 1 to 5"),
        (b"1 1:1\n2\n2 2:1 9:1", {"features": 8}, DataError, "test: line 3: index 9; valid: 1 to 8"),
        (b"1 1:1\n2 2:1 8:1", {"features": 8, "zero_based": True}, DataError, "line 2: index 8; valid: 0 to 7"),
        (b"1", {"test": "nowhere"}, DataError, "nowhere: no such file"),
        (b"1", {"test": "."}, DataError, "is a directory, not a file"),
        (b"1", {"tset": "x"}, ConfigError, "[data.options] unknown key 'tset'; valid: test, regression, zero_based"),
        (b"1", {"features": "8"}, ConfigError, "[data] options.features must be a whole number, not '8'"),
        (b"1", {"regression": 1}, ConfigError, "[data] options.regression must be true or false, not 1"),
        (b"1", {"classes": 1}, ConfigError, "[data.options] unknown key 'classes'"),
    ],
)
def test_what_does_not_fit_together(
    content: bytes, options: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    (tmp_path / "train").write_bytes(b"1 1:1\n2 5:1\n")
    (tmp_path / "test").write_bytes(content)
    with pytest.raises(error) as raised:
        load(DataTable(name="libsvm", path=tmp_path / "train", options={"test": "test", **options}))
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_part_of_the_training_set_becomes_the_test_set(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"".join(b"%d 1:%d\n" % (i % 3, i + 1) for i in range(50)))
    table = DataTable(name="libsvm", path=tmp_path / "a", test_split=0.2)
    with pytest.raises(ConfigError, match=r"has no test set; set data\.test_split"):
        load(table.model_copy(update={"test_split": None}))
    with pytest.raises(ConfigError, match="test_split is for data without a test set; libsvm has one here"):
        load(table.model_copy(update={"options": {"test": "a"}}))
    seen = []
    for seed in (1, 2):
        train, test, info, _ = load(table, seed=seed)
        assert (len(train), len(test)) == (info.training_samples, info.test_samples) == (40, 10)
        inputs = [split.batch(np.arange(len(split)))[0][:, 0] for split in (train, test)]
        assert sorted(torch.cat(inputs).tolist()) == list(range(1, 51))
        seen.append(inputs[1].tolist())
        _, alone, _, _ = load(table, train=False, seed=seed)
        assert alone.batch(np.arange(10))[0][:, 0].tolist() == seen[-1]
    assert seen[0] != seen[1]
    train, test, info, _ = load(table.model_copy(update={"train_limit": 7, "test_limit": 3}), seed=2)
    assert (info.training_samples, info.test_samples) == (7, 3)
    assert test.batch(np.arange(3))[0][:, 0].tolist() == seen[1][:3]


NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", re.ASCII)


def plainly(text: bytes) -> list[tuple[float, dict[int, float]]] | None:
    """The rows of a text; None if it is wrong."""
    rows = []
    for line in text.decode("latin-1").split("\n"):
        fields = line.split("#")[0].split()
        if not fields:
            continue
        pairs = [field.partition(":")[::2] for field in fields[1:]]
        if not all(map(NUMBER.fullmatch, [fields[0], *[part for pair in pairs for part in pair]])):
            return None
        if not (
            float(fields[0]).is_integer() and all(float(i).is_integer() and 0 <= float(i) < 2**31 for i, _ in pairs)
        ):
            return None
        indices = [int(float(index)) for index, _ in pairs]
        if indices != sorted(set(indices)):
            return None
        rows.append((float(fields[0]), {index: float(v) for index, (_, v) in zip(indices, pairs, strict=True)}))
    return rows


FIELDS = st.sampled_from(["1", "-2", "1:1", "2:0.5", "3:-1e-2", "12:.5", "#", "1:", ":1", ":", "0:1", ".", "1:2:3"])
GAPS = st.sampled_from([" "] * 6 + ["\n"] * 4 + ["\t", "  ", "", ":", "\r\n", "\x0b", "-", "e", "\x01", "1"])


@cases(1500)
@given(parts=st.lists(st.tuples(FIELDS, GAPS), max_size=14))
@pytest.mark.slow
def test_the_quick_way_is_the_plain_way(parts: list[tuple[str, str]]) -> None:
    text = "".join(field + gap for field, gap in parts).encode()
    expected, found = plainly(text), libsvm._parsed(text)
    if found is not None and not libsvm._whole(found.labels).all():
        found = None
    if found is None:
        assert expected is None
        with pytest.raises(DataError, match=r"a: line \d+: "):
            libsvm._complain(text, False, Path("a"), 1)
        return
    assert expected is not None
    assert [label for label, _ in expected] == found.labels.tolist()
    assert [len(row) for _, row in expected] == found.lengths.tolist()
    assert [index for _, row in expected for index in row] == found.columns.tolist()
    values = [value for _, row in expected for value in row.values()]
    assert np.array(values, np.float32).tolist() == found.values.tolist()


def test_blocks_make_no_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(SMALL * 5 + b"5 1:1")
    whole = libsvm._read(tmp_path / "a", False)
    monkeypatch.setattr("rudra.data.readers.common._PIECE", 7)
    pieces = libsvm._read(tmp_path / "a", False)
    for name in ("labels", "label_counts", "lengths", "columns", "values"):
        np.testing.assert_array_equal(getattr(whole, name), getattr(pieces, name))
    (tmp_path / "a").write_bytes(SMALL * 5 + b"5 1:1\n6 x")
    with pytest.raises(DataError, match="line 32: 'x' is not an index:value pair"):
        libsvm._read(tmp_path / "a", False)
    monkeypatch.setattr("rudra.data.readers.common._LONGEST", 30)
    (tmp_path / "a").write_bytes(b"1" * 100)
    with pytest.raises(DataError, match="has a line of more than 30 bytes: is it a text file"):
        libsvm._read(tmp_path / "a", False)


@needs_real_data
@pytest.mark.parametrize(
    ("train", "test", "counts", "width"),
    [("w8a.xz", None, (49_749,), 300), ("reuters.trn.bz2", "reuters.tst.bz2", (7770, 3299), 8315)],
)
@pytest.mark.slow
def test_real_sets_as_scikit_learn_reads_them(
    train: str, test: str | None, counts: tuple[int, ...], width: int, tmp_path: Path
) -> None:
    from sklearn.datasets import load_svmlight_file

    files = [REAL / "libsvm" / name for name in (train, test) if name is not None]
    options = {} if test is None else {"test": test}
    arrays = libsvm.read_libsvm(DataTable(name="libsvm", path=files[0], options=options), ["train", "test"])
    assert tuple(arrays.counts.values()) == counts
    assert (arrays.input_shape, arrays.classes) == ((width,), 2)
    for file, (inputs, targets) in zip(files, arrays.pairs.values(), strict=True):
        plain = tmp_path / "plain"
        plain.write_bytes({".xz": lzma.open, ".bz2": bz2.open}[file.suffix](file).read())
        matrix, labels = load_svmlight_file(str(plain), n_features=width)
        assert isinstance(inputs, Sparse)
        np.testing.assert_array_equal(inputs.values, matrix.data.astype(np.float32))
        np.testing.assert_array_equal(inputs.columns, matrix.indices)
        np.testing.assert_array_equal(inputs.starts, matrix.indptr)
        wanted = np.random.default_rng(0).integers(0, len(labels), 500)
        np.testing.assert_array_equal(inputs.rows(wanted), matrix[wanted].toarray().astype(np.float32))
        np.testing.assert_array_equal(targets.rows(wanted), (labels[wanted] > 0).astype(np.int64))
