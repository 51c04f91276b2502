"""Learning rates: torch's schedulers stepped by hand, and a warm-up without steps."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from rudra.errors import ConfigError
from rudra.schedule import Schedule
from rudra.tables import OptimizerTable

EPOCHS = 12
SCHEDULERS = "torch.optim.lr_scheduler"


def halved(optimizer: torch.optim.Optimizer, every: int = 2) -> lr_scheduler.LRScheduler:
    """A user's own."""
    return lr_scheduler.LambdaLR(optimizer, lambda epoch: float(0.5 ** (epoch // every)))


def by_hand(make: Callable[[torch.optim.Optimizer], Any], epochs: int = EPOCHS) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.4)
    scheduler = make(optimizer)
    rates = []
    for _ in range(epochs):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def schedule(epochs: int = EPOCHS, **table: Any) -> Schedule:
    return Schedule(OptimizerTable(learning_rate=0.4, **table), epochs)


@pytest.mark.parametrize(
    ("table", "make"),
    [
        ({}, lambda o: lr_scheduler.ConstantLR(o, factor=1.0)),
        ({"milestones": [3, 7, 50], "factor": 0.3}, lambda o: lr_scheduler.MultiStepLR(o, [3, 7, 50], 0.3)),
        ({"schedule": "cosine"}, lambda o: lr_scheduler.CosineAnnealingLR(o, EPOCHS)),
        (
            {"schedule": "cosine", "schedule_options": {"T_max": 5, "eta_min": 0.1}},
            lambda o: lr_scheduler.CosineAnnealingLR(o, 5, 0.1),
        ),
        (
            {"schedule": f"{SCHEDULERS}:OneCycleLR", "schedule_options": {"max_lr": 2.0, "total_steps": EPOCHS}},
            lambda o: lr_scheduler.OneCycleLR(o, 2.0, total_steps=EPOCHS),
        ),
        (
            {"schedule": lr_scheduler.ExponentialLR, "schedule_options": {"gamma": 0.9}},
            lambda o: lr_scheduler.ExponentialLR(o, 0.9),
        ),
        ({"schedule": f"{__name__}:halved", "schedule_options": {"every": 3}}, lambda o: halved(o, 3)),
    ],
)
def test_rates_are_those_of_torchs_scheduler(table: dict[str, Any], make: Callable[..., Any]) -> None:
    made = schedule(**table)
    assert [made.rate(epoch, epoch + 0.5) for epoch in range(EPOCHS)] == pytest.approx(by_hand(make), rel=1e-12)


@pytest.mark.parametrize(("warm_up", "first"), [(2.0, 2), (1.5, 2), (0.1, 1)])
def test_cosine_falls_over_the_epochs_that_the_warm_up_leaves(warm_up: float, first: int) -> None:
    made = schedule(schedule="cosine", warm_up=warm_up)
    after = by_hand(lambda o: lr_scheduler.CosineAnnealingLR(o, EPOCHS - first), EPOCHS - first)
    rates = [made.rate(epoch, epoch + 1.0) for epoch in range(EPOCHS)]
    assert rates[first:] == pytest.approx(after, rel=1e-12)
    assert rates[first - 1] == 0.4


def test_milestones_count_the_epochs_of_the_warm_up() -> None:
    made = schedule(milestones=[3, 7], warm_up=2.5)
    assert [made.rate(epoch, epoch + 0.75) for epoch in (2, 3, 6, 7)] == pytest.approx([0.4, 0.04, 0.04, 0.004])


@pytest.mark.parametrize("table", [{}, {"schedule": "cosine"}, {"milestones": [5]}])
def test_a_warm_up_grows_with_every_sample(table: dict[str, Any]) -> None:
    made, samples, warm_up = schedule(warm_up=2.5, **table), 100, 2.5
    done = [applied / samples for applied in range(1, int(warm_up * samples) + 20)]
    rates = [made.rate(int((applied - 1) / samples), progress) for applied, progress in enumerate(done, 1)]
    assert rates == pytest.approx([0.4 * min(1.0, progress / warm_up) for progress in done], rel=1e-12)
    assert rates[0] > 0


def test_a_warm_up_may_outlast_the_run() -> None:
    made = schedule(3, schedule="cosine", warm_up=6.0)
    assert [made.rate(epoch, epoch + 1.0) for epoch in range(3)] == pytest.approx([0.4 / 6, 0.8 / 6, 1.2 / 6])


def not_a_number(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.LambdaLR(optimizer, lambda epoch: float("nan") if epoch else 1.0)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("no.such:Scheduler", {}, "no.such:Scheduler: no module 'no' on the Python path"),
        (f"{SCHEDULERS}:Nothing", {}, f"{SCHEDULERS}:Nothing: {SCHEDULERS} has no attribute 'Nothing'"),
        (f"{SCHEDULERS}:StepLR", {}, r".*missing 1 required positional argument: 'step_size'"),
        (f"{SCHEDULERS}:OneCycleLR", {"max_lr": 1.0, "total_steps": 5}, "Tried to step 6 times.* is 5"),
        (f"{SCHEDULERS}:ReduceLROnPlateau", {}, ".*missing 1 required positional argument: 'metrics'"),
        ("cosine", {"T_min": 3}, ".*unexpected keyword argument 'T_min'"),
        ("math:pi", {}, "'float' object is not callable"),
        (f"{__name__}:not_a_number", {}, "gives a rate of nan after 1 epochs; valid: >= 0"),
    ],
)
def test_a_schedule_that_cannot_be_is_one_line(name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=rf"^\[optimizer\] schedule: {said}$"):
        schedule(schedule=name, schedule_options=options)
