import re
from typing import Any, Literal

import pytest
import torch

from rudra.compute.optim import UpdateRule
from rudra.errors import ConfigError
from rudra.job.job import Job
from rudra.job.tables import OptimizerTable
from tests.unit.flat_layout import NO_DECAY, SHAPES, SIZE, SIZES, SLOW, layout


def separate(weights: torch.Tensor) -> list[torch.nn.Parameter]:
    """The same weights, as parameters of their own."""
    parts = zip(weights.split(SIZES), SHAPES, strict=True)
    return [torch.nn.Parameter(part.reshape(shape).clone()) for part, shape in parts]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("groups", "own"),
    [
        ([], [{}, {}, {}, {}]),
        ([NO_DECAY], [{}, {"weight_decay": 0.0}, {}, {"weight_decay": 0.0}]),
        ([NO_DECAY, SLOW], [{"lr": 0.1}, {"weight_decay": 0.0}, {}, {"weight_decay": 0.0}]),
        ([SLOW, NO_DECAY], [{"lr": 0.1}, {"lr": 0.1}, {}, {"weight_decay": 0.0}]),
        ([{"parameters": "*", "weight_decay": 0.2}], [{"weight_decay": 0.2}] * 4),
    ],
    ids=["one", "no decay of biases", "no decay, slow", "slow, no decay", "all"],
)
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
    name: str,
    table: dict[str, Any],
    options: dict[str, Any],
    exact: bool,
    groups: list[dict[str, Any]],
    own: list[dict[str, float]],
    threads: int,
) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(SIZE, generator=generator)
    parameters = separate(weights)
    weight_decay = {"weight_decay": table.get("weight_decay", 0)}
    momentum = {"momentum": table["momentum"]} if "momentum" in table else {}
    theirs_of = [{"params": [p], **keys} for p, keys in zip(parameters, own, strict=True)]
    theirs = getattr(torch.optim, name)(theirs_of, lr=1, foreach=False, **weight_decay, **momentum, **options)
    ours = UpdateRule(OptimizerTable(name=name.lower(), options=options, groups=groups, **table), weights, layout())
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
            for group, keys in zip(theirs.param_groups, own, strict=True):
                group["lr"] = rate * keys.get("lr", 1.0)
            for parameter, part in zip(parameters, gradient.split(SIZES), strict=True):
                parameter.grad = part.reshape(parameter.shape).clone()
            theirs.step()
    finally:
        torch.set_num_threads(before)
    expected = torch.cat([p.detach().reshape(-1) for p in parameters])
    torch.testing.assert_close(weights, expected, **({"rtol": 0, "atol": 0} if exact else {"rtol": 1e-5, "atol": 1e-6}))


RATES = [0.02, 0.02, 0.02, 0.0, 0.002, 0.002, 0.01, 0.0, 0.03]
"""Falls, rises, and is zero, where the weights coast."""


def caffe(
    weights: torch.Tensor, gradients: torch.Tensor, table: OptimizerTable, own: list[dict[str, float]]
) -> torch.Tensor:
    """Caffe's solver by hand: v = m v + α (g + d w), and w -= v; Nesterov's w -= (1 + m) v - m times v before."""
    m, nesterov, dampening = table.momentum, table.options.get("nesterov"), table.options.get("dampening", 0.0)
    done = []
    for place, keys in enumerate(own):
        w = weights.split(SIZES)[place].clone()
        v = torch.zeros_like(w)
        for step, (gradient, rate) in enumerate(zip(gradients, RATES, strict=True)):
            before = v.clone()
            whole = gradient.to(w.dtype).split(SIZES)[place] + keys.get("weight_decay", table.weight_decay) * w
            new = rate * keys.get("lr", 1.0) * whole
            v = m * v + (1 - dampening if step else 1.0) * new  # torch dampens no first step
            w -= new + m * v if nesterov and dampening else (1 + m) * v - m * before if nesterov else v
        done.append(w)
    return torch.cat(done)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("groups", "own"),
    [([], [{}, {}, {}, {}]), ([NO_DECAY, SLOW], [{"lr": 0.1}, {"weight_decay": 0.0}, {}, {"weight_decay": 0.0}])],
    ids=["one", "several"],
)
@pytest.mark.parametrize(
    ("weight_decay", "options"),
    [(0.0, {}), (0.05, {}), (0.05, {"nesterov": True}), (0.05, {"dampening": 0.3}), (0.05, {"maximize": False})],
    ids=str,
)
def test_in_caffes_form_a_new_rate_concerns_new_gradients_alone(
    weight_decay: float,
    options: dict[str, Any],
    groups: list[dict[str, Any]],
    own: list[dict[str, float]],
    dtype: torch.dtype,
) -> None:
    generator = torch.Generator().manual_seed(0)
    begun, gradients = torch.randn(SIZE, generator=generator), torch.randn(len(RATES), SIZE, generator=generator)
    table = OptimizerTable(
        momentum=0.9, momentum_form="caffe", weight_decay=weight_decay, options=options, groups=groups
    )
    ends = {}
    for form in ("caffe", "torch"):
        weights = begun.clone()
        rule = UpdateRule(table.model_copy(update={"momentum_form": form}), weights, layout())
        rule.prepare()
        for gradient, rate in zip(gradients, RATES, strict=True):
            lent = gradient.clone()
            rule.step(lent, rate)
            assert torch.equal(lent, gradient)
        ends[form] = weights.to(dtype)
    expected = caffe(begun.to(dtype), gradients, table, own)
    assert (ends["caffe"] - expected).abs().max() <= 2e-6
    assert (ends["torch"] - expected).abs().max() > 0.1


@pytest.mark.parametrize("options", [{}, {"nesterov": True}, {"dampening": 0.3}], ids=str)
def test_at_one_rate_both_forms_are_the_same(options: dict[str, Any]) -> None:
    ends = []
    for form in ("caffe", "torch"):
        generator = torch.Generator().manual_seed(0)
        weights = torch.randn(SIZE, generator=generator)
        table = OptimizerTable(momentum=0.9, momentum_form=form, weight_decay=0.1, options=options, groups=[SLOW])
        rule = UpdateRule(table, weights, layout())
        for _ in range(6):
            rule.step(torch.randn(SIZE, generator=generator), 0.1)
        ends.append(weights)
    torch.testing.assert_close(*ends, rtol=1e-5, atol=1e-6)


def test_in_caffes_form_gradients_are_clipped_before_the_rate_is_in_them() -> None:
    weights = torch.ones(SIZE)
    rule = UpdateRule(OptimizerTable(momentum=0.5, momentum_form="caffe", clip_norm=1.0), weights, layout())
    for rate in (0.5, 0.25):
        rule.step(torch.full((SIZE,), 3.0), rate)
    torch.testing.assert_close(weights, torch.full((SIZE,), 1 - (0.5 + 0.5 * 0.5 + 0.25) / SIZE**0.5))


def test_without_momentum_there_is_no_form() -> None:
    ends = []
    for form in ("caffe", "torch"):
        weights = torch.ones(SIZE)
        rule = UpdateRule(OptimizerTable(momentum_form=form, weight_decay=0.1), weights)
        for rate in RATES:
            rule.step(torch.full((SIZE,), 0.3), rate)
        ends.append(weights)
    assert torch.equal(*ends)


def test_neighbours_of_one_group_are_stepped_as_one() -> None:
    """So a job without groups is as fast as one vector, and its checkpoints have the names that they always had."""
    table = {"name": "sgd", "momentum": 0.9}
    counts = []
    for groups in ([], [SLOW], [NO_DECAY]):
        rule = UpdateRule(OptimizerTable(**table, groups=groups), torch.zeros(SIZE), layout())
        rule.prepare()
        counts.append(len(rule.state()))
    plain = UpdateRule(OptimizerTable(**table), torch.zeros(SIZE))
    plain.prepare()
    assert list(plain.state()) == ["momentum_buffer.0", "momentum_buffer.1"]
    assert counts == [2, 4, 7], "two slices each, but the last bias is smaller than a cache line"


@pytest.mark.parametrize("groups", [[], [NO_DECAY, SLOW]], ids=["one", "several"])
@pytest.mark.parametrize("name", ["sgd", "caffe", "adam", "adamw", "adagrad", "rmsprop"])
def test_from_its_state_a_rule_goes_on_bit_for_bit_and_elsewhere(name: str, groups: list[dict[str, Any]]) -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = torch.randn(6, SIZE, generator=generator)
    momentum = {"sgd": {"momentum": 0.9}, "caffe": {"name": "sgd", "momentum": 0.9, "momentum_form": "caffe"}}
    table = OptimizerTable(**{"name": name, "weight_decay": 0.1, "groups": groups, **momentum.get(name, {})})
    weights = torch.randn(SIZE, generator=generator)
    rule = UpdateRule(table, weights, layout())
    rule.prepare()
    for step, gradient in enumerate(gradients[:3]):
        rule.step(gradient, 0.1 / (1 + step))
    state = {key: value.reshape(-1).clone() for key, value in rule.state().items()}  # as a checkpoint has it
    kept = {key: value.clone() for key, value in state.items()}
    copy, moved = weights.clone(), weights.clone()
    resumed = UpdateRule(table, copy, layout())
    resumed.prepare()
    resumed.restore(state)
    rule.move(moved)
    for step, gradient in enumerate(gradients[3:]):
        rule.step(gradient, 0.1 * step)
        resumed.step(gradient, 0.1 * step)
    assert torch.equal(copy, moved)
    assert not torch.equal(copy, weights)
    assert all(torch.equal(value, kept[key]) for key, value in state.items()), "what was given stays as it was"


@pytest.mark.parametrize(
    ("name", "size"), [("momentum_buffer.2", 16), ("momentum_buffer", 16), ("momentum_buffer.1", 5)]
)
def test_state_of_other_weights_is_refused(name: str, size: int) -> None:
    """These have two parts: up to the last full cache line, and behind that."""
    rule = UpdateRule(OptimizerTable(name="sgd", momentum=0.9), torch.zeros(SIZE))
    with pytest.raises(ValueError, match=f"^optimiser state {re.escape(name)} does not fit$"):
        rule.restore({name: torch.zeros(size)})


def test_adam_keeps_two_vectors_and_a_count() -> None:
    rule = UpdateRule(OptimizerTable(name="adam"), torch.zeros(SIZE))
    rule.step(torch.ones(SIZE), 0.1)
    assert {name: value.numel() for name, value in rule.state().items()} == {
        "step.0": 1,
        "exp_avg.0": SIZE,
        "exp_avg_sq.0": SIZE,
    }
    assert rule.state_bytes() == 4 * (1 + 2 * SIZE)


@pytest.mark.parametrize("form", ["torch", "caffe"])
def test_a_gradient_is_free_again_after_the_step(form: Literal["torch", "caffe"]) -> None:
    rule = UpdateRule(OptimizerTable(momentum=0.9, momentum_form=form), torch.zeros(SIZE))
    rule.step(torch.ones(SIZE), 0.1)
    assert all(parameter.grad is None for group in rule.optimizer.param_groups for parameter in group["params"])


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("most", "size"), [(1e-6, 1.0), (50.0, 1.0), (197.0, 1.0), (1e9, 1.0), (1e-6, 1e-8)])
def test_clipping_equals_torchs_over_separate_parameters(most: float, size: float, threads: int) -> None:
    """The gradients' norm is some 197 times `size`; torch adds 1e-6 to a norm, which shows in small ones."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(SIZE, generator=generator)
    parameters = separate(weights)
    theirs = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=False)
    ours = UpdateRule(OptimizerTable(name="sgd", momentum=0.9, clip_norm=most), weights, layout())
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for _ in range(6):
            gradient = size * torch.randn(SIZE, generator=generator)
            lent = gradient.clone()
            ours.step(lent, 0.1)
            assert torch.equal(lent, gradient)
            for parameter, part in zip(parameters, gradient.split(SIZES), strict=True):
                parameter.grad = part.reshape(parameter.shape).clone()
            torch.nn.utils.clip_grad_norm_(parameters, most)
            theirs.step()
    finally:
        torch.set_num_threads(before)
    assert torch.equal(weights, torch.cat([p.detach().reshape(-1) for p in parameters]))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30], ids=["NaN", "infinite", "its norm overflows"])
def test_a_gradient_without_a_finite_norm_does_what_it_does_without_clipping(value: float) -> None:
    """Clipped it might be zero, and training would go on as if nothing had happened."""
    clipped, plain = torch.ones(SIZE), torch.ones(SIZE)
    gradient = torch.ones(SIZE)
    gradient[5] = value
    UpdateRule(OptimizerTable(clip_norm=1.0), clipped, layout()).step(gradient, 0.1)
    UpdateRule(OptimizerTable(), plain).step(gradient, 0.1)
    torch.testing.assert_close(clipped, plain, rtol=0, atol=0, equal_nan=True)
    assert not clipped[5].abs() < 1e20


def test_the_host_needs_no_number_to_clip_on_a_device() -> None:
    """Tensors without data have no numbers, so reading one would fail."""
    weights = torch.zeros(SIZE, device="meta")
    rule = UpdateRule(OptimizerTable(name="rmsprop", clip_norm=1.0), weights, layout())
    rule.step(torch.ones(SIZE, device="meta"), 0.1)
    with pytest.raises(RuntimeError, match="meta"):
        float(rule.clip_factor)


@pytest.mark.parametrize("pattern", ["*.bia", "CONV.*", "norm.running_mean"])
def test_a_pattern_that_matches_nothing_is_refused(pattern: str) -> None:
    table = OptimizerTable(groups=[{"parameters": ["*.bias", pattern]}])
    text = f"'{pattern}' matches no parameter; there are conv.weight, conv.bias, fc.weight, fc.bias"
    with pytest.raises(ConfigError, match=rf"^\[optimizer\] groups: {re.escape(text)}$"):
        UpdateRule(table, torch.zeros(SIZE), layout())


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


@pytest.mark.parametrize(
    "table",
    [
        {"name": "sgd"},
        {"name": "sgd", "momentum": 0.9},
        {"name": "adagrad"},
        {"name": "adam"},
        {"name": "adamw", "options": {"amsgrad": True}},
        {"name": "rmsprop", "momentum": 0.9, "options": {"centered": True}},
    ],
)
def test_a_table_knows_how_many_vectors_its_optimiser_keeps(table: dict[str, Any]) -> None:
    rule = UpdateRule(OptimizerTable(**table), torch.zeros(SIZE))
    rule.step(torch.ones(SIZE), 0.1)
    assert rule.state_bytes() // (4 * SIZE) == OptimizerTable(**table).state_vectors


def test_without_momentum_nothing_is_kept() -> None:
    rule = UpdateRule(OptimizerTable(name="sgd"), torch.zeros(SIZE))
    rule.prepare()
    rule.step(torch.ones(SIZE), 0.1)
    assert (rule.state(), rule.state_bytes()) == ({}, 0)


@pytest.mark.parametrize("form", ["torch", "caffe"])
def test_a_step_of_sgd_needs_no_memory_of_the_models_size(form: Literal["torch", "caffe"]) -> None:
    weights = torch.zeros(SIZE)
    rule = UpdateRule(OptimizerTable(name="sgd", momentum=0.9, momentum_form=form, weight_decay=0.1), weights)
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
        ({"name": "adam", "momentum": 0.9}, "momentum = 0.9 is not supported with adam; use momentum = 0"),
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


class Lion(torch.optim.Optimizer):
    """A user's own: the sign of an average, element by element."""

    def __init__(self, params: Any, lr: float = 1e-3, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                average.lerp_(p.grad, 1 - group["beta"])
                p.add_(average.sign(), alpha=-group["lr"])


class ByNorm(Lion):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.add_(p.grad / p.grad.norm(), alpha=-self.param_groups[0]["lr"])


class Counting(Lion):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for p in self.param_groups[0]["params"]:
            self.state[p]["count"] = self.state[p].get("count", 0) + 1


class Moving(Lion):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        self.param_groups[0]["beta"] *= 0.99


def own(kind: str, **keys: Any) -> OptimizerTable:
    return OptimizerTable(name=f"{__name__}:{kind}", **keys)


def test_an_optimiser_of_the_user_equals_itself_and_is_resumed() -> None:
    generator = torch.Generator().manual_seed(1)
    start, *gradients = torch.randn(5, 70, generator=generator).unbind()
    plain = torch.nn.Parameter(start.clone())
    alone = Lion([plain], lr=0.1, beta=0.5)
    weights = start.clone()
    rule = UpdateRule(own("Lion", options={"beta": 0.5}), weights)
    for place, gradient in enumerate(gradients):
        if place == 2:
            state = {name: value.clone() for name, value in rule.state().items()}
            weights = weights.clone()
            rule = UpdateRule(own("Lion", options={"beta": 0.5}), weights)
            rule.restore(state)
        rule.step(gradient, 0.1)
        plain.grad = gradient
        alone.step()
    assert torch.equal(weights, plain.data)


@pytest.mark.parametrize(
    ("table", "text"),
    [
        (own("ByNorm"), "its step for an element depends on other elements"),
        (own("Counting"), "its state 'count' is no float32 tensor of one number or of the parameter's shape"),
        (own("Moving"), "a step changes more of the optimiser than its `state`"),
        (own("own"), "is not a class that inherits from torch.optim.Optimizer"),
        (own("Lion", weight_decay=0.1), "weight_decay: .*Lion does not take it; valid: 0"),
        (own("Lion", momentum=0.5), "momentum = 0.5 is not supported with .*Lion; use momentum = 0"),
        (own("Lion", options={"beat": 0.5}), "unknown option 'beat' of .*; valid: beta; did you mean beta"),
        (own("Tiger"), "has no attribute 'Tiger'"),
    ],
)
def test_an_optimiser_of_the_user_that_cannot_be_is_one_line(table: OptimizerTable, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as raised:
        UpdateRule(table, torch.zeros(70))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "form", "settings"),
    [
        ("sgd", "torch", [{"momentum": 0.9}, {"momentum": 0.5}, {"momentum": 0.0}, {"momentum": 0.7}]),
        ("sgd", "caffe", [{"momentum": 0.0}, {"momentum": 0.9}, {"momentum": 0.5}, {"momentum": 0.0}]),
        ("sgd", "torch", [{"momentum": 0.9, "nesterov": False}, {"momentum": 0.6, "nesterov": True}]),
        ("rmsprop", "torch", [{"momentum": 0.0}, {"momentum": 0.9, "alpha": 0.9}, {"momentum": 0.0, "alpha": 0.99}]),
        ("adam", "torch", [{"betas": [0.9, 0.999]}, {"betas": [0.8, 0.99]}]),
    ],
)
def test_changed_settings_keep_the_state_but_no_velocity_without_momentum(
    name: str, form: Literal["torch", "caffe"], settings: list[dict[str, Any]]
) -> None:
    """Against torch's optimiser whose groups get the same settings, or caffe's rule by hand."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(70, generator=generator)
    momenta = [setting.get("momentum", 0.0) for setting in settings]
    options = [{key: value for key, value in setting.items() if key != "momentum"} for setting in settings]
    table = {"momentum": momenta[0], "momentum_form": form, "options": options[0], "weight_decay": 0.1}
    plain, velocity = torch.nn.Parameter(weights.clone()), torch.zeros(70)
    cls = {"sgd": torch.optim.SGD, "rmsprop": torch.optim.RMSprop, "adam": torch.optim.Adam}[name]
    theirs = cls([plain], lr=1.0, foreach=False, weight_decay=0.1, **settings[0])
    rule = UpdateRule(OptimizerTable(name=name, **table), weights)
    rule.prepare()
    for number, momentum in enumerate(momenta):
        if number:
            rule.change(momentum, options[number])
            velocity = velocity if momenta[number - 1] else torch.zeros(70)
        theirs.param_groups[0] |= settings[number]
        for state in theirs.state.values():
            if momentum == 0:
                state.pop("momentum_buffer", None)
            elif name == "rmsprop":
                state.setdefault("momentum_buffer", torch.zeros(70))
        for step in range(3):
            gradient, rate = torch.randn(70, generator=generator), 0.1 / (step + 1)
            rule.step(gradient, rate)
            if form == "caffe":
                velocity = momentum * velocity + rate * (gradient + 0.1 * plain.data)
                plain.data -= velocity
            else:
                theirs.param_groups[0]["lr"], plain.grad = rate, gradient.clone()
                theirs.step()
        torch.testing.assert_close(weights, plain.data)


@pytest.mark.parametrize("name", ["sgd", "adam", "rmsprop"])
def test_state_is_restored_where_the_weights_are(name: str) -> None:
    """Torch counts the steps of rmsprop in main memory, because it has no fused kernel."""
    table = OptimizerTable(name=name, momentum=0.9 if name != "adam" else 0.0)
    here, there = (UpdateRule(table, torch.ones(64, device=device)) for device in ("cpu", "meta"))
    here.step(torch.ones(64), 0.1)
    there.restore(here.state())
    devices = {key: value.device.type for key, value in there.state().items()}
    counted = {"cpu" if name == "rmsprop" else "meta"}
    assert {device for key, device in devices.items() if key.startswith("step")} <= counted
    assert {device for key, device in devices.items() if not key.startswith("step")} == {"meta"}
