"""`cluster.shares = "auto"` on real ranks: what is measured, what follows, and that it leaves no trace."""

import json
import re
import signal
from pathlib import Path

import numpy as np
import pytest
from processes import finish, replays, start, wait_for_updates

import rudra

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(600)]

JOB = """
[model]
name = "small_models:dropping"
[data]
name = "point_data:uneven"
[training]
epochs = 4
minibatch_size = 8
seed = 7
evaluate = false
[optimizer]
learning_rate = 0.05
momentum = 0.9
[protocol]
name = "hardsync"
[topology]
name = "{}"
[cluster]
learners = 2
threads_per_rank = 1
shares = "auto"
[results]
flush_s = 0.2
report_s = 0.05
checkpoint_every = "3 updates"
"""


def test_shares_are_measured_once_and_kept(tmp_path: Path) -> None:
    """The learner on rank 2 takes three times as long for a sample."""
    job, output = tmp_path / "job.toml", tmp_path / "out.h5"
    job.write_text(JOB.format("groups"))
    process = start("run", job, "--output", output, "--resume")
    wait_for_updates(process, output, 7)
    process.send_signal(signal.SIGINT)
    code, _, first = finish(process)
    assert code == 3, first
    with rudra.open_results(output) as results:
        shares = results.job["cluster"]["shares"]
    fast, slow = 0, 1
    assert shares[slow] == 1.0
    assert 1.5 < shares[fast] < 4.5
    told = re.findall(r"rudra: job: when all compute, learners take .* ms for 8 samples, .* shares are (.*)", first)
    assert told == [", ".join(f"{share:.3g}" for share in shares)]

    code, _, second = finish(start("run", job, "--output", output, "--resume"))
    assert code == 0, second
    assert "when all compute" not in second
    with rudra.open_results(output) as results:
        assert results.job["cluster"]["shares"] == shares
        rows, sha256 = results.gradients, results.summary()["weights_sha256"]
        assert (results.events["kind"] == b"restart").sum() == 1
    own = np.sort(rows, order="first")
    assert (own["first"][1:] == own["first"][:-1] + own["samples"][:-1]).all(), "each sample of a pass once"
    assert rows["samples"][rows["learner"] == fast].min() > rows["samples"][rows["learner"] == slow].max()
    assert replays(output)
    assert rudra.replay(output, job=rudra.Job.load(job), quiet=True).identical

    given = rudra.Job.load(job, [f"cluster.shares={json.dumps(shares)}"])
    with rudra.simulate(given, output=tmp_path / "given.h5", progress="quiet") as results:
        assert results.summary()["weights_sha256"] == sha256, "as if nothing had been measured"


def test_another_job_than_that_of_the_checkpoint_is_refused(tmp_path: Path) -> None:
    """Shares that were measured are no streams of their own."""
    job, output = tmp_path / "job.toml", tmp_path / "out.h5"
    job.write_text(JOB.format("groups").replace('shares = "auto"\n', ""))
    assert finish(start("run", job, "--output", output, "--set", "training.epochs=1"))[0] == 0
    job.write_text(JOB.format("groups"))
    code, _, err = finish(start("run", job, "--output", output, "--resume"))
    assert code == 2, err
    assert "belongs to another job: cluster.shares was [], but is auto now" in err
