"""Two hosts on one machine, with a link of limited bandwidth between them: Linux namespaces, gone when they are left.

Each has a host name, an address and a /dev/shm of its own, so MPI between them goes over TCP through the link, whose
token bucket (`tc … tbf`) sets the bandwidth of each direction. Nothing is added to the machine's own network.

Nothing on them outlives who made them, however that ends: Ctrl-C and SIGTERM end what is there, and what `Hosts.run`
has started dies with it.
"""

import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rudra.machine import end_with_parent

ADDRESSES = ("10.213.0.1", "10.213.0.2")
NAMES = ("node1", "node2")
BURST_S, LEAST_BURST = 0.0032, 64 << 10  # seconds of the link's rate, and bytes: of one large packet
_TOOLS = ("unshare", "nsenter", "ip", "tc")
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_HOLD = (
    'hostname "$1" && mount --bind "$2" /etc/hosts && mount -t tmpfs -o mode=1777 shm /dev/shm && ip link set lo up && '
    "echo ready && exec cat"
)


def missing() -> str:
    """What two hosts need and this machine does not have; empty if nothing."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    tools = [tool for tool in _TOOLS if shutil.which(tool, path=_PATH) is None]
    if tools:
        return f"{', '.join(tools)} not found (packages iproute2 and util-linux)"
    tried = subprocess.run(["unshare", "--net", "--uts", "--mount", "true"], capture_output=True, check=False)
    return "" if tried.returncode == 0 else "this machine allows no namespaces"


@dataclass(frozen=True, slots=True)
class Hosts:
    """Two hosts.

    Attributes:
        directory: where their files are.
        pids: of the processes that keep their namespaces.
    """

    directory: Path
    pids: tuple[int, int]

    def command(self, argv: Sequence[str], host: int = 0) -> list[str]:
        """What runs a command on a host."""
        return [*_enter(self.pids[host]), f"--wd={os.getcwd()}", *argv]

    def run(
        self, argv: Sequence[str], host: int = 0, timeout: float | None = None
    ) -> subprocess.CompletedProcess[bytes]:
        """Runs a command on a host, from which it can start ranks on both; it is killed if this process is."""
        process = subprocess.Popen(
            self.command(argv, host),
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=partial(end_with_parent, signal.SIGKILL),
        )
        with process:
            try:
                out, err = process.communicate(timeout=timeout)
            except BaseException:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                raise
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def environment(self) -> dict[str, str]:
        """With this, an Open MPI mpirun on the first host starts ranks on both, filling its slots first."""
        return {
            **os.environ,
            "PRTE_MCA_plm_ssh_agent": str(self.directory / "agent"),
            "PRTE_MCA_prte_default_hostfile": str(self.directory / "slots"),
            "PRTE_MCA_prte_keep_fqdn_hostnames": "0",
            "OMPI_MCA_btl_tcp_if_include": "eth0",
            "OMPI_MCA_mpi_yield_when_idle": "1",  # both hosts' ranks share the cores, of which MPI knows nothing
        }


@contextmanager
def two_hosts(*, gbit_s: float, slots: tuple[int, int]) -> Iterator[Hosts]:
    """Makes the hosts, and ends every process that is left on them.

    Args:
        gbit_s: bandwidth of the link, each way.
        slots: how many ranks to start on each.
    """
    holders: list[subprocess.Popen[str]] = []
    with _ended_in_order(), tempfile.TemporaryDirectory(prefix="rudra-hosts-") as name:
        directory = Path(name)
        lines = ["127.0.0.1 localhost", *(f"{a} {n}" for a, n in zip(ADDRESSES, NAMES, strict=True))]
        (directory / "hosts").write_text("\n".join(lines) + "\n")
        (directory / "slots").write_text("".join(f"{n} slots={s}\n" for n, s in zip(NAMES, slots, strict=True)))
        try:
            for host in NAMES:
                hold = ["sh", "-c", _HOLD, "sh", host, str(directory / "hosts")]
                argv = ["unshare", "--net", "--uts", "--ipc", "--mount", "--propagation", "private", *hold]
                holder = subprocess.Popen(
                    argv,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env=_environment(),
                    start_new_session=True,
                )
                holders.append(holder)
                assert holder.stdout is not None
                if holder.stdout.readline() != "ready\n":
                    raise RuntimeError(f"host {host} could not be made")
            pids = (holders[0].pid, holders[1].pid)
            _link(pids, gbit_s)
            agent = directory / "agent"
            agent.write_text(_agent(pids))
            agent.chmod(agent.stat().st_mode | stat.S_IXUSR)
            yield Hosts(directory, pids)
        finally:
            for holder in holders:
                _end(holder)


def _environment() -> dict[str, str]:
    return {**os.environ, "PATH": _PATH}


def _enter(pid: int) -> list[str]:
    return ["nsenter", "-t", str(pid), "-n", "-u", "-i", "-m"]


def _link(pids: tuple[int, int], gbit_s: float) -> None:
    """A cable between the hosts, and a token bucket at both ends.

    What a bucket holds goes through at any rate: 3 ms of the link's, so that little of a transfer does.
    """
    plug = f"ip link add eth0 type veth peer name eth0 netns {pids[1]}"
    subprocess.run([*_enter(pids[0]), *plug.split()], check=True, env=_environment())
    for pid, address in zip(pids, ADDRESSES, strict=True):
        burst = max(round(gbit_s * 1e9 / 8 * BURST_S), LEAST_BURST)
        bucket = f"tc qdisc add dev eth0 root tbf rate {gbit_s * 1000:g}mbit burst {burst} latency 50ms"
        for step in (f"ip addr add {address}/24 dev eth0", "ip link set eth0 up", bucket):
            subprocess.run([*_enter(pid), *step.split()], check=True, env=_environment())


def _agent(pids: tuple[int, int]) -> str:
    """In place of ssh: `agent HOST COMMAND…` enters the host's namespaces."""
    cases = "\n".join(f"  {name}) pid={pid} ;;" for name, pid in zip(NAMES, pids, strict=True))
    return f"""#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
case "$1" in
{cases}
  *) echo "no host $1" >&2; exit 1 ;;
esac
shift
exec nsenter -t "$pid" -n -u -i -m --wd="$PWD" sh -c "$*"
"""


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """SIGTERM, as of `timeout`, is an exception meanwhile, so that what is to be ended is."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _on(host: int) -> list[int]:
    """The processes on the host of this one, itself left out; none, if that was not made and this is the machine."""

    def network(process: int | str) -> str:
        with suppress(OSError):
            return os.readlink(f"/proc/{process}/ns/net")
        return ""

    if (its := network(host)) in {"", network("self")}:
        return []
    processes = map(int, filter(str.isdigit, os.listdir("/proc")))
    return [process for process in processes if process != host and network(process) == its]


def _end(holder: "subprocess.Popen[str]", patience_s: float = 5.0) -> None:
    """Ends what is left on a host, and the process that keeps its namespaces; with the last one they are gone."""
    deadline = time.monotonic() + patience_s
    while holder.returncode is None and (left := _on(holder.pid)) and time.monotonic() < deadline:
        for process in left:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.01)
    if holder.stdin is not None:
        holder.stdin.close()
    while holder.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    with suppress(ProcessLookupError):
        os.killpg(holder.pid, signal.SIGKILL)
    holder.wait()
    if holder.stdout is not None:
        holder.stdout.close()
