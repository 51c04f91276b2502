"""Simulations that write checkpoints, and begin with those of any family of roles."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from families import AT, FAMILIES, MOVING, SYNCHRONOUS, small

import rudra
from rudra.core.buffer_names import AVERAGE
from rudra.errors import RudraError
from rudra.job.job import Job
from rudra.results import checkpoint
from rudra.results.checkpoint import CheckpointWriter
from rudra.results.progress import summary_table
from rudra.simulation.replay import replay
from tests.selection import covering


def simulated(job: Job, path: Path, *, origin: Path | None = None, carry: Any = "all") -> rudra.Results:
    return rudra.simulate(job, output=path, progress="quiet", from_=origin, carry=carry if origin else "weights")


def branch_text(results: rudra.Results) -> str:
    (row,) = results.events[results.events["kind"] == b"branch"]
    return str(row["text"].decode())


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, float]]:
    """A directory with a run of each family, and its training loss of the epoch after the branch."""
    place, losses = tmp_path_factory.mktemp("families"), {}
    for name, tables in FAMILIES.items():
        with simulated(small(tables), place / f"{name}.h5") as results:
            losses[name] = float(results.epochs["train_loss"][AT])
    return place, losses


@pytest.mark.each_value
@pytest.mark.parametrize("after", FAMILIES)
@pytest.mark.parametrize("before", FAMILIES)
def test_each_family_trains_on_from_the_checkpoint_of_each(
    families: tuple[Path, dict[str, float]], tmp_path: Path, before: str, after: str
) -> None:
    place, losses = families
    origin = place / f"{before}-{AT}.ckpt"
    job = small(FAMILIES[after], results={"keep_checkpoints": "never"})
    with simulated(job, tmp_path / "branch.h5", origin=origin, carry="state") as results:
        (epoch,) = results.epochs
        assert epoch["epoch"] == AT + 1
        assert epoch["train_loss"] <= 1.05 * losses[before]
        text = branch_text(results)
    for had, has, what in (
        (before == "hogbatch", after == "hogbatch", "the momentum starts at zero"),
        (after == "hogbatch", before == "hogbatch", "the momentum is left out"),
        (after == "replicas", before == "replicas", "the outer momentum starts at zero"),
        (before == "replicas", after == "replicas", "the outer momentum is left out"),
    ):
        assert (what in text) == (had and not has)


def test_an_average_over_time_goes_on_in_another_family(tmp_path: Path) -> None:
    averaged = {"optimizer": MOVING | {"average": {"rate": 0.01}}}
    with simulated(small(FAMILIES["server"] | averaged), tmp_path / "run.h5"):
        pass
    origin = tmp_path / f"run-{AT}.ckpt"
    then = checkpoint.read(origin)[1][AVERAGE]
    job = small(SYNCHRONOUS["allreduce"] | averaged, results={"keep_checkpoints": f"{AT + 1} epochs"})
    with simulated(job, tmp_path / "branch.h5", origin=origin, carry="state") as results:
        assert "the average" not in branch_text(results)
    now = checkpoint.read(tmp_path / f"branch-{AT + 1}.ckpt")[1]
    assert np.linalg.norm(now[AVERAGE] - then) < 0.9 * np.linalg.norm(now["weights"] - then)


@pytest.mark.parametrize(
    ("before", "after", "more"),
    [
        ("softsync", SYNCHRONOUS["server"], {}),  # whose learners have made different numbers of gradients
        ("hardsync", FAMILIES["groups"], {"training": {"minibatch_size": 6}}),
        ("hardsync", SYNCHRONOUS["allreduce"], {"cluster": {"learners": 6}}),
    ],
    ids=str,
)
def test_a_big_batch_takes_the_samples_that_each_learner_is_to_take(
    tmp_path: Path, before: str, after: dict[str, Any], more: dict[str, Any]
) -> None:
    origin = tmp_path / f"run-{AT}.ckpt"
    job = small({"protocol": {"name": before}, "optimizer": MOVING}, simulation={"slowdown": {1: 2.0}})
    simulated(job, tmp_path / "run.h5").close()
    weights = []
    for batching in ("none", "big-batch"):
        job = small(after, simulation={"batching": batching}).with_(**more)
        with simulated(job, tmp_path / f"{batching}.h5", origin=origin, carry="state") as results:
            weights.append(results.weights_of(AT + 1))
    np.testing.assert_allclose(*weights, atol=1e-6)


@pytest.mark.parametrize("name", covering(["server", "allreduce", "hierarchical", "placed"], SYNCHRONOUS))
def test_a_synchronous_run_that_is_frozen_ends_with_the_same_bits(tmp_path: Path, name: str) -> None:
    """With all rows it can also be replayed; the state alone makes a file of the rows after it."""
    job = small(SYNCHRONOUS[name])
    with simulated(job, tmp_path / "whole.h5") as whole:
        expected = whole.summary()
    with simulated(job, tmp_path / "all.h5", origin=tmp_path / f"whole-{AT}.ckpt") as results:
        found = results.summary()
        assert len(results.updates) == found["updates"] == expected["updates"]
        assert list(results.epochs["epoch"]) == [1, 2, 3]
        assert branch_text(results) == f"starts with update {expected['updates'] * AT // (AT + 1)} of whole.h5"
    assert replay(tmp_path / "all.h5", quiet=True).identical
    origin = tmp_path / f"whole-{AT}.ckpt"
    with simulated(job, tmp_path / "state.h5", origin=origin, carry="state") as results:
        alone = results.summary()
        assert f"{AT + 1}, {AT} before the first row" in summary_table(alone)
        assert list(results.epochs["epoch"]) == [AT + 1]
        assert results.updates["timestamp"][0] == results.attributes["begins_at"] + 1
        assert "its earlier updates are not in this file" in results.attributes["not_replayable"]
    same = ("weights_sha256", "updates", "applied", "pushed", "samples")
    assert [found[key] for key in same] == [alone[key] for key in same] == [expected[key] for key in same]


def test_momentum_goes_to_both_sides_of_a_cut_and_back(tmp_path: Path) -> None:
    """Layers that are placed and synchronous train as one server does, bit for bit, also from its checkpoint."""
    whole = {}
    for name in ("server", "placed"):
        with simulated(small(SYNCHRONOUS[name]), tmp_path / f"{name}.h5") as results:
            whole[name] = results.summary()["weights_sha256"]
    for before, after in (("server", "placed"), ("placed", "server")):
        origin = tmp_path / f"{before}-{AT}.ckpt"
        with simulated(small(SYNCHRONOUS[after]), tmp_path / "branch.h5", origin=origin, carry="state") as found:
            assert found.summary()["weights_sha256"] == whole["server"] == whole["placed"]
        (tmp_path / "branch.h5").unlink()


@pytest.mark.parametrize(
    ("more", "lost"),
    [
        ({"cluster": {"learners": 2}}, ""),
        ({"cluster": {"learners": 6}}, ""),
        ({"topology": {"name": "sharded"}}, ""),
        ({"topology": {"name": "adv"}, "protocol": {"name": "async"}}, ""),
        ({"protocol": {"name": "sma"}, "cluster": {"learners": 6}}, "the outer momentum starts at zero"),
        (
            {"protocol": {"name": "easgd"}, "topology": {"name": "replicas", "options": {"parameter_server": True}}},
            "the optimiser state of the learners starts at zero",
        ),
    ],
    ids=str,
)
def test_learners_momentum_and_topology_may_differ(tmp_path: Path, more: dict[str, Any], lost: str) -> None:
    job = small(SYNCHRONOUS["server"])
    with simulated(job, tmp_path / "run.h5") as before:
        updates = int(before.epochs["timestamp"][AT - 1])
    with simulated(job.with_(**more), tmp_path / "branch.h5", origin=tmp_path / f"run-{AT}.ckpt") as results:
        assert branch_text(results).partition("; ")[2] == lost
        assert len(results.updates) == results.summary()["updates"] > updates
        assert len(results.learners) == results.attributes["learners"]
        assert "of another job" in results.attributes["not_replayable"]
        totals = results.totals[0]
        assert totals["pushed"] == sum(totals[key] for key in ("applied", "pending", "discarded", "lost"))


def test_what_a_simulation_cannot_begin_with_is_one_line(tmp_path: Path) -> None:
    job = small(SYNCHRONOUS["server"])
    simulated(job, tmp_path / "run.h5").close()
    origin = tmp_path / f"run-{AT}.ckpt"
    for more, said in (
        ({"model": {"name": "lenet"}}, "does not fit: model.name was mlp, but is lenet in this job"),
        ({"optimizer": {"name": "adam", "momentum": 0.0}}, "does not fit: optimizer.name was sgd, but is adam"),
        ({"simulation": {"tensors": False}}, r"\[simulation\] tensors = false has no weights"),
        ({"training": {"epochs": AT}}, "which is at epoch 2; use more epochs"),
    ):
        with pytest.raises(RudraError, match=said) as caught:
            simulated(job.with_(**more), tmp_path / "branch.h5", origin=origin, carry="state")
        assert caught.value.exit_code == 2
        assert "\n" not in str(caught.value)
    still = job.with_(optimizer={"momentum": 0.0})
    said = "--carry all is not possible: the momentum is left out, because this run has none; use --carry state"
    with pytest.raises(RudraError, match=said) as caught:
        simulated(still, tmp_path / "branch.h5", origin=origin)
    assert caught.value.exit_code == 2
    with simulated(still, tmp_path / "still.h5", origin=origin, carry="state") as results:
        assert branch_text(results).endswith("the momentum is left out, because this run has none")
    state, tensors = checkpoint.read(origin)
    other = CheckpointWriter(origin, state.job, {**state.attributes, "layout": [["w", [3]]]})
    other.save(state.position, tensors)
    other.commit()
    with pytest.raises(RudraError, match=r"model: it has w of shape \(3,\), and the job's .* of shape") as caught:
        simulated(job, tmp_path / "branch.h5", origin=origin, carry="state")
    assert caught.value.exit_code == 2
    assert not (tmp_path / "branch.h5").exists()


def test_a_simulation_writes_the_checkpoints_that_its_job_wants(tmp_path: Path) -> None:
    job = small(SYNCHRONOUS["server"], results={"keep_checkpoints": "never"})
    for every, left in (("auto", []), ("1 epochs", ["1.ckpt"])):
        with simulated(job.with_(results={"checkpoint_every": every}), tmp_path / f"{every[0]}.h5") as results:
            assert len(results.events) == (0 if every == "auto" else AT)
        assert [path.name for path in tmp_path.glob(f"{every[0]}*.ckpt")] == left
