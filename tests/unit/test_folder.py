"""Directories of images."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from rudra.data.load import in_memory, load
from rudra.data.readers import folder
from rudra.data.samples import Split
from rudra.errors import ConfigError, DataError
from rudra.job.tables import DataTable


def picture(file: Path, colour: tuple[int, int, int], size: tuple[int, int] = (12, 9)) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(file)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three training images and two for the test, of two classes; an image's red is ten times its number."""
    for number, name in enumerate(("train/cat/b.png", "train/cat/c.PNG", "train/bird/a.jpg", "val/cat/x.bmp")):
        picture(tmp_path / name, (10 * number, 200, 0))
    picture(tmp_path / "val/bird/y.png", (40, 200, 0), (7, 30))
    for name in ("train/README", "train/cat/notes.txt", "train/cat/.hidden.png"):
        (tmp_path / name).touch()
    (tmp_path / "train/.cache").mkdir()
    return tmp_path


def test_classes_are_directories_in_their_order(root: Path) -> None:
    table = DataTable(name="folder", path=root, options={"size": 8, "threads": 2}, scale=1.0)
    train, test, info, _ = load(table)
    assert (info.training_samples, info.test_samples, info.input_shape, info.classes) == (3, 2, (3, 8, 8), 2)
    for split, reds, labels in ((train, [20, 0, 10], [0, 1, 1]), (test, [40, 30], [0, 1])):
        assert isinstance(split, Split)
        assert not in_memory(split)
        x, y = split.batch(np.arange(len(split)))
        assert (x.dtype, y.dtype, y.tolist()) == (torch.float32, torch.int64, labels)
        assert np.abs(x.mean((2, 3)).numpy() - [[red, 200, 0] for red in reds]).max() < 2
        again: Split = pickle.loads(pickle.dumps(split))
        assert torch.equal(again.batch(np.array([1, 1]))[0], x[[1, 1]])
    scaled, _, _, _ = load(table.model_copy(update={"scale": None}))
    torch.testing.assert_close(scaled.batch(np.array([0]))[0] * 255, train.batch(np.array([0]))[0])
    for asked in ({"train": False}, {"test": False}, {"train": False, "test": False}):
        assert load(table, **asked)[2] == info


def test_images_below_the_directory_of_a_class_belong_to_it(root: Path) -> None:
    picture(root / "train/bird/images/deep/d.png", (50, 200, 0))
    (root / "train/bird/images/loop").symlink_to(root / "train/bird")
    train, _, info, _ = load(DataTable(name="folder", path=root, options={"size": 8}, scale=1.0))
    x, y = train.batch(np.arange(len(train)))
    assert (info.training_samples, y.tolist()) == (4, [0, 0, 1, 1])
    assert abs(float(x[1, 0].mean()) - 50) < 2


def test_the_classes_of_tiny_imagenets_test_images_are_in_a_file(tmp_path: Path) -> None:
    for number, name in enumerate(("train/n01/images/n01_0.png", "train/n02/images/n02_0.png")):
        picture(tmp_path / name, (10 * number, 0, 0))
    for number in range(3):
        picture(tmp_path / f"val/images/val_{number}.png", (20 * number, 0, 0))
    said = tmp_path / "val/val_annotations.txt"
    said.write_text("val_1.png\tn02\t0\t32\t44\t62\nval_0.png\tn01\t1\t2\t3\t4\nval_2.png\tn02\t1\t2\t3\t4\n")
    (tmp_path / "test/images").mkdir(parents=True)  # without labels
    table = DataTable(name="folder", path=tmp_path, options={"size": 8}, scale=1.0)
    _, test, info, _ = load(table)
    x, y = test.batch(np.arange(3))
    assert (info.training_samples, info.classes, y.tolist()) == (2, 2, [1, 0, 1])
    assert np.abs(x[:, 0].mean((1, 2)).numpy() - [20, 0, 40]).max() < 2
    for text, error in (
        ("val_0.png\tn03\t1\t2\t3\t4\n", r"val_annotations.txt:1: the training set has no class 'n03'"),
        ("val_0.png\tn01\n\nval_9.png\tn01\n", r"val_annotations.txt:3: there is no image 'val_9.png' in .*images"),
        ("../images/val_0.png\tn01\n", r"val_annotations.txt:1: there is no image '../images/val_0.png'"),
        ("\n", "names no image"),
    ):
        said.write_text(text)
        with pytest.raises(DataError, match=error):
            load(table)
    (tmp_path / "val/n01").mkdir()  # as scripts on the web arrange it
    for number in range(3):
        (tmp_path / f"val/images/val_{number}.png").rename(tmp_path / f"val/n01/val_{number}.png")
    (tmp_path / "val/images").rmdir()
    assert load(table.model_copy(update={"options": {"size": 8, "test": "val"}}))[2].test_samples == 3


def test_defaults_and_where_the_test_set_is(root: Path) -> None:
    assert load(DataTable(name="folder", path=root))[2].input_shape == (3, 224, 224)
    picture(root / "test/cat/1.png", (0, 0, 0))
    for options, count in (({}, 1), ({"test": "val"}, 2)):
        assert load(DataTable(name="folder", path=root, options=options))[2].test_samples == count
    (root / "alone").mkdir()
    (root / "train").rename(root / "alone/train")
    table = DataTable(name="folder", path=root / "alone", test_split=0.4)
    assert (load(table)[2].training_samples, load(table)[2].test_samples) == (2, 1)


def test_nothing_is_decoded_before_it_is_drawn(root: Path) -> None:
    damaged = root / "train/cat/c.PNG"
    damaged.write_bytes(damaged.read_bytes()[:48])
    train, _, _, _ = load(DataTable(name="folder", path=root, options={"size": 8}))
    train.batch(np.array([0, 1]))
    with pytest.raises(DataError, match=r"c\.PNG: cannot be decoded, perhaps damaged: "):
        train.batch(np.array([2]))


def remove(*files: Path) -> None:
    for file in files:
        file.unlink()


@pytest.mark.parametrize(
    ("damage", "keys", "error", "message"),
    [
        (
            lambda r: (r / "train").rename(r / "training"),
            {},
            DataError,
            "there is no directory train, with a directory for",
        ),
        (lambda r: remove(*(r / "train/cat").iterdir()), {}, DataError, "train/cat: there is no image; valid: .jpg"),
        (
            lambda r: picture(r / "val/dog/1.png", (0, 0, 0)),
            {},
            DataError,
            "val/dog: the training set has no class of this",
        ),
        (lambda r: (r / "train/bird").rename(r / "bird"), {}, DataError, "train: all targets are the same"),
        (lambda r: (r / "test").mkdir(), {}, DataError, "test: there is no directory of a class"),
        (
            lambda r: (r / "train/bird/a.jpg").write_bytes(b"x"),
            {},
            DataError,
            "train/bird/a.jpg: cannot be decoded, perhaps damaged",
        ),
        (lambda r: (r / "val").rename(r / "x"), {}, ConfigError, "has no test set; set data.test_split"),
        (lambda r: None, {"options": {"test": "dev"}}, DataError, "dev: cannot be read: No such file"),
        (lambda r: None, {"options": {"size": 0}}, ConfigError, "options.size must be >= 1, not 0"),
        (lambda r: None, {"options": {"sise": 1}}, ConfigError, "unknown key 'sise'; valid: size, test, threads"),
        (lambda r: None, {"subtract_mean": True}, ConfigError, "the inputs of folder are read as they are drawn"),
        (
            lambda r: None,
            {"test_split": 0.5},
            ConfigError,
            "test_split is for data without a test set; folder has one here",
        ),
    ],
)
def test_what_is_wrong_is_named(
    damage: Any, keys: dict[str, Any], error: type[Exception], message: str, root: Path
) -> None:
    damage(root)
    with pytest.raises(error) as raised:
        load(DataTable(name="folder", path=root, **keys))
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_missing_pillow_names_the_extra(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"needs Pillow: pip install 'rudra\[images\]'"):
        load(DataTable(name="folder", path=root))
