"""Two hosts on one machine with a link between them: setup, start of ranks on both, and speed of the link.

The hosts are Linux namespaces. Each has a host name, an address and a /dev/shm of its own. MPI between the hosts uses
TCP through the link, whose token bucket (`tc … tbf`) sets the bandwidth of each direction. The machine's own network
does not change. Each host gets half of the machine's cores, so that its ranks know how many they have.

The hosts end with the process that made them, however it ends. Ctrl-C and SIGTERM end all processes on the hosts, and
processes that `Hosts.start` started end with their parent.

`python -m benchmarks.links MODULE FUNCTION LEARNERS ARGUMENTS HOLDER HOLDER` imports everything once. Its forks enter
the hosts: a launcher on the first host, and on each host a fork server, which makes the ranks.
"""

import ctypes
import gc
import importlib
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from benchmarks.shared import learner_step_s
from rudra.bench.ranks import LEARNER, Measure, in_turns, on_ranks, step_s, train
from rudra.benchmark_report import Report, Spread, ratios, spread
from rudra.errors import RudraError, RunError
from rudra.job.job import Job
from rudra.log import log
from rudra.machine import cores, end_with_parent
from rudra.mpi.forkserver import SERVER
from rudra.mpi.quiet import rest
from rudra.mpi.rank_proxy import WORKER
from rudra.worker import import_modules, run

if TYPE_CHECKING:
    from mpi4py import MPI

ADDRESSES = ("10.213.0.1", "10.213.0.2")
NAMES = ("node1", "node2")
BURST_S, LEAST_BURST = 0.0032, 64 << 10  # burst in seconds at the link's rate, and minimum in bytes: one large packet
_TOOLS = ("unshare", "nsenter", "ip", "tc")
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_HOLD = (
    'hostname "$1" && mount --bind "$2" /etc/hosts && mount -t tmpfs -o mode=1777 shm /dev/shm && ip link set lo up && '
    "echo ready && exec cat"
)


def missing() -> str:
    """Returns the missing requirement for two hosts on this machine, or an empty text."""
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
        directory: directory of the hosts' files.
        pids: ids of the processes that keep the namespaces.
    """

    directory: Path
    pids: tuple[int, int]

    def start(self, argv: Sequence[str], host: int = 0, **streams: Any) -> "subprocess.Popen[str]":
        """Starts a command on a host. The command gets SIGTERM when this process ends.

        If the command is an Open MPI mpirun on the first host, it starts ranks on both hosts.

        Args:
            argv: the command.
            host: number of the host.
            streams: `stdout` and `stderr` of the command.
        """
        return subprocess.Popen(
            [*_enter(self.pids[host]), f"--wd={os.getcwd()}", *argv],
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # Ctrl-C of the terminal goes only to this process
            preexec_fn=end_with_parent,
            **streams,
        )

    def environment(self) -> dict[str, str]:
        """Returns variables with which an Open MPI mpirun on the first host starts ranks on both."""
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)),
            "PRTE_MCA_plm_ssh_agent": str(self.directory / "agent"),
            "PRTE_MCA_prte_default_hostfile": str(self.directory / "slots"),
            "PRTE_MCA_prte_keep_fqdn_hostnames": "0",
            "OMPI_MCA_btl_tcp_if_include": "eth0",
            "OMPI_MCA_mpi_yield_when_idle": "1",  # the ranks of both hosts share cores, which MPI does not know
        }
        env.pop(SERVER, None)  # the fork server is not on these hosts
        return env


@contextmanager
def two_hosts(*, gbit_s: float, slots: tuple[int, int]) -> Iterator[Hosts]:
    """Makes the hosts, and ends all their processes afterwards.

    Args:
        gbit_s: bandwidth of the link, each way.
        slots: number of ranks to start on each host.
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
    """Makes a cable between the hosts, and a token bucket at both ends.

    The content of a full bucket passes at any speed. It is 3 ms of the link's rate, a small part of a transfer.
    """
    plug = f"ip link add eth0 type veth peer name eth0 netns {pids[1]}"
    subprocess.run([*_enter(pids[0]), *plug.split()], check=True, env=_environment())
    for pid, address in zip(pids, ADDRESSES, strict=True):
        burst = max(round(gbit_s * 1e9 / 8 * BURST_S), LEAST_BURST)
        bucket = f"tc qdisc add dev eth0 root tbf rate {gbit_s * 1000:g}mbit burst {burst} latency 50ms"
        for step in (f"ip addr add {address}/24 dev eth0", "ip link set eth0 up", bucket):
            subprocess.run([*_enter(pid), *step.split()], check=True, env=_environment())


def _agent(pids: tuple[int, int]) -> str:
    """Returns a script that replaces ssh: `agent HOST COMMAND…` enters the host's namespaces."""
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
    """Turns SIGTERM, for instance from `timeout`, into an exception, so that cleanup code runs."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _on(host: int) -> list[int]:
    """Returns the processes on a host without its holder, or none if the namespaces are the machine's own."""

    def network(process: int | str) -> str:
        with suppress(OSError):
            return os.readlink(f"/proc/{process}/ns/net")
        return ""

    if (its := network(host)) in {"", network("self")}:
        return []
    processes = map(int, filter(str.isdigit, os.listdir("/proc")))
    return [process for process in processes if process != host and network(process) == its]


def _end(holder: "subprocess.Popen[str]", patience_s: float = 5.0) -> None:
    """Ends the processes on a host and the holder of its namespaces. The namespaces vanish with the last process."""
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


# Ranks on both hosts.

TURN = "turn"
"""Line of standard output at the end of a turn."""

MESSAGE = 1 << 20
ALONE = "computing alone: the same learners at the same time compute and update, and nothing is exchanged"
HALF = f"learners have one torch thread each, and half of this machine's {cores()} cores are each host's"
"""Notes of reports. The second note begins with a number."""

INSISTS_S, ENDS_S = 3.0, 10.0
"""Seconds after which a measurement that should end is asked again, and after which it is killed."""


def behind_a_link(
    measure: Measure, *, gbit_s: float, learners: int, turns: int, away: int | None = None, **arguments: Any
) -> list[dict[str, Any]]:
    """Calls a function on the ranks of two hosts, as `on_ranks` does.

    Shows the number of finished turns on a terminal, and leaves no process.

    Args:
        measure: function of a module that the hosts can import.
        gbit_s: bandwidth of the link, each way.
        learners: number of learners. The two additional ranks are on the first host.
        turns: how often each rank will call `turn_is_over`.
        away: number of learners on the second host, which are the last ones. None: half of the learners.
        arguments: keyword arguments that fit into JSON.

    Raises:
        RunError: the function failed. Its message is on standard error.
    """
    away = learners // 2 if away is None else away
    with two_hosts(gbit_s=gbit_s, slots=(LEARNER + learners - away, away)) as hosts:
        what = [measure.__module__, measure.__name__, str(learners), json.dumps(arguments)]
        said = hosts.directory / "stderr"
        with said.open("wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", __name__, *what, *map(str, hosts.pids)],
                env=hosts.environment() | {"OPENBLAS_NUM_THREADS": "1"},  # as in any fork server
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
        last = ""
        try:
            assert process.stdout is not None
            with process.stdout, tqdm(total=turns, unit=" turns", leave=False, disable=None) as bar:
                for last in process.stdout:
                    bar.update(last.strip() == TURN)
            code = process.wait()
        finally:
            _stop(process)
        if code:
            sys.stderr.write(said.read_text(errors="replace"))
            raise RunError("the benchmark failed on its hosts")
        figures: list[dict[str, Any]] = json.loads(last)
        return figures


def _stop(process: "subprocess.Popen[str]") -> None:
    """Asks a measurement to stop, and later to stop at once if it has not ended."""
    for patience_s in (INSISTS_S, ENDS_S):
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(patience_s)
    process.kill()
    process.wait()


def on_half_the_cores() -> None:
    """Leaves half of the cores to the other host's ranks. A single core is shared."""
    mine = sorted(os.sched_getaffinity(0))
    host, half = NAMES.index(socket.gethostname()), max(1, len(mine) // 2)
    os.sched_setaffinity(0, mine[-half:] if host else mine[:half])


def turn_is_over(comm: "MPI.Comm") -> None:
    """Reports the end of a turn. Every rank must call it."""
    rest(comm)
    if comm.rank == 0:
        print(TURN, flush=True)


def link_rate(comm: "MPI.Comm", seconds: float, gbit_s: float) -> float:
    """Returns the bytes per second that MPI sends from the first rank to the last, the same value on all ranks.

    Args:
        comm: communicator with ranks on both hosts.
        seconds: approximate duration of the measurement.
        gbit_s: bandwidth that the link should have.

    Raises:
        RunError: the link is faster, so nothing limits it.
    """
    messages = max(2, round(seconds * gbit_s * 1e9 / 8 / MESSAGE))
    buffer, last = np.zeros(MESSAGE, np.uint8), comm.size - 1
    rest(comm)
    began = time.perf_counter()
    if comm.rank == 0:
        for _ in range(messages):
            comm.Send(buffer, last)
        comm.recv(source=last)
    elif comm.rank == last:
        for _ in range(messages):
            comm.Recv(buffer, 0)
        comm.send(None, 0)
    taken = time.perf_counter() - began
    rest(comm)
    rate: float = comm.bcast(messages * MESSAGE / taken)
    if rate > 1.1 * gbit_s * 1e9 / 8:
        raise RunError(f"the link between the hosts is not limited to {gbit_s:g} Gbit/s: {rate / 1e6:.0f} MB/s")
    return rate


def in_turns_behind(
    comm: "MPI.Comm", gbit_s: float, rounds: int, figures: dict[str, list[Any]], *, seconds: float = 0.5
) -> Iterator[dict[str, Any]]:
    """Takes turns as `in_turns` does, on all ranks. The figure "link" of each turn is the link's measured speed."""
    for taken in in_turns(rounds, figures):
        taken["link"] = link_rate(comm, seconds, gbit_s)
        yield taken
        turn_is_over(comm)


def trained(ranks: "MPI.Comm", job: Job, path: Path, *, connected: bool) -> tuple[float, int, int]:
    """Runs a job on the ranks of the statistics server and the learners.

    Returns:
        Seconds between updates, or for unconnected learners between mini-batches of the slowest one. Then the bytes
        sent by the host that sends more, and the bytes of the weights.
    """
    before = sent_bytes()
    with train(job, path, ranks) as results:
        size = results.weights_of().nbytes
        each = [] if connected else [learner_step_s(results, learner) for learner in range(job.learners)]
        taken_s = step_s(results.updates["time_s"]) if connected else max(each)
    return taken_s, max(ranks.allgather(sent_bytes() - before)), size


def measured(
    report: Report,
    measure: Measure,
    models: Sequence[str],
    rounds: int,
    /,
    *,
    gbit_s: float,
    learners: int,
    **given: Any,
) -> dict[str, dict[str, Any]]:
    """Measures models behind a link, in turns.

    Args:
        report: report that gets a note: the rate of the link, or the reason why there are no two hosts.
        measure: function for `behind_a_link`, which uses `in_turns_behind`.
        models: names of the models.
        rounds: number of turns that count.
        gbit_s: bandwidth of the link.
        learners: number of learners, half of them on each host.
        given: arguments of `measure`.

    Returns:
        Model -> figure -> a value for each turn, of the first learner. Empty without two hosts.
    """
    if lacking := missing():
        report.notes = [f"no rows: {lacking}"]
        return {}
    turns = len(models) * (rounds + 1)
    ranks = behind_a_link(measure, gbit_s=gbit_s, learners=learners, turns=turns, rounds=rounds, **given)
    found: dict[str, dict[str, Any]] = ranks[LEARNER]
    links = [rate / 1e6 for name in models for rate in found[name]["link"]]
    report.notes = [f"the link, by MPI from one rank to one: {spread(links)} MB/s"]
    return found


def add_ways(
    report: Report,
    name: str,
    found: dict[str, list[Any]],
    ways: dict[str, str],
    *,
    crossing: dict[str, float],
    against: dict[str, Spread],
    unit: int = 1,
) -> None:
    """Adds a row for each way to train a model (rate, comparison, bound, share of the bound, bytes sent), and one for
    computing without communication.

    Args:
        report: report that gets the rows.
        name: name of the model.
        found: figures of the model.
        ways: names of the ways in the report.
        crossing: models that must cross the link in each direction in a step, by way.
        against: comparisons of some ways.
        unit: number of things that a step counts for, such as samples.
    """
    width = len(report.columns)
    rates = {way: [unit / s for s in found[way]] for way in (*ways, "alone")}
    for way, about in ways.items():
        by_link = [crossing[way] * found["bytes"][0] / rate for rate in found["link"]]
        bound = [unit / (alone + by) for alone, by in zip(found["alone"], by_link, strict=True)]
        cells = (spread(rates[way]), against.get(way, ""), spread(bound), ratios(rates[way], bound))
        row = (name, about, *cells, spread(found[f"{way}, sent"]))
        report.rows.append((*row, *[""] * (width - len(row))))
    report.rows.append((name, "computing alone", spread(rates["alone"]), *[""] * (width - 3)))


def sent_bytes() -> int:
    """Returns the number of bytes that this host has sent through the link until now."""
    lines = Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if "eth0:" in line).partition(":")[2].split()[8])


def _fork_onto(holder: int) -> int:
    """Forks this process onto a host. Returns the number of the fork's process, and 0 in the fork."""
    directory, process = os.getcwd(), os.fork()
    if not process:
        libc = ctypes.CDLL(None, use_errno=True)
        for kind in ("net", "uts", "ipc", "mnt"):
            with open(f"/proc/{holder}/ns/{kind}", "rb") as namespace:
                if libc.setns(namespace.fileno(), 0):
                    raise OSError(ctypes.get_errno(), f"cannot enter the {kind} namespace of a host")
        os.chdir(directory)
    return process


def _start_fork_server(holder: int, address: str, others: Sequence[socket.socket]) -> tuple[int, socket.socket]:
    """Starts a fork server for ranks on a host.

    Args:
        holder: process that keeps the namespaces of the host.
        address: name of an abstract socket. Each host has abstract sockets of its own.
        others: sockets that keep other fork servers alive.

    Returns:
        The process of the fork server, and a socket. The fork server ends when the socket is closed.
    """
    ours, theirs = socket.socketpair()
    if not (process := _fork_onto(holder)):
        for held in (ours, *others):
            held.close()
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(f"\0{address}")
        listener.listen()
        theirs.send(b".")
        null = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):  # a rank takes the streams of its proxy
            os.dup2(null, stream)
        run(["--serve", str(listener.detach()), str(theirs.detach())])
    theirs.close()
    ours.recv(1)
    return process, ours


def _launch_on_hosts(module: str, function: str, learners: int, arguments: str, holders: Sequence[int]) -> int:
    """Calls a function on the ranks of both hosts, prints the results, and returns an exit code."""
    import_modules()
    measure = getattr(importlib.import_module(module), function)
    gc.freeze()
    address, servers = f"rudra-{uuid.uuid4().hex}", list[tuple[int, socket.socket]]()
    for holder in holders:
        servers.append(_start_fork_server(holder, address, [ours for _, ours in servers]))
    if not (launcher := _fork_onto(holders[0])):
        end_with_parent()
        for _, ours in servers:
            ours.close()
        os.environ[SERVER] = f"{address} {' '.join(WORKER)}"
        try:
            print(json.dumps(on_ranks(measure, learners, **json.loads(arguments))))
        except RudraError as error:
            log.error(str(error))
            return 1
        return 0
    signal.signal(signal.SIGTERM, lambda number, _: os.kill(launcher, number))
    _, status = os.waitpid(launcher, 0)
    for server, _ in servers:  # its ranks have ended
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    module, function, learners, arguments, *holders = sys.argv[1:]
    sys.exit(_launch_on_hosts(module, function, int(learners), arguments, [*map(int, holders)]))
