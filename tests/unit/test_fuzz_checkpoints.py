"""Checkpoints with anything in them."""

import json
import struct
import zlib
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from rudra.core.training_state import TrainingState
from rudra.job.job import Job
from rudra.prepare.resume import resumable
from rudra.prepare.start import StartRequest, decide
from rudra.results.checkpoint import CheckpointWriter, read
from tests.unit.fuzzing import TEXTS, VALUES, cases, damaged, refused

pytestmark = pytest.mark.slow

JOB = Job(cluster={"learners": 2, "threads_per_rank": 1})
POSITION = TrainingState(timestamp=7, epoch=1, samples=56, applied=14, time_s=1.5, steps=(7, 7))
TENSORS = {"weights": np.arange(9, dtype=np.float32), "optimizer.step.0": np.ones(1, np.float32)}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints") / "run.ckpt"


def _whole() -> bytes:
    with TemporaryDirectory(prefix="rudra-test-") as directory:
        writer = CheckpointWriter(Path(directory) / "run.ckpt", json.loads(JOB.to_json()), {"python_objects": ""})
        writer.save(POSITION, TENSORS)
        writer.commit()
        return writer.path.read_bytes()


WHOLE = _whole()


def use(path: Path) -> None:
    """All that a checkpoint is given to before ranks are started."""
    read(path)
    resumable(path)
    decide(JOB, StartRequest(None, path, force=True))


@cases(900)
@given(content=damaged(WHOLE))
def test_damaged_bytes(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    if refused(lambda: use(path), str(path)) is None:  # what was hit has no meaning, such as a blank
        (state, tensors), _ = read(path), path.write_bytes(WHOLE)
        whole, others = read(path)
        assert state == whole
        assert {name: tensor.tobytes() for name, tensor in tensors.items()} == {
            name: tensor.tobytes() for name, tensor in others.items()
        }


def forged(state: Any, entries: dict[str, Any], tensors: bytes) -> bytes:
    """A file whose checksums are right, whatever it says."""
    text = json.dumps(state, default=str)
    about = {"format": "rudra 1", "state": text, "crc32": f"{zlib.crc32(text.encode()):08x}"}
    header = json.dumps({"__metadata__": about, **entries}, default=str).encode()
    return struct.pack("<Q", len(header)) + header + tensors


@cases(900)
@given(data=st.data())
def test_contents_that_contradict_themselves(path: Path, data: st.DataObject) -> None:
    (length,) = struct.unpack_from("<Q", WHOLE)
    entries = json.loads(WHOLE[8 : 8 + length])
    state = json.loads(entries.pop("__metadata__")["state"])
    place: Any = {"state": state, "entries": entries}
    for _ in range(data.draw(st.integers(1, 4))):  # down to something, which is replaced
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        if isinstance(place[key], dict | list) and place[key] and data.draw(st.booleans()):
            place = place[key]
        elif isinstance(place, dict) and place.keys() != {"state", "entries"} and data.draw(st.booleans()):
            del place[key]
            break
        else:
            place[key] = data.draw(VALUES | TEXTS)
            break
    if isinstance(entries, dict):
        try:
            content = forged(state, entries, WHOLE[8 + length :])
        except ValueError:  # a number with more digits than Python writes
            reject()
        path.write_bytes(content)
        refused(lambda: use(path), str(path), "run.h5")
