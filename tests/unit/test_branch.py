"""Runs that begin with another one's checkpoint: what fits, what is carried, and which files belong to which run."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from results_files import write_run

import rudra
from rudra.cli.main import main
from rudra.core.layout import Entry
from rudra.core.training_state import TrainingState
from rudra.errors import CheckpointError, ConfigError, ResultsError, RudraError
from rudra.job.job import Job
from rudra.prepare.branch import position_for, takeover_of
from rudra.prepare.resume import resumable
from rudra.prepare.start import StartDecision, StartRequest, decide
from rudra.results import checkpoint
from rudra.results.carry import carried
from rudra.results.checkpoint import CheckpointWriter
from rudra.results.reader import open_results
from rudra.results.warm_start import final_weights, shapes
from rudra.roles.checkpoint_cycle import name_of

REPLAYABLE = {"replayable": True, "not_replayable": "", "started": "then", "initial_weights_sha256": "a"}
LAYOUT = (Entry("w", (3,), 0, 3, "parameter"),)
DATA = {"training": {"sizes": [256]}}


def run(directory: Path, *, finish: bool = True) -> tuple[Job, Path]:
    """A run of four epochs, and its checkpoint of the end of epoch 2 that is kept."""
    job = Job(cluster={"learners": 4, "threads_per_rank": 1}, training={"epochs": 4}, optimizer={"momentum": 0.9})
    path, said = directory / "run.h5", json.loads(job.to_json())
    write_run(
        path, updates=32, epochs=4, staleness=0, finish=finish, job=job.to_json(), training_samples=256, **REPLAYABLE
    )
    about = {"python_objects": "", "layout": shapes(LAYOUT), "data_fingerprints": DATA}
    writer = CheckpointWriter(path.with_suffix(".ckpt"), said, about)
    for epoch, keep in ((2, "2"), (4, "")):
        counts = {"timestamp": 8 * epoch, "epoch": epoch, "samples": 256 * epoch, "applied": 16 * epoch}
        position = TrainingState(**counts, time_s=0.08 * epoch, steps=(4 * epoch,) * 4)  # type: ignore[arg-type]
        writer.save(position, {"weights": np.full(3, epoch, np.float32)})
        writer.commit(keep)
    return job, directory / "run-2.ckpt"


def branched(job: Job, origin: Path, output: Path | None = None, **tables: Any) -> StartDecision:
    output = origin.with_name("branch.h5") if output is None else output
    return decide(job.with_(**tables), StartRequest(output, origin=origin))


def test_a_branch_of_the_same_job_has_its_rows_and_can_be_replayed(tmp_path: Path) -> None:
    job, origin = run(tmp_path)
    found = branched(job, origin)
    assert (found.checkpoint, found.position.epoch, found.branched, found.replanned) == (origin, 2, True, "")
    assert found.fingerprints == DATA, "ranks compare their data with those"
    with open_results(tmp_path / "run.h5") as results:
        rows = carried(results, found.position, found.replanned, found.branched)
        assert sum(len(piece) for piece in rows.rows["updates"]) == 16
        *_, last = rows.rows["events"]
        assert [(row["kind"], row["text"]) for row in last] == [(b"branch", b"starts with update 16 of run.h5")]
    assert "not_replayable" not in rows.attributes


def test_a_branch_of_another_job_says_why_it_cannot_be_replayed(tmp_path: Path) -> None:
    job, origin = run(tmp_path)
    found = branched(job, origin, protocol={"name": "async"}, training={"epochs": 9})
    assert found.replanned == "up to update 16 it is run-2.ckpt of another job, of which protocol.name was softsync"
    assert not branched(job, origin, training={"epochs": 9}).replanned, "longer alone is the same job"


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"model": {"name": "mlp"}}, "does not fit: model.name was lenet, but is mlp in this job; use lenet"),
        ({"data": {"train_limit": 7}}, "does not fit: data.train_limit was None, but is 7 in this job"),
        ({"optimizer": {"name": "adam", "momentum": 0.0}}, "does not fit: optimizer.name was sgd, but is adam in this"),
        ({"training": {"epochs": 2}}, "[training] epochs = 2 is not supported with"),
    ],
)
def test_a_job_that_does_not_fit_is_refused_by_its_key(tmp_path: Path, tables: dict[str, Any], said: str) -> None:
    job, origin = run(tmp_path)
    with pytest.raises(RudraError, match=re.escape(said)):
        branched(job, origin, **tables)


def test_what_may_differ_does(tmp_path: Path) -> None:
    job, origin = run(tmp_path)
    more = {"optimizer": {"momentum": 0.5, "learning_rate": 1.0}, "data": {"path": "elsewhere"}}
    assert branched(job, origin, **more, topology={"name": "groups"}, training={"minibatch_size": 3}).branched
    found = branched(job, origin, cluster={"learners": 3}, optimizer={"momentum": 0.0})
    assert "learners" not in found.decided["cluster"]
    assert found.replanned.endswith("of another job, of which optimizer.momentum was 0.9")


def test_what_a_run_cannot_begin_with_is_one_line(tmp_path: Path) -> None:
    job, origin = run(tmp_path)
    with pytest.raises(ConfigError, match=r"--from .*run\.h5: a result file has no optimiser state; use a checkpoint"):
        branched(job, tmp_path / "run.h5")
    with pytest.raises(ConfigError, match=r"--from .*run-2\.ckpt: belongs to .*run\.h5 itself; use another --output"):
        branched(job, origin, tmp_path / "run.h5")
    (tmp_path / "there.h5").touch()
    with pytest.raises(ResultsError, match=r"there\.h5: exists; give another name or --force"):
        branched(job, origin, tmp_path / "there.h5")
    (tmp_path / "run.h5").rename(tmp_path / "gone.h5")
    with pytest.raises(
        CheckpointError, match=r"run-2\.ckpt: its result file .*\.h5 is missing; restore it, or use --carry state"
    ):
        branched(job, origin)


def test_carry_without_from_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "digits", "--carry", "all"]) == 2
    assert capsys.readouterr().err == (
        "rudra: --carry is only for a start from another run; also give --from FILE.ckpt\n"
    )


def test_what_else_is_to_be_carried_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^carry = 'momentum'; valid: weights, state, all$"):
        rudra.run(Job(), from_="run-2.ckpt", carry="momentum")  # type: ignore[arg-type]


SERVER, SMA = ("weights", "optimizer.momentum_buffer.0"), ("weights", "optimizer.momentum_buffer.0")
SMA += tuple(f"replica{i}.{name}" for i in range(2) for name in ("weights", "momentum_buffer.0"))
ADAM = ("weights", "optimizer.exp_avg.0", "optimizer.step.0")


STARTED = "the average over time starts from the weights"
CORRECTED = {"protocol": {"name": "async", "correction": "dc_asgd"}}


@pytest.mark.parametrize(
    ("names", "averages", "tables", "adapted", "lost"),
    [
        (SERVER, False, {}, False, ""),
        (SERVER[:1], False, {}, True, "the momentum starts at zero, because the checkpoint has none"),
        (SERVER, False, {"optimizer": {"momentum": 0.0}}, True, "the momentum is left out, because this run has none"),
        (SMA, True, {"protocol": {"name": "sma"}}, False, ""),
        (SMA[:-2], True, {"protocol": {"name": "sma"}}, True, "all replicas start from the weights"),
        (SMA, True, {}, True, "the outer momentum is left out; the replicas are left out"),
        (SERVER, False, {"protocol": {"name": "sma"}}, True, "the outer momentum starts at zero"),
        (ADAM, False, {"optimizer": {"name": "adam", "momentum": 0.0}}, False, ""),
        ((*SERVER, "average"), False, {"optimizer": {"average": {"rate": 0.1}}}, False, ""),
        ((*SERVER, "average"), False, {}, False, "the average over time is left out"),
        (
            SERVER,
            False,
            {"optimizer": {"average": {"rate": 0.1}}},
            False,
            "the average over time starts from the weights",
        ),
        ((*SERVER, "correction.0.squares"), False, CORRECTED, False, ""),
        ((*SERVER, "correction.0.squares"), False, {}, False, "the state of the correction is left out"),
        (
            ADAM[:1],
            True,
            {"optimizer": {"name": "adam", "momentum": 0.0}},
            True,
            "the state of the optimiser starts at zero, because the checkpoint has none",
        ),
        (
            SERVER,
            False,
            {"protocol": {"name": "easgd"}, "topology": {"name": "replicas", "options": {"parameter_server": True}}},
            True,
            "the optimiser state of the learners starts at zero",
        ),
    ],
)
def test_what_roles_take_over_from_a_checkpoint(
    names: tuple[str, ...], averages: bool, tables: dict[str, Any], adapted: bool, lost: str
) -> None:
    moving = {"optimizer": {"momentum": 0.9, **tables.get("optimizer", {})}}
    job = Job(cluster={"learners": 2}, **{**tables, **moving})
    found = takeover_of(names, job, job.plan(), averages=averages, same_cut=True)
    assert (found.adapted, found.lost) == (adapted, lost)
    assert "; ".join(found.left_out) == (lost if "left out" in lost else "")


ASYNC = TrainingState(timestamp=9, samples=72, applied=9, steps=(4, 5), learned=(32, 40), drawn=(32, 40))
DEALT = structs.replace(ASYNC, steps=(3, 6), drawn=(72, 0), sizes=(8, 8), counts=(3.0, 6.0), again=((80, 8),))


@pytest.mark.parametrize(
    ("position", "tables", "steps", "drawn", "sizes"),
    [
        (ASYNC, {}, (4, 5), (32, 40), ()),
        (ASYNC, {"topology": {"name": "groups", "options": {"groups": 1}}}, (9, 9), (36, 36), ()),
        (ASYNC, {"cluster": {"learners": 3}}, (5, 5, 5), (24, 24, 24), ()),
        (ASYNC, {"protocol": {"name": "hogbatch"}}, (5, 5), (72, 0), ()),
        (DEALT, {"protocol": {"name": "hogbatch"}}, (3, 6), (72, 0), (8, 8)),
        (DEALT, {}, (6, 6), (36, 36), ()),
    ],
)
def test_counters_of_learners_suit_the_roles(
    position: TrainingState, tables: dict[str, Any], steps: tuple[int, ...], drawn: tuple[int, ...], sizes: Any
) -> None:
    job = Job(**{"cluster": {"learners": 2}, "training": {"minibatch_size": 8}, **tables})
    found = position_for(position, job, job.plan())
    assert (found.steps, found.drawn, found.sizes, found.samples) == (steps, drawn, sizes, 72)
    assert len(found.learned) == len(steps)


def test_a_branch_that_has_a_checkpoint_goes_on_instead(tmp_path: Path) -> None:
    job, origin = run(tmp_path, finish=False)
    longer = job.with_(training={"epochs": 9})
    found = decide(longer, StartRequest(tmp_path / "run.h5", True, origin=origin))
    assert (found.branched, found.position.epoch) == (False, 4)


def test_first_weights_are_those_of_a_checkpoint(tmp_path: Path) -> None:
    _, origin = run(tmp_path)
    assert list(final_weights(origin, LAYOUT)) == [2.0, 2.0, 2.0]
    with pytest.raises(ConfigError, match=r"warm_start: .*run-2.ckpt holds .*: it has .*\(3,\), .* \(4,\)"):
        final_weights(origin, (Entry("w", (4,), 0, 4, "parameter"),))
    with pytest.raises(ConfigError, match=r"it has w .*\(3,\), and the job's w of shape \(1, 3\); use a"):
        final_weights(origin, (Entry("w", (1, 3), 0, 3, "parameter"),))


# Which files belong to which run.


@pytest.mark.parametrize(
    ("name", "of", "kept"),
    [
        ("run.ckpt", "run.h5", False),
        ("run.previous.ckpt", "run.h5", False),
        ("run-2.ckpt", "run.h5", True),
        ("run-update120.ckpt", "run.h5", True),
        ("other-2.ckpt", "other-2.h5", False),  # a run of that name
        ("other-2.previous.ckpt", "other-2.h5", False),
        ("lone-7.ckpt", "lone-7.h5", False),
    ],
)
def test_a_checkpoint_knows_its_result_file(tmp_path: Path, name: str, of: str, kept: bool) -> None:
    for there in ("run.h5", "other.h5", "other-2.h5"):
        (tmp_path / there).touch()
    path = tmp_path / name
    assert checkpoint.results_of(path) == tmp_path / of
    assert checkpoint.is_kept(path) is kept


def test_kept_checkpoints_outlast_the_run_and_go_with_the_one_that_replaces_it(tmp_path: Path) -> None:
    _, origin = run(tmp_path)
    (tmp_path / "run-9.h5").touch()
    (tmp_path / "run-9.ckpt").touch()
    checkpoint.discard(tmp_path / "run.ckpt")
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["run-2.ckpt", "run-9.ckpt"]
    checkpoint.discard(tmp_path / "run.ckpt", kept=True)
    assert not origin.exists()
    assert (tmp_path / "run-9.ckpt").exists(), "of a run of that name"


def test_no_run_takes_the_checkpoint_of_another(tmp_path: Path) -> None:
    (tmp_path / "run-2.h5").touch()
    with pytest.raises(FileExistsError, match=r"run-2\.ckpt would be the checkpoint of .*run-2\.h5, which is another"):
        run(tmp_path)


def test_a_kept_checkpoint_of_a_finished_run_says_how_to_branch(tmp_path: Path) -> None:
    _, origin = run(tmp_path)
    with pytest.raises(ConfigError, match=r"is finished; to begin another run there: rudra run JOB --from .*run-2"):
        resumable(origin)


def test_an_unfinished_run_goes_back_to_one_that_was_kept(tmp_path: Path) -> None:
    _, origin = run(tmp_path, finish=False)
    _, path, output = resumable(origin)
    assert (path, output) == (origin, tmp_path / "run.h5")
    checkpoint.step_back(origin)
    state, _ = checkpoint.read(tmp_path / "run.ckpt")
    assert state.position.epoch == 2
    assert origin.exists()


@pytest.mark.parametrize(
    ("keep", "before", "epoch", "timestamp", "name"),
    [
        ((1, "epoch"), 0, 1, 12, "1"),
        ((1, "epoch"), 1, 1, 13, ""),
        ((2, "epoch"), 0, 1, 12, ""),
        ((2, "epoch"), 1, 2, 24, "2"),
        ((2, "epoch"), 1, 3, 24, "3"),  # an update that ends several
        ((5, "update"), 0, 0, 10, "update10"),
        ((5, "update"), 0, 1, 12, ""),
    ],
)
def test_what_is_kept_and_how_it_is_called(
    keep: tuple[int, str], before: int, epoch: int, timestamp: int, name: str
) -> None:
    assert name_of(keep, before, epoch, timestamp) == name


@pytest.mark.parametrize("value", ["1 s", "0 epochs", "often"])
def test_what_is_no_interval_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=r"\[results\] keep_checkpoints = '.*' is not such an interval; use `N epoch"):
        Job(results={"keep_checkpoints": value})
