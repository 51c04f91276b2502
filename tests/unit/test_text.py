"""Texts, against slices of the same string."""

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rudra.data.load import in_memory, load
from rudra.errors import ConfigError, DataError
from rudra.job.tables import DataTable
from tests.unit.real_data import REAL, needs_real_data


def read(path: Path, content: bytes, **options: Any) -> Any:
    (path / "a.txt").write_bytes(content)
    return load(DataTable(name="text", path=path / "a.txt", options=options))


LONG = "the quick brown fox jumps over the lazy dog, " * 20


@pytest.mark.parametrize("length", [1, 7, 64])
@pytest.mark.parametrize("text", [LONG, LONG.replace("o", "ö").replace("z", "\U0001f98a")], ids=["ASCII", "UTF-8"])
def test_windows_follow_one_another_and_targets_are_one_further(text: str, length: int, tmp_path: Path) -> None:
    train, test, info, _ = read(tmp_path, text.encode(), length=length, test=0.25)
    vocabulary = sorted(set(text))
    numbers = [vocabulary.index(character) for character in text]
    assert (info.input_shape, info.classes) == ((length,), len(vocabulary))
    assert in_memory(train)
    end = len(text) - len(text) // 4
    for split, part in ((train, numbers[:end]), (test, numbers[end:])):
        assert len(split) == (len(part) - 1) // length
        wanted = np.array([len(split) - 1, 0, 0, len(split) // 2])
        x, y = split.batch(wanted)
        assert x.dtype == y.dtype == torch.int64
        assert x.tolist() == [part[i * length :][:length] for i in wanted]
        assert y.tolist() == [part[i * length + 1 :][:length] for i in wanted]
    assert (len(train), len(test)) == (info.training_samples, info.test_samples)


@pytest.mark.parametrize(
    ("count", "length", "samples"),
    [(40, 19, (1, 1)), (41, 19, (1, 1)), (80, 19, (2, 2)), (78, 19, (2, 2)), (76, 19, (1, 1))],  # the last may be cut
)
def test_a_short_last_window_is_left_out(count: int, length: int, samples: tuple[int, int], tmp_path: Path) -> None:
    _, _, info, _ = read(tmp_path, b"ab" * (count // 2) + b"a" * (count % 2), length=length, test=0.5)
    assert (info.training_samples, info.test_samples) == samples


def test_bytes_of_any_file(tmp_path: Path) -> None:
    content = bytes(range(256)) * 2
    train, _, info, _ = read(tmp_path, content, unit="bytes", length=16)
    assert info.classes == 256
    assert train.batch(np.array([3]))[0].tolist() == [list(content[48:64])]


def test_defaults_and_compressed_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(LONG.encode()))
    table = DataTable(name="text", path=tmp_path / "a.txt.gz")
    info = load(table)[2]
    assert info.input_shape == (64,)
    assert (info.training_samples, info.test_samples) == ((810 - 1) // 64, (90 - 1) // 64)
    for asked in ({"train": False}, {"test": False}, {"train": False, "test": False}):
        assert load(table, **asked)[2] == info


@pytest.mark.parametrize(
    ("content", "options", "error", "message"),
    [
        (b"", {}, DataError, "a.txt: too short: 0 characters for the train set; a sample has 64 (data.options.length)"),
        (b"ab" * 300, {}, DataError, "too short: 60 characters for the test set"),
        (b"ab" * 19, {"length": 19, "test": 0.5}, DataError, "too short: 19 characters for the train set"),
        (b"a" * 900, {}, DataError, "a.txt: all targets are the same"),
        (
            b"abc\xff" * 99,
            {},
            DataError,
            "byte 3 is not UTF-8 (invalid start byte); data.options.unit = 'bytes' reads any",
        ),
        (b"ab" * 300, {"length": 0}, ConfigError, "options.length must be >= 1, not 0"),
        (b"ab" * 300, {"test": 1}, ConfigError, "options.test must be < 1, not 1"),
        (b"ab" * 300, {"unit": "words"}, ConfigError, "options.unit must be 'characters' or 'bytes', not 'words'"),
        (b"ab" * 300, {"window": 3}, ConfigError, "[data.options] unknown key 'window'; valid: length, test, unit"),
    ],
)
def test_mistakes_are_named(
    content: bytes, options: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error) as raised:
        read(tmp_path, content, **options)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("keys", [{"test_split": 0.5}, {"classes": 3}, {"subtract_mean": True}, {"scale": 0.5}])
def test_keys_that_make_no_sense_for_a_text(keys: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(LONG)
    with pytest.raises(ConfigError, match=next(iter(keys))):
        load(DataTable(name="text", path=tmp_path / "a.txt", **keys))


@needs_real_data
def test_real_shakespeare() -> None:
    train, _, info, _ = load(DataTable(name="text", path=REAL / "tinyshakespeare" / "input.txt"))
    assert (info.classes, info.training_samples, info.test_samples) == (65, 15_685, 1_742)
    x, y = train.batch(np.array([0]))
    text = (REAL / "tinyshakespeare" / "input.txt").read_text(encoding="utf-8")
    vocabulary = sorted(set(text))
    assert "".join(vocabulary[i] for i in x[0]) == text[:64]
    assert "".join(vocabulary[i] for i in y[0]) == text[1:65]
