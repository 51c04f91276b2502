"""Data sets of random points, some of which keep learners waiting."""

import os
import random
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from rudra.mpi.launch import world_size

CLASSES = 10


def learners_here() -> int:
    """Learners of this rank that draw ahead; a stage server, which draws again what they have drawn, is none."""
    return sum(thread.name == "rudra-input" for thread in threading.enumerate())


def pass_gate(batches: float) -> None:
    """Waits while a file says that learners are to get no more mini-batches than so many."""
    gate, end = Path(os.environ.get("RUDRA_TEST_GATE", "no such gate")), time.monotonic() + 150
    with suppress(OSError, ValueError):  # it is no more
        while batches > int(gate.read_text()) and time.monotonic() < end:
            time.sleep(0.01)


class Digits(Dataset[Any]):
    """Random points of ten clusters; `late_s` delays learners at random, so gradients arrive in any order.

    Nobody else is late: not virtual time, what looks at the data before training, or a stage server, which draws again.
    """

    classes = CLASSES

    def __init__(self, samples: int, late_s: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(5)
        centres = torch.randn(CLASSES, 20, generator=generator)
        self.labels = torch.randint(0, CLASSES, (samples,), generator=generator)
        self.inputs = centres[self.labels] + 0.1 * torch.randn(samples, 20, generator=generator)
        self.late_s, self.batches = late_s, 0

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.inputs[index], int(self.labels[index])

    def __getitems__(self, indices: list[int]) -> list[tuple[torch.Tensor, int]]:
        if self.late_s and world_size() is not None and (learners := learners_here()):
            self.batches += 1
            pass_gate(self.batches / learners)
            time.sleep(random.SystemRandom().uniform(0, self.late_s))
        return [self[index] for index in indices]


class Uneven(Digits):
    """Takes 5 ms for a sample, and on rank 2 some times that; in virtual time nothing."""

    slow = 3

    def __getitems__(self, indices: list[int]) -> list[tuple[torch.Tensor, int]]:
        if world_size() is not None:
            slow = os.environ.get("OMPI_COMM_WORLD_RANK") == "2"
            time.sleep(len(indices) * 0.005 * (self.slow if slow else 1))
        return [self[index] for index in indices]


def uneven() -> tuple[Digits, Digits]:
    return Uneven(240), Digits(60)


def unlike() -> tuple[Digits, Digits]:
    """As on a device that is four times as fast as the CPU of rank 2."""
    data = Uneven(240)
    data.slow = 4
    return data, Digits(60)


def delayed() -> tuple[Digits, Digits]:
    return Digits(240, late_s=0.02), Digits(60)


def prompt() -> tuple[Digits, Digits]:
    return Digits(240), Digits(60)


def endless() -> tuple[Digits, Digits]:
    return Digits(2000, late_s=0.01), Digits(60)


def hasty() -> tuple[Digits, Digits]:
    """Learners take their time now and then, so one may get many weights between two mini-batches of another."""
    return Digits(240, late_s=0.003), Digits(60)


def wrong_label() -> tuple[Digits, Digits]:
    data = Digits(240)
    data.labels[100] = 11
    return data, Digits(60)
