from typing import Any

import pytest
import torch

from rudra.config import Job, OptimizerTable
from rudra.errors import ConfigError
from rudra.optim import UpdateRule

SHAPES = [(20, 1, 5, 5), (20,), (500, 77), (3,)]
SIZE = 39_023  # no multiple of a vector register


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("name", "table", "options", "exact"),
    [
        ("SGD", {}, {}, True),
        ("SGD", {"momentum": 0.9}, {}, True),
        ("SGD", {"momentum": 0.9, "weight_decay": 5e-4}, {"nesterov": True}, True),
        ("SGD", {"momentum": 0.9}, {"dampening": 0.1}, True),
        ("Adagrad", {}, {"initial_accumulator_value": 0.1}, False),
        ("Adam", {"weight_decay": 0.01}, {"betas": (0.8, 0.99)}, False),
        ("AdamW", {"weight_decay": 0.01}, {}, False),
        ("RMSprop", {"momentum": 0.5}, {"centered": True}, True),
    ],
)
def test_steps_equal_torchs_over_separate_parameters(
    name: str, table: dict[str, Any], options: dict[str, Any], exact: bool, threads: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(SIZE, generator=generator)
    sizes = [torch.Size(shape).numel() for shape in SHAPES]
    parts = zip(weights.split(sizes), SHAPES, strict=True)
    parameters = [torch.nn.Parameter(part.reshape(shape).clone()) for part, shape in parts]
    weight_decay = {"weight_decay": table.get("weight_decay", 0)}
    momentum = {"momentum": table["momentum"]} if "momentum" in table else {}
    theirs = getattr(torch.optim, name)(parameters, lr=1, foreach=False, **weight_decay, **momentum, **options)
    ours = UpdateRule(OptimizerTable(name=name.lower(), options=options, **table), weights)
    ours.prepare()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for step in range(5):
            gradient = torch.randn(SIZE, generator=generator)
            lent = gradient.clone()
            rate = 0.1 / (step + 1)
            ours.step(lent, rate)
            assert torch.equal(lent, gradient)
            theirs.param_groups[0]["lr"] = rate
            for parameter, part in zip(parameters, gradient.split(sizes), strict=True):
                parameter.grad = part.reshape(parameter.shape).clone()
            theirs.step()
    finally:
        torch.set_num_threads(before)
    expected = torch.cat([p.detach().reshape(-1) for p in parameters])
    torch.testing.assert_close(weights, expected, **({"rtol": 0, "atol": 0} if exact else {"rtol": 1e-5, "atol": 1e-6}))


@pytest.mark.parametrize("size", [1, 15, 16, 17])
def test_the_smallest_vectors_work(size: int) -> None:
    weights = torch.ones(size)
    UpdateRule(OptimizerTable(name="sgd", momentum=0.9), weights).step(torch.ones(size), 0.25)
    assert weights.tolist() == [0.75] * size


def test_prepared_momentum_is_counted_and_no_step_allocates_more() -> None:
    weights = torch.zeros(SIZE)
    rule = UpdateRule(OptimizerTable(name="sgd", momentum=0.9), weights)
    assert rule.state_bytes() == 0
    rule.prepare()
    assert rule.state_bytes() == 4 * SIZE
    address = {id(v) for s in rule.optimizer.state.values() for v in s.values()}
    rule.step(torch.ones(SIZE), 0.1)
    assert {id(v) for s in rule.optimizer.state.values() for v in s.values()} == address
    assert rule.state_bytes() == 4 * SIZE


def test_a_step_of_sgd_needs_no_memory_of_the_models_size() -> None:
    weights = torch.zeros(SIZE)
    rule = UpdateRule(OptimizerTable(name="sgd", momentum=0.9, weight_decay=0.1), weights)
    rule.prepare()
    gradient = torch.ones(SIZE)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        rule.step(gradient, 0.1)
    assert max((event.cpu_memory_usage for event in profile.key_averages()), default=0) < 4 * SIZE


@pytest.mark.parametrize(("name", "invariant"), [("sgd", False), ("adam", True), ("adagrad", True), ("rmsprop", True)])
def test_scale_invariance_is_what_the_optimisers_show(name: str, invariant: bool) -> None:
    steps = []
    for scale in (1.0, 64.0):
        weights = torch.zeros(32)
        rule = UpdateRule(OptimizerTable(name=name), weights)
        rule.step(torch.full((32,), scale), 0.1)
        steps.append(float(weights[0]))
    assert rule.scale_invariant == invariant
    assert (abs(steps[1] / steps[0] - 1) < 1e-3) == invariant


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"name": "adam", "momentum": 0.9}, "momentum = 0.9 is for rmsprop and sgd only, not adam"),
        ({"name": "sgd", "options": {"betas": 1}}, "unknown option 'betas' of sgd; valid: dampening, nesterov"),
        ({"name": "sgd", "options": {"lr": 1}}, "unknown option 'lr' of sgd"),
        ({"name": "sgd", "options": {"nesterov": True}}, r"\[optimizer\] sgd: Nesterov momentum requires"),
        ({"name": "sgd", "options": {"nesterov": 0}}, r"\[optimizer\] sgd: .*"),  # torch takes it, and its step fails
        ({"name": "adam", "options": {"betas": ()}}, r"\[optimizer\] adam: "),
        ({"name": "adam", "options": {"betas": (2, 3)}}, r"\[optimizer\] adam: Invalid beta"),
    ],
)
def test_mistakes_in_the_optimizer_table(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        UpdateRule(OptimizerTable(**table), torch.zeros(20))


def test_an_unknown_optimizer_is_refused_with_the_job() -> None:
    with pytest.raises(ConfigError, match="name 'lion' is unknown; valid: sgd, adagrad, adam, adamw, rmsprop"):
        Job(optimizer={"name": "lion"})
