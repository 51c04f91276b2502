"""A function that decides changes of the job on real ranks: recorded, replayed, resumed, and a bad decision."""

import json
import signal
from pathlib import Path

import pytest
import runs_on_ranks
from processes import below, finish, gone, replays, start, wait_for_updates

import rudra
from rudra.bench.ranks import on_ranks

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(600)]


def job_file(directory: Path, name: str, call: str, after: int = 1, more: str = "", at: str = "epoch") -> Path:
    """Four epochs for two learners, with a smaller rate and a larger batch from some epoch on."""
    path = directory / f"{name}.toml"
    path.write_text(
        '[model]\nname = "mlp"\n[data]\nname = "digits"\ntrain_limit = 320\n'
        '[training]\nepochs = 4\nminibatch_size = 2\nseed = 3\nevaluate = "always"\n'
        "[optimizer]\nlearning_rate = 0.05\nmomentum = 0.9\n"
        f"[cluster]\nlearners = 2\nthreads_per_rank = 1\n[results]\nflush_s = 0.1\nreport_s = 0.02\n{more}"
        f'[decisions]\ncall = "user_functions:{call}"\noptions.after = {after}\nat = "{at}"\n'
    )
    return path


FAMILIES = {
    "softsync": ('[protocol]\nname = "softsync"\n', "update"),
    "groups": ('[protocol]\nname = "async"\n[topology]\nname = "groups"\noptions.groups = 2\n', "epoch"),
    "allreduce": ('[protocol]\nname = "hardsync"\n[topology]\nname = "groups"\noptions.groups = 1\n', "update"),
    "sma": ('[protocol]\nname = "sma"\n', "update"),
}


def test_what_a_function_decides_is_recorded_and_replayed(tmp_path: Path) -> None:
    """All families on the same ranks."""
    jobs = {
        str(tmp_path / f"{name}.h5"): rudra.Job.load(job_file(tmp_path, name, "calm_down", 1, family, at))
        for name, (family, at) in FAMILIES.items()
    }
    on_ranks(runs_on_ranks.train_as_needed, 2, jobs=jobs)
    for path in map(Path, jobs):
        with rudra.open_results(path) as results:
            events, updates = results.events, results.updates
            (row,) = events[events["kind"] == b"decided"]
            (change,) = results.summary()["changes"]
            assert change.startswith("decided after ")
            assert json.loads(row["text"])["optimizer"] == {"learning_rate": 0.02, "momentum": 0.5}
            rates = updates["learning_rate"]
            assert len({*rates[: row["timestamp"]]}) == len({*rates[row["timestamp"] :]}) == 1
            assert rates[0] > rates[-1]
        assert replays(path)


def test_a_run_is_stopped_and_resumed_before_and_after_a_decided_change(tmp_path: Path) -> None:
    """The samples take their time, so that each decision comes before the end of the next epoch."""
    job, output = job_file(tmp_path, "job", "calm_down", 1, '[protocol]\nname = "hardsync"\n'), tmp_path / "out.h5"
    text = job.read_text().replace('name = "mlp"', 'name = "small_models:dropping"')
    job.write_text(text.replace('name = "digits"\ntrain_limit = 320', 'name = "point_data:delayed"'))
    for parts, update in enumerate((70, 130)):  # the function decides after update 60, for updates after 120
        process = start("run", job, "--output", output, "--resume")
        wait_for_updates(process, output, update, parts=parts)
        ranks = below(process.pid)
        process.send_signal(signal.SIGINT)
        code, _, err = finish(process)
        assert code == 3, err
        assert gone(ranks)
    code, _, err = finish(start("resume", output))
    assert code == 0, err
    with rudra.simulate(rudra.Job.load(job), output=tmp_path / "whole.h5", progress="quiet") as whole:
        expected = whole.summary()
    with rudra.open_results(output) as results:
        assert results.summary()["weights_sha256"] == expected["weights_sha256"]
        assert results.summary()["changes"] == expected["changes"]
        assert "decided after epoch 2: " in expected["changes"][0]
    assert replays(output)


def test_a_bad_decision_ends_the_run_with_exit_code_1(tmp_path: Path) -> None:
    output = tmp_path / "out.h5"
    code, _, err = finish(start("run", job_file(tmp_path, "job", "decide_badly"), "--output", output, "--quiet"))
    assert code == 1
    call = "[decisions] call = 'user_functions:decide_badly'"
    said = f"{call} decided after epoch 1: optimizer.speed cannot change; use protocol"
    assert said in err
    assert "Traceback" not in err
    with rudra.open_results(output) as results:
        assert results.status == "failed"
        assert said in results.state["reason"]
