"""Growth of banks whose devices are unequal: a number of learners for each.

All banks make an update together, so the slowest one determines its time. Each bank first grows by its own samples per
second, at the same time as the others. Then the measured times of all banks give the fastest numbers together: as many
learners as a bank can compute in the time of an update. The last measurement checks them.
"""

import math
from collections.abc import Mapping, Sequence

from rudra.core.decisions import MeasuredBanks
from rudra.roles.growth import NEAR, Measurement, NextSize, next_size

UNEQUAL = 1.5
"""Least ratio of the times of the slowest and the fastest device for one learner, if devices are unequal."""


def are_unequal(update_s: Sequence[float]) -> bool:
    """Returns whether the times of one learner on each device say that the devices are unequal."""
    return len(update_s) > 1 and max(update_s) >= UNEQUAL * min(update_s) > 0


class UnequalBanks:
    """Growth of banks on unequal devices.

    Args:
        growth: Rule, a value of `cluster.growth`.
        banks: Number of banks.
        most: Largest number of learners of a bank.
        stable: Largest number of learners of all banks together.

    Attributes:
        sizes: Number of learners of each bank that take part, or will.
        ended: Whether these numbers stay.
    """

    def __init__(self, growth: str, banks: int, most: int, stable: int) -> None:
        self._growth, self._most, self._stable = growth, most, stable
        self._measured: list[list[Measurement]] = [[] for _ in range(banks)]
        self._next = [NextSize(1, ends=False)] * banks
        self._wholes: list[MeasuredBanks] = []
        self._checks = self.ended = False
        self.sizes = (1,) * banks

    def measured(self, bank: int) -> list[Measurement]:
        """Returns the measurements of a bank by itself."""
        return self._measured[bank]

    def enter(self, found: MeasuredBanks) -> None:
        """Takes in a measurement, and chooses the next numbers."""
        if found.lacking >= 0:
            self._give_back(found)
        elif self._checks:
            best = max(self._wholes, key=lambda whole: whole.images_per_s)
            good = found.images_per_s >= NEAR * best.images_per_s
            self.sizes, self.ended = found.sizes if good else best.sizes, True
        else:
            self._wholes.append(found)
            for bank, (m, seconds) in enumerate(zip(found.sizes, found.update_s, strict=False)):
                if not self._next[bank].ends:
                    self._add(bank, Measurement(m, m / seconds if seconds else 0.0))
            self._choose(found.sizes)

    def _add(self, bank: int, measured: Measurement) -> None:
        self._measured[bank].append(measured)
        self._next[bank] = next_size(self._growth, self._measured[bank], self._most)

    def _give_back(self, found: MeasuredBanks) -> None:
        """Returns to a smaller number of learners of the bank whose memory does not suffice."""
        bank, sizes = found.lacking, found.sizes
        self._add(bank, Measurement(sizes[bank], 0.0))
        if self._checks:
            self.sizes, self.ended = (*sizes[:bank], self._next[bank].learners, *sizes[bank + 1 :]), True
        else:
            self._choose(sizes)

    def _choose(self, present: tuple[int, ...]) -> None:
        """Chooses the next numbers, or when each bank has ended its growth, the numbers of all together."""
        if not all(following.ends for following in self._next):
            self.sizes = tuple(following.learners for following in self._next)
            return
        tables = [{m: m / speed for m, speed in measured if speed} for measured in self._measured]
        both = zip(tables, self._measured, strict=True)
        limits = [max(table) if any(not speed for _, speed in its) else self._most for table, its in both]
        self.sizes, self._checks = fastest_together(tables, limits, self._stable), True
        self.ended = self.sizes == present


def fastest_together(
    tables: Sequence[Mapping[int, float]], limits: Sequence[int], stable: int = 2**31
) -> tuple[int, ...]:
    """Returns the fastest numbers of learners, in samples per second, of banks that make updates together.

    Of the numbers within 10 % of the best it takes the smallest ones.

    Args:
        tables: For each bank, measured numbers of learners -> seconds for an update.
        limits: Largest number of learners of each bank.
        stable: Largest number of learners of all banks.
    """
    times = [[bank_seconds(table, m) for m in range(1, most + 1)] for table, most in zip(tables, limits, strict=True)]
    least = max(own[0] for own in times)
    found: dict[tuple[int, ...], float] = {}
    for within in {least, *(seconds for own in times for seconds in own if seconds > least)}:
        sizes = [max(m for m, seconds in enumerate(own, 1) if seconds <= within) for own in times]
        while sum(sizes) > max(stable, len(sizes)):
            sizes[sizes.index(max(sizes))] -= 1
        found[tuple(sizes)] = sum(sizes) / max(own[m - 1] for own, m in zip(times, sizes, strict=True))
    enough = NEAR * max(found.values())
    return min((sizes for sizes, speed in found.items() if speed >= enough), key=lambda sizes: (sum(sizes), sizes))


def bank_seconds(table: Mapping[int, float], learners: int) -> float:
    """Returns the seconds of a bank for an update, estimated from measured ones.

    Between two measurements it follows a straight line in log-log scale. Beyond the last one it grows with m.

    Args:
        table: Measured numbers of learners -> seconds, with 1.
        learners: m.
    """
    known = sorted(table)
    below = max(m for m in known if m <= learners)
    above = min((m for m in known if m > learners), default=0)
    if not above:
        return table[below] * learners / below
    part = math.log(learners / below) / math.log(above / below)
    return math.exp((1 - part) * math.log(table[below]) + part * math.log(table[above]))
