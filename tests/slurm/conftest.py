"""A SLURM to test on, and environments with either MPI."""

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_cluster import LOCAL, ROOT, Cluster, left_over

from rudra.mpi.forkserver import SERVER, fork_server
from tests.waiting import eventually

# Jobs in partition low make way for those in the usual one.
CONF = """
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=low Nodes=node[7-8] PriorityTier=0 GraceTime=3
"""


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A throw-away SLURM, or with --slurm=here the one that is there. All nodes of the first use one fork server."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    for name in [name for name in env if name.startswith(("SLURM_", "SBATCH_", "OMPI_COMM", "PMI"))]:
        if name != "SLURM_CONF":
            del env[name]
    if request.config.getoption("--slurm") == "here":
        if shutil.which("sinfo") is None:
            pytest.skip("--slurm=here, but there is no sinfo")
        found = Cluster(env, None).run("sinfo", "--noheader")
        if found.returncode:
            pytest.skip(f"--slurm=here, but no SLURM answers: {found.stderr.strip()}")
        yield Cluster(env, None)
        return
    env["OMPI_MCA_mpi_yield_when_idle"] = "1"  # it does not know that the nodes share this machine's cores
    directory = tmp_path_factory.mktemp("slurm") / "c"
    conf = directory.with_name("more.conf")
    conf.write_text(CONF)
    try:
        with fork_server():
            up = _local("up", "--nodes", "8", "--cpus", "4", "--conf", conf, "--until", str(os.getpid()), directory)
            if up.returncode:
                pytest.skip(f"no local SLURM: {up.stderr.strip().splitlines()[-1]}")
            env |= {"SLURM_CONF": str(directory / "etc" / "slurm.conf"), SERVER: os.environ[SERVER]}
            yield Cluster(env, directory)
    finally:
        _local("down", directory).check_returncode()
        assert not directory.exists()
        eventually(lambda: not left_over(directory), 5)  # what waited for our own end takes a moment to notice
        left = left_over(directory)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert left == []


def _local(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [LOCAL, *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=240, check=False
    )


@pytest.fixture(scope="session")
def openmpi() -> Path:
    """The environment of these tests."""
    return Path(sys.prefix)


@pytest.fixture(scope="session")
def mpich(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same environment with another MPI: both wheels own `mpirun`, so that one environment cannot hold the two."""
    place = tmp_path_factory.mktemp("mpich")
    venv.create(place, with_pip=False, symlinks=True)
    pins = ROOT / ".constraints.txt"
    command = [sys.executable, "-m", "pip", "--python", place / "bin" / "python", "install", "-q", "-c", pins, "mpich"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        pytest.skip(f"pip cannot install mpich: {done.stderr.strip().splitlines()[-1]}")
    (library,) = (place / "lib").glob("python*/site-packages")
    (library / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n" + sysconfig.get_path("platlib") + "\n")
    return place
