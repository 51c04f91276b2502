"""The throw-away SLURM refuses in one line, and leaves nothing behind."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from slurm_cluster import LOCAL, Cluster, left_over

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]


def local(*arguments: str | Path, path: str = os.environ["PATH"]) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PATH": path}
    bash = shutil.which("bash")
    assert bash
    return subprocess.run(
        [bash, LOCAL, *arguments],
        env=env,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def test_it_runs_jobs_and_leaves_nothing(cluster: Cluster, tmp_path: Path) -> None:
    """`cluster` is asked for so that this skips where that does."""
    place = tmp_path / "c"
    assert local("up", "--nodes", "1", "--cpus", "1", place).returncode == 0
    try:
        env = {**cluster.env, "SLURM_CONF": str(place / "etc" / "slurm.conf")}
        job = ["sbatch", "--wait", "--output=/dev/null", "--wrap", f"sleep 300 & echo $! >{tmp_path}/pid; true"]
        assert subprocess.run(job, env=env, timeout=120, check=False, stdout=subprocess.DEVNULL).returncode == 0
        assert "is there and not empty" in local("up", place).stderr
    finally:
        assert local("down", place).returncode == 0
    assert not place.exists()
    assert left_over(place) == []
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}/exe").exists()
    assert local("down", place).returncode == 0, "twice does no harm"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["up", "--nodes", "many", "{}/c"], "--nodes many: must be a whole number from 1 to 99"),
        (["up", "--conf", "{}/none", "{}/c"], "/none: cannot be read"),
        (["up", "{}/a b"], "may hold only letters, digits and _./+-"),
        (["up", "{}/" + "long" * 20], "too long a name for the unix sockets in it"),
        (["up", "{}"], "is there and not empty"),
        (["env", "{}/c"], "no cluster runs in"),
        (["fail", "{}/c", "node1"], "no cluster runs in"),
    ],
)
def test_mistakes(cluster: Cluster, tmp_path: Path, arguments: list[str], line: str) -> None:
    (tmp_path / "mine").touch()
    done = local(*(argument.format(tmp_path) for argument in arguments))
    assert done.returncode == 1
    assert line in done.stderr
    assert done.stderr.count("\n") == 1
    assert [file.name for file in tmp_path.iterdir()] == ["mine"]


def test_missing_packages_are_named(tmp_path: Path) -> None:
    for program in ("bash", "sort", "xargs", "echo", "realpath", "slurmctld", "sbatch", "srun", "munged", "mungekey"):
        found = shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
        if found:
            (tmp_path / program).symlink_to(found)
    script = LOCAL.read_text().replace("PATH=$PATH:/usr/sbin:/sbin\n", "")
    (tmp_path / "local-slurm").write_text(script)
    done = subprocess.run(
        [tmp_path / "bash", tmp_path / "local-slurm", "up", tmp_path / "c"],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "missing packages; on Debian and Ubuntu: apt-get install" in done.stderr
    assert " slurmd" in done.stderr
    assert not (tmp_path / "c").exists()


def test_where_nothing_can_be_executed(cluster: Cluster, tmp_path: Path) -> None:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("mounting a file system takes root")
    command = f"mount -t tmpfs -o noexec none {tmp_path} && bash {LOCAL} up {tmp_path}/c; echo $?; ls -A {tmp_path}"
    done = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "bash", "-c", command],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.splitlines() == ["1"], done.stderr
    assert "nothing can be executed there" in done.stderr
