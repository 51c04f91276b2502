"""Hogbatch on real ranks: unlike workers, one that dies, and runs that are stopped or killed and go on."""

import os
import signal
from pathlib import Path

import faulty_models
import numpy as np
import pytest
from processes import finish, mpirun, ranks_of, replays, run_until, start, wait_for_deaths, wait_for_updates

import rudra

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(300)]

SAMPLES = 240
JOB = """
[model]
name = "{model}"
[data]
name = "point_data:{data}"
[training]
epochs = {epochs}
seed = 7
[optimizer]
learning_rate = 0.05
momentum = 0.9
[protocol]
name = "hogbatch"
reference_batch_size = 16
[hogbatch]
rule = "{rule}"
[cluster]
learners = {learners}
threads_per_rank = 1
[[hogbatch.workers]]
learners = [0]
kind = "small"
threads = 3
max = 8
[[hogbatch.workers]]
kind = "large"
min = 8
max = 64
[results]
flush_s = 0.1
report_s = 0.05
checkpoint_every = "7 updates"
"""


def job_file(directory: Path, *, model: str = "small_models:regular", data: str = "delayed", learners: int = 2,
             epochs: int = 4, rule: str = "adaptive") -> Path:  # fmt: skip
    path = directory / "job.toml"
    path.write_text(JOB.format(model=model, data=data, learners=learners, epochs=epochs, rule=rule))
    return path


def check(results: rudra.Results, epochs: int) -> None:
    """Each epoch has applied each sample once, and all gradients are accounted for."""
    assert results.status == "finished"
    gradients, updates, totals = results.gradients, results.updates, results.totals[0]
    of = updates["epoch"][gradients["update"] - 1]
    assert set(of) == set(range(1, epochs + 1))
    for epoch in range(1, epochs + 1):
        mine = np.sort(gradients[of == epoch], order="first")
        assert list(mine["first"]) == [0, *np.cumsum(mine["samples"])[:-1]]
        assert mine["samples"].sum() == SAMPLES
    assert totals["samples"] == epochs * SAMPLES
    assert totals["pushed"] == sum(totals[name] for name in ("applied", "pending", "discarded", "lost"))


def test_two_unlike_workers(tmp_path: Path) -> None:
    """As many ranks as a user's own launcher starts."""
    output = tmp_path / "out.h5"
    code, _, err = mpirun(4, "run", str(job_file(tmp_path, rule="balanced")), "--output", str(output))
    assert code == 0, err
    with rudra.open_results(output) as results:
        check(results, 4)
        small, large = results.summary()["workers"]
        assert (small["kind"], small["threads"], large["kind"]) == ("small", 3, "large")
        assert small["samples"] + large["samples"] == 4 * SAMPLES
        assert small["updates"] + large["updates"] == len(results.updates)
        assert 0 < small["busy_share"] <= 1
        parts = results.gradients[results.gradients["learner"] == 0]
        assert parts["samples"].max() <= 8
        assert results.learners["samples"].sum() == 4 * SAMPLES
    assert replays(output)


def test_what_a_dead_worker_had_is_given_to_others(tmp_path: Path) -> None:
    output = tmp_path / "out.h5"
    process = start("run", job_file(tmp_path, model="faulty_models:dying_3", learners=3, epochs=20), "--output", output)
    wait_for_deaths(process, output, steps=faulty_models.DIES_AFTER)
    code, _, err = finish(process)
    assert code == 0, err
    assert "rudra: parameter server (rank 0): learner 1 (rank 3) died; 2 learners are left" in err
    with rudra.open_results(output) as results:
        check(results, 20)
        (lost,) = results.events[results.events["kind"] == b"lost"]
        assert results.roles[lost["role"]]["index"] == 1
        assert (results.gradients["learner"][results.gradients["update"] > lost["timestamp"]] != 1).all()
    assert replays(output)


def test_a_run_that_is_stopped_and_killed_goes_on_with_each_sample_once(tmp_path: Path) -> None:
    job, output = job_file(tmp_path, epochs=20), tmp_path / "out.h5"
    for update, number in ((20, signal.SIGTERM), (50, signal.SIGKILL)):
        code, err = run_until(job, output, update, number)
        assert code == (3 if number == signal.SIGTERM else -9), err
    code, _, err = finish(start("run", job, "--output", output, "--resume"))
    assert code == 0, err
    with rudra.open_results(output) as results:
        check(results, 20)
        assert (results.events["kind"] == b"restart").sum() == 2
        for learner in range(2):
            steps = results.gradients["step"][results.gradients["learner"] == learner]
            assert list(steps) == list(range(len(steps)))
    assert replays(output)


def test_a_run_goes_on_from_its_checkpoint_when_its_coordinator_died(tmp_path: Path) -> None:
    job, output = job_file(tmp_path, epochs=12), tmp_path / "out.h5"
    process = start("run", job, "--output", output, "--set", "fault_tolerance.restarts=1")
    wait_for_updates(process, output, 20, kept=True)
    os.kill(ranks_of(process)[0], signal.SIGKILL)
    code, _, err = finish(process)
    assert code == 0, err
    assert "rudra: restart 1 of 1: job: continues from" in err
    with rudra.open_results(output) as results:
        check(results, 12)
    assert replays(output)
