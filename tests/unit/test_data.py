import gzip
import io
import lzma
import os
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from rudra.data.load import in_memory, load
from rudra.data.samples import Split, Subset
from rudra.data.sources import Dense
from rudra.data.users import UserSplit
from rudra.errors import ConfigError, DataError
from rudra.job.tables import DataTable, TaskTable
from rudra.plugins import call, resolve
from tests.unit.real_data import REAL, idx, needs_real_data

BATCH = 10_000


@pytest.fixture
def idx_directory(tmp_path: Path) -> Path:
    """Six training and four test images of 5x4, plain and compressed files mixed."""
    rng = np.random.default_rng(0)
    for prefix, count in (("train", 6), ("t10k", 4)):
        images, labels = rng.integers(0, 256, (count, 5, 4)), np.arange(count) % 3
        (tmp_path / f"{prefix}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images, 2051)))
        (tmp_path / f"{prefix}-labels-idx1-ubyte").write_bytes(idx(labels, 2049))
    return tmp_path


def cifar_batch(number: int, **changes: Any) -> bytes:
    data = np.zeros((BATCH, 3072), np.uint8)
    data[:, 0] = number
    labels = [(i + number) % 10 for i in range(BATCH)]
    return pickle.dumps({b"data": data, b"labels": labels, b"batch_label": b"x", **changes}, protocol=2)


@pytest.fixture(scope="session")
def cifar_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The outer directory; batches 1 and 2 and the test are there, one of them as .xz."""
    outer = tmp_path_factory.mktemp("cifar")
    inner = outer / "cifar-10-batches-py"
    inner.mkdir()
    (inner / "data_batch_1.xz").write_bytes(lzma.compress(cifar_batch(1), preset=0))
    (inner / "data_batch_2").write_bytes(cifar_batch(2))
    (inner / "test_batch").write_bytes(cifar_batch(9))
    return outer


def counts_of(split: Split) -> np.ndarray[Any, Any]:
    """How many samples each class has."""
    return np.bincount(split.batch(np.arange(len(split)))[1])


def test_digits_are_split_by_class_and_scaled() -> None:
    train, test, info, _ = load(DataTable(name="digits", subtract_mean=False))
    assert isinstance(train, Split)
    assert isinstance(test, Split)
    assert (info.training_samples, info.test_samples) == (len(train), len(test)) == (1442, 355)
    assert (info.input_shape, info.classes) == ((1, 8, 8), 10)
    shares = counts_of(test) / (counts_of(train) + counts_of(test))
    assert np.all(np.abs(shares - 0.2) < 0.01)
    x, y = train.batch(np.arange(len(train)))
    assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
    assert (float(x.min()), float(x.max())) == (0.0, 1.0)


def test_batch_subtracts_the_mean_then_scales() -> None:
    inputs = np.arange(24, dtype=np.uint8).reshape(3, 2, 2, 2)
    mean = np.full((2, 2, 2), 10, np.float32)
    x, y = Split(Dense(inputs), Dense(np.array([5, 6, 7])), mean, 0.5).batch(np.array([2, 0, 2]))
    assert x.numpy().tolist() == ((inputs[[2, 0, 2]].astype(np.float32) - 10) / 2).tolist()
    assert y.tolist() == [7, 5, 7]
    assert x.is_contiguous()


KINDS = {  # inputs and targets as stored -> as drawn, unscaled
    "bytes": (np.arange(12, dtype=np.uint8).reshape(4, 3), torch.float32),
    "truths": (np.arange(12).reshape(4, 3) % 2 == 0, torch.float32),
    "halves": (np.arange(12, dtype=np.float16).reshape(4, 3), torch.float32),
    "big-endian": (np.arange(12, dtype=">f8").reshape(4, 3), torch.float32),
    "tokens": (np.arange(12, dtype=np.int32).reshape(4, 3), torch.int64),
    "unsigned tokens": (np.arange(12, dtype=np.uint16).reshape(4, 3), torch.int64),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_inputs_and_targets_become(kind: str) -> None:
    array, expected = KINDS[kind]
    wanted = np.array([3, 0, 3])
    x, y = Split(Dense(array), Dense(array)).batch(wanted)
    assert x.dtype == expected
    assert y.dtype == (torch.int64 if kind == "bytes" else expected)
    assert x.tolist() == y.tolist() == array[wanted].astype(float).tolist()
    assert x.is_contiguous()
    assert y.is_contiguous()
    if expected == torch.float32:
        mean = np.array([1, 2, 4], np.float32)
        x, _ = Split(Dense(array), Dense(array), mean, 0.5).batch(wanted)
        assert x.tolist() == ((array[wanted].astype(np.float32) - mean) / 2).tolist()
        x, _ = Split(Dense(array), Dense(array), scale=0.5).batch(wanted)
        assert x.tolist() == (array[wanted].astype(np.float32) / 2).tolist()


@pytest.mark.parametrize("kind", [torch.float64, torch.uint8, torch.int32])
def test_a_set_of_tensors_is_drawn_at_once_as_its_items_one_by_one(kind: torch.dtype) -> None:
    class Itemwise(TensorDataset):
        pass

    tensors = torch.arange(60).reshape(10, 2, 3).to(kind), torch.arange(10, dtype=torch.int32)
    wanted = np.array([7, 2, 2, 9])
    at_once, one_by_one = (UserSplit(kind_(*tensors), 10).batch(wanted) for kind_ in (TensorDataset, Itemwise))
    for ours, theirs in zip(at_once, one_by_one, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


def test_a_subset_of_any_samples_draws_those_alone() -> None:
    split = Split(Dense(np.arange(20.0).reshape(10, 2)), Dense(np.arange(10)))
    users = UserSplit(TensorDataset(torch.arange(20.0).reshape(10, 2), torch.arange(10)), 10)
    chosen = np.array([7, 2, 5])
    for samples in (split, users):
        subset = Subset(Subset(samples, np.arange(1, 10)), chosen - 1)
        assert len(subset) == 3
        x, y = subset.batch(np.array([2, 0, 2]))
        assert (x[:, 0].tolist(), y.tolist()) == ([10, 14, 10], [5, 7, 5])
        assert subset[1][1] == 2
        assert in_memory(subset) is (samples is split)


def test_idx_reads_plain_and_compressed_and_the_test_gets_the_training_mean(idx_directory: Path) -> None:
    table = DataTable(name="idx", path=idx_directory, train_limit=3, scale=2.0)
    train, test, info, _ = load(table)
    assert (info.training_samples, info.test_samples, info.input_shape) == (3, 4, (1, 5, 4))
    assert len(train) == 3
    raw, _, _, _ = load(table.model_copy(update={"subtract_mean": False, "scale": 1.0}))
    mean = raw.batch(np.arange(3))[0].mean(0)
    torch.testing.assert_close(train.batch(np.arange(3))[0], (raw.batch(np.arange(3))[0] - mean) * 2)
    alone_train, alone, alone_info, _ = load(table, train=False)
    assert alone_train is None
    assert alone_info == info
    assert torch.equal(alone.batch(np.arange(4))[0], test.batch(np.arange(4))[0])
    assert load(table, train=False, test=False) == (None, None, info, None)


Damage = Callable[[Path], object]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "train-labels-idx1-ubyte").unlink(), "no file train-labels-idx1-ubyte or .*.gz"),
        (lambda d: cut(d / "t10k-labels-idx1-ubyte", 2), "t10k-labels-idx1-ubyte: truncated: 2 bytes of data, .* 4"),
        (lambda d: cut(d / "t10k-labels-idx1-ubyte", 9), "t10k-labels-idx1-ubyte: truncated: 3 bytes, .* 8"),
        (lambda d: cut(d / "train-images-idx3-ubyte.gz", 20), "train-images-idx3-ubyte.gz: .*truncated or corrupt"),
        (lambda d: flip(d / "train-images-idx3-ubyte.gz"), "train-images-idx3-ubyte.gz: .*truncated or corrupt"),
        (lambda d: write(d / "train-images-idx3-ubyte.gz", b"no gzip"), "train-images-idx3-ubyte.gz: .*corrupt"),
        (lambda d: labels(d, [0, 1]), "train-labels-idx1-ubyte: 2 labels for the 6 images"),
        (lambda d: labels(d, [0, 1, 2, 11, 0, 1]), "train-labels-idx1-ubyte: sample 3 has label 11; valid: 0 to 9"),
        (lambda d: write(d / "train-labels-idx1-ubyte", idx(np.zeros(6), 2051)), "begins with 2051, .* 2049"),
        (lambda d: write(d / "train-labels-idx1-ubyte", idx(np.zeros(6), 2049) + b"x"), "too long: its header says 6"),
    ],
)
def test_damaged_idx_files_are_named(idx_directory: Path, damage: Damage, message: str) -> None:
    damage(idx_directory)
    with pytest.raises(DataError, match=message) as raised:
        load(DataTable(name="idx", path=idx_directory))
    assert "\n" not in str(raised.value)


def write(file: Path, content: bytes) -> None:
    file.write_bytes(content)


def cut(file: Path, off: int) -> None:
    file.write_bytes(file.read_bytes()[:-off])


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-7] ^= 0xFF  # in the checksum
    file.write_bytes(content)


def labels(directory: Path, values: list[int]) -> None:
    write(directory / "train-labels-idx1-ubyte", idx(np.array(values), 2049))


def test_cifar10_opens_only_the_batches_that_the_limit_needs(cifar_directory: Path) -> None:
    for path in (cifar_directory, cifar_directory / "cifar-10-batches-py"):
        train, test, info, _ = load(DataTable(name="cifar10", path=path, train_limit=BATCH + 5, subtract_mean=False))
        assert (len(train), len(test), info.input_shape, info.classes) == (BATCH + 5, BATCH, (3, 32, 32), 10)
        x, y = train.batch(np.array([0, BATCH]))
        assert x[:, 0, 0, 0].tolist() == [1.0, 2.0]
        assert y.tolist() == [1, 2]
    with pytest.raises(DataError, match=r"no file data_batch_3 or data_batch_3\.xz"):
        load(DataTable(name="cifar10", path=cifar_directory))


def test_cifar10_reads_the_archive_in_any_order(tmp_path: Path, cifar_directory: Path) -> None:
    archive = tmp_path / "cifar-10-python.tar.gz"
    with tarfile.open(archive, "w:gz", compresslevel=1) as tar:
        for name in ("test_batch", "data_batch_2"):
            tar.add(cifar_directory / "cifar-10-batches-py" / name, f"cifar-10-batches-py/{name}")
        member = tarfile.TarInfo("cifar-10-batches-py/data_batch_1")
        content = cifar_batch(1)
        member.size = len(content)
        tar.addfile(member, io.BytesIO(content))
    for path in (archive, tmp_path):
        table = DataTable(name="cifar10", path=path, train_limit=20_000)
        train, test, _, _ = load(table)
        ours, theirs, _, _ = load(table.model_copy(update={"path": cifar_directory}))
        for a, b in ((train, ours), (test, theirs)):
            assert torch.equal(a.batch(np.array([3, 9999]))[0], b.batch(np.array([3, 9999]))[0])
    cut(archive, 5000)
    with pytest.raises(DataError, match=r"tar.gz: cannot be read, perhaps truncated"):
        load(table)


class Attack:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch stolen",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda: pickle.dumps(Attack(), protocol=2), "asks for posix.system"),
        (lambda: cifar_batch(1, extra=np.array([Attack()])), "array of object"),
        (lambda: cifar_batch(1, extra=np.zeros(2, "i4,f8")), "array of"),
        (lambda: cifar_batch(1)[:-1000], "truncated or corrupt"),
        (lambda: pickle.dumps({b"data": 1}), "not a CIFAR-10 batch"),
        (
            lambda: b"\x80\2Nr\xff\xff\xff\x7f.",
            "not a CIFAR-10 batch",
        ),  # a memo of 34 GB, by Python's own unpickler in C
        (
            lambda: pickle.dumps({b"data": np.zeros((BATCH, 3072), np.uint8), b"labels": [[]]}, 2),
            "labels are not a list",
        ),
        (lambda: cifar_batch(1).replace(b"labels", b"bagels", 1), "not a CIFAR-10 batch"),
        (lambda: pickle.dumps({b"data": np.zeros((9, 3072), np.uint8), b"labels": [0]}, 2), r"shape \(9, 3072\), not"),
        (lambda: pickle.dumps({b"data": np.zeros((BATCH, 3072), np.uint8), b"labels": [0]}, 2), "1 labels for 10000"),
        (lambda: pickle.dumps({b"data": np.zeros((BATCH, 3072), np.uint8), b"labels": [10] * BATCH}, 2), "label 10"),
    ],
)
def test_damaged_or_hostile_cifar_batches_do_nothing_but_raise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: Callable[[], bytes], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data_batch_1").write_bytes(content())
    with pytest.raises(DataError, match=f"data_batch_1: .*{message}") as raised:
        load(DataTable(name="cifar10", path=tmp_path, train_limit=1), test=False)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "stolen").exists()


@pytest.mark.parametrize(
    ("table", "error", "message"),
    [
        ({"name": "idx"}, DataError, "needs path"),
        ({"name": "idx", "path": "/nowhere"}, DataError, "/nowhere: no such file or directory"),
        ({"name": "cifar10", "path": "."}, DataError, "no data_batch_1 or data_batch_1.xz"),
        ({"name": "mnist"}, ConfigError, "'mnist' is unknown; valid: arff, npz, hdf5, cifar10.*, package"),
        ({"name": "digits", "test_split": 0.1}, ConfigError, "test_split is for data without a test set; digits has"),
        ({"name": ([1], [1]), "classes": 2, "test_split": 0.1}, ConfigError, "must give one dataset, as test_split"),
        ({"name": "digits", "options": {"size": 9}}, ConfigError, "takes no options, not size"),
        ({"name": "nowhere.at_all:make"}, ConfigError, "no module 'nowhere'"),
        ({"name": (1, 2, 3, 4)}, ConfigError, "must give two datasets"),
        ({"name": (1, 2), "classes": 2}, ConfigError, "the training set, a int, has no length"),
        ({"name": lambda: ([], []), "classes": 2}, DataError, "has no sample"),
        ({"name": lambda size: size, "classes": 2}, ConfigError, "missing a required argument: 'size'"),
        ({"name": ([1], [1]), "classes": 2}, DataError, "training sample 0 is not a pair"),
        (
            {"name": ([("a", 1)], [1]), "classes": 2},
            DataError,
            "do not make a batch of tensors: the input .a. is not a number",
        ),
        ({"name": "digits", "classes": 5}, DataError, "label 5; valid: 0 to 4"),
        ({"name": "digits", "collate": "math:pi"}, ConfigError, "collate is for datasets of your own"),
    ],
)
def test_mistakes_in_the_data_table(table: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as raised:
        load(DataTable(**table))
    assert "\n" not in str(raised.value)


def make_pair(count: int, path: Path | None = None) -> tuple[Dataset[Any], Dataset[Any]]:
    sets = [TensorDataset(torch.arange(4.0 * n).reshape(n, 4), torch.arange(n) % 3) for n in (count, 2)]
    return sets[0], sets[1]


class Told(Dataset[Any]):
    """Ten samples; gives them singly or, where asked, together."""

    def __init__(self, **told: Any) -> None:
        self.__dict__.update(told)

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((2,), index, dtype=torch.uint8), index % 4


def test_users_datasets_by_callable_and_in_code() -> None:
    table = DataTable(name=make_pair, classes=3, train_limit=5, options={"count": 9}, path=Path("x"))
    train, test, info, _ = load(table)
    assert (info.name, info.training_samples, info.test_samples) == ("make_pair", 5, 2)
    assert (info.input_shape, info.classes) == ((4,), 3)
    x, y = train.batch(np.array([4, 1]))
    assert x.tolist() == [[16, 17, 18, 19], [4, 5, 6, 7]]
    assert y.tolist() == [1, 1]
    assert test is not None
    assert load(DataTable(name=make_pair(9), classes=3))[2].training_samples == 9
    assert load(table, train=False)[0] is None


@pytest.mark.parametrize(
    ("told", "classes"),
    [
        ({"classes": ["a", "b", "c", "d"]}, 4),
        ({"classes": 6}, 6),
        ({"targets": [0, 3, 1]}, 4),
        ({"labels": torch.tensor([4, 0])}, 5),
        ({"labels": {"a": 0, "b": 2}}, 3),
        ({"labels": ["ant", "bee"]}, None),
        ({}, None),
    ],
)
def test_classes_are_told_by_the_training_set(told: dict[str, Any], classes: int | None) -> None:
    table = DataTable(name=(Told(**told), Told()))
    if classes is None:
        with pytest.raises(ConfigError, match=r"set data\.classes"):
            load(table)
    else:
        assert load(table)[2].classes == classes
    assert load(table.model_copy(update={"classes": 7}))[2].classes == 7


def test_a_users_label_out_of_range_is_named() -> None:
    with pytest.raises(DataError, match=r"test sample 7 has label 3; valid: 0 to 2 \(\[data\] classes\)"):
        UserSplit(Told(), 3, name="test").batch(np.array([1, 7]))


def test_a_label_that_the_loss_ignores_may_be_outside_the_classes() -> None:
    loss = "torch.nn.functional:cross_entropy"
    ignored = TaskTable(name=loss, options={"ignore_index": 255}).ignored
    assert (ignored, TaskTable(name=loss).ignored) == (255, None)
    assert TaskTable(name=torch.nn.CrossEntropyLoss(ignore_index=9)).ignored == 9
    dataset = Told(targets=[0, 1, 255, 2])
    labels = torch.tensor([0, 255, 2])
    items = [(torch.zeros(4), label) for label in labels]
    assert torch.equal(UserSplit(items, 3, ignored=255).batch(np.arange(3))[1], labels)
    with pytest.raises(DataError, match="training sample 1 has label 255; valid: 0 to 2"):
        UserSplit(items, 3).batch(np.arange(3))
    assert load(DataTable(name=(dataset, Told())), ignored=255).info.classes == 3


def test_tokens_below_0_are_for_the_task_and_others_out_of_range_are_named() -> None:
    tokens = torch.tensor([[0, 2, -100], [-1, 1, 2]])
    dataset = [(row, row) for row in tokens]
    assert torch.equal(UserSplit(dataset, 3).batch(np.array([1, 0]))[1], tokens.flip(0))
    with pytest.raises(DataError, match="training sample 0 has label 2; valid: 0 to 1"):
        UserSplit(dataset, 2).batch(np.array([0, 1]))


def test_getitems_gives_the_same_batch() -> None:
    class Together(Told):
        def __getitems__(self, indices: list[int]) -> list[tuple[torch.Tensor, int]]:
            return [super(Together, self).__getitem__(index) for index in indices]

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            raise AssertionError("items were taken one by one")

    wanted = np.array([3, 9, 0])
    (x, y), (x1, y1) = UserSplit(Together(), 4).batch(wanted), UserSplit(Told(), 4).batch(wanted)
    assert torch.equal(x, x1)
    assert torch.equal(y, y1)
    assert x.dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("math", "'math' is not of the form"),
        ("math:", "is not of the form"),
        ("a b:c", "is not of the form"),
        ("math:tau.imag.nothing", "math has no attribute 'tau.imag.nothing'"),
        ("nowhere.inside:x", "no module 'nowhere'"),
        ("email.nowhere:x", "no module 'email.nowhere'"),
    ],
)
def test_names_that_do_not_resolve(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(name)


def test_resolve_follows_dots_and_lets_a_broken_module_speak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve("pathlib:Path.name") is Path.name
    (tmp_path / "broken_plugin.py").write_text("import not_there_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="not_there_at_all"):
        resolve("broken_plugin:x")


def test_call_offers_only_what_a_signature_names() -> None:
    assert call(lambda a, b=2: (a, b), "f", {"b": 3}, {"a": 1, "c": 9, "b": 7}) == (1, 3)
    with pytest.raises(ConfigError, match=r"f: got an unexpected keyword argument 'z'; its parameters: a"):
        call(lambda a: a, "f", {"z": 3}, {"a": 1})


@needs_real_data
def test_real_fashion_mnist() -> None:
    train, test, info, _ = load(DataTable(name="idx", path=REAL / "fashion-mnist"))
    assert (info.training_samples, info.test_samples, info.input_shape) == (60_000, 10_000, (1, 28, 28))
    assert isinstance(train, Split)
    assert isinstance(test, Split)
    assert counts_of(train).tolist() == [6000] * 10
    x, _ = train.batch(np.arange(0, 60_000, 7))
    assert abs(float(x.mean())) < 0.01
    assert 0.2 < float(x.std()) < 0.4


@needs_real_data
def test_real_cifar10() -> None:
    train, _, info, _ = load(DataTable(name="cifar10", path=REAL / "cifar-10", train_limit=2000), test=False)
    assert (info.training_samples, info.test_samples, info.input_shape) == (2000, 10_000, (3, 32, 32))
    assert isinstance(train, Split)
    assert train.batch(np.arange(5))[1].tolist() == [6, 9, 9, 4, 1]
    assert abs(float(train.batch(np.arange(2000))[0].mean())) < 0.01


def test_one_seed_of_the_split_holds_out_the_same_samples_whatever_the_run_s_seed() -> None:
    table = DataTable(name="digits", train_limit=100, validation_split=0.3)

    def held(table: DataTable, seed: int) -> torch.Tensor:
        found = load(table, seed=seed).validation
        assert found is not None
        inputs = found.batch(np.arange(len(found)))[0]
        assert isinstance(inputs, torch.Tensor)
        return inputs

    shared = table.model_copy(update={"split_seed": 5})
    assert torch.equal(held(shared, 1), held(shared, 2))
    assert torch.equal(held(shared, 1), held(table, 5))
    assert not torch.equal(held(table, 1), held(table, 2))


def test_what_is_held_out_is_neither_learned_nor_lost() -> None:
    """Every sample of the training set is in one part; seeds choose others, limits come first."""
    table = DataTable(name="digits", train_limit=100, validation_split=0.3, subtract_mean=False)
    whole = load(table.model_copy(update={"validation_split": None}), seed=5)
    parts = load(table, seed=5)
    assert (parts.info.training_samples, len(parts.training), len(parts.validation)) == (70, 70, 30)
    assert list(parts.tests) == ["test", "validation"]

    def rows(samples: Any) -> set[bytes]:
        inputs, labels = samples.batch(np.arange(len(samples)))
        return {x.numpy().tobytes() + bytes([int(y)]) for x, y in zip(inputs, labels, strict=True)}

    assert rows(parts.training) | rows(parts.validation) == rows(whole.training)
    assert not rows(parts.training) & rows(parts.validation)
    assert rows(load(table, seed=6).validation) != rows(parts.validation)
    alone = load(table, train=False, seed=5)
    assert alone.training is None
    assert rows(alone.validation) == rows(parts.validation)
    learner = load(table, test=False, seed=5)
    assert (learner.test, learner.validation, learner.info) == (None, None, parts.info)


def test_one_dataset_of_ones_own_is_parted() -> None:
    whole, _ = make_pair(50)
    parts = load(DataTable(name=lambda: whole, classes=3, test_split=0.2, train_limit=30), seed=1)
    assert (len(parts.training), len(parts.test)) == (30, 10)
    with pytest.raises(ConfigError, match="must give two datasets"):
        load(DataTable(name=lambda: whole, classes=3))


def test_data_that_is_drawn_at_random_is_the_same_on_every_node() -> None:
    def drawn() -> tuple[TensorDataset, TensorDataset]:
        inputs = torch.from_numpy(np.random.rand(12, 3).astype(np.float32)) + torch.rand(3)
        whole = TensorDataset(inputs, torch.arange(12) % 2)
        return whole, whole

    table = DataTable(name=drawn, classes=2)
    first, second = (load(table, seed=seed).training for seed in (1, 2))
    assert torch.equal(first.batch(np.arange(12))[0], second.batch(np.arange(12))[0])  # type: ignore[union-attr]


def test_lists_of_numbers_are_one_tensor_each() -> None:
    rows = [{"ids": [i, 2, 3], "box": [[0.5, i], [1, 2]], "scale": 2.0, "label": [0.0, 1.0]} for i in range(4)]
    inputs, target = UserSplit(rows, 2).batch(np.array([1, 3]))
    assert {name: (tuple(t.shape), t.dtype) for name, t in inputs.items()} == {
        "ids": ((2, 3), torch.int64),
        "box": ((2, 2, 2), torch.float32),
        "scale": ((2,), torch.float32),
    }
    assert inputs["ids"].tolist() == [[1, 2, 3], [3, 2, 3]]
    assert target.tolist() == [[0.0, 1.0], [0.0, 1.0]]
    first, _ = UserSplit([([1, 2], 0), ([3, 4], 1)], 2).batch(np.array([1, 0]))
    assert first.tolist() == [[3, 4], [1, 2]]
    several, _ = UserSplit([([torch.ones(2), torch.zeros(3)], 0)], 2).batch(np.array([0]))
    assert [tuple(each.shape) for each in several] == [(1, 2), (1, 3)]


@pytest.mark.parametrize("ids", [[1, 2], [[1], [2, 3]], []])
def test_lists_of_different_lengths_make_no_batch(ids: list[Any]) -> None:
    with pytest.raises(DataError, match="do not make a batch of tensors"):
        UserSplit([{"ids": ids, "label": 0}, {"ids": [1, 2, 3], "label": 1}], 2).batch(np.array([0, 1]))


def padded(items: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences of several lengths as one batch, with zeros behind the short ones."""
    inputs = nn.utils.rnn.pad_sequence([item["ids"] for item in items], batch_first=True)
    return inputs, torch.tensor([item["label"] for item in items])


def ragged(count: int) -> list[Any]:
    return [{"ids": torch.full((1 + i % 4,), i), "label": i % 3} for i in range(count)]


def test_samples_of_several_sizes_are_put_together_as_the_user_says() -> None:
    parts = load(DataTable(name=(ragged(9), ragged(5)), classes=3, collate=padded, validation_split=0.3))
    assert parts.training is not None
    assert parts.info.input_shape == (1,)
    split = UserSplit(ragged(9), 3, collate=padded)
    inputs, labels = split.batch(np.array([1, 6, 0]))
    assert (inputs.tolist(), labels.tolist()) == ([[1, 1, 0], [6, 6, 6], [0, 0, 0]], [1, 0, 0])
    assert not split.random


def test_a_mini_batch_may_be_made_as_a_dictionary_and_draw_random_numbers() -> None:
    def masked(items: list[Any]) -> dict[str, Any]:
        ids = padded(items)[0]
        return {"ids": ids, "mask": torch.rand(ids.shape) < 0.5, "weight": [1.0] * len(items), "labels": ids.tolist()}

    split = UserSplit(ragged(9), None, collate=masked)
    assert split.random
    inputs, target = split.batch(np.array([1, 2]))
    assert {name: tuple(tensor.shape) for name, tensor in inputs.items()} == {
        "ids": (2, 3),
        "mask": (2, 3),
        "weight": (2,),
    }
    assert target.tolist() == [[1, 1, 0], [2, 2, 2]]


@pytest.mark.parametrize(
    ("collate", "message"),
    [
        (
            lambda items: padded([*items, items[0]]),
            r"training samples .*collate gave input of shape \(2, 1\) for 1 samples; its first dim.* must be .* 1",
        ),
        (lambda items: [1, 2, 3], "training sample 0 is not a pair"),
        (lambda items: (items, ["a"]), "do not make a batch of tensors"),
        ("math:pi", r"\[data\] collate: math:pi is a float and cannot be called"),
    ],
)
def test_mistakes_in_making_mini_batches(collate: Any, message: str) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        load(DataTable(name=(ragged(9), ragged(5)), classes=3, collate=collate))


def test_what_the_users_collate_raises_comes_through() -> None:
    with pytest.raises(ZeroDivisionError):
        load(DataTable(name=(ragged(9), ragged(5)), classes=3, collate=lambda items: 1 / 0))


def test_inputs_keep_their_meaning() -> None:
    inputs = {
        "mask": torch.tensor([True, False]),
        "signal": torch.tensor([1j, 2.0], dtype=torch.complex128),
        "picture": torch.full((1, 2, 2), 60000, dtype=torch.uint16),
        "tokens": torch.tensor([1, 2], dtype=torch.int32),
    }
    batch, _ = UserSplit([({**inputs}, 0)], 2).batch(np.array([0]))
    kinds = {name: tensor.dtype for name, tensor in batch.items()}
    assert kinds == {"mask": torch.bool, "signal": torch.complex64, "picture": torch.float32, "tokens": torch.int64}
    assert float(batch["picture"].max()) == 60000
    with pytest.raises(DataError, match="a target is complex; valid: real numbers"):
        UserSplit([(torch.ones(2), torch.tensor(1j))], None).batch(np.array([0]))


def test_every_entry_of_a_batch_has_the_samples_first() -> None:
    def collate(items: list[Any]) -> dict[str, Any]:
        return {"ids": padded(items)[0], "mask": torch.ones(5, 5), "labels": padded(items)[1]}

    with pytest.raises(DataError, match=r"collate gave input\['mask'\] of shape \(5, 5\) for 2 samples; its first dim"):
        UserSplit(ragged(9), 3, collate=collate, limit=0).batch(np.array([0, 1]))


def test_the_example_is_a_real_sample() -> None:
    info = load(DataTable(name=(ragged(9)[3:], ragged(5)), classes=3, collate=padded)).info
    assert info.sample[0].tolist() == [[3, 3, 3, 3]]
    digits = load(DataTable(name="digits", subtract_mean=False))
    assert torch.equal(digits.info.sample[0], digits.training.batch(np.array([0]))[0])


def test_whole_numbers_in_rows_of_several_dimensions_are_pictures(tmp_path: Path) -> None:
    pictures = np.full((4, 3, 3), 60000, np.uint16)
    np.savez(tmp_path / "a.npz", x_train=pictures, y_train=np.arange(4) % 2)
    loaded = load(DataTable(name="npz", path=tmp_path / "a.npz", test_split=0.5))
    x, _ = loaded.training.batch(np.array([0]))
    assert (x.dtype, tuple(x.shape), float(x.max())) == (torch.float32, (1, 1, 3, 3), 60000)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (("training", 4, 3), r"training sample 4 has label 3; valid: 0 to 2 \(\[data\] classes\)"),
        (("training", 7, -1), "training sample 7 has label -1; valid: 0 to 2"),
        (("training", 8, 3), ""),  # beyond the limit
        (("validation", 0, 5), "validation sample 0 has label 5"),
        (("test", 2, 3), "test sample 2 has label 3"),
    ],
)
def test_labels_in_memory_are_checked_when_a_set_is_loaded(wrong: tuple[str, int, int], message: str) -> None:
    name, sample, label = wrong
    sets = {each: TensorDataset(torch.zeros(9, 2), torch.arange(9) % 3) for each in ("training", "validation", "test")}
    sets[name].tensors[1][sample] = label
    table = DataTable(name=tuple(sets.values()), classes=3, train_limit=8)
    if not message:
        load(table)
        return
    with pytest.raises(DataError, match=message) as caught:
        load(table)
    assert caught.value.exit_code == 2


def test_tokens_of_arrays_are_checked_when_a_set_is_loaded(tmp_path: Path) -> None:
    tokens = np.arange(24).reshape(6, 4) % 9
    np.savez(tmp_path / "a.npz", x_train=tokens % 5, y_train=tokens, x_test=tokens % 5, y_test=tokens % 5)
    assert load(DataTable(name="npz", path=tmp_path / "a.npz", classes=9)).info.classes == 9
    with pytest.raises(ConfigError, match=r"^\[data\] classes: 8, but .*a.npz has 9$"):
        load(DataTable(name="npz", path=tmp_path / "a.npz", classes=8))
