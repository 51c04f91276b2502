"""Fingerprints of data, and the thread in which the user's datasets live."""

import random
import sqlite3
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from rudra.api import simulate
from rudra.data.fingerprint import fingerprint, fingerprints, from_plain, plain, unrepeatable
from rudra.data.load import load
from rudra.data.samples import Subset
from rudra.data.users import UserSplit
from rudra.errors import ConfigError, ReplayError
from rudra.job.job import Job
from rudra.job.tables import DataTable
from rudra.plugins import call, resolve
from rudra.simulation.replay import replay


class Items(Dataset[Any]):
    """Items that a function gives."""

    def __init__(self, give: Any, length: int = 50) -> None:
        self.give, self.length = give, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.give(index)


def tensors(shift: float = 0.0, labels: int = 0, samples: int = 100) -> TensorDataset:
    x = torch.randn(samples, 5, generator=torch.Generator().manual_seed(1)) + shift
    return TensorDataset(x, (torch.arange(samples) + labels) % 3)


def split(dataset: Any, **more: Any) -> UserSplit:
    return UserSplit(dataset, 3, **more)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (tensors(), ""),
        (tensors(shift=1e-5), ""),  # as two processors round
        (tensors(shift=0.5), "other inputs"),
        (tensors(labels=1), "other labels"),
        (tensors(samples=99), "99 samples, not 100"),
    ],
)
def test_a_difference_of_data_is_named(other: TensorDataset, said: str) -> None:
    assert fingerprint(split(other)).difference(fingerprint(split(tensors()))) == said


def test_fingerprints_of_all_splits_outlive_json_and_leave_generators_alone() -> None:
    state = random.getstate()
    found = fingerprints(load(DataTable(name="digits", validation_split=0.1)))
    assert list(found) == ["training", "validation", "test"]
    assert from_plain(plain(found)) == found
    assert random.getstate() == state


def own_generator() -> Items:
    mine = np.random.default_rng(0)
    return Items(lambda index: (torch.from_numpy(mine.normal(size=5)), index % 3))


def test_a_random_generator_of_ones_own_is_noticed_and_that_of_everybody_is_not() -> None:
    found = fingerprint(split(own_generator()))
    assert not found.repeats
    assert not found.inputs
    assert found.targets
    assert "generator of its own" in unrepeatable({"training": found})
    shared = split(Items(lambda index: (torch.randn(4), index % 3)))
    assert shared.random
    assert unrepeatable({"training": fingerprint(shared)}) == ""
    assert fingerprint(shared) == fingerprint(shared)


def of(data: Any) -> Job:
    return Job.load("digits", ["training.epochs=1"]).with_(
        model={"name": "mlp"}, data={"name": data, "classes": 3}, cluster={"learners": 1}
    )


def test_a_replay_with_other_data_is_refused_in_one_line(tmp_path: Path) -> None:
    with simulate(of((tensors(), tensors())), output=tmp_path / "a.h5", progress="quiet"):
        pass
    assert replay(tmp_path / "a.h5", job=of((tensors(), tensors()))).identical
    with pytest.raises(ReplayError, match="training set has changed since the run: other labels"):
        replay(tmp_path / "a.h5", job=of((tensors(labels=1), tensors())))


def test_a_run_whose_samples_cannot_be_drawn_again_is_not_replayable(tmp_path: Path) -> None:
    with simulate(of((own_generator(), tensors())), output=tmp_path / "a.h5", progress="quiet") as results:
        assert "generator of its own" in results.attributes["not_replayable"]


def rows(path: Path, first: int) -> Any:
    connection = sqlite3.connect(path)
    ask = "select x, y from rows where id = ?"
    return Items(lambda index: connection.execute(ask, (first + index,)).fetchone(), 20)


def test_objects_that_belong_to_a_thread_are_asked_there(tmp_path: Path) -> None:
    path = tmp_path / "rows.db"
    with sqlite3.connect(path) as made:
        made.execute("create table rows (id integer, x real, y integer)")
        made.executemany("insert into rows values (?, ?, ?)", [(i, i / 7, i % 3) for i in range(40)])
    by_rudra = load(DataTable(name=lambda: (rows(path, 0), rows(path, 20)), classes=3)).training
    in_code = load(DataTable(name=(rows(path, 0), rows(path, 20)), classes=3)).training
    drawn: list[Any] = []
    asking = threading.Thread(target=lambda: drawn.append(by_rudra.batch(np.arange(3))))
    asking.start()
    asking.join()
    for inputs, targets in (*drawn, by_rudra.batch(np.arange(3)), in_code.batch(np.arange(3))):
        assert torch.equal(inputs, torch.tensor([0, 1 / 7, 2 / 7]))
        assert targets.tolist() == [0, 1, 2]


def leaves() -> None:
    raise SystemExit(3)


def test_code_that_ends_the_program_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "leaver.py").write_text("import sys; sys.exit(2)")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="the module leaver ended the program while it was imported, with code 2"):
        resolve("leaver:data")
    with pytest.raises(ConfigError, match="own:data: ended the program when it was called, with code 3"):
        call(leaves, "own:data", {}, {})


class Transformed(Items):
    def __init__(self, transform: Any) -> None:
        super().__init__(None)
        self.transform = transform

    def __getitem__(self, index: int) -> Any:
        return self.transform(torch.full((2,), float(index))), index % 3


def test_a_factory_may_give_three_sets() -> None:
    three = (tensors(), tensors(samples=20), tensors(samples=30))
    found = load(DataTable(name=three, classes=3))
    assert [len(each or ()) for each in (found.training, found.validation, found.test)] == [100, 20, 30]
    with pytest.raises(ConfigError, match="gives a validation set already; valid: no validation_split"):
        load(DataTable(name=three, classes=3, validation_split=0.1))


def test_a_validation_split_is_drawn_with_the_transform_of_the_test_set() -> None:
    pair = (Transformed(lambda x: x + torch.rand(2)), Transformed(lambda x: x))
    found = load(DataTable(name=pair, classes=3, validation_split=0.2))
    assert isinstance(found.validation, Subset)
    assert isinstance(found.training, Subset)
    inputs, _ = found.validation.batch(np.arange(10))
    assert torch.equal(inputs[:, 0], torch.from_numpy(found.validation.indices).float())
    assert not found.validation.random
    assert found.training.random
    assert not set(found.training.indices) & set(found.validation.indices)
