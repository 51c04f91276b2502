"""The training data lies in each node's memory once, and gradients and weights are read where they lie."""

import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runs_on_ranks
import shared_memory
from processes import finish, start

import rudra
from rudra.bench.ranks import on_ranks
from tests.selection import covering, together

pytestmark = pytest.mark.mpi


RANKS = 4


@pytest.fixture(scope="module")
def told() -> list[dict[str, Any]]:
    """What each rank saw of memory that it shares, in one launch."""
    return on_ranks(shared_memory.memories, RANKS - 2)


@pytest.mark.parametrize("what", ["arrays", "tensors"])
def test_arrays_are_one_memory_until_somebody_writes(told: list[dict[str, Any]], what: str) -> None:
    assert all(rank[what]["private_kb"] <= 64 for rank in told), "a page or two, not a copy"
    assert sum(rank[what]["share_kb"] for rank in told) < 1.1 * shared_memory.SHARED_MB * 1024


@pytest.mark.parametrize("what", ["lock", "mapped"])
def test_what_cannot_be_shared_stays_with_whom_made_it(told: list[dict[str, Any]], what: str) -> None:
    assert [rank[what]["got"] for rank in told] == [False, True, False, False]


def test_neighbours_see_what_a_rank_writes_and_can_write_nothing(told: list[dict[str, Any]]) -> None:
    for rank in told:
        assert rank["neighbours"]["seen"] == [[each + 1, 10 * (each + 1)] for each in range(RANKS)]
        assert rank["neighbours"]["later"] == [-1.0] * RANKS
        assert rank["neighbours"]["killed_by"] == signal.SIGSEGV
        assert "were reserved, but" in rank["neighbours"]["refused"]


def test_where_one_rank_cannot_share_none_does(told: list[dict[str, Any]]) -> None:
    assert all(rank["alone"]["neighbours"] == 0 and rank["alone"]["sum"] == 7000 for rank in told)
    (failure,) = {rank["alone"]["failure"] for rank in told}
    assert failure.startswith("rank 1: ")


@pytest.mark.timeout(300)
def test_device_memory_of_a_dead_rank_is_void(tmp_path: Path) -> None:
    """The place of its last gradient arrives, but the gradient does not. The others continue."""
    before, output = "import late_devices; late_devices.launch_on_devices(dies=3, sends=12)", tmp_path / "out.h5"
    code, _, err = finish(start("run", job_file(tmp_path), "--output", output, before=before))
    assert code == 0, err
    assert "(rank 3) died" in err
    with rudra.open_results(output) as results:
        assert results.status == "finished"
        assert results.attributes["transport"] == "ipc"
        assert (results.gradients["learner"] == 1).sum() == 11
        assert np.isfinite(results.weights).all()
    assert rudra.replay(output, quiet=True).difference is None


@pytest.mark.timeout(300)
@pytest.mark.parametrize("nodes", covering([1], [1, 2]))
def test_a_group_continues_without_a_rank_that_died_in_a_library(tmp_path: Path, nodes: int) -> None:
    """The sum that it began ends on the others. They add the next ones themselves, in slots or in main memory."""
    within = "ipc" if nodes == 1 else "staged"
    how = f"dies=2, sums=9, transports=({within!r}, 'staged', True)"
    job, output = job_file(tmp_path, 'name = "groups"\noptions.reduction = "mpi"'), tmp_path / "out.h5"
    before = f"import late_devices; late_devices.launch_on_devices({how})"
    code, _, err = finish(start("run", job, "--output", output, before=before))
    assert code == 0, err
    assert "(rank 2) died" in err
    with rudra.open_results(output) as results:
        assert (results.status, results.attributes["transport"]) == ("finished", f"nccl, {within}")
        assert {*results.gradients["learner"][-20:]} == {0, 2}
        assert np.isfinite(results.weights).all()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("learners", covering([2], [2, 3]))
def test_a_group_whose_ranks_read_device_memory_continues_without_a_rank_that_died(
    tmp_path: Path, learners: int
) -> None:
    """Its last gradient was announced, but is void."""
    before, output = "import late_devices; late_devices.launch_on_devices(dies=2, sums=9)", tmp_path / "out.h5"
    job, wanted = job_file(tmp_path, 'name = "groups"'), f"cluster.learners={learners}"
    code, _, err = finish(start("run", job, "--set", wanted, "--output", output, before=before))
    assert code == 0, err
    assert "(rank 2) died" in err
    with rudra.open_results(output) as results:
        assert (results.status, results.attributes["transport"]) == ("finished", "ipc")
        assert {*results.gradients["learner"][-20:]} == {*range(learners)} - {1}
        assert (results.gradients["learner"] == 1).sum() == 8
        assert np.isfinite(results.weights).all()
    assert rudra.replay(output, quiet=True).difference is None


@pytest.mark.timeout(300)
def test_two_ranks_with_one_device_do_not_reduce_by_a_library(tmp_path: Path) -> None:
    how = "same=True, transports=('ipc', 'staged', True)"
    job = job_file(tmp_path, 'name = "groups"\noptions.reduction = "mpi"')
    before = f"import late_devices; late_devices.launch_on_devices({how})"
    code, _, err = finish(start("run", job, "--output", tmp_path / "out.h5", "--quiet", before=before))
    assert code == 2, err
    assert "Traceback" not in err
    (line,) = [line for line in err.splitlines() if "nccl" in line]
    assert "[cluster] transport = 'nccl' needs a GPU for each rank with learners, and ranks 1 and 2 on" in line


@pytest.mark.timeout(300)
def test_without_device_memory_that_others_read_copies_in_main_memory_travel(tmp_path: Path) -> None:
    before, output = "import late_devices; late_devices.launch_on_devices(fails=2, same=True)", tmp_path / "out.h5"
    job = job_file(tmp_path)
    code, _, err = finish(start("run", job, "--output", output, before=before))
    assert code == 0, err
    (line,) = [line for line in err.splitlines() if "share a CPU" in line]
    assert re.search(r"ranks 0, 1, 2, 3, 4 on .* share a CPU, which computes for one of them at a time", line)
    (line,) = [line for line in err.splitlines() if "GPU memory" in line]
    assert line.endswith("(rank 2: CUDA error: operation not supported): transport is 'staged'")
    with rudra.open_results(output) as results:
        assert (results.status, results.attributes["transport"]) == ("finished", "staged")


def job_file(directory: Path, topology: str = "", *, model: str = "small_models:dropping") -> Path:
    path = directory / "job.toml"
    path.write_text(
        f'[model]\nname = "{model}"\n[data]\nname = "point_data:prompt"\n'
        "[training]\nepochs = 2\nminibatch_size = 4\nseed = 7\n[optimizer]\nlearning_rate = 0.05\nmomentum = 0.9\n"
        f'[protocol]\nname = "hardsync"\n[cluster]\nlearners = 3\nthreads_per_rank = 1\n[topology]\n{topology}\n'
    )
    return path


def final_weights(path: Path) -> str:
    with rudra.open_results(path) as results:
        assert results.status == "finished"
        return str(results.state["weights_sha256"])


TOPOLOGIES = {
    "base": "",
    "groups": 'name = "groups"',
    "adv": 'name = "adv"\noptions.fan_out = 2',
    "sharded": 'name = "sharded"\noptions.shards = 2',
}


WAYS = {
    "memory": [],
    "messages": ["cluster.node_memory=false", "cluster.buckets=off"],
    "buckets": ["cluster.node_memory=false", "cluster.buckets=0.001"],
    "buckets in memory": ["cluster.buckets=0.001"],
}


@pytest.mark.parametrize("topologies", together(["adv"], TOPOLOGIES))
def test_memory_messages_and_buckets_lead_to_the_same_weights(tmp_path: Path, topologies: list[str]) -> None:
    """All on the same seven ranks, which those of `adv` need."""
    jobs = {
        str(tmp_path / f"{name}-{way}.h5"): rudra.Job.load(job_file(tmp_path, TOPOLOGIES[name]), keys)
        for name in topologies
        for way, keys in WAYS.items()
    }
    on_ranks(runs_on_ranks.train_as_needed, 5, jobs=jobs)
    for name in topologies:
        assert len({final_weights(Path(path)) for path in jobs if f"{name}-" in path}) == 1, name


def test_without_shared_memory_a_run_says_so_and_goes_on_by_messages(tmp_path: Path) -> None:
    output = tmp_path / "out.h5"
    code, _, err = finish(start("run", job_file(tmp_path, model="faulty_models:alone"), "--output", output, "--quiet"))
    assert code == 0, err
    (line,) = err.splitlines()
    assert line.startswith("rudra: node memory is not available on "), line
    assert "(rank 2: [Errno 28] No space left on device): its ranks exchange messages instead, which is slower" in line
    assert rudra.replay(output, quiet=True).identical
