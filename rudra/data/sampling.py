"""Order of samples that learners draw: pure functions of keys, so any run, resume or replay draws the same samples.

Only raw generator output is used. NumPy guarantees these streams across its versions, but no derived functions.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from rudra.errors import DataError

_MASK = 2**64 - 1

TEST_SPLIT, VALIDATION_SPLIT = -1, -2
"""Purposes of held-out samples."""


def mix(*values: int) -> int:
    """Mixes integers into one key, for generators that take a single seed.

    Args:
        values: Any integers, for example (seed, learner, step). Their order matters.

    Returns:
        63 bits that look random and depend on every value.
    """
    key = len(values)
    for value in values:
        key = (key ^ (value & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        key = (key ^ key >> 27) * 0x94D049BB133111EB & _MASK
        key ^= key >> 31
    return key >> 1


def seed_all(key: int) -> None:
    """Seeds the generators that the user's own code commonly uses: Python's, NumPy's and torch's."""
    import torch

    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    torch.default_generator.manual_seed(key)


def random_states() -> tuple[Any, ...]:
    """Returns the states of the same generators, for comparisons."""
    import torch

    numpy: Any = np.random.get_state(legacy=True)
    return random.getstate(), numpy[1].tobytes(), numpy[2], torch.get_rng_state().numpy().tobytes()


@contextmanager
def seeded(key: int) -> Iterator[None]:
    """Seeds the same generators for a context, and restores their states afterwards."""
    import torch

    python, numpy, torchs = random.getstate(), np.random.get_state(), torch.get_rng_state()
    seed_all(key)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(torchs)


class Sampler:
    """Endless sequence of one learner's samples: the training set in a new random order on each pass.

    Args:
        seed: Seed of the job.
        stream: Number of the learner.
        population: Number of samples in the training set, below 2**31.

    Raises:
        DataError: There are no samples to draw.
    """

    def __init__(self, seed: int, stream: int, population: int) -> None:
        if not 0 < population < 2**31:
            raise DataError(f"cannot draw from {population} training samples; there must be 1 to {2**31 - 1}")
        self.seed = seed
        self.stream = stream
        self.population = population
        self._cached = -1
        self._permutation = np.empty(0, np.int32)

    def indices(self, first: int, count: int) -> npt.NDArray[np.int64]:
        """Returns the samples at positions `first` to `first + count - 1` of the sequence.

        The sequence does not depend on the sizes or the order of calls.

        Returns:
            (count,) int64, owned by the caller.
        """
        parts = []
        while True:
            number, start = divmod(first, self.population)
            parts.append(self._pass(number)[start : start + count].astype(np.int64))
            first, count = first + len(parts[-1]), count - len(parts[-1])
            if not count:
                return np.concatenate(parts) if len(parts) > 1 else parts[0]

    def _pass(self, number: int) -> npt.NDArray[np.int32]:
        if number != self._cached:
            # The generator advances the low half of the counter. The high half is the number of the pass.
            counter = number << 128
            bits = np.random.Philox(key=self.seed | self.stream << 64, counter=counter)
            self._permutation = _order(bits.random_raw(self.population)).astype(np.int32)
            self._cached = number
        return self._permutation


def _order(drawn: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """Returns the stable order of numbers. NumPy's other sort needs a third of the time, and equal numbers are rare."""
    order = np.argsort(drawn)
    ascending = drawn[order]
    return np.argsort(drawn, kind="stable") if (ascending[1:] == ascending[:-1]).any() else order


def hold_out(
    seed: int, purpose: int, population: int, fraction: float
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Splits a set at random.

    Args:
        seed: Seed of the job.
        purpose: `TEST_SPLIT` or `VALIDATION_SPLIT`, which are drawn independently.
        population: Number of samples in the set.
        fraction: Fraction of held-out samples. Their number is rounded, to at least one and not all.

    Returns:
        Remaining and held-out samples, each ascending.

    Raises:
        DataError: There are fewer than two samples.
    """
    if population < 2:
        raise DataError(f"cannot hold samples out of {population}; there must be 2 at least")
    bits = np.random.Philox(key=mix(seed, purpose))
    order = _order(bits.random_raw(population))
    count = min(max(1, round(population * fraction)), population - 1)
    return np.sort(order[count:]), np.sort(order[:count])
