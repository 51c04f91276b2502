"""Banks of learners in virtual time: a fused bank trains as a loop does, and is replayed where its record says so."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

import rudra
from rudra.errors import ConfigError, ReplayError

NETWORKS: dict[str, dict[str, Any]] = {
    "lenet": {"name": "lenet"},
    "resnet8": {"name": "resnet32", "options": {"blocks": 1, "width": 8}},
}
LEARNERS = 4


def make_job(protocol: str, bank: str, **tables: Any) -> rudra.Job:
    """Returns a job of 12 steps for each learner."""
    cluster = {"learners": LEARNERS, "learners_per_device": LEARNERS, "threads_per_rank": 1, "bank": bank}
    return rudra.Job(
        model=tables.pop("model", NETWORKS["lenet"]),
        data={"train_limit": 192, "test_limit": 40},
        training={"minibatch_size": 4, "epochs": 1, "evaluate": False, "seed": 3, **tables.pop("training", {})},
        optimizer={"learning_rate": 0.002, "momentum": 0.9, **tables.pop("optimizer", {})},
        protocol={"name": protocol, "modulation": "none", **tables.pop("protocol", {})},
        cluster={**cluster, **tables.pop("cluster", {})},
        **tables,
    )


def simulated(job: rudra.Job, path: Path) -> np.ndarray[Any, Any]:
    with rudra.simulate(job, output=path, progress="quiet") as results:
        assert results.status == "finished"
        assert results.job["cluster"]["bank"] == job.cluster.bank
        assert results.weights is not None
        return results.weights


@pytest.mark.each_value
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("protocol", ["sma", "average", "diloco", "hardsync"])
def test_a_fused_bank_trains_as_a_loop_does(network: str, protocol: str, tmp_path: Path) -> None:
    more: dict[str, Any] = {"averaging": {"period": 5}} if protocol == "diloco" else {}
    found = [
        simulated(make_job(protocol, bank, model=NETWORKS[network], **more), tmp_path / f"{bank}.h5")
        for bank in ("loop", "fused")
    ]
    assert 0 < np.abs(found[0] - found[1]).max() <= 1e-5
    assert rudra.replay(tmp_path / "loop.h5", quiet=True).identical
    if protocol == "hardsync":
        with pytest.raises(ReplayError, match=r"computed together \(\[cluster\] bank = fused\)"):
            rudra.replay(tmp_path / "fused.h5", quiet=True)
    else:
        assert rudra.replay(tmp_path / "fused.h5", quiet=True).identical


def dropping() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Dropout(0.2), nn.Linear(64, 20), nn.ReLU(), nn.Dropout(), nn.Linear(20, 10))


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "two banks": ("sma", {"cluster": {"learners": 8}}),
    "asynchronous": ("async", {"simulation": {"jitter": 0.5}}),
    "one group of all": ("hardsync", {"topology": {"name": "groups"}}),
    "two groups": (
        "async",
        {"topology": {"name": "groups", "options": {"groups": 2}}, "cluster": {"learners_per_device": 2}},
    ),
    "hierarchical": (
        "sma",
        {"topology": {"name": "hierarchical", "options": {"blocks": 2}}, "cluster": {"learners_per_device": 2}},
    ),
    "a server for each replica": ("easgd", {"topology": {"options": {"parameter_server": True}}}),
    "some learners begin later": (
        "average",
        {"cluster": {"active_learners": 3}, "changes": [{"at_update": 8, "cluster": {"active_learners": 4}}]},
    ),
    "a bank dies": (
        "softsync",
        {"cluster": {"learners": 8}, "simulation": {"faults": [{"learner": 1, "dies_at_s": 1.0}]}},
    ),
    "dropout": ("average", {"model": {"name": dropping}}),
    "norms of each gradient": ("hardsync", {"results": {"gradient_norms": "every 1"}}),
    "float16": ("hardsync", {"cluster": {"gradient_format": "float16"}}),
}


@pytest.mark.parametrize("case", CASES)
def test_any_cluster_may_have_fused_banks(case: str, tmp_path: Path) -> None:
    protocol, tables = CASES[case]
    near = 2e-3 if case == "float16" else 1e-5
    found = []
    for bank in ("loop", "fused"):
        cluster = {**tables.get("cluster", {}), "bank": bank}
        about = {"model": {"name": "mlp"}, **tables, "cluster": cluster}
        found.append(simulated(make_job(protocol, bank, **about), tmp_path / f"{bank}.h5"))
    assert np.abs(found[0] - found[1]).max() <= near
    rows = []
    for bank in ("loop", "fused"):
        with rudra.open_results(tmp_path / f"{bank}.h5") as results:
            rows.append(results.gradients[["learner", "step", "timestamp", "samples"]])
            if case == "norms of each gradient":
                rows[-1] = results.gradient_norms["norm"]
    if case == "norms of each gradient":
        assert rows[1] == pytest.approx(rows[0], rel=1e-3)
        assert len(set(rows[1].tolist())) == len(rows[1])
    else:
        assert np.array_equal(rows[0], rows[1])


def test_virtual_time_does_not_measure_the_forms(tmp_path: Path) -> None:
    with rudra.simulate(make_job("sma", "auto"), output=tmp_path / "run.h5", progress="quiet") as results:
        assert results.job["cluster"]["bank"] == "loop"


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, inputs: Any) -> Any:
        output = self.layer(inputs.flatten(1))
        return output if output.sum() > 0 else 2 * output


def test_a_model_that_cannot_be_fused_is_refused_before_anything_trains(tmp_path: Path) -> None:
    job = make_job("sma", "fused", model={"name": Branching})
    with pytest.raises(ConfigError) as caught:
        rudra.simulate(job, output=tmp_path / "run.h5", progress="quiet")
    text = str(caught.value)
    assert text.startswith("[cluster] bank = 'fused': torch.func.vmap does not support torch.Tensor.__bool__ of this ")
    assert text.endswith("valid for this model: loop")
    assert not (tmp_path / "run.h5").exists()
