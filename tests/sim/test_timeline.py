"""What `rudra timeline` writes of simulated runs; tests/mpi/test_replay.py has those of real ranks."""

import gzip
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from traces import check_trace

import rudra
from rudra.cli.main import main
from rudra.core.records import TIMES
from rudra.results.timeline import _by_update

LEARNERS = 3


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return simulate(tmp_path_factory.mktemp("recorded") / "run.h5")


def simulate(path: Path, **tables: Any) -> Path:
    protocol = tables.pop("protocol", {"name": "async"})
    job = rudra.Job(
        model={"name": "mlp", "options": {"hidden": [8]}},
        data={"name": "digits", "train_limit": 200, "test_limit": 20},
        training={"epochs": 3, "minibatch_size": 5},
        protocol=protocol,
        cluster={"learners": LEARNERS, "threads_per_rank": 1},
        simulation={"jitter": 0.5, "bandwidth_bytes_per_s": 1e6, "latency_jitter_s": 0.01, "update_s": 0.005},
        **tables,
    )
    rudra.simulate(job, output=path, progress="quiet").close()
    return path


def test_a_timeline_holds_the_times_of_the_record(recorded: Path, tmp_path: Path) -> None:
    output = tmp_path / "trace.json"
    assert main(["timeline", str(recorded), "-o", str(output)]) == 0
    taken = check_trace(output.read_text(), LEARNERS)
    with rudra.open_results(recorded) as results:
        minibatches, updates, epochs = results.minibatches, results.updates, results.epochs
    for learner in range(LEARNERS):
        mine = minibatches[minibatches["learner"] == learner]
        for name in (kind.removesuffix("_s") for kind in TIMES):
            assert taken.get((2 + learner, name), 0.0) == pytest.approx(mine[f"{name}_s"].sum(), abs=1e-6)
        assert 0 <= mine["time_s"][0] - mine["compute_s"][0] <= 0.02, "the start is a message too"
        nothing_between = mine["time_s"][1:] - mine["compute_s"][1:]
        ended = sum((mine[name][:-1] for name in TIMES[1:]), mine["time_s"][:-1])
        assert nothing_between == pytest.approx(ended), "a learner always does one of these"
    assert taken[0, "update"] == pytest.approx(updates["update_s"].sum())
    assert taken[1, "evaluation"] == pytest.approx(epochs["evaluation_s"].sum())
    spans = [event for event in json.loads(output.read_text())["traceEvents"] if event["ph"] == "X"]
    first = next(event for event in spans if event["name"] == "compute" and event["pid"] == 3)
    row = minibatches[(minibatches["learner"] == 1) & (minibatches["step"] == 0)][0]
    assert first["args"] == {"step": 0, "timestamp": 0, "loss": row["loss"]}
    assert len([event for event in spans if event["name"] == "update"]) == len(updates)


@pytest.mark.parametrize(("protocol", "rule"), [("hardsync", "synchronous"), ("async", "merged")])
def test_activations_are_arrows_to_the_stage_server_and_back(tmp_path: Path, protocol: str, rule: str) -> None:
    placed = {"protocol": {"name": protocol}, "placement": {"cut": 3, "rule": rule}}
    path, output = simulate(tmp_path / "run.h5", **placed), tmp_path / "trace.json"
    assert main(["timeline", str(path), "-o", str(output)]) == 0
    taken = check_trace(output.read_text(), LEARNERS)
    with rudra.open_results(path) as results:
        stages = results.stages
        pieces = list(_by_update(results.pieces("stages", 7)))
    assert taken[2 + LEARNERS, "conclude"] == pytest.approx(stages["compute_s"].sum())
    events = json.loads(output.read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X" and e["name"] == "compute"]
    for name in ("activations", "returned"):
        begins, ends = ([e for e in events if e["name"] == name and e["ph"] == phase] for phase in "sf")
        assert len(begins) == len(ends) == len(stages)
        for event in begins if name == "activations" else ends:
            mine = [span for span in spans if span["pid"] == event["pid"]]
            assert any(s["ts"] - 1 <= event["ts"] <= s["ts"] + s["dur"] + 1 for s in mine), "while the learner computes"
    assert np.array_equal(np.concatenate(pieces), stages)
    assert all(len(np.intersect1d(a["timestamp"], b["timestamp"])) == 0 for a, b in pairwise(pieces))


def test_a_compressed_timeline_is_the_same(recorded: Path, tmp_path: Path) -> None:
    for name in ("trace.json", "trace.json.gz"):
        assert main(["timeline", str(recorded), "-o", str(tmp_path / name)]) == 0
    assert gzip.decompress((tmp_path / "trace.json.gz").read_bytes()) == (tmp_path / "trace.json").read_bytes()


def test_without_minibatches_the_servers_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = simulate(tmp_path / "run.h5", results={"minibatches": False})
    assert main(["timeline", str(path)]) == 0
    said = capsys.readouterr()
    assert "holds no times of learners: [results] minibatches = false" in said.err
    assert f"wrote {tmp_path / 'run.trace.json'}: " in said.out
    assert set(check_trace((tmp_path / "run.trace.json").read_text(), LEARNERS)) == {(0, "update"), (1, "evaluation")}


def test_what_is_no_number_is_null(recorded: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.h5"
    path.write_bytes(recorded.read_bytes())
    with h5py.File(path, "r+") as file:
        rows = file["minibatches"][()]
        rows["loss"][5] = np.nan
        file["minibatches"][...] = rows
    assert main(["timeline", str(path), "-o", str(tmp_path / "trace.json")]) == 0
    check_trace((tmp_path / "trace.json").read_text(), LEARNERS)


def test_learners_of_a_bank_have_the_names_of_their_streams(tmp_path: Path) -> None:
    bank = {"learners": 6, "learners_per_device": 3, "bank": "graphs", "streams": 2, "threads_per_rank": 1}
    job = rudra.Job(
        model={"name": "mlp", "options": {"hidden": [8]}},
        data={"name": "digits", "train_limit": 60, "test_limit": 20},
        training={"epochs": 1, "minibatch_size": 5},
        protocol={"name": "sma"},
        cluster=bank,
    )
    rudra.simulate(job, output=tmp_path / "run.h5", progress="quiet").close()
    assert main(["timeline", str(tmp_path / "run.h5"), "-o", str(tmp_path / "trace.json")]) == 0
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    learners = [name for name in names if name.startswith("learner")]
    assert learners == [f"learner {i} (stream {i % 3 % 2})" for i in range(6)]


def test_a_long_run_is_read_in_pieces(recorded: Path) -> None:
    with rudra.open_results(recorded) as results:
        pieces = list(results.pieces("minibatches", 7))
        whole = results.minibatches
    assert {len(piece) for piece in pieces[:-1]} == {7}
    assert np.array_equal(np.concatenate(pieces), whole)


@pytest.mark.parametrize(
    ("output", "said"),
    [("nowhere/trace.json", "nowhere/trace.json: directory nowhere does not exist"), (".", ".: is a directory")],
)
def test_a_mistake_is_one_line(recorded: Path, capsys: pytest.CaptureFixture[str], output: str, said: str) -> None:
    assert main(["timeline", str(recorded), "-o", output]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.count("\n") == 1
