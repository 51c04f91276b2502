"""Weights of epochs, and what is not trained, in result files."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
from numpy.typing import NDArray

from rudra.compute.statedict import StateEntry
from rudra.core.records import EPOCH, LEARNER, TOTALS, UPDATE
from rudra.core.training_state import TrainingState
from rudra.errors import ResultsError
from rudra.results.carry import carried
from rudra.results.reader import open_results
from rudra.results.writer import ResultsWriter
from tests import forks
from tests.unit.results_files import LAYOUT, SIZE, WEIGHTS, new_writer, rows, sha256

ROOT = Path(__file__).parents[2]
FIXED = {
    "mask": np.arange(6).reshape(2, 3) % 2 == 0,
    "norm.num_batches_tracked": np.array(7),
    "a/b": np.array([1 + 2j, 3], np.complex64),
    "half": np.linspace(-1, 1, 5, dtype=np.float32),
    "empty": np.zeros((0, 3), np.int16),
}
STATE_DICT = (
    StateEntry("tied.weight", "conv.weight", "float32"),
    *(
        StateEntry(name, name, "bfloat16" if name == "half" else str(value.dtype), value)
        for name, value in FIXED.items()
    ),
    StateEntry("other half", "half", "bfloat16", FIXED["half"]),
    *(StateEntry(entry.name, entry.name, "float32") for entry in LAYOUT[:2]),
)


def weights(epoch: int) -> NDArray[np.float32]:
    return np.random.default_rng(epoch).normal(size=SIZE).astype(np.float32)


def end_epoch(writer: ResultsWriter, epoch: int, *, kept: bool = True) -> None:
    """As the statistics server does: the weights first, the row when everything about the epoch is known."""
    if kept:
        writer.keep(epoch, weights(epoch))
    hashed = sha256(weights(epoch)).encode() if kept else b""
    writer.append("epochs", rows(EPOCH, epoch=epoch, timestamp=epoch, weights_sha256=hashed))


def finish(writer: ResultsWriter) -> None:
    writer.append("epochs", rows(EPOCH, epoch=10, timestamp=10, weights_sha256=sha256(WEIGHTS).encode()))
    writer.finish(rows(TOTALS), rows(LEARNER, 4, learner=range(4)), WEIGHTS, sha256(WEIGHTS))


@pytest.mark.parametrize("swmr", [True, False])
def test_weights_of_epochs_are_read_as_they_were_kept(tmp_path: Path, swmr: bool) -> None:
    path = tmp_path / "run.h5"
    with new_writer(path, swmr=swmr, flush_s=60) as writer:
        for epoch in (1, 2, 3, 4):
            end_epoch(writer, epoch, kept=epoch != 3)
        finish(writer)
    with open_results(path) as results:
        assert results.kept_epochs == (1, 2, 4, 10)
        for epoch in (1, 2, 4):
            assert np.array_equal(results.weights_of(epoch), weights(epoch))
            tensors = results.state_dict(epoch)
            assert np.array_equal(tensors["conv.weight"].ravel(), weights(epoch)[:18])
        assert np.array_equal(results.weights_of(10), WEIGHTS)
        assert np.array_equal(results.state_dict()["scale"], WEIGHTS[18])
        with pytest.raises(ResultsError, match=r"run.h5: has no weights of epoch 3; .* kept: 1, 2, 4, 10$"):
            results.state_dict(3)


def test_of_many_kept_epochs_some_are_named(tmp_path: Path) -> None:
    with new_writer(tmp_path / "run.h5", flush_s=60) as writer:
        for epoch in range(1, 101):
            end_epoch(writer, epoch)
        writer.fail("interrupted", "stopped")
    with open_results(tmp_path / "run.h5") as results:
        assert results.kept_epochs == tuple(range(1, 101))
        with pytest.raises(ResultsError) as error:
            results.weights_of()
    kept = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, …, 96, 97, 98, 99, 100"
    assert str(error.value).endswith(f"no final weights: the run is interrupted; epochs that are kept: {kept}")


def killed(path: Path, deeds: str) -> None:
    """A writer in a process that is killed."""
    child = f"""
import os, signal
from pathlib import Path
from tests.unit.test_kept_weights import *
writer = new_writer(Path({str(path)!r}), flush_s=60)
{deeds}
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run(forks.rudra(child), cwd=ROOT, timeout=60, check=False).returncode == -9


@pytest.mark.slow
def test_a_killed_writer_leaves_the_epochs_whose_rows_are_there(tmp_path: Path) -> None:
    path = tmp_path / "run.h5"
    deeds = """
for epoch in (1, 2):
    end_epoch(writer, epoch)
writer.flush(force=True)
writer.keep(3, weights(3))
writer.keep(4, weights(4))
"""
    killed(path, deeds)
    with open_results(path) as results:
        assert results.live
        assert results.kept_epochs == (1, 2)
        assert np.array_equal(results.weights_of(2), weights(2))


def test_room_without_content_at_the_end_is_no_epoch(tmp_path: Path) -> None:
    """As a writer may leave it that is killed at the wrong moment."""
    with new_writer(tmp_path / "run.h5") as writer:
        end_epoch(writer, 1)
        writer.fail("interrupted", "stopped")
    with h5py.File(tmp_path / "run.h5", "r+") as file:
        file["weights/kept"].resize(2, axis=0)
    with open_results(tmp_path / "run.h5") as results:
        assert results.kept_epochs == (1,)


def test_a_resumed_run_keeps_what_lies_before_its_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "run.h5"
    with new_writer(path, initial_weights_sha256="", started="", replayable=True) as writer:
        writer.append("updates", rows(UPDATE, 5, timestamp=np.arange(5) + 1))
        for epoch in (1, 2, 3, 4):
            end_epoch(writer, epoch, kept=epoch != 1)
        writer.fail("interrupted", "stopped")
    with open_results(path) as before:
        found = carried(before, TrainingState(timestamp=3, epoch=3, steps=(0,) * 4))
        writer = new_writer(path, carried=found.rows, carried_weights=found.weights)
    with writer:
        end_epoch(writer, 5)
        finish(writer)
    with open_results(path) as results:
        assert results.kept_epochs == (2, 3, 5, 10)
        assert list(results.epochs["epoch"]) == [1, 2, 3, 5, 10]
        assert all(np.array_equal(results.weights_of(epoch), weights(epoch)) for epoch in (2, 3, 5))


def test_epochs_that_are_not_kept_take_no_space(tmp_path: Path) -> None:
    size = 5_000_000
    large = np.ones(size, np.float32)
    with new_writer(tmp_path / "run.h5", size=size, layout=()) as writer:
        writer.flush(force=True)
        assert (tmp_path / "run.h5").stat().st_size < 100_000
        for epoch in (1, 2):
            writer.keep(epoch, large)
        writer.fail("interrupted", "stopped")
    assert 8 * size < (tmp_path / "run.h5").stat().st_size < 8 * size + 9_000_000


@pytest.mark.parametrize("swmr", [True, False])
@pytest.mark.parametrize("epochs", [1, 2, 3, 20])
def test_the_place_of_weights_that_are_not_kept_any_longer_is_used_again(
    tmp_path: Path, epochs: int, swmr: bool
) -> None:
    """The best of so many epochs, one after the other: two places, of which one always holds what counts."""
    path = tmp_path / "run.h5"
    size = 1_000_000
    with new_writer(path, flush_s=60, size=size, layout=(), swmr=swmr) as writer:
        for epoch in range(1, epochs + 1):
            made = np.full(size, epoch, np.float32)
            writer.append("epochs", rows(EPOCH, epoch=epoch, timestamp=epoch, weights_sha256=sha256(made).encode()))
            writer.keep(epoch, made, [epoch - 1])
        writer.keep(epochs + 1, np.full(size, 51, np.float32))
        writer.fail("interrupted", "stopped")
    with open_results(path) as results:
        assert results.kept_epochs == (epochs,), "there is no row of the one after it"
        assert results.weights_of(epochs)[0] == epochs
    assert path.stat().st_size < 2 * 4 * size + 5_000_000


def test_a_writer_that_is_killed_while_it_keeps_the_best_leaves_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "run.h5"
    deeds = """
for epoch in (1, 2, 3):
    writer.append("epochs", rows(EPOCH, epoch=epoch, timestamp=epoch, weights_sha256=sha256(weights(epoch)).encode()))
    writer.keep(epoch, weights(epoch), [epoch - 1])
flush = writer._flush
def killed(now):
    flush(now)
    os.kill(os.getpid(), signal.SIGKILL)
writer._flush = killed
writer.keep(4, weights(4), [3])
"""
    killed(path, deeds)
    with open_results(path) as results:
        assert results.kept_epochs == (3,)
        assert np.array_equal(results.weights_of(3), weights(3))


def test_a_state_dict_has_all_names_in_their_order(tmp_path: Path) -> None:
    with new_writer(tmp_path / "run.h5", state_dict=STATE_DICT) as writer:
        finish(writer)
    with open_results(tmp_path / "run.h5") as results:
        found = {named.name: named.value for named in results.tensors()}
        types = [(named.name, named.tensor, named.dtype) for named in results.tensors()]
    assert types == [named[:3] for named in STATE_DICT]
    trained = {e.name: WEIGHTS[e.offset : e.offset + e.size].reshape(e.shape) for e in LAYOUT}
    expected = {named.name: trained.get(named.tensor, FIXED.get(named.tensor)) for named in STATE_DICT}
    assert list(found) == list(expected)
    for name, value in found.items():
        assert value.dtype == expected[name].dtype
        assert np.array_equal(value, expected[name])
        assert value.shape == expected[name].shape
    with h5py.File(tmp_path / "run.h5") as file:
        assert set(file["weights/fixed"]) == {"mask", "norm.num_batches_tracked", "a%2Fb", "half", "empty"}


def altered(file: h5py.File) -> None:
    file["weights/epochs"][1, 3] = 77


def shorter(file: h5py.File) -> None:
    file["weights/epochs"].resize(1, axis=0)


def again(file: h5py.File) -> None:
    file["weights/kept"][1] = 1


def replaced(name: str, make: Callable[[h5py.File], object]) -> Callable[[h5py.File], None]:
    def damage(file: h5py.File) -> None:
        del file[name]
        make(file)

    return damage


def huge(file: h5py.File) -> object:
    return file.create_dataset("weights/epochs", (2, 2**45), "<f4", chunks=(1, 1024), maxshape=(None, None))


def raw(file: h5py.File) -> object:
    return file.create_dataset("weights/fixed/mask", (4,), "i4", external=[("/etc/passwd", 0, 16)])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (altered, "the weights of epoch 2 do not match their checksum"),
        (shorter, "damaged or closed: "),
        (again, "/weights/kept is not in order"),
        (replaced("weights/epochs", huge), r"/weights/epochs claims [\d,]+ bytes, in a file of"),
        (replaced("weights/epochs", lambda f: f.update({"weights/epochs": np.zeros(3, "f4")})), "has another layout"),
        (replaced("weights/fixed", lambda f: None), "damaged: weights/fixed missing"),
        (replaced("weights/fixed/mask", lambda f: None), "/weights/fixed/mask is not a plain data set"),
        (replaced("weights/fixed/mask", raw), "/weights/fixed/mask is not a plain data set"),
        (
            replaced("weights/fixed/mask", lambda f: f.update({"weights/fixed/mask": h5py.SoftLink("/state")})),
            "/weights/fixed/mask is not a plain data set",
        ),
        (
            replaced("weights/fixed/mask", lambda f: f.update({"weights/fixed/mask": h5py.Empty("f4")})),
            "/weights/fixed/mask is not a plain data set",
        ),
        (
            replaced("weights/fixed/mask", lambda f: f.update({"weights/fixed/mask": np.array([b"x"])})),
            "/weights/fixed/mask has another layout",
        ),
        (replaced("weights/names", lambda f: f.update({"weights/names": np.zeros(3)})), "/weights/names has another"),
        (
            replaced("weights/names", lambda f: f.update({"weights/names": np.zeros(3, [("name", "S3")])})),
            "damaged or closed: ",
        ),
    ],
)
def test_what_cannot_be_is_damage(tmp_path: Path, damage: Callable[[h5py.File], None], message: str) -> None:
    path = tmp_path / "run.h5"
    with new_writer(path, state_dict=STATE_DICT) as writer:
        end_epoch(writer, 1)
        end_epoch(writer, 2)
        finish(writer)
    with h5py.File(path, "r+") as file:
        damage(file)
    with pytest.raises(ResultsError, match=message) as error, open_results(path) as results:
        results.state_dict(2)
    assert str(error.value).startswith(f"{path}: damaged")
