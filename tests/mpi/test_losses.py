"""Ranks that die while others go on: real ranks, real SIGKILLs."""

import os
import re
import signal
from pathlib import Path

import faulty_models
import numpy as np
import pytest
import torch
from job_files import short_job as job_file
from processes import (
    below,
    finish,
    gone,
    mpirun_of,
    ours,
    ranks_of,
    replays,
    start,
    wait_for_deaths,
    wait_for_updates,
)

import rudra
from tests.campaigns.phases import PLACES, kill
from tests.selection import CAMPAIGN, covering
from tests.waiting import eventually

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(600)]


IN_BUCKETS = ["--set", "cluster.node_memory=false", "--set", "cluster.buckets=0.001"]


@pytest.mark.parametrize(
    ("protocol", "topology", "dies"),
    [
        ("softsync", "base", "losing"),
        ("hardsync", "adv", "dying"),
        ("async", "sharded", "parted"),
        pytest.param("async", "sharded", "dying", marks=CAMPAIGN),
        pytest.param("softsync", "base", "parted", marks=CAMPAIGN),
        pytest.param("softsync", "base", "dying", marks=CAMPAIGN),
        pytest.param("hardsync", "base", "parted", marks=CAMPAIGN),
        pytest.param("softsync", "adv", "parted", marks=CAMPAIGN),
        pytest.param("hardsync", "sharded", "parted", marks=CAMPAIGN),
    ],
)
def test_a_learner_that_dies_is_left_behind(tmp_path: Path, protocol: str, topology: str, dies: str) -> None:
    """A learner that is parted has sent a part of its gradient when it dies. One that is losing loses its GPU."""
    rank = 3 if topology == "base" else 5
    options = {"adv": "\noptions.fan_out = 2", "sharded": "\noptions.shards = 3"}.get(topology, "")
    job = job_file(tmp_path, protocol, f"faulty_models:{dies}_{rank}", topology=f'name = "{topology}"{options}')
    output = tmp_path / "out.h5"
    process = start("run", job, "--output", output, *(IN_BUCKETS if dies == "parted" else ()))
    wait_for_deaths(process, output, steps=faulty_models.DIES_AFTER)
    code, _, err = finish(process)
    assert code == 0, err
    *before, line = ours(err)
    assert line.startswith(f"rudra: parameter server (rank 0): learner 1 (rank {rank}) died; 2 learners are left")
    own = "rudra: learner 1 (rank 3): its GPU is lost: CUDA error: an illegal memory access was encountered"
    assert before == ([own] if dies == "losing" else [])
    with rudra.open_results(output) as results:
        assert results.status == "finished"
        (lost,) = results.events[results.events["kind"] == b"lost"]
        assert results.roles[lost["role"]]["world_rank"] == rank
        totals = results.totals[0]
        assert totals["pushed"] == sum(totals[name] for name in ("applied", "pending", "discarded", "lost"))
        gradients, updates = results.gradients, results.updates
        for learner in range(3):
            steps = gradients["step"][gradients["learner"] == learner]
            assert list(steps) == list(range(len(steps)))
        after = updates["gradients"][updates["timestamp"] > lost["timestamp"] + 1]
        assert set(after) == {1 if protocol == "async" else 2}
        assert protocol != "hardsync" or not gradients["staleness"].any()
        assert results.learners["pushed"][1] >= 10
        assert np.isfinite(results.summary()["final_test_error"])
    assert replays(output)


@pytest.mark.gpu
@pytest.mark.parametrize("dies", ["dying", "crashing"])
def test_a_learner_that_dies_or_breaks_its_gpu_is_left_behind(tmp_path: Path, dies: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU here")
    job, output = job_file(tmp_path, "softsync", f"faulty_models:{dies}_3"), tmp_path / "out.h5"
    process = start("run", job, "--output", output, "--set", "cluster.device=cuda", "--set", "cluster.graphs=off")
    code, _, err = finish(process)
    assert code == 0, err
    told = [line for line in ours(err) if "(rank 3)" in line]
    assert "Traceback" not in err
    assert any("parameter server (rank 0): learner 1 (rank 3) died" in line for line in told), err
    assert any("its GPU is lost: CUDA error" in line for line in told) == (dies == "crashing"), err
    with rudra.open_results(output) as results:
        assert results.status == "finished"
        assert (results.attributes["device"], results.learners["pushed"][1] >= 10) == ("cuda", True)
        assert np.isfinite(results.weights).all()


BY_NODES = 'options.reduction = "nodes"'
ANEW = {
    "a tree server": ("hardsync", 'name = "adv"\noptions.fan_out = 2', 3, "tree server 1", []),
    "a tree server that gets buckets": (
        "hardsync",
        'name = "adv"\noptions.fan_out = 2',
        3,
        "tree server 1",
        IN_BUCKETS,
    ),
    "one that overlaps and sends buckets": (
        "async",
        'name = "adv*"\noptions.fan_out = 3',
        4,
        "learner 0",
        IN_BUCKETS,
    ),
    "a learner that others get weights from": ("async", 'name = "adv*"\noptions.outstanding = 1', 2, "learner 0", []),
    "the first of a group": ("async", 'name = "groups"\noptions.groups = 2', 4, "learner 2", []),
    "another of a group": (
        "softsync",
        'name = "groups"\noptions = {groups = 2, reduction = "mpi"}',
        3,
        "learner 1",
        [],
    ),
    "the first of a node": ("hardsync", f'name = "groups"\n{BY_NODES}', 3, "learner 2", []),
    "a node's only one of a group": ("async", f'name = "groups"\n{BY_NODES}\noptions.groups = 2', 3, "learner 1", []),
    "one that sends buckets": ("hardsync", 'name = "groups"', 2, "learner 1", IN_BUCKETS),
    "one of a group that sends buckets": (
        "softsync",
        'name = "groups"\noptions.groups = 2',
        5,
        "learner 3",
        IN_BUCKETS,
    ),
}


COVERING = [
    "a tree server that gets buckets",
    "one that overlaps and sends buckets",
    "the first of a group",
    "another of a group",
    "the first of a node",
]


@pytest.mark.parametrize("case", covering(COVERING, ANEW))
def test_where_one_cannot_be_missed_the_others_regroup(tmp_path: Path, case: str) -> None:
    protocol, topology, rank, name, more = ANEW[case]
    job, output = job_file(tmp_path, protocol, topology=topology), tmp_path / "out.h5"
    two_nodes = "import pretended_nodes; pretended_nodes.launch_on_nodes([0, 0, 0, 1, 1, 1])"
    apart = two_nodes if BY_NODES in topology else "pass"
    process = start("run", job, "--output", output, "--set", "cluster.learners=4", *more, before=apart)
    wait_for_updates(process, output, 10)
    os.kill(ranks_of(process)[rank], signal.SIGKILL)
    wait_for_deaths(process, output)
    code, _, err = finish(process)
    assert code == 0, err
    (line,) = ours(err)
    left = 4 if name.startswith("tree") else 3
    assert f": {name} (rank {rank}) died; {left} learners are left, which continue from update " in line
    with rudra.open_results(output) as results:
        assert results.status == "finished"
        (lost,) = results.events[results.events["kind"] == b"lost"]
        assert results.roles[lost["role"]]["world_rank"] == rank
        assert BY_NODES not in topology or {0, 1} <= {*results.roles["node"]}
        totals, gradients = results.totals[0], results.gradients
        assert totals["pushed"] == sum(totals[key] for key in ("applied", "pending", "discarded", "lost"))
        dead = results.roles[lost["role"]]["index"] if left == 3 else -1
        for learner in range(4):
            mine = gradients[gradients["learner"] == learner]
            assert list(mine["step"]) == list(range(len(mine))), "none twice, and none left out"
            assert (mine["update"].max(initial=0) > lost["timestamp"]) == (learner != dead)
        assert protocol != "hardsync" or not gradients["staleness"].any()
        assert np.isfinite(results.summary()["final_test_error"])
    if "mpi" not in topology:  # whose allreduce adds as it likes
        assert replays(output)


def test_a_job_may_stop_when_a_learner_dies_and_be_resumed(tmp_path: Path) -> None:
    job = job_file(tmp_path, "hardsync", "faulty_models:dying_3", fault_tolerance='on_learner_loss = "stop"')
    output = tmp_path / "out.h5"
    code, _, err = finish(start("run", job, "--output", output))
    assert code == 3, err
    assert "learner 1 (rank 3) died" in err
    assert f"rudra: job: stopped; to resume from its last checkpoint: rudra resume {output}" in err
    with rudra.open_results(output) as results:
        assert (results.status, results.state["reason"]) == ("interrupted", "a learner died")
    code, _, err = finish(start("resume", output, before="import os; os.environ['ALIVE'] = '1'"))
    assert code == 0, err
    with rudra.open_results(output) as results:
        assert results.status == "finished"
        assert not results.gradients["staleness"].any()
        assert set(results.updates["gradients"]) == {3}


@pytest.mark.parametrize(("rank", "topology"), [(0, "base"), pytest.param(1, "sharded", marks=CAMPAIGN)])
def test_a_run_that_loses_a_server_goes_on_from_its_last_checkpoint(tmp_path: Path, rank: int, topology: str) -> None:
    every, name = 'checkpoint_every = "5 updates"', f'name = "{topology}"'
    job = job_file(tmp_path, "softsync", results=every, fault_tolerance="restarts = 1", topology=name)
    output = tmp_path / "out.h5"
    process = start("run", job, "--output", output)
    wait_for_updates(process, output, 20, kept=True)
    os.kill(ranks_of(process)[rank], signal.SIGKILL)
    code, _, err = finish(process)
    assert code == 0, err
    said = [line for line in ours(err) if "no checkpoint at update " not in line]  # one was being written
    assert f"(rank {rank}) died" in said[0]
    assert "rudra: restart 1 of 1: job: continues from" in err
    with rudra.open_results(output) as results:
        assert results.status == "finished"
        assert list(results.epochs["epoch"]) == [1, 2]
    assert replays(output)


def test_when_both_servers_die_those_that_are_left_end_the_run(tmp_path: Path) -> None:
    job, output = job_file(tmp_path, "softsync"), tmp_path / "out.h5"
    process = start("run", job, "--output", output)
    wait_for_updates(process, output, 10)
    ranks = ranks_of(process)
    for number in (signal.SIGSTOP, signal.SIGKILL):  # neither may report the death of the other
        for rank in (0, 1):
            os.kill(ranks[rank], number)
    code, _, err = finish(process)
    assert code == 1, err
    who = "parameter server (rank 0), statistics server (rank 1) died, and the run cannot continue without them"
    assert ours(err)[0].endswith(who), err
    assert gone([*ranks.values()])


def test_without_ulfm_a_dead_rank_ends_the_job_soon_and_the_checkpoint_is_named(tmp_path: Path) -> None:
    every = 'checkpoint_every = "2 updates"'
    job, output = job_file(tmp_path, "softsync", "faulty_models:dying_3", results=every), tmp_path / "out.h5"
    process = start("run", job, "--output", output, before="launch.has_ulfm = lambda _: False")
    code, _, err = finish(process)
    assert code == 1, err
    assert ours(err) == [
        "rudra: rank 3 (learner 1) was killed by signal 9 (SIGKILL); is there enough memory?",
        f"rudra: job: to resume from its last checkpoint: rudra resume {output}",
    ]


def test_mpirun_that_is_ended_from_outside_leaves_a_run_to_go_on_with(tmp_path: Path) -> None:
    every = 'checkpoint_every = "2 updates"'
    job, output = job_file(tmp_path, "softsync", epochs=8, results=every), tmp_path / "out.h5"
    process = start("run", job, "--output", output)
    wait_for_updates(process, output, 10, kept=True)
    pids = below(process.pid)
    os.kill(mpirun_of(process), signal.SIGTERM)
    code, _, err = finish(process)
    assert code == 3
    how = f"to resume from its last checkpoint: rudra resume {output}"
    assert ours(err) == [f"rudra: job: mpirun was ended from outside; {how}"]
    assert gone(pids)
    assert finish(start("resume", output))[0] == 0


@pytest.mark.parametrize(("rank", "library"), [(3, ""), (0, "libtorch")])
def test_a_rank_that_dies_before_training_begins_ends_the_job_soon(tmp_path: Path, rank: int, library: str) -> None:
    process = start("run", job_file(tmp_path, "softsync"), "--output", tmp_path / "out.h5")

    def there() -> bool:
        pids = ranks_of(process)
        return rank in pids and library in Path(f"/proc/{pids[rank]}/maps").read_text()

    assert eventually(there, every_s=0.01)
    os.kill(ranks_of(process)[rank], signal.SIGKILL)
    code, _, err = finish(process)
    assert code == 1
    name = {0: "parameter server", 3: "learner 1"}[rank]
    assert ours(err) == [f"rudra: rank {rank} ({name}) died before training began"], err


@pytest.mark.parametrize(
    ("rank", "topology", "comes_back", "more"),
    [
        (3, 'name = "base"', True, []),
        pytest.param(5, 'name = "adv"\noptions.fan_out = 2', False, [], marks=CAMPAIGN),
        pytest.param(3, 'name = "base"', True, IN_BUCKETS, marks=CAMPAIGN),
        pytest.param(5, 'name = "sharded"\noptions.shards = 3', False, IN_BUCKETS, marks=CAMPAIGN),
    ],
    ids=["base, comes back", "adv", "base, comes back, in buckets", "sharded, in buckets"],
)
def test_a_stopped_rank_is_dropped_if_the_job_says_so(
    tmp_path: Path, rank: int, topology: str, more: list[str], *, comes_back: bool
) -> None:
    job = job_file(tmp_path, "hardsync", fault_tolerance="straggler_timeout_s = 4.0", topology=topology)
    output = tmp_path / "out.h5"
    process = start("run", job, "--output", output, *more)
    wait_for_updates(process, output, 10)
    pid = ranks_of(process)[rank]
    os.kill(pid, signal.SIGSTOP)
    wait_for_updates(process, output, 1, "events")
    if comes_back:
        os.kill(pid, signal.SIGCONT)
    code, _, err = finish(process)
    assert code == 0, err
    (line,) = ours(err)
    assert line.startswith(
        f"rudra: parameter server (rank 0): learner 1 (rank {rank}) was dropped: it sent nothing for"
    )
    with rudra.open_results(output) as results:
        assert results.status == "finished"
        (event,) = results.events
        assert event["kind"] == b"dropped"
        assert set(results.updates["gradients"][results.updates["timestamp"] > event["timestamp"] + 1]) == {2}
    assert gone([pid]), "nothing is left over"
    assert replays(output)


def test_a_stopped_rank_is_waited_for(tmp_path: Path) -> None:
    """Slow is not dead."""
    job, output = job_file(tmp_path, "hardsync", fault_tolerance="stall_warning_s = 1.0"), tmp_path / "out.h5"
    process = start("run", job, "--output", output)
    wait_for_updates(process, output, 10)
    pid = ranks_of(process)[3]
    os.kill(pid, signal.SIGSTOP)
    assert process.stderr is not None
    said = re.compile(r"parameter server \(rank 0\) has waited \d+ s for a gradient from .*learner 1")
    assert any(said.search(line) for line in process.stderr), "of those that wait, the server says for whom"
    os.kill(pid, signal.SIGCONT)
    code, _, err = finish(process)
    assert code == 0, err
    with rudra.open_results(output) as results:
        assert set(results.events["kind"]) <= {b"straggler"}


LAST = [
    pytest.param("base", "learner 1", "done", marks=CAMPAIGN),
    ("base", "statistics server", "close"),
    ("groups", "learner 1", "exit"),
]


@pytest.mark.parametrize(("topology", "victim", "phase"), LAST)
def test_a_rank_that_dies_in_the_last_moments_is_missed_by_nobody(
    tmp_path: Path, topology: str, victim: str, phase: str
) -> None:
    found = kill(tmp_path, PLACES[topology], victim, phase)
    assert (found.end.code, found.end.left, found.wrong) == (0, [], "")


def test_when_all_that_are_left_wait_the_run_ends(tmp_path: Path) -> None:
    process = start("run", job_file(tmp_path, "hardsync", "faulty_models:deaf"), "--output", tmp_path / "out.h5")
    code, _, err = finish(process)
    assert code == 1
    (line,) = ours(err)
    assert line.startswith(
        "rudra: statistics server (rank 1): a rank has died, and for 2 s all remaining ranks have waited"
    )
    assert "parameter server (rank 0) for a gradient from" in line
