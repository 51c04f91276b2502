"""Gradients in rows on real ranks: read where they lie, and sent."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runs_on_ranks

import rudra
from rudra.bench.ranks import on_ranks

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(600)]

CASES: dict[str, dict[str, Any]] = {
    "async": {},
    "hardsync": {"protocol": {"name": "hardsync"}},
    "hardsync by messages": {"protocol": {"name": "hardsync"}, "cluster": {"node_memory": False}},
    "hardsync of dense gradients": {"protocol": {"name": "hardsync"}, "optimizer": {"clip_norm": 1e9}},
}


def test_rows_travel_and_are_replayed(tmp_path: Path) -> None:
    """A mini-batch has few of the features, or nearly all: then a gradient travels whole."""
    rng = np.random.default_rng(0)
    rows = [sorted(rng.choice(60, 1 if i % 3 else 50, replace=False) + 1) for i in range(120)]
    samples = tmp_path / "samples.svm"
    samples.write_text("\n".join(" ".join([str(i % 2), *(f"{at}:1" for at in row)]) for i, row in enumerate(rows)))
    job = rudra.Job(
        model={"name": "mlp", "options": {"hidden": [32]}},
        data={"name": "libsvm", "path": samples, "test_split": 0.2, "sparse": True},
        training={"epochs": 1, "minibatch_size": 1, "seed": 1},
        protocol={"name": "async", "modulation": "none"},
        cluster={"learners": 2, "threads_per_rank": 1},
    )
    jobs = {str(tmp_path / f"{case}.h5"): job.with_(**tables) for case, tables in CASES.items()}
    on_ranks(runs_on_ranks.train_all, 2, jobs=jobs)
    digests = {}
    for path in jobs:
        assert rudra.replay(path).identical
        with rudra.open_results(path) as results:
            digests[Path(path).stem] = results.summary()["weights_sha256"]
    assert len({digest for case, digest in digests.items() if case.startswith("hardsync")}) == 1
