"""Layers with a stage server, on real ranks: the bits of virtual time, resumed, and with ranks that die."""

import os
import signal
from pathlib import Path

import faulty_models
import numpy as np
import pytest
from job_files import SGD
from job_files import restartable_job as job_file
from job_files import short_job as dying_job
from processes import finish, mpirun, ranks_of, replays, run_until, start, updates, wait_for_deaths, wait_for_updates

import rudra
from tests.selection import CAMPAIGN, covering

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(300)]

SYNCHRONOUS = '[placement]\ncut = 3\nrule = "synchronous"\n'


@pytest.mark.parametrize(
    ("topology", "servers", "hits"),
    [
        ("base", 2, [signal.SIGKILL]),
        pytest.param("groups", 1, [signal.SIGKILL], marks=CAMPAIGN),
        pytest.param("sharded", 1, [signal.SIGTERM], marks=CAMPAIGN),
    ],
    ids=["base", "groups", "sharded"],
)
def test_synchronous_layers_killed_and_stopped_reach_the_bits_of_learners_that_have_them_all(
    tmp_path: Path, topology: str, servers: int, hits: list[signal.Signals]
) -> None:
    """BatchNorm and dropout are on both sides; learners exchange by one server, by allreduce, and by two.

    With two stage servers, gradients are clipped, too.
    """
    clips = "" if servers == 1 else "clip_norm = 0.5\n"
    placed = f'{SYNCHRONOUS}servers = {servers}\n[topology]\nname = "{topology}"\n'
    job, output = job_file(tmp_path, "hardsync", SGD + clips, placed, epochs=2), tmp_path / "out.h5"
    job.write_text(job.read_text().replace("small_models:dropping", "small_models:normed"))
    for number in hits:
        code, err = run_until(job, output, updates(output) + 20, number)
        assert code == (-9 if number == signal.SIGKILL else 3), err
    code, _, err = finish(start("run", job, "--output", output, "--resume"))
    assert code == 0, err
    whole = rudra.Job.load(job, ["placement.cut="])
    with rudra.simulate(whole, output=tmp_path / "whole.h5", progress="quiet") as results:
        expected, digests = results.summary(), results.updates["digest"]
    with rudra.open_results(output) as results:
        found = results.summary()
        assert found["weights_sha256"] == expected["weights_sha256"] is not None
        assert np.array_equal(results.updates["digest"], digests)
        assert found["train_loss"] == expected["train_loss"]
        assert len(results.stages) == len(results.gradients)
        assert not results.stages["staleness"].any()
        assert results.events["kind"].tolist().count(b"restart") == len(hits)
    assert replays(output)


def test_a_step_sends_the_activations_and_the_first_layers_of_each_learner_and_back_to_the_byte(tmp_path: Path) -> None:
    """2 W (O + P), as ralp.txt §4.3 counts: three learners, mini-batches of two, nine numbers cross, 189 in front."""
    told = tmp_path / "told"
    told.mkdir()
    job, output = job_file(tmp_path, "hardsync", more=SYNCHRONOUS.replace("3", "1"), epochs=1), tmp_path / "out.h5"
    text = job.read_text().replace("small_models:dropping", "small_models:counted")
    options = f'options.told = "{told}"\n[data]'
    job.write_text(text.replace("[data]", options, 1))
    code, _, err = finish(start("run", job, "--output", output))
    assert code == 0, err
    sent = [line.split() for file in told.iterdir() for line in file.read_text().splitlines()]
    with rudra.open_results(output) as results:
        steps, told_bytes = len(results.updates), results.attributes["step_bytes"]
    tensors = {kind: sum(int(floats) for each, floats in sent if each == kind) for kind, _ in sent}
    front, crossing = 4 * (20 + 1) * 9, 4 * 2 * 9
    for kind in ("SNAPSHOT", "WEIGHTS_PART"):  # of tests and of the end: of no step
        tensors.pop(kind, None)
    assert tensors == {
        "WEIGHTS": steps * 3 * front,
        "GRADIENT": steps * 3 * front,
        "ACTIVATIONS": steps * 3 * crossing,
        "ACTIVATION_GRADIENT": steps * 3 * crossing,
    }
    assert sum(tensors.values()) == steps * 2 * 3 * (front + crossing) == steps * told_bytes


BY_RULE = '[placement]\ncut = "ralp"\nrule = "synchronous"\n'


def test_a_rule_chooses_once_and_what_goes_on_asks_it_no_more(tmp_path: Path) -> None:
    job, output = job_file(tmp_path, "hardsync", more=BY_RULE, epochs=2), tmp_path / "out.h5"
    job.write_text(job.read_text().replace("small_models:dropping", "small_models:skewed"))
    code, err = run_until(job, output, 20, signal.SIGTERM)
    assert code == 3, err
    assert err.count("[placement] cut = 'ralp' chooses '1': it sends least") == 1
    code, _, err = finish(start("run", job, "--output", output, "--resume"))
    assert code == 0, err
    assert "[placement] cut" not in err
    named = rudra.Job.load(job, ["placement.cut=1"])
    with rudra.simulate(named, output=tmp_path / "named.h5", progress="quiet") as results:
        expected = results.summary()["weights_sha256"]
    with rudra.open_results(output) as results:
        assert results.job["placement"]["cut"] == "1"
        assert results.summary()["weights_sha256"] == expected is not None
        assert len(results.stages) == len(results.gradients)
    assert replays(output)


@pytest.mark.parametrize(("model", "cut"), [pytest.param("skewed", "1", marks=CAMPAIGN), ("dropping", None)])
def test_under_mpirun_one_rank_chooses_and_none_is_refused_where_nothing_is_placed(
    tmp_path: Path, model: str, cut: str | None
) -> None:
    job, output = job_file(tmp_path, "hardsync", more=BY_RULE, epochs=1), tmp_path / "out.h5"
    job.write_text(job.read_text().replace("small_models:dropping", f"small_models:{model}"))
    code, _, err = mpirun(6, "run", str(job), "--output", str(output))
    assert code == 0, err
    assert err.count("[placement] cut = 'ralp'") == 1
    assert ("1 of 6 ranks have no role" in err) == (cut is None)
    with rudra.open_results(output) as results:
        assert results.job["placement"]["cut"] == cut
        assert results.summary()["learners"] == 3
    assert replays(output)


def test_merged_layers_replay_and_outlive_a_learner(tmp_path: Path) -> None:
    own = "cut = 1\nlearning_rate = 0.02\nmomentum = 0.5"
    job, output = dying_job(tmp_path, "async", "faulty_models:dying_front", placement=own), tmp_path / "out.h5"
    process = start("run", job, "--output", output)
    wait_for_deaths(process, output, steps=faulty_models.DIES_AFTER)
    code, _, err = finish(process)
    assert code == 0, err
    assert "learner 1 (rank 3) died; 2 learners are left" in err
    with rudra.open_results(output) as results:
        assert results.status == "finished"
        stages, gradients = results.stages, results.gradients
        assert not stages["staleness"].any()
        assert gradients["staleness"].any()
        assert np.array_equal(stages["timestamp"], np.arange(1, len(stages) + 1))
        assert {*stages["learner"]} == {0, 1, 2}
        assert results.summary()["final_test_error"] < 0.3
        totals = results.totals[0]
        assert totals["pushed"] == sum(totals[name] for name in ("applied", "pending", "discarded", "lost"))
    assert replays(output)


@pytest.mark.parametrize(
    ("protocol", "rule", "options", "who"),
    [
        ("async", "merged", "options.groups = 2", "learner 1"),
        pytest.param("hardsync", "synchronous", "", "learner 2", marks=CAMPAIGN),
    ],
    ids=["groups", "allreduce"],
)
def test_groups_go_on_without_a_learner_that_dies(
    tmp_path: Path, protocol: str, rule: str, options: str, who: str
) -> None:
    """All others begin anew, but for the stage server, which goes on with its weights and clock."""
    topology = f'name = "groups"\n{options}'
    job = dying_job(
        tmp_path, protocol, "faulty_models:dying_front", placement=f'cut = 1\nrule = "{rule}"', topology=topology
    )
    output = tmp_path / "out.h5"
    process = start("run", job, "--output", output)
    wait_for_deaths(process, output, steps=faulty_models.DIES_AFTER)
    code, _, err = finish(process)
    assert code == 0, err
    assert f"{who} (rank 3) died; 2 learners are left, which continue from update" in err
    with rudra.open_results(output) as results:
        assert results.status == "finished"
        assert not results.stages["staleness"].any()
        taken = {(row["learner"], row["step"]) for row in results.stages}
        assert taken >= {(row["learner"], row["step"]) for row in results.gradients}
        assert results.summary()["final_test_error"] < 0.3
    assert replays(output)


def test_learners_of_a_tree_that_overlap_cross_to_a_stage_server_and_replay(tmp_path: Path) -> None:
    """A server of the tree dies; those that are left begin anew."""
    job = dying_job(
        tmp_path, "async", placement="cut = 1", topology='name = "adv*"\noptions.fan_out = 2', results="report_s = 0.05"
    )
    job.write_text(job.read_text().replace("report_s = 0.0\n", ""))
    output = tmp_path / "out.h5"
    process = start("run", job, "--output", output)
    wait_for_updates(process, output, 20)
    with rudra.open_results(output) as results:
        (server, *_) = [role for role in results.roles if role["kind"] == b"tree server"]
    os.kill(ranks_of(process)[server["world_rank"]], signal.SIGKILL)
    wait_for_deaths(process, output)
    code, _, err = finish(process)
    assert code == 0, err
    assert "tree server 0 (rank 2) died; 3 learners are left, which continue from update" in err
    with rudra.open_results(output) as results:
        assert results.status == "finished"
        assert not results.stages["staleness"].any()
    assert replays(output)


@pytest.mark.parametrize("servers", covering([2], [1, 2]))
def test_a_stage_server_that_dies_ends_the_run_which_goes_on_from_its_checkpoint(tmp_path: Path, servers: int) -> None:
    """One of two, too, where learners share a rank and have unlike shares of a batch."""
    several = f'rule = "synchronous"\nservers = {servers}\n' if servers > 1 else ""
    placed = f"[placement]\ncut = 1\n{several}"
    job = job_file(tmp_path, "hardsync" if several else "softsync", more=placed, epochs=2)
    if several:
        shared = "threads_per_rank = 1\nlearners_per_rank = 2\nshares = [1, 2, 2]\n"
        job.write_text(job.read_text().replace("threads_per_rank = 1\n", shared).replace("size = 2", "size = 4"))
    output = tmp_path / "out.h5"
    process = start("run", job, "--output", output)
    wait_for_updates(process, output, 20)
    os.kill(ranks_of(process)[5], signal.SIGKILL)
    code, _, err = finish(process)
    assert code == 1, err
    assert f"stage {'replica 1' if several else 'server'} (rank 5) died" in err
    assert output.with_suffix(".ckpt").exists()
    code, _, err = finish(start("resume", output))
    assert code == 0, err
    with rudra.open_results(output) as results:
        keys = {(row["learner"], row["step"]) for row in results.stages}
        assert len(keys) == len(results.stages), "what is done again is recorded once"
        assert keys >= {(row["learner"], row["step"]) for row in results.gradients}
        found = results.summary()["weights_sha256"]
    assert replays(output)
    if several:
        whole = rudra.Job.load(job, ["placement.cut="])
        with rudra.simulate(whole, output=tmp_path / "whole.h5", progress="quiet") as results:
            assert results.summary()["weights_sha256"] == found
