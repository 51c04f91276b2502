"""The golden runs come to the same bits as ever; after a change that is meant to change them, see `bits.py`."""

import json
from pathlib import Path

import pytest
import runs_on_ranks
from bits import FILE, KEY, bits
from runs import ON_RANKS, RUNS, warm_start

import rudra
from rudra.bench.ranks import on_ranks
from rudra.mpi.forkserver import fork_server

KNOWN = json.loads(FILE.read_text()).get(KEY)

pytestmark = [
    pytest.mark.golden,
    pytest.mark.skipif(KNOWN is None, reason=f"nobody has written the bits of {KEY}: tests/golden/bits.py"),
]


def test_every_run_is_known() -> None:
    assert {*RUNS, "adv async, a warm start"} == set(KNOWN)
    assert len({weights for weights, _ in KNOWN.values()}) == len(KNOWN), "two runs are the same one"


@pytest.mark.parametrize("name", RUNS)
def test_virtual_time(name: str, tmp_path: Path) -> None:
    assert bits(rudra.simulate(RUNS[name], output=tmp_path / "run.h5", progress="quiet")) == KNOWN[name]


def test_warm_start(tmp_path: Path) -> None:
    found = bits(rudra.simulate(warm_start(tmp_path), output=tmp_path / "run.h5", progress="quiet"))
    assert found == KNOWN["adv async, a warm start"]


@pytest.mark.slow
@pytest.mark.mpi
def test_real_ranks_and_what_they_resume(tmp_path: Path) -> None:
    with fork_server():
        jobs = {str(tmp_path / f"{name}.h5"): RUNS[name] for name in ON_RANKS}
        on_ranks(runs_on_ranks.train_as_needed, 6, jobs=jobs)  # the tree has eight ranks
        for name, output in zip(ON_RANKS, jobs, strict=True):
            assert bits(rudra.open_results(output)) == KNOWN[name], name
        for name in ("base hardsync", "adv hardsync"):
            output, half = tmp_path / f"{name}, resumed.h5", RUNS[name].with_(training={"epochs": 1})
            rudra.run(half, output=output, progress="quiet").close()
            whole = rudra.run(RUNS[name], output=output, resume=True, progress="quiet")
            assert bits(whole) == KNOWN[name], f"{name}, resumed"
