"""The training data lies in each node's memory once, and gradients and weights are read where they lie."""

import signal
from pathlib import Path

import pytest
import user_code
from processes import finish, start

import rudra
from rudra.bench.ranks import on_ranks

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("what", ["arrays", "tensors"])
def test_arrays_are_one_memory_until_somebody_writes(what: str) -> None:
    told = on_ranks(user_code.sharing, 2, what=what)
    assert len(told) == 4
    assert all(rank["private_kb"] <= 64 for rank in told), "a page or two, not a copy"
    assert sum(rank["share_kb"] for rank in told) < 1.1 * user_code.SHARED_MB * 1024


@pytest.mark.parametrize("what", ["lock", "mapped"])
def test_what_cannot_be_shared_stays_with_whom_made_it(what: str) -> None:
    assert [rank["got"] for rank in on_ranks(user_code.sharing, 1, what=what)] == [False, True, False]


def test_neighbours_see_what_a_rank_writes_and_can_write_nothing() -> None:
    for told in on_ranks(user_code.neighbours, 1, forbids=None):
        assert told["seen"] == [[rank + 1, 10 * (rank + 1)] for rank in range(3)]
        assert told["later"] == [-1.0] * 3
        assert told["killed_by"] == signal.SIGSEGV
        assert "were reserved, and" in told["refused"]


def test_where_one_rank_cannot_share_none_does() -> None:
    told = on_ranks(user_code.neighbours, 1, forbids=1)
    assert all(rank["neighbours"] == 0 and rank["sum"] == 7000 for rank in told)
    (failure,) = {rank["failure"] for rank in told}
    assert failure.startswith("rank 1: ")


def job_file(directory: Path, model: str, topology: str = "") -> Path:
    path = directory / f"{model}.toml"
    path.write_text(
        f'[model]\nname = "user_code:{model}"\n[data]\nname = "user_code:prompt"\n'
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


def test_memory_and_messages_lead_to_the_same_weights(tmp_path: Path) -> None:
    """All on the same seven ranks, which those of `adv` need."""
    jobs = {
        str(tmp_path / f"{name}-{near}.h5"): rudra.Job.load(
            job_file(tmp_path, "dropping", topology), [f"cluster.node_memory={near}"]
        )
        for name, topology in TOPOLOGIES.items()
        for near in ("true", "false")
    }
    on_ranks(user_code.train_as_needed, 5, jobs=jobs)
    for name in TOPOLOGIES:
        assert len({final_weights(tmp_path / f"{name}-{near}.h5") for near in ("true", "false")}) == 1, name


def test_without_shared_memory_a_run_says_so_and_goes_on_by_messages(tmp_path: Path) -> None:
    output = tmp_path / "out.h5"
    code, _, err = finish(start("run", job_file(tmp_path, "alone"), "--output", output, "--quiet"))
    assert code == 0, err
    (line,) = err.splitlines()
    assert line.startswith("rudra: node memory cannot be had on "), line
    assert "(rank 2: [Errno 28] No space left on device): its ranks exchange messages instead, which is slower" in line
    assert rudra.replay(output, quiet=True).identical
