"""Ranks that compute elsewhere than where MPI reads and writes, and in half precision."""

from pathlib import Path
from typing import Any

import faulty_models
import late_devices
import numpy as np
import parts_on_ranks
import point_data
import pytest
import small_models
import torch
import user_functions

import rudra
from rudra.bench.ranks import on_ranks
from rudra.compute.device import placement
from rudra.compute.device.devices import DEVICES
from rudra.compute.staging import Staging
from rudra.compute.vectors import Buffer
from rudra.core.wire import tail_bytes
from rudra.errors import ConfigError, RudraError
from tests.selection import covering, selected

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(600)]

RUNS: dict[str, dict[str, Any]] = {
    "hardsync": {"protocol": {"name": "hardsync"}},
    "async": {"protocol": {"name": "async"}, "cluster": {"gradient_format": "float16"}},
    "too large for float16": {
        "protocol": {"name": "async"},
        "cluster": {"gradient_format": "float16"},
        "task": {"name": user_functions.Steep},
        "optimizer": {"learning_rate": 0.02 / user_functions.STEEP},
    },
    "adv*": {"protocol": {"name": "async"}, "topology": {"name": "adv*"}},
    "one group": {"protocol": {"name": "hardsync"}, "topology": {"name": "groups"}},
    "two groups": {"protocol": {"name": "async"}, "topology": {"name": "groups", "options": {"groups": 2}}},
    "groups in float16": {
        "protocol": {"name": "async"},
        "topology": {"name": "groups", "options": {"groups": 2}},
        "cluster": {"gradient_format": "float16"},
    },
    "replicas": {"protocol": {"name": "sma"}, "topology": {"name": "replicas"}},
    "blocks": {"protocol": {"name": "sma"}, "topology": {"name": "hierarchical", "options": {"blocks": 2}}},
    "async on adv": {"protocol": {"name": "async"}, "topology": {"name": "adv"}},
    "parts": {"protocol": {"name": "hardsync"}, "cluster": {"node_memory": False, "buckets": 0.01}},
    "async, parts": {"protocol": {"name": "async"}, "cluster": {"node_memory": False, "buckets": 0.01}},
    "sharded": {
        "protocol": {"name": "async"},
        "topology": {"name": "sharded", "options": {"shards": 2}},
    },
    "buffers": {"protocol": {"name": "hardsync"}, "model": {"name": small_models.normed}},
    "buffers in a group": {
        "protocol": {"name": "hardsync"},
        "topology": {"name": "groups"},
        "model": {"name": small_models.normed},
    },
    "easgd": {
        "protocol": {"name": "easgd"},
        "topology": {"name": "replicas", "options": {"parameter_server": True}},
    },
    "half": {"protocol": {"name": "async"}, "training": {"precision": "bfloat16"}},
}


def make_job(protocol: dict[str, Any], **tables: Any) -> rudra.Job:
    return rudra.Job(
        name="devices",
        model=tables.pop("model", {"name": small_models.everything}),
        data=tables.pop("data", {"name": point_data.hasty}),
        training={"epochs": 2, "minibatch_size": 4, "seed": 3, **tables.pop("training", {})},
        optimizer={"learning_rate": 0.02, "momentum": 0.9, **tables.pop("optimizer", {})},
        protocol={"reference_batch_size": 16, **protocol},
        cluster={"threads_per_rank": 1, **tables.pop("cluster", {})},
        **tables,
    )


COVERING = ["hardsync", "async", "one group", "parts", "async, parts", "buffers"]
ON_COPIES = ["hardsync", "async, parts", "buffers"]
DIRECT = ["hardsync", "async on adv", "adv*", "half"]  # where MPI may read and write the vectors of who computes


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Path]:
    """Result files of runs whose learners and tests compute on copies; all on the same ranks."""
    names = {*COVERING, *selected(request, "name")}
    paths, ranks = train("staged", [name for name in RUNS if name in names], tmp_path_factory.mktemp("runs"))
    server, *others = (rank["copies"] for rank in ranks)
    assert 0 < server < 12, "it is the statistics server where there is no other"
    assert min(others) > 30
    assert all(rank["asked"] > 1.3 * rank["copies"] for rank in ranks[-3:]), "gradients were late"
    assert all(min(rank["pushed"], rank["received"]) > 100 for rank in ranks[-3:]), "parts travelled on their own"
    return paths


@pytest.fixture(scope="module")
def direct(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Result files of runs of which MPI reads and writes tensors of torch's, as on a GPU."""
    paths, ranks = train("direct", DIRECT, tmp_path_factory.mktemp("runs"))
    _, statistics, *learners = (rank["direct"] for rank in ranks)
    assert statistics >= 2 * len(DIRECT)
    assert min(learners) > 30
    assert not any(rank["copies"] for rank in ranks)
    return paths


READ_THERE = ["hardsync", "async", "too large for float16", "async on adv", "adv*", "half", "buffers", "easgd"]
READ_THERE += ["sharded", "one group", "two groups", "groups in float16", "replicas", "blocks"]
"""Where a rank may read vectors on the devices of others."""
READ_ON_ONE_NODE = ["hardsync", "too large for float16", "one group", "groups in float16", "blocks"]
"""Those that are compared, and what runs on two nodes have not."""

TWO_NODES = {
    "hardsync": [0, 0, 0, 1, 1],
    "async": [0, 0, 0, 1, 1],
    "adv*": [0, 0, 0, 1, 1, 1],
    "async on adv": [0, 0, 0, 0, 1, 1, 1],
    "async, parts": [0, 0, 0, 1, 1],
    "sharded": [0, 0, 0, 1, 1, 1],
    "buffers": [0, 0, 0, 1],
    "easgd": [0, 0, 0, 1, 1],
    "two groups": [0, 0, 0, 0, 1, 1],
    "blocks": [0, 0, 0, 1, 1],
}
"""Nodes of the ranks of runs with pairs of both kinds: on one node, and on two."""
BETWEEN = ["hardsync", "adv*", "async, parts", "sharded", "two groups", "blocks"]
MPI_BETWEEN = ["hardsync", "async on adv", "adv*", "two groups"]
"""Those of them with each kind of sender and receiver, for either transport between nodes."""


@pytest.fixture(scope="module")
def ipc(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Path]:
    """Result files of runs whose ranks read each other's device memory, some time after its place has come."""
    names = {*READ_ON_ONE_NODE, *selected(request, "name")}
    runs = dict.fromkeys(name for name in READ_THERE if name in names)
    paths, ranks = train_on_devices(("ipc", "staged"), runs, tmp_path_factory.mktemp("runs"))
    for rank in ranks[:5]:
        assert rank["landed"] >= len(runs)
        assert rank["late"]
        assert "sent" not in rank
    assert sum(rank.get("left", 0) for rank in ranks) >= sum(rank["landed"] for rank in ranks)
    assert ranks[3]["exchanged in slots"] > 100
    assert ranks[3]["exchanged in main memory"] > 10, "blocks add sums of their own"
    return paths


@pytest.fixture(scope="module")
def copied_between(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Path]:
    """Result files of runs on two nodes, between which copies in main memory travel."""
    return train_on_two_nodes("staged", selected(request, "name"), tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def read_between(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Path]:
    """Result files of runs on two nodes, between which MPI reads and writes tensors."""
    return train_on_two_nodes("mpi", selected(request, "name"), tmp_path_factory.mktemp("runs"))


def train_on_two_nodes(between: str, names: set[str], directory: Path) -> dict[str, Path]:
    """Trains with a transport for each pair of ranks."""
    runs = {name: nodes for name, nodes in TWO_NODES.items() if name in names}
    paths, ranks = train_on_devices(("ipc", between), runs, directory)
    assert ranks[0]["sent"] > 100
    assert ranks[0]["left"] > 50
    assert ranks[0]["late"]
    assert ("buckets" in ranks[0]) == (between == "staged")
    return paths


REDUCED: dict[str, list[int]] = {
    "one group": [0, 0, 0, 0],
    "two groups": [0, 0, 0, 1, 1, 1],
    "groups in float16": [0, 0, 0, 0, 1, 1],
    "replicas": [0, 0, 1, 1],
    "buffers in a group": [0, 0, 0, 1],
}
"""Nodes of the ranks of runs whose groups reduce by a library."""


@pytest.fixture(scope="module")
def nccl(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Path]:
    """Result files of runs whose groups reduce by a library of their devices, which adds late."""
    names = {"one group", *selected(request, "name")}
    runs = {name: nodes for name, nodes in REDUCED.items() if name in names}
    paths, ranks = train_on_devices(("ipc", "staged", True), runs, tmp_path_factory.mktemp("runs"), reduction="mpi")
    for rank in ranks[2:4]:
        assert rank["summed"] >= 80
        assert rank["not summed yet"] > rank["summed"]
        assert not any("exchanged" in name for name in rank)
    return paths


def train_on_devices(
    transports: tuple[Any, ...], runs: dict[str, Any], directory: Path, **options: Any
) -> tuple[dict[str, Path], list[dict[str, Any]]]:
    """Trains on late devices.

    Args:
        runs: names of runs, and the nodes of their ranks, or None for one node.
        options: more options of topologies.
    """
    paths = {name: directory / f"{place}.h5" for place, name in enumerate(runs)}
    jobs = {}
    for name, path in paths.items():
        job = make_job(**RUNS[name])
        job = job.with_(topology={"options": {**job.topology.options, **options}})
        nodes = runs[name] or [0] * job.with_(cluster={"learners": 3}).plan().ranks
        jobs[str(path)] = nodes, job
    most = max(len(nodes) for nodes, _ in jobs.values())
    return paths, on_ranks(late_devices.train_on_devices, most - 2, transports=transports, jobs=jobs)


def train(placing: str, names: list[str], directory: Path) -> tuple[dict[str, Path], list[dict[str, Any]]]:
    paths = {name: directory / f"{place}.h5" for place, name in enumerate(names)}
    jobs = {str(path): make_job(**RUNS[name]) for name, path in paths.items()}
    return paths, on_ranks(late_devices.train_placed, 3, placing=placing, jobs=jobs)


@pytest.mark.parametrize("name", covering(COVERING, RUNS))
def test_a_run_on_copies_is_repeated_without_them_bit_for_bit(staged: dict[str, Path], name: str) -> None:
    assert_repeated(staged[name])


@pytest.mark.parametrize("name", covering(ON_COPIES, RUNS))
def test_a_run_on_copies_is_repeated_on_copies_bit_for_bit(
    staged: dict[str, Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a replay on a GPU does."""
    made: list[str | None] = []

    def placing(device: torch.device, plan: Any, *, transport: str | None) -> placement.Placing:
        made.append(transport)
        return "staged"

    monkeypatch.setattr(placement, "placing", placing)
    assert_repeated(staged[name])
    assert made == [None]


@pytest.mark.parametrize("name", DIRECT)
def test_a_run_of_which_mpi_reads_tensors_is_repeated_bit_for_bit(direct: dict[str, Path], name: str) -> None:
    assert_repeated(direct[name])


@pytest.mark.parametrize("name", covering(READ_ON_ONE_NODE, READ_THERE))
def test_a_run_whose_ranks_read_device_memory_is_repeated_bit_for_bit(ipc: dict[str, Path], name: str) -> None:
    assert_repeated(ipc[name])
    with rudra.open_results(ipc[name]) as results:
        assert results.attributes["transport"] == "ipc"


@pytest.mark.parametrize("name", covering(BETWEEN, TWO_NODES))
def test_a_run_with_copies_between_nodes_is_repeated_bit_for_bit(copied_between: dict[str, Path], name: str) -> None:
    assert_repeated(copied_between[name])
    with rudra.open_results(copied_between[name]) as results:
        assert results.attributes["transport"] == "ipc, staged"


@pytest.mark.parametrize("name", covering(MPI_BETWEEN, TWO_NODES))
def test_a_run_of_which_mpi_reads_tensors_between_nodes_is_repeated_bit_for_bit(
    read_between: dict[str, Path], name: str
) -> None:
    assert_repeated(read_between[name])
    with rudra.open_results(read_between[name]) as results:
        assert results.attributes["transport"] == "ipc, mpi"


@pytest.mark.parametrize("missing", ["copied", "taken", "added", "summed"])
def test_a_missing_wait_of_a_reduction_is_noticed(ipc: dict[str, Path], missing: str, tmp_path: Path) -> None:
    """By the ranks, whose weights then differ, or by other weights."""
    job, path = make_job(**RUNS["one group"]).with_(fault_tolerance={"non_finite_loss": "warn"}), tmp_path / "run.h5"
    if missing == "summed":
        job = job.with_(topology={"options": {"reduction": "mpi"}})
    try:
        on_ranks(late_devices.train_without_wait, 2, missing=missing, jobs={str(path): ([0] * 4, job)})
    except RudraError:
        return
    with rudra.open_results(path) as hasty, rudra.open_results(ipc["one group"]) as plain:
        assert not np.allclose(hasty.weights, plain.weights, atol=1e-4)


@pytest.mark.parametrize("name", covering(["one group", "groups in float16", "buffers in a group"], REDUCED))
def test_groups_that_reduce_by_a_library_learn(nccl: dict[str, Path], name: str) -> None:
    with rudra.open_results(nccl[name]) as results:
        assert results.attributes["transport"].startswith("nccl, ipc")
        assert results.attributes["not_replayable"]
        assert results.summary()["final_test_error"] < 0.5


def test_a_library_adds_the_same_gradients(nccl: dict[str, Path], ipc: dict[str, Path]) -> None:
    found = []
    for path in (nccl["one group"], ipc["one group"]):
        with rudra.open_results(path) as results:
            found.append(results.weights)
    assert np.allclose(*found, atol=1e-4)


def test_transports_lead_to_the_same_weights(ipc: dict[str, Path], staged: dict[str, Path]) -> None:
    found = set()
    for path in (ipc["hardsync"], staged["hardsync"], staged["parts"]):
        with rudra.open_results(path) as results:
            found.add(results.summary()["weights_sha256"])
    assert len(found) == 1


AHEAD: dict[str, dict[str, Any]] = {
    "statistics and dropout": {},
    "rates and checkpoints": {
        "optimizer": {"milestones": [1], "decay_factor": 0.5},
        "results": {"checkpoint_every": "50 updates"},
    },
    "another momentum": {"changes": [{"at_update": 70, "optimizer": {"momentum": 0.5}}]},
    "another rate in each update": {
        "model": {"name": small_models.even_digits},
        "optimizer": {"schedule": "cosine", "schedule_every": "update"},
    },
}
"""Runs on one rank whose device does steps ahead, and what interrupts them."""


def test_runs_whose_device_is_ahead_of_the_roles_are_repeated_bit_for_bit(tmp_path: Path) -> None:
    jobs = {}
    for name, tables in AHEAD.items():
        alone = {"learners": 1, "one_rank": True}
        about = {"model": {"name": small_models.normed_digits}, "data": {"name": "digits", "train_limit": 400}}
        jobs[str(tmp_path / f"{name}.h5")] = make_job({"name": "hardsync"}, cluster=alone, **about | tables)
    found = on_ranks(late_devices.train_ahead, len(jobs) - 2, jobs=jobs)
    for path, ahead in zip(jobs, found, strict=True):
        assert_repeated(Path(path))
        with rudra.open_results(path) as results:
            updates = results.summary()["updates"]
        assert ahead["refusal"] == ""
        assert ahead["committed"] > 0.5 * updates
    assert [ahead["backs"] > 0 for ahead in found] == [False, True, True, False]


def assert_repeated(path: Path) -> None:
    with rudra.open_results(path) as results:
        summary = results.summary()
    replayed = rudra.replay(path, quiet=True)
    assert replayed.difference is None
    assert replayed.weights_sha256 == summary["weights_sha256"]
    assert replayed.updates == summary["updates"] >= 30
    assert summary["final_test_error"] < 0.86, "by chance it is 0.9; a busy machine makes gradients more stale"


def test_tests_come_to_the_same_on_copies(staged: dict[str, Path], tmp_path: Path) -> None:
    assert_tested_alike(staged["hardsync"], tmp_path)


def test_tests_come_to_the_same_where_mpi_reads_tensors(direct: dict[str, Path], tmp_path: Path) -> None:
    assert_tested_alike(direct["hardsync"], tmp_path)


def assert_tested_alike(path: Path, directory: Path) -> None:
    job = make_job(**RUNS["hardsync"]).with_(cluster={"learners": 3})
    with (
        rudra.open_results(path) as placed,
        rudra.simulate(job, output=directory / "run.h5", progress="quiet") as plain,
    ):
        assert placed.summary()["weights_sha256"] == plain.summary()["weights_sha256"]
        for column in ("test_loss", "test_error"):
            assert np.array_equal(placed.epochs[column], plain.epochs[column])


def test_a_gpu_that_is_not_there_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    job = make_job({"name": "async"}, cluster={"learners": 1, "device": "cuda"})
    text = r"^\[cluster\] device = 'cuda': torch sees no GPU for learner 0 \(rank 2\) on .*; valid there: cpu$"
    with pytest.raises(ConfigError, match=text):
        rudra.run(job, output=tmp_path / "run.h5", progress="quiet")
    assert "starting" not in capfd.readouterr().err


@pytest.mark.parametrize(("after", "code"), [(0, 2), (8, 1)])
def test_an_operation_without_a_deterministic_form_ends_a_run_with_one_line(
    after: int, code: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    job = make_job({"name": "async"}, cluster={"learners": 2, "deterministic": True})
    job = job.with_(model={"name": faulty_models.Putting, "options": {"after": after}})
    with pytest.raises(RudraError) as caught:
        rudra.run(job, output=tmp_path / "run.h5", progress="quiet")
    assert caught.value.exit_code == code
    told = [line for line in capfd.readouterr().err.splitlines() if "put_" in line or "Traceback" in line]
    hint = "torch has no deterministic form of put_; use another operation, or deterministic = false"
    assert [line.endswith(f"[cluster] deterministic = true: {hint}") for line in told] == [True]


# With a GPU.


@pytest.mark.gpu
def test_vectors_come_back_from_a_gpu_as_they_went(gpu: torch.device) -> None:
    stage = Staging(100_003, gpu)
    buffer, back = (Buffer(stage.size, tail_bytes(1), pinned=True) for _ in range(2))
    assert buffer.vector.is_pinned()
    for seed in range(3):
        buffer.vector.normal_(generator=torch.Generator().manual_seed(seed))
        buffer.version += 1
        stage.gradient.copy_(stage.weights(buffer))
        back.vector.copy_(stage.gradient)
        assert back.wire[: stage.size * 4].tobytes() == buffer.wire[: stage.size * 4].tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("topology", ["base", "adv*", "groups"])
def test_learners_that_share_a_gpu_learn_digits(
    gpu: torch.device, tmp_path: Path, topology: str, precision: str
) -> None:
    job = rudra.Job.load("digits").with_(
        topology={"name": topology},
        cluster={"learners": 2, "device": "cuda"},
        training={"epochs": 10, "precision": precision},
    )
    with rudra.run(job, output=tmp_path / "run.h5", progress="quiet") as results:
        assert results.attributes["device"] == "cuda"
        assert "device cuda" in results.attributes["not_replayable"]
        assert results.summary()["final_test_error"] < 0.06
        assert results.weights is not None
        assert results.weights.dtype == np.float32


@pytest.mark.gpu
@pytest.mark.parametrize("topology", ["base", "adv*"])
def test_mpi_reads_and_writes_vectors_on_a_gpu(gpu: torch.device, tmp_path: Path, topology: str) -> None:
    aware = all(rank["aware"] for rank in on_ranks(parts_on_ranks.says_gpu_aware, 2))
    job = rudra.Job.load("digits").with_(
        topology={"name": topology},
        cluster={"learners": 2, "device": "cuda", "transport": "mpi"},
        training={"epochs": 10},
    )
    if not aware:
        with pytest.raises(RudraError, match="exit code 2"):
            rudra.run(job, output=tmp_path / "run.h5", progress="quiet")
        return
    with rudra.run(job, output=tmp_path / "run.h5", progress="quiet") as results:
        assert results.summary()["final_test_error"] < 0.06


@pytest.mark.gpu
def test_a_gpu_is_found_and_computes_what_a_cpu_does(gpu: torch.device, tmp_path: Path) -> None:
    found = []
    for device, resolved in (("auto", "cuda"), ("cpu", "cpu")):
        job = rudra.Job.load("digits").with_(
            cluster={"learners": 2, "device": device}, protocol={"name": "hardsync", "n": None}, training={"epochs": 1}
        )
        with rudra.run(job, output=tmp_path / f"{device}.h5", progress="quiet") as results:
            assert results.attributes["device"] == resolved
            found.append(results.weights)
    assert np.abs(found[0] - found[1]).max() < 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("weights", ["server", "shared"])
def test_a_large_worker_on_a_gpu_learns_beside_a_small_one_on_the_cpu(
    gpu: torch.device, tmp_path: Path, weights: str
) -> None:
    job = rudra.Job.load("digits").with_(
        protocol={"name": "hogbatch"},
        optimizer={"learning_rate": 0.1, "momentum": 0.0, "milestones": []},
        hogbatch={
            "lr_scaling": "none",
            "weights": weights,
            "workers": [
                {"learners": [0], "kind": "small", "min": 8, "max": 8, "device": "cpu"},
                {"kind": "large", "min": 64, "max": 64},
            ],
        },
        cluster={"learners": 2, "device": "cuda"},
        training={"epochs": 10},
    )
    with rudra.run(job, output=tmp_path / "run.h5", progress="quiet") as results:
        assert results.attributes["device"] == "cuda"
        assert {*results.gradients["learner"]} == {0, 1}
        assert results.summary()["final_test_error"] < 0.1


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["async", "one group", "half", "one learner"])
def test_a_deterministic_run_on_a_gpu_is_repeated_bit_for_bit(gpu: torch.device, tmp_path: Path, name: str) -> None:
    """The only learner's steps are done ahead of the roles. Other runs have several ranks."""
    alone = name == "one learner"
    cluster = {"learners": 1, "one_rank": True} if alone else {"learners": 2}
    job = make_job(**RUNS["hardsync" if alone else name])
    job = job.with_(cluster={**cluster, "device": "cuda", "deterministic": True})
    with rudra.run(job, output=tmp_path / "run.h5", progress="quiet") as results:
        assert results.attributes["device_model"] == torch.cuda.get_device_name(gpu)
    assert_repeated(tmp_path / "run.h5")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["async", "one group", "sharded", "hardsync"])
def test_two_ranks_read_each_others_memory_on_one_gpu(gpu: torch.device, tmp_path: Path, name: str) -> None:
    """The weights are those that copies in main memory lead to, if the order of gradients does not matter."""
    found = []
    for transport in ("ipc", "staged"):
        job = make_job(**RUNS[name], training={"epochs": 1})
        job = job.with_(cluster={"learners": 2, "device": "cuda", "deterministic": True, "transport": transport})
        with rudra.run(job, output=tmp_path / f"{transport}.h5", progress="quiet") as results:
            assert results.attributes["transport"] == transport
            found.append(results.summary()["weights_sha256"])
    if job.protocol.name == "hardsync":
        assert found[0] == found[1]


@pytest.mark.gpu
def test_a_group_of_one_rank_reduces_by_nccl(gpu: torch.device, tmp_path: Path) -> None:
    if not DEVICES["cuda"].library():
        pytest.skip("this build of torch has no NCCL")
    job = make_job(**RUNS["one group"])
    job = job.with_(cluster={"learners": 1, "device": "cuda", "transport": "nccl"})
    with rudra.run(job, output=tmp_path / "run.h5", progress="quiet") as results:
        assert results.attributes["transport"].startswith("nccl, ")
        assert results.summary()["final_test_error"] < 0.5
    if torch.cuda.device_count() == 1:
        with pytest.raises(RudraError) as caught:
            rudra.run(job.with_(cluster={"learners": 2}), output=tmp_path / "two.h5", progress="quiet")
        assert caught.value.exit_code == 2
