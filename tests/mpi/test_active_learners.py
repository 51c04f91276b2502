"""Learners that join and leave on real ranks: replayed, resumed, and killed while they are dormant."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest
import runs_on_ranks
from processes import below, finish, gone, ranks_of, replays, start, wait_for_updates

import rudra
from rudra.bench.ranks import on_ranks
from tests.selection import covering, together

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(600)]

JOINING = (
    "[[changes]]\nat_epoch = 1\ncluster.active_learners = 4\n[[changes]]\nat_epoch = 2\ncluster.active_learners = 3\n"
)
OFTEN = "[results]\nflush_s = 0.1\nreport_s = 0.02\n"


def job_file(directory: Path, name: str, protocol: str, more: str = "", changes: str = JOINING) -> Path:
    """Three epochs of digits; four learners, of which two begin."""
    path = directory / f"{name}.toml"
    path.write_text(
        '[model]\nname = "mlp"\n[data]\nname = "digits"\ntrain_limit = 320\n'
        "[training]\nepochs = 3\nminibatch_size = 8\nseed = 3\n[optimizer]\nlearning_rate = 0.05\nmomentum = 0.9\n"
        f'[protocol]\nname = "{protocol}"\n[cluster]\nlearners = 4\nactive_learners = 2\nthreads_per_rank = 1\n'
        f"{more}{changes}"
    )
    return path


FAMILIES = {
    "base": ("async", ""),
    "groups": ("async", '[topology]\nname = "groups"\noptions = { groups = 2 }\n'),
    "allreduce": ("hardsync", '[topology]\nname = "groups"\n'),
    "sma": ("sma", ""),
    "placed": ("hardsync", '[placement]\ncut = "2"\nrule = "synchronous"\n'),
}


@pytest.mark.parametrize("families", together(["base", "placed"], FAMILIES))
def test_learners_join_and_leave_in_each_family(tmp_path: Path, families: list[str]) -> None:
    """All on the same ranks. Synchronous ones reach the bits of virtual time, and all are replayed."""
    jobs = {
        str(tmp_path / f"{name}.h5"): rudra.Job.load(job_file(tmp_path, name, *FAMILIES[name])) for name in families
    }
    on_ranks(runs_on_ranks.train_as_needed, 5, jobs=jobs)
    for path, job in jobs.items():
        with rudra.open_results(path) as results:
            gradients, events, account = results.gradients, results.events, results.totals[0]
            grown, shrunk = events["timestamp"][events["kind"] == b"change"]
            for begin, end, learners in ((0, grown, 2), (grown, shrunk, 4), (shrunk, np.inf, 3)):
                here = gradients[(gradients["update"] > begin) & (gradients["update"] <= end)]
                assert set(here["learner"]) == set(range(learners))
            assert account["pushed"] == sum(account[key] for key in ("applied", "pending", "discarded", "lost"))
            digest = results.summary()["weights_sha256"]
        assert replays(Path(path))
        if job.protocol.name != "async":
            with rudra.simulate(job, output=Path(path).with_suffix(".virtual.h5"), progress="quiet") as virtual:
                assert virtual.summary()["weights_sha256"] == digest


def slowly(job: Path) -> Path:
    """The job with samples that take their time: whoever waits for an update holds it there."""
    job.write_text(
        job.read_text()
        .replace('name = "mlp"', 'name = "small_models:dropping"')
        .replace('name = "digits"\ntrain_limit = 320', 'name = "point_data:delayed"')
        .replace("minibatch_size = 8", "minibatch_size = 2")
    )
    return job


@pytest.mark.parametrize("stops", covering([(10,)], [(10,), (10, 70)]), ids=str)
def test_a_run_stopped_while_learners_are_dormant_is_resumed(tmp_path: Path, stops: tuple[int, ...]) -> None:
    """Before others joined, and after. It reaches the bits of a run that never stopped."""
    job = slowly(job_file(tmp_path, "job", "sma", OFTEN))
    output = tmp_path / "out.h5"
    for parts, update in enumerate(stops):  # others join after update 60
        process = start("run", job, "--output", output, "--resume")
        wait_for_updates(process, output, update, parts=parts)
        ranks = below(process.pid)
        process.send_signal(signal.SIGINT)
        code, _, err = finish(process)
        assert code == 3, err
        assert gone(ranks)
    code, _, err = finish(start("run", job, "--output", output, "--resume", "--quiet"))
    assert code == 0, err
    with rudra.simulate(rudra.Job.load(job), output=tmp_path / "whole.h5", progress="quiet") as whole:
        expected = whole.summary()
    with rudra.open_results(output) as results:
        assert results.summary()["weights_sha256"] == expected["weights_sha256"]
        assert len(results.updates) == expected["updates"]
    assert replays(output)


@pytest.mark.parametrize("name", ["base", "allreduce"])
def test_a_dormant_learner_takes_the_place_of_one_that_is_killed(tmp_path: Path, name: str) -> None:
    """Learner 2 is killed while it is dormant, then learner 1, whose place learner 3 takes."""
    _, more = FAMILIES[name]
    job = slowly(job_file(tmp_path, "job", "hardsync", more + OFTEN, changes=""))
    output, first = tmp_path / "out.h5", 2 if name == "base" else 1
    process = start("run", job, "--output", output)
    for learner, update in ((2, 10), (1, 50)):
        wait_for_updates(process, output, update)
        os.kill(ranks_of(process)[first + learner], signal.SIGKILL)
    code, _, err = finish(process)
    assert code == 0, err
    assert f"learner 2 (rank {first + 2}) died; 3 learners are left (2 active), which continue from update" in err
    assert f"learner 1 (rank {first + 1}) died; 2 learners are left, which continue from update" in err
    with rudra.open_results(output) as results:
        gradients, account = results.gradients, results.totals[0]
        assert set(gradients["learner"]) == {0, 1, 3}
        assert account["pushed"] == sum(account[key] for key in ("applied", "pending", "discarded", "lost"))
    assert name != "base" or replays(output)
