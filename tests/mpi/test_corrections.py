"""Corrections of gradients on real ranks: killed, resumed and replayed, and the user's mistakes."""

import signal
from pathlib import Path

import pytest
from job_files import restartable_job
from processes import finish, ours, replays, run_until, start

import rudra
from tests.selection import covering

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(600)]

COMPENSATED = 'correction = "dc_asgd"\ncorrection_options = { coefficient = 2.0, adaptive = true }\n'


def corrected(job: Path, keys: str) -> Path:
    job.write_text(job.read_text().replace("[cluster]\n", f"{keys}[cluster]\n"))
    return job


@pytest.mark.parametrize("topology", covering(["sharded"], ["base", "sharded"]))
def test_delay_compensation_killed_and_resumed_replays(tmp_path: Path, topology: str) -> None:
    options = "options.shards = 2\n" if topology == "sharded" else ""
    job = restartable_job(tmp_path, "async", more=f'[topology]\nname = "{topology}"\n{options}')
    output = tmp_path / "out.h5"
    code, err = run_until(corrected(job, COMPENSATED), output, 40, signal.SIGKILL)
    assert code == -9, err
    code, _, err = finish(start("resume", output))
    assert code == 0, err
    with rudra.open_results(output) as results:
        assert results.summary()["correction"] == "dc_asgd (adaptive = True, coefficient = 2.0)"
        assert results.gradients["staleness"].max() > 0
        assert b"restart" in results.events["kind"]
    assert replays(output)


def test_a_mistake_of_the_users_ends_the_run_with_one_line(tmp_path: Path) -> None:
    job = corrected(restartable_job(tmp_path, "async"), 'correction = "user_functions:Wrong"\n')
    never = ("--set", "results.checkpoint_every=never")  # else a line may say how to resume from one made before
    code, _, err = finish(start("run", job, *never, "--quiet", "--output", tmp_path / "out.h5"))
    assert code == 1, err
    line = "rudra: parameter server (rank 0): correction user_functions:Wrong failed at gradient of learner 1, step 2: "
    assert len(ours(err)) == 1, err
    assert ours(err)[0].startswith(f"{line}RuntimeError: The size of tensor a (")
    assert err.count("Traceback") == 1
