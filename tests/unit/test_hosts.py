"""Hosts of benchmarks: nothing on them outlives who made them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.links import _on, missing
from rudra.mpi.failures import lives
from tests.selection import covering
from tests.waiting import eventually

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(bool(missing()), reason=f"two hosts cannot be made: {missing()}"),
]

LASTS = "setsid sleep 600 & echo $$ $! >started.new; mv started.new started; exec sleep 600"
SCRIPT = """
from benchmarks.links import two_hosts
with two_hosts(gbit_s=10.0, slots=(1, 1)) as hosts:
    print(*hosts.pids, hosts.directory, flush=True)
    hosts.start(["sh", "-c", {lasts!r}], host=1).wait()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", covering([signal.SIGTERM, signal.SIGKILL], [signal.SIGTERM, signal.SIGINT, signal.SIGKILL, 0])
)
def test_nothing_is_left_of_hosts(tmp_path: Path, number: int) -> None:
    """Of two processes that last, one has left the other's session; SIGKILL leaves nobody who could find that."""
    lasts = LASTS if number else "true"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", SCRIPT.format(lasts=lasts)]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, **streams, text=True, env=env, cwd=tmp_path) as process:
        *told, directory = process.stdout.readline().split()
        pids, started = [*map(int, told)], tmp_path / "started"
        if number:
            assert all(map(lives, pids))
            assert eventually(started.exists)
            one, other = map(int, started.read_text().split())
            pids += [one, other]
            process.send_signal(number)
        code = process.wait(60)
        if number == signal.SIGKILL:
            os.kill(pids.pop(), signal.SIGKILL)
    assert eventually(lambda: not any(map(lives, pids)), 30)
    assert code == {signal.SIGTERM: 143, signal.SIGINT: -signal.SIGINT, signal.SIGKILL: -signal.SIGKILL, 0: 0}[number]
    assert number == signal.SIGKILL or not Path(directory).exists()


def test_a_host_that_could_not_be_made_is_not_taken_for_the_machine() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        assert _on(process.pid) == []
        process.kill()
