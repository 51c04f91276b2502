"""When parts of a gradient become final in a backward pass, and how much of a transfer the pass hides."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rudra.core.backward import SHARE, WHOLE, BackwardPass, Lead, after_s
from rudra.core.buckets import parts
from rudra.core.forward import ForwardTimes
from rudra.core.placement import Layer
from rudra.core.training_state import BEGINNING
from rudra.core.wire import tail_bytes, tensor_bytes
from rudra.errors import ConfigError
from rudra.job.job import Job
from rudra.prepare import cost_files
from rudra.prepare.nodes import nodes_of
from rudra.prepare.phases import phases_of
from rudra.prepare.profile import Profile, as_text, as_toml, final_at, final_toml, needed_at, needed_toml
from rudra.simulation.assembly import prices_of
from rudra.simulation.costs import CostModel
from rudra.simulation.predict import Outline, outline, predict

MILLION = 1_000_000


def layer(parameters: int, seconds: float, name: str = "x") -> Layer:
    """A layer whose backward pass takes two thirds."""
    return Layer(name, "linear", 4 * parameters, 4, seconds / 3, 2 * seconds / 3)


CONVOLUTIONAL = (layer(0, 0.0, "flat"), layer(100_000, 0.9, "conv"), layer(0, 0.0, "relu"), layer(900_000, 0.3, "out"))
"""Nine tenths of the parameters are in the last layer, which takes a quarter of the time."""


@pytest.mark.parametrize(
    ("layers", "left"),
    [
        ((), {0: 0.0, 250_000: 0.25, 999_999: 0.999999}),
        (CONVOLUTIONAL, {0: 0.0, 99_999: 0.0, 100_000: 0.75, 999_999: 0.75}),
        (CONVOLUTIONAL[::-1], {0: 0.0, 899_999: 0.0, 900_000: 0.25}),
        ((layer(0, 5.0), *CONVOLUTIONAL), {0: 0.0, 100_000: 0.75}),  # nothing in front of it is trained
    ],
)
def test_a_parameter_is_final_when_its_layer_and_all_later_ones_are_computed(
    layers: Sequence[Layer], left: dict[int, float]
) -> None:
    found = over(layers)
    assert {place: found.left(slice(place, place + 1)) for place in left} == pytest.approx(left)
    assert found.left(slice(0, MILLION)) == 0
    assert found.left(slice(MILLION, MILLION + 1)) == 0, "no parameter"
    assert found.share == pytest.approx(SHARE)


def over(layers: Sequence[Layer]) -> BackwardPass:
    return BackwardPass.of_layers(layers) if layers else BackwardPass(MILLION)


def test_parts_that_are_final_first_leave_first_wherever_they_are() -> None:
    """The model uses its parameters in another order than it holds them."""
    final_at = ((250_000, 0.5), (500_000, 1.0), (250_000, 0.9))
    found = BackwardPass.measured(final_at, MILLION)
    assert found.share == 1
    quarters = [slice(start, start + 250_000) for start in range(0, MILLION, 250_000)]
    assert [found.left(part) for part in quarters] == pytest.approx([0.5, 0.0, 0.0, 0.1])
    assert found.leads(quarters[::-1]) == (Lead(1.0, 0.5), Lead(0.75, pytest.approx(0.1)), Lead(0.5, 0.0))


@pytest.mark.parametrize(
    ("order", "count", "late"),
    [
        ([*range(24)], 12, 1 / 12),
        ([*range(23, -1, -1)], 12, 1 / 12),
        # 24 layers, registered in pairs of a way down and a way up. Larger buckets have a layer of each way.
        ([*range(0, 24, 2), *range(23, 0, -2)], 12, 13 / 24),
        ([*range(0, 24, 2), *range(23, 0, -2)], 24, 1 / 24),
    ],
)
def test_contiguous_buckets_hide_less_only_if_they_are_larger_than_a_layer(
    order: Sequence[int], count: int, late: float
) -> None:
    """The transfer takes as long as the backward pass over layers that are used in some order."""
    found = BackwardPass(24_000, [(1_000, order.index(layer) / 24) for layer in range(24)])
    assert after_s(found.leads(parts(24_000, 24_000, 24_000 // count)), 1.0, 1.0) == pytest.approx(late)


def test_the_pass_over_the_first_layers_begins_when_the_others_are_final() -> None:
    final_at = ((300_000, 0.9), (300_000, 0.8), (400_000, 0.5))
    for parameters, steps in ((600_000, (0.2, 0.4)), (400_000, (0.5, 1.0))):
        found = BackwardPass.measured(final_at, parameters)
        assert [found.left(slice(place, place + 1)) for place in (0, 300_000)] == pytest.approx(steps)
        assert found.left(slice(0, parameters)) == pytest.approx(steps[0])
    nothing_else = BackwardPass.measured(((10, 1.0), (10, 1.0)), 10)
    assert nothing_else.left(slice(0, 10)) == 0


def test_a_gradient_without_parts_leaves_after_the_pass() -> None:
    for layers in ((), CONVOLUTIONAL):
        found = over(layers)
        assert found.leads([]) == found.leads([slice(0, MILLION)]) == WHOLE
    assert after_s(WHOLE, 3.0, 100.0) == 3.0


def test_leads_of_a_constant_rate_are_the_first_and_the_last_bucket() -> None:
    assert BackwardPass(MILLION).leads(parts(MILLION, MILLION, 100_000)) == (
        Lead(1.0, pytest.approx(0.9)),
        Lead(pytest.approx(0.1), 0.0),
    )


def test_leads_of_layers_are_the_ends_of_layers() -> None:
    bucket = 50_000
    assert over(CONVOLUTIONAL).leads(parts(MILLION, MILLION, bucket)) == (
        Lead(1.0, pytest.approx(0.75)),
        Lead(pytest.approx(0.1), 0.0),
    )


def sent_s(found: BackwardPass, cut: Sequence[slice], transfer_s: float, backward_s: float) -> float:
    """Sends one part after the other, each when it is final."""
    size, time_s = sum(part.stop - part.start for part in cut), -backward_s
    for part in sorted(cut, key=found.left, reverse=True):
        time_s = max(time_s, -found.left(part) * backward_s) + transfer_s * (part.stop - part.start) / size
    return max(time_s, 0.0)


@pytest.mark.parametrize("seed", range(60))
def test_leads_tell_when_the_last_part_has_crossed_a_free_link(seed: int) -> None:
    chance = random.Random(seed)
    layers = [layer(chance.choice([0, 10, 1000]), chance.choice([0.0, chance.random()])) for _ in range(12)]
    parameters = sum(one.parameters_bytes for one in layers) // 4 + 16
    layers.insert(chance.randrange(12), layer(16, 0.1))
    size = parameters + chance.choice([0, 70])
    measured = [(count, chance.random()) for count in (parameters - 16, 16)]
    ways = BackwardPass(parameters), BackwardPass.of_layers(layers), BackwardPass.measured(measured, parameters)
    found = chance.choice(ways)
    cut = parts(size, parameters, chance.choice([16, 160, 1600]))
    if chance.random() < 0.3:  # a server that has the last parameters
        cut = cut[: -chance.randrange(len(cut))] or cut
    leads = found.leads(cut)
    assert leads[-1].left == 0
    if len(cut) < 2:
        return
    for _ in range(20):
        transfer_s, backward_s = chance.random(), chance.random() ** 3
        assert after_s(leads, transfer_s, backward_s) == pytest.approx(
            sent_s(found, cut, transfer_s, backward_s), abs=1e-6
        )


def costs(path: Path, layers: Sequence[Layer] = CONVOLUTIONAL) -> Path:
    """A cost file for a mini-batch of 8, as `rudra calibrate` writes it."""
    told = Profile("x", 8, tuple(layers), 0.0, 0.0, 1.0, 1)
    path.write_text(f"compute_s = 1.2\nlatency_s = 0.0\njitter = 0.0\n{as_toml(told)}\n", encoding="utf-8")
    return path


def measured(path: Path, *final_at: tuple[int, float]) -> Path:
    """A cost file with what `rudra calibrate` measures if the model is no chain of layers."""
    path.write_text(f"compute_s = 1.2\nlatency_s = 0.0\njitter = 0.0\n{final_toml(final_at)}\n", encoding="utf-8")
    return path


def job(topology: dict[str, Any], learners: int = 2, **simulation: Any) -> Job:
    """A job in which no forward pass begins before the average is complete."""
    free = {"gradient_s": 0.0, "update_s": 0.0, "message_s": 0.0, "bandwidth_bytes_per_s": 4e6, "nodes": learners}
    return Job(
        optimizer={"clip_norm": 1.0 if topology["name"] == "groups" else None},
        protocol={"name": "hardsync"},
        topology=topology,
        training={"minibatch_size": 8},
        cluster={"learners": learners, "buckets": 0.5},
        simulation=free | simulation,
    )


def priced(run: Job, buffers: int = 0) -> CostModel:
    run = cost_files.load(run)
    phases = phases_of(run, run.plan(nodes_of(run)), 64)
    return prices_of(phases, 4 * MILLION + tail_bytes(1), buffers=buffers)(BEGINNING)


@pytest.mark.parametrize(
    ("layers", "seconds"),
    [
        # 4 MB in 1 s, in 8 buckets of 0.5 MB; the pass takes 0.8 s. All but one are final 0.6 s before its end.
        (CONVOLUTIONAL, 1.0 - 0.6),
        (CONVOLUTIONAL[::-1], 0.9),  # a bucket begins with the layer that is final first, a tenth of the gradient
        (CONVOLUTIONAL[:2], 1.0 - 0.8 * 7 / 8),  # of another model: at a constant rate
        ((), 1.0 - 0.8 * 7 / 8),
    ],
)
def test_virtual_time_takes_the_progress_from_the_times_of_layers(
    layers: Sequence[Layer], seconds: float, tmp_path: Path
) -> None:
    file = costs(tmp_path / "costs.toml", layers or CONVOLUTIONAL)
    more = {"costs": str(file)} if layers else {"compute_s": 1.2, "latency_s": 0.0}
    found = priced(job({"name": "groups"}, **more))
    assert found.reduction_s(found.plan.learners, 4 * MILLION) == pytest.approx(seconds, rel=1e-3)


@pytest.mark.parametrize(
    ("final_at", "seconds"),
    [
        (((100_000, 1.0), (900_000, 0.5)), 1.0 - 0.6),  # as above: 0.6 s before the end
        (((500_000, 0.5), (500_000, 1.0)), 4 / 8),  # the first half is final first: four buckets
        (((500_000, 1.0),), 1.0 - 0.8 * 7 / 8),  # of another model: at a constant rate
    ],
)
def test_virtual_time_prefers_the_measured_progress(
    final_at: Sequence[tuple[int, float]], seconds: float, tmp_path: Path
) -> None:
    found = priced(job({"name": "groups"}, costs=str(measured(tmp_path / "costs.toml", *final_at))))
    assert found.reduction_s(found.plan.learners, 4 * MILLION) == pytest.approx(seconds, rel=0.01)


@pytest.mark.parametrize(("cores", "delay_s"), [(None, 0.0), (1, 0.25), (2, 0.0)])
def test_transfers_during_the_pass_take_time_of_cores_that_are_busy(cores: int | None, delay_s: float) -> None:
    """Of the transfer of 1 s, 4 MB each way, 0.7 s are hidden. A core works 0.25 s for these bytes."""
    table = {"compute_s": 1.2, "latency_s": 0.0, "cores_per_node": cores, "cpu_s_per_byte": 0.25 / 0.7 / 8e6}
    found = priced(job({"name": "groups"}, **table))
    assert found.reduction_s(found.plan.learners, 4 * MILLION) == pytest.approx(0.3 + delay_s, rel=1e-3)
    whole = priced(job({"name": "groups"}, **table).with_(cluster={"buckets": "off"}))
    assert whole.reduction_s(whole.plan.learners, 4 * MILLION) == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize("pair", [[0, 0.5], [-3, 0.5], [3, 1.5], [3, -0.1]])
def test_a_pair_that_is_no_progress_is_refused(pair: list[float]) -> None:
    with pytest.raises(ConfigError, match=r"\[simulation\] final_at has a pair \["):
        Job(simulation={"final_at": [pair]})


@pytest.mark.parametrize("sharing", ["turns", "equal"])
@pytest.mark.parametrize(
    ("layers", "push_s", "hidden_s"), [(CONVOLUTIONAL, 0.4, 0.3), (CONVOLUTIONAL[::-1], 1.0, 0.0), ((), 0.3, 0.3)]
)
def test_pushes_and_weights_follow_the_layers_whether_links_are_shared_or_not(
    layers: Sequence[Layer], push_s: float, hidden_s: float, sharing: str, tmp_path: Path
) -> None:
    """One learner, whose server is on another node.

    Three of eight parts of the weights are there after 0.375 s, and all after 1 s. The forward pass takes 0.4 s, and
    the last 0.1 s of it follow the last part. But if the first layer has parameters in all parts, none is hidden.
    """
    file = costs(tmp_path / "costs.toml", layers or CONVOLUTIONAL)
    more = {"costs": str(file)} if layers else {"compute_s": 1.2, "latency_s": 0.0, "jitter": 0.0}
    run = job({"name": "base"}, 1, sharing=sharing, **more)
    rate = predict(run, known=Outline(10_000, 4 * MILLION + tail_bytes(1)), updates=20).samples_per_s
    assert 8 / rate == pytest.approx(1.2 + 1.0 - hidden_s + push_s, rel=1e-3)


def test_the_server_of_the_last_parameters_gets_its_part_first(tmp_path: Path) -> None:
    """Each of two servers takes four buckets. The message follows at the end of the pass."""
    run = job({"name": "sharded", "options": {"shards": 2, "servers_on_own_nodes": True}}, 1)
    for layers, first, last in (((), 3 / 8, 7 / 8), (CONVOLUTIONAL, 0.75, 0.75)):
        more = {"costs": str(costs(tmp_path / "costs.toml", layers))} if layers else {}
        found = priced(run.with_(simulation=more))
        owners, (learner,) = found.plan.front_owners, found.plan.learners
        leads = [found.leads(learner, owner) for owner in owners]
        ends = [number for of in leads for lead in (of[0], of[-1]) for number in lead]
        assert ends == pytest.approx([1.0, first, 0.25, 0.0, 1.0, last, 0.0, 0.0], abs=1e-3)


@pytest.mark.parametrize("topology", ["base", "groups"])
def test_buffers_are_final_after_all_parameters(topology: str) -> None:
    """Of a million numbers 200,000 are buffers. The others leave in buckets of 125,008, the last bucket at the end."""
    found = priced(job({"name": topology}, compute_s=1.2, latency_s=0.0), buffers=200_000)
    late_s = (200_000 + 125_008) / MILLION
    if topology == "base":
        first, *_, last = found.leads(found.plan.learners[0], found.plan.server)
        assert (first.left, last) == (pytest.approx(6 * 125_008 / 800_000), Lead(pytest.approx(late_s), 0.0))
    else:
        fast = found.reduction_s(found.plan.learners, 400_000)
        assert fast == pytest.approx(0.1 * late_s)


def normed(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    norms = (nn.BatchNorm1d(9), nn.BatchNorm1d(12))
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 9), norms[0], nn.Linear(9, 12), norms[1], nn.Linear(12, classes))


def test_the_buffers_of_a_model_and_of_its_first_layers_are_counted() -> None:
    """A BatchNorm has two numbers for each channel, and a counter."""
    run = Job(model={"name": normed}, data={"name": "digits"}, placement={"cut": 3}, cluster={"learners": 2})
    known = outline(run)
    assert known.buffers == 2 * 9 + 1 + 2 * 12 + 1
    assert known.placed.buffers * tensor_bytes(known.size_bytes) / 4 == pytest.approx(2 * 9 + 1)


@pytest.mark.parametrize(
    "tables",
    [
        {"training": {"minibatch_size": 8, "compile": True}},
        {"training": {"minibatch_size": 8, "microbatches": 2}},
        {"training": {"minibatch_size": 8, "precision": "float16"}},
        {"cluster": {"learners": 2, "device": "cuda"}},
    ],
)
def test_nothing_is_hidden_if_the_whole_gradient_becomes_final_at_once(tables: dict[str, Any]) -> None:
    run = job({"name": "groups"}, compute_s=1.2, latency_s=0.0)
    in_parts, at_once = (priced(one) for one in (run, run.with_(**tables)))
    assert in_parts.reduction_s(in_parts.plan.learners, 4 * MILLION) < 0.4
    assert at_once.reduction_s(at_once.plan.learners, 4 * MILLION) == pytest.approx(1.0)


def test_a_profile_says_when_the_gradient_of_a_layer_is_final() -> None:
    found = Profile("x", 8, CONVOLUTIONAL, 0.3, 0.0, 1.5, 1, final_at=((100_000, 0.95), (900_000, 0.6)))
    assert found.final == pytest.approx((None, 0.95, None, 0.6))
    assert found.as_dict()["final"] == found.final
    rows = as_text(found).splitlines()
    assert [row.split()[0] for row in rows if " 60% " in row] == ["out"]
    assert "final_at = [[100000, 0.95], [900000, 0.6]]" in as_toml(found)
    at_once = replace(found, final_at=())
    assert at_once.final == (None, 1.0, None, 1.0)
    assert "final_at" not in as_toml(at_once)


def unlike(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    return Branches(classes)


class Branches(nn.Module):
    """No chain of layers: its last parameters are used first, and some not at all."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.last, self.unused, self.first = nn.Linear(300, classes), nn.Linear(7, 3), nn.Linear(64, 300)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(inputs.flatten(1)))
        found: torch.Tensor = self.last(hidden + torch.tanh(hidden))
        return found


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_a_learner_tells_when_its_gradient_is_final(precision: str) -> None:
    run = Job(
        model={"name": unlike},
        data={"name": "digits", "train_limit": 64},
        training={"minibatch_size": 64, "precision": precision},
        cluster={"learners": 2, "threads_per_rank": 1},
    )
    found = final_at(run, seconds=0.1)
    if precision == "float16":  # the loss is scaled, and all of it may be computed again
        assert found == ()
        return
    assert sum(count for count, _ in found) == 300 * 10 + 10 + 24 + 64 * 300 + 300
    whole = BackwardPass.measured(found, sum(count for count, _ in found))
    last, unused, first = (whole.left(slice(place, place + 1)) for place in (0, 3010, 3034))
    assert last > first >= 0 == unused


def test_a_learner_tells_when_a_forward_pass_needs_its_parameters() -> None:
    run = Job(
        model={"name": unlike},
        data={"name": "digits", "train_limit": 64},
        training={"minibatch_size": 64},
        cluster={"learners": 2, "threads_per_rank": 1},
    )
    found, share = needed_at(run, seconds=0.1)
    assert sum(count for count, _ in found) == 300 * 10 + 10 + 24 + 64 * 300 + 300
    times = ForwardTimes(sum(count for count, _ in found), found, share)
    last, unused, first = (times.needed(slice(place, place + 1)) for place in (0, 3010, 3034))
    assert 0 <= first < last < unused == share < 1
    assert f"forward_share = {share:g}" in needed_toml(found, share)
    compiled = needed_at(run.with_(training={"compile": True}))
    assert needed_toml(*compiled) == ""
