"""Collectives: processes that add vectors on their devices by a library, through torch's process groups."""

from typing import Any, Protocol

import torch

from rudra.compute.device.streams import Pending


class ProcessGroup(Protocol):
    """The part of torch's process groups that is used here. None of them is torch's default group."""

    def allreduce(self, tensors: list[torch.Tensor]) -> Any:
        """Begins to add tensors of all processes, and returns torch's `Work`."""

    def abort(self) -> None:
        """Ends pending work of a group that has lost a process."""

    def shutdown(self) -> None:
        """Ends the group, after all its work is done."""


class Collective:
    """Processes that add vectors on their devices, in an order that a library chooses.

    All of them begin the same sums in the same order.

    Args:
        group: process group of torch that they belong to.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def sum(self, vector: torch.Tensor) -> Pending:
        """Begins to add the vectors of all processes. The host does not wait.

        Args:
            vector: (size,) float32, receives the sum. Nothing may read or change it before the work is done.

        Returns:
            The work. Its `done` raises RuntimeError if the library has failed, for instance because a process died.
        """
        return _Sum(self._group.allreduce([vector]))

    def abort(self) -> None:
        """Ends pending sums, because a process has died. Nothing is written to their vectors afterwards."""
        self._group.abort()

    def close(self) -> None:
        """Ends the group, after all sums are done."""
        self._group.shutdown()


class _Sum(Pending):
    """Sum that a library computes.

    Args:
        work: torch's `Work`.
    """

    def __init__(self, work: Any) -> None:
        self._work = work

    def done(self) -> bool:
        if not self._work.is_completed():
            return False
        self._work.wait()  # raises its error, and lets the device's later work begin after it
        return True

    def numbers(self) -> list[float]:
        self._work.wait()
        return []
