"""ARFF files, against the tables that are written into them."""

import bz2
import gzip
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rudra.data.load import load
from rudra.data.readers.arff import read_arff
from rudra.data.samples import Samples
from rudra.data.sources import Dense, Sparse
from rudra.errors import ConfigError, DataError
from rudra.job.tables import DataTable
from tests.unit.real_data import REAL, needs_real_data

HEAD = """% a comment
@relation 'a b'

@attribute one numeric
@ATTRIBUTE 'two, too' REAL
@attribute three {0, 1}
@attribute "yes?" {0,1}
@attribute no {0,1}
@data
"""
DENSE = HEAD + "0.5,-2,1,0,1\n% another\n\n 1e3 , 0, 0, 1, 1 \n0,0,0,0,0\n"
SPARSE = HEAD + "{0 0.5,1 -2,2 1,4 1}\n% another\n\n{ 0 1e3 , 3 1, 4 1 }\n{}\n"
INPUTS, TARGETS = [[0.5, -2, 1], [1000, 0, 0], [0, 0, 0]], [[0, 1], [1, 1], [0, 0]]
XML = '<?xml version="1.0" encoding="utf-8"?>\n<labels xmlns="x"><label name="{}"></label><label name="{}"/></labels>'


def whole(samples: Samples | None) -> tuple[list[Any], list[Any]]:
    x, y = samples.batch(np.arange(len(samples)))
    return x.tolist(), y.tolist()


def read(place: Path, text: str, **options: Any) -> Any:
    """What a file gives that is both training and test file."""
    (place / "a-train.arff").write_text(text, encoding="utf-8")
    return load(DataTable(name="arff", path=place, options={"test": "a-train.arff", **options}))


@pytest.mark.parametrize("text", [DENSE, SPARSE, DENSE.replace("\n", "\r\n")], ids=["dense", "sparse", "CRLF"])
def test_dense_and_sparse_rows_are_the_same_table(text: str, tmp_path: Path) -> None:
    train, test, info, _ = read(tmp_path, text, labels=2)
    assert whole(train) == whole(test) == (INPUTS, TARGETS)
    assert (info.training_samples, info.test_samples, info.input_shape, info.classes) == (3, 3, (3,), 2)
    x, y = train.batch(np.array([1, 1, 0]))
    assert (x.dtype, y.dtype) == (torch.float32, torch.float32)
    assert (x.tolist(), y.tolist()) == ([INPUTS[i] for i in (1, 1, 0)], [TARGETS[i] for i in (1, 1, 0)])


def test_sparse_rows_stay_sparse(tmp_path: Path) -> None:
    for text, kind in ((SPARSE, Sparse), (DENSE, Dense)):
        (tmp_path / "a-train.arff").write_text(text)
        arrays = read_arff(DataTable(name="arff", path=tmp_path, options={"labels": 2}), ["train"])
        assert [type(source) for source in arrays.pairs["train"]] == [kind, kind]


@pytest.mark.parametrize("text", [DENSE, SPARSE], ids=["dense", "sparse"])
def test_labels_by_name_may_stand_anywhere(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.xml").write_text(XML.format("yes?", "three"))
    train, _, info, _ = read(tmp_path, text, xml="a.xml")
    assert whole(train) == ([[0.5, -2, 1], [1000, 0, 1], [0, 0, 0]], [[0, 1], [1, 0], [0, 0]])
    assert (info.input_shape, info.classes) == ((3,), 2)


CLASSES = "@relation r\n@attribute x numeric\n@attribute c {red, 'light blue', green}\n@data\n"


def classes(kind: str) -> str:
    return CLASSES.replace("{red, 'light blue', green}", kind)


@pytest.mark.parametrize(
    ("text", "targets", "count", "dtype"),
    [
        (CLASSES + "1,green\n2,red\n3, 'light blue' \n", [2, 0, 1], 3, torch.int64),
        (CLASSES + "{0 1,1 green}\n{0 2}\n{0 3, 1\t'light blue'}\n", [2, 0, 1], 3, torch.int64),
        (classes("{0,1}") + "1,1\n2,0\n3,1\n", [1, 0, 1], 2, torch.int64),
        (classes("{7,5}") + "1,5\n2,7\n3,5\n", [1, 0, 1], 2, torch.int64),
        (classes("numeric") + "1,0.5\n2,-7\n3,1\n", [0.5, -7, 1], 1, torch.float32),
        (classes("real") + "{0 1,1 0.5}\n{0 2,1 -7}\n{0 3}\n", [0.5, -7, 0], 1, torch.float32),
    ],
)
def test_the_last_attribute_alone_is_the_class_or_a_number(
    text: str, targets: list[float], count: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    train, _, info, _ = read(tmp_path, text)
    assert whole(train) == ([[1], [2], [3]], targets)
    assert train.batch(np.arange(1))[1].dtype == dtype
    assert info.classes == count


NAMED = """@relation named
@attribute id string
@attribute sky {sunny, 'over, cast', "rainy day"}
@attribute degrees numeric
@attribute wet {0,1}
@attribute rev {1,0}
@attribute play {'yes, surely',no}
@data
"""
NAMED_ROWS = [
    "'a, b', 'over, cast', 3, 1, 1, no",
    "?, sunny, 4, 0, 0, 'yes, surely'",
    "c, \"rainy day\", 0, 0, 1, 'yes, surely'",
]
NAMED_PAIRS = ["{1 'over, cast', 2 3, 3 1, 5 no}", "{0 ?, 2 4, 4 0}", "{1 \"rainy day\", 4 1, 5 'yes, surely'}"]


@pytest.mark.parametrize("rows", [NAMED_ROWS, NAMED_PAIRS], ids=["dense", "sparse"])
def test_names_become_an_input_each_and_strings_are_left_out(rows: list[str], tmp_path: Path) -> None:
    text = "\ufeff" + NAMED + "\n".join(rows) + "\n"
    train, _, info, _ = read(tmp_path, text, left_out=["id"])
    inputs = [[0, 1, 0, 3, 1, 1, 0], [1, 0, 0, 4, 0, 0, 1], [0, 0, 1, 0, 0, 1, 0]]
    assert whole(train) == (inputs, [1, 0, 0])
    assert (info.input_shape, info.classes) == ((7,), 2)


@pytest.mark.parametrize("row", ["x, foggy, 3, 1, 1, no", "{1 foggy, 5 no}"])
def test_a_name_that_an_attribute_does_not_have_is_named(row: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="line 9: attribute 'sky': 'foggy'; valid: sunny, over, cast, rainy day"):
        read(tmp_path, NAMED + row + "\n", left_out=["id"])


def test_which_files_are_read(tmp_path: Path) -> None:
    table = DataTable(name="arff", path=tmp_path, options={"labels": 2})
    shorter = DENSE.removesuffix("0,0,0,0,0\n")
    with pytest.raises(DataError, match=r"there is no \*-train.arff, plain or .gz, .bz2, .xz; name one in data"):
        load(table)
    (tmp_path / "b-train.arff.xz").write_bytes(lzma.compress(DENSE.encode()))
    with pytest.raises(ConfigError, match=r"has no test set; set data\.test_split"):
        load(table)
    (tmp_path / "b-test.arff.bz2").write_bytes(bz2.compress(shorter.encode()))
    (tmp_path / "other.txt").touch()
    train, test, info, _ = load(table)
    assert (info.training_samples, info.test_samples) == (3, 2)
    assert whole(train) == (INPUTS, TARGETS)
    assert whole(test) == (INPUTS[:2], TARGETS[:2])
    for asked in ({"train": False}, {"test": False}, {"train": False, "test": False}):
        assert load(table, **asked)[2] == info
    (tmp_path / "c-test.arff.gz").write_bytes(gzip.compress(DENSE.encode()))
    with pytest.raises(DataError, match=r"several \*-test.arff: b-test.arff.bz2, c-test.arff.gz; name one in data"):
        load(table)
    named = table.model_copy(update={"options": {"labels": 2, "test": "c-test.arff.gz"}})
    assert load(named)[2].test_samples == 3
    alone = table.model_copy(update={"path": tmp_path / "c-test.arff.gz", "test_split": 0.4})
    assert (load(alone)[2].training_samples, load(alone)[2].test_samples) == (2, 1)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("1,2,0,0\n", "line 10: has 4 values; valid: 5"),
        ("1,2,0,0,1\n1,2,0,0,1,1\n", "line 11: has 6 values; valid: 5"),
        ("1,2,0,0,1\n\n1,?,0,0,1\n", "line 12: a value is missing: ?"),
        ("1,x,0,0,1\n", "line 10: 'x' is not a number"),
        ("1,2.5.5,0,0,1\n", "line 10: '2.5.5' is not a number"),
        ("1,\0,0,0,1\n", "is not a number"),
        ("1,nan,0,0,1\n", "line 10: attribute 1 is nan; valid: finite numbers of float32"),
        ("1,2,0,0,1\n1,1e39,0,0,1\n", "line 11: attribute 1 is 1e+39; valid: finite"),
        ("1,2,0.5,0,1\n", "line 10: attribute 2 is 0.5; valid: 0 and 1"),
        ("1,2,0,0,1\n1,2,1,2,1\n", "line 11: attribute 3 is 2; valid: 0 and 1"),
        ("1,2,0,0,1\n{0 1}\n", "line 11: '{0' is not a number"),
        ("{0 1}\n1,2,0,0,1\n", "line 11: is not a row in braces, as the first one is"),
        ("{0 1}\n{0 1\n", "line 11: is not a row in braces"),
        ("{0 1}\n{0 1,2}\n", "line 11: has an index without a value"),
        ("{0 1}\n{0 1,5 1}\n", "line 11: index 5; valid: 0 to 4"),
        ("{0 1}\n{-1 1}\n", "line 11: index -1; valid: 0 to 4"),
        ("{0 1}\n{0.5 1}\n", "line 11: index 0.5; valid: 0 to 4"),
        ("{0 1}\n{nan 1}\n", "line 11: index nan; valid: 0 to 4"),
        ("{0 1}\n{}\n{1 1,1 2}\n", "line 12: index 1 after a larger one or the same; they must ascend"),
        ("{0 1}\n{3 1,1 2}\n", "line 11: index 1 after a larger one"),
        ("{0 1}\n{2 7}\n", "line 11: attribute 2 is 7; valid: 0 and 1"),
        ("", "there is no row after @data"),
    ],
)
def test_what_is_wrong_with_a_row_is_named(rows: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as raised:
        read(tmp_path, HEAD + rows, labels=2)
    assert str(raised.value).startswith(f"{tmp_path / 'a-train.arff'}: ")
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("change", "options", "error", "message"),
    [
        (
            lambda t: t.replace("@data", "data"),
            {},
            DataError,
            "line 9: 'data' is neither an @attribute with name and type",
        ),
        (lambda t: t[: t.index("@data")], {}, DataError, "there is no line with @data: truncated?"),
        (lambda t: t.replace("REAL", "string"), {}, DataError, "line 5: attribute of type string; valid: numeric"),
        (lambda t: t.replace("REAL", "{a"), {}, DataError, "line 5: attribute of type {a; valid: numeric"),
        (
            lambda t: t.replace("REAL", "date"),
            {},
            DataError,
            "attribute of type date; valid: numeric, {names}; data.options.left_out = ['two, too'] leaves it out",
        ),
        (
            lambda t: t.replace("REAL", "{" + ",".join(map(str, range(1001))) + "}"),
            {},
            DataError,
            "line 5: attribute 'two, too' has 1,001 names, more than 1,000; data.options.left_out = [",
        ),
        (lambda t: t, {"left_out": ["four"]}, ConfigError, "has no attribute 'four'; valid: one, two, too, three"),
        (
            lambda t: t,
            {"labels": None, "xml": "no.xml", "left_out": ["no"]},
            ConfigError,
            "options.left_out names a label",
        ),
        (lambda t: t.replace("no {0,1}", "no real"), {}, DataError, "line 8: attribute 'no' numeric; valid: {0,1}"),
        (lambda t: t, {"labels": 5}, DataError, "its 5 attributes are all labels; there must be others"),
        (lambda t: t, {"labels": 9}, DataError, "its 5 attributes are all labels; there must be others"),
        (lambda t: t, {"labels": 0}, ConfigError, "[data] options.labels must be >= 1, not 0"),
        (lambda t: t, {"xml": "a.xml"}, ConfigError, "options.labels and options.xml are both given"),
        (lambda t: t, {"label": 2}, ConfigError, "[data.options] unknown key 'label'; valid: train, test, labels, xml"),
        (lambda t: t, {"train": "b.arff"}, DataError, "b.arff: no such file"),
        (
            lambda t: t,
            {"labels": None, "xml": "a.xml"},
            DataError,
            "no attribute 'maybe', which data.options.xml names",
        ),
        (lambda t: t, {"labels": None, "xml": "bad.xml"}, DataError, "bad.xml: not XML: "),
        (lambda t: t, {"labels": None, "xml": "none.xml"}, DataError, "none.xml: there is no <label name=...>"),
    ],
)
def test_what_does_not_fit_is_named(
    change: Callable[[str], str], options: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    (tmp_path / "a.xml").write_text(XML.format("no", "maybe"))
    (tmp_path / "no.xml").write_text(XML.format("no", "yes?"))
    (tmp_path / "bad.xml").write_text("<labels>")
    (tmp_path / "none.xml").write_text("<labels/>")
    with pytest.raises(error) as raised:
        read(tmp_path, change(DENSE), **{"labels": 2, **options})
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("test", "message"),
    [
        (DENSE.replace("@attribute no {0,1}\n", ""), "has 4 attributes, and the training file 5"),
        (DENSE.replace("three", "third"), "line 6: attribute 'third' {0,1}, but 'three' {0,1} in the training file"),
        (DENSE.replace("one numeric", "one {0,1}"), "line 4: attribute 'one' {0,1}, but 'one' numeric in the training"),
    ],
)
def test_a_test_file_of_another_table_is_named(test: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "b-test.arff").write_text(test)
    with pytest.raises(DataError) as raised:
        read(tmp_path, DENSE, labels=2, test="b-test.arff")
    assert str(raised.value).startswith(f"{tmp_path / 'b-test.arff'}: ")
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("2,blue\n", "line 6: class 'blue'; valid: red, light blue, green"),
        ("2,?\n", "line 6: class '?'; valid: red, light blue, green"),
        ("2,\n", "line 6: class ''; valid: red"),
        ("red\n", "line 6: has 1 values; valid: 2"),
    ],
)
def test_a_class_that_is_none_is_named(row: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message.replace("?", r"\?")):
        read(tmp_path, CLASSES + "1,red\n" + row)


@needs_real_data
@pytest.mark.slow
def test_real_delicious() -> None:
    by_count, by_name = (
        load(DataTable(name="arff", path=REAL / "delicious", options=options))
        for options in ({"labels": 983}, {"xml": "delicious.xml.xz"})
    )
    train, test, info, _ = by_count
    assert (info.training_samples, info.test_samples, info.input_shape, info.classes) == (12_920, 3_185, (500,), 983)
    for split, other, cardinality in ((train, by_name[0], 19.05), (test, by_name[1], 18.91)):
        x, y = split.batch(np.arange(len(split)))
        assert set(x.unique().tolist()) == set(y.unique().tolist()) == {0, 1}
        assert abs(float(y.sum(1).mean()) - cardinality) < 0.005
        assert torch.equal(x, other.batch(np.arange(len(split)))[0])
        assert torch.equal(y, other.batch(np.arange(len(split)))[1])
    first = "60 1,248 1,279 1,316 1,490 1,577 1,591 1,815 1,1044 1,1075 1,1121 1,1218 1,1318 1,1319 1,1334 1,1408 1"
    row = torch.cat([part[0] for part in train.batch(np.zeros(1, np.int64))])
    assert row.nonzero().flatten().tolist() == [int(pair.split()[0]) for pair in first.split(",")]
