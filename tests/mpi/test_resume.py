"""Runs that are killed or stopped, and go on: on real ranks, from the command line."""

import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runs_on_ranks
from families import AT, SYNCHRONOUS, small
from job_files import SGD
from job_files import restartable_job as job_file
from processes import finish, mpirun, replays, run_until, start, updates

import rudra
from rudra.bench.ranks import on_ranks
from tests.selection import CAMPAIGN, together

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(600)]

ADAM = 'name = "adam"\nlearning_rate = 0.002\naverage.rate = 0.05\n'
UNIFORM = 'average.window = "2 epochs"\n'


@pytest.mark.parametrize(
    ("optimizer", "topology"), [(ADAM, "sharded"), pytest.param(SGD + UNIFORM, "groups", marks=CAMPAIGN)]
)
def test_hardsync_killed_again_and_again_reaches_the_bits_of_a_run_that_never_stopped(
    tmp_path: Path, optimizer: str, topology: str
) -> None:
    options = {"groups": "options.groups = 1\n", "sharded": "options.shards = 3\n"}.get(topology, "")
    job = job_file(tmp_path, "hardsync", optimizer, f'[topology]\nname = "{topology}"\n{options}')
    output, last = tmp_path / "out.h5", 0
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    for number in (signal.SIGKILL, signal.SIGTERM):
        code, err = run_until(job, output, last + chance.randrange(8, 30), number)
        assert code == (-9 if number == signal.SIGKILL else 3), err
        last = updates(output)
    finished = topology == "sharded"
    if finished:
        code, _, err = finish(start("run", job, "--output", output, "--resume"))
        assert code == 0, err
        assert "continues from" in err
        assert list(tmp_path.glob("*.ckpt")) == [output.with_suffix(".ckpt")], "that of the end alone"
        assert finish(start("run", job, "--output", output, "--resume"))[0] == 0
    code, _, err = finish(start("resume", output, "--set", "training.epochs=4"))
    assert code == 0, err
    longer = rudra.Job.load(job, ["training.epochs=4"])
    with rudra.simulate(longer, output=tmp_path / "whole.h5", progress="quiet") as whole:
        expected = whole.summary()
        kept = {epoch: whole.weights_of(epoch) for epoch in whole.kept_epochs}
    with rudra.open_results(output) as results:
        found = results.summary()
        assert found["weights_sha256"] == expected["weights_sha256"] is not None
        assert found["updates"] == expected["updates"] == len(results.updates)
        assert found["train_loss"] == expected["train_loss"]
        assert found["pushed"] == found["applied"] == expected["applied"]
        restarts = results.events[results.events["kind"] == b"restart"]
        assert 1 + finished <= len(restarts) <= 2 + finished
        if finished:
            assert restarts["text"][-1].endswith(b"; 0 updates after it are repeated; it was finished")
        assert list(restarts["timestamp"]) == sorted(restarts["timestamp"])
        assert [row["samples"] for row in results.learners] == [4 * 80] * 3
        assert len({*kept} & {*results.kept_epochs}) > 1
        for epoch in {*kept} & {*results.kept_epochs}:
            assert np.array_equal(results.weights_of(epoch), kept[epoch])
    assert replays(output)


@pytest.mark.parametrize("families", together(["server", "hierarchical", "placed"], SYNCHRONOUS))
def test_ranks_and_simulations_go_on_from_each_others_checkpoints_with_the_same_bits(
    tmp_path: Path, families: list[str]
) -> None:
    """Synchronous families, all on the same ranks."""
    synchronous = {name: SYNCHRONOUS[name] for name in families}
    whole: dict[str, Any] = {}
    jobs: dict[str, rudra.Job] = {}
    origins: dict[str, Path] = {}
    for name, tables in synchronous.items():
        with rudra.simulate(small(tables), output=tmp_path / f"{name}.h5", progress="quiet") as results:
            whole[name] = results.summary()
        for output in ("whole", "branch"):
            jobs[str(tmp_path / f"{output}-{name}.h5")] = small(tables)
        origins[str(tmp_path / f"branch-{name}.h5")] = tmp_path / f"{name}-{AT}.ckpt"
    ranks = max(job.plan().ranks for job in jobs.values())
    on_ranks(runs_on_ranks.train_as_needed, ranks - 2, jobs=jobs, origins=origins)
    for name, tables in synchronous.items():
        origin = tmp_path / f"whole-{name}-{AT}.ckpt"
        simulated = rudra.simulate(
            small(tables), output=tmp_path / f"back-{name}.h5", from_=origin, carry="state", progress="quiet"
        )
        simulated.close()
        for output in ("whole", "branch", "back"):
            with rudra.open_results(tmp_path / f"{output}-{name}.h5") as results:
                found = results.summary()
            same = ("weights_sha256", "updates", "applied", "pushed", "samples")
            assert [found[key] for key in same] == [whole[name][key] for key in same], (name, output)


def test_softsync_stopped_and_resumed_replays(tmp_path: Path) -> None:
    job, output = job_file(tmp_path, "softsync"), tmp_path / "out.h5"
    code, err = run_until(job, output, 20, signal.SIGINT)
    assert code == 3, err
    assert "rudra: job: stopped; to resume from its last checkpoint: rudra resume" in err
    code, _, err = finish(start("resume", tmp_path / "out.ckpt"))
    assert code == 0, err
    with rudra.open_results(output) as results:
        for learner in range(3):
            steps = results.gradients["step"][results.gradients["learner"] == learner]
            assert list(steps) == list(range(len(steps)))
        assert list(results.epochs["epoch"]) == [1, 2, 3]
        assert (results.events["wall_s"] > 0).all()
    assert replays(output)


def test_a_target_counts_the_tests_from_before_a_stop(tmp_path: Path) -> None:
    target = 'target = "accuracy >= 0"\nstop_at_target = true\n'  # as soon as there are five tests
    job, output = job_file(tmp_path, "hardsync"), tmp_path / "out.h5"
    text = job.read_text().replace("epochs = 3\nminibatch_size = 2\n", f"epochs = 50\nminibatch_size = 4\n{target}")
    job.write_text(text)
    code, err = run_until(job, output, 75, signal.SIGTERM)
    assert code == 3, err
    code, _, err = finish(start("run", job, "--output", output, "--resume"))
    assert code == 0, err
    with rudra.open_results(output) as results:
        assert results.summary()["target_epoch"] == 5
        assert 5 <= len(results.epochs) < 50  # the one under way ends, and tests may be late
        reached = results.events[results.events["kind"] == b"target"]
        assert [row["text"] for row in reached] == [b"accuracy >= 0: reached with epoch 5"]


def test_patience_and_plateau_count_the_tests_from_before_a_stop(tmp_path: Path) -> None:
    """A measure that never gets better: each second test after the first lowers the rate, the fifth ends the run."""
    metrics = '["user_functions:always", "user_functions:priority"]'
    more = f'[task]\nmetrics = {metrics}\n[topology]\nname = "groups"\noptions.groups = 1\n'
    job = job_file(tmp_path, "hardsync", more=more)
    output, text = tmp_path / "out.h5", job.read_text()
    longer = 'epochs = 50\nminibatch_size = 4\npatience = 5\ntarget = "always >= 2"\n'
    text = text.replace("epochs = 3\nminibatch_size = 2\n", longer)
    plateau = 'schedule = "plateau"\ndecay_factor = 0.5\nschedule_options = { patience = 2 }\n'
    job.write_text(text.replace("milestones = [1, 2]\n", plateau))
    code, err = run_until(job, output, 75, signal.SIGTERM)
    assert code == 3, err
    code, _, err = finish(start("run", job, "--output", output, "--resume"))
    assert code == 0, err
    with rudra.open_results(output) as results:
        epochs, updates, events, metrics = results.epochs, results.updates, results.events, results.metrics
    assert {*metrics["value"][metrics["name"] == b"priority"]} == {0.0}  # evaluations decide
    tested = epochs["epoch"][epochs["evaluated"] == 1]
    (patience,) = events[events["kind"] == b"patience"]
    assert f", up to epoch {tested[5]}, brought no new best" in patience["text"].decode()
    assert tested[5] <= len(epochs) < 50
    plateaus = events[events["kind"] == b"plateau"]
    fell = [int(row["text"].split()[-1]) for row in plateaus]
    due = tested[2::2].tolist()  # a seventh test may be over before the epoch that is the last one
    assert 2 <= len(set(fell)) == len(fell) <= len(due)
    assert all(at > epoch for at, epoch in zip(fell, due, strict=False))
    factors = [0.5 ** sum(epoch > at for at in fell) for epoch in updates["epoch"].tolist()]
    assert updates["learning_rate"] == pytest.approx(updates["learning_rate"][0] * np.array(factors))
    assert replays(output)


def test_what_cannot_be_resumed_is_said_in_one_line(tmp_path: Path) -> None:
    job, output = job_file(tmp_path, "hardsync"), tmp_path / "out.h5"
    assert run_until(job, output, 20, signal.SIGINT)[0] == 3
    before = output.read_bytes()
    arguments = ("run", job, "--output", output, "--resume")
    for more, said in {
        ("--set", "training.minibatch_size=4"): "belongs to another job: training.minibatch_size was 2, but is 4 now",
        ("--learners", "2"): "belongs to another job: cluster.learners was 3, but is 2 now",
    }.items():
        code, _, err = finish(start(*arguments, *more))
        assert (code, err.count("\n")) == (2, 1), err
        assert f"rudra: {tmp_path / 'out.ckpt'}: {said}" in err
    assert output.read_bytes() == before
    code, _, err = finish(start("run", job, "--output", output))
    assert (code, err) == (2, f"rudra: {output}: exists; give another name or --force\n")
    code, _, err = finish(start("run", job, "--resume"))
    assert code == 2
    assert "--resume needs a result file; use --output FILE.h5 or --resume FILE.h5" in err


def test_ranks_of_a_launcher_resume_a_strangers_run_only_if_it_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, output = job_file(tmp_path, "hardsync"), tmp_path / "out.h5"
    one, two, three = (["--set", f"training.epochs={epochs}"] for epochs in (1, 2, 3))
    few = ("--learners", "1", "--set", "training.minibatch_size=6")
    code, _, err = finish(start("run", job, "--output", output, *few, *one))
    assert code == 0, err
    code, _, err = mpirun(3, "resume", str(output), *two)
    assert code == 0, err
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "stranger"))
    code, _, err = mpirun(3, "resume", str(output), *three)
    assert code == 2
    (line,) = (line for line in err.splitlines() if line.startswith("rudra: "))
    names = "data.name = point_data:delayed, model.name = small_models:dropping"
    assert f"is not signed by you, and would execute {names}" in line
    code, _, err = mpirun(3, "resume", str(output), *three, "--trust")
    assert code == 0, err
    with rudra.open_results(output) as results:
        assert len(results.epochs) == 3
    assert replays(output)
