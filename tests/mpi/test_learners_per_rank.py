"""Several learners on a rank, on real ranks: the same bits, what is asynchronous, and what dies with a rank."""

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import point_data
import pytest
import runs_on_ranks
import small_models
from job_files import short_job as job_file
from processes import finish, mpirun, ours, ranks_of, replays, start, wait_for_deaths, wait_for_updates

import rudra
from rudra.bench.ranks import on_ranks
from tests.selection import CAMPAIGN, covering, selected

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(600)]

LEARNERS = 6
TOPOLOGIES: dict[str, dict[str, Any]] = {
    "base": {"name": "base"},
    "one group": {"name": "groups"},
    "one group and a server": {"name": "groups", "options": {"parameter_server": True}},
    "two groups": {"name": "groups", "options": {"groups": 2}},
}


def make_job(
    topology: dict[str, Any],
    protocol: str,
    per_rank: int,
    model: Any = small_models.everything,
    data: Any = point_data.hasty,
) -> rudra.Job:
    return rudra.Job(
        name="shared",
        model={"name": model},
        data={"name": data},
        training={"epochs": 1, "minibatch_size": 4, "seed": 3},
        optimizer={"learning_rate": 0.02, "momentum": 0.9},
        protocol={"name": protocol, "reference_batch_size": 16},
        topology=topology,
        cluster={"learners": LEARNERS, "threads_per_rank": 1, "learners_per_rank": per_rank},
        fault_tolerance={"stall_limit_s": 60.0},
    )


ASYNCHRONOUS: dict[str, tuple[str, dict[str, Any]]] = {
    "base": ("softsync", {"name": "base"}),
    "adv": ("async", {"name": "adv", "options": {"fan_out": 2}}),
    "adv*": ("async", {"name": "adv*"}),
    "groups": ("async", {"name": "groups", "options": {"groups": 2}}),
    "groups by mpi": ("async", {"name": "groups", "options": {"groups": 2, "reduction": "mpi"}}),
}
TOGETHER: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "server": ("hardsync", {"name": "base"}, {}),
    "stale": ("async", {"name": "base"}, {"cluster": {"gradient_format": "float16"}}),
    "shards": ("softsync", {"name": "sharded", "options": {"shards": 2}}, {"protocol": {"n": 3}}),
    "tree": ("softsync", {"name": "adv", "options": {"fan_out": 2}}, {"protocol": {"n": 2}}),
    "one group": ("hardsync", {"name": "groups"}, {}),
    "two groups": ("async", {"name": "groups", "options": {"groups": 2}}, {}),
    "replicas": ("sma", {"name": "replicas"}, {}),
    "changed": ("softsync", {"name": "base"}, {"changes": [{"at_update": 4, "protocol": {"name": "hardsync"}}]}),
}
"""Runs on one rank: protocol, topology, other tables."""


def together(name: str) -> rudra.Job:
    protocol, topology, tables = TOGETHER[name]
    job = make_job(topology, protocol, 1, small_models.broad)
    return job.with_(**tables).with_(cluster={"learners": 4, "one_rank": True})


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[tuple[str, Any], Path]:
    """Result files of one launch: hardsync by topology and learners on a rank, asynchronous runs, runs on one rank."""
    topologies, names = selected(request, "topology"), selected(request, "name")
    runs: dict[tuple[str, Any], rudra.Job] = {
        (name, per_rank): make_job(topology, "hardsync", per_rank)
        for name, topology in TOPOLOGIES.items()
        if name in topologies
        for per_rank in (1, 2, 3)
    }
    for name, (protocol, topology) in ASYNCHRONOUS.items():
        if name in names:
            runs["asynchronous", name] = make_job(topology, protocol, 3, small_models.broad, point_data.delayed)
    runs |= {("together", name): together(name) for name in TOGETHER}
    directory = tmp_path_factory.mktemp("runs")
    paths = {case: directory / f"{place}.h5" for place, case in enumerate(runs)}
    on_ranks(runs_on_ranks.train_as_needed, LEARNERS + 1, jobs={str(paths[case]): job for case, job in runs.items()})
    return paths


@pytest.mark.parametrize("topology", covering(["base", "two groups"], TOPOLOGIES))
def test_hardsync_gives_the_same_bits_however_many_learners_share_a_rank(
    recorded: dict[tuple[str, Any], Path], topology: str
) -> None:
    """Mini-batches are delayed at random, so learners of a rank have their turns in any order."""
    digests = set()
    for per_rank in (1, 2, 3):
        path = recorded[topology, per_rank]
        with rudra.open_results(path) as results:
            learners = results.roles[results.roles["kind"] == b"learner"]
            counts = np.bincount(learners["world_rank"])
            assert list(learners["index"]) == list(range(LEARNERS))
            assert counts.max() == per_rank
            assert (counts > 0).sum() == {1: 6, 2: 4 if topology == "two groups" else 3, 3: 2}[per_rank]
            assert np.array_equal(results.learners["world_rank"], learners["world_rank"])
            assert list(results.learners["pushed"]) == [10] * LEARNERS
            assert not results.gradients["staleness"].any()
            digests.add(results.summary()["weights_sha256"])
        assert replays(path)
    assert len(digests) == 1
    assert None not in digests


@pytest.mark.parametrize("name", covering(["base", "adv*", "groups by mpi"], ASYNCHRONOUS))
def test_asynchronous_runs_of_ranks_with_several_learners_count_right_and_are_replayed(
    recorded: dict[tuple[str, Any], Path], name: str
) -> None:
    """Of a third of a megabyte, tensors of several learners of a rank are under way at once, in pieces."""
    path = recorded["asynchronous", name]
    with rudra.open_results(path) as results:
        totals, gradients = results.totals[0], results.gradients
        assert totals["pushed"] == totals["applied"] + totals["discarded"] == results.learners["pushed"].sum()
        for learner in range(LEARNERS):
            mine = gradients[gradients["learner"] == learner]
            assert list(mine["step"]) == list(range(len(mine)))
        where = results.learners["world_rank"]
        counts = np.bincount(gradients["learner"], minlength=LEARNERS)
        busiest = counts[where == np.bincount(where, counts).argmax()]  # a rank may get no core for a while
        assert busiest.min() >= busiest.mean() / 2, "all have their turn"
    if name != "groups by mpi":  # whose allreduce adds as it likes
        assert replays(path)


@pytest.mark.parametrize("name", TOGETHER)
def test_a_run_on_one_rank_is_replayed(recorded: dict[tuple[str, Any], Path], name: str) -> None:
    path = recorded["together", name]
    with rudra.open_results(path) as results:
        assert set(results.roles["world_rank"]) == {0}
        assert results.learners["pushed"].sum() == 60
        assert len(results.updates) >= 10
    assert replays(path)


@pytest.mark.parametrize("name", ["server", "one group", "replicas"])
def test_a_synchronous_run_on_one_rank_is_the_simulated_one(
    recorded: dict[tuple[str, Any], Path], tmp_path: Path, name: str
) -> None:
    with rudra.open_results(recorded["together", name]) as results:
        digest = results.summary()["weights_sha256"]
    for one_rank in (True, False):
        job = together(name).with_(cluster={"one_rank": one_rank})
        with rudra.simulate(job, output=tmp_path / f"{one_rank}.h5", progress="quiet") as results:
            assert results.summary()["weights_sha256"] == digest


@pytest.mark.parametrize(
    ("protocol", "topology", "rank", "dead"),
    [
        pytest.param("softsync", 'name = "base"', 2, [0, 1], marks=CAMPAIGN),
        ("async", 'name = "groups"\noptions.groups = 2', 2, [0, 1]),  # one of them pushed for its group
        ("hardsync", 'name = "groups"', 3, [4, 5]),
    ],
)
def test_a_rank_that_is_killed_takes_its_learners_along(
    tmp_path: Path, protocol: str, topology: str, rank: int, dead: list[int]
) -> None:
    job, output = job_file(tmp_path, protocol, epochs=4, topology=topology), tmp_path / "out.h5"
    more = ["cluster.learners=6", "cluster.learners_per_rank=2", "cluster.threads_per_rank=1"]
    process = start("run", job, "--output", output, *(word for key in more for word in ("--set", key)))
    wait_for_updates(process, output, 10)
    os.kill(ranks_of(process)[rank], signal.SIGKILL)
    wait_for_deaths(process, output, len(dead))
    code, _, err = finish(process)
    assert code == 0, err
    lines = ours(err)
    assert all(f"learner {learner} (rank {rank})" in " ".join(lines) for learner in dead), err
    assert "4 learners are left" in lines[-1]
    with rudra.open_results(output) as results:
        assert results.status == "finished"
        lost = results.events[results.events["kind"] == b"lost"]
        roles = results.roles[lost["role"]]
        assert sorted(roles["index"]) == dead
        assert set(roles["world_rank"]) == {rank}
        totals, gradients = results.totals[0], results.gradients
        assert totals["pushed"] == sum(totals[name] for name in ("applied", "pending", "discarded", "lost"))
        for learner in range(LEARNERS):
            mine = gradients[gradients["learner"] == learner]
            assert list(mine["step"]) == list(range(len(mine))), "none twice, and none left out"
            assert (mine["update"].max() > lost["timestamp"].max() + 2) == (learner not in dead)
        assert protocol != "hardsync" or not gradients["staleness"].any()
    assert replays(output)


def test_ranks_host_as_many_learners_as_the_job_allows_and_a_run_goes_on_with_others(tmp_path: Path) -> None:
    """Five ranks host six learners; training goes on with one on each of eight."""
    job, output = job_file(tmp_path, "hardsync", epochs=1), tmp_path / "out.h5"
    job.write_text(job.read_text().replace("learners = 3", "learners_per_rank = 2\nthreads_per_rank = 1"))
    code, _, err = mpirun(5, "run", str(job), "--output", str(output))
    assert code == 0, err
    with rudra.open_results(output) as results:
        assert len(set(results.roles["world_rank"])) == 5
        assert results.summary()["learners"] == LEARNERS
    longer = ["training.epochs=2", "cluster.learners_per_rank=1"]
    code, _, err = mpirun(8, "resume", str(output), *(word for key in longer for word in ("--set", key)))
    assert code == 0, err
    whole = rudra.Job.load(job, [*longer, f"cluster.learners={LEARNERS}"])
    with rudra.simulate(whole, output=tmp_path / "whole.h5", progress="quiet") as expected:
        digest = expected.summary()["weights_sha256"]
    with rudra.open_results(output) as results:
        assert len(set(results.roles["world_rank"])) == 8
        assert results.summary()["weights_sha256"] == digest is not None
    assert replays(output)


def test_a_launch_of_too_few_ranks_names_the_right_number(tmp_path: Path) -> None:
    job = job_file(tmp_path, "hardsync")
    more = ["--set", "cluster.learners=8", "--set", "cluster.learners_per_rank=2"]
    code, _, err = mpirun(5, "run", str(job), "--output", str(tmp_path / "out.h5"), *more)
    assert code == 2, err
    remedy = "start 6, or set cluster.learners = 6"
    assert ours(err) == [f"rudra: 8 learners with topology base need 6 ranks, but the launcher started 5; {remedy}"]
