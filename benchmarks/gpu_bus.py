"""Section "289 MB" of `rudra bench gpu`: copies of a large model over the bus, its update, and two ranks."""

from collections.abc import Callable
from functools import partial

import torch

from benchmarks.gpu_ranks import exchanged
from benchmarks.gpu_rows import Figures, LeftOut, Row, Setting, row
from benchmarks.shared import seconds
from rudra.bench.ranks import in_turns
from rudra.benchmark_report import Cell, ratios, spread
from rudra.compute.device.cuda import page_locked
from rudra.compute.optim import UpdateRule
from rudra.job.job import Job

PARAMETERS = 72_300_000
SPAN_S = 0.2


def rows(setting: Setting) -> list[Row]:
    """Returns the rows of the section."""
    return [
        row("copy to the device, page-locked", 3, partial(copied, locked=True, back=False)),
        row("copy to the host, page-locked", 3, partial(copied, locked=True, back=True)),
        row("copy to the device, pageable", 3, partial(copied, locked=False, back=False)),
        row("copy to the host, pageable", 3, partial(copied, locked=False, back=True)),
        row("SGD update", 10, updated),
        row("two ranks", 20, lambda setting: exchanged(setting, _size(setting))),
    ]


def _size(setting: Setting) -> int:
    return setting.sized(PARAMETERS, 1 << 22, 1 << 18)


def _on_host(setting: Setting, *, locked: bool) -> torch.Tensor:
    """Returns a vector in main memory that has been written once."""
    if not locked:
        return torch.zeros(_size(setting))
    if setting.machine.is_host:
        raise LeftOut("no device copies page-locked memory of the host")
    return torch.from_numpy(page_locked(_size(setting) * 4)).view(torch.float32)


def _timed(setting: Setting, function: Callable[[], object]) -> float:
    """Returns the mean seconds of a function, with the device's work."""

    def whole() -> None:
        function()
        setting.machine.finish()

    whole()
    return seconds(whole, SPAN_S)


def copied(setting: Setting, *, locked: bool, back: bool) -> Figures:
    """Measures a copy of the vector in one direction."""
    here, there = _on_host(setting, locked=locked), torch.zeros(_size(setting), device=setting.machine.device)
    to, source = (here, there) if back else (there, here)
    figures: dict[str, list[float]] = {}
    for turn in in_turns(setting.sized(3, 1, 0), figures):
        turn["s"] = _timed(setting, lambda: to.copy_(source, non_blocking=True))
    return {"MB": here.nbytes / 1e6, "GB/s": spread(here.nbytes / taken / 1e9 for taken in figures["s"])}


def updated(setting: Setting) -> Figures:
    """Measures an update of the vector by SGD with momentum, on the device, on the host, and as staged copies need it.

    Staged: the gradient goes to the host, the host updates, and the weights return.
    """
    table = Job(optimizer={"momentum": 0.9}).optimizer
    device = setting.machine.device
    ours, gradient = torch.zeros(2, _size(setting), device=device)
    here, their_gradient = (_on_host(setting, locked=not setting.machine.is_host) for _ in range(2))
    on_device, on_host = UpdateRule(table, ours), UpdateRule(table, here)

    def staged() -> None:
        their_gradient.copy_(gradient)
        on_host.step(their_gradient, 1e-6)
        ours.copy_(here)

    figures: dict[str, list[float]] = {}
    for turn in in_turns(setting.sized(3, 1, 0), figures):
        turn["device"] = _timed(setting, lambda: on_device.step(gradient, 1e-6))
        turn["host"] = _timed(setting, lambda: on_host.step(their_gradient, 1e-6))
        turn["staged"] = _timed(setting, staged)
    shown: dict[str, Cell] = {f"{name} ms": spread(1e3 * s for s in taken) for name, taken in figures.items()}
    return {"MB": ours.nbytes / 1e6, **shown, "staged / device": ratios(figures["staged"], figures["device"])}
