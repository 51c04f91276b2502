"""Figure 5's strongest claim, on a part of CIFAR-10: with 30-softsync, α0 stays at chance and α0/30 learns."""

import os
from pathlib import Path

import pytest

import rudra
from rudra.config import cores

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("RUDRA_DATA", ROOT.parent / "shared" / "data")) / "cifar-10"


@pytest.mark.skipif(not DATA.is_dir(), reason=f"CIFAR-10 is not in {DATA}; RUDRA_DATA can name another place")
@pytest.mark.timeout(900)
def test_rate_divided_by_n_is_what_lets_30_softsync_learn(tmp_path: Path) -> None:
    job = rudra.Job.load("figure5-quick").with_(
        data={"path": DATA}, training={"epochs": 2}, cluster={"threads_per_rank": cores()}
    )
    summaries = {}
    for modulation in ("none", "n"):
        run = job.with_(protocol={"modulation": modulation})
        with rudra.simulate(run, output=tmp_path / f"{modulation}.h5", progress="quiet") as results:
            summaries[modulation] = results.summary()
    assert summaries["none"]["final_test_error"] == pytest.approx(0.9, abs=0.02)
    assert summaries["none"]["mean_staleness"] == pytest.approx(29, abs=3)
    learns = summaries["n"]
    assert learns["final_test_error"] < 0.87
    assert learns["train_loss"][1] < learns["train_loss"][0] < 2.3026
