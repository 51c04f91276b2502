"""Ranks that srun or mpirun starts: those that could not find each other end at once, and say what to do instead."""

import re
import sys
from pathlib import Path

import pytest
from slurm_cluster import Cluster

import rudra
from tests.selection import covering

pytestmark = [pytest.mark.slurm, pytest.mark.mpi, pytest.mark.timeout(400)]

RUN = ("-m", "rudra", "run", "digits", "--quiet", "--output", "out.h5")


def refused(cluster: Cluster, directory: Path, *command: str | Path) -> str:
    """The one line of Rudra's that ranks ended with."""
    done = cluster.run(*command, cwd=directory, timeout=200)
    assert done.returncode == 2, done.stderr
    assert list(directory.glob("*.h5")) == []
    (line,) = re.findall(r"^rudra: (.*)$", done.stderr, re.MULTILINE)
    assert "Traceback" not in done.stderr
    return str(line)


@pytest.mark.parametrize("options", [(), ("--kill-on-bad-exit=1",)])
def test_srun_without_mpi(cluster: Cluster, tmp_path: Path, options: tuple[str, ...]) -> None:
    said = refused(cluster, tmp_path, "srun", *options, "--mpi=none", "-n", "3", sys.executable, *RUN)
    assert said.startswith("srun started 3 tasks without MPI; use srun --mpi=pmix (Open MPI) or --mpi=pmi2 (MPICH)")


def test_open_mpi_by_pmi2(cluster: Cluster, openmpi: Path, tmp_path: Path) -> None:
    said = refused(cluster, tmp_path, "srun", "--mpi=pmi2", "-n", "3", openmpi / "bin" / "python", *RUN)
    assert re.match(r"srun --mpi=pmi2 cannot start ranks of Open MPI v\S+, .*: use srun --mpi=pmix, or", said)


def test_mpich_by_pmix(cluster: Cluster, mpich: Path, tmp_path: Path) -> None:
    said = refused(cluster, tmp_path, "srun", "--mpi=pmix", "-n", "3", mpich / "bin" / "python", *RUN)
    assert re.match(r"srun --mpi=pmix cannot start ranks of MPICH \S+, .*: use srun --mpi=pmi2, or", said)


def test_the_mpirun_of_another_mpi(cluster: Cluster, openmpi: Path, mpich: Path, tmp_path: Path) -> None:
    command = [openmpi / "bin" / "mpirun", "--oversubscribe", "-n", "3", mpich / "bin" / "python", *RUN]
    said = refused(cluster, tmp_path, *command)
    assert said.startswith("Open MPI's mpirun cannot start ranks of MPICH")
    said = refused(cluster, tmp_path, mpich / "bin" / "mpirun", "-n", "3", openmpi / "bin" / "python", *RUN)
    assert said.startswith("MPICH's mpirun cannot start ranks of Open MPI")


def test_fewer_ranks_than_roles(cluster: Cluster, openmpi: Path, tmp_path: Path) -> None:
    said = refused(cluster, tmp_path, "srun", "--mpi=pmix", "-n", "2", openmpi / "bin" / "python", *RUN)
    assert said == "2 ranks are too few for topology base; start 6"


@pytest.mark.parametrize("library", covering(["openmpi"], ["openmpi", "mpich"]))
def test_the_right_launch(request: pytest.FixtureRequest, cluster: Cluster, tmp_path: Path, library: str) -> None:
    environment: Path = request.getfixturevalue(library)
    kind = "pmix" if library == "openmpi" else "pmi2"
    small = ["--set", "training.epochs=1", "--set", "data.train_limit=256", "--set", "cluster.threads_per_rank=1"]
    group = ["--set", "protocol.name=hardsync", "--set", "topology.name=groups"]
    group += ["--set", "topology.options.reduction=nodes"]
    # Exclusive: else the first node gets as many as it holds.
    ranks = ["srun", f"--mpi={kind}", "--exclusive", "-N", "2", "-n", "5", environment / "bin" / "python"]
    done = cluster.run(*ranks, *RUN, *small, *group, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "out.h5\n"), done.stderr
    with rudra.open_results(tmp_path / "out.h5") as results:
        plan, weights = results.plan(), results.summary()["weights_sha256"]
        job = rudra.Job(**results.job).with_(simulation={"nodes": 2})
    assert [plan.roles[i].node for i in plan.learners] == [0, 0, 1, 1]
    assert rudra.replay(tmp_path / "out.h5", quiet=True).identical
    with rudra.simulate(job, output=tmp_path / "simulated.h5", progress="quiet") as results:
        assert results.summary()["weights_sha256"] == weights
