"""Runs on real ranks, repeated in this process from what they recorded, to the same bits."""

import itertools
import time
from pathlib import Path
from typing import Any

import faulty_models
import numpy as np
import parts_on_ranks
import point_data
import pretended_nodes
import pytest
import runs_on_ranks
import small_models
from traces import check_trace

import rudra
from rudra.bench.ranks import on_ranks
from rudra.cli.main import main
from rudra.errors import RudraError
from tests.selection import covering, selected, together

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(600)]

SGD = {"name": "sgd", "learning_rate": 0.02, "momentum": 0.9}
ADAGRAD = {"name": "adagrad", "learning_rate": 0.02}
OWN = {
    "milestones": [],
    "schedule": "cosine",
    "warm_up": 0.7,
    "clip_norm": 0.5,
    "groups": [{"parameters": "*.bias", "rate_factor": 2.0}],
}
LEARNERS = 3
CASES: dict[str, dict[str, Any]] = {
    "async-momentum": {"protocol": {"name": "async"}, "optimizer": SGD},
    "async-adagrad": {"protocol": {"name": "async"}, "optimizer": ADAGRAD},
    "1-softsync-momentum": {"protocol": {"name": "softsync"}, "optimizer": {**SGD, "weight_decay": 1e-3}},
    "2-softsync-adagrad": {"protocol": {"name": "softsync", "n": 2}, "optimizer": ADAGRAD},
    "async-staleness": {"protocol": {"name": "async", "modulation": "gradient_staleness"}, "optimizer": SGD},
    "hardsync-momentum": {"protocol": {"name": "hardsync"}, "optimizer": SGD},
    "hardsync-shares": {"protocol": {"name": "hardsync"}, "optimizer": SGD, "shares": True},
    "sharded, hardsync": {"protocol": {"name": "hardsync"}, "optimizer": SGD, "sharded": True},
    "sharded, async": {"protocol": {"name": "async"}, "optimizer": ADAGRAD, "sharded": True},
    "async-schedule": {"protocol": {"name": "async"}, "optimizer": {**SGD, **OWN}},
}


def make_job(
    learners: int,
    protocol: dict[str, Any],
    optimizer: dict[str, Any],
    *,
    shares: bool = False,
    sharded: bool = False,
) -> rudra.Job:
    """With servers that share the weights there are up to three of them, and fewer learners on the same ranks."""
    shards = (learners + 2) // 2 if sharded else 1
    learners -= shards - 1
    if "n" in protocol:
        protocol = {**protocol, "n": min(learners, protocol["n"])}
    return rudra.Job(
        name="replay",
        model={"name": small_models.everything},
        data={"name": point_data.hasty},
        training={"epochs": 2, "minibatch_size": 4, "seed": learners},
        optimizer={"milestones": [1], **optimizer},
        protocol={"reference_batch_size": 16, **protocol},
        cluster={"learners": learners, "threads_per_rank": 1, "shares": range(1, learners + 1) if shares else ()},
        topology={"name": "sharded", "options": {"shards": shards}} if sharded else {},
    )


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Path]:
    """The result files of the cases, whose jobs run on the same ranks, one after the other."""
    directory = tmp_path_factory.mktemp("runs")
    cases = {"async-momentum", *selected(request, "case")}
    paths = {case: directory / f"{case}.h5" for case in CASES if case in cases}
    jobs = {str(path): make_job(LEARNERS, **CASES[case]) for case, path in paths.items()}
    on_ranks(runs_on_ranks.train_all, LEARNERS, jobs=jobs)
    return paths


COVERING = [
    "async-momentum",
    "2-softsync-adagrad",
    "async-staleness",
    "hardsync-shares",
    "sharded, async",
    "async-schedule",
]


@pytest.mark.parametrize("case", covering(COVERING, CASES))
def test_a_run_is_repeated_bit_for_bit(recorded: dict[str, Path], case: str) -> None:
    path = recorded[case]
    with rudra.open_results(path) as results:
        summary, epochs = results.summary(), results.epochs
    replayed = rudra.replay(path, quiet=True)
    assert replayed.difference is None
    assert replayed.weights_sha256 == summary["weights_sha256"]
    assert replayed.updates == summary["updates"] >= 30
    assert epochs["weights_sha256"][-1].decode() == summary["weights_sha256"]
    if case.startswith("async"):
        assert summary["max_staleness"] > 0, "nothing would be shown if nobody was late"


# Node of each rank, learners on a rank, and options. The servers are on node 0; in a simulation nodes are alike as far
# as can be, the first ones larger.
ONE_AND_THREE = [0, 1, 0, 1, 0, 1]
SUMS: dict[str, tuple[list[int], int, dict[str, Any]]] = {
    "one and three": (ONE_AND_THREE, 1, {"parameter_server": True}),
    "one and three, in order": (ONE_AND_THREE, 1, {"parameter_server": True, "reduction": "ordered"}),
    "one and three, two groups": (ONE_AND_THREE, 1, {"groups": 2}),
    "one and three ranks of two": (ONE_AND_THREE, 2, {"parameter_server": True}),
    "three and two": ([0, 0, 0, 0, 1, 1], 1, {}),
    "two and three": ([0, 0, 0, 1, 1, 1], 1, {}),
    "four and three": ([0, 0, 0, 0, 0, 1, 1, 1], 1, {}),
    "one, three and three": ([0, 0, 1, 1, 1, 2, 2, 2], 1, {}),
    "four and two, two groups": ([0, 0, 0, 0, 0, 0, 1, 1], 1, {"groups": 2}),
}
SIMULATED = {"three and two": 2, "four and three": 2}
BY_MESSAGES = {"one and three", "two and three", "four and two, two groups"}


@pytest.mark.parametrize(
    "cases", together(["one and three", "one and three, in order", "three and two", "two and three"], SUMS)
)
def test_sums_of_nodes_are_repeated_and_predicted_with_and_without_node_memory(
    tmp_path: Path, cases: list[str]
) -> None:
    """Memory and messages lead to the same bits, which are not those of one order for all."""
    jobs: dict[str, tuple[list[int], rudra.Job]] = {}
    for case in cases:
        nodes, each, options = SUMS[case]
        served = "parameter_server" in options or "groups" in options
        learners = each * (len(nodes) - 1 - served)
        job = make_job(learners, {"name": "hardsync"}, SGD).with_(
            topology={"name": "groups", "options": {"reduction": "nodes", **options}},
            cluster={"learners_per_rank": each, "shares": range(2, learners + 2)},
            training={"minibatch_size": 8},
            data={"name": point_data.prompt},
        )
        for memory in (True, False) if case in BY_MESSAGES else (True,):
            jobs[str(tmp_path / f"{case}-{memory}.h5")] = nodes, job.with_(cluster={"node_memory": memory})
    on_ranks(pretended_nodes.train_on_nodes, 6, jobs=jobs)
    found: dict[str, set[str | None]] = {}
    for path, (nodes, job) in jobs.items():
        with rudra.open_results(path) as results:
            plan = results.plan()
        assert {plan.roles[i].node for i in plan.learners} == {*nodes}
        replayed = rudra.replay(path, quiet=True)
        assert replayed.difference is None
        case = Path(path).stem.rpartition("-")[0]
        found.setdefault(case, set()).add(replayed.weights_sha256)
        if case in SIMULATED:
            alike = job.with_(simulation={"nodes": SIMULATED[case]})
            with rudra.simulate(alike, output=tmp_path / "simulated.h5", force=True, progress="quiet") as results:
                found[case].add(results.summary()["weights_sha256"])
    assert {case: len(weights) for case, weights in found.items()} == dict.fromkeys(found, 1)
    assert found["one and three"] != found["one and three, in order"]
    assert found["three and two"] != found["two and three"]


def test_a_run_that_failed_on_its_ranks_is_repeated_as_far_as_it_came(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.h5"
    job = make_job(3, {"name": "async"}, SGD).with_(model={"name": faulty_models.raising}, training={"epochs": 50})
    with pytest.raises(RudraError, match="exit code 1"):
        rudra.run(job, output=path, progress="quiet")
    assert main(["replay", str(path), "--quiet"]) == 0
    said = capsys.readouterr().out
    assert "updates (the run is failed), weights sha256 " in said
    with rudra.open_results(path) as results:
        assert len(results.updates) > 40


@pytest.mark.parametrize("driver", ["mpi", "simulation"])
def test_the_timeline_adds_up(recorded: dict[str, Path], tmp_path: Path, driver: str) -> None:
    if driver == "mpi":
        path = recorded["async-momentum"]
    else:
        path = tmp_path / "run.h5"
        rudra.simulate(make_job(3, **CASES["async-momentum"]), output=path, progress="quiet").close()
    assert main(["timeline", str(path), "-o", str(tmp_path / "trace.json")]) == 0
    with rudra.open_results(path) as results:
        taken = check_trace((tmp_path / "trace.json").read_text(), 3)
        whole = results.totals["time_s"][0]
        for row in results.learners:
            for name in ("compute", "push", "wait", "pull"):
                # The account leaves out what was computed and never pushed, and has what ended the last exchange.
                close = pytest.approx(row[f"{name}_s"], rel=0.02, abs=0.02 if driver == "simulation" else 0.5)
                assert taken[int(row["world_rank"]), name] == close
            busy = sum(taken[int(row["world_rank"]), name] for name in ("compute", "push", "wait", "pull"))
            if driver == "simulation":
                assert busy == pytest.approx(whole, rel=0.2, abs=0.15)
            assert 0.3 * whole - 0.5 < busy < 1.2 * whole + 0.15  # where cores are shared it may have none for a while
        assert taken[0, "update"] == pytest.approx(results.updates["update_s"].sum(), rel=1e-3, abs=1e-4)
        assert taken[1, "evaluation"] == pytest.approx(np.nansum(results.epochs["evaluation_s"]), rel=1e-3, abs=1e-4)


def test_what_a_rank_measures_is_in_order_across_ranks(recorded: dict[str, Path]) -> None:
    """A gradient is ready before it is applied, and applied before weights with it are used."""
    with rudra.open_results(recorded["async-momentum"]) as results:
        ready = {(int(r["learner"]), int(r["step"])): float(r["time_s"]) for r in results.minibatches}
        began = {(int(r["learner"]), int(r["step"])): r["time_s"] - r["compute_s"] for r in results.minibatches}
        applied = dict(enumerate(results.updates["time_s"].tolist(), 1))
        for gradient in results.gradients:
            key = int(gradient["learner"]), int(gradient["step"])
            assert ready[key] <= applied[int(gradient["update"])] + 1e-4
            if gradient["timestamp"]:
                assert applied[int(gradient["timestamp"])] <= began[key] + 1e-4


def test_ranks_with_other_clocks_agree_on_one_moment() -> None:
    origins = [figures["origin"] for figures in on_ranks(parts_on_ranks.clock_origins, 3)]
    assert len(origins) == 5
    assert max(origins) <= time.perf_counter()
    for one, other in itertools.combinations(origins, 2):
        assert abs(one - other) < 0.5
