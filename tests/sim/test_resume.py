"""Training that goes on from a checkpoint: as if it had never stopped, or at least with nothing lost or twice."""

from typing import Any

import numpy as np
import pytest
import torch
from clusters import Ramp, TrialCheckpoint, TrialResult, timing, train
from fuzzing import in_turn
from msgspec.structs import replace
from resumable import ALONE, GROUPS, SHARDED, TREE, check_gradients, check_resumed, make_job

from rudra.job.job import Job

ADAM = {"name": "adam", "learning_rate": 0.002, "momentum": 0.0}

OWN = {
    "milestones": (),
    "schedule": "cosine",
    "warm_up": 1.4,
    "clip_norm": 0.5,
    "weight_decay": 0.01,
    "groups": [{"parameters": ["*.bias", "*.2.*"], "weight_decay": 0.0}],
}


def short(protocol: str, **tables: Any) -> Job:
    """Three epochs of six updates of hardsync each."""
    return make_job(protocol, **tables).with_(data={"train_limit": 192})


SETTINGS = {
    "momentum": short("hardsync"),
    "adam": short("hardsync", optimizer=ADAM),
    "tree": short("hardsync", topology=TREE),
    "tree, adam": short("hardsync", topology=TREE, optimizer=ADAM),
    "sharded": short("hardsync", topology=SHARDED),
    "sharded, adam": short("hardsync", topology=SHARDED, optimizer=ADAM),
    "allreduce": short("hardsync", topology=ALONE),
    "groups": short("hardsync", topology=GROUPS),
    "schedule": short("hardsync", optimizer=OWN),
    "caffe": short("hardsync", optimizer={**OWN, "momentum_form": "caffe"}),
    "allreduce, caffe": short("hardsync", topology=ALONE, optimizer={"momentum_form": "caffe"}),
    "allreduce, schedule": short("hardsync", topology=ALONE, optimizer=OWN),
    "bfloat16": short("hardsync").with_(training={"precision": "bfloat16"}),
    "shares": short("hardsync").with_(cluster={"shares": (1.0, 2.0, 3.0, 2.0)}),
    "allreduce, shares": short("hardsync", topology=ALONE).with_(cluster={"shares": (1.0, 2.0, 3.0, 2.0)}),
}


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, TrialResult]:
    return {name: train(job) for name, job in SETTINGS.items()}


@pytest.mark.each_value
@pytest.mark.parametrize(("name", "at"), in_turn(SETTINGS, [1, 4, 6, 11, 12, 17]))
def test_hardsync_from_a_checkpoint_reaches_the_same_bits(
    undisturbed: dict[str, TrialResult], name: str, at: int
) -> None:
    whole = undisturbed[name]
    _, resumed = check_resumed(whole, at)
    assert np.array_equal(resumed.rows.learners["pushed"], whole.rows.learners["pushed"])


@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_checkpoints_of_one_server_and_of_several_are_the_same(undisturbed: dict[str, TrialResult], name: str) -> None:
    """And so are their runs, from one server's checkpoint on several, and back."""
    of_one, of_several = undisturbed[name], undisturbed["sharded" if name == "momentum" else "sharded, adam"]
    assert torch.equal(of_one.weights, of_several.weights)
    for one, several in zip(of_one.saved, of_several.saved, strict=True):
        assert one.tensors.keys() == several.tensors.keys()
        assert all(one.tensors[key].tobytes() == several.tensors[key].tobytes() for key in one.tensors)
        assert replace(one.position, time_s=0.0) == replace(several.position, time_s=0.0)
    saved = of_one.saved[10]
    there = train(of_several.job, resumed=saved)
    back = train(of_one.job, resumed=there.saved[2])
    assert torch.equal(there.weights, of_one.weights)
    assert torch.equal(back.weights, of_one.weights)


@pytest.mark.each_value
@pytest.mark.slow
@pytest.mark.parametrize(("name", "stop_at"), in_turn(SETTINGS, [0.0, 0.16, 0.54, 1.1, 1.96], each=1))
def test_hardsync_stopped_in_order_and_resumed_reaches_the_same_bits(
    undisturbed: dict[str, TrialResult], name: str, stop_at: float
) -> None:
    job = SETTINGS[name].with_(results={"checkpoint_every": "never"})
    stopped = train(job, stop_at=stop_at)
    assert stopped.rows.totals["timestamp"] < undisturbed[name].rows.totals["timestamp"]
    (saved,) = stopped.saved
    assert saved.position.timestamp == stopped.rows.totals["timestamp"]
    resumed = train(job, resumed=saved)
    assert torch.equal(resumed.weights, undisturbed[name].weights)


@pytest.mark.each_value
@pytest.mark.slow
@pytest.mark.parametrize(
    "topology", [{"name": "base"}, SHARDED, TREE, {"name": "adv*"}, GROUPS], ids=lambda t: str(t["name"])
)
@pytest.mark.parametrize("protocol", ["softsync", "async"])
@pytest.mark.parametrize("stop_at", [0.0, 0.6])
def test_stopped_and_resumed_no_gradient_is_missing_or_applied_twice(
    protocol: str, topology: dict[str, Any], stop_at: float
) -> None:
    job = make_job(protocol, topology=topology)
    parts = [train(job, stop_at=stop_at)]
    saved: TrialCheckpoint | None = None
    for again in (stop_at, None):
        saved = parts[-1].saved[-1] if parts[-1].saved else saved  # without an update the one before stays
        assert saved.position.timestamp == parts[-1].rows.totals["timestamp"]  # it was stopped before it was over
        parts.append(train(job, resumed=saved, stop_at=again if again is None else saved.position.time_s + again))
    gradients = np.concatenate([part.rows["gradients"] for part in parts if "gradients" in part.rows.tables])
    check_gradients(job, parts[0].plan, gradients)
    updates = np.concatenate([part.rows["updates"] for part in parts if "updates" in part.rows.tables])
    assert np.array_equal(updates["timestamp"], 1 + np.arange(len(updates)))
    assert (np.diff(updates["time_s"]) >= 0).all()
    epochs = np.concatenate([part.rows["epochs"] for part in parts if "epochs" in part.rows.tables])
    assert list(epochs["epoch"]) == [1, 2, 3]
    assert list(epochs["samples"]) == [int(updates["samples"][:t].sum()) for t in epochs["timestamp"]]
    totals = parts[-1].rows.totals
    assert totals["applied"] == len(gradients)
    assert totals["pushed"] == sum(totals[key] for key in ("applied", "pending", "discarded", "lost"))


def ramp(**tables: Any) -> Job:
    return make_job("softsync", **tables).with_(protocol={"name": Ramp, "modulation": "none"})


@pytest.mark.parametrize("topology", [{"name": "base"}, SHARDED, GROUPS], ids=lambda table: table["name"])
def test_a_protocol_continues_in_the_state_of_the_checkpoint(topology: dict[str, Any]) -> None:
    """How many gradients make an update goes by the state alone, here also where gradients were pending."""
    job = ramp(topology=topology)
    whole = train(job)
    sizes = whole.rows["updates"]["gradients"]
    assert len(set(sizes.tolist())) > 1
    for at in (1, 5, 13):
        saved = next(s for s in whole.saved if s.position.timestamp >= at)
        resumed = train(job, resumed=saved).rows["updates"]
        assert resumed["timestamp"][0] == saved.position.timestamp + 1
        assert list(resumed["gradients"][:10]) == list(sizes[saved.position.timestamp :][:10])


def test_a_protocol_keeps_its_state_when_a_learner_dies_or_the_job_changes() -> None:
    change = {"at_epoch": 1, "training": {"minibatch_size": 4}}
    faults = [{"learner": 3, "dies_at_s": 2.0}]
    lost = timing(ramp().with_(simulation={"faults": faults}), 384)["updates"]
    assert lost["gradients"][0] == 4
    assert (np.diff(lost["gradients"]) <= 0).all(), "it does not begin again at λ - 1"
    assert (lost["gradients"][-20:] == 1).all()
    changed = timing(ramp().with_(changes=[change]), 384)
    assert changed["updates"]["gradients"][changed["updates"]["epoch"] == 2].max() == 1
    other = {"at_epoch": 1, "protocol": {"name": "hardsync"}}
    assert set(timing(ramp().with_(changes=[other]), 384)["updates"]["gradients"][-10:]) == {4}
