"""Weights in a window, on real ranks: the bits, and workers that die, the lock held among them."""

import signal
from pathlib import Path
from typing import Any

import faulty_models
import numpy as np
import pytest
import runs_on_ranks
from processes import finish, replays, start, wait_for_deaths, wait_for_updates

import rudra
from rudra.bench.ranks import on_ranks
from rudra.job.job import Job
from tests.selection import covering

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(300)]

SAMPLES = 240


def window_job(model: str, learners: int, locking: bool, kind: str = "small", **tables: Any) -> Job:
    return Job(
        model={"name": model},
        data={"name": "point_data:prompt", **tables.pop("data", {})},
        training={"epochs": 4, "seed": 7, "minibatch_size": 4, **tables.pop("training", {})},
        optimizer={"learning_rate": 0.05},
        protocol={"name": "hogbatch", "reference_batch_size": 4},
        cluster={"learners": learners, "threads_per_rank": 1},
        hogbatch={
            "shuffle": "epoch",
            "weights": "shared",
            "locking": locking,
            "workers": [{"kind": kind, "min": 4, "max": 4}],
        },
        **tables,
    )


def as_file(job: Job, directory: Path, **results: Any) -> Path:
    path = directory / "job.toml"
    (worker,) = job.hogbatch.workers
    path.write_text(
        f'[model]\nname = "{job.model.name}"\n[data]\nname = "point_data:delayed"\n'
        '[training]\nepochs = 4\nminibatch_size = 4\nevaluate = "workers"\n[optimizer]\nlearning_rate = 0.05\n'
        f'[protocol]\nname = "hogbatch"\nreference_batch_size = 4\n[cluster]\nlearners = {job.learners}\n'
        f'[[hogbatch.workers]]\nkind = "{worker.kind}"\nmin = 4\nmax = 4\n'
        f'[hogbatch]\nweights = "shared"\nlocking = {str(job.hogbatch.locking).lower()}\n'
        "[results]\nflush_s = 0.1\nreport_s = 0.0\n"
    )
    return path


def check_epochs(results: rudra.Results) -> None:
    """Every epoch has applied each sample once."""
    gradients = results.gradients
    of = results.updates["epoch"][gradients["update"] - 1]
    for epoch in range(1, 5):
        mine = np.sort(gradients[of == epoch], order="first")
        ends = mine["first"] + mine["samples"]
        assert (mine["first"][0], ends[-1]) == (0, SAMPLES)
        assert (mine["first"][1:] == ends[:-1]).all()


def test_one_worker_has_the_bits_of_async_whatever_it_copies(tmp_path: Path) -> None:
    jobs = {
        f"{name} {kind}": window_job("small_models:network", 1, locking, kind)
        for name, locking in (("racing", False), ("locked", True))
        for kind in ("small", "large")
    }
    tables = jobs["racing small"]
    jobs["async"] = Job(
        model=tables.model, data=tables.data, training=tables.training, optimizer=tables.optimizer,
        protocol={"name": "async", "modulation": "none"}, cluster=tables.cluster,
    )  # fmt: skip
    on_ranks(runs_on_ranks.train_as_needed, 1, jobs={str(tmp_path / f"{name}.h5"): job for name, job in jobs.items()})
    found = set()
    for name in jobs:
        with rudra.open_results(tmp_path / f"{name}.h5") as results:
            assert results.status == "finished"
            found.add(results.state["weights_sha256"])
    assert len(found) == 1
    assert all(replays(tmp_path / f"locked {kind}.h5") for kind in ("small", "large"))


@pytest.mark.parametrize("locking", covering([True], [True, False]))
def test_workers_that_die_leave_what_they_did_and_the_rest_is_served_again(tmp_path: Path, locking: bool) -> None:
    path, output = as_file(window_job("faulty_models:struck", 4, locking), tmp_path), tmp_path / "out.h5"
    process = start("run", path, "--output", output)
    wait_for_deaths(process, output, 2, steps=faulty_models.DIES_AFTER)
    code, _, err = finish(process)
    assert code == 0, err
    with rudra.open_results(output) as results:
        assert results.status == "finished"
        check_epochs(results)
        gradients, totals = results.gradients, results.totals[0]
        assert [(gradients["learner"] == learner).sum() for learner in (1, 2)] == [14, 15]
        assert (results.events["kind"] == b"lost").sum() == 2
        assert totals["applied"] == totals["pushed"] == totals["timestamp"]
        assert totals["samples"] == 4 * SAMPLES
        assert np.isfinite(gradients["loss"]).all()
        assert np.isfinite(results.summary()["final_test_error"])
    assert not locking or replays(output)


def test_a_run_that_is_stopped_goes_on_with_the_samples_that_are_left(tmp_path: Path) -> None:
    path, output = as_file(window_job("small_models:network", 2, locking=True), tmp_path), tmp_path / "out.h5"
    process = start("run", path, "--output", output)
    wait_for_updates(process, output, 70)
    process.send_signal(signal.SIGTERM)
    code, _, err = finish(process)
    assert code == 3, err
    with rudra.open_results(output) as results:
        assert 0 < len(results.updates) < 4 * SAMPLES / 4
    code, _, err = finish(start("resume", output))
    assert code == 0, err
    with rudra.open_results(output) as results:
        assert results.status == "finished"
        check_epochs(results)
    assert replays(output)
