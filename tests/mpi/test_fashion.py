"""A real data set on real ranks."""

import os
from pathlib import Path

import pytest

import rudra

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("RUDRA_DATA", ROOT.parent / "shared" / "data")) / "fashion-mnist"


@pytest.mark.mpi
@pytest.mark.skipif(not DATA.is_dir(), reason=f"Fashion-MNIST is not in {DATA}; RUDRA_DATA can name another place")
@pytest.mark.timeout(600)
def test_lenet_learns_fashion_mnist_with_two_learners(tmp_path: Path) -> None:
    """One of the four epochs after which nine of ten images are told, with a tenth of them; the same on any machine."""
    job = rudra.Job.load("fashion").with_(
        data={"path": DATA, "train_limit": 6_000, "test_limit": 2_000},
        training={"epochs": 1},
        protocol={"name": "hardsync", "n": None},
    )
    with rudra.run(job, output=tmp_path / "fashion.h5", progress="quiet") as results:
        summary = results.summary()
    assert summary["learners"] == 2
    assert summary["driver"] == "mpi"
    assert summary["final_test_error"] <= 0.3  # processors differ in the last bits
