"""Kind of device that computes."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, ClassVar, TypeVar

import torch

from rudra.compute.device.collectives import Collective
from rudra.compute.device.graphs import Graph, Lanes, NotRecordedError
from rudra.compute.device.regions import Region, attached
from rudra.compute.device.streams import Stream
from rudra.compute.device.threads import Threads, ThreadStream

Result = TypeVar("Result")

CPU = torch.device("cpu")

NO_LIMIT = timedelta(days=1000)
"""Time-out for libraries that insist on one. They need none, because MPI reports the death of a process."""

LOOPBACK = "127.0.0.1"


class DeviceKind:
    """Kind of device. The base class is the CPU, whose work is complete when torch returns.

    Attributes:
        type: Class attribute. Type of torch's devices of this kind.
        noun: Class attribute. One such device, in messages.
        page_locks: Class attribute. Whether it copies page-locked main memory at full speed, in parallel with other
            work.
        records: Class attribute. Whether it repeats recorded work, without the host's code.
        apart: Class attribute. Whether its memory is apart from main memory, so that mini-batches are copied.
    """

    type: ClassVar[str] = "cpu"
    noun: ClassVar[str] = "CPU"
    page_locks: ClassVar[bool] = False
    records: ClassVar[bool] = False
    apart: ClassVar[bool] = False

    def count(self) -> int:
        """Returns the number of devices that torch sees in this process."""
        return 1

    def device(self, place: int) -> torch.device:
        """Returns one of these devices."""
        return CPU

    def about(self, place: int) -> str:
        """Returns name and memory of one of these devices, for people."""
        return self.noun

    def model(self, device: torch.device) -> str:
        """Returns the model of a device. The last bits of results depend on it. Empty: it is the processor."""
        return ""

    def select(self, device: torch.device) -> None:
        """Makes a device the default of this thread, for code that names no device."""

    def selected(self) -> torch.device | None:
        """Returns the default device of this thread. None: nobody has selected one."""
        return None

    def finish(self, device: torch.device) -> None:
        """Waits until a device has finished its work."""

    def free_bytes(self, device: torch.device) -> int | None:
        """Returns the bytes of memory that this process can still use on a device. None: no limit is known.

        Main memory has none: the ranks of a node share it, and the system lends more than it has.
        """
        return None

    def peak_bytes(self, device: torch.device, work: Callable[[], object]) -> int:
        """Returns the bytes that work takes at its peak, beyond the bytes in use before. 0: there are no statistics.

        Work is done only if there are statistics.
        """
        return 0

    def stream(self, device: torch.device, *, own: bool = False) -> Stream:
        """Returns a stream for the work of a role.

        Args:
            device: Device that works.
            own: Whether its work may run in parallel with the work that torch does on the device.
        """
        return Stream()

    def streams(
        self, device: torch.device, count: int, at_once: int, begin: Callable[[], None] = lambda: None
    ) -> list[Stream]:
        """Returns streams for models that compute at the same time, each on its own stream.

        Work of such a stream begins after the work that torch does on the device outside streams when it is submitted.

        Args:
            device: Device that works.
            count: Number of streams.
            at_once: Most streams that work at the same time. The same memory for activations serves all others.
            begin: Called first in each thread that does work of these streams.
        """
        threads = Threads(min(count, at_once), begin)
        return [ThreadStream(threads) for _ in range(count)]

    def record(self, device: torch.device, work: Callable[[], Result]) -> tuple[Graph, Result]:
        """Records work for repetitions.

        Args:
            device: The device.
            work: Uses the device. It is done once or more, and may draw random numbers, but not seed their generator.

        Returns:
            The recorded work, and its result. The tensors in it hold new values after each repetition.

        Raises:
            NotRecordedError: The work cannot be repeated, for example because the host waits for a number in it.
        """
        raise NotRecordedError(f"a {self.noun} repeats no recorded work")

    def lanes(self, device: torch.device, count: int) -> Lanes:
        """Returns lanes for work that `record` records: what is on different lanes may be done at the same time.

        Args:
            device: The device.
            count: Number of lanes.
        """
        return Lanes()

    def region(self, device: torch.device, length: int) -> Region:
        """Allocates memory on a device that other processes of this node read.

        Raises:
            OSError, AttributeError, RuntimeError: There is no such memory.
        """
        return Region(length)

    def attached(self, ticket: Any) -> torch.Tensor:
        """Returns the memory of another process's region, (length,) uint8, to be read only.

        Raises:
            OSError, ValueError, RuntimeError: It cannot be read from here.
        """
        return attached(ticket)

    def library(self) -> str:
        """Returns name and version of the library of `collective`. Empty: there is none."""
        return "gloo" if hasattr(torch.distributed, "ProcessGroupGloo") else ""

    def identity(self, device: torch.device) -> str:
        """Returns an identifier of a device that no other device has. Empty: any number of processes may share it."""
        return ""

    def takes_turns(self) -> bool:
        """Returns whether such a device computes for one process at a time."""
        return False

    def collective(self, device: torch.device, store: Any, place: int, size: int) -> Collective:
        """Returns a group of processes that add vectors on their devices. All of them call this together.

        Args:
            device: Device of this process.
            store: Store of torch's that all of them see.
            place: Number of this process in the group.
            size: Number of processes.

        Raises:
            RuntimeError: They cannot reach each other, or the library does not work.
        """
        gloo: Any = getattr(torch.distributed, "ProcessGroupGloo", None)
        if gloo is None:
            raise RuntimeError("this build of torch has no gloo")
        options = gloo._Options()
        options._timeout = NO_LIMIT
        options._devices = [gloo.create_device(hostname=LOOPBACK if store.host == LOOPBACK else "")]
        return Collective(gloo(store, place, size, options))

    def main_memory(self, length: int) -> torch.Tensor:
        """Allocates (length,) uint8 in main memory for copies to a device."""
        return torch.empty(length, dtype=torch.uint8)

    def set_products(self, device: torch.device, *, rounded: bool) -> None:
        """Sets how this process multiplies float32 numbers on a device: exactly, or with factors rounded to TF32.

        Raises:
            ConfigError: The device cannot round them.
        """

    def lost(self, error: BaseException) -> bool:
        """Returns whether an error says that this process can use no device of this kind any more."""
        return False

    def generator(self, device: torch.device) -> torch.Generator:
        """Returns the generator that layers on a device draw from."""
        return torch.default_generator
