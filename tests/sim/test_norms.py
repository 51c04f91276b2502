"""Norms of gradients: compared with NumPy's in virtual time, carried by a checkpoint, and added by a replay."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from clusters import train

import rudra
from rudra.cli.main import main
from rudra.compute.executor import Executor
from rudra.core.actions import Compute, ExecutorAction, Update
from rudra.core.buffer_names import WEIGHTS
from rudra.core.events import Computed, Event
from rudra.errors import ConfigError
from rudra.simulation.batching import VmapTensors
from rudra.simulation.tensors import RealTensors
from tests.selection import covering

SHARDS = {"name": "sharded", "options": {"shards": 2}}
CENTRAL = {"name": "replicas", "options": {"parameter_server": True}}
PLACES: dict[str, dict[str, Any]] = {
    "base": {"protocol": {"name": "hardsync"}},
    "base, clipped": {"protocol": {"name": "hardsync"}, "optimizer": {"learning_rate": 0.05, "clip_norm": 0.4}},
    "softsync": {"protocol": {"name": "softsync", "n": 2}},
    "adv": {"protocol": {"name": "hardsync"}, "topology": {"name": "adv", "options": {"fan_out": 2}}},
    "adv*": {"protocol": {"name": "async"}, "topology": {"name": "adv*"}},
    "sharded": {"protocol": {"name": "async"}, "topology": SHARDS},
    "groups": {"protocol": {"name": "async"}, "topology": {"name": "groups", "options": {"groups": 2}}},
    "one group": {"protocol": {"name": "hardsync"}, "topology": {"name": "groups", "options": {"groups": 1}}},
    "replicas": {"protocol": {"name": "sma"}},
    "replicas, blocks": {"protocol": {"name": "sma"}, "topology": {"name": "replicas", "options": {"groups": 2}}},
    "central": {"protocol": {"name": "easgd"}, "topology": CENTRAL},
    "workers": {"protocol": {"name": "hogbatch"}, "hogbatch": {"weights": "server"}},
}


def job(place: str, every: int | None = 1, **more: Any) -> rudra.Job:
    tables: dict[str, Any] = {
        "name": "measured",
        "model": {"name": "mlp", "options": {"hidden": [8]}},
        "data": {"name": "digits", "train_limit": 160},
        "training": {"epochs": 2, "minibatch_size": 8, "evaluate": False},
        "optimizer": {"learning_rate": 0.05},
        "cluster": {"learners": 4, "threads_per_rank": 1},
        "simulation": {"slowdown": {0: 5.0}, "jitter": 0.3},
        "results": {} if every is None else {"gradient_norms": f"every {every}"},
    }
    return rudra.Job(**{**tables, **PLACES[place], **more})


class Witness:
    """Notes the norms of all gradients and updates, by NumPy in float64."""

    def __init__(self) -> None:
        self.gradients: dict[tuple[int, int], float] = {}
        self.updates: dict[tuple[int, int], float] = {}  # role and timestamp -> square of the norm of its part
        self.vectors: dict[int, Any] = {}  # timestamp -> gradient of the update

    def of(self, kind: type[RealTensors]) -> Callable[[dict[int, Executor]], RealTensors]:
        witness = self

        class Watched(kind):  # type: ignore[misc, valid-type]
            def compute(self, role: int, action: Compute) -> Computed:
                computed: Computed = super().compute(role, action)
                parameters = self._executors[role].parameters
                vector = self._executors[role].buffer(action.gradient).array[:parameters]
                witness.gradients[role, action.step] = float(np.linalg.norm(vector.astype(np.float64)))
                return computed

            def perform(self, role: int, action: ExecutorAction, seconds: float) -> Event | None:
                if isinstance(action, Update):
                    executor = self._executors[role]
                    vector = executor.buffer(action.gradient).array[: executor.parameters].astype(np.float64)
                    if type(executor).__name__ == "CentralExecutor":  # it gets a replica
                        vector = executor.buffer(WEIGHTS).array[: executor.parameters] - vector
                    witness.updates[role, action.timestamp] = float(vector @ vector)
                    witness.vectors[action.timestamp] = vector
                event: Event | None = super().perform(role, action, seconds)
                return event

        return Watched


@pytest.mark.each_value
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("every", [1, 3])
def test_recorded_norms_are_those_of_numpy(place: str, every: int) -> None:
    witness = Witness()
    trained = train(job(place, every), witness.of(RealTensors))
    plan, rows = trained.plan, trained.rows
    measured = rows["gradient_norms"]
    roles = {plan.roles[role].index: role for role in plan.learners}
    expected = [witness.gradients[roles[row["learner"]], row["step"]] for row in measured]
    np.testing.assert_allclose(measured["norm"], expected, rtol=1e-6)
    applied = {(row["learner"], row["step"]) for row in rows["gradients"] if row["update"] % every == 0}
    found = {(row["learner"], row["step"]) for row in measured}
    assert applied <= found
    if trained.job.protocol.name == "hardsync":
        assert applied == found
    updates = rows["update_norms"]
    last = int(rows["updates"]["timestamp"][-1])
    assert updates["timestamp"].tolist() == list(range(every, last + 1, every))
    norms = np.sqrt([sum(witness.updates[o, t] for o in plan.owners) for t in updates["timestamp"].tolist()])
    np.testing.assert_allclose(updates["norm"], norms, rtol=1e-6, atol=1e-12)
    clip = trained.job.optimizer.clip_norm
    clipped = np.full(len(norms), np.nan) if clip is None else np.minimum(norms, clip)
    np.testing.assert_allclose(updates["clipped_norm"], clipped, rtol=1e-5)
    assert clip is None or np.isin([True, False], norms > clip).all()


@pytest.mark.parametrize("every", [1, 4])
def test_gradients_of_successive_updates_are_multiplied_if_each_is_of_one_gradient(every: int) -> None:
    for more in ({}, {"cluster": {"learners": 1, "threads_per_rank": 1}}):
        witness = Witness()
        rows = train(job("base", every, protocol={"name": "async"}, **more), witness.of(RealTensors)).rows[
            "update_norms"
        ]
        seen = witness.vectors
        expected = [seen[t] @ seen[t - 1] if t > 1 else np.nan for t in rows["timestamp"].tolist()]
        np.testing.assert_allclose(rows["product"], expected, rtol=1e-4, atol=1e-6)
        assert len(rows) >= 40 // every


def test_gradients_that_are_computed_together_have_norms() -> None:
    witness = Witness()
    rows = train(job("softsync"), witness.of(VmapTensors)).rows["gradient_norms"]
    assert len(rows) > 40
    assert sorted(witness.gradients.values()) == pytest.approx(sorted(rows["norm"]), rel=1e-6)


def test_a_job_without_norms_records_none_and_has_the_same_weights(tmp_path: Path) -> None:
    weights = set()
    for every in (None, 1):
        with rudra.simulate(job("softsync", every), output=tmp_path / f"{every}.h5", progress="quiet") as results:
            weights.add(results.state["weights_sha256"])
            assert results.has_norms == (every is not None)
            assert ("norm" in (results.gradients.dtype.names or ())) == results.has_norms
            assert (len(results.frame("gradient_norms")) > 0) == results.has_norms
    assert len(weights) == 1


@pytest.mark.parametrize(
    "place",
    covering(
        ["base, clipped", "adv*", "groups", "workers"],
        ["base, clipped", "sharded", "adv*", "groups", "one group", "replicas", "central", "workers"],
    ),
)
def test_a_replay_adds_the_norms_that_the_run_would_have_recorded(place: str, tmp_path: Path) -> None:
    for every in (None, 2):
        rudra.simulate(job(place, every), output=tmp_path / f"{every}.h5", progress="quiet").close()
    added = rudra.replay(tmp_path / "None.h5", norms=2, quiet=True)
    assert added.identical
    with rudra.open_results(tmp_path / "2.h5") as then, rudra.open_results(tmp_path / "None.h5") as now:
        assert now.attributes["norms_every"] == then.attributes["norms_every"] == 2
        assert now.gradients["norm"].tobytes() == then.gradients["norm"].tobytes()
        assert np.isnan(now.updates["product"]).all() == (place not in ("adv*", "workers"))
        for column in ("norm", "clipped_norm", "product"):
            assert now.updates[column].tobytes() == then.updates[column].tobytes()
        assert added.norms == len(now.gradient_norms) + len(now.update_norms) > len(now.updates) // 2
    for name in ("None", "2"):
        assert rudra.replay(tmp_path / f"{name}.h5", quiet=True).identical


def test_a_replay_finds_another_norm(tmp_path: Path) -> None:
    for table, column, text in (
        ("gradient_norms", "norm", "gradient of learner 1, step 2: norm"),
        ("update_norms", "norm", "gradient of the update, norm"),
    ):
        path = tmp_path / f"{table}.h5"
        rudra.simulate(job("sharded"), output=path, progress="quiet").close()
        with h5py.File(path, "r+") as file:
            rows = file[table][()]
            of_second = (rows["learner"] == 1) & (rows["step"] == 2) if "learner" in rows.dtype.names else [4]
            rows[column][of_second] *= 1 + 1e-7
            file[table][...] = rows
            applied = file["gradients"][()]
        update = applied["update"][(applied["learner"] == 1) & (applied["step"] == 2)] if "g" in table[:1] else [5]
        found = rudra.replay(path, quiet=True).difference
        assert found is not None
        assert found.text.startswith(f"{text}: ")
        assert found.update == update[0]


@pytest.mark.parametrize("place", ["base", "one group", "replicas"])
def test_a_resumed_run_has_the_norms_of_both_parts(place: str, tmp_path: Path) -> None:
    measured = job(place).with_(results={"keep_checkpoints": "1 epochs"})
    with rudra.simulate(measured, output=tmp_path / "run.h5", progress="quiet") as results:
        gradients, updates = results.gradients, results.updates
    (kept,) = sorted(tmp_path.glob("run*.ckpt"))[:1]
    resumed = measured.with_(results={"keep_checkpoints": "never"})
    with rudra.simulate(resumed, output=tmp_path / "more.h5", from_=kept, carry="all", progress="quiet") as results:
        assert b"branch" in results.events["kind"]
        assert results.gradients["norm"].tobytes() == gradients["norm"].tobytes()
        assert results.updates["norm"].tobytes() == updates["norm"].tobytes()
        assert not np.isnan(updates["norm"]).any()


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"results": {"gradient_norms": "every 0"}}, "= 'every 0' is not such an interval; use `every N`"),
        ({"results": {"gradient_norms": "3"}}, "= '3' is not such an interval; use `every N`"),
        (
            {"simulation": {"tensors": False}},
            "[simulation] tensors = false, which has no gradients; use tensors = true",
        ),
        ({"simulation": {"batching": "big-batch"}}, "[simulation] batching = 'big-batch', which computes only the sum"),
        ({"placement": {"cut": 1}}, "[placement] cut, because no role sees a whole gradient; remove the cut"),
        (
            {"protocol": {"name": "hogbatch"}, "hogbatch": {"weights": "shared"}},
            "[hogbatch] weights = 'shared', where no server sees a gradient; use weights = 'server'",
        ),
    ],
    ids=str,
)
def test_norms_that_no_role_can_measure_are_refused(more: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        job("base", **more)
    assert text in str(error.value)
    assert "gradient_norms" in str(error.value)


def test_validate_tells_which_norms_are_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "digits", "--syntax", "--set", "results.gradient_norms=every 3"]) == 0
    assert "  norms          of updates 3, 6, … and their gradients, in the result file\n" in capsys.readouterr().out


def test_a_replay_that_cannot_add_norms_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.h5"
    rudra.simulate(job("base", None), output=path, progress="quiet").close()
    lines = {
        ("--norms", "0"): "--norms 0: is no number of updates; use 1 or more",
        ("--norms", "1", "--until", "3"): "--norms is for a replay of the whole run: remove --until",
    }
    for options, line in lines.items():
        assert main(["replay", str(path), *options]) == 2
        assert capsys.readouterr().err.endswith(f"{line}\n")
    assert main(["replay", str(path), "--norms", "4", "--quiet"]) == 0
    assert capsys.readouterr().out.endswith("norms of gradients and updates added\n")
    assert main(["replay", str(path), "--norms", "4"]) == 2
    assert capsys.readouterr().err.endswith("already has norms, which a replay compares; remove --norms\n")
