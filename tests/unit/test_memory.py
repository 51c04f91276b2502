"""Memory that earlier runs leave behind in a process."""

import gc
import weakref

import pytest

from rudra import memory


class Run:
    """An object that refers to itself, as those of a run do."""

    def __init__(self) -> None:
        self.itself = self


@pytest.mark.parametrize(("grown", "freed"), [(memory.GROWTH + 1, True), (memory.GROWTH, False)])
def test_earlier_runs_are_freed_when_the_process_has_grown(
    monkeypatch: pytest.MonkeyPatch, grown: int, freed: bool
) -> None:
    sizes = [1 << 30, (1 << 30) + grown, 1 << 30]
    monkeypatch.setattr(memory, "memory_bytes", lambda name: sizes.pop(0))
    monkeypatch.setattr(memory, "_collected", {})
    gc.disable()
    try:
        memory.free_earlier_runs()
        run = weakref.ref(Run())
        memory.free_earlier_runs()
    finally:
        gc.enable()
    assert (run() is None) is freed
