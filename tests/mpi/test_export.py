"""Weights of a run on real ranks, taken elsewhere."""

from pathlib import Path

import point_data
import pytest
import small_models
import torch
from processes import finish, start

import rudra

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(600)]


def test_plain_torch_finds_the_test_error_of_every_kept_epoch(tmp_path: Path) -> None:
    output, test = tmp_path / "run.h5", point_data.delayed()[1]
    job = rudra.Job(
        model={"name": small_models.Assorted},
        data={"name": point_data.delayed},
        training={"epochs": 4, "minibatch_size": 4},
        optimizer={"learning_rate": 0.2},
        cluster={"learners": 2, "threads_per_rank": 1},
        results={"keep_every": 1},
    )
    with rudra.run(job, output=output, progress="quiet") as results:
        errors, kept, hashed = results.epochs["test_error"], results.kept_epochs, results.epochs["weights_sha256"]
    assert kept == tuple(epoch for epoch in range(1, 5) if hashed[epoch - 1])  # where the server was not behind
    assert 4 in kept
    assert len(kept) > 1
    for epoch in kept:
        target = tmp_path / f"{epoch}.pt"
        code, _, err = finish(start("export", output, "-o", target, "--epoch", str(epoch)))
        assert (code, err) == (0, "")
        model = small_models.Assorted().eval()
        model.load_state_dict(torch.load(target, weights_only=True), strict=True)
        with torch.no_grad():
            wrong = (model(test.inputs).argmax(1) != test.labels).float().mean()
        assert float(wrong) == pytest.approx(errors[epoch - 1], abs=1e-7)
    assert rudra.replay(output).difference is None
