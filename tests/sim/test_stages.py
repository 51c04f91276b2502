"""Layers with a stage server: the bits of one server's hardsync, no staleness when merged, and replays of both."""

from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from clusters import Guarded, job, train
from clusters import timing as timed
from fuzzing import cases
from hypothesis import given
from hypothesis import strategies as st
from points import points
from torch import nn

import rudra
from rudra.errors import ConfigError, RunError
from rudra.job.job import Job
from rudra.simulation.tensors import RealTensors
from tests.selection import CAMPAIGN

SYNCHRONOUS = {"cut": 3, "rule": "synchronous"}
EXPECTED = ("no learner is left", "died before training began", "learner 0 (rank 1) died, and the run cannot continue")


def dropping() -> nn.Module:
    """Has buffers, and draws random numbers, on both sides of a cut at "middle"; the last layers change their input."""
    layers = OrderedDict(first=nn.Linear(12, 24), early=nn.BatchNorm1d(24))
    layers |= OrderedDict(drop=nn.Dropout(0.3), middle=nn.ReLU(inplace=True))
    layers |= OrderedDict(again=nn.Dropout(0.5), norm=nn.BatchNorm1d(24), last=nn.Linear(24, 4))
    return nn.Sequential(layers)


def small(rule_: str, learners: int, **tables: Any) -> Job:
    """The network above, on a few points."""
    return Job(
        model={"name": dropping},
        data={"name": points, "classes": 4},
        training={"epochs": 3, "minibatch_size": 4, "seed": 5, **tables.pop("training", {})},
        optimizer={"learning_rate": 0.02, "momentum": 0.9, **tables.pop("optimizer", {})},
        protocol={"name": rule_, **tables.pop("protocol", {})},
        cluster={"learners": learners, "threads_per_rank": 1, **tables.pop("cluster", {})},
        simulation={"jitter": 0.8, "latency_jitter_s": 0.02, **tables.pop("simulation", {})},
        **tables,
    )


def digits(model: str, learners: int, **tables: Any) -> Job:
    return Job(
        model={"name": model},
        data={"name": "digits", "train_limit": 96},
        training={"epochs": 2, "minibatch_size": 16},
        optimizer={"learning_rate": 0.05, "momentum": 0.9, "milestones": (1,)},
        protocol={"name": "hardsync"},
        cluster={"learners": learners, "threads_per_rank": 1},
        simulation={"jitter": 0.8},
        **tables,
    )


def test_a_layer_that_a_rule_chooses_is_one_that_the_job_names(tmp_path: Path) -> None:
    """The file names it, so that a replay does not choose; the job that was given is that of the file, too."""
    run = digits("lenet", 3)
    shas = set()
    for cut in ("ralp", "4"):
        placed = run.with_(placement={"cut": cut, "rule": "synchronous"})
        with rudra.simulate(placed, output=tmp_path / f"{cut}.h5", progress="quiet") as results:
            assert results.job["placement"]["cut"] == "4"
            shas.add(results.state["weights_sha256"])
        assert rudra.replay(tmp_path / f"{cut}.h5", job=placed).difference is None
    assert len(shas) == 1


def test_what_a_rule_does_not_place_is_not_placed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = digits("mlp", 3).with_(placement={"cut": "ralp", "rule": "synchronous"})
    with rudra.simulate(run, output=tmp_path / "none.h5", progress="quiet") as results:
        assert results.job["placement"]["cut"] is None
        assert not len(results.stages)
    assert capsys.readouterr().err.count("[placement] cut = 'ralp' places no layers: skewness 2.15 is above") == 1
    assert rudra.replay(tmp_path / "none.h5").difference is None


ADAM = {"name": "adam", "momentum": 0.0}
GROUPS = ({"parameters": "*.bias", "rate_factor": 2.0}, {"parameters": "last.*", "weight_decay": 0.01})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "cut"),
    [
        pytest.param(digits("mlp", 3), 3, marks=CAMPAIGN),
        pytest.param(digits("lenet", 3), 5, marks=CAMPAIGN),
        (digits("lenet", 2), 6),  # the last layers change the tensor
        (small("hardsync", 3), "middle"),
        pytest.param(small("hardsync", 3), "early", marks=CAMPAIGN),
        pytest.param(small("hardsync", 3), "last", marks=CAMPAIGN),
        (small("hardsync", 2, optimizer={"groups": GROUPS, "momentum_form": "caffe"}), "norm"),
        pytest.param(small("hardsync", 3, optimizer={"clip_norm": 0.1}), "again", marks=CAMPAIGN),
        (small("hardsync", 2, optimizer={**ADAM, "clip_norm": 0.1, "groups": GROUPS}), "middle"),
        pytest.param(small("hardsync", 3, optimizer={**ADAM, "schedule": "cosine"}), "again", marks=CAMPAIGN),
        (small("hardsync", 3, cluster={"shares": [1, 3, 2], "learners_per_rank": 2}), "again"),
    ],
    ids=["mlp", "lenet", "in-place", "dropout", "there", "here", "groups", "clipped", "clipped-adam", "adam", "shares"],
)
def test_synchronous_is_hardsync_with_all_layers_at_the_learners(tmp_path: Path, run: Job, cut: Any) -> None:
    """The same rows, digests of weights, tests and final weights, bit for bit."""
    whole, placed = run, run.with_(placement={"cut": cut, "rule": "synchronous"})
    with rudra.simulate(whole, output=tmp_path / "whole.h5", progress="quiet") as one:
        sha, gradients, updates, epochs = one.state["weights_sha256"], one.gradients, one.updates, one.epochs
    several = run.with_(placement={"cut": cut, "rule": "synchronous", "servers": run.learners})
    with rudra.simulate(several, output=tmp_path / "several.h5", progress="quiet") as other:
        assert other.state["weights_sha256"] == sha
        assert (other.updates["digest"] == updates["digest"]).all()
        assert {*other.stages["learner"]} == {*range(run.learners)}
    with rudra.simulate(placed, output=tmp_path / "placed.h5", progress="quiet") as other:
        assert other.attributes["initial_weights_sha256"] == one.attributes["initial_weights_sha256"]
        assert other.gradients.tobytes() == gradients.tobytes()
        for name in ("digest", "learning_rate", "samples"):
            assert (other.updates[name] == updates[name]).all()
        for name in ("weights_sha256", "test_loss", "train_loss"):
            assert (other.epochs[name] == epochs[name]).all()
        assert other.state["weights_sha256"] == sha
        assert np.array_equal(other.stages["timestamp"], gradients["update"])
        assert np.array_equal(other.stages["learner"], gradients["learner"])
        assert not other.stages["staleness"].any()
        assert (other.stages["front"] == gradients["timestamp"]).all()
    assert rudra.replay(tmp_path / "placed.h5", job=placed, quiet=True).identical


def test_merged_with_one_learner_is_hardsync_with_one(tmp_path: Path) -> None:
    whole = small("hardsync", 1)
    placed = whole.with_(placement={"cut": "middle"})
    digests = []
    for run, name in ((whole, "whole"), (placed, "placed")):
        with rudra.simulate(run, output=tmp_path / f"{name}.h5", progress="quiet") as results:
            digests.append((results.state["weights_sha256"], results.updates["learning_rate"].tolist()))
    assert digests[0] == digests[1]


def test_merged_layers_follow_a_schedule_of_updates_at_the_pace_of_the_others(tmp_path: Path) -> None:
    """As many mini-batches as an update takes count as one; what is clipped is the gradient of each part."""
    table = {"schedule": "cosine", "schedule_every": "update", "clip_norm": 0.1, "momentum": 0.0}
    placed = small("hardsync", 3, placement={"cut": "middle"}, optimizer=table)
    with rudra.simulate(placed, output=tmp_path / "placed.h5", progress="quiet") as results:
        fronts, backs = (rows["learning_rate"].tolist() for rows in (results.updates, results.stages))
        factor = fronts[0] / backs[0]
        assert [rate * factor for rate in backs[::3]][: len(fronts)] == pytest.approx(fronts[: len(backs[::3])])
        assert len({*backs}) >= len(fronts) > 5
    assert rudra.replay(tmp_path / "placed.h5", job=placed, quiet=True).identical


GROUPED = {"name": "groups", "options": {"groups": 2}}


@pytest.mark.parametrize(
    ("topology", "shares"),
    [
        (GROUPED, ()),
        pytest.param({"name": "groups"}, (), marks=CAMPAIGN),
        ({"name": "groups"}, (1, 3, 2, 1, 3)),
        ({"name": "groups", "options": {"parameter_server": True, "reduction": "nodes"}}, ()),
    ],
    ids=["two", "one", "one-shares", "server"],
)
def test_synchronous_layers_are_added_as_the_others_are(
    tmp_path: Path, topology: dict[str, Any], shares: tuple[float, ...]
) -> None:
    """In compute groups: the bits of learners that have all layers on the same topology; merged, of one group alone."""
    whole = small("hardsync", 5, topology=topology, simulation={"nodes": 2}, cluster={"shares": shares})
    shas = []
    for rule in (None, "synchronous", "merged"):
        run = whole.with_(placement={} if rule is None else {"cut": "again", "rule": rule})
        with rudra.simulate(run, output=tmp_path / f"{rule}.h5", progress="quiet") as results:
            shas.append(results.state["weights_sha256"])
        assert rudra.replay(tmp_path / f"{rule}.h5", job=run, quiet=True).identical
    assert shas[0] == shas[1]
    assert (shas[2] == shas[0]) == (topology is not GROUPED)


@pytest.mark.parametrize("shards", [2, 3])
def test_shards_of_the_first_layers_are_as_one_server(tmp_path: Path, shards: int) -> None:
    run = small("hardsync", 3, placement={"cut": "norm", "rule": "synchronous"})
    shas = set()
    for topology in ({"name": "base"}, {"name": "sharded", "options": {"shards": shards}}):
        with rudra.simulate(
            run.with_(topology=topology), output=tmp_path / f"{topology['name']}.h5", progress="quiet"
        ) as results:
            shas.add(results.state["weights_sha256"])
    assert len(shas) == 1


def test_a_batch_of_a_group_makes_one_update(tmp_path: Path) -> None:
    """All its parts are computed with the same weights, in the group's order; g - 1 is what the others are stale by."""
    run = small("async", 6, topology={"name": "groups", "options": {"groups": 3}}, placement={"cut": "again"})
    with rudra.simulate(run, output=tmp_path / "run.h5", progress="quiet") as results:
        stages, gradients = results.stages, results.gradients
        assert not stages["staleness"].any()
        assert np.array_equal(stages["timestamp"], np.repeat(np.arange(1, len(stages) // 2 + 1), 2))
        assert (stages["learner"][::2] % 2 == 0).all()
        assert (stages["learner"][1::2] == stages["learner"][::2] + 1).all()
        assert gradients["staleness"].mean() == pytest.approx(2, abs=0.3)
    assert rudra.replay(tmp_path / "run.h5", job=run, quiet=True).identical


@pytest.mark.parametrize(("protocol", "n"), [("async", None), ("softsync", 2), ("hardsync", None)])
def test_merged_layers_are_never_stale(tmp_path: Path, protocol: str, n: int | None) -> None:
    """Each mini-batch makes one update of theirs, at a rate of its own; the others are as stale as ever."""
    tables = {"placement": {"cut": "norm", "learning_rate": 0.01, "momentum": 0.5}}
    run = small(protocol, 4, protocol={} if n is None else {"n": n}, optimizer={"milestones": (1,)}, **tables)
    with rudra.simulate(run, output=tmp_path / "run.h5", progress="quiet") as results:
        stages, gradients = results.stages, results.gradients
        told = results.events[results.events["kind"] == b"stages"]
        assert not stages["staleness"].any()
        assert np.array_equal(stages["timestamp"], np.arange(1, len(stages) + 1))
        applied = {(row["learner"], row["step"]): row["timestamp"] for row in gradients}
        concluded = {(row["learner"], row["step"]): row["front"] for row in stages}
        assert len(concluded) == len(stages)
        assert applied.items() <= concluded.items()
        assert gradients["staleness"].any() == (protocol != "hardsync")
        factor = run.with_(placement={"cut": None}).make_protocol(run.plan(), 3).modulation.rate_factor(0.0)
        assert stages["learning_rate"][0] == pytest.approx(0.01 * factor)
        assert stages["learning_rate"][-1] == pytest.approx(0.001 * factor)
        tested = results.epochs[results.epochs["weights_sha256"] != b""]
        assert np.array_equal(told["timestamp"], tested["timestamp"]), "a snapshot names both timestamps"
        assert told["gradients"][-1] == len(stages), "and after the last one nothing changes"
    assert rudra.replay(tmp_path / "run.h5", job=run, quiet=True).identical


def test_merged_layers_are_replayed_where_learners_leave_before_the_final_weights_are_asked_for(tmp_path: Path) -> None:
    """The statistics server has room for them late, as it still tests the weights of an epoch."""
    run = small("async", 3, placement={"cut": "again"}, simulation={"evaluation_s": 60.0})
    with rudra.simulate(run, output=tmp_path / "run.h5", progress="quiet") as results:
        told = results.events[results.events["kind"] == b"stages"]
        assert told["timestamp"].tolist() == [24, 48, 72]
        assert told["gradients"][-1] == len(results.stages) > 72
    replayed = rudra.replay(tmp_path / "run.h5", job=run, quiet=True)
    assert replayed.difference is None, replayed.difference


def test_a_momentum_correction_is_of_the_first_layers_alone(tmp_path: Path) -> None:
    """Merged layers are not stale: their first updates, from initial weights of the others, are as without it."""
    digests = []
    for correction in ("none", "implicit"):
        run = small("async", 4, placement={"cut": "again"}, optimizer={"momentum_correction": correction})
        with rudra.simulate(run, output=tmp_path / f"{correction}.h5", progress="quiet") as results:
            early = results.stages[results.stages["front"] == 0]
            assert len(early) > 2
            digests.append((early["digest"].tolist(), results.updates["digest"][:3].tolist()))
    assert digests[0][0] == digests[1][0]
    assert digests[0][1] != digests[1][1]


FRONTS: list[dict[str, Any]] = [
    {"name": "base"},
    {"name": "groups"},
    {"name": "groups", "options": {"parameter_server": True}},
    {"name": "groups", "options": {"groups": 2}},
    {"name": "groups", "options": {"reduction": "nodes"}},
    {"name": "sharded"},
    {"name": "sharded", "options": {"shards": 3}},
    {"name": "adv", "options": {"fan_out": 2}},
    {"name": "adv*", "options": {"fan_out": 2}},
]


@st.composite
def runs(draw: st.DrawFn) -> Job:
    """Any front; learners that lag behind each other, links that are slow, and learners that die."""
    topology = draw(st.sampled_from(FRONTS))
    alone = topology["name"] == "groups" and topology.get("options", {}).get("groups", 1) == 1
    learners = draw(st.integers(topology.get("options", {}).get("groups", 1), 5))
    protocol = draw(st.sampled_from([*(["hardsync"] if topology["name"] != "adv*" else []), "softsync", "async"]))
    rule = draw(st.sampled_from(["merged", *(["synchronous"] if protocol == "hardsync" else [])]))
    times = st.sampled_from([0.0, 1e-3, 0.05])
    dying = draw(st.lists(st.integers(0, learners - 1), max_size=2, unique=True))
    several = rule == "synchronous" and topology["name"] in ("base", "sharded")
    whole = topology["name"] in ("base", "adv", *(["groups", "adv*"] if rule == "merged" else []))  # gradients
    own = draw(st.sampled_from([{}, {"momentum": 0.0, "learning_rate": 0.01}]))
    return small(
        protocol,
        learners,
        placement={
            "cut": draw(st.sampled_from(["middle", "again", "last"])),
            "rule": rule,
            "servers": draw(st.integers(1, learners)) if several else 1,
            **own,
        },
        optimizer={"clip_norm": draw(st.sampled_from([None, 0.1])) if whole else None},
        topology=topology,
        protocol={"n": 1 if alone else draw(st.integers(1, min(learners, 2)))} if protocol == "softsync" else {},
        training={"epochs": 2, "seed": draw(st.integers(0, 2**20)), "evaluate": draw(st.booleans())},
        simulation={
            "compute_s": 0.05,
            "jitter": draw(st.sampled_from([0.0, 0.9])),
            "latency_jitter_s": draw(times),
            "bandwidth_bytes_per_s": draw(st.sampled_from([1e4, 1e5, 1e9])),
            "message_s": draw(times),
            "update_s": draw(times),
            "evaluation_s": draw(st.sampled_from([0.0, 5.0])),
            "nodes": draw(st.integers(1, 2)),
            "detection_s": draw(times),
            "faults": [{"learner": i, "dies_at_s": draw(st.floats(0.1, 3.0))} for i in dying],
        },
    )


@pytest.mark.slow
@cases(40)
@given(st.data())
def test_whoever_is_fast_and_whoever_dies(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Every gradient is accounted for, no mini-batch is taken in twice, and the record determines the weights."""
    run = data.draw(runs())
    path = tmp_path_factory.mktemp("run") / "run.h5"
    try:
        results = rudra.simulate(run, output=path, progress="quiet")
    except RunError as error:
        if not any(text in str(error) for text in EXPECTED):
            raise
        return
    with results:
        totals, stages = results.totals[0], results.stages
        assert totals["pushed"] == sum(totals[key] for key in ("applied", "pending", "discarded", "lost"))
        lost = (results.events["kind"] == b"lost").any()
        again = lost and not run.plan().expendable(run.plan().learners[0])  # work in flight is computed again
        taken = {(row["learner"], row["step"]) for row in stages}
        assert len(taken) == len(stages) or (again and run.placement.rule == "merged")
        assert {(row["learner"], row["step"]) for row in results.gradients} <= taken
        assert not stages["staleness"].any()
    replayed = rudra.replay(path, job=run, quiet=True)
    assert replayed.difference is None, replayed.difference
    assert lost or replayed.updates == totals["timestamp"]


@pytest.mark.parametrize(
    ("rule", "topology"),
    [("synchronous", "base"), ("synchronous", "groups"), ("merged", "sharded"), ("merged", "adv*")],
)
@pytest.mark.parametrize("stop_at", [None, 1.1])
def test_lent_buffers_do_not_change(rule: str, topology: str, stop_at: float | None) -> None:
    """With poisoned buffers, every invariant and transition checked."""
    run = small(
        "hardsync" if topology != "adv*" else "async",
        3,
        placement={"cut": "again", "rule": rule},
        topology={"name": topology},
        simulation={"compute_s": 0.05, "update_s": 0.1},
    )
    trained = train(run, Guarded, stop_at=stop_at)
    assert torch.isfinite(trained.weights).all()
    assert trained.rows.code == (0 if stop_at is None else 3)


@pytest.mark.each_value
@pytest.mark.parametrize("topology", ["base", "groups", "sharded", "adv"])
@pytest.mark.parametrize("rule", ["synchronous", "merged"])
def test_a_run_goes_on_from_all_parts_of_a_checkpoint(rule: str, topology: str) -> None:
    """Synchronously it is as if it had never stopped."""
    tables: dict[str, Any] = {"placement": {"cut": "again", "rule": rule, "momentum": 0.5}}
    tables |= {"topology": {"name": topology}}
    run = small("hardsync", 3, results={"checkpoint_every": "5 updates"}, **tables)
    whole = train(run)
    assert len(whole.saved) > 1
    saved = whole.saved[1]
    assert len(saved.tensors["weights"]) == len(whole.weights)
    assert {name.partition(".")[0] for name in saved.tensors} == {"weights", "optimizer", "back"}
    resumed = train(run, resumed=saved)
    assert resumed.rows.totals["timestamp"] == whole.rows.totals["timestamp"]
    assert torch.equal(resumed.weights, whole.weights) or rule == "merged"
    assert not resumed.rows["stages"]["staleness"].any()


def test_merged_layers_are_replayed_up_to_what_a_resumed_run_did_again(tmp_path: Path) -> None:
    """Before what a checkpoint has, a stage server took in a mini-batch that the first layers lack there."""
    run = small("async", 4, placement={"cut": "again", "rule": "merged"}, simulation={"latency_jitter_s": 0.3})
    path = tmp_path / "run.h5"
    with rudra.simulate(run, output=path, progress="quiet") as results:
        gradients, stages, events = results.gradients, results.stages, results.events
    for restart in range(
        5, 40
    ):  # the update of a checkpoint by which a later batch was applied, and an earlier was not
        steps = [
            max(gradients["step"][(gradients["update"] <= restart) & (gradients["learner"] == i)]) for i in range(4)
        ]
        applied = np.array([row["step"] <= steps[row["learner"]] for row in stages])
        if (gap := int(np.argmin(applied))) < int(np.flatnonzero(applied)[-1]):
            break
    early = {(row["learner"], row["step"]) for row in stages[:gap]}
    missed = min(row["update"] for row in gradients if (row["learner"], row["step"]) not in early)
    assert missed <= restart
    told = events[:1].copy()
    told["kind"], told["timestamp"], told["gradients"] = b"restart", restart, restart
    with h5py.File(path, "r+") as file:
        for table, rows in (("stages", stages[applied]), ("events", np.concatenate([events, told]))):
            file[table].resize(len(rows), axis=0)
            file[table][:] = rows
    replayed = rudra.replay(path, job=run, quiet=True)
    assert replayed.difference is None, replayed.difference
    assert replayed.updates == missed - 1
    assert replayed.note == "; the work of the stage server from there on is not recorded"


def test_layers_travel_in_time_by_their_bytes_and_operations() -> None:
    """The stage server is as good as one that computes last layers alone: it is the bound when they are large."""
    run = job("async", 8, simulation={"compute_s": 0.1, "jitter": 0.0}, placement={"cut": 3})
    rows = timed(run, 400)
    stages = rows["stages"]
    assert stages["compute_s"] == pytest.approx(0.05, abs=1e-4)
    apart = np.diff(np.sort(stages["time_s"]))
    assert apart.min() >= 0.05 - 1e-9, "one at a time"
    assert stages["wait_s"].max() > 0.1


SEVERAL = {"servers": 2, "rule": "synchronous"}


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        (
            {"protocol": {"name": "easgd", "modulation": "none"}, "topology": {"name": "replicas"}},
            r"cut is not supported with protocol easgd; use .*, on topology base, sharded, adv, adv\* or groups",
        ),
        (
            {"topology": {"name": "adv*"}, "placement": {"rule": "synchronous"}},
            "use protocol hardsync, or rule = 'merged'",
        ),
        (
            {"placement": {"cut": 3, "rule": "synchronous"}},
            "rule = 'synchronous' is not supported with .* use protocol hardsync",
        ),
        ({"placement": {"servers": 3}}, "servers = 3 is more than the number of learners; use 1 to 2"),
        ({"placement": {"servers": 2}}, "servers = 2 is not supported with rule = 'merged'; use servers = 1"),
        (
            {"placement": SEVERAL, "protocol": {"name": "hardsync"}, "topology": GROUPED},
            "servers = 2 is not supported with compute groups; use servers = 1",
        ),
        (
            {
                "placement": SEVERAL,
                "protocol": {"name": "hardsync"},
                "topology": {"name": "adv", "options": {"fan_out": 1}},
            },
            "servers = 2 is not supported with topology adv; use servers = 1",
        ),
        (
            {
                "placement": {"rule": "synchronous"},
                "protocol": {"name": "hardsync"},
                "topology": {"name": "groups", "options": {"groups": 1}},
                "optimizer": {"clip_norm": 1.0},
            },
            "clip_norm on topology groups; remove clip_norm, or use a topology with a parameter server",
        ),
        ({"placement": {"cut": True}}, "cut must be the name of a layer, or its number, not true|not True"),
        ({"optimizer": {"schedule": "plateau"}}, "'plateau'; use another schedule, or rule = 'synchronous'"),
        ({"cluster": {"gradient_format": "float16"}}, "gradient_format = 'float16'; use 'float32'"),
        ({"cluster": {"device": "auto"}}, "device = 'auto'; use 'cpu'"),
        ({"cluster": {"shares": "auto"}, "protocol": {"name": "hardsync"}}, "shares = 'auto'; use a list of numbers"),
        ({"training": {"compile": True}}, "compile = true; use compile = false"),
        ({"training": {"precision": "bfloat16"}}, "precision = 'bfloat16'; use 'float32'"),
        ({"simulation": {"batching": "vmap"}}, "batching = 'vmap'; use 'none'"),
        (
            {"changes": [{"at_epoch": 1, "optimizer": {"learning_rate": 0.1}}]},
            "rule = 'merged', whose layers are ahead of the others; use rule = 'synchronous'",
        ),
        (
            {
                "placement": {"rule": "synchronous"},
                "protocol": {"name": "hardsync"},
                "changes": [{"at_update": 1, "training": {"minibatch_size": 3}}],
            },
            "with a change of minibatch_size or shares, as buffers for activations keep their size; change other keys",
        ),
    ],
)
def test_what_cannot_be_is_refused(tables: dict[str, Any], message: str) -> None:
    run = small("async", 2, placement={"cut": 3})
    with pytest.raises(ConfigError, match=message) as raised:
        run.with_(**tables)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("cut", "message"),
    [("nothing", "cut = 'nothing'"), (9, r"cut = 9: the model has 7 layers; valid: 1 to 6"), ("drop", None)],
)
def test_the_model_says_where_it_can_be_cut(tmp_path: Path, cut: Any, message: str | None) -> None:
    run = small("async", 2, placement={"cut": cut})
    if message is None:
        rudra.simulate(run, output=tmp_path / "run.h5", progress="quiet").close()
        return
    with pytest.raises(ConfigError, match=message) as raised:
        rudra.simulate(run, output=tmp_path / "run.h5", progress="quiet")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("learners", "size"), [(1, 4), (3, 4), (4, 2)])
def test_a_step_sends_what_the_paper_counts_to_the_byte(
    learners: int, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2 W (O + P) of tensors, as ralp.txt §4.3 has it; messages say more, and draw no targets."""
    sent: Counter[str] = Counter()
    transfer = RealTensors.transfer

    def counted(self: RealTensors, source: int, buffer: str, to: int, to_buffer: str) -> None:
        if to != statistics:  # whose snapshots are of no step
            sent[buffer.strip(" 0123456789")] += 4 * self.executors[source].size_of(buffer)
        transfer(self, source, buffer, to, to_buffer)

    monkeypatch.setattr(RealTensors, "transfer", counted)
    run = digits("mlp", learners, placement={"cut": 3, "rule": "synchronous"})
    run = run.with_(training={"minibatch_size": size, "evaluate": False})
    statistics = run.plan().statistics
    with rudra.simulate(run, output=tmp_path / "run.h5", progress="quiet") as results:
        steps, told = len(results.updates), results.attributes["step_bytes"]
    front, crossing = 4 * (64 + 1) * 128, 4 * size * 128
    each = steps * learners
    assert sent == {
        "weights": each * front,
        "gradient": each * front,
        "activations": each * crossing,
        "returned": each * crossing,
    }
    assert sent.total() == steps * 2 * learners * (crossing + front) == steps * told
    timed = run.with_(simulation={"tensors": False})
    with rudra.simulate(timed, output=tmp_path / "timed.h5", progress="quiet") as results:
        assert results.attributes["step_bytes"] == told
