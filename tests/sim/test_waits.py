"""Whole runs on a device that works late and in any order: each wait is needed, and together they are enough.

The first test runs in many orders, and expects one result. The second one finds the waits of a run by itself, removes
each in turn, and expects another result in some order.
"""

import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from clusters import Apart, job, train
from torch import nn

from rudra.compute.device import adverse
from rudra.compute.device.adverse import AdverseDevice, AdverseStream, AdverseWork
from rudra.compute.device.devices import DEVICES
from rudra.compute.device.streams import Number, Pending
from rudra.compute.making import make_executors
from rudra.simulation import checked_run
from tests.selection import CAMPAIGN

Wait = tuple[str, str, int]
"""Who waits ("host" or "device"), in which function, and for which of the works that a stream waits for."""

DRIVER = "tensors.py"  # it waits wherever an action lets it, which no action relies on
TRIES = 60
ELSEWHERE: Wait = ("device", "evaluation.py summed", 0)
"""Wait for weights that come late, as they do only in a test of tests/unit/test_devices.py."""


def network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 10))


RUNS = {
    "a server in main memory": ("staged", {"protocol": "softsync", "n": 2}),
    "a server on the device": (
        "device",
        {"protocol": "async", "optimizer": {"learning_rate": 0.1, "momentum": 0.9, "clip_norm": 1.0}},
    ),
    "replicas on the device": ("device", {"protocol": "sma"}),
    "a group on the device": ("device", {"protocol": "hardsync", "topology": {"name": "groups"}}),
}


def trained(name: str, seed: int) -> str:
    """Returns everything that a run gives, in one order of the device's work. -1: a CPU does it."""
    placing, tables = RUNS[name]
    data = {"train_limit": 36, "test_limit": 30}
    run = job(
        learners=3, epochs=2, model={"name": network}, data=data, training={"evaluation_batch_size": 10}, **tables
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checked_run, "make_executors", partial(make_executors, placing=placing))
        if seed >= 0:
            patch.setitem(DEVICES, "cpu", AdverseDevice(seed))
        found = train(run, Apart)
    rows = {table: b"".join(rows.tobytes() for rows in pieces) for table, pieces in found.rows.tables.items()}
    return str((found.weights.tolist(), rows))


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("orders", [10, pytest.param(1000, marks=CAMPAIGN)])
@pytest.mark.parametrize("name", RUNS)
def test_every_order_gives_the_bits_of_a_cpu(name: str, orders: int) -> None:
    right = trained(name, -1)
    assert all(trained(name, seed) == right for seed in range(orders))


@pytest.mark.parametrize("name", RUNS)
def test_a_run_without_one_of_its_waits_is_noticed(name: str) -> None:
    right, waits = trained(name, -1), dict[Wait, int]()
    with Waits(waits):
        assert trained(name, 0) == right
    assert len(waits) >= 5
    here = waits.keys() - {ELSEWHERE}
    unnoticed = {wait for wait in here if all(without(wait, waits, name, seed) == right for seed in range(TRIES))}
    assert unnoticed == set()


def without(wait: Wait, waits: dict[Wait, int], name: str, seed: int) -> str:
    """Returns what a run without a wait gives. It may also fail."""
    with Waits(waits, wait):
        try:
            return trained(name, seed)
        except Exception as error:
            return str(error)


class Waits:
    """Context that notes the waits of a run, or leaves one out.

    Args:
        seen: Number of results that each wait of the host gives. The context adds waits.
        removed: Wait that does not happen. The host then finds NaN.
    """

    def __init__(self, seen: dict[Wait, int], removed: Wait | None = None) -> None:
        self._seen, self._removed = seen, removed
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> None:
        done, numbers, submit = AdverseWork.done, AdverseWork.numbers, AdverseStream.submit

        def asked(work: AdverseWork) -> bool:
            return ("host", caller(), 0) == self._removed or done(work)

        def known(work: AdverseWork) -> list[float]:
            wait = "host", caller(), 0
            if wait == self._removed:
                return [math.nan] * self._seen[wait]
            found = numbers(work)
            if DRIVER not in wait[1]:
                self._seen[wait] = len(found)
            return found

        def submitted(
            stream: AdverseStream, work: Callable[[], Sequence[Number]], after: Sequence[Pending] = ()
        ) -> Any:
            waits = [("device", caller(), place) for place in range(len(after))]
            self._seen |= {wait: 0 for wait, each in zip(waits, after, strict=True) if isinstance(each, AdverseWork)}
            return submit(
                stream, work, [each for wait, each in zip(waits, after, strict=True) if wait != self._removed]
            )

        self._patch.setattr(AdverseWork, "done", asked)
        self._patch.setattr(AdverseWork, "numbers", known)
        self._patch.setattr(AdverseStream, "submit", submitted)

    def __exit__(self, *_: object) -> None:
        self._patch.undo()


INSIDE = {Path(__file__), *Path(adverse.__file__).parent.glob("*.py")}


def caller() -> str:
    """Returns the function outside the device package that waits."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and Path(frame.f_code.co_filename) in INSIDE:
        frame = frame.f_back
    assert frame is not None
    return f"{Path(frame.f_code.co_filename).name} {frame.f_code.co_qualname}"
