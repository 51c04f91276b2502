"""Checkpoint files: what is written can be read, and whatever is damaged is refused."""

import errno
import json
import os
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from results_files import write_run

from rudra.core.training_state import TrainingState
from rudra.errors import CheckpointError
from rudra.job.job import Job
from rudra.prepare.start import check_same
from rudra.results import checkpoint
from rudra.results.carry import carried
from rudra.results.checkpoint import CheckpointWriter, previous_of, read
from rudra.results.identity import compare, tables_of
from rudra.results.reader import open_results

POSITION = TrainingState(timestamp=7, epoch=1, samples=56, applied=14, time_s=1.5, steps=(7, 7), epoch_loss=0.1)
JOB = json.loads(Job(cluster={"learners": 2, "threads_per_rank": 1, "device": "cuda"}).to_json())
AUTO = Job(cluster={"learners": 2, "threads_per_rank": 1, "device": "auto"})


def tensors(seed: int = 0) -> dict[str, Any]:
    values = np.random.default_rng(seed).normal(size=23).astype(np.float32)
    return {"weights": values, "optimizer.step.0": np.array([7.0], np.float32), "optimizer.empty.1": values[:0]}


def write(path: Path, position: TrainingState = POSITION, seed: int = 0) -> None:
    writer = CheckpointWriter(path, JOB, {"python_objects": ""})
    writer.save(position, tensors(seed))
    writer.commit()


def test_a_checkpoint_that_does_not_fit_leaves_no_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither where it is known before, nor where the disk is full in the middle; and the one before stays."""
    write(tmp_path / "run.ckpt")
    writer = CheckpointWriter(tmp_path / "run.ckpt", JOB, {"python_objects": ""})
    with monkeypatch.context() as context:
        context.setattr(checkpoint.shutil, "disk_usage", lambda _: SimpleNamespace(free=checkpoint.SPARE))
        with pytest.raises(OSError, match=r"it needs 0\.0 MiB, the results may need 4\.0, and the disk has 4\.0 left"):
            writer.save(POSITION, tensors(1))

    def fills(file: Any, *_: Any) -> None:
        file.write(b"a piece")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as context:
        context.setattr(checkpoint, "write", fills)
        with pytest.raises(OSError, match="No space left"):
            writer.save(POSITION, tensors(1))
    assert os.listdir(tmp_path) == ["run.ckpt"]
    assert np.array_equal(read(tmp_path / "run.ckpt")[1]["weights"], tensors()["weights"])


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write(tmp_path / "run.ckpt")
    state, found = read(tmp_path / "run.ckpt")
    assert (state.position, state.job) == (POSITION, JOB)
    assert list(found) == list(tensors())
    assert all(np.array_equal(found[name], tensor) for name, tensor in tensors().items())
    assert os.listdir(tmp_path) == ["run.ckpt"]


def test_other_programs_read_the_tensors(tmp_path: Path) -> None:
    """The layout of safetensors, by hand: length, JSON, tensors at offsets after it."""
    write(tmp_path / "run.ckpt")
    data = (tmp_path / "run.ckpt").read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    assert header.pop("__metadata__")["format"] == "rudra 1"
    first, last = header["weights"]["data_offsets"]
    assert header["weights"]["dtype"] == "F32"
    assert header["weights"]["shape"] == [23]
    assert np.array_equal(np.frombuffer(data[8 + length + first : 8 + length + last], "<f4"), tensors()["weights"])


@pytest.mark.slow
def test_every_truncation_and_a_flipped_bit_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.ckpt"
    write(path)
    whole = path.read_bytes()
    end = 8 + struct.unpack_from("<Q", whole)[0]
    padding = range(len(whole[:end].rstrip()), end)
    with path.open("r+b", buffering=0) as file:  # a file system may flush one that is emptied and written again
        file.seek(0, os.SEEK_END)
        file.write(b"\0")
        refused(path)
        file.truncate(len(whole))
        for place, byte in enumerate(whole):
            if place in padding:  # spaces that say nothing; another space is no damage
                continue
            os.pwrite(file.fileno(), bytes([byte ^ 1 << place % 8]), place)
            refused(path)
            os.pwrite(file.fileno(), bytes([byte]), place)
        assert path.read_bytes() == whole
        for length in reversed(range(len(whole))):
            file.truncate(length)
            refused(path)


def refused(path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: ")
    assert "\n" not in text


@pytest.mark.parametrize("length", [0, 3, 8, 200, -1])
def test_the_checkpoint_before_is_offered_if_it_is_whole(tmp_path: Path, length: int) -> None:
    path = tmp_path / "run.ckpt"
    write(path)
    write(path, TrainingState(timestamp=9, steps=(9, 9)), 1)
    previous = previous_of(path)
    assert read(previous)[0].position == POSITION
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(
        CheckpointError, match=r"the one before it, of update 7, is intact: rudra resume .*previous\.ckpt"
    ):
        read(path)
    previous.write_bytes(b"")
    with pytest.raises(CheckpointError) as caught:
        read(path)
    assert "the one before" not in str(caught.value)


def test_another_format_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.ckpt"
    write(path)
    path.write_bytes(path.read_bytes().replace(b'"rudra 1"', b'"rudra 2"'))
    with pytest.raises(CheckpointError, match="has format 'rudra 2'; this Rudra reads 'rudra 1'"):
        read(path)


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("dies_in", ["link", "replace", "fsync", None])
def test_whenever_the_writer_dies_a_whole_checkpoint_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_in: str | None, links: bool
) -> None:
    path = tmp_path / "run.ckpt"
    write(path)

    class Death(BaseException):
        pass

    def die(*_: Any, **__: Any) -> None:
        raise Death

    def no_links(*_: Any, **__: Any) -> None:
        raise OSError("no links here")

    if not links:
        monkeypatch.setattr(os, "link", no_links)
    if dies_in and (links or dies_in != "link"):
        monkeypatch.setattr(os, dies_in, die)
    with pytest.raises(Death) if dies_in and (links or dies_in != "link") else _nothing():
        write(path, TrainingState(timestamp=9, steps=(9, 9)), 1)
    monkeypatch.undo()
    left = [p for p in (path, previous_of(path)) if p.exists()]
    assert left
    assert {read(p)[0].position.timestamp for p in left} <= {7, 9}
    write(path, TrainingState(timestamp=11, steps=(11, 11)), 2)  # the next run of it is not disturbed
    assert read(path)[0].position.timestamp == 11


class _nothing:
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"training": {"minibatch_size": 3}}, "training.minibatch_size was 16, but is 3 now"),
        ({"optimizer": {"name": "adam"}}, "optimizer.name was sgd, but is adam now"),
        ({"cluster": {"learners": 3}}, "cluster.learners was 2, but is 3 now"),
        ({"model": {"options": {"a": 1}}}, "model.options was {}, but is {'a': 1} now"),
        ({"results": {"flush_s": 9.0}}, None),
        ({"fault_tolerance": {"stall_warning_s": 9.0}}, None),
        ({"data": {"path": "elsewhere"}}, None),
        ({"training": {"evaluate": False}}, None),
        ({"cluster": {"threads_per_rank": 2}}, "cluster.threads_per_rank was 1, but is 2 now"),
        ({"cluster": {"threads_per_rank": None}}, None),
        ({"training": {"epochs": 99}}, None),
        ({"cluster": {"learners": None}}, None),
        ({"training": {"precision": "bfloat16"}}, "training.precision was float32, but is bfloat16 now"),
    ],
)
def test_a_checkpoint_is_of_one_job(tmp_path: Path, tables: dict[str, Any], said: str | None) -> None:
    write(tmp_path / "run.ckpt")
    state, _ = read(tmp_path / "run.ckpt")
    job = AUTO.with_(**tables)
    if said is None:
        found = compare(state.job, tables_of(job))
        check_same(state, found)
        assert found.decided["cluster"] == {"learners": 2, "threads_per_rank": 1, "device": "cuda"}
        named = compare(state.job, tables_of(job.with_(cluster={"device": "cpu"})))
        assert "device" not in named.decided["cluster"], "a job that names one has it"
    else:
        with pytest.raises(CheckpointError) as caught:
            check_same(state, compare(state.job, tables_of(job)))
        assert f"run.ckpt: belongs to another job: {said}; " in str(caught.value)


def test_a_checkpoint_from_before_a_key_is_of_the_job_that_leaves_it_out(tmp_path: Path) -> None:
    write(tmp_path / "run.ckpt")
    state, _ = read(tmp_path / "run.ckpt")
    del state.job["optimizer"]["clip_norm"], state.job["optimizer"]["schedule"]
    found = compare(state.job, tables_of(AUTO))
    check_same(state, found)
    assert found.decided["cluster"] == {"learners": 2, "threads_per_rank": 1, "device": "cuda"}
    with pytest.raises(CheckpointError, match=r"optimizer\.schedule was step, but is cosine now"):
        check_same(state, compare(state.job, tables_of(AUTO.with_(optimizer={"schedule": "cosine"}))))


@pytest.mark.parametrize("why", ["", "device cuda, whose kernels may add in another order each time"])
def test_what_could_not_be_replayed_before_a_restart_cannot_after_it(tmp_path: Path, why: str) -> None:
    path = tmp_path / "run.h5"
    about = {"replayable": not why, "not_replayable": why, "started": "then", "initial_weights_sha256": "a"}
    write_run(path, updates=4, epochs=1, staleness=0, finish=False, **about)
    with open_results(path) as results:
        kept = carried(results, TrainingState(timestamp=2, steps=(1, 1, 1, 1))).attributes
    assert kept == {key: about[key] for key in about if why or "replayable" not in key}


def test_names(tmp_path: Path) -> None:
    results = tmp_path / "a.b.h5"
    path = checkpoint.path_of(results)
    assert path.name == "a.b.ckpt"
    assert previous_of(path).name == "a.b.previous.ckpt"
    assert checkpoint.results_of(path) == checkpoint.results_of(previous_of(path)) == results
