"""Measuring on the ranks of two hosts with a link between them: starting them, and what the link carries.

The hosts are of one machine, and share its cores: each gets half of them, so that its ranks know how many they have.
`python -m rudra.bench.behind MODULE FUNCTION LEARNERS ARGUMENTS` runs on the first host, and starts the ranks on both.
"""

import importlib
import json
import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from rudra.bench.hosts import NAMES, two_hosts
from rudra.bench.ranks import LEARNER, Measure, on_ranks
from rudra.errors import RudraError, RunError
from rudra.log import log
from rudra.machine import end_with_parent
from rudra.mpi.forkserver import SERVER
from rudra.mpi.session import rest

if TYPE_CHECKING:
    from mpi4py import MPI

TURN = "turn"
"""A line of standard output that says that one is over."""

MESSAGE = 1 << 20
INSISTS_S, ENDS_S = 3.0, 10.0
"""How long a measurement may take to end when it is told to, before it is told again, and before it is killed."""


def behind_a_link(
    measure: Measure, *, gbit_s: float, learners: int, turns: int, away: int | None = None, **arguments: Any
) -> list[dict[str, Any]]:
    """Calls a function on the ranks of two hosts, as `on_ranks` does.

    Shows on a terminal how many turns are over, and leaves no process.

    Args:
        measure: a function of a module that can be imported there.
        gbit_s: of the link, each way.
        learners: there are two ranks more, which are on the first host.
        turns: how often `turn_is_over` will be called on each rank.
        away: how many learners, the last ones, are on the second host; without it, half of them.
        arguments: keyword arguments that fit into JSON.

    Raises:
        RunError: it failed there, after what was said on standard error.
    """
    away = learners // 2 if away is None else away
    with two_hosts(gbit_s=gbit_s, slots=(LEARNER + learners - away, away)) as hosts:
        what = [measure.__module__, measure.__name__, str(learners), json.dumps(arguments)]
        command = [sys.executable, "-m", __name__, *what]
        env = hosts.environment() | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
        env.pop(SERVER, None)  # it is not on these hosts
        said = hosts.directory / "stderr"
        with said.open("wb") as stderr:
            process = subprocess.Popen(
                hosts.command(command),
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,  # Ctrl-C of the terminal comes to this process alone
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
            _end(process)
        if code:
            sys.stderr.write(said.read_text(errors="replace"))
            raise RunError("the benchmark failed on its hosts")
        figures: list[dict[str, Any]] = json.loads(last)
        return figures


def _end(process: "subprocess.Popen[str]") -> None:
    """Tells a measurement to stop, and then to stop now, if it has not ended."""
    for patience_s in (INSISTS_S, ENDS_S):
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(patience_s)
    process.kill()
    process.wait()


def on_half_the_cores() -> None:
    """Leaves the other half of the cores to the other host's ranks; one core is shared."""
    mine = sorted(os.sched_getaffinity(0))
    host, half = NAMES.index(socket.gethostname()), max(1, len(mine) // 2)
    os.sched_setaffinity(0, mine[-half:] if host else mine[:half])


def turn_is_over(comm: "MPI.Comm") -> None:
    """To be called by all ranks."""
    rest(comm)
    if comm.rank == 0:
        print(TURN, flush=True)


def link_rate(comm: "MPI.Comm", seconds: float, gbit_s: float) -> float:
    """Bytes per second that MPI brings from the first rank to the last, in about that time; the same on all ranks.

    Args:
        comm: of ranks on both hosts.
        seconds: for which it sends.
        gbit_s: what the link should have.

    Raises:
        RunError: it is faster than that, so that nothing limits it.
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


def sent_bytes() -> int:
    """What has left this host by the link so far."""
    lines = Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if "eth0:" in line).partition(":")[2].split()[8])


if __name__ == "__main__":
    module, function, learners, arguments = sys.argv[1:]
    measure = getattr(importlib.import_module(module), function)
    try:
        print(json.dumps(on_ranks(measure, int(learners), **json.loads(arguments))))
    except RudraError as error:
        log.error(str(error))
        sys.exit(1)
