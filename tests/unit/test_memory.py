"""Memory that earlier runs leave behind in a process."""

import gc
import weakref

import pytest
import torch

from rudra import memory


class Run:
    """An object that refers to itself, as those of a run do."""

    def __init__(self, size: int) -> None:
        self.itself, self.tensor = self, torch.ones(size)


@pytest.mark.parametrize(("growth", "freed"), [(1 << 20, True), (1 << 40, False)])
def test_earlier_runs_are_freed_when_the_process_has_grown(
    monkeypatch: pytest.MonkeyPatch, growth: int, freed: bool
) -> None:
    monkeypatch.setattr(memory, "GROWTH", growth)
    monkeypatch.setattr(memory, "_collected", {})
    gc.disable()
    try:
        memory.free_earlier_runs()
        run = weakref.ref(Run(4 << 20))
        memory.free_earlier_runs()
    finally:
        gc.enable()
    assert (run() is None) is freed
