"""Omnivore's model of time per iteration: its formulas by hand, and against virtual time."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from fuzzing import in_turn

from rudra.cli.main import main
from rudra.core.layout import Placed
from rudra.job.job import Job
from rudra.simulation.efficiency import Times, convolutions_s, handed_on_s
from rudra.simulation.predict import Outline, Prediction, predict
from rudra.studies import sweep

SAMPLES, SIZE, BATCH = 10_000, 1_000_000, 16
PLACED = Placed(front=0.06, crossing=0.05, back=0.2)
COSTS: dict[str, Any] = {
    "compute_s": {BATCH: 0.1},
    "jitter": 0.0,
    "latency_s": 1e-4,
    "bandwidth_bytes_per_s": 1e9,
    "message_s": 1e-5,
    "update_s": 5e-4,
}


@pytest.mark.parametrize(
    ("groups", "seconds"),
    [(1, 4.0), (2, 2.0), (3, 4 / 3), (4, 1.0), (8, 1.0), (32, 1.0)],
    ids=["synchronous", "conv saturated", "conv saturated", "boundary", "FC saturated", "FC saturated"],
)
def test_he_of_figure_21(groups: int, seconds: float) -> None:
    """Appendix D-D1 with t_conv = 3, t_fc = 1."""
    assert Times(3.0, 1.0, 1.0).iteration_s(groups) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("machines", "overlapped", "seconds"),
    [(1, True, 8.0), (2, True, 4.0), (4, True, 2.0), (8, True, 4.0), (1, False, 8.5), (4, False, 4.0), (8, False, 5.0)],
)
def test_more_machines_compute_faster_until_the_network_is_full(
    machines: int, overlapped: bool, seconds: float
) -> None:
    assert convolutions_s(machines, 8.0, 0.5, overlapped=overlapped) == pytest.approx(seconds)


def found(learners: int, *, groups: int | None = None, merged: bool = True, **costs: Any) -> Prediction:
    """Groups of learners whose batch is `BATCH`, or learners that are groups of one."""
    job = Job(
        model={"name": "lenet"},
        training={"minibatch_size": BATCH * (groups or learners) // learners},
        protocol={"name": "async", "modulation": "none"},
        topology={"name": "groups", "options": {"groups": groups}} if groups else {},
        placement={"cut": 5} if merged else {},
        cluster={"learners": learners, "buckets": "off"},  # which the model does not know
        simulation={**COSTS, **costs},
    )
    return predict(job, known=Outline(SAMPLES, SIZE, PLACED if merged else None))


@pytest.mark.each_value
@pytest.mark.slow
@pytest.mark.parametrize(
    ("learners", "costs"),
    in_turn(
        [2, 4, 5, 6, 8, 16],
        [{}, {"update_s": 0.02}, {"bandwidth_bytes_per_s": 2e6}, {"jitter": 0.06, "distribution": "lognormal"}],
    ),
    ids=str,
)
def test_virtual_time_agrees_with_the_merged_model(learners: int, costs: dict[str, Any]) -> None:
    """From the saturated convolutions over the boundary, at 5, to the saturated stage server, or its link."""
    model = found(learners, **costs).efficiency
    assert (model.groups, model.group_size) == (learners, 1)
    assert model.simulated_s == pytest.approx(model.merged.iteration_s(learners), rel=0.03)


@pytest.mark.each_value
@pytest.mark.slow
@pytest.mark.parametrize(
    ("counts", "costs"),
    in_turn(
        [(4, 2), (8, 2), (8, 4), (16, 8), (32, 4), (32, 16)],
        [{}, {"update_s": 0.02}, {"bandwidth_bytes_per_s": 2e7}],
    ),
    ids=str,
)
def test_virtual_time_agrees_with_the_merged_model_of_groups(counts: tuple[int, int], costs: dict[str, Any]) -> None:
    """A group's batch is served when all its parts are there."""
    learners, groups = counts
    model = found(learners, groups=groups, **costs).efficiency
    assert (model.groups, model.group_size) == (groups, learners // groups)
    assert model.simulated_s == pytest.approx(model.merged.iteration_s(groups), rel=0.03)


def test_what_a_lone_iteration_consists_of() -> None:
    model = found(2).efficiency
    assert model.merged.compute_s == pytest.approx(0.08 + 2 * (1e-4 + 0.06e-3) + 1e-5 + 0.06 * 5e-4)
    assert model.merged.server_s == pytest.approx(0.02 + 2 * (1e-4 + 0.05e-3) + 1e-5)
    assert model.merged.busy_s == pytest.approx(0.02 + 0.94 * 5e-4)
    assert model.unmerged.compute_s + model.unmerged.server_s == pytest.approx(0.1 + 2 * (1e-4 + 1e-3) + 1e-5 + 5e-4)


@pytest.mark.parametrize(("learners", "groups"), [(2, None), (8, None), (8, 4), (8, 2)])
def test_virtual_time_agrees_with_the_unmerged_model(learners: int, groups: int | None) -> None:
    model = found(learners, groups=groups, merged=False).efficiency
    assert model.merged is None
    assert model.simulated_s == pytest.approx(model.unmerged.iteration_s(groups or learners), rel=0.03)


def test_groups_of_figure_5b_take_in_virtual_time_what_the_paper_has() -> None:
    """Of 32 machines k = 32 to 1 in a group: the network, convolutions and the boundary, and the server bound it."""
    study = sweep.plan("omnivore/figure5b", quick=True)
    jobs = {point.file: point.job for point in study.points}
    for row in study.paper:
        job = jobs[row["file"]]
        seconds = job.training.minibatch_size / predict(job, updates=400).samples_per_s
        assert seconds == pytest.approx(row["iteration_s"], rel=0.03), row["n"]
        conv_s = convolutions_s(32 // row["n"], 3.85, 0.149)
        assert Times(conv_s, 0.34, 0.34).iteration_s(row["n"]) == pytest.approx(row["iteration_s"], abs=1e-3)


@pytest.mark.parametrize(
    ("settings", "about"),
    [
        (["protocol.name=async"], True),
        (["protocol.name=hardsync"], False),
        (["protocol.name=softsync", "protocol.n=1"], False),
        (["protocol.name=async", "cluster.learners=1"], False),
        (["protocol.name=async", "topology.name=sharded"], False),
        (["protocol.name=async", "topology.name=adv", "topology.options={fan_out=2}"], False),
    ],
)
def test_the_command_shows_the_model_of_jobs_that_it_is_about(
    settings: list[str], about: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["predict", "digits", "--updates", "40"]
    for setting in ["cluster.learners=4", *settings]:
        arguments += ["--set", setting]
    assert main(arguments) == 0
    assert ("Omnivore's model" in capsys.readouterr().out) is about
    assert main([*arguments, "--json"]) == 0
    assert ("efficiency" in json.loads(capsys.readouterr().out)) is about


@pytest.mark.parametrize(
    ("receivers", "ways"), [([(1,), ()], 1), ([(1, 2), (3,), (), ()], 2), ([(1, 2), (), (3,), ()], 3)]
)
def test_a_member_hands_weights_on_before_it_computes(receivers: list[tuple[int, ...]], ways: int) -> None:
    """One after the other: a member has the weights later, the more its sender has sent before."""
    plan: Any = SimpleNamespace(groups=[tuple(range(len(receivers)))], receivers=receivers)
    assert handed_on_s(plan, 0.5) == ways * 0.5
    assert handed_on_s(SimpleNamespace(groups=()), 0.5) == 0  # type: ignore[arg-type]
