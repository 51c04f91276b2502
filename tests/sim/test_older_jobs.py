"""Files whose jobs have the names of before: `[weights]`, `[[workers]]`, and keys of hogbatch in `[protocol]`."""

import json
from pathlib import Path
from typing import Any

import h5py
import pytest

import rudra
from rudra.job.job import Job
from rudra.job.renamed import translated
from rudra.report.runs import read
from rudra.results.identity import completed

OLDER = json.loads((Path(__file__).parents[1] / "golden" / "older_jobs.json").read_text(encoding="utf-8"))
"""Jobs exactly as result files of before have them."""

HOGBATCH = {
    "rule": "adaptive",
    "lr_scaling": "sqrt",
    "alpha": 3.0,
    "beta": 0.5,
    "shuffle": "epoch",
    "counts": "epoch",
    "workers": [
        {"learners": [0], "kind": "small", "threads": 2, "max": 4},
        {"kind": "large", "min": 8, "max": 32, "compute_s": {8: 0.02, 32: 0.05}},
    ],
}
OUTER = {"learning_rate": 0.8, "momentum": 0.5, "options": {"nesterov": True}}
NOW: dict[str, dict[str, Any]] = {
    "hogbatch": {"optimizer": {"learning_rate": 0.05}, "hogbatch": HOGBATCH},
    "window": {"optimizer": {"learning_rate": 0.05}, "hogbatch": {**HOGBATCH, "weights": "shared", "locking": True}},
    "sma": {"averaging": {"period": 2, "elasticity": 0.4, "restart": True, "keep_momentum": True, "outer": OUTER}},
    "easgd": {"topology": {"options": {"parameter_server": True}}},
}
"""What they are now, beside what all have."""


def now(name: str) -> Job:
    return Job(
        name=name,
        model={"name": "mlp", "options": {"hidden": [8]}},
        data={"name": "digits", "train_limit": 96, "test_limit": 32},
        training={"epochs": 2, "minibatch_size": 8, "gradients": "direct"},
        cluster={"learners": 2, "threads_per_rank": 1},
        protocol={"name": "hogbatch" if "hogbatch" in NOW[name] else name},
        results={"checkpoint_every": "600 s"},  # was the default, and files have all values
        **NOW[name],
    )


@pytest.mark.parametrize("name", OLDER)
def test_job_of_an_older_file_has_the_names_of_now(name: str) -> None:
    found = translated(OLDER[name])
    assert Job(**found) == now(name)
    assert completed(found) == json.loads(now(name).to_json())


@pytest.mark.parametrize("name", OLDER)
def test_older_file_replays_and_is_shown_and_compared(name: str, tmp_path: Path) -> None:
    path = tmp_path / "out.h5"
    rudra.simulate(now(name), output=path, progress="quiet").close()
    with h5py.File(path, "r+") as file:
        file.attrs["job"] = json.dumps(OLDER[name])
    assert rudra.replay(path, quiet=True).identical
    assert rudra.replay(path, job=now(name), quiet=True).identical
    with rudra.open_results(path) as results:
        kinds = [worker["kind"] for worker in results.summary()["workers"]]
    assert kinds == (["small", "large"] if "hogbatch" in NOW[name] else [])
    assert read(path).cast is not None
