"""Every topology on real ranks: what comes out, that it can be repeated, and how it ends when something breaks."""

import itertools
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import point_data
import pretended_nodes
import pytest
import runs_on_ranks
import small_models
from processes import finish, gone, mpirun, ours, ranks_of, start, wait_for_updates

import rudra
from rudra.bench.ranks import on_ranks
from rudra.core.records import TIMES
from tests.selection import CAMPAIGN, covering, selected, together

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(600)]

RANKS = 7
TREE = {"name": "adv", "options": {"fan_out": 2}}
HIDDEN = {"name": "adv*", "options": {"fan_out": 2, "weight_fan_out": 1}}
TWO_GROUPS = {"name": "groups", "options": {"groups": 2}}
TOPOLOGIES: dict[str, tuple[dict[str, Any], int]] = {  # and how many learners are left of seven ranks
    "base": ({"name": "base"}, 5),
    "adv": (TREE, 3),
    "adv*": ({"name": "adv*"}, 5),
    "adv* with servers": (HIDDEN, 3),
    "one group": ({"name": "groups"}, 6),
    "one group and a server": ({"name": "groups", "options": {"parameter_server": True}}, 5),
    "two groups": (TWO_GROUPS, 5),
    "as many groups as learners": ({"name": "groups", "options": {"groups": 5}}, 5),
}
PROTOCOLS: dict[str, dict[str, Any]] = {
    "hardsync": {"name": "hardsync"},
    "1-softsync": {"name": "softsync"},
    "2-softsync": {"name": "softsync", "n": 2},
    "async": {"name": "async"},
}
PAIRS = [
    *itertools.product(["base", "adv", "two groups"], ["hardsync", "2-softsync", "async"]),
    *itertools.product(["adv*"], ["1-softsync", "async"]),
    ("adv* with servers", "2-softsync"),
    ("one group", "hardsync"),
    ("one group and a server", "async"),
    ("as many groups as learners", "async"),
]
"""Each topology with what it does otherwise; `tests/sim` has all pairs."""


def make_job(
    topology: dict[str, Any], protocol: dict[str, Any], model: Any = small_models.everything, **tables: Any
) -> rudra.Job:
    return rudra.Job(
        name="topologies",
        model={"name": model},
        data={"name": tables.pop("data", point_data.hasty)},
        training={"epochs": 2, "minibatch_size": 4, "seed": 3, **tables.pop("training", {})},
        optimizer={"learning_rate": 0.02, "momentum": 0.9},
        protocol={"reference_batch_size": 16, **protocol},
        topology=topology,
        cluster={"threads_per_rank": 1, **tables.pop("cluster", {})},
        **tables,
    )


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[tuple[str, str], Path]:
    """The result file of every pair; all of them run on the same ranks, one after the other."""
    directory = tmp_path_factory.mktemp("runs")
    pairs = selected(request, "pair") | {(topology, "hardsync") for topology in selected(request, "topology")}
    paths = {pair: directory / f"{place}.h5" for place, pair in enumerate(PAIRS) if pair in pairs}
    jobs = {str(path): make_job(TOPOLOGIES[pair[0]][0], PROTOCOLS[pair[1]]) for pair, path in paths.items()}
    on_ranks(runs_on_ranks.train_all, RANKS - 2, jobs=jobs)
    return paths


def accounts_for_every_gradient(results: rudra.Results) -> None:
    totals, gradients, learners = results.totals[0], results.gradients, results.learners
    assert results.status == "finished"
    assert totals["pushed"] == totals["applied"] + totals["discarded"] == learners["pushed"].sum()
    assert (totals["pending"], totals["lost"]) == (0, 0)
    assert totals["applied"] == len(gradients) == results.updates["gradients"].sum()
    assert (gradients["staleness"] >= 0).all()
    for learner in learners:
        mine = gradients[gradients["learner"] == learner["learner"]]
        assert np.array_equal(mine["step"], np.arange(len(mine))), "each is applied once, and in order"
        assert (np.diff(mine["timestamp"]) >= 0).all()
        for share in TIMES:
            assert learner[share] >= 0


COVERING = [
    ("base", "hardsync"),
    ("adv", "2-softsync"),
    ("two groups", "async"),
    ("adv*", "1-softsync"),
    ("adv* with servers", "2-softsync"),
    ("one group", "hardsync"),
    ("one group and a server", "async"),
]


@pytest.mark.parametrize("pair", covering(COVERING, PAIRS), ids=" ".join)
def test_every_pair_counts_right_and_is_repeated_bit_for_bit(
    recorded: dict[tuple[str, str], Path], pair: tuple[str, str]
) -> None:
    path = recorded[pair]
    with rudra.open_results(path) as results:
        summary = results.summary()
        assert summary["learners"] == TOPOLOGIES[pair[0]][1]
        accounts_for_every_gradient(results)
        assert results.attributes["driver"] == "mpi"
        assert len(summary["test_error"]) == 2
        if not pair[0].startswith("adv*"):
            assert (results.learners["pulls"] + results.learners["skipped_pulls"] <= results.learners["pushed"]).all()
        if pair[1] == "hardsync" or pair[0] == "one group":
            assert summary["max_staleness"] == 0
    replayed = rudra.replay(path, quiet=True)
    assert replayed.difference is None
    assert replayed.weights_sha256 == summary["weights_sha256"]
    assert replayed.updates == summary["updates"] > 10


@pytest.mark.parametrize("topology", covering(["base", "one group"], ["base", "adv", "one group", "two groups"]))
def test_hardsync_gives_the_same_bits_on_ranks_and_in_virtual_time(
    recorded: dict[tuple[str, str], Path], tmp_path: Path, topology: str
) -> None:
    about, learners = TOPOLOGIES[topology]
    job = make_job(about, PROTOCOLS["hardsync"], cluster={"learners": learners}, simulation={"latency_jitter_s": 0.5})
    with (
        rudra.open_results(recorded[topology, "hardsync"]) as run,
        rudra.simulate(job, output=tmp_path / "simulated.h5", progress="quiet") as simulated,
    ):
        measured, predicted = run.summary(), simulated.summary()
        assert np.array_equal(run.gradients["learner"], simulated.gradients["learner"])
    assert measured["initial_weights_sha256"] == predicted["initial_weights_sha256"]
    assert measured["weights_sha256"] == predicted["weights_sha256"] is not None
    assert measured["updates"] == predicted["updates"]
    assert measured["test_error"] == predicted["test_error"]


def test_learners_that_never_wait_compute_with_whole_weights(tmp_path: Path) -> None:
    """A gradient of weights that were half one version and half the next would be another one in the replay."""
    jobs = {
        str(tmp_path / f"{name}.h5"): make_job(
            {"name": "adv*", "options": options},
            PROTOCOLS["async"],
            small_models.broad,
            training={"epochs": 3},
        )
        for name, options in {"one hop": {}, "chain": {"weight_fan_out": 1}}.items()
    }
    on_ranks(runs_on_ranks.train_all, 3, jobs=jobs)
    for path in jobs:
        with rudra.open_results(path) as results:
            accounts_for_every_gradient(results)
            assert len(results.updates) == 180
            assert results.learners["pulls"].sum() > 50
            assert results.gradients["staleness"].max() > 2
            assert results.minibatches["wait_s"].max() == 0
            weights = results.summary()["weights_sha256"]
        replayed = rudra.replay(path, quiet=True)
        assert replayed.difference is None
        assert (replayed.updates, replayed.weights_sha256) == (180, weights)


AMONG_NODES = {
    "adv": ({"name": "adv"}, "async"),
    "adv*": ({"name": "adv*"}, "async"),
    "groups": (TWO_GROUPS, "async"),
    "hardsync": ({"name": "adv"}, "hardsync"),
}


@pytest.mark.parametrize("cases", together(["adv", "adv*", "groups"], AMONG_NODES))
def test_the_order_of_ranks_does_not_matter(tmp_path: Path, cases: list[str]) -> None:
    """Ranks of two nodes take turns; every role is on a rank of its node, and what comes out is what always does."""
    about = {case: AMONG_NODES[case] for case in cases}
    jobs = {str(tmp_path / f"{case}.h5"): make_job(of, PROTOCOLS[rule]) for case, (of, rule) in about.items()}
    on_ranks(pretended_nodes.train_among_two_nodes, 6, jobs=jobs)
    for path in map(Path, jobs):
        with rudra.open_results(path) as results:
            accounts_for_every_gradient(results)
            roles = results.roles
            bound = roles[roles["node"] >= 0]
            assert (bound["world_rank"] % 2 == bound["node"]).all()
            assert len(bound) >= (6 if path.stem in {"adv", "adv*"} else 0)
            learners = roles[roles["kind"] == b"learner"]
            assert list(learners["index"]) == list(range(len(learners)))
            assert set(learners["node"]) == {0, 1}
        assert rudra.replay(path, quiet=True).identical


def job_file(
    directory: Path, topology: str, options: str, *, model: str = "small_models:network", learners: int | None = 3
) -> str:
    path = directory / "job.toml"
    path.write_text(
        f'[model]\nname = "{model}"\n[data]\nname = "point_data:endless"\n'
        "[training]\nepochs = 1000\nminibatch_size = 4\n[cluster]\nthreads_per_rank = 1\n"
        + (f"learners = {learners}\n" if learners else "")
        + f'[results]\nflush_s = 0.1\nreport_s = 0.0\n[protocol]\nname = "async"\n'
        f'[topology]\nname = "{topology}"\noptions = {{{options}}}\n'
    )
    return str(path)


def test_a_thread_that_fails_ends_the_run_with_one_line(tmp_path: Path) -> None:
    """The user's model raises where a rank of adv* computes: in a thread of its own."""
    output = tmp_path / "out.h5"
    process = start("run", job_file(tmp_path, "adv*", "", model="faulty_models:raising"), "--output", str(output))
    returned, _, err = finish(process)
    assert returned == 1, err
    lines = ours(err)
    assert lines == ["rudra: learner 1 (rank 3) failed: ValueError: the user's own bug"], err
    assert err.count("Traceback") == 1
    assert "in forward" in err
    with rudra.open_results(output) as results:
        assert results.status == "failed"
        assert len(results.updates) > 10


def test_a_replica_that_owns_the_weights_and_is_killed_ends_the_run_before_a_stall(tmp_path: Path) -> None:
    output = tmp_path / "out.h5"
    process = start("run", job_file(tmp_path, "groups", "groups = 1"), "--output", str(output))
    pids: dict[int, int] = {}
    try:
        wait_for_updates(process, output, 21)
        pids = ranks_of(process)
        os.kill(pids[1], signal.SIGKILL)
    finally:
        returned, _, err = finish(process)
    assert returned == 1, err
    assert " has waited " not in err, "the death is noticed before anybody warns of a stall"
    lines = ours(err)
    who = "learner 0 (rank 1) died, and the run cannot continue without it"
    assert lines == [f"rudra: statistics server (rank 0): {who}"], err
    assert gone(list(pids.values()))


@pytest.mark.parametrize(
    "topologies",
    [
        pytest.param([HIDDEN, TWO_GROUPS], id="some"),
        pytest.param([HIDDEN, {"name": "adv*"}, TREE, {"name": "groups"}, TWO_GROUPS], id="all", marks=CAMPAIGN),
    ],
)
def test_threads_files_and_memory_are_given_back(tmp_path: Path, topologies: list[dict[str, Any]]) -> None:
    """Three rounds of starting and ending every kind of threads and communicators in the same processes."""
    rule = PROTOCOLS["async"]
    short = {"epochs": 1}
    jobs = [make_job(topology, rule, data=point_data.prompt, training=short) for topology in topologies]
    for figures in on_ranks(runs_on_ranks.left_behind, RANKS - 2, jobs=jobs, rounds=3):
        threads, files = figures["threads"], figures["files"]
        assert [named for named, _ in threads] == [2] * 3, "the main one, and that of the user's data"
        assert threads[1] == threads[-1], threads
        assert files[1] == files[-1], files
        assert figures["vectors"] == [0] * 3


def test_a_rank_too_many_is_said_and_does_no_harm(tmp_path: Path) -> None:
    job = Path(job_file(tmp_path, "adv", "fan_out = 2", learners=None))
    job.write_text(job.read_text().replace("endless", "prompt").replace("epochs = 1000", "epochs = 2"))
    output = tmp_path / "out.h5"
    code, _, err = mpirun(6, "run", str(job), "--output", str(output))
    assert code == 0, err
    (line,) = [line for line in err.splitlines() if line.startswith("rudra: ")]
    assert line.startswith("rudra: 1 of 6 ranks have no role: servers and learners cannot use exactly that many;")
    with rudra.open_results(output) as results:
        assert results.summary()["learners"] == 2
        accounts_for_every_gradient(results)
    assert rudra.replay(output, quiet=True).identical


def test_an_mpi_without_threads_is_refused_where_they_are_needed(tmp_path: Path) -> None:
    funneled = "import mpi4py; mpi4py.rc.thread_level = 'funneled'"
    job = job_file(tmp_path, "adv*", "", learners=2)
    code, _, err = mpirun(4, "run", job, "--output", str(tmp_path / "out.h5"), before=funneled)
    assert code == 2, err
    said = "[topology] name = 'adv*' is not supported without MPI_THREAD_MULTIPLE, which this MPI library"
    assert said in err
    assert "Traceback" not in err
