"""Devices that compute: their kinds, the devices of ranks, and placement of the vectors that travel.

No other module knows CUDA. A new kind of device is a subclass of `DeviceKind` in `DEVICES`, and a value of
`cluster.device` in a job.
"""

import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch

from rudra.compute.device.streams import Number, Pending, Stream
from rudra.errors import ConfigError
from topologies import Plan

CPU = torch.device("cpu")

AMPERE = (8, 0)
"""Compute capability of the first GPUs that round factors to TF32."""

_NOT_DETERMINISTIC = re.compile(r"(\S+) does not have a deterministic implementation|not deterministic .* uses CuBLAS")
"""Text in torch's errors about an operation, with its name unless it is a product of matrices."""

Placing = Literal["device", "staged", "direct"]
"""Placement of buffers. "device": on the computing device. "staged": in main memory, where MPI reads and writes, with
copies on the device (`Staging`). "direct": on the device, where MPI reads and writes, for roles that compute there, and
in main memory for others."""


class DeviceKind:
    """Kind of device. The base class is the CPU, whose work is complete when torch returns.

    Attributes:
        type: Class attribute. Type of torch's devices of this kind.
        noun: Class attribute. One such device, in messages.
        page_locks: Class attribute. Whether it copies page-locked main memory at full speed, in parallel with other
            work.
    """

    type: ClassVar[str] = "cpu"
    noun: ClassVar[str] = "CPU"
    page_locks: ClassVar[bool] = False

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

    def stream(self, device: torch.device) -> Stream:
        """Returns a stream for the work of a role."""
        return Stream()

    def set_products(self, device: torch.device, *, rounded: bool) -> None:
        """Sets how this process multiplies float32 numbers on a device: exactly, or with factors rounded to TF32.

        Raises:
            ConfigError: The device cannot round them.
        """

    def generator(self, device: torch.device) -> torch.Generator:
        """Returns the generator that layers on a device draw from."""
        return torch.default_generator


class CudaStream(Stream):
    """Stream of a GPU. Numbers come back through page-locked memory.

    Args:
        stream: Stream of torch. Work that torch does outside `submit` uses the default stream.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def submit(self, work: Callable[[], Sequence[Number]]) -> Pending:
        with torch.cuda.stream(self._stream):
            numbers = work()
            there = [number for number in numbers if isinstance(number, torch.Tensor)]
            came = torch.empty(len(there), dtype=torch.float64, pin_memory=True)
            if there:
                came.copy_(torch.stack([number.double() for number in there]), non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return _OnGpu(numbers, came, event)


class _OnGpu(Pending):
    """Work of a GPU.

    Args:
        numbers: Its numbers.
        came: Memory that receives those on the GPU.
        event: Event after the work.
    """

    def __init__(self, numbers: Sequence[Number], came: torch.Tensor, event: torch.cuda.Event) -> None:
        self._numbers, self._came, self._event = numbers, came, event

    def done(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def numbers(self) -> list[float]:
        self._event.synchronize()
        came = iter(self._came.tolist())
        return [next(came) if isinstance(number, torch.Tensor) else number for number in self._numbers]


class Cuda(DeviceKind):
    """GPUs that torch uses through `torch.cuda`."""

    type = "cuda"
    noun = "GPU"
    page_locks = True

    def count(self) -> int:
        return torch.cuda.device_count() if torch.cuda.is_available() else 0

    def device(self, place: int) -> torch.device:
        return torch.device("cuda", place)

    def about(self, place: int) -> str:
        gpu = torch.cuda.get_device_properties(place)
        return f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB"

    def model(self, device: torch.device) -> str:
        return torch.cuda.get_device_name(device)

    def select(self, device: torch.device) -> None:
        torch.cuda.set_device(device)

    def selected(self) -> torch.device | None:
        is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return self.device(torch.cuda.current_device()) if is_used else None

    def finish(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)

    def free_bytes(self, device: torch.device) -> int | None:
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + kept

    def peak_bytes(self, device: torch.device, work: Callable[[], object]) -> int:
        self.finish(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        self.finish(device)
        return torch.cuda.max_memory_allocated(device) - before

    def stream(self, device: torch.device) -> Stream:
        return CudaStream(torch.cuda.current_stream(device))

    def set_products(self, device: torch.device, *, rounded: bool) -> None:
        if rounded and torch.cuda.get_device_capability(device) < AMPERE:
            text = f"{torch.cuda.get_device_name(device)} does not have it"
            raise ConfigError(f"[training] precision = 'tf32': {text}; valid there: float32, float16")
        cudnn: Any = torch.backends.cudnn
        if hasattr(cudnn, "conv"):  # torch 2.9 or newer
            for product in (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn):
                product.fp32_precision = "tf32" if rounded else "ieee"
        else:
            torch.backends.cuda.matmul.allow_tf32 = cudnn.allow_tf32 = rounded

    def generator(self, device: torch.device) -> torch.Generator:
        return torch.cuda.default_generators[device.index or 0]


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


def agreed(wanted: str, plan: Plan, counts: Sequence[int], hosts: Sequence[str], on_cpu: Collection[int] = ()) -> str:
    """Decides the kind of device that learners compute on. All use it, except those that must use the CPU, or none.

    Args:
        wanted: `cluster.device` of the job.
        plan: Role assignment.
        counts: Number of devices of the wanted kind that each rank sees.
        hosts: Host of each rank.
        on_cpu: Learners that need no such device.

    Raises:
        ConfigError: A kind is wanted, and some learner has no such device.
    """
    wanting = [plan.roles[learner] for learner in plan.learners if learner not in on_cpu]
    without = [role for role in wanting if not counts[role.world_rank]]
    if wanted not in ("cpu", "auto") and without:
        rank = without[0].world_rank
        who = f"{without[0].title} on {hosts[rank]}"
        none = f"torch sees no {DEVICES[wanted].noun}"
        raise ConfigError(f"[cluster] device = '{wanted}': {none} for {who}; valid there: cpu")
    return "cpu" if without else wanted_kind(wanted)


def of_rank(
    kind: str, rank: int, plan: Plan, places: Sequence[int], count: int, on_cpu: Collection[int] = ()
) -> torch.device:
    """Returns the device of one rank if learners compute on devices of a kind.

    The learners of a node, and then the statistics server, take its devices in turn. Other servers compute in main
    memory.

    Args:
        kind: Kind of device.
        rank: Rank to place.
        plan: Role assignment.
        places: Node of every rank, any numbers.
        count: Number of such devices that the rank sees.
        on_cpu: Learners that need no such device. If another learner shares their rank, they use its device.
    """
    if kind == "cpu":
        return CPU
    wanting = [learner for learner in plan.learners if learner not in on_cpu]
    computing = (plan.roles[role].world_rank for role in (*wanting, plan.statistics))
    near = list(dict.fromkeys(other for other in computing if places[other] == places[rank]))
    return DEVICES[kind].device(near.index(rank) % count) if count and rank in near else CPU


def virtual_kind(wanted: str, *, window: bool) -> str:
    """Returns the kind of device of a process that computes for all roles, in virtual time.

    Args:
        wanted: `cluster.device` of the job.
        window: Whether the weights are in windows.

    Raises:
        ConfigError: A kind is wanted, and no such device is there or is used.
    """
    there, needed = here(wanted), wanted not in ("cpu", "auto")
    where = f"[cluster] device = '{wanted}'"
    if needed and window:
        raise ConfigError(f"{where}: windows of virtual time are in main memory; valid: cpu, auto")
    if needed and not there:
        raise ConfigError(f"{where}: torch sees no {DEVICES[wanted].noun} here; valid: cpu, auto")
    return wanted_kind(wanted) if there and not window else "cpu"


def virtual(wanted: str, *, window: bool) -> torch.device:
    """Returns the device of such a process. Arguments and errors as for `virtual_kind`."""
    return DEVICES[virtual_kind(wanted, window=window)].device(0)


def replaying(recorded: str, *, window: bool) -> str:
    """Returns the kind of device of a replay: the kind of the run if such a device is here, else the CPU.

    Args:
        recorded: Kind of device of the run.
        window: As for `virtual_kind`.
    """
    return recorded if here(recorded) and not window else "cpu"


def placing(device: torch.device, plan: Plan, *, gpu_aware_mpi: bool) -> Placing:
    """Returns the placement of buffers for a rank that computes on a device."""
    if device.type == "cpu" or plan.local:
        return "device"
    return "direct" if gpu_aware_mpi else "staged"


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


def page_locked(length: int) -> npt.NDArray[np.uint8]:
    """Allocates bytes in main memory that a GPU copies at full speed and in parallel with other work."""
    return torch.zeros(length, dtype=torch.uint8, pin_memory=True).numpy()


def set_deterministic(wanted: bool) -> Callable[[], None]:
    """Sets whether torch uses only operations with bitwise identical results each time, in this process.

    It must be called before the process computes on a GPU, because cuBLAS reads its variable only once.

    Returns:
        A function that restores the previous settings.
    """
    cudnn, before = torch.backends.cudnn, torch.get_deterministic_debug_mode()
    searched = cudnn.benchmark
    torch.set_deterministic_debug_mode("error" if wanted else "default")
    if wanted:
        cudnn.benchmark = False
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"

    def restore() -> None:
        torch.set_deterministic_debug_mode(before)
        cudnn.benchmark = searched

    return restore


@contextmanager
def operations_named() -> Iterator[None]:
    """Raises ConfigError if torch has no deterministic form of an operation, instead of torch's error."""
    try:
        yield
    except RuntimeError as error:
        if (text := _deterministic_text(error)) is None:
            raise
        raise ConfigError(text) from error


def _deterministic_text(error: BaseException) -> str | None:
    """Returns what to say about an operation without a deterministic form. None: it is another error."""
    found = _NOT_DETERMINISTIC.search(str(error))
    if found is None or not isinstance(error, RuntimeError):
        return None
    has = f"torch has no deterministic form of {found[1] or 'a product of matrices by cuBLAS'}"
    return f"[cluster] deterministic = true: {has}; use another operation, or deterministic = false"


def fault_text(error: BaseException) -> str | None:
    """Returns what to say about an error that torch raised because of a device or its settings. None: another error."""
    return memory_text(error) or _deterministic_text(error)


def memory_text(error: BaseException) -> str | None:
    """Returns what to say about an error if memory was exhausted, in main memory or on a GPU. None: it was not."""
    if not isinstance(error, MemoryError | torch.OutOfMemoryError):
        return None
    what = ". ".join(" ".join(str(error).split()).split(". ")[:2]).removesuffix(".") or "none is left"
    return f"too little memory: {what}; use a smaller training.minibatch_size, or more training.microbatches"


def lock_pages(memory: npt.NDArray[np.uint8]) -> None:
    """Page-locks existing memory. Without it, copies are slower."""
    torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)  # type: ignore[no-untyped-call]
