"""All kinds of devices.

A new kind is a subclass of `DeviceKind` in `DEVICES`, and a value of `cluster.device` in a job.
"""

from collections.abc import Callable

import torch

from rudra.compute.device.cuda import Cuda
from rudra.compute.device.kind import DeviceKind

DEVICES: dict[str, DeviceKind] = {"cpu": DeviceKind(), "cuda": Cuda()}
"""Kinds of devices by their names in jobs."""

AUTO = "cuda"
"""Kind that learners use with `cluster.device = "auto"`, if every learner has such a device."""


def kind_of(device: torch.device) -> DeviceKind:
    """Returns the kind of a device."""
    return next((kind for kind in DEVICES.values() if kind.type == device.type), DEVICES["cpu"])


def wanted_kind(wanted: str) -> str:
    """Returns the kind of device that a job wants, if there are enough devices.

    Args:
        wanted: `cluster.device` of the job.
    """
    return AUTO if wanted == "auto" else wanted


def here(wanted: str) -> int:
    """Returns the number of devices in this process of the kind that a job wants. 0: there are none, or it wants none.

    Args:
        wanted: `cluster.device` of the job.
    """
    return 0 if wanted == "cpu" else DEVICES[wanted_kind(wanted)].count()


def seen() -> list[str]:
    """Returns a text about each device that torch sees in this process, except the CPU."""
    kinds = (kind for name, kind in DEVICES.items() if name != "cpu")
    return [f"{place}: {kind.about(place)}" for kind in kinds for place in range(kind.count())]


def finish(device: torch.device) -> None:
    """Waits until the device has finished its work: MPI does not know its streams."""
    kind_of(device).finish(device)


def selection() -> Callable[[], None]:
    """Returns a function that gives another thread the default devices of this one."""
    chosen = [(kind, device) for kind in DEVICES.values() if (device := kind.selected()) is not None]

    def select() -> None:
        for kind, device in chosen:
            kind.select(device)

    return select
