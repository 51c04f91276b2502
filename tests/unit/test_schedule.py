"""Learning rates: torch's schedulers stepped by hand, and a warm-up without steps."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from protocols import Protocol
from rudra.compute.schedule import expected_updates, planned
from rudra.core.schedule import Schedule
from rudra.errors import ConfigError
from rudra.job.job import Job
from rudra.job.tables import OptimizerTable

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
    return planned(OptimizerTable(learning_rate=0.4, **table), epochs)


@pytest.mark.parametrize(
    ("table", "make"),
    [
        ({}, lambda o: lr_scheduler.ConstantLR(o, factor=1.0)),
        ({"milestones": [3, 7, 50], "decay_factor": 0.3}, lambda o: lr_scheduler.MultiStepLR(o, [3, 7, 50], 0.3)),
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
        (f"{SCHEDULERS}:OneCycleLR", {"max_lr": 1.0, "epochs": 5}, "You must define either total_steps OR .*"),
        (
            f"{SCHEDULERS}:ReduceLROnPlateau",
            {},
            ".*ReduceLROnPlateau depends on evaluations; valid: schedule = 'plateau', with .*",
        ),
        ("cosine", {"T_min": 3}, ".*unexpected keyword argument 'T_min'"),
        ("math:pi", {}, "'float' object is not callable"),
        (f"{__name__}:not_a_number", {}, "gives a rate of nan after 1 epochs; valid: >= 0"),
    ],
)
def test_a_schedule_that_cannot_be_is_one_line(name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=rf"^\[optimizer\] schedule: {said}$"):
        schedule(schedule=name, schedule_options=options)


@pytest.mark.parametrize("options", [{}, {"total_steps": 90}, {"epochs": 9, "steps_per_epoch": 10}])
def test_a_scheduler_that_is_stepped_by_updates(options: dict[str, Any]) -> None:
    """The number of updates is known, unless the job says another one."""
    wanted = options or {"total_steps": 70}
    table = {"schedule": f"{SCHEDULERS}:OneCycleLR", "schedule_options": {"max_lr": 2.0, **options}}
    made = planned(OptimizerTable(learning_rate=0.4, schedule_every="update", **table), 3, 70)
    expected = by_hand(lambda o: lr_scheduler.OneCycleLR(o, 2.0, **wanted), 70)
    assert [made.rate(update // 30, update / 30, update) for update in range(70)] == pytest.approx(expected, rel=1e-12)
    assert made.rate(3, 3.0, 75) == made.rates[-1], "more than there should have been"


def test_one_that_is_stepped_by_epochs_is_told_how_many_there_are() -> None:
    made = schedule(schedule=f"{SCHEDULERS}:OneCycleLR", schedule_options={"max_lr": 2.0})
    expected = by_hand(lambda o: lr_scheduler.OneCycleLR(o, 2.0, total_steps=EPOCHS))
    assert [made.rate(epoch, epoch + 1.0) for epoch in range(EPOCHS)] == pytest.approx(expected, rel=1e-12)


def test_cosine_falls_over_all_updates() -> None:
    made = planned(OptimizerTable(learning_rate=0.4, schedule="cosine", schedule_every="update"), 3, 50)
    expected = by_hand(lambda o: lr_scheduler.CosineAnnealingLR(o, 50), 50)
    assert [made.rate(0, 0.0, update) for update in range(50)] == pytest.approx(expected, rel=1e-12)


class Whim(Protocol):
    """Nobody knows how many gradients make an update."""

    def update_due(self, pending: int) -> bool:
        return pending > self.learners // 2


@pytest.mark.parametrize(
    ("tables", "updates"),
    [
        ({"protocol": {"name": "hardsync"}}, 13),
        ({"protocol": {"name": "softsync", "n": 2}}, 25),
        ({"protocol": {"name": "async"}}, 50),
        ({"protocol": {"name": "hardsync"}, "topology": {"name": "groups", "options": {"groups": 1}}}, 13),
        ({"protocol": {"name": "async"}, "topology": {"name": "groups", "options": {"groups": 2}}}, 25),
        ({"protocol": {"name": "diloco"}, "averaging": {"period": 5}}, 3),
        ({"protocol": {"name": Whim}}, None),
    ],
)
def test_how_many_updates_a_run_has(tables: dict[str, Any], updates: int | None) -> None:
    job = Job(training={"epochs": 2, "minibatch_size": 4}, cluster={"learners": 4}, **tables)
    assert expected_updates(job, job.plan(), 100) == updates


def changing(*entries: dict[str, Any]) -> int | None:
    job = Job(
        training={"epochs": 3, "minibatch_size": 4},
        protocol={"name": "hardsync"},
        cluster={"learners": 4},
        changes=[{"optimizer": {"momentum": 0.1 * place}, **entry} for place, entry in enumerate(entries, 1)],
    )
    return expected_updates(job, job.plan(), 100)


def test_how_many_updates_a_run_with_changes_has() -> None:
    larger, smaller = {"training": {"minibatch_size": 8}}, {"training": {"minibatch_size": 1}}
    assert changing({"at_epoch": 1, **larger}) == 7 + 6  # 112 samples, then 188 in updates of 32
    assert changing({"at_update": 10, **larger}, {"at_epoch": 2, **smaller}) == 10 + 2 + 19  # 160, 224, 300
    assert changing({"at_update": 10, **larger}, {"at_epoch": 2, "protocol": {"name": Whim}}) is None


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ([{"at_epoch": 1}, {"at_update": 7}], "7: is reached with update 7, but the previous change with 7; use the "),
        ([{"at_update": 8}, {"at_epoch": 1}], "1: is reached with update 7, but the previous change with 8; use the "),
        ([{"at_update": 5}, {"at_update": 19}], "at_update = 19: must be less than the 19 updates of the run"),
    ],
)
def test_changes_out_of_order_are_one_line(entries: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        changing(*entries)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({}, r"schedule_every = 'update' is not supported with schedule = 'step'; use 'epoch'"),
        (
            {"schedule": "cosine", "warm_up": 2.0},
            r"warm_up = 2 is not supported with schedule_every = 'update'; use warm_up = 0",
        ),
    ],
)
def test_what_is_of_epochs_does_not_go_with_updates(table: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=rf"^\[optimizer\] {said}"):
        Job(optimizer={"schedule_every": "update", **table})


def test_where_nobody_knows_the_updates_the_job_must_say() -> None:
    table = {"schedule": f"{SCHEDULERS}:OneCycleLR", "schedule_options": {"max_lr": 2.0}, "schedule_every": "update"}
    with pytest.raises(
        ConfigError, match=r"^\[optimizer\] schedule_every = 'update': .*; schedule_options.total_steps m"
    ):
        planned(OptimizerTable(**table), 3)
    table["schedule_options"] = {"max_lr": 2.0, "total_steps": 40}
    assert len(planned(OptimizerTable(**table), 3).rates) == 40
