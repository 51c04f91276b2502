"""What going on with a run may change, and what it comes to."""

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from results_files import write_run

from rudra.core.training_state import TrainingState
from rudra.errors import ConfigError, RudraError
from rudra.job.job import Job
from rudra.prepare.resume import resumable
from rudra.prepare.start import StartDecision, StartRequest, decide
from rudra.results.carry import carried, moved
from rudra.results.checkpoint import CheckpointWriter
from rudra.results.reader import open_results

REPLAYABLE = {"replayable": True, "not_replayable": "", "started": "then", "initial_weights_sha256": "a"}
COSINE = {"optimizer": {"schedule": "cosine", "learning_rate": 0.1}}


def run(directory: Path, *, finished: bool = True, epochs: int = 2, **tables: Any) -> tuple[Job, Path]:
    """Result file and checkpoint of two epochs, of eight updates with 32 samples each; and the job of both."""
    job = Job(cluster={"learners": 4, "threads_per_rank": 1}, training={"epochs": epochs}, **tables)
    path, said = directory / "run.h5", json.loads(job.to_json())
    write_run(
        path, updates=16, epochs=2, staleness=0, finish=finished, job=job.to_json(), training_samples=256, **REPLAYABLE
    )
    writer = CheckpointWriter(path.with_suffix(".ckpt"), said, {"python_objects": ""})
    position = TrainingState(timestamp=16, epoch=2, samples=512, applied=32, time_s=0.16, steps=(8, 8, 8, 8))
    writer.save(position, {"weights": np.zeros(3, np.float32)})
    writer.commit()
    return job, path


def decided(job: Job, path: Path, **tables: Any) -> StartDecision:
    return decide(job.with_(**tables), StartRequest(path, True))


@pytest.mark.parametrize(
    ("change", "goes_on"), [({}, False), ({"epochs": 3}, True), ({"epochs": 200, "patience": 7}, True)]
)
def test_a_finished_run_goes_on_where_it_is_to_be_longer(tmp_path: Path, change: dict[str, Any], goes_on: bool) -> None:
    found = decided(*run(tmp_path), training=change)
    assert found.finished is not goes_on
    assert found.text.startswith("job: continues from" if goes_on else f"{tmp_path / 'run.h5'}: is finished; nothing")
    assert found.position.timestamp == (16 if goes_on else 0)
    assert not found.replanned


def test_a_run_that_ended_before_its_time_goes_on_without_what_ended_it(tmp_path: Path) -> None:
    job, path = run(tmp_path, epochs=9)
    patient = job.with_(training={"patience": 4})
    assert decided(job, path).finished
    assert not decided(patient, path).finished


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("epochs", [1, 2])
def test_no_run_becomes_shorter_than_it_is(tmp_path: Path, epochs: int, finished: bool) -> None:
    job, path = run(tmp_path, finished=finished, epochs=3)
    with pytest.raises(
        ConfigError,
        match=rf"^\[training\] epochs = {epochs} is not supported with .*run\.ckpt, which is at epoch 2; use more",
    ):
        decided(job, path, training={"epochs": epochs})


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "optimizer.learning_rate=1",
            "--set optimizer.learning_rate=1: a resumed run cannot change this key, which was 0.01; use",
        ),
        (
            "model.options.width=3",
            "--set model.options.width=3: a resumed run cannot change this key, which was {}; use",
        ),
        (
            "cluster.threads_per_rank=2",
            "--set cluster.threads_per_rank=2: a resumed run cannot change this key, which was 1; use",
        ),
        ("cluster.learners=2", "--set cluster.learners=2: a resumed run cannot change this key, which was 4; use"),
        ("simulation.jitter=0.3", "--set simulation.jitter=0.3: a resumed run cannot change simulation; use "),
        ("name=other", "--set name=other: "),
        ("study.x=1", "--set study.x=1: "),
        ("results.flush_s=0.5", "{run}: is finished; to train further, set training.epochs above 2"),
        ("training.epochs=x", "--set training.epochs=x: [training] epochs must be a whole number"),
    ],
)
def test_what_would_change_nothing_or_too_much_is_refused(tmp_path: Path, override: str, said: str) -> None:
    _, path = run(tmp_path)
    with pytest.raises(RudraError, match=re.escape(said.replace("{run}", str(path)))):
        resumable(path, [override])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("run.toml", "run.toml: is no run; valid: a result file, FILE.h5, or a checkpoint, FILE.ckpt"),
        ("nope.h5", "nope.h5: no such result file"),
        ("nope.ckpt", "nope.ckpt: no such checkpoint"),
        ("run.h5", "run.h5: has no checkpoint; if its run is not running any more, start it again"),
        ("reserved.h5", "reserved.h5: is empty: its run has not created it yet"),
    ],
)
def test_resumable_without_checkpoint_says_which_file_is_missing(tmp_path: Path, given: str, said: str) -> None:
    _, path = run(tmp_path, finished=False)
    path.with_suffix(".ckpt").unlink()
    (tmp_path / "reserved.h5").touch()
    with pytest.raises(RudraError, match=f"^{re.escape(str(tmp_path / said))}"):
        resumable(tmp_path / given)


def test_resumable_with_other_learners_says_how_another_run_begins_there(tmp_path: Path) -> None:
    _, path = run(tmp_path)
    said = f"; or begin another run: rudra run JOB --from {path.with_suffix('.ckpt')} --carry state"
    with pytest.raises(ConfigError, match=f"{re.escape(said)}$"):
        resumable(path, ["cluster.learners=2"])


def test_what_may_change_does(tmp_path: Path) -> None:
    _, path = run(tmp_path)
    job, _, output = resumable(
        path, ["training.epochs=5", "results.flush_s=0.5", "fault_tolerance.restarts=2", "cluster.node_memory=false"]
    )
    assert not job.cluster.node_memory
    assert (job.training.epochs, job.results.flush_s, job.fault_tolerance.restarts, output) == (5, 0.5, 2, path)


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"optimizer": {"milestones": [1]}}, ""),
        # Half of the way behind it is a rate of a tenth times (1 + cos(π/2)) / 2; a quarter, (1 + cos(π/4)) / 2.
        (
            COSINE,
            "differs between 2 and 4 epochs: the rate is 0.05 here, and would be 0.08536 if all had been planned at "
            "first",
        ),
        ({"optimizer": {**COSINE["optimizer"], "schedule_options": {"T_max": 9}}}, ""),
    ],
)
def test_a_schedule_that_would_have_been_another_is_told_and_not_replayed(
    tmp_path: Path, tables: dict[str, Any], said: str
) -> None:
    job, path = run(tmp_path, **tables)
    found = decided(job, path, training={"epochs": 4})
    assert found.replanned.endswith(said)
    assert bool(found.replanned) == bool(said)
    assert found.text.endswith(said)
    with open_results(path) as results:
        kept = carried(results, found.position, found.replanned).attributes
    assert kept.get("not_replayable", "") == found.replanned


@pytest.mark.parametrize(
    ("reduction", "nodes", "said"),
    [("nodes", [3, 3, 5], ""), ("nodes", [0, 1, 1], "placed learners on other nodes"), ("ordered", [0, 1, 1], "")],
)
def test_sums_of_other_nodes_than_before_the_restart_are_not_replayed(
    reduction: str, nodes: list[int], said: str
) -> None:
    topology = {"name": "groups", "options": {"reduction": reduction}}
    job = Job(protocol={"name": "hardsync"}, topology=topology, cluster={"learners": 3})
    why = moved(job.plan([0, 0, 1]), job, job.plan(nodes))
    assert (said in why) if said else not why


@pytest.mark.parametrize("name", [None, "named.h5"])
def test_only_a_run_without_output_has_a_temporary_checkpoint(
    name: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = None if name is None else tmp_path / name
    monkeypatch.chdir(tmp_path)
    found = decide(Job(), StartRequest(output))
    assert found.temporary == (name is None)
    assert found.overwrite == found.temporary  # the name is reserved with an empty file
    assert os.listdir() == ([] if name else [found.output.name])


@pytest.mark.parametrize("temporary", [True, False])
def test_a_resumed_run_still_knows_whether_its_checkpoint_is_temporary(temporary: bool, tmp_path: Path) -> None:
    job, path = run(tmp_path, finished=False, epochs=4)
    writer = CheckpointWriter(path.with_suffix(".ckpt"), json.loads(job.to_json()), {"temporary": temporary})
    position = TrainingState(timestamp=16, epoch=2, samples=512, applied=32, time_s=0.16, steps=(8, 8, 8, 8))
    writer.save(position, {"weights": np.zeros(3, np.float32)})
    writer.commit()
    assert decided(job, path).temporary == temporary


def test_a_finished_run_without_a_checkpoint_says_why(tmp_path: Path) -> None:
    _, path = run(tmp_path)
    path.with_suffix(".ckpt").unlink()
    with pytest.raises(ConfigError, match=r"run\.h5: is finished and has no checkpoint \(it was removed, or "):
        resumable(path, ["training.epochs=5"])
