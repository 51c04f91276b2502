"""GPUs that torch uses through `torch.cuda`. No other module of Rudra calls it."""

import gc
import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.multiprocessing.reductions import reduce_tensor

from rudra.compute.device.collectives import Collective
from rudra.compute.device.graphs import Graph, Lanes, NotRecordedError, waited
from rudra.compute.device.kind import NO_LIMIT, DeviceKind, Result
from rudra.compute.device.regions import Region
from rudra.compute.device.streams import Number, Pending, Stream
from rudra.errors import ConfigError
from rudra.log import log

AMPERE = (8, 0)
"""Compute capability of the first GPUs that round factors to TF32."""

MOST_STREAMS = 32
"""Number of streams of a GPU that torch gives out before it gives out the first one again."""


class CudaStream(Stream):
    """Stream of a GPU. Numbers come back through page-locked memory.

    Args:
        stream: Stream of torch. Work that torch does outside `submit` uses the default stream.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def submit(self, work: Callable[[], Sequence[Number]], after: Sequence[Pending] = ()) -> Pending:
        for each in after:
            if isinstance(each, _OnGpu):
                self._stream.wait_event(each.event)
        with torch.cuda.stream(self._stream):
            numbers = work()
            there = [number for number in numbers if isinstance(number, torch.Tensor)]
            came = torch.empty(len(there), dtype=torch.float64, pin_memory=True)
            if there:
                came.copy_(torch.stack([number.double() for number in there]), non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return _OnGpu(numbers, came, event)


@dataclass(slots=True)
class _Recordings:
    """Things that the recorded work of one stream uses. Another stream must not use them at the same time.

    Attributes:
        stream: Stream that records the work. A graph contains the address of cuBLAS's workspace for this stream. None:
            a new stream records each time.
        state: State of the generator that recorded work draws from. None: the one that the generator has.
        last: Last graph. It keeps the memory that all graphs of the stream share, because they run one after another.
        made: Number of states that there have been.
    """

    stream: torch.cuda.Stream | None = None
    state: torch.Generator | None = None
    last: torch.cuda.CUDAGraph | None = None
    made: int = 0


class CudaOwnStream(CudaStream):
    """Stream of a model that computes at the same time as others.

    Args:
        kind: Kind of the device.
        device: The GPU.
        stream: Stream of torch, for this model only.
    """

    def __init__(self, kind: "Cuda", device: torch.device, stream: torch.cuda.Stream) -> None:
        super().__init__(stream)
        self._kind, self._device = kind, device
        self._own = _Recordings(stream, kind.generator(device).clone_state())

    def submit(self, work: Callable[[], Sequence[Number]], after: Sequence[Pending] = ()) -> Pending:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))  # updates of the weights, for instance
        with self._kind.recording(self._device, self._own):
            return super().submit(work, after)


class _OnGpu(Pending):
    """Work of a GPU.

    Args:
        numbers: Its numbers.
        came: Memory that receives those on the GPU.
        event: Event after the work.
    """

    def __init__(self, numbers: Sequence[Number], came: torch.Tensor, event: torch.cuda.Event) -> None:
        self._numbers, self._came, self.event = numbers, came, event

    def done(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def numbers(self) -> list[float]:
        self.event.synchronize()
        came = iter(self._came.tolist())
        return [next(came) if isinstance(number, torch.Tensor) else number for number in self._numbers]


class CudaGraph(Graph):
    """Graph of a GPU.

    Args:
        graph: Graph of torch.
        is_valid: Returns whether the generator that the recorded work draws from is still the device's.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph, is_valid: Callable[[], bool]) -> None:
        super().__init__(is_valid)
        self._graph = graph

    def replay(self) -> None:
        self._graph.replay()


class CudaLanes(Lanes):
    """Lanes of a GPU: branches of a graph.

    Args:
        streams: Streams of all lanes but the first.
        device: The GPU.
    """

    def __init__(self, streams: Sequence[torch.cuda.Stream], device: torch.device) -> None:
        self._streams = [torch.cuda.current_stream(device), *streams]
        for stream in streams:
            stream.wait_stream(self._streams[0])

    def do(self, lane: int, work: Callable[[], object], after: Sequence[int] = ()) -> None:
        stream = self._streams[lane]
        for other in after:
            stream.wait_stream(self._streams[other])
        with torch.cuda.stream(stream):
            work()

    def join(self) -> None:
        first, *others = self._streams
        for stream in others:
            first.wait_stream(stream)


class CudaRegion(Region):
    """Region of a GPU. Torch exports and opens it by CUDA's handles of memory.

    Args:
        device: The GPU.
        length: Number of bytes.
    """

    def __init__(self, device: torch.device, length: int) -> None:
        self.memory = torch.zeros(length, dtype=torch.uint8, device=device)

    def tickets(self, count: int) -> Sequence[Any]:
        # Torch counts the readers of each ticket.
        return [reduce_tensor(self.memory) for _ in range(count)]  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """The memory exists as long as this process uses it."""


@contextmanager
def _waiting_refused() -> Iterator[None]:
    """Lets torch raise RuntimeError where the host would wait for a GPU."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():  # torch warns that it may miss some waits
        warnings.filterwarnings("ignore", "Synchronization debug mode")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


class Cuda(DeviceKind):
    """GPUs of NVIDIA."""

    type = "cuda"
    noun = "GPU"
    page_locks = True
    apart = True
    records = True

    def __init__(self) -> None:
        self._recordings = _Recordings()  # of the stream whose work the host submits now
        self._lanes: list[torch.cuda.Stream] = []

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

    def stream(self, device: torch.device, *, own: bool = False) -> Stream:
        if own:
            return CudaStream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
        return CudaStream(torch.cuda.current_stream(device))

    def streams(
        self, device: torch.device, count: int, at_once: int, begin: Callable[[], None] = lambda: None
    ) -> list[Stream]:
        # Torch gives out 32 streams in turn, so those that it gives out one after another differ.
        number = min(count, at_once, MOST_STREAMS)
        there = [torch.cuda.Stream(device, priority=-1) for _ in range(number)]  # type: ignore[no-untyped-call]
        found = [CudaOwnStream(self, device, stream) for stream in there]
        return [found[place % len(found)] for place in range(count)]

    @contextmanager
    def recording(self, device: torch.device, own: _Recordings) -> Iterator[None]:
        """Lets work of a stream record and draw random numbers with what this stream has for it."""
        generator, before = self.generator(device), self._recordings
        state = generator.graphsafe_get_state()
        assert own.state is not None
        generator.graphsafe_set_state(own.state)
        self._recordings = own
        try:
            yield
        finally:
            self._recordings = before
            generator.graphsafe_set_state(state)

    def record(self, device: torch.device, work: Callable[[], Result]) -> tuple[Graph, Result]:
        before, own = torch.cuda.current_stream(device), self._recordings
        # A graph has the priority of this stream: steps go before evaluations, which have a stream of their own.
        stream = own.stream or torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        stream.wait_stream(before)
        try:
            with torch.cuda.stream(stream), _waiting_refused():
                work()
        except RuntimeError as error:
            raise NotRecordedError(waited(error)) from error
        before.wait_stream(stream)
        graph, generator, made = torch.cuda.CUDAGraph(), self.generator(device), own.made
        fresh = generator.clone_state()
        pool = torch.cuda.graph_pool_handle() if own.last is None else own.last.pool()
        collects = gc.isenabled()
        gc.collect()
        gc.disable()  # to free memory while CUDA records is an error
        try:
            with torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
                found = work()
        except RuntimeError as error:  # torch leaves its stream and its generator as while it recorded
            torch.cuda.set_stream(before)
            generator.graphsafe_set_state(fresh)
            own.made += 1
            own.state = fresh if own.state is not None else None
            raise NotRecordedError(waited(error)) from error
        finally:
            if collects:
                gc.enable()
        own.last = graph
        return CudaGraph(graph, lambda: made == own.made), found

    def lanes(self, device: torch.device, count: int) -> Lanes:
        while len(self._lanes) < min(count - 1, MOST_STREAMS - 1):  # always the same: each has a workspace of cuBLAS
            self._lanes.append(torch.cuda.Stream(device, priority=-1))  # type: ignore[no-untyped-call]
        return CudaLanes(self._lanes[: count - 1], device)

    def region(self, device: torch.device, length: int) -> Region:
        return CudaRegion(device, length)

    def attached(self, ticket: Any) -> torch.Tensor:
        rebuild, arguments = ticket
        memory: torch.Tensor = rebuild(*arguments)
        return memory

    def library(self) -> str:
        if not hasattr(torch.distributed, "ProcessGroupNCCL"):
            return ""
        return "NCCL " + ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]

    def identity(self, device: torch.device) -> str:
        return str(torch.cuda.get_device_properties(device).uuid)

    def takes_turns(self) -> bool:
        pipes = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))
        return not (pipes / "control").exists()

    def collective(self, device: torch.device, store: Any, place: int, size: int) -> Collective:
        nccl: Any = getattr(torch.distributed, "ProcessGroupNCCL", None)
        if nccl is None:
            raise RuntimeError("this build of torch has no NCCL")
        for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING"):
            os.environ[name] = "0"  # torch would end this process if another one dies
        options = nccl.Options()
        options._timeout = NO_LIMIT
        return Collective(nccl(store, place, size, options))

    def main_memory(self, length: int) -> torch.Tensor:
        return torch.from_numpy(page_locked(length))

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

    def lost(self, error: BaseException) -> bool:
        return isinstance(error, RuntimeError) and str(error).startswith("CUDA error")

    def generator(self, device: torch.device) -> torch.Generator:
        return torch.cuda.default_generators[device.index or 0]


def page_locked(length: int) -> npt.NDArray[np.uint8]:
    """Allocates bytes in main memory that a GPU copies at full speed and in parallel with other work.

    torch's own allocator would take the next power of two.
    """
    memory = np.full(length, 0, np.uint8)
    lock_pages(memory)
    return memory


def lock_pages(memory: npt.NDArray[np.uint8]) -> None:
    """Page-locks existing memory until it is freed. If the system refuses, copies are slower, and a line says so."""
    place, runtime = memory.ctypes.data, torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if code := int(runtime.cudaHostRegister(place, memory.nbytes, 0)):
        log.warning(f"{memory.nbytes / 1e6:,.0f} MB could not be page-locked (CUDA error {code}): copies are slower")
        with suppress(RuntimeError):  # torch would report this error at its next kernel
            torch.zeros(1, device="cuda")
        return
    weakref.finalize(memory, runtime.cudaHostUnregister, place)
