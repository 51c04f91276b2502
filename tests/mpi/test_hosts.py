"""Ranks on two hosts with a link between them: that the link is as slow as told, and that nothing is left of them."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import two_hosts
from processes import HERE, ROOT

from benchmarks.links import NAMES, behind_a_link, missing
from tests.waiting import eventually

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.timeout(240),
    pytest.mark.skipif(bool(missing()), reason=f"no two hosts: {missing()}"),
]

SCRIPT = """
import two_hosts
from benchmarks.links import behind_a_link
behind_a_link(two_hosts.staying, gbit_s=1, learners=2, turns=1, there={!r})
"""


def test_a_link_carries_no_more_than_told_from_the_first_byte() -> None:
    """A transfer of as much as a larger bucket would hold."""
    told = behind_a_link(two_hosts.over_the_link, gbit_s=0.1, learners=2, turns=1)
    assert [rank["host"] for rank in told] == [NAMES[0]] * 3 + [NAMES[1]]
    sent = [rank["sent"] for rank in told]
    assert min(sent[:3]) > told[0]["bytes"] > 10 * sent[3], "what is counted is what has left a host"
    assert told[0]["rate"] < 1.02 * 0.1e9 / 8


def test_nothing_is_left_of_hosts_whose_command_is_ended(tmp_path: Path) -> None:
    there = tmp_path / "there"
    path = os.pathsep.join([str(ROOT), str(HERE)])
    env = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-c", SCRIPT.format(str(there))], env=env)
    try:
        assert eventually(there.exists)
        assert len(started_in(tmp_path)) > 6
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
        assert eventually(lambda: not started_in(tmp_path), 8)
        assert [file.name for file in tmp_path.iterdir()] == ["there"]
    finally:
        process.kill()
        process.wait()


def started_in(directory: Path) -> list[str]:
    """Processes that were started with this directory for temporary files."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if f"TMPDIR={directory}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(entry.name)
    return found


def test_windows_of_two_hosts_are_averaged() -> None:
    told = behind_a_link(two_hosts.windows_of_two_hosts, gbit_s=1, learners=2, turns=1)
    assert [rank["host"] for rank in told] == [NAMES[0]] * 3 + [NAMES[1]]
    found = told[0]
    assert len(set(found["nodes"])) == 2
    assert min(found["counts"]) > 0
    assert found["samples"] == 4 * 240
    assert found["losses"] == sorted(found["losses"], reverse=True)
    assert all(loss > 0 for loss in found["losses"])
