"""A SLURM under test, and jobs in it."""

import os
import random
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from rudra.mpi.forkserver import SERVER
from tests import forks
from tests.waiting import eventually

ROOT = Path(__file__).resolve().parents[2]
LOCAL = ROOT / "slurm" / "local-slurm"
ASKED_S = 1.0
"""Time between two questions to SLURM, each of which starts a process."""

ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY"}

# A learner that takes its time without taking a core: how long a run lasts does not depend on the machine.
SLOW = """
import time
from torch import nn

class Slow(nn.Module):
    def __init__(self, pause_s):
        super().__init__()
        self.pause_s = pause_s
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    def forward(self, x):
        if self.training:
            time.sleep(self.pause_s)
        return self.layers(x)
"""
JOB = """
[model]
name = "slow:Slow"
options = { pause_s = 0.4 }

[data]
train_limit = 64
test_limit = 16

[training]
minibatch_size = 16
"""


ONE_CORE = "import os, random; os.sched_setaffinity(0, {random.choice([*os.sched_getaffinity(0)])})"
"""For each process: nodes do not know that they share this machine's cores, and ranks with a core each would poll."""


@dataclass(frozen=True)
class Cluster:
    """A SLURM, and how to talk to it.

    Attributes:
        env: that its commands need.
        directory: of the local one; None: it is there without us, and its nodes are not ours to kill.
    """

    env: dict[str, str]
    directory: Path | None

    def run(
        self, *command: str | Path, cwd: Path | None = None, timeout: float = 150
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=cwd, env=self.env, capture_output=True, text=True, timeout=timeout, check=False
        )

    def submit(
        self, directory: Path, *options: str, environment: str | Path = sys.prefix, anew: bool = False
    ) -> "Batch":
        """Writes a script for the slow job with `rudra slurm`, and submits it.

        Args:
            directory: of the job.
            options: of `rudra slurm`.
            environment: whose Python and MPI the job uses.
            anew: its processes import all by themselves. On a local SLURM they are forks otherwise, if they may be.
        """
        forked = self.directory is not None and not anew and Path(environment) == Path(sys.prefix)
        programs = {"mpirun": f'exec {environment}/bin/mpirun "$@"'}
        if forked:
            # mpirun looks for programs beside itself first.
            programs["mpirun"] = f'exec {environment}/bin/mpirun "${{@/#rudra/{directory}/env/bin/rudra}}"'
            programs["rudra"] = f'exec {shlex.join(forks.rudra(ONE_CORE))} "$@"'
        else:
            alone = f"taskset --cpu-list {random.choice([*os.sched_getaffinity(0)])} " if self.directory else ""
            programs["rudra"] = f'unset {SERVER}\nexec {alone}{environment}/bin/python -m rudra "$@"'
        (directory / "slow.py").write_text(SLOW)
        (directory / "slow.toml").write_text(JOB)
        (directory / "env" / "bin").mkdir(parents=True)
        for name, script in programs.items():
            file = directory / "env" / "bin" / name
            file.write_text(f"#!/bin/bash\n{script}\n")
            file.chmod(0o755)
        command = [*forks.rudra(), "slurm", "slow.toml", "--output", "slow.h5", "--submit"]
        done = self.run(*command, "--environment", directory / "env", *options, cwd=directory)
        assert done.returncode == 0, done.stderr
        found = re.search(r"submitted as job (\d+)", done.stdout)
        assert found, done.stdout
        return Batch(self, directory, found[1])

    def needs_to_be_ours(self) -> None:
        """Skips where it is not."""
        if self.directory is None:
            pytest.skip("needs a SLURM that it may do harm to: leave out --slurm=here")

    def local(self, command: str, node: str) -> None:
        assert self.directory
        subprocess.run([LOCAL, command, self.directory, node], check=True, timeout=150, stdin=subprocess.DEVNULL)


@dataclass(frozen=True)
class Batch:
    """A job in the queue."""

    cluster: Cluster
    directory: Path
    number: str

    def field(self, name: str) -> str:
        """What SLURM says of it."""
        said = self.cluster.run("scontrol", "show", "job", "--oneliner", self.number).stdout
        found = re.search(rf"\b{name}=(\S*)", said)
        return found[1] if found else ""

    @property
    def log(self) -> str:
        return "".join(file.read_text(errors="replace") for file in self.directory.glob(f"*-{self.number}.log"))

    def element(self, index: int) -> "Batch":
        """Of a job array."""
        return Batch(self.cluster, self.directory, f"{self.number}_{index}")

    def wait(self, what: str, until: Callable[[], bool], within_s: float = 240, *, every_s: float = 0.2) -> None:
        if not eventually(until, within_s, every_s=every_s):
            said = f"job {self.number} is {self.field('JobState')} ({self.field('Reason')})"
            self.cluster.run("scancel", self.number)
            pytest.fail(f"not within {within_s:.0f} s: {what}; {said}, its log: {self.log[-3000:]}")

    def wait_for_epoch(self, epoch: int = 1, within_s: float = 240) -> None:
        """Until the ranks have trained so far."""
        self.wait(f"epoch {epoch}", lambda: re.search(rf"epoch {epoch}/", self.log) is not None, within_s)

    def wait_for_restart(self, within_s: float = 240) -> None:
        """Until it is in the queue again."""
        self.wait("a restart", lambda: self.field("Restarts") == "1", within_s, every_s=ASKED_S)

    def wait_for_end(self, within_s: float = 420) -> str:
        """Until it has ended for good; returns how."""
        self.wait("the end", lambda: self.field("JobState") in ENDED, within_s, every_s=ASKED_S)
        return self.field("JobState")

    def completes(self) -> None:
        """Waits for the end, which must be a good one."""
        if (state := self.wait_for_end()) != "COMPLETED":
            pytest.fail(f"job {self.number} is {state}, its log: {self.log[-6000:]}")

    @property
    def ranks(self) -> dict[int, int]:
        """Rank -> process id, on this machine; of Open MPI."""
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            try:
                env, words = (process / "environ").read_bytes(), (process / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            rank = re.search(rb"(?:^|\0)PMIX_RANK=(\d+)", env)
            mine = f"SLURM_JOB_ID={self.number}".encode() in env.split(b"\0")
            if rank and mine and b"python" in words[0]:
                found[int(rank[1])] = int(process.name)
        return found


def left_over(directory: Path) -> list[int]:
    """Processes that a local SLURM has left over."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            text = (process / "environ").read_bytes() + (process / "cmdline").read_bytes()
        except OSError:
            continue
        if f"{directory}/".encode() in text and int(process.name) != os.getpid():
            found.append(int(process.name))
    return found
