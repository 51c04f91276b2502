"""Campaigns of faults in their smallest size, in which runs survive what hits them, and a log can be followed."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests import forks
from tests.campaigns.phases import job_text
from tests.selection import CAMPAIGN

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
MODULE = "import runpy; runpy.run_module('tests.campaigns', run_name='__main__'); sys.exit()"
SMALL = "small.toml"
CAMPAIGNS = [
    pytest.param([], {"learners, softsync": 1, "parameter server": 1, "whole job, hardsync": 1}, marks=CAMPAIGN),
    (["--checksums"], {"1.7 MB, learners, softsync": 1}),
    (["--phases", "base"], {"base, learner 1": ""}),
    pytest.param(["--jobs", SMALL], {"a rank killed": 1}, marks=CAMPAIGN),
]


def campaign(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*forks.rudra(MODULE), *arguments]
    env = {**os.environ, "TMPDIR": str(directory)}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=550, check=False)


@pytest.mark.parametrize(
    ("which", "rows"), CAMPAIGNS, ids=lambda each: "-".join(each) if isinstance(each, list) else ""
)
def test_runs_survive_and_each_fault_has_a_line(which: list[str], rows: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / SMALL).write_text(job_text('name = "base"', learners=2))
    done = campaign(
        tmp_path, *(str(tmp_path / SMALL) if word == SMALL else word for word in which), "--quick", "--json"
    )
    report = json.loads(done.stdout)
    assert done.returncode == 0, (report, done.stderr)
    assert {row[0]: row[1] for row in report["rows"]} == rows
    assert all(re.match(r"campaign: \d of \d faults, \d+\.\d min: ", line) for line in done.stderr.splitlines())
    assert done.stderr
    assert list(tmp_path.glob("*rudra*")) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--times", "3"], "--times needs --jobs"),
        (["--phases", "base", "ring"], "argument --phases: invalid choice: 'ring'"),
        (["--checksums", "--jobs", "digits"], "argument --jobs: not allowed with argument --checksums"),
    ],
)
def test_mistakes_are_told_before_anything_runs(arguments: list[str], said: str, tmp_path: Path) -> None:
    done = campaign(tmp_path, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
