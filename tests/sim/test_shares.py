"""Learners that share the batches of one stream (`cluster.shares`), against one learner, and over whole passes."""

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import rudra
from rudra.core import work
from rudra.core.work import apportion, by_speed
from rudra.errors import ConfigError
from rudra.job.job import Job

BASE = {"name": "base"}
ADV = {"name": "adv", "options": {"fan_out": 2}}
ALLREDUCE = {"name": "groups", "options": {"groups": 1}}
TWO_GROUPS = {"name": "groups", "options": {"groups": 2}}


def shared(shares: tuple[float, ...] | Literal["auto"], minibatch_size: int = 8, **tables: Any) -> Job:
    return Job(
        model={"name": "mlp"},
        data={"name": "digits", "train_limit": 320},
        training={"minibatch_size": minibatch_size, "seed": 3, "epochs": 2, "evaluate": False},
        optimizer={"learning_rate": 0.05, "momentum": 0.9},
        cluster={"learners": 2 if shares == "auto" else max(1, len(shares)), "threads_per_rank": 1, "shares": shares},
        protocol={"name": "hardsync", "reference_batch_size": 32, **tables.pop("protocol", {})},
        **tables,
    )


def final(path: Path) -> torch.Tensor:
    with rudra.open_results(path) as results:
        return torch.from_numpy(results.weights)


@pytest.mark.each_value
@pytest.mark.parametrize("topology", [BASE, ADV, ALLREDUCE], ids=str)
@pytest.mark.parametrize("shares", [(1.0, 3.0), (2.0, 1.0, 5.0), (1.0, 1.0, 1.0, 1.0)], ids=str)
def test_parts_of_a_batch_are_the_batch(tmp_path: Path, topology: Any, shares: tuple[float, ...]) -> None:
    """20 updates of one learner with the whole batch, of the same stream."""
    size, training = 8, {"epochs": 1}
    batch = size * len(shares)
    data = {"name": "digits", "train_limit": 20 * batch}
    parts = shared(shares, size, topology=topology).with_(training=training, data=data)
    whole = shared((), batch).with_(training=training, data=data)
    for name, job in (("parts", parts), ("whole", whole)):
        with rudra.simulate(job, output=tmp_path / f"{name}.h5", progress="quiet") as results:
            assert len(results.updates) == 20
    torch.testing.assert_close(final(tmp_path / "parts.h5"), final(tmp_path / "whole.h5"), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("topology", "protocol", "shares"),
    [
        (BASE, "hardsync", (1.0, 2.5, 1.5)),
        (ALLREDUCE, "hardsync", (1.0, 2.5, 1.5)),
        (TWO_GROUPS, "async", (1.0, 3.0, 2.0, 2.0)),
    ],
    ids=str,
)
def test_every_sample_is_drawn_once_in_a_pass_and_the_run_replays(
    tmp_path: Path, topology: Any, protocol: str, shares: tuple[float, ...]
) -> None:
    job = shared(shares, topology=topology, protocol={"name": protocol}).with_(
        simulation={"jitter": 0.9, "slowdown": {0: 3.0}}
    )
    path = tmp_path / "run.h5"
    with rudra.simulate(job, output=path, progress="quiet") as results:
        rows = results.gradients
        learners = results.learners
    streams = np.unique(rows["stream"])
    assert len(streams) == (2 if topology is TWO_GROUPS else 1)
    for stream in streams:
        own = np.sort(rows[rows["stream"] == stream], order="first")
        assert own["first"][0] == 0
        assert (own["first"][1:] == own["first"][:-1] + own["samples"][:-1]).all(), "no gap, and nothing twice"
    for row in learners:
        assert row["samples"] == rows["samples"][rows["learner"] == row["learner"]].sum()
    assert rudra.replay(path, quiet=True).identical


def test_averages_over_periods_record_the_first_sample_of_each(tmp_path: Path) -> None:
    """Samples of the other learner lie between the mini-batches of a period; and the checkpoint knows the end."""
    path = tmp_path / "run.h5"
    tables: dict[str, Any] = {"topology": {"name": "replicas"}, "protocol": {"name": "average"}}
    job = shared((1.0, 3.0), averaging={"period": 3}, **tables).with_(training={"epochs": 1}, data={"train_limit": 192})
    with rudra.simulate(job, output=path, progress="quiet") as results:
        rows = results.gradients
    for learner, count, offset in ((0, 4, 0), (1, 12, 4)):
        own = rows[rows["learner"] == learner]
        assert own["samples"].tolist() == [3 * count] * 4
        assert own["first"].tolist() == [48 * average + offset for average in range(4)]
    assert rudra.replay(path, quiet=True).identical


@pytest.mark.parametrize("topology", [ALLREDUCE, BASE], ids=str)
def test_when_a_learner_dies_those_left_share_on(tmp_path: Path, topology: Any) -> None:
    faults = [{"learner": 1, "dies_at_s": 0.4}]
    job = shared((1.0, 2.0, 1.0), topology=topology).with_(simulation={"compute_s": 0.05, "faults": faults})
    path = tmp_path / "run.h5"
    with rudra.simulate(job, output=path, progress="quiet") as results:
        rows, lost = results.gradients, results.events["kind"] == b"lost"
        assert (results.status, lost.sum()) == ("finished", 1)
        (account,) = results.learners[results.learners["learner"] == 1]
    own = rows[rows["learner"] == 1]
    assert (account["pushed"], account["samples"]) == (len(own), own["samples"].sum())
    assert 0 < (rows["learner"] == 1).sum() < (rows["learner"] == 0).sum()
    after = rows[rows["update"] > rows["update"][rows["learner"] == 1].max() + 1]
    if topology is ALLREDUCE:  # they have begun anew: 16 samples in halves, and none is left out
        assert set(after["samples"]) == {8}
        own = np.sort(rows, order="first")
        assert (own["first"][1:] == own["first"][:-1] + own["samples"][:-1]).all()
    else:  # the server goes on with what it gets, and nobody is told
        assert set(after["samples"]) == {6}
    assert rudra.replay(path, quiet=True).identical


def test_shares_that_fit_the_speeds_bring_the_ideal_time(tmp_path: Path) -> None:
    """In virtual time: two learners of which one is three times slower share the work as it takes equally long."""
    cost = {"compute_s": {1: 0.001, 64: 0.064}, "slowdown": {0: 3.0}, "jitter": 0.0, "update_s": 0.0, "gradient_s": 0.0}
    cost |= {"latency_s": 0.0, "bandwidth_bytes_per_s": 1e12, "evaluation_s": 0.0, "message_s": 0.0}
    times = {}
    cases: dict[str, Any] = {"even": (1.0, 1.0), "fitting": (1.0, 3.0), "auto": "auto"}
    for name, shares in cases.items():
        job = shared(shares, 16, topology=ALLREDUCE, simulation=cost)
        with rudra.simulate(job, output=tmp_path / f"{name}.h5", progress="quiet") as results:
            times[name] = results.totals["time_s"][0]
            assert results.job["cluster"]["shares"] == list(shares if name != "auto" else cases["fitting"])
    ideal = 640 * 0.001 / (1 + 1 / 3)
    assert times["fitting"] == times["auto"] == pytest.approx(ideal, rel=0.01)
    assert times["even"] == pytest.approx(640 / 2 * 0.003, rel=0.01)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"cluster": {"shares": (1.0, 2.0)}},
            r"\[cluster\] shares has 2 numbers for 3 learners; use one number for each",
        ),
        ({"cluster": {"shares": (1.0, 0.0, 1.0)}}, r"\[cluster\] shares"),
        ({"cluster": {"shares": "fast"}}, r"^\[cluster\] shares must be a list of numbers, or 'auto', not 'fast'$"),
        ({"cluster": {"shares": ("a", 1.0)}}, r"^\[cluster\] shares must be a list of numbers, or 'auto', not"),
        (
            {"cluster": {"shares": "auto"}, "protocol": {"name": "async"}},
            r"\[cluster\] shares is not supported with protocol async; use protocol hardsync",
        ),
        (
            {"protocol": {"name": "async"}},
            r"\[cluster\] shares is not supported with protocol async; use protocol hardsync",
        ),
        (
            {"simulation": {"batching": "vmap"}},
            r"\[cluster\] shares is not supported with .* batching = 'vmap'; use batching = 'none'",
        ),
    ],
)
def test_what_cannot_be_shared_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        shared((1.0, 1.0, 1.0)).with_(**change)


@pytest.mark.parametrize(
    ("seconds", "shares"),
    [
        ((0.3, 0.1), (1.0, 3.0)),
        ((0.02, 0.01, 0.03), (1.5, 3.0, 1.0)),
        ((7.0,), (1.0,)),
        ((1.0, 3e-4), (1.0, 3330.0)),  # three digits, for people
    ],
)
def test_shares_are_in_proportion_to_speed(seconds: tuple[float, ...], shares: tuple[float, ...]) -> None:
    assert by_speed(seconds) == shares


def test_who_is_so_slow_that_nothing_is_left_has_one_sample(tmp_path: Path) -> None:
    cost = {"compute_s": {1: 0.001, 64: 0.064}, "slowdown": {0: 500.0}, "jitter": 0.0}
    path = tmp_path / "run.h5"
    with rudra.simulate(shared("auto", simulation=cost), output=path, progress="quiet") as results:
        rows = results.gradients
        assert results.job["cluster"]["shares"] == [1.0, 500.0]
    assert set(zip(rows["learner"], rows["samples"], strict=True)) == {(0, 1), (1, 15)}


def test_parts_of_many_learners_are_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(work, "apportion", lambda shares, batch: asked.append(batch) or apportion(shares, batch))
    plan = shared((1.0, 2.0) * 300).plan()
    parts = [work.portion(plan, role, 8, (1.0, 2.0) * 300) for role in plan.learners]
    assert asked == [8 * 600]
    assert [part.offset for part in parts[1:]] == [part.offset + part.count for part in parts[:-1]]


@given(
    st.lists(st.floats(0.01, 100), min_size=1, max_size=12).flatmap(
        lambda shares: st.tuples(st.just(shares), st.integers(len(shares), 4096))
    )
)
def test_parts_are_whole_positive_and_near_their_shares(drawn: tuple[list[float], int]) -> None:
    shares, batch = drawn
    counts = apportion(shares, batch)
    assert sum(counts) == batch
    assert min(counts) >= 1
    wanted = [batch * share / sum(shares) for share in shares]
    if min(wanted) >= 1:
        assert all(abs(count - share) < 1.5 for count, share in zip(counts, wanted, strict=True))
