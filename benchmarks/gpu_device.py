"""Devices that `rudra bench gpu` measures. Of all benchmarks only this module calls torch.cuda."""

import json
import os
import resource
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from rudra.compute.device.devices import DEVICES, kind_of
from rudra.compute.device.kind import CPU
from rudra.errors import ConfigError
from rudra.machine import cores

GB = 1e9


class Machine:
    """A device to measure. The base class is the host, which computes on its processor.

    Attributes:
        name: Value of `--device`.
        in_jobs: Value of `cluster.device` in jobs.
        backend: Backend of `torch.distributed`.
        device: Device of torch.
    """

    name = "host"
    in_jobs = "cpu"
    backend = "gloo"

    def __init__(self) -> None:
        self.device = CPU

    @property
    def is_host(self) -> bool:
        """Whether this is the host."""
        return self.device.type == CPU.type

    def about(self) -> str:
        """Returns name and memory of the device, for people."""
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return f"CPU, {cores()} cores, {pages / 2**30:.0f} GiB"

    def finish(self) -> None:
        """Waits until the device has finished its work."""
        kind_of(self.device).finish(self.device)

    def set_exact(self) -> None:
        """Lets torch multiply float32 numbers exactly, as Rudra's default does."""
        kind_of(self.device).set_products(self.device, rounded=False)

    def graph(self, step: Callable[[], object]) -> Callable[[], object] | None:
        """Captures a step in a CUDA graph. Returns the function that replays it. None: there are no graphs."""
        return None

    def peak_mb(self) -> float:
        """Returns the largest memory of this process until now, in MB: on a GPU what torch has allocated there."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6

    def counter(self) -> "StepCounter":
        """Returns a counter of waits, allocations and copies of this process."""
        return StepCounter()


class StepCounter:
    """Counter of waits, allocations and copies of a rank's steps. The base class counts nothing, as on the host."""

    def start(self) -> None:
        """Starts to count waits and allocations."""

    def stop(self) -> dict[str, float]:
        """Returns their numbers since `start`."""
        return {}

    def start_copies(self) -> None:
        """Starts to record copies."""

    def stop_copies(self) -> dict[str, float]:
        """Returns numbers and bytes of copies since `start_copies`."""
        return {}


class Cuda(Machine):
    """The first GPU that torch sees.

    Raises:
        ConfigError: Torch sees none.
    """

    name = in_jobs = "cuda"
    backend = "nccl"

    def __init__(self) -> None:
        if not DEVICES[self.in_jobs].count():
            raise ConfigError("bench gpu: torch sees no GPU here; use --device host")
        self.device = DEVICES[self.in_jobs].device(0)
        DEVICES[self.in_jobs].select(self.device)

    def about(self) -> str:
        return DEVICES[self.in_jobs].about(0)

    def graph(self, step: Callable[[], object]) -> Callable[[], object]:
        beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch requires steps there before a capture
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        return graph.replay

    def peak_mb(self) -> float:
        return torch.cuda.max_memory_allocated() / 1e6

    def counter(self) -> "CudaCounter":
        return CudaCounter()


class CudaCounter(StepCounter):
    """Counter of torch's waits for the GPU, of allocations, and of copies over the bus."""

    def __init__(self) -> None:
        self._catching = ExitStack()
        self._warnings: list[warnings.WarningMessage] = []
        self._allocations = 0
        self._profile: Any = None

    def start(self) -> None:
        self._warnings = self._catching.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        self._allocations = self._allocated()

    @staticmethod
    def _allocated() -> int:
        return int(torch.cuda.memory_stats()["allocation.all.allocated"])

    def stop(self) -> dict[str, float]:
        torch.cuda.set_sync_debug_mode("default")
        self._catching.close()
        waits = sum("called a synchronizing" in str(each.message) for each in self._warnings)
        return {"waits": waits, "allocations": self._allocated() - self._allocations}

    def start_copies(self) -> None:
        self._profile = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
        self._profile.start()

    def stop_copies(self) -> dict[str, float]:
        self._profile.stop()
        with tempfile.TemporaryDirectory(prefix="rudra-bench-") as directory:
            trace = Path(directory) / "trace.json"
            self._profile.export_chrome_trace(str(trace))
            return copies_in(json.loads(trace.read_text(encoding="utf-8"))["traceEvents"])


def copies_in(events: list[dict[str, Any]]) -> dict[str, float]:
    """Returns the copies over the bus in the events of torch's profiler: pageable ones, all, and their bytes."""
    found: Counter[str] = Counter()
    for event in events:
        name = event.get("name", "")
        if event.get("cat") == "gpu_memcpy" and ("HtoD" in name or "DtoH" in name):
            found["pageable copies"] += "Pageable" in name
            found["copies"] += 1
            found["bytes"] += int(event.get("args", {}).get("bytes", 0))
    return {name: found[name] for name in ("pageable copies", "copies", "bytes")}


MACHINES: dict[str, type[Machine]] = {cls.name: cls for cls in (Machine, Cuda)}
"""Devices by their names in `--device`."""
