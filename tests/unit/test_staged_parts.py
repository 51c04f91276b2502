"""Weights and gradients that are copied between a device and main memory part by part, while others travel."""

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from rudra.compute import learners
from rudra.compute.arrivals import Arrivals
from rudra.compute.averaging import slices
from rudra.compute.device.adverse import AdverseDevice
from rudra.compute.device.devices import DEVICES
from rudra.compute.device.kind import DeviceKind
from rudra.compute.device.streams import Pending, Stream
from rudra.compute.making import make_executors
from rudra.compute.pulled_pass import PullingExecutor
from rudra.core.actions import Compute
from rudra.core.buffer_names import GRADIENT, WEIGHTS
from rudra.data.load import load
from rudra.job.job import Job
from tests.selection import CAMPAIGN

STEPS, PART = 4, 100
JOB = Job(
    model={"name": "mlp", "options": {"hidden": [6]}},
    data={"name": "digits", "train_limit": 60, "test_limit": 10},
    training={"minibatch_size": 4},
    cluster={"learners": 1},
)
PLAN, DATA = JOB.plan(), load(JOB.data)


class Alone(Stream):
    """Stream whose work waits for no other stream."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def submit(self, work: Callable[[], Any], after: Sequence[Pending] = ()) -> Pending:
        return self._stream.submit(work)


class Forgetful(list[Pending]):
    """Copies that no computation waits for."""

    def append(self, copied: Pending) -> None:
        pass


class Hasty(Pending):
    """Work that is said to be done."""

    def __init__(self, pending: Pending) -> None:
        self._pending = pending

    def done(self) -> bool:
        return True

    def numbers(self) -> list[float]:
        return self._pending.numbers()


class Unwatched(Stream):
    """Stream of copies whose ends the host does not wait for, if they wait for other work."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def submit(self, work: Callable[[], Any], after: Sequence[Pending] = ()) -> Pending:
        pending = self._stream.submit(work, after)
        return Hasty(pending) if after else pending


def made(device: DeviceKind, monkeypatch: pytest.MonkeyPatch) -> PullingExecutor:
    monkeypatch.setitem(DEVICES, "cpu", device)
    monkeypatch.setattr(learners, "STAGED", PART)
    (executor,) = make_executors(JOB, PLAN, PLAN.learners, DATA, prefetch=False, placing="staged").values()
    assert isinstance(executor, PullingExecutor)
    return executor


def receive(executor: PullingExecutor, step: int) -> None:
    """Lets the weights of a step arrive, part by part."""
    weights, parts = executor.renew(WEIGHTS), [*slices(0, executor.size, PART)]
    arrivals = Arrivals(parts, (), weights.vector.__getitem__, lambda: False, lambda: None)
    executor.prepare_pass(weights, 1, arrivals)
    weights.vector.normal_(0, 0.1, generator=torch.Generator().manual_seed(step))
    for number in range(len(parts)):
        arrivals.add(number)
    executor.pass_early()
    weights.version += 1


def trained(device: DeviceKind, monkeypatch: pytest.MonkeyPatch, broken: str = "") -> str:
    """Returns the digest of the gradients that leave, without one of the waits."""
    executor = made(device, monkeypatch)
    if broken == "copy for computation":
        executor._copying = Alone(executor._copying)
    elif broken == "computation for copy":
        executor._arriving = Forgetful()
    elif broken == "host for copy":
        executor._copying = Unwatched(executor._copying)
    left = hashlib.sha256()
    for step in range(STEPS):
        receive(executor, step)
        gradient = executor.renew(GRADIENT)
        came: list[slice] = []

        def leave(part: slice, gradient: Any = gradient, came: list[slice] = came) -> None:
            left.update(gradient.vector[part].numpy().tobytes())
            came.append(part)

        executor.ready = leave
        for _ in executor.perform(Compute(step, executor.source.work.after(step), WEIGHTS, GRADIENT)):
            pass
        assert came == [*slices(0, executor.size, PART)][::-1]
    return left.hexdigest()


@pytest.mark.parametrize("orders", [150, pytest.param(1000, marks=CAMPAIGN)])
def test_gradients_leave_with_the_same_bits_in_any_order(orders: int, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = trained(DeviceKind(), monkeypatch)
    found = Counter(trained(AdverseDevice(seed), monkeypatch) for seed in range(orders))
    assert found == {wanted: orders}


@pytest.mark.parametrize("broken", ["computation for copy", "copy for computation", "host for copy"])
def test_a_missing_wait_is_noticed(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = trained(DeviceKind(), monkeypatch)
    assert sum(trained(AdverseDevice(seed), monkeypatch, broken) != right for seed in range(60)) > 50


def test_weights_that_came_in_parts_are_not_copied_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from rudra.compute.staging import Staging

    copied: list[torch.Tensor] = []
    monkeypatch.setattr(Staging, "copied", lambda stage, vector: copied.append(vector))
    trained(DeviceKind(), monkeypatch)
    assert not copied


def test_weights_are_tested_after_all_their_parts_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(20):
        executor = made(AdverseDevice(seed), monkeypatch)
        receive(executor, seed)
        assert torch.equal(executor.weights_to_test(WEIGHTS), executor.buffer(WEIGHTS).vector)
