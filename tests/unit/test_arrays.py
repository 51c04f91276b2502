"""Arrays in .npz and HDF5 files, against the arrays themselves."""

import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from rudra.data.load import in_memory, load
from rudra.data.samples import Split
from rudra.data.sources import Stored
from rudra.errors import ConfigError, DataError
from rudra.job.tables import DataTable

Rows = np.ndarray[Any, Any]
RNG = np.random.default_rng(0)


def npz(path: Path, **arrays: Any) -> None:
    with path.open("wb") as file:
        np.savez(file, **arrays)


def packed_npz(path: Path, **arrays: Any) -> None:
    with path.open("wb") as file:
        np.savez_compressed(file, **arrays)


def hdf5(path: Path, **arrays: Any) -> None:
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            file[name] = array


def packed_hdf5(path: Path, **arrays: Any) -> None:
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            file.create_dataset(name, data=array, compression="gzip" if np.ndim(array) else None)


WRITERS: dict[str, tuple[str, Callable[..., None]]] = {
    "npz": ("npz", npz),
    "compressed npz": ("npz", packed_npz),
    "hdf5": ("hdf5", hdf5),
    "compressed hdf5": ("hdf5", packed_hdf5),
}
any_format = pytest.mark.parametrize("writer", WRITERS)


def table(writer: str, path: Path, arrays: dict[str, Any], **keys: Any) -> DataTable:
    """Of a file that is written with these arrays."""
    name, write = WRITERS[writer]
    write(path / "data", **arrays)
    return DataTable(name=name, path=path / "data", **keys)


def made(x: Rows, y: Rows, tests: int = 3) -> dict[str, Rows]:
    """The last ones are for the test."""
    return {"x_train": x[:-tests], "y_train": y[:-tests], "x_test": x[-tests:], "y_test": y[-tests:]}


BYTES = RNG.integers(0, 256, (9, 4, 5)).astype(np.uint8)
FLOATS = RNG.random((9, 6))
LABELS = np.array([2, 0, 1, 1, 0, 2, 0, 1, 2])
TOKENS = RNG.integers(0, 7, (9, 4)).astype(np.int32)
MASKED = np.where(TOKENS > 4, -100, TOKENS)  # which are not learned
SEVERAL = np.where(FLOATS > 0.5, 1, 0)[:, :5]


def single(array: Rows) -> Rows:
    return array.astype(np.float32)


def whole(array: Rows) -> Rows:
    return array.astype(np.int64)


Case = tuple[Rows, Rows, dict[str, Any], tuple[int, ...], int, Rows, Rows]
GREY = BYTES[:, None] * np.float32(1 / 255)
NO_MEAN = {"subtract_mean": False}
CASES: dict[str, Case] = {  # inputs, targets, other keys of the table -> a sample's shape, classes; both as drawn
    "grey images": (BYTES, LABELS, NO_MEAN, (1, 4, 5), 3, GREY, LABELS),
    "images": (GREY, LABELS, {"scale": 2.0}, (1, 4, 5), 3, GREY * 2, LABELS),
    "bytes of no image": (BYTES[:, 0], LABELS, {}, (5,), 3, single(BYTES[:, 0]), LABELS),
    "columns": (FLOATS, LABELS.astype(np.uint8), {}, (6,), 3, single(FLOATS), LABELS),
    "in Fortran's order": (np.asfortranarray(FLOATS), LABELS, {}, (6,), 3, single(FLOATS), LABELS),
    "labels in a column": (FLOATS, LABELS[:, None], {}, (6,), 3, single(FLOATS), LABELS),
    "more classes": (FLOATS, LABELS, {"classes": 5}, (6,), 5, single(FLOATS), LABELS),
    "truths": (FLOATS > 0.5, LABELS > 0, {}, (6,), 2, single(FLOATS > 0.5), whole(LABELS > 0)),
    "several labels": (FLOATS, SEVERAL, {}, (6,), 5, single(FLOATS), single(SEVERAL)),
    "several truths": (FLOATS, SEVERAL > 0, {}, (6,), 5, single(FLOATS), single(SEVERAL)),
    "tokens": (TOKENS, LABELS, {}, (4,), 3, whole(TOKENS), LABELS),
    "sequences": (TOKENS, TOKENS[::-1], {}, (4,), 1 + int(TOKENS.max()), whole(TOKENS), whole(TOKENS[::-1])),
    "masked sequences": (TOKENS, MASKED, {}, (4,), 1 + int(TOKENS.max()), whole(TOKENS), whole(MASKED)),
    "regression": (FLOATS, FLOATS[:, 0], {}, (6,), 1, single(FLOATS), single(FLOATS[:, 0])),
    "regression of several": (FLOATS, FLOATS[:, :2], {}, (6,), 2, single(FLOATS), single(FLOATS[:, :2])),
    "of whole numbers": (FLOATS, LABELS, {"options": {"regression": True}}, (6,), 1, single(FLOATS), single(LABELS)),
    "big-endian": (FLOATS.astype(">f4"), LABELS.astype(">i2"), {}, (6,), 3, single(FLOATS), LABELS),
}


@any_format
@pytest.mark.parametrize("case", CASES)
def test_what_arrays_mean(case: str, writer: str, tmp_path: Path) -> None:
    x, y, keys, shape, classes, inputs, targets = CASES[case]
    table_ = table(writer, tmp_path, made(x, y), **keys)
    train, test, info, _ = load(table_)
    assert (info.training_samples, info.test_samples, info.input_shape, info.classes) == (6, 3, shape, classes)
    for split, part in ((train, slice(6)), (test, slice(6, 9))):
        for indices in (np.arange(len(split)), np.array([2, 0, 2])):
            for found, expected in zip(split.batch(indices), (inputs[part], targets[part]), strict=True):
                assert found.numpy().dtype == expected.dtype
                np.testing.assert_array_equal(found.numpy(), expected[indices])
    for asked in ({"train": False}, {"test": False}, {"train": False, "test": False}):
        assert load(table_, **asked)[2] == info


def test_images_in_memory_lose_their_mean_and_others_do_not(tmp_path: Path) -> None:
    for name in ("npz", "hdf5"):
        train, _, _, _ = load(table(name, tmp_path, made(BYTES, LABELS)))
        mean = BYTES[:6].mean(axis=0) if name == "npz" else np.zeros((4, 5))
        x, _ = train.batch(np.arange(6))
        np.testing.assert_allclose(x[:, 0].numpy(), (BYTES[:6] - mean) / 255, atol=1e-6)
    train, test, _, _ = load(table("npz", tmp_path, made(FLOATS, LABELS), subtract_mean=True, train_limit=4))
    assert train is not None
    np.testing.assert_allclose(test.batch(np.arange(3))[0].numpy(), FLOATS[6:] - FLOATS[:4].mean(axis=0), atol=1e-6)


def test_hdf5_inputs_stay_in_the_file_and_travel_by_its_name(tmp_path: Path) -> None:
    for writer in ("hdf5", "compressed hdf5"):
        train, _, _, _ = load(table(writer, tmp_path, made(FLOATS, LABELS), options={"cache_bytes": 0}))
        assert isinstance(train, Split)
        assert isinstance(train.inputs, Stored)
        assert not in_memory(train)
        again: Split = pickle.loads(pickle.dumps(train))
        assert torch.equal(again.batch(np.array([5, 1]))[0], train.batch(np.array([5, 1]))[0])


@any_format
def test_other_names_and_no_test_set(writer: str, tmp_path: Path) -> None:
    options = {"x_train": "images/x", "y_train": "y"}
    table_ = table(writer, tmp_path, {"images/x": FLOATS, "y": LABELS, "z": LABELS}, options=options, test_split=0.3)
    train, test, info, _ = load(table_)
    assert train is not None
    assert test is not None
    assert (info.training_samples, info.test_samples) == (6, 3)
    drawn = torch.cat([split.batch(np.arange(len(split)))[0] for split in (train, test)])
    assert sorted(drawn[:, 0].tolist()) == sorted(FLOATS[:, 0].astype(np.float32).tolist())
    with pytest.raises(ConfigError, match=r"has no test set; set data\.test_split"):
        load(table_.model_copy(update={"test_split": None}))


GOOD = made(FLOATS, LABELS)


@any_format
@pytest.mark.parametrize(
    ("changes", "keys", "message"),
    [
        ({"x_train": None}, {}, "there is no array 'x_train' ([data.options] x_train); there are: "),
        ({"y_test": None}, {}, "there is no array 'y_test'"),
        ({"x_test": None}, {}, "there is no array 'x_test'"),
        (
            {"x_test": None, "y_test": None},
            {"options": {"x_test": "t"}},
            "there is no array 't' ([data.options] x_test)",
        ),
        ({"y_train": LABELS}, {}, "y_train has 9 rows for the 6 of x_train"),
        ({"x_train": LABELS[:6]}, {}, "x_train has shape (6,); valid: (N, …), one row for each sample"),
        ({"x_test": FLOATS[:3, :5]}, {}, "x_test has rows of float64 (5,), but the training set has float64 (6,)"),
        ({"x_test": TOKENS[:3]}, {}, "x_test has rows of int32 (4,)"),
        ({"x_test": np.zeros((3, 6), np.uint8)}, {}, "x_test has rows of uint8 (6,)"),
        ({"y_test": FLOATS[:3, 0]}, {}, "y_test has rows of float64 (), but the training set has int64 ()"),
        ({"y_train": LABELS[:6] - 1}, {}, "y_train has -1; valid: 0 and above"),
        (made(MASKED, TOKENS), {}, "x_train has -100; valid: 0 and above"),
        ({"y_train": LABELS[:6] - 1}, {"classes": 3}, "sample 1 has label -1; valid: 0 to 2"),
        ({"y_train": LABELS[:6] * 2}, {"classes": 3}, "sample 0 has label 4; valid: 0 to 2"),
        ({"y_train": LABELS[:6] * 0, "y_test": LABELS[:3] * 0}, {}, "all targets are the same"),
        (
            {"y_train": SEVERAL[:6] * 3, "y_test": SEVERAL[:3]},
            {},
            "column 0; valid in several columns of labels: 0 and 1",
        ),
        ({"y_train": BYTES[:6], "y_test": BYTES[:3]}, {}, "y_train has uint8 of shape (6, 4, 5); valid: (N,), (N, k)"),
        ({"x_train": np.array(["a"] * 6)}, {}, "x_train"),
        ({"y_train": np.array(3)}, {}, "y_train: has no rows of numbers, but int64 of shape ()"),
        ({"x_train": FLOATS[:0], "y_train": LABELS[:0]}, {"classes": 3}, "the training or the test set has no sample"),
    ],
)
def test_what_does_not_fit_is_named(
    changes: dict[str, Any], keys: dict[str, Any], message: str, writer: str, tmp_path: Path
) -> None:
    arrays = {name: array for name, array in {**GOOD, **changes}.items() if array is not None}
    if writer.endswith("hdf5"):
        arrays = {name: array.tolist() if array.dtype.kind == "U" else array for name, array in arrays.items()}
    with pytest.raises(DataError) as raised:
        load(table(writer, tmp_path, arrays, **keys))
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("arrays", "keys", "message"),
    [
        (GOOD, {"options": {"xtrain": "x"}}, "[data.options] unknown key 'xtrain'; valid: x_train, y_train, x_test"),
        (GOOD, {"test_split": 0.5}, "test_split is for data without a test set; npz has one here"),
        (made(FLOATS, SEVERAL), {"classes": 7}, "[data] classes: 7, but npz has 5 here"),
        (made(TOKENS, LABELS), {"subtract_mean": True}, "subtract_mean: the inputs of npz are tokens; valid: false"),
        (made(TOKENS, LABELS), {"scale": 2.0}, "scale: the inputs of npz are tokens, which cannot be scaled"),
    ],
)
def test_mistakes_in_the_table(arrays: dict[str, Rows], keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        load(table("npz", tmp_path, arrays, **keys))
    assert message in str(raised.value)


def test_the_mean_of_what_is_not_in_memory_is_not_taken(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the inputs of hdf5 are read as they are drawn; valid: false"):
        load(table("hdf5", tmp_path, GOOD, subtract_mean=True))


class Attack:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("stolen"),)


def rewritten(path: Path, change: Callable[[bytes], bytes]) -> None:
    """A .npz in which one array's file is another, and the checksums are right."""
    with zipfile.ZipFile(path) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    contents["x_train.npy"] = change(contents["x_train.npy"])
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in contents.items():
            archive.writestr(name, content)


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[400] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: p.write_bytes(p.read_bytes()[:-100]), "File is not a zip file"),
        (lambda p: p.write_bytes(b""), "File is not a zip file"),
        (flipped, "x_train: cannot be read, perhaps truncated or corrupt: Bad CRC-32"),
        (lambda p: rewritten(p, lambda c: c[:-8]), "x_train: cannot be read, .*: 280 bytes, but its header says 288"),
        (lambda p: rewritten(p, lambda c: c + b"x"), "289 bytes, but its header says 288"),
        (lambda p: rewritten(p, lambda c: c[:60]), "x_train: cannot be read"),
        (lambda p: rewritten(p, lambda c: b"x" + c), "magic string is not correct"),
        (lambda p: rewritten(p, lambda c: c.replace(b"(6, 6)", b"(9**9)")), "x_train: cannot be read"),
        (
            lambda p: npz(p, **{**GOOD, "x_train": np.array([[Attack()]] * 6)}),
            "x_train: has no rows of numbers, but object",
        ),
        (lambda p: npz(p, **{**GOOD, "x_train": np.zeros((6, 2), "f4,i4")}), "x_train: has no rows of numbers"),
    ],
)
def test_damaged_or_hostile_npz_files_do_nothing_but_raise(
    damage: Callable[[Path], object], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    npz(tmp_path / "data", **GOOD)
    damage(tmp_path / "data")
    with pytest.raises(DataError, match=f"{tmp_path / 'data'}.*{message}") as raised:
        load(DataTable(name="npz", path=tmp_path / "data"))
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "stolen").exists()


def test_a_file_that_is_no_hdf5_is_named(tmp_path: Path) -> None:
    npz(tmp_path / "data", **GOOD)
    with pytest.raises(DataError, match="data: cannot be read, perhaps damaged"):
        load(DataTable(name="hdf5", path=tmp_path / "data"))
    with pytest.raises(DataError, match="is a directory, not a file"):
        load(DataTable(name="hdf5", path=tmp_path))
