"""Weights in a window: what its workers read and write, what races cost, and what a death in the middle leaves."""

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from rudra.compute.optim import UpdateRule
from rudra.compute.window import LOGGED, Contribution, Reading, Update, Window, WindowLayout
from rudra.errors import RunError
from rudra.job.tables import OptimizerTable
from rudra.mpi.shared_window import WindowFile, window_at
from tests.selection import CAMPAIGN

KINDS: tuple[Update, ...] = ("racing", "locked")


def made(update: Update, size: int = 100, workers: int = 2) -> Window:
    shape = WindowLayout(size, workers, update)
    window = Window(np.zeros(shape.bytes, np.uint8), shape)
    window.fill(torch.zeros(size))
    return window


@contextmanager
def shared(update: Update, size: int, workers: int = 2) -> Iterator[tuple[Window, Callable[[], Window]]]:
    """A window, and what maps it in another process."""
    file = WindowFile(WindowLayout(size, workers, update))
    file.window.fill(torch.zeros(size))
    try:
        yield file.window, lambda: window_at(file.place)
    finally:
        file.close()


def forked(work: Callable[[], None]) -> int:
    """Works in a child until it is killed, or done."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    return child


def ended(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def of(worker: int, step: int = 0, rate: float = 1.0) -> Contribution:
    return Contribution(worker, step, 10 * step, 10, 0.5, 3.0, rate)


def count(window: Window, worker: int, updates: int) -> None:
    """Makes updates each of which adds 1 to every element."""
    torch.set_num_threads(1)
    own, ones = torch.empty(window.size), torch.full((window.size,), -1.0)
    for step in range(updates):
        reading = window.copy(worker, own)
        window.add(of(worker, step), reading, ones)


@pytest.mark.parametrize("update", KINDS)
@pytest.mark.parametrize("size", [1, 16, 37, 1000])
def test_an_update_has_the_bits_of_the_optimiser(update: Update, size: int) -> None:
    weights, gradients = torch.randn(size), torch.randn(5, size)
    window = made(update, size)
    window.fill(weights)
    rule = UpdateRule(OptimizerTable(), weights)
    for step, gradient in enumerate(gradients):
        rate = 0.1 / (step + 3)
        rule.step(gradient, rate)
        window.add(of(0, step, rate), Reading(step, step), gradient)
        assert torch.equal(window.latest, weights)
    assert window.made == 5


@pytest.mark.parametrize("update", KINDS)
def test_staleness_counts_updates_of_others(update: Update) -> None:
    window, own, gradient = made(update), torch.empty(100), torch.ones(100)
    first, second = window.copy(0, own), window.copy(1, own)
    applied = [window.add(of(0), first, gradient), window.add(of(1), second, gradient)]
    assert [(a.fewest, a.most) for a in applied] == [(0, 0), (1, 1)]
    reading = window.copy(0, own)
    for step in (1, 2, 3):
        window.add(of(1, step), window.copy(1, torch.empty(100)), gradient)
    last = window.add(of(0, 1), reading, gradient)
    assert (last.fewest, last.most, last.timestamp) == (3, 3, 2)
    assert [(window._made[worker], window._begun[worker]) for worker in (0, 1)] == [(2, 2), (4, 4)]
    assert torch.equal(window.latest, torch.full((100,), -6.0))


def test_staleness_of_what_is_read_in_place_is_an_interval() -> None:
    window, gradient = made("racing"), torch.ones(100)
    reading = window.begin_reading(0)
    window.add(of(1), window.begin_reading(1), gradient)
    applied = window.add(of(0), window.end_reading(0, reading), gradient)
    assert (applied.fewest, applied.most) == (0, 1)


@pytest.mark.parametrize("update", KINDS)
def test_who_overwrites_discards_what_others_did_meanwhile(update: Update) -> None:
    window, own, gradient = made(update), torch.empty(100), torch.ones(100)
    reading = window.copy(0, own)
    window.add(of(1, rate=5.0), window.copy(1, torch.empty(100)), gradient)
    window.add(of(0), reading, gradient, instead=own)
    assert torch.equal(window.latest, torch.full((100,), -1.0))


@pytest.mark.parametrize("update", KINDS)
def test_the_log_tells_what_a_worker_did_and_forgets_the_oldest(update: Update) -> None:
    window, own = made(update, 4), torch.empty(4)
    count = LOGGED + 3
    found = [window.add(of(step % 2, step), window.copy(step % 2, own), own) for step in range(count)]
    mine = [entry for entry in found if entry.of.worker == 0]
    after = mine[-4].update
    assert window.entries(0, after) == mine[-3:]
    assert window.entries(0, mine[-1].update) == []
    if update == "racing":
        assert window.entries(1, 0) == [entry for entry in found if entry.of.worker == 1]
    else:
        with pytest.raises(RunError, match=f"has the latest {LOGGED} updates, but {count} are needed"):
            window.entries(1, 0)


def test_what_races_lose_is_what_the_probes_say() -> None:
    with shared("racing", 20_000) as (window, there):
        children = [forked(lambda worker=worker: count(there(), worker, 4000)) for worker in (0, 1)]  # type: ignore[misc]
        assert [ended(child) for child in children] == [0, 0]
        assert window.made == 8000
        assert 0.5 < window.surviving <= 1
        assert 0.5 < float(window.latest.mean()) / 8000 <= 1


def test_locked_updates_all_survive() -> None:
    with shared("locked", 3000) as (window, there):
        children = [forked(lambda worker=worker: count(there(), worker, 2000)) for worker in (0, 1)]  # type: ignore[misc]
        assert [ended(child) for child in children] == [0, 0]
        assert torch.equal(window.latest, torch.full((3000,), 4000.0))
        made = [window.entries(worker, 0) for worker in (0, 1)]
        assert [[entry.of.step for entry in of_worker] for of_worker in made] == [[*range(2000)]] * 2
        assert sorted(entry.update for of_worker in made for entry in of_worker) == [*range(1, 4001)]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("deaths", [5, pytest.param(30, marks=CAMPAIGN)])
def test_a_death_at_any_moment_leaves_the_latest_generation_whole_and_the_lock_free(deaths: int) -> None:
    """Among them deaths of who holds the lock, and is half through with the other generation."""
    size = 400_000
    with shared("locked", size, workers=3) as (window, there):
        survivor = forked(lambda: count(there(), 2, 1 << 40))
        try:
            for _ in range(deaths):
                victim = forked(lambda: count(there(), 0, 1 << 40))
                before = window._made[0]
                while window._made[0] < before + 2:
                    time.sleep(1e-4)
                time.sleep(random.uniform(0, 2e-3))
                os.kill(victim, signal.SIGKILL)
                assert ended(victim) == -signal.SIGKILL
                other, own = window._made[2], torch.empty(size)
                while window._made[2] < other + 2:
                    time.sleep(1e-4)  # it goes on
                reading = window.copy(1, own)
                assert torch.equal(own, torch.full((size,), float(reading.made)))
        finally:
            os.kill(survivor, signal.SIGKILL)
            ended(survivor)
        assert torch.equal(window.latest, torch.full((size,), float(window.made)))
