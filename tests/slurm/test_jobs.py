"""Batch jobs of `rudra slurm` on a real SLURM: told of the end, they stop, queue themselves again, and go on.

The jobs that wait for a real time limit are started first, and looked at last.
"""

import os
import re
import signal
from pathlib import Path

import pytest
from slurm_cluster import Batch, Cluster

import rudra
from tests.selection import CAMPAIGN, covering

pytestmark = [pytest.mark.slurm, pytest.mark.mpi, pytest.mark.timeout(900)]

ONE_LEARNER = ("--ntasks", "3")
"""The smallest job: a learner beside the two servers. An epoch takes it 1.6 s."""


NO_SERVER = ("--ntasks", "2", "--set", "topology.name=groups", "--set", "protocol.name=hardsync")
"""A learner that owns the weights, beside the statistics server: a process less that imports all by itself."""

EVERY_EPOCH = ("--set", "results.checkpoint_every=1 epochs")

LIMITED = 70
"""Epochs that take longer than the shortest time limit before which a run gets anywhere."""


def lasts(epochs: int) -> tuple[str, str]:
    return "--set", f"training.epochs={epochs}"


def check_results(batch: Batch, epochs: int, file: str = "slow.h5", *, more: int = 0) -> None:
    """The run is whole, and nothing was done twice.

    One that lost a learner may have some samples more: updates by one mini-batch alone shift those of all that follow.
    """
    with rudra.open_results(batch.directory / file) as results:
        assert results.status == "finished"
        assert len(results.epochs) == epochs
        assert 0 <= results.summary()["samples"] - 64 * epochs <= more
        assert (results.updates["timestamp"][1:] > results.updates["timestamp"][:-1]).all()


@pytest.fixture(scope="module")
def limited(cluster: Cluster, openmpi: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Batch]:
    """Launcher -> a job whose time limit is too short for it.

    SLURM may tell of the end a minute too early: of one minute nothing might be left.
    """
    options = ["--time", "2", "--warning", "20", *NO_SERVER, *lasts(LIMITED)]
    batches = {
        launcher: cluster.submit(
            tmp_path_factory.mktemp(launcher),
            *(*options, "--launcher", launcher),
            environment=openmpi,
            anew=launcher == "mpirun",  # for srun, MPICH and `test_launches.py` show it
        )
        for launcher in ("mpirun", "srun")
    }
    for batch in batches.values():
        batch.wait_for_epoch()
    return batches


@pytest.mark.parametrize("launcher", covering(["srun"], ["mpirun", "srun"]))
def test_mpich_stops_when_told_and_goes_on(
    limited: dict[str, Batch], cluster: Cluster, mpich: Path, tmp_path: Path, launcher: str
) -> None:
    batch = cluster.submit(tmp_path, "--launcher", launcher, *ONE_LEARNER, *lasts(4), environment=mpich)
    batch.wait_for_epoch()
    tell(batch, launcher)
    batch.completes()
    assert batch.field("Restarts") == "1"
    check_results(batch, 4)


def tell(batch: Batch, launcher: str) -> None:
    """Tells a job of its end, as SLURM does."""
    whom = ["--batch"] if launcher == "mpirun" else []
    assert batch.cluster.run("scancel", "--signal=USR1", *whom, batch.number).returncode == 0


@pytest.mark.parametrize(
    ("library", "launcher"), [("openmpi", "mpirun"), pytest.param("mpich", "srun", marks=CAMPAIGN)]
)
def test_one_element_of_an_array_goes_on_by_itself(
    request: pytest.FixtureRequest,
    limited: dict[str, Batch],
    cluster: Cluster,
    tmp_path: Path,
    library: str,
    launcher: str,
) -> None:
    grid = ["--grid", "optimizer.learning_rate=0.01,0.02", "--output", "sweep", "--launcher", launcher]
    environment = request.getfixturevalue(library)
    batch = cluster.submit(tmp_path, *grid, *ONE_LEARNER, *lasts(5), environment=environment)
    first, second = batch.element(0), batch.element(1)
    first.wait_for_epoch(2)
    tell(first, launcher)
    first.completes()
    second.completes()
    assert (first.field("Restarts"), second.field("Restarts")) == ("1", "0")
    for rate in ("0.01", "0.02"):
        check_results(batch, 5, f"sweep/learning_rate={rate}.h5")


def test_a_run_goes_on_without_a_learner_that_was_killed(cluster: Cluster, openmpi: Path, tmp_path: Path) -> None:
    """On another node than mpirun, below a daemon of its own."""
    batch = cluster.submit(tmp_path, "--nodes", "2", "--ntasks-per-node", "2", *lasts(8), environment=openmpi)
    batch.wait_for_epoch(2)
    os.kill(batch.ranks[3], signal.SIGKILL)
    batch.completes()
    assert (batch.field("Restarts"), batch.field("ExitCode")) == ("0", "0:0")
    check_results(batch, 8)
    with rudra.open_results(batch.directory / "slow.h5") as results:
        (lost,) = results.events[results.events["kind"] == b"lost"]
        assert results.roles[lost["role"]]["world_rank"] == 3


@pytest.mark.parametrize(
    ("launcher", "tasks"),
    # With mpirun, the rank that ends the run is one that its daemon must tell.
    [("mpirun", ("--nodes", "3", "--ntasks-per-node", "1")), ("srun", ONE_LEARNER)],
    ids=["mpirun", "srun"],
)
def test_a_killed_server_fails_the_job(
    cluster: Cluster, openmpi: Path, tmp_path: Path, launcher: str, tasks: tuple[str, ...]
) -> None:
    batch = cluster.submit(tmp_path, "--launcher", launcher, *tasks, *lasts(500), environment=openmpi)
    batch.wait_for_epoch()
    os.kill(batch.ranks[0], signal.SIGKILL)
    assert batch.wait_for_end(within_s=120) == "FAILED"
    assert batch.field("Restarts") == "0"
    assert batch.ranks == {}


@pytest.mark.parametrize("launcher", covering(["mpirun"], ["mpirun", "srun"]))
def test_a_cancelled_job_stays_so(cluster: Cluster, openmpi: Path, tmp_path: Path, launcher: str) -> None:
    batch = cluster.submit(tmp_path, "--launcher", launcher, *ONE_LEARNER, *lasts(500), environment=openmpi)
    batch.wait_for_epoch()
    assert cluster.run("scancel", batch.number).returncode == 0
    assert batch.wait_for_end(within_s=120) == "CANCELLED"
    batch.wait("its ranks gone", lambda: batch.ranks == {}, within_s=60)
    assert batch.field("Restarts") == "0"


def test_lost_nodes(cluster: Cluster, openmpi: Path, tmp_path: Path) -> None:
    """Both at once, because SLURM takes its time to notice."""
    cluster.needs_to_be_ours()
    options = [*EVERY_EPOCH, *lasts(12)]
    tasks = {"srun": ONE_LEARNER, "mpirun": ("--nodes", "2", "--ntasks-per-node", "2")}
    batches = {}
    for launcher, wanted in tasks.items():
        (tmp_path / launcher).mkdir()
        how = [*options, *wanted, "--launcher", launcher]
        batches[launcher] = cluster.submit(tmp_path / launcher, *how, environment=openmpi)
    for launcher, batch in batches.items():
        batch.wait_for_epoch(3)
        # The only node, of which SLURM knows; and one that mpirun misses before SLURM does.
        nodes = cluster.run("scontrol", "show", "hostnames", batch.field("NodeList")).stdout.split()
        cluster.local("fail", nodes[0 if launcher == "srun" else 1])
    for batch in batches.values():
        batch.wait_for_restart()
        batch.completes()
        check_results(batch, 12, more=16)
        assert batch.log.count("epoch 1/") == 1, "it went on from its checkpoint"


def test_preemption(cluster: Cluster, openmpi: Path, tmp_path: Path) -> None:
    """Within the grace time srun's ranks are told, and save a checkpoint; mpirun's have the last one they wrote."""
    cluster.needs_to_be_ours()
    batches, options = {}, ["--partition", "low", *ONE_LEARNER, *EVERY_EPOCH, *lasts(12)]
    for launcher in ("mpirun", "srun"):
        (tmp_path / launcher).mkdir()
        batches[launcher] = cluster.submit(tmp_path / launcher, *options, "--launcher", launcher, environment=openmpi)
    for batch in batches.values():
        batch.wait_for_epoch(3)
    urgent = ["--nodelist", "node[7-8]", "--exclusive", "--output", "/dev/null", "--wrap", "true"]
    assert cluster.run("sbatch", *urgent).returncode == 0
    for batch in batches.values():
        batch.wait_for_restart()
    for batch in batches.values():
        batch.completes()
        assert batch.field("Restarts") == "1"
        check_results(batch, 12)
        assert batch.log.count("epoch 1/") == 1, "it went on from its checkpoint"
        with rudra.open_results(batch.directory / "slow.h5") as results:
            assert list(results.events["kind"]).count(b"restart") == 1
    assert "slow: stopped" in batches["srun"].log


@pytest.mark.parametrize("launcher", ["mpirun", "srun"])
def test_a_job_that_outlasts_its_time_limit(limited: dict[str, Batch], launcher: str) -> None:
    batch = limited[launcher]
    batch.completes()
    assert int(batch.field("Restarts")) >= 1
    check_results(batch, LIMITED)
    told = re.findall(r"epoch (\d+)/", batch.log)
    assert len(told) == len(set(told)) == LIMITED, "each epoch once, over all starts"
