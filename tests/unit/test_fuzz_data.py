"""Data files with damage of every kind: they are read, or refused in one line; nothing in them is run."""

import bz2
import gzip
import importlib.util
import io
import lzma
import os
import pickle
import tarfile
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from rudra.data.load import load as load_data
from rudra.data.readers import cifar as cifar_reader
from rudra.job.tables import DataTable
from tests.unit.fuzzing import cases, command, damaged, fresh, refused, survived
from tests.unit.real_data import idx

pytestmark = pytest.mark.slow

IMAGES, LABELS = (np.arange(6 * 20) % 256).reshape(6, 5, 4), np.arange(6) % 3
GOOD = {"images-idx3-ubyte": idx(IMAGES, 2051), "labels-idx1-ubyte": idx(LABELS, 2049)}
COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": lambda b: gzip.compress(b, mtime=0)}
BATCH = 12  # images in a file of CIFAR-10, here


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data") / "case"


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cifar_reader, "_BATCH", BATCH)


def put(place: Path, name: str, content: bytes, kind: str) -> None:
    """A file with this content, or something else of that name."""
    file = place / name
    if kind == "file":
        file.write_bytes(content)
    elif kind == "directory":
        file.mkdir()
    elif kind == "loop":
        file.symlink_to(file)
    elif kind == "pipe":
        os.mkfifo(file)
    elif kind == "huge":
        file.write_bytes(content)
        os.truncate(file, 1 << 42)  # a hole: it takes no space


KINDS = st.sampled_from(["file"] * 12 + ["directory", "loop", "pipe", "missing"])


def load(name: str, path: Path, limit: int | None = None) -> None:
    load_table(DataTable(name=name, path=path, train_limit=limit))


def load_table(table: DataTable) -> None:
    train, test, info, _ = load_data(table)
    train.batch(np.arange(len(train)))
    test.batch(np.array([info.test_samples - 1]))


@cases(500)
@given(draw=st.data())
def test_idx(here: Path, draw: st.DataObject) -> None:
    with fresh(here):
        victim = draw.draw(st.sampled_from([f"{prefix}-{name}" for prefix in ("train", "t10k") for name in GOOD]))
        for prefix in ("train", "t10k"):
            for name, content in GOOD.items():
                suffix = draw.draw(st.sampled_from(list(COMPRESSORS)))
                kind, stored = "file", COMPRESSORS[suffix](content)
                if victim == f"{prefix}-{name}":
                    kind = draw.draw(KINDS)
                    inside = draw.draw(st.booleans())
                    stored = COMPRESSORS[suffix](draw.draw(damaged(content))) if inside else draw.draw(damaged(stored))
                put(here, f"{prefix}-{name}{suffix}", stored, kind)
        refused(lambda: load("idx", here), str(here))


def cifar(**changes: Any) -> bytes:
    pixels = (np.arange(BATCH * 3072) % 251).astype(np.uint8).reshape(BATCH, 3072)
    batch = {b"data": pixels, b"labels": [i % 10 for i in range(BATCH)], b"batch_label": b"x"}
    return pickle.dumps({**batch, **changes}, protocol=2)


@cases(300)
@given(draw=st.data())
def test_cifar10(here: Path, draw: st.DataObject) -> None:
    with fresh(here):
        suffix = draw.draw(st.sampled_from(["", ".xz"]))
        content = cifar()
        head, tail = content[:200], content[-200:]
        part = draw.draw(st.sampled_from(["all", "head", "tail", "compressed"]))
        if part == "head":
            content = draw.draw(damaged(head)) + content[200:]
        elif part == "tail":
            content = content[:-200] + draw.draw(damaged(tail))
        elif part == "all":
            content = draw.draw(damaged(content))
        stored = lzma.compress(content, preset=0) if suffix else content
        if part == "compressed":
            stored = draw.draw(damaged(stored))
        put(here, f"data_batch_1{suffix}", stored, draw.draw(KINDS))
        put(here, "test_batch", cifar(), "file")
        refused(lambda: load("cifar10", here, limit=BATCH), str(here))


SINGLE = [bytes([number]) for number in range(128)]
CALLS = [b"cos\nsystem\n", b"cbuiltins\neval\n", b"cnumpy\ndtype\n", b"c_codecs\nencode\n", b"X\2\0\0\0f8", b"S'O'\n"]
LARGE = [b"r\xff\xff\xff\x7f", b"B\xff\xff\xff\x7f", b"\x8e" + b"\xff" * 7 + b"\x0f", b"K\x05", b"}", b"]", b")"]
OPCODES = st.lists(st.sampled_from(SINGLE + CALLS * 4 + LARGE * 4) | st.binary(max_size=5), max_size=30).map(b"".join)


@cases(600)
@given(content=OPCODES, protocol=st.integers(0, 5))
def test_pickles_of_anything(here: Path, content: bytes, protocol: int) -> None:
    with fresh(here):
        (here / "data_batch_1").write_bytes(b"\x80" + bytes([protocol]) + content + b".")
        (here / "test_batch").write_bytes(cifar())
        assert refused(lambda: load("cifar10", here, limit=BATCH), "data_batch_1")
        assert len(os.listdir(here)) == 2


def archive(compressed: bool) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name in ("data_batch_1", "test_batch"):
            member = tarfile.TarInfo(f"cifar-10-batches-py/{'x' * 100}/{name}")
            member.size = len(cifar())
            tar.addfile(member, io.BytesIO(cifar()))
    return gzip.compress(made.getvalue(), 1, mtime=0) if compressed else made.getvalue()


PLAIN, GZIPPED = archive(False), archive(True)


@cases(300)
@given(draw=st.data())
def test_archives(here: Path, draw: st.DataObject) -> None:
    with fresh(here):
        content = draw.draw(st.sampled_from([PLAIN, GZIPPED]))
        head = draw.draw(st.integers(0, 2048))
        content = draw.draw(damaged(content[:head])) + content[head:] if head else draw.draw(damaged(content))
        file = here / "cifar-10-python.tar.gz"
        put(here, file.name, content, draw.draw(KINDS))
        refused(lambda: load("cifar10", here, limit=BATCH), str(here))


DIGITS = gzip.compress(b"\n".join(b",".join(b"%d" % (i % 10) for _ in range(65)) for i in range(50)), mtime=0)


@cases(200)
@given(draw=st.data())
def test_digits(here: Path, draw: st.DataObject, monkeypatch: pytest.MonkeyPatch) -> None:
    with fresh(here), monkeypatch.context() as patch:
        content = draw.draw(damaged(DIGITS) | damaged(gzip.decompress(DIGITS)).map(gzip.compress))
        (here / "datasets" / "data").mkdir(parents=True)
        put(here / "datasets" / "data", "digits.csv.gz", content, draw.draw(KINDS))
        spec = SimpleNamespace(submodule_search_locations=[str(here)])
        patch.setattr(importlib.util, "find_spec", lambda name: spec)
        refused(lambda: load_data(DataTable(name="digits")), "digits")


def made(name: str, place: Path) -> dict[str, bytes]:
    """Good files of a format, by name."""
    rows = b"".join(b"%d 1:0.5 %d:%d.25e-1 # x\n" % (i % 3 - 1, i + 2, i) for i in range(20))
    table = b"@relation r\n@attribute a numeric\n@attribute 'b c' {0,1}\n@attribute l {0,1}\n@data\n"
    arrays = {
        "x_train": IMAGES.astype(np.uint8),
        "y_train": LABELS,
        "x_test": IMAGES.astype(np.uint8),
        "y_test": LABELS,
    }
    file = io.BytesIO()
    if name == "libsvm":
        return {"train": rows, "test": rows[:60]}
    if name == "csv":
        lines = b"a,b c,l\n" + b"".join(b"%d.5,n%d,%d\n" % (i, i % 2, i % 3) for i in range(20))
        return {"train": lines, "test": lines[:60].rpartition(b"\n")[0]}
    if name == "arff":
        dense, sparse = b"".join(b"%d.5,1,0\n" % i for i in range(9)), b"".join(b"{0 %d.5,2 1}\n" % i for i in range(9))
        labels = b'<?xml version="1.0"?><labels><label name="l"></label></labels>'
        return {"a-train.arff": table + sparse, "a-test.arff": table + dense, "a.xml": labels}
    if name == "text":
        return {"train": "Grüße, world. ".encode() * 40}
    if name == "npz":
        np.savez_compressed(file, **arrays)
        return {"train": file.getvalue()}
    pixels = np.arange(300).astype(np.uint8).reshape(10, 10, 3)
    for kind in ("png", "jpeg"):
        Image.fromarray(pixels).save(file, kind)
        file.seek(0)
    return {f"{split}/{label}/1.png": file.getvalue() for split in ("train", "test") for label in ("a", "b")}


OPTIONS: dict[str, list[dict[str, Any]]] = {
    "libsvm": [{"test": "test"}, {"test": "test", "regression": True}],
    "csv": [
        {"test": "test"},
        {"test": "test", "regression": True},
        {"header": False, "categorical": [0], "test": "test"},
    ],
    "arff": [{"labels": 1}, {}, {"xml": "a.xml"}],
    "text": [{"length": 4}, {"length": 4, "unit": "bytes"}],
    "npz": [{}],
    "folder": [{"size": 8, "threads": 1}],
}
SUFFIXES: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": COMPRESSORS[".gz"],
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
}


@pytest.mark.parametrize("name", OPTIONS)
@cases(250)
@given(draw=st.data())
def test_formats_that_users_bring(name: str, here: Path, draw: st.DataObject) -> None:
    with fresh(here), warnings.catch_warnings(action="ignore", category=Image.DecompressionBombWarning):
        files = made(name, here)
        victim = draw.draw(st.sampled_from(sorted(files)))
        for file, content in files.items():
            kind, stored = "file", content
            if file == victim:
                kind, stored = draw.draw(KINDS), draw.draw(damaged(content))
            (here / file).parent.mkdir(parents=True, exist_ok=True)
            put(here, file, stored, kind)
        path = here / "train" if name in {"libsvm", "csv", "text", "npz"} else here
        table = DataTable(name=name, path=path, options=draw.draw(st.sampled_from(OPTIONS[name])))
        refused(lambda: load_table(table), str(here))


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".bz2"])
@cases(60)
@given(draw=st.data())
def test_damaged_compressed_texts(suffix: str, here: Path, draw: st.DataObject) -> None:
    with fresh(here):
        content = SUFFIXES[suffix](made("libsvm", here)["train"])
        put(here, f"train{suffix}", draw.draw(damaged(content)), "file")
        refused(lambda: load_table(DataTable(name="libsvm", path=here / f"train{suffix}", test_split=0.5)), str(here))


WORDS = ["@data", "@attribute", "@relation", "{0,1}", "numeric", "{", "}", ",", "'", '"', "?", "%", "0", "1", "-1"]
WORDS += ["1e9", "nan", "inf", "a\\", "\n", "\r\n", "\t", "é", ":", "#", "qid:", "1:1", "2:2"]


@pytest.mark.parametrize("name", ["libsvm", "csv", "arff"])
@cases(400)
@given(words=st.lists(st.sampled_from(WORDS), max_size=40), seed=st.booleans())
def test_lines_of_anything(name: str, here: Path, words: list[str], seed: bool) -> None:
    with fresh(here):
        start = made(name, here)["a-train.arff" if name == "arff" else "train"] if seed else b""
        (here / "train").write_bytes(start + " ".join(words).encode())
        refused(lambda: load_table(DataTable(name=name, path=here / "train", test_split=0.5)), str(here))


def read_hdf5(path: Path) -> None:
    load_table(DataTable(name="hdf5", path=path))


@pytest.mark.parametrize("version", ["earliest", "latest"])
def test_damaged_hdf5(version: str, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "good.h5", "w", libver=version) as file:
        for split in ("train", "test"):
            file.create_dataset(f"x_{split}", data=np.arange(80.0).reshape(20, 4), chunks=(6, 4), compression="gzip")
            file[f"y_{split}"] = np.arange(20) % 3
    read_hdf5(tmp_path / "good.h5")
    count = cases(60).max_examples
    assert survived("tests.unit.test_fuzz_data:read_hdf5", tmp_path / "good.h5", tmp_path, count) == "[]\n"


@cases(30)
@given(draw=st.data())
def test_a_run_of_damaged_data_leaves_nothing(here: Path, draw: st.DataObject) -> None:
    with fresh(here):
        for prefix in ("train", "t10k"):
            for name, content in GOOD.items():
                (here / f"{prefix}-{name}").write_bytes(draw.draw(st.just(content) | damaged(content)))
        before = set(here.iterdir())
        options = [
            "model.name=mlp",
            "data.name=idx",
            f"data.path={here}",
            "training.epochs=1",
            "model.options.hidden=[2]",
        ]
        said = command(
            "simulate", "digits", "--quiet", f"--output={here / 'run.h5'}", *(f"--set={option}" for option in options)
        )
        assert said.code in {0, 2}
        assert said.code == 0 or set(here.iterdir()) == before


def test_a_header_that_promises_too_much_takes_no_memory(here: Path) -> None:
    with fresh(here):
        for prefix in ("train", "t10k"):
            for name, start in {"images-idx3": [2051, *[2**32 - 1] * 3], "labels-idx1": [2049, 2**32 - 1]}.items():
                (here / f"{prefix}-{name}-ubyte").write_bytes(np.array(start, ">u4").tobytes() + b"\0" * 40)
        assert "truncated: 40 bytes of data" in str(refused(lambda: load("idx", here), str(here)))
