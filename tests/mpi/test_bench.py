"""Every benchmark in its smallest size: it runs, compares and judges. What it measures here means nothing."""

import gzip
import json
import math
import os
import struct
import subprocess
from pathlib import Path

import pytest
from compiler import needs_compiler

import benchmarks
from benchmarks.links import missing
from rudra import bench
from tests import forks
from tests.selection import CAMPAIGN

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("RUDRA_DATA", ROOT.parent / "shared" / "data"))
BENCHMARKS = bench.BENCHMARKS | benchmarks.BENCHMARKS


def needs_data(name: str) -> pytest.MarkDecorator:
    reason = f"no {name} in {DATA}; RUDRA_DATA can name another place"
    return pytest.mark.skipif(not (DATA / name).is_dir(), reason=reason)


needs_hosts = pytest.mark.skipif(bool(missing()), reason=f"no two hosts: {missing()}")
NEEDS = {
    "compile": needs_compiler,
    "tta": needs_data("fashion-mnist"),
    "reduction": needs_hosts,
    "islands": needs_hosts,
    "overlap_10g": needs_hosts,
}


COVERING = ["checkpoint", "input", "overhead", "pingpong", "strategies", "update"]
"""Benchmarks of each kind that take a second or two: of this process and of ranks, with data and without."""

SAMPLES = 1500
"""More than a benchmark in its smallest size takes."""


@pytest.fixture(scope="session")  # tests that share what a module sets up would run in one process
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the first samples of Fashion-MNIST, if it is there: each run reads a whole file."""
    directory = tmp_path_factory.mktemp("data")
    for file in (DATA / "fashion-mnist").glob("*-ubyte*"):
        with (gzip.open if file.suffix == ".gz" else open)(file) as stream:
            kind, _ = struct.unpack(">2i", stream.read(8))
            images = "images" in file.name
            content = (stream.read(8) if images else b"") + stream.read(SAMPLES * (28 * 28 if images else 1))
        small = directory / "fashion-mnist" / file.name.removesuffix(".gz")
        small.parent.mkdir(exist_ok=True)
        small.write_bytes(struct.pack(">2i", kind, SAMPLES) + content)
    return directory


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[*([] if name in COVERING else [CAMPAIGN]), *([NEEDS[name]] if name in NEEDS else [])])
        for name in BENCHMARKS
    ],
)
def test_a_benchmark_prints_ratios_and_goals(name: str, data: Path, tmp_path: Path) -> None:
    command = [*forks.rudra(), "bench", name, "--quick", "--json"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path), "RUDRA_DATA": str(data)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=550, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert report["benchmark"] == name
    for row in report["rows"]:
        assert len(row) == len(report["columns"])
        for cell in row:
            if isinstance(cell, dict):
                assert cell["low"] <= cell["median"] <= cell["high"]
                assert all(map(math.isfinite, cell.values()))
    assert bool(report["goals"]) == (BENCHMARKS[name][1] != "no goal")
    assert list(tmp_path.glob("*rudra*")) == []
