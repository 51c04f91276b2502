"""Averages of replicas on real ranks: the bits of virtual time, and what is left when ranks die or all are stopped."""

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
from processes import finish, ranks_of, replays, start, wait_for_deaths, wait_for_updates

import rudra
from rudra.bench.ranks import on_ranks
from tests.selection import CAMPAIGN, covering, selected, together

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(600)]

LEARNERS = 5
GROUPS = {"name": "replicas", "options": {"groups": 2}}
BLOCKS = {"name": "hierarchical", "options": {"blocks": 2}}

CASES: dict[str, dict[str, Any]] = {
    "sma": {"protocol": {"name": "sma"}, "optimizer": {"momentum": 0.9, "milestones": [1]}},
    "sma, period 2": {"protocol": {"name": "sma"}, "averaging": {"period": 2}},
    "easgd, by messages": {"protocol": {"name": "easgd"}, "cluster": {"node_memory": False}},
    "average, shares": {"protocol": {"name": "average"}, "averaging": {"period": 3}, "cluster": {"shares": True}},
    "diloco": {
        "protocol": {"name": "diloco"},
        "averaging": {"period": 4},
        "optimizer": {"name": "adamw", "learning_rate": 0.005},
    },
    "groups": {"protocol": {"name": "sma"}, "optimizer": {"momentum": 0.9, "milestones": [1]}, "topology": GROUPS},
    "groups, shares, by messages": {
        "protocol": {"name": "average"},
        "averaging": {"period": 3},
        "cluster": {"shares": True, "node_memory": False},
        "topology": GROUPS,
    },
    "blocks": {"protocol": {"name": "sma"}, "optimizer": {"momentum": 0.9, "milestones": [1]}, "topology": BLOCKS},
    "blocks, by messages": {
        "protocol": {"name": "easgd"},
        "averaging": {"period": 2},
        "cluster": {"node_memory": False},
        "topology": BLOCKS,
    },
}


def make_job(learners: int, **tables: dict[str, Any]) -> rudra.Job:
    cluster = {"learners": learners, "threads_per_rank": 1, **tables.pop("cluster", {})}
    if cluster.get("shares"):
        cluster["shares"] = range(2, learners + 2)
    return rudra.Job(
        model={"name": small_models.everything},
        data={"name": point_data.hasty},
        training={"epochs": 2, "minibatch_size": 4, "seed": learners},
        optimizer={"learning_rate": 0.02, **tables.pop("optimizer", {})},
        topology=tables.pop("topology", {"name": "replicas"}),
        cluster=cluster,
        **tables,
    )


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """The directory of the result files of the cases, which run on the same ranks, one after the other."""
    directory = tmp_path_factory.mktemp("averages")
    cases = selected(request, "case")
    jobs = {str(directory / f"{case}.h5"): make_job(LEARNERS, **CASES[case]) for case in CASES if case in cases}
    on_ranks(runs_on_ranks.train_all, LEARNERS - 1, jobs=jobs)  # and one less, for there is no server
    return directory


@pytest.mark.parametrize("case", covering(["sma", "easgd, by messages", "diloco", "groups", "blocks"], CASES))
def test_ranks_and_virtual_time_and_the_replay_have_the_same_bits(recorded: Path, tmp_path: Path, case: str) -> None:
    path, learners = recorded / f"{case}.h5", LEARNERS
    slow = {"latency_jitter_s": 0.5, "slowdown": {1: 3.0}}
    job = make_job(learners, **CASES[case]).with_(simulation=slow)
    with (
        rudra.open_results(path) as measured,
        rudra.simulate(job, output=tmp_path / "simulated.h5", progress="quiet") as simulated,
    ):
        assert measured.status == "finished"
        assert measured.state["weights_sha256"] == simulated.state["weights_sha256"] != ""
        assert np.array_equal(measured.averages, simulated.averages)
        assert np.array_equal(measured.gradients, simulated.gradients)
        assert len(measured.averages) == len(measured.updates) * learners == len(measured.gradients)
        assert (measured.averages["distance"][-learners:] > 0).all()
    assert rudra.replay(path, quiet=True).identical


def test_learners_of_a_block_may_share_a_rank(tmp_path: Path) -> None:
    """Of blocks of two and three: the ranks of before, and two learners on each of two."""
    shared = {"cluster": {"learners_per_rank": 2}, "protocol": {"name": "sma"}, "averaging": {"period": 2}}
    jobs = {str(tmp_path / f"{of['name']}.h5"): make_job(5, **shared, topology=of) for of in (GROUPS, BLOCKS)}
    on_ranks(runs_on_ranks.train_all, 2, jobs=jobs)
    for path, job in jobs.items():
        with (
            rudra.open_results(path) as measured,
            rudra.simulate(job, output=tmp_path / "simulated.h5", progress="quiet", force=True) as simulated,
        ):
            assert measured.state["weights_sha256"] == simulated.state["weights_sha256"] != ""


DAMPED = {"momentum": 0.9, "options": {"dampening": 0.1}}  # has no momentum before the first step
ALONE, PAIRS = [0, 0, 1, 2, 3], [0, 0, 0, 1, 1]  # node of the statistics server and of each learner
IN_BUCKETS: dict[str, tuple[list[int], dict[str, Any]]] = {
    "average": (ALONE, {"optimizer": {"momentum": 0.9, "schedule": "cosine", "warm_up": 0.5}}),
    "average, period 3, shares": (ALONE, {"averaging": {"period": 3}, "cluster": {"shares": True}}),
    "average, halfway, pairs": (PAIRS, {"averaging": {"elasticity": 0.5}, "optimizer": {"momentum": 0.9}}),
    "average, by nodes": (
        PAIRS,
        {"topology": {"name": "replicas", "options": {"reduction": "nodes"}}, "optimizer": DAMPED},
    ),
    "average, ranks of two": ([0, 0, 1], {"cluster": {"learners": 4, "learners_per_rank": 2}}),
    "diloco": (ALONE, {"protocol": {"name": "diloco"}, "averaging": {"period": 4}}),
    "diloco, adamw": (ALONE, {"protocol": {"name": "diloco"}, "optimizer": {"name": "adamw"}}),
}


@pytest.mark.parametrize("cases", together(["average, by nodes", "average, ranks of two", "diloco"], IN_BUCKETS))
def test_replicas_that_are_averaged_in_buckets_get_the_same_bits(tmp_path: Path, cases: list[str]) -> None:
    """A step begins with its gradient, at the end of a period."""
    jobs: dict[str, tuple[list[int], rudra.Job]] = {}
    for case in cases:
        nodes, tables = IN_BUCKETS[case]
        for buckets in (0.01, "off"):  # six of a gradient
            job = make_job(len(nodes) - 1, **{"protocol": {"name": "average"}, **tables})
            job = job.with_(cluster={"buckets": buckets}, training={"epochs": 1})
            jobs[str(tmp_path / f"{case}-{buckets}.h5")] = nodes, job
    told = on_ranks(pretended_nodes.train_replicas_on_nodes, len(ALONE) - 2, jobs=jobs)
    for case in cases:
        nodes, _ = IN_BUCKETS[case]
        paths = [str(tmp_path / f"{case}-{buckets}.h5") for buckets in (0.01, "off")]
        with rudra.open_results(paths[0]) as cut, rudra.open_results(paths[1]) as whole:
            assert cut.status == whole.status == "finished"
            assert cut.state["weights_sha256"] == whole.state["weights_sha256"] != ""
            assert np.array_equal(cut.averages, whole.averages)
            steps = (len(cut.updates) - ("by nodes" in case)) * (1 + ("ranks of two" in case))  # of a rank
        early = [[rank["early"][path] for path in paths] for rank in told[1 : len(nodes)]]
        assert early == [[steps, 0]] * (len(nodes) - 1)
        assert rudra.replay(paths[0], quiet=True).identical


SHAPES = {
    "replicas": 'name = "replicas"',
    "groups": 'name = "replicas"\noptions.groups = 2',
    "blocks": 'name = "hierarchical"\noptions.blocks = 2',
}


def job_file(directory: Path, protocol: str, more: str = "", shape: str = "replicas", epochs: int = 2) -> Path:
    """Epochs of thirty updates; the rate drops before the last one."""
    path = directory / "job.toml"
    path.write_text(
        '[model]\nname = "small_models:dropping"\n[data]\nname = "point_data:delayed"\n'
        f"[training]\nepochs = {epochs}\nminibatch_size = 2\nseed = 7\n"
        f"[optimizer]\nlearning_rate = 0.05\nmomentum = 0.9\nmilestones = [{epochs - 1}]\n"
        f'[protocol]\nname = "{protocol}"\n[topology]\n{SHAPES[shape]}\n'
        f"[cluster]\nlearners = 4\nthreads_per_rank = 1\n[results]\nflush_s = 0.1\nreport_s = 0.0\n{more}"
    )
    return path


KILLED, STOPPED = (signal.SIGKILL, 20), (signal.SIGTERM, 60)


@pytest.mark.parametrize(
    ("protocol", "shape", "hits"),
    [
        ("sma", "groups", [KILLED]),
        pytest.param("sma", "groups", [KILLED, STOPPED], marks=CAMPAIGN),
        pytest.param("average", "replicas", [KILLED, STOPPED], marks=CAMPAIGN),
        pytest.param("sma", "blocks", [KILLED, STOPPED], marks=CAMPAIGN),
    ],
)
def test_a_run_that_is_killed_and_stopped_reaches_the_bits_of_one_that_went_on(
    tmp_path: Path, protocol: str, shape: str, hits: list[tuple[signal.Signals, int]]
) -> None:
    """A checkpoint has all replicas, of the same mini-batch, also where averages are made beside computing."""
    epochs = 2 + len(hits)  # ranks go on for a while when their launcher is dead
    job = job_file(tmp_path, protocol, 'checkpoint_every = "7 updates"\n', shape, epochs)
    output = tmp_path / "out.h5"
    for parts, (number, update) in enumerate(hits):
        process = start("run", job, "--output", output, "--resume")
        wait_for_updates(process, output, update, parts=parts, kept=True)
        process.send_signal(number)
        code, _, err = finish(process)
        assert code == (-9 if number == signal.SIGKILL else 3), err
    code, _, err = finish(start("resume", output, "--set", f"training.epochs={epochs + 1}"))
    assert code == 0, err
    longer = rudra.Job.load(job, [f"training.epochs={epochs + 1}"])
    with (
        rudra.simulate(longer, output=tmp_path / "whole.h5", progress="quiet") as whole,
        rudra.open_results(output) as results,
    ):
        assert results.state["weights_sha256"] == whole.state["weights_sha256"] != ""
        assert np.array_equal(results.averages, whole.averages)
        kinds = results.events["kind"].tolist()
        assert kinds.count(b"restart") == len(hits)
        assert kinds.count(b"averaging") == (protocol == "sma")
    assert replays(output)


def without_rank_4(directory: Path, protocol: str, *options: str, shape: str = "replicas") -> tuple[Path, str]:
    """A run of which a rank is killed: its result file, and what it said."""
    job, output = job_file(directory, protocol, shape=shape), directory / "out.h5"
    process = start("run", job, "--output", output, *options)
    wait_for_updates(process, output, 20)
    os.kill(ranks_of(process)[4], signal.SIGKILL)
    wait_for_deaths(process, output)
    code, _, err = finish(process)
    assert code == 0, err
    return output, err


@pytest.mark.parametrize(
    ("protocol", "shape", "buckets"),
    [
        ("average", "replicas", 0.001),
        ("sma", "blocks", "auto"),
        pytest.param("sma", "replicas", "auto", marks=CAMPAIGN),
        pytest.param("average", "groups", "auto", marks=CAMPAIGN),
    ],
)
def test_where_a_replica_dies_the_others_go_on_from_the_weights(
    tmp_path: Path, protocol: str, shape: str, buckets: str | float
) -> None:
    output, err = without_rank_4(tmp_path, protocol, "--set", f"cluster.buckets={buckets}", shape=shape)
    assert "learner 3 (rank 4) died; 3 learners are left, which continue from update " in err
    with rudra.open_results(output) as results:
        (lost,) = results.events[results.events["kind"] == b"lost"]
        after = results.averages[results.averages["timestamp"] > lost["timestamp"] + 1]
        assert set(after["learner"]) == {0, 1, 2}
        first = results.averages[results.averages["timestamp"] == lost["timestamp"] + 1]
        assert (first["distance"] == 0).all() == (protocol == "sma")  # an early difference is of before the step
        assert np.isfinite(results.summary()["final_test_error"])
        assert results.summary()["pushed"] == results.summary()["applied"]
    assert replays(output)


def test_replicas_that_exchange_with_a_server_are_repeated_also_without_one_of_them(tmp_path: Path) -> None:
    served = ("--set", "topology.options.parameter_server=true", "--set", "averaging.period=2")
    output, err = without_rank_4(tmp_path, "easgd", *served)
    assert "learner 2 (rank 4) died; 3 learners are left" in err
    with rudra.open_results(output) as results:
        (lost,) = results.events[results.events["kind"] == b"lost"]
        after = results.gradients[results.gradients["update"] > lost["timestamp"] + 1]
        assert set(after["learner"]) == {0, 1, 3}
        assert set(results.averages["learner"]) == {0, 1, 2, 3}
        assert (results.averages["distance"] > 0).all()
        assert np.isfinite(results.summary()["final_test_error"])
    assert replays(output)
