"""Whole jobs on real MPI ranks, from the API and the command line."""

import json
import re
import signal
from pathlib import Path
from typing import Any

import point_data
import pytest
import small_models
from processes import finish, mpirun, start, wait_for_updates
from torch import nn

import rudra
from rudra.errors import RudraError
from rudra.results import checkpoint
from tests.selection import covering

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(600)]


def make_job(
    protocol: str, learners: int, model: Any = small_models.network, data: Any = point_data.prompt, **tables: Any
) -> rudra.Job:
    return rudra.Job(
        name="test",
        model={"name": model},
        data={"name": data},
        training={"epochs": 3, "minibatch_size": 4, "seed": 7, **tables.pop("training", {})},
        optimizer={"learning_rate": 0.05, "momentum": 0.9},
        protocol={"name": protocol, "reference_batch_size": 16},
        cluster={"learners": learners, "threads_per_rank": 1},
        **tables,
    )


def job_file(directory: Path, model: str, data: str, learners: int = 3, more: str = "") -> str:
    path = directory / "job.toml"
    path.write_text(
        f'[model]\nname = "{model}"\n[data]\nname = "point_data:{data}"\n'
        f"[training]\nepochs = 3\nminibatch_size = 4\n[cluster]\nlearners = {learners}\n"
        f'[results]\nflush_s = 0.1\nreport_s = 0.0\n[protocol]\nname = "async"\n{more}'
    )
    return str(path)


def test_a_failing_rank_ends_the_run_with_one_line_and_keeps_results(tmp_path: Path) -> None:
    output = tmp_path / "out.h5"
    process = start("run", job_file(tmp_path, "faulty_models:raising", "endless"), "--output", str(output))
    returned, _, err = finish(process)
    assert returned == 1, err
    lines = [line for line in err.splitlines() if line.startswith("rudra: ")]
    assert len(lines) == 1, err
    assert "learner 1 (rank 3) failed: ValueError: the user's own bug" in lines[0]
    assert err.count("Traceback") == 1
    assert "MPI_ABORT" not in err
    assert "prterun" not in err
    with rudra.open_results(output) as results:
        assert results.status == "failed"
        assert len(results.updates) >= 10
    assert not list(tmp_path.glob("*.launch"))


def test_too_little_memory_is_one_line(tmp_path: Path) -> None:
    output = tmp_path / "out.h5"
    returned, _, err = finish(
        start("run", job_file(tmp_path, "faulty_models:exhausting", "endless"), "--output", str(output))
    )
    instead = "use a smaller training.minibatch_size, more training.microbatches, or fewer learners on this device"
    why = "too little memory: CUDA out of memory. Tried to allocate 2.00 GiB"
    lines = [
        f"rudra: learner 1 (rank 3): {why}; {instead} (cluster.learners_per_device)",
        f"rudra: job: to resume from its last checkpoint: rudra resume {output}",
    ]
    assert (returned, err.count("Traceback")) == (1, 0), err
    assert [line for line in err.splitlines() if line.startswith("rudra: ")] == lines
    with rudra.open_results(output) as results:
        assert results.status == "failed"
        (memory,) = results.events[results.events["kind"] == b"memory"]
        assert memory["role"] == results.plan().learners[1]
        last = checkpoint.read(checkpoint.path_of(output))[0].position.timestamp
        assert 20 <= last <= len(results.updates)


def test_a_rank_that_hangs_is_named_and_ends_the_run_when_the_job_says_so(tmp_path: Path) -> None:
    more = "[fault_tolerance]\nstall_warning_s = 1.0\nstall_limit_s = 3.0\n"
    job = job_file(tmp_path, "faulty_models:hanging", "endless", more=more)
    path = Path(job)
    path.write_text(path.read_text().replace('"async"', '"hardsync"'))
    returned, _, err = finish(start("run", job, "--output", str(tmp_path / "out.h5")))
    assert returned == 1, err
    assert re.search(r"has waited \d+ s for a gradient from .*learner 1", err)
    assert len(re.findall(r"has waited \d+ s for .*, longer than fault_tolerance\.stall_limit_s allows", err)) == 1
    assert "for the parameter server to answer its pull" in err


def test_ctrl_c_ends_the_run_in_order(tmp_path: Path) -> None:
    output = tmp_path / "out.h5"
    job = job_file(tmp_path, "small_models:network", "endless", more="")
    path = Path(job)
    path.write_text(path.read_text().replace("epochs = 3", "epochs = 100000"))
    process = start("run", job, "--output", str(output))
    wait_for_updates(process, output, 21)
    process.send_signal(signal.SIGINT)
    returned, _, err = finish(process)
    assert returned == 3, err
    assert [line for line in err.splitlines() if line.startswith("rudra:")] == [
        f"rudra: job: stopped; to resume from its last checkpoint: rudra resume {output}"
    ]
    with rudra.open_results(output) as results:
        assert results.status == "interrupted"
        assert len(results.updates) == results.totals["timestamp"][0] > 20
        assert results.totals["pushed"] == sum(results.totals[n] for n in ("applied", "pending", "discarded", "lost"))


@pytest.mark.parametrize(
    ("model", "data", "optimizer", "said"),
    [
        ("small_models:network", "wrong_label", "momentum=0", "training sample 100 has label 11; valid: 0 to 9"),
        ("small_models:wide", "prompt", "momentum=0", "7"),
        (
            "small_models:network",
            "prompt",
            "schedule=no.such:thing",
            "[optimizer] schedule: no.such:thing: no module 'no'",
        ),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_code_2(
    tmp_path: Path, model: str, data: str, optimizer: str, said: str
) -> None:
    job = job_file(tmp_path, model, data)
    process = start("run", job, "--output", str(tmp_path / "out.h5"), "--set", f"optimizer.{optimizer}")
    returned, _, err = finish(process)
    assert returned == 2, err
    assert [line for line in err.splitlines() if not line.startswith("job: ")] == [err.splitlines()[-1]], err
    assert said in err


@pytest.mark.parametrize("anew", covering([False], [False, True]), ids=["forks", "anew"])
def test_under_mpirun_the_learners_are_the_ranks_left(tmp_path: Path, anew: bool) -> None:
    job = Path(job_file(tmp_path, "small_models:network", "prompt"))
    job.write_text(job.read_text().replace("learners = 3\n", ""))
    output = tmp_path / "out.h5"
    code, out, err = mpirun(3, "run", str(job), "--output", str(output), anew=anew)
    assert code == 0, err
    with rudra.open_results(output) as results:
        assert results.summary()["learners"] == 1
    assert out.count("test error") >= 1


def test_a_launch_of_two_ranks_names_the_right_number(tmp_path: Path) -> None:
    job, output = job_file(tmp_path, "small_models:network", "prompt"), str(tmp_path / "out.h5")
    code, _, err = mpirun(2, "run", job, "--output", output)
    assert code == 2, err
    said = "rudra: 2 ranks are too few for topology base; start 5"
    assert [line for line in err.splitlines() if line.startswith("rudra:")] == [said]


def test_warm_start_takes_the_final_weights_of_another_run(tmp_path: Path) -> None:
    first = make_job("hardsync", 2)
    with rudra.simulate(first, output=tmp_path / "first.h5", progress="quiet") as results:
        weights = results.summary()["weights_sha256"]
    second = make_job("async", 2, training={"warm_start": tmp_path / "first.h5"})
    with rudra.run(second, output=tmp_path / "second.h5", progress="quiet") as results:
        assert results.summary()["initial_weights_sha256"] == weights
    other = make_job("async", 2, model=lambda: nn.Linear(20, 10)).with_(training={"warm_start": tmp_path / "first.h5"})
    with pytest.raises(RudraError, match="holds another model"):
        rudra.simulate(other, output=tmp_path / "third.h5", progress="quiet")


def test_show_json_has_what_scripts_rely_on(tmp_path: Path) -> None:
    with rudra.simulate(make_job("softsync", 3), output=tmp_path / "out.h5", progress="quiet"):
        pass
    code, out, _ = finish(start("show", str(tmp_path / "out.h5"), "--json"))
    summary = json.loads(out)
    promised = (
        "protocol learners minibatch_size epochs updates gradients samples wall_time_s samples_per_s test_error "
        "final_test_error mean_staleness max_staleness staleness_histogram weights_sha256"
    )
    assert code == 0
    assert set(promised.split()) <= set(summary)
    assert sum(summary["staleness_histogram"]) == summary["gradients"]
