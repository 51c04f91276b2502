"""Several servers that own a part of the weights each: as one server, whoever is fast and whoever dies."""

from pathlib import Path
from typing import Any

import pytest
from fuzzing import cases
from hypothesis import given
from hypothesis import strategies as st
from points import SAMPLES, make_job

import rudra
from rudra.core.events import Event, Received
from rudra.core.messages import CheckpointWritten, MessageKind
from rudra.errors import ConfigError, RunError
from rudra.job.job import Job
from rudra.roles import Machine
from rudra.roles.machine import States
from rudra.roles.statistics import StatisticsServer
from rudra.simulation.checked_run import timing, validate

pytestmark = pytest.mark.slow

EXPECTED = ("no learner is left", "died before training began")


@st.composite
def runs(draw: st.DrawFn) -> Job:
    """A small network with statistics that travel, servers that lag behind each other, and learners that die."""
    learners = draw(st.integers(1, 6))
    protocol = draw(st.sampled_from(["hardsync", "softsync", "async"]))
    times = st.sampled_from([0.0, 1e-3, 0.05])
    dying = draw(st.lists(st.integers(0, learners - 1), max_size=2, unique=True))
    optimizer = draw(st.sampled_from([{"momentum": 0.9}, {"name": "adam"}, {"name": "rmsprop", "momentum": 0.5}]))
    groups = draw(st.sampled_from([(), ({"parameters": "*.bias", "rate_factor": 2.0},)]))
    n = {"n": draw(st.integers(1, learners))} if protocol == "softsync" else {}
    modulations = ["none", *(["gradient_staleness"] if protocol == "async" and optimizer.get("name") is None else [])]
    return make_job(
        protocol,
        learners,
        topology={"name": "sharded", "options": {"shards": draw(st.integers(2, 4))}},
        protocol={**n, "modulation": draw(st.sampled_from(modulations))},
        training={"epochs": 2, "seed": draw(st.integers(0, 2**20)), "evaluate": False},
        optimizer={**optimizer, "groups": groups},
        simulation={
            "compute_s": 0.05,
            "jitter": draw(st.sampled_from([0.0, 0.9])),
            "latency_jitter_s": draw(times),
            "bandwidth_bytes_per_s": draw(st.sampled_from([1e4, 1e5, 1e9])),  # a part takes up to 0.1 s
            "message_s": draw(times),
            "update_s": draw(times),
            "detection_s": draw(times),
            "faults": [{"learner": i, "dies_at_s": draw(st.floats(0.1, 3.0))} for i in dying],
        },
    )


@cases(30)
@given(st.data())
def test_one_server_would_have_done_the_same(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """The record, replayed by one server: the same updates, digests of weights, and final weights, bit for bit."""
    job = data.draw(runs())
    path = tmp_path_factory.mktemp("run") / "run.h5"
    try:
        results = rudra.simulate(job, output=path, progress="quiet")
    except RunError as error:
        if not any(text in str(error) for text in EXPECTED):
            raise
        return
    with results:
        totals, digest = results.totals[0], results.state["weights_sha256"]
    assert totals["pushed"] == sum(totals[key] for key in ("applied", "pending", "discarded", "lost"))
    replayed = rudra.replay(path, job=job, quiet=True)
    assert replayed.difference is None, replayed.difference
    assert replayed.weights_sha256 == digest


def final(job: Job, path: Path) -> tuple[str, Any]:
    with rudra.simulate(job, output=path, progress="quiet") as results:
        return results.state["weights_sha256"], results.gradients


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_hardsync_is_that_of_one_server(tmp_path: Path, shards: int) -> None:
    one = make_job("hardsync", 4)
    several = one.with_(topology={"name": "sharded", "options": {"shards": shards}})
    (sha, rows), (other, others) = final(one, tmp_path / "one.h5"), final(several, tmp_path / "several.h5")
    assert sha == other
    assert rows.tobytes() == others.tobytes()


def test_what_a_learner_left_between_parts_is_dropped_by_all(tmp_path: Path) -> None:
    """The first server has its part long before the other, whose link is slow, when the learner dies."""
    job = make_job(
        "async",
        2,
        topology={"name": "sharded", "options": {"shards": 2}},
        training={"epochs": 1},
        simulation={
            "jitter": 0.0,
            "slowdown": {},
            "latency_jitter_s": 0.0,
            "compute_s": 1.0,
            "bandwidth_bytes_per_s": 3000.0,  # the parts go one after the other
            "faults": [{"learner": 1, "dies_at_s": 3.0}],
            "detection_s": 0.2,
        },
    )
    with rudra.simulate(job, output=tmp_path / "run.h5", progress="quiet") as results:
        (event,) = results.events[results.events["kind"] == b"lost"]
        assert results.plan().roles[event["role"]].name == "learner 1"
        applied = results.gradients["samples"][results.gradients["learner"] == 1].sum()
        assert results.learners["samples"][1] == applied, "what did not arrive as a whole counts nowhere"
        assert results.totals["samples"][0] >= SAMPLES
    assert rudra.replay(tmp_path / "run.h5", job=job, quiet=True).identical


@pytest.mark.parametrize(
    ("protocol", "tables"),
    [
        ("softsync", {"topology": {"name": "sharded", "options": {"shards": 2}}}),
        ("hardsync", {"placement": {"cut": 1, "rule": "synchronous", "servers": 2}}),
    ],
    ids=["shards", "stages"],
)
@pytest.mark.parametrize("latency_s", [0.0, 0.05])
def test_all_rows_of_a_checkpoint_are_there_before_it_counts(
    protocol: str, tables: dict[str, Any], latency_s: float
) -> None:
    """Another owner's part of a checkpoint may come before its report of the update."""
    costs = {"compute_s": 0.1, "update_s": 0.02, "latency_s": latency_s, "local_latency_s": latency_s}
    run = make_job(protocol, 2, results={"checkpoint_every": "1 updates", "report_s": 0.0}, **tables)
    run = run.with_(training={"epochs": 2}, simulation={**costs, "latency_jitter_s": 0.0})
    recorded, checkpoints = 0, list[int]()

    def look(machine: Machine, before: States, event: Event) -> None:
        nonlocal recorded
        validate(machine, before, event)
        if isinstance(machine, StatisticsServer) and isinstance(event, Received):
            message = event.message
            recorded += len(message.rows) if message.kind is MessageKind.UPDATES else 0
            if isinstance(message, CheckpointWritten):
                assert recorded >= message.timestamp
                checkpoints.append(message.timestamp)

    rows = timing(run, 10 * SAMPLES, look)
    assert rows.code == 0
    assert len(checkpoints) > 5
    assert len(rows["updates"]) == recorded > checkpoints[-1] / 2


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        (
            {"optimizer": {"clip_norm": 1.0}},
            r"'sharded' is not supported with \[optimizer\] clip_norm; remove clip_norm, or use topology base",
        ),
        ({"cluster": {"gradient_format": "float16"}}, r"with \[cluster\] gradient_format = 'float16'; use 'float32'"),
        ({"simulation": {"batching": "big-batch"}}, "batching = 'big-batch'; use batching = 'none' or 'vmap'"),
        ({"topology": {"options": {"shards": 0}}}, r"options.shards = 0 is not supported; use a whole number >= 1"),
        (
            {"topology": {"options": {"shards": True}}},
            r"options.shards = True is not supported; use a whole number >= 1",
        ),
    ],
)
def test_what_needs_the_whole_vector_is_refused(tables: dict[str, Any], message: str) -> None:
    job = make_job("async", 2, topology={"name": "sharded"})
    with pytest.raises(ConfigError, match=message):
        job.with_(**tables)


def test_a_hook_sees_no_part_of_the_weights(tmp_path: Path) -> None:
    def look(moment: rudra.Moment) -> None:
        moment.weights()

    job = make_job("async", 2, topology={"name": "sharded"})
    with pytest.raises(RunError, match="parameter server holds a part of the weights"):
        rudra.simulate(job.with_(hooks=[{"call": look, "at": "update"}]), output=tmp_path / "a.h5", progress="quiet")
    seen: list[set[str]] = []
    hook = {"call": lambda moment: seen.append(set(moment.weights())), "at": "epoch"}
    with rudra.simulate(job.with_(hooks=[hook]), output=tmp_path / "b.h5", progress="quiet") as results:
        assert [len(names) for names in seen] == [9] * len(results.epochs)
