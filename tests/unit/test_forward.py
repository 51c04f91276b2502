"""When a forward pass needs its parameters, and when it ends if they arrive while it runs."""

import random
from collections.abc import Sequence
from typing import Any

import pytest

from rudra.core.backward import BackwardPass, after_s
from rudra.core.buckets import COPIED_BYTES_S, kept, parts
from rudra.core.forward import ForwardTimes, arrivals_s, early_times, step_s
from rudra.core.placement import Layer, PlacementHardware, allreduce_s
from rudra.core.wire import tail_bytes
from rudra.errors import ConfigError
from rudra.job.job import Job
from rudra.simulation.predict import Outline, predict

MILLION = 1_000_000
COPIES = 2


def layer(parameters: int, forward_s: float, backward_s: float) -> Layer:
    return Layer("x", "linear", 4 * parameters, 4, forward_s, backward_s)


LAYERS = (layer(0, 0.5, 0.5), layer(100_000, 0.5, 1.5), layer(0, 0.25, 0.25), layer(900_000, 0.5, 1.0))
MEASURED = ((100_000, 0.125), (700_000, 0.25), (200_000, 0.0625))  # its last parameters are used first


@pytest.mark.parametrize(
    ("times", "share", "needed"),
    [
        (ForwardTimes(MILLION), 1 / 3, {(0, 9): 0.0, (300_000, 300_001): 0.1, (999_999, MILLION): 0.333333}),
        (ForwardTimes.of_layers(LAYERS), 0.35, {(0, 1): 0.1, (99_999, 100_001): 0.1, (100_000, MILLION): 0.25}),
        (ForwardTimes.of_layers((layer(MILLION, 0.0, 0.0),)), 1 / 3, {(0, MILLION): 0.0}),
        (ForwardTimes(MILLION, MEASURED, 0.4), 0.4, {(0, 9): 0.125, (100_000, 800_000): 0.25, (0, MILLION): 0.0625}),
    ],
)
def test_a_part_is_needed_with_the_first_of_its_parameters(
    times: ForwardTimes, share: float, needed: dict[tuple[int, int], float]
) -> None:
    assert {span: times.needed(slice(*span)) for span in needed} == pytest.approx(needed, abs=1e-6)
    assert times.needed(slice(MILLION, MILLION + 9)) == 0, "no parameters: perhaps statistics, needed at once"
    assert times.share == pytest.approx(share)


def ends_s(
    times: ForwardTimes, its: Sequence[slice], arrived_s: Sequence[float], update_s: float, seconds: float
) -> float:
    """Performs a pass as a run does: it updates what it needs, and while it waits, what else has arrived."""
    size = sum(part.stop - part.start for part in its)
    cost_s = [update_s * (part.stop - part.start) / size for part in its]
    left = {*range(len(its))}
    now = arrived_s[min(left, key=lambda number: its[number].start)]
    done = 0.0
    for needed, number in [
        *sorted((times.needed(part), number) for number, part in enumerate(its)),
        *((times.share, number) for number in range(len(its))),
    ]:
        now, done = now + (needed - done) * seconds, needed
        while number in left:
            here = [number] if arrived_s[number] <= now else [other for other in left if arrived_s[other] <= now]
            if here:
                now += cost_s[here[0]]
                left.remove(here[0])
            else:
                now = min(arrived_s[other] for other in left)
    return now


@pytest.mark.parametrize("seed", range(40))
def test_a_pass_ends_as_if_each_layer_waited_for_its_parameters(seed: int) -> None:
    chance = random.Random(seed)
    its = parts(MILLION, MILLION, chance.choice([16_000, 160_000, 400_000]))
    cut = sorted(chance.sample(range(MILLION), 3))
    counts = [stop - start for start, stop in zip([0, *cut], [*cut, MILLION], strict=True)]
    measured = [(count, chance.random() * 0.4) for count in counts]
    times = chance.choice([ForwardTimes(MILLION), ForwardTimes(MILLION, measured, 0.4)])
    arrived_s = [max(0.0, chance.uniform(-1.0, 3.0)) for _ in its]
    update_s, seconds = chance.choice([0.0, 0.5]), chance.choice([0.01, 1.0, 20.0])
    early = early_times(times, its, arrived_s, COPIES, update_s)
    last_s = max(arrived_s)
    if last_s == arrived_s[-1]:
        assert early is None, "nothing is under way when the first parameters arrive"
        return
    assert early is not None
    expected = ends_s(times, its, arrived_s, update_s, seconds)
    # In a run, the slice of an update that is under way when a part arrives ends first.
    slack_s = update_s * max(part.stop - part.start for part in its) / MILLION
    assert expected - slack_s - 1e-9 <= last_s + early.rest_s(seconds) <= expected + 1e-9


def test_a_pass_waits_for_all_parts_if_they_arrive_sooner_than_weights_are_copied() -> None:
    its, copies_s = parts(MILLION, MILLION, MILLION // 2), 4 * MILLION * COPIES / COPIED_BYTES_S
    assert early_times(ForwardTimes(MILLION), its, [1.0 + 0.9 * copies_s, 1.0], COPIES) is None
    assert early_times(ForwardTimes(MILLION), its, [1.0 + 1.1 * copies_s, 1.0], COPIES) is not None


EIGHT = parts(MILLION, MILLION, 125_008)
ARRIVED_S = [5.6, 0.0, 0.8, 1.4, 5.2, 4.4, 2.6, 3.8]
"""Arrivals of eight parts of 1 s. A backward pass of 3.2 s finishes one each 0.4 s, at -2.8 s the first.

It is kept. Three parts are under way from -1.6 s on. Then the first layers have priority.
"""


def test_parts_of_the_first_layers_have_priority_and_those_of_the_last_ones_wait_for_all_others() -> None:
    found = arrivals_s(EIGHT, [0.4 * number - 2.8 for number in range(8)], 8.0)
    assert found == pytest.approx(ARRIVED_S, abs=0.001)


@pytest.mark.parametrize("seed", range(40))
def test_a_link_rests_only_if_no_part_is_final_except_those_that_are_kept(seed: int) -> None:
    chance = random.Random(seed)
    its = parts(MILLION, MILLION, chance.choice([16_000, 64_000, 240_000]))
    transfer_s, backward_s = chance.uniform(0.0, 2.0), chance.choice([0.0, 1.0])
    backward = BackwardPass(MILLION, [(MILLION // 5, chance.random()) for _ in range(5)], 1.0)
    final_s = [-backward.left(part) * backward_s for part in its]
    arrived_s = arrivals_s(its, final_s, transfer_s)
    each_s = [transfer_s * (part.stop - part.start) / MILLION for part in its]
    for final, arrived, each in zip(final_s, arrived_s, each_s, strict=True):
        assert arrived >= max(0.0, final + each - 1e-9)
    whole_s = after_s(backward.leads(its), transfer_s, backward_s)
    assert whole_s - 1e-9 <= max(arrived_s) <= whole_s + sum(each_s[number] for number in kept(len(its))) + 1e-9


def job(learners: int = 2, buckets: Any = 0.5, **tables: Any) -> Job:
    free = {"gradient_s": 0.0, "update_s": 0.0, "message_s": 0.0, "latency_s": 0.0, "jitter": 0.0, "nodes": learners}
    given = {"topology": {"name": "groups"}, "training": {"minibatch_size": 8}} | tables
    given["simulation"] = free | given.get("simulation", {})
    return Job(protocol={"name": "hardsync"}, cluster={"learners": learners, "buckets": buckets}, **given)


def predicted_s(run: Job, buffers: int = 0) -> float:
    """Time of a step of a million parameters."""
    found = predict(run, known=Outline(100_000, 4 * MILLION + tail_bytes(1), None, buffers), updates=400)
    return 8 * run.cluster.learners / found.samples_per_s


@pytest.mark.parametrize("sharing", ["turns", "equal"])
@pytest.mark.parametrize(
    ("compute_s", "transfer_s", "step"),
    [
        (1.2, 1e-9, 1.2),
        (1e-6, 1.0, 1.0),
        # A bucket for each layer. The forward pass of 1.6 s begins at 3.8 s and waits until 4.4 s for the third layer,
        # until 5.2 s for the fourth one. The other four layers are not late.
        (4.8, 8.0, 3.2 + 5.2 + 5 / 8 * 1.6),
        (0.6, 8.0, None),
        (6.0, 2.0, None),
    ],
)
def test_a_step_in_virtual_time_is_the_closed_formula(
    compute_s: float, transfer_s: float, step: float | None, sharing: str
) -> None:
    found = predicted_s(job(simulation=costs(compute_s, transfer_s, sharing=sharing)))
    backward = BackwardPass(MILLION)
    arrived_s = arrivals_s(EIGHT, [-backward.left(part) * compute_s * backward.share for part in EIGHT], transfer_s)
    early = early_times(ForwardTimes(MILLION), EIGHT, arrived_s, COPIES)
    assert found == pytest.approx(step_s(compute_s, max(arrived_s), early), rel=1e-3)
    assert step is None or found == pytest.approx(step, rel=1e-3)
    # The link rests until the first bucket is final, and the forward pass until the last one has crossed the link.
    bound_s = max(compute_s + transfer_s / 8, transfer_s + compute_s * backward.share / 8)
    assert found >= bound_s * (1 - 1e-3)


def costs(compute_s: float, transfer_s: float, **more: Any) -> dict[str, Any]:
    return {"compute_s": compute_s, "bandwidth_bytes_per_s": 4e6 / transfer_s, **more}


@pytest.mark.parametrize(
    "more",
    [
        {"optimizer": {"clip_norm": 1.0}},
        {"training": {"minibatch_size": 8, "microbatches": 2}},
        {"hooks": ({"at": "update", "call": "csv"},)},
    ],
)
def test_a_job_whose_passes_wait_for_all_parts_takes_the_old_time(more: dict[str, Any]) -> None:
    run = job(simulation=costs(1.2, 1.0), **more)
    whole = "microbatches" in more.get("training", {})
    rest_s = 1.0 if whole else 1.0 - 0.8 * 7 / 8
    assert predicted_s(run) == pytest.approx(1.2 + rest_s, rel=1e-3)


def test_a_pass_waits_for_buffers_which_are_final_at_its_end_and_leave_first() -> None:
    its = parts(MILLION, MILLION - 125_008, 125_008)
    arrived_s = arrivals_s(its, [0.0] * 8, 8.0)
    assert arrived_s[7] == min(arrived_s), "buffers"
    early = early_times(ForwardTimes(MILLION - 125_008), its, [0.0] * 6 + [1.0, 2.0], COPIES)
    assert early is not None
    assert 2.0 + early.rest_s(4.8) == pytest.approx(2.0 + 1.6), "needed at once"
    without, with_buffers = (predicted_s(job(simulation=costs(4.8, 8.0)), buffers) for buffers in (0, 125_008))
    assert with_buffers > without


def test_the_update_is_part_of_a_pass_that_begins_early() -> None:
    """It takes place while the pass waits, except for the last two parts, which arrive together."""
    first, second = (predicted_s(job(simulation=costs(1e-6, 1.0, update_s=seconds))) for seconds in (0.0, 0.08))
    assert second - first == pytest.approx(2 * 0.08 / 8, rel=0.01)


def test_measured_needs_count_if_they_are_of_this_model() -> None:
    """All parameters are needed at the end of the pass, or the last ones, which arrive last, at the beginning."""
    at_end, at_once, of_another = ((MILLION, 0.25),), ((900_000, 0.25), (100_000, 0.0)), ((9, 0.0),)
    hidden, waits, other = (
        predicted_s(job(simulation=costs(4.8, 8.0, forward_share=0.25, needed_at=needed)))
        for needed in (at_end, at_once, of_another)
    )
    assert (hidden, waits) == pytest.approx((0.75 * 4.8 + 5.6, 4.8 + 5.6), rel=1e-3)
    assert other == pytest.approx(predicted_s(job(simulation=costs(4.8, 8.0))))


@pytest.mark.parametrize(("sharing", "passed_s", "push_s"), [("turns", 8.2, 6.8), ("equal", 9.0, 5.2)])
def test_a_pass_waits_for_the_weights_of_several_servers(sharing: str, passed_s: float, push_s: float) -> None:
    """Each of two servers gives four buckets, which take 1 s each, and three of them travel at a time.

    The learner's link carries the first server's buckets in 4 s and then the second one's. The pass of 1.6 s waits from
    3.6 s to 4 s, from 4.2 s to 7 s, and from 7.6 s to 8 s. Or it carries all, at equal rates. Then the pass begins at
    6 s, and waits from 6.6 s to 8 s. All buckets are there then, and 1 s of the pass is left. The backward pass of
    3.2 s hides a part of the push.
    """
    shards = {"name": "sharded", "options": {"shards": 2, "servers_on_own_nodes": True}}
    found = predicted_s(job(1, topology=shards, simulation=costs(4.8, 8.0, sharing=sharing)))
    assert found == pytest.approx(passed_s + 3.2 + push_s, rel=1e-3)


@pytest.mark.parametrize("pair", [[0, 0.5], [3, 1.5]])
def test_a_pair_that_is_no_need_is_refused(pair: list[float]) -> None:
    with pytest.raises(ConfigError, match=r"\[simulation\] needed_at has a pair \["):
        Job(simulation={"needed_at": [pair]})


def test_the_choice_of_a_cut_knows_passes_that_begin_early() -> None:
    layers, cluster = (layer(125_000, 0.2, 0.4),) * 8, PlacementHardware(2, 8, 0.5e6)
    found = allreduce_s(layers, cluster, lambda size: EIGHT, copies=COPIES)
    assert found == pytest.approx(predicted_s(job(simulation=costs(4.8, 8.0))), rel=1e-3)
    assert found < allreduce_s(layers, cluster, lambda size: EIGHT) < allreduce_s(layers, cluster, copies=COPIES)
    assert allreduce_s(layers, cluster, copies=COPIES) == allreduce_s(layers, cluster)
