"""The network is measured before training, and all ranks choose the same size of buckets."""

from pathlib import Path

import point_data
import pretended_nodes
import pytest
import small_models
from job_files import short_job
from processes import finish, start

import rudra
from rudra.bench.ranks import on_ranks
from rudra.core.buckets import NetworkSpeed, auto_size
from rudra.machine import cores
from tests.selection import covering

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(600)]

NODES = [0, 0, 1, 2]
TOPOLOGIES = {"groups": 3, "base": 2}  # topology -> learners


def test_all_ranks_choose_one_size_for_the_slowest_network(tmp_path: Path) -> None:
    """The network of these nodes is measured, or said to be slow."""
    jobs: dict[str, tuple[list[int], rudra.Job]] = {}
    for topology, learners in TOPOLOGIES.items():
        for buckets in ("auto", "off", 0.001):
            job = rudra.Job(
                model={"name": small_models.dropping},
                data={"name": point_data.prompt},
                training={"epochs": 1, "minibatch_size": 4, "seed": 7},
                protocol={"name": "hardsync"},
                topology={"name": topology},
                cluster={"learners": learners, "threads_per_rank": 1, "buckets": buckets},
            )
            jobs[str(tmp_path / f"{topology}-{buckets}.h5")] = NODES, job
            if buckets == "auto":
                jobs[str(tmp_path / f"{topology}-slow.h5")] = NODES, job
    ranks = on_ranks(pretended_nodes.train_on_slow_network, len(NODES) - 2, jobs=jobs)
    weights: dict[str, set[str]] = {}
    for path, (_, job) in jobs.items():
        with rudra.open_results(path) as results:
            its, size = results.attributes, len(results.weights_of())
            weights.setdefault(Path(path).stem.partition("-")[0], set()).add(str(results.state["weights_sha256"]))
        chosen = [rank[path] for rank in ranks]
        assert its["cores_per_node"] == cores()
        if job.cluster.buckets != "auto":
            assert chosen == [0] * len(NODES)
            assert its["bucket_bytes"] == 0
            assert "network_latency_s" not in its
            continue
        found = NetworkSpeed(its["network_latency_s"], its["network_bytes_per_s"])
        assert chosen == [auto_size(found, size, copies=2 * ("groups" in path))] * len(NODES)
        assert its["bucket_bytes"] == 4 * chosen[0]
        if "slow" in path:
            slowest = pretended_nodes.slow_network([*range(len(NODES))] if "groups" in path else [0, 2, 3])
            assert found == slowest
            assert chosen[0] > 0
            assert its["early_passes"]
        else:
            assert 0 < found.latency_s < 1
            assert 1e6 < found.bytes_per_s < 1e12
    assert {topology: len(found) for topology, found in weights.items()} == dict.fromkeys(TOPOLOGIES, 1)


@pytest.mark.parametrize("rank", covering([0, 2], [0, 2, 3]))
def test_a_rank_that_dies_while_the_network_is_measured_ends_the_run(tmp_path: Path, rank: int) -> None:
    job, output = short_job(tmp_path, "hardsync", topology='name = "base"'), tmp_path / "out.h5"
    before = f"import pretended_nodes; pretended_nodes.launch_on_nodes({NODES}, dies={rank})"
    process = start("run", job, "--output", output, "--set", "cluster.learners=2", before=before)
    code, _, err = finish(process)
    assert code == 1
    (line,) = [line for line in err.splitlines() if line.startswith("rudra: ")]
    assert line.startswith(f"rudra: rank {rank} ("), err
    assert "was killed by signal 9" in line or "died" in line
    assert not output.exists()
