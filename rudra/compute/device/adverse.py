"""A device for tests that does work as late as it may, and in any order that its streams allow.

If the host uses a result before it waits for it, the bits are others. So a test finds a missing wait without a GPU.
"""

import math
import random
from collections import deque
from collections.abc import Callable, Sequence

import torch

from rudra.compute.device.kind import CPU, DeviceKind
from rudra.compute.device.streams import Number, Pending, Stream, known


class AdverseDevice(DeviceKind):
    """CPU whose order of work is random.

    Args:
        seed: Decides the order.

    Attributes:
        asked: How often the host asked whether work is done.
    """

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._queues: list[deque[AdverseWork]] = []
        self.asked = 0

    def stream(self, device: torch.device = CPU) -> Stream:
        self._queues.append(deque())
        return AdverseStream(self, self._queues[-1])

    def go_on(self) -> None:
        """Does some work, perhaps none."""
        self.asked += 1
        for _ in range(self._chance.choice((0, 0, 1, 1, 2))):
            self.do_one()

    def do_one(self) -> None:
        """Does the first work of one stream, if there is any."""
        if waiting := [queue for queue in self._queues if queue]:
            self._chance.choice(waiting).popleft().do()


class AdverseStream(Stream):
    """Stream of such a device."""

    def __init__(self, device: AdverseDevice, queue: "deque[AdverseWork]") -> None:
        self._device, self._queue = device, queue

    def submit(self, work: Callable[[], Sequence[Number]]) -> Pending:
        self._queue.append(AdverseWork(self._device, work))
        return self._queue[-1]


class AdverseWork(Pending):
    """Work of such a stream."""

    def __init__(self, device: AdverseDevice, work: Callable[[], Sequence[Number]]) -> None:
        self._device, self._work = device, work
        self._numbers = [math.nan]
        self._over = False

    def do(self) -> None:
        self._over = True
        self._numbers = known(self._work())

    def done(self) -> bool:
        self._device.go_on()
        return self._over

    def numbers(self) -> list[float]:
        while not self._over:
            self._device.do_one()
        return self._numbers
