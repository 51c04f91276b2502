"""Learners that join and leave: what must hold in virtual time, however messages and deaths fall."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clusters import TrialResult, check_accounts, train
from fuzzing import cases, in_turn
from hypothesis import given, reject
from hypothesis import strategies as st
from random_clusters import SURVIVABLE, faulty, outlived, survivable
from resumable import ALONE, GROUPS, SHARDED, TREE, check_resumed, make_job

import rudra
from rudra.errors import ConfigError
from rudra.job.job import Job


def active(learners: int) -> dict[str, Any]:
    return {"cluster": {"active_learners": learners}}


def growing_and_shrinking(protocol: str, **tables: Any) -> Job:
    """Two learners, then four from update 12, and three from update 15 on."""
    changes = [{"at_epoch": 1, **active(4)}, {"at_update": 15, **active(3)}]
    return make_job(protocol, changes=changes, **tables).with_(data={"train_limit": 192}, **active(2))


SETTINGS = {
    "base": growing_and_shrinking("hardsync"),
    "sharded": growing_and_shrinking("hardsync", topology=SHARDED),
    "tree": growing_and_shrinking("hardsync", topology=TREE),
    "groups": growing_and_shrinking("hardsync", topology=GROUPS),
    "allreduce": growing_and_shrinking("hardsync", topology=ALONE),
    "sma": growing_and_shrinking("sma"),
    "average": growing_and_shrinking("average"),
    "replicas of groups": growing_and_shrinking("sma", topology={"name": "replicas", "options": {"groups": 2}}),
    "placed": growing_and_shrinking("hardsync", placement={"cut": "layers.3", "rule": "synchronous"}),
    "hierarchical": growing_and_shrinking("sma", topology={"name": "hierarchical", "options": {"blocks": 2}}),
}


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, TrialResult]:
    return {name: train(job_) for name, job_ in SETTINGS.items()}


@pytest.mark.parametrize("name", SETTINGS)
def test_active_learners_take_part_and_all_are_accounted_for(undisturbed: dict[str, TrialResult], name: str) -> None:
    rows = undisturbed[name].rows
    check_accounts(rows)
    gradients = rows["gradients"]
    for begin, end, learners in ((0, 12, 2), (12, 15, 4), (15, np.inf, 3)):
        here = gradients[(gradients["update"] > begin) & (gradients["update"] <= end)]
        assert set(here["learner"]) == set(range(learners))
    assert rows["updates"]["gradients"][[11, 12, 14, 15]].tolist() == [2, 4, 4, 3]
    assert rows.learners is not None
    for row in rows.learners:
        mine = gradients[gradients["learner"] == row["learner"]]
        assert (row["pushed"], row["samples"]) == (len(mine), mine["samples"].sum())
        assert np.array_equal(mine["first"], np.arange(len(mine)) * 8), "in a stream of its own"


@pytest.mark.each_value
@pytest.mark.parametrize(("name", "at"), in_turn(SETTINGS, [5, 11, 12, 13, 15, 18]))
def test_resumed_around_a_change_it_reaches_the_same_bits(
    undisturbed: dict[str, TrialResult], name: str, at: int
) -> None:
    check_resumed(undisturbed[name], at)


ASYNCHRONOUS: dict[str, dict[str, Any]] = {
    "tree": {"protocol": {"name": "async"}, "topology": {"name": "adv*"}},
    "groups": {"protocol": {"name": "async"}, "topology": GROUPS},
    "elastic": {"protocol": {"name": "easgd"}, "topology": {"name": "replicas", "options": {"parameter_server": True}}},
    "hogbatch": {
        "protocol": {"name": "hogbatch"},
        "hogbatch": {"workers": [{"kind": "small", "min": 8}]},
        "optimizer": {"momentum": 0.0},
    },
}


@pytest.mark.parametrize("name", ["base", "sharded", "allreduce", "replicas of groups", "placed", *ASYNCHRONOUS])
def test_a_run_with_learners_that_join_and_leave_is_replayed(tmp_path: Path, name: str) -> None:
    """Those that are asynchronous, too."""
    changes = [{"at_epoch": 1, **active(4)}, {"at_epoch": 2, **active(3)}]
    tables = {**ASYNCHRONOUS.get(name, {}), **({"placement": {"cut": "2"}} if name == "placed" else {})}
    job_ = SETTINGS.get(name, SETTINGS["base"]).with_(
        **tables, model={"name": "mlp"}, changes=changes, results={"checkpoint_every": "never"}
    )
    path = tmp_path / "run.h5"
    with rudra.simulate(job_, output=path, progress="quiet") as results:
        assert results.summary()["active_learners"] == "2 of 4 learners, 4 from epoch 1 on, 3 from epoch 2 on"
        joined = results.gradients["update"][results.gradients["learner"] == 2]
        assert joined.min() > results.epochs["timestamp"][0]
    replayed = rudra.replay(path, quiet=True)
    assert replayed.identical, replayed
    assert not replayed.note


@pytest.mark.parametrize("protocol", ["hardsync", "async", "hogbatch"])
def test_a_dormant_learner_takes_the_place_of_one_that_dies(tmp_path: Path, protocol: str) -> None:
    """One that dies while it is dormant is missed by nobody. A replay passes both deaths."""
    faults = [{"learner": 2, "dies_at_s": 1.0}, {"learner": 1, "dies_at_s": 2.0}]
    job_ = make_job(protocol, optimizer={"momentum": 0.0}).with_(
        model={"name": "mlp"}, **active(2), simulation={"faults": faults}, results={"checkpoint_every": "never"}
    )
    path = tmp_path / "run.h5"
    with rudra.simulate(job_, output=path, progress="quiet") as results:
        events, gradients = results.events, results.gradients
        assert results.status == "finished"
    assert [row["kind"].decode() for row in events] == ["lost", "lost"]
    place = events["gradients"][1]
    assert set(gradients["learner"][:place]) == {0, 1}
    assert set(gradients["learner"][place:]) == {0, 3}
    assert rudra.replay(path, quiet=True).identical


@st.composite
def joining_and_leaving(draw: st.DrawFn, topology: str) -> tuple[Job, int]:
    """A job whose active learners change, often with learners that die, and the samples of an epoch."""
    run, samples = draw(survivable(topology)), draw(st.integers(1, 120))
    epochs, some = draw(st.integers(2, 4)), st.integers(1, run.learners)
    entries: list[dict[str, Any]] = [
        {"at_epoch": start, **active(draw(some))} for start in sorted(draw(st.sets(st.integers(1, epochs - 1))))
    ]
    entries += [
        {"at_update": update, **active(draw(some))} for update in draw(st.lists(st.integers(1, 40), max_size=1))
    ]
    protocol = {"n": 1} if run.protocol.name == "softsync" else {}
    run = run.with_(training={"epochs": epochs}, protocol=protocol, changes=entries, **active(draw(some)))
    return draw(faulty(run, samples)) if draw(st.booleans()) else run, samples


@pytest.mark.slow
@pytest.mark.parametrize("topology", SURVIVABLE)
@cases(40)
@given(st.data())
def test_learners_join_and_leave_whoever_dies(topology: str, data: st.DataObject) -> None:
    """Invariants are checked after every event; a run in which somebody waits forever raises."""
    try:
        run, samples = data.draw(joining_and_leaving(topology))
        rows = outlived(run, samples)
    except ConfigError:  # the run ends before an update of its changes
        reject()
    if rows is None:
        assert run.simulation.faults
        return
    assert rows.code == 0
    check_accounts(rows)
    assert rows.learners is not None
    assert list(rows.learners["learner"]) == list(range(run.learners))
    if run.simulation.faults:
        return
    gradients, updates = rows["gradients"], rows["updates"]
    for number, entry in enumerate(updates):
        begun = run.at(int(entry["epoch"]) - 1, int(entry["timestamp"]) - 1)
        taking_part = run.learners if begun.cluster.active_learners is None else begun.cluster.active_learners
        here = gradients[gradients["update"] == number + 1]
        assert set(here["learner"]) <= set(range(taking_part))
        if run.protocol.name == "hardsync":
            assert len(here) == taking_part
