"""Choice of the number of learners on a device while the run trains (`cluster.learners_per_device = "auto"`).

The statistics server measures the throughput from the rows of updates. Each update counts the replicas that were
averaged, so the rows show when another number of learners has begun. Equal devices have the same number. The rows of
mini-batches say whether devices are equal, and each of unequal ones gets a number of its own (`UnequalBanks`).

Source: crossbow.txt §3.4 and §4.4.
"""

import json
from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import median

import numpy as np

from rudra.core.decisions import MeasuredBanks
from rudra.core.messages import Rows
from rudra.core.phases import Phases
from rudra.roles.growth import Measurement, next_size
from rudra.roles.machine import Setup
from rudra.roles.unequal_banks import UnequalBanks, are_unequal
from topologies import Plan

SETTLING = 3
"""Number of updates after a change that are not measured, because caches and buffers are filled then."""

PARTS = 5
"""Number of equal parts of a measurement, whose median counts. So an evaluation or another process delays only some."""

LEAST_UPDATES, LEAST_S = 20, 0.5
"""Number of updates and seconds of training that a measurement takes at least."""


class BankTuner:
    """Measurements of a run whose banks grow, and the decisions that follow from them.

    Args:
        setup: arguments of the statistics server.

    Attributes:
        sizes: number of learners on each device that take part, or will, in the order of ranks.
        ended: Whether they stay: the measurements say so, or the job or a loss has changed the number of learners.
    """

    def __init__(self, setup: Setup) -> None:
        cluster, plan = setup.job.cluster, setup.plan
        self._ranks = sorted(plan.whole.ranks_with_learners)
        self._growth, self._devices = cluster.growth, len(self._ranks)
        self._rank_of = [role.world_rank for role in plan.whole.roles]
        active = [self._rank_of[learner] for learner in plan.learners]
        self.sizes = tuple(max(1, active.count(rank)) for rank in self._ranks)
        self._most = largest_stable(setup.all_phases, cluster.bank_size or 1, self._devices)
        self.ended = min(self.sizes) >= self._most
        self._before = self.sizes
        self._chosen = {sum(self.sizes): self.sizes}  # by number of learners of all devices
        self._given_back: set[tuple[int | None, int]] = set()  # place of a device, and learners of all of them
        self._measured: list[Measurement] = []
        self._unequal: UnequalBanks | None = None
        self._rows: list[tuple[int, float, int]] = []  # for each update by all of these: timestamp, time and samples
        self._settling = SETTLING
        self._times = BankTimes(plan.whole) if setup.job.results.minibatches and self._devices > 1 else None

    def recall(self, measured: Iterable[MeasuredBanks]) -> None:
        """Takes note of measurements from before the checkpoint that the run resumes from."""
        for found in measured:
            own = bool(found.update_s) or found.lacking >= 0
            whole = found.lacking < self._devices and len(found.update_s) in (0, self._devices)
            if whole and len(found.sizes) == (self._devices if own else 1):
                self._follow(found)

    def time(self, rows: Rows) -> None:
        """Takes in rows of mini-batches, which say how long each bank takes."""
        if self._times is not None and not self.ended:
            self._times.enter(rows)

    def enter(self, rows: Rows) -> MeasuredBanks | None:
        """Takes in rows of updates, in their order.

        Returns:
            The measurement that they complete. None: they complete none.
        """
        if self.ended:
            return None
        for timestamp, gradients, samples, time_s in rows[["timestamp", "gradients", "samples", "time_s"]].tolist():
            if gradients not in (sum(self.sizes), sum(self._before)):
                self.ended = True
                return None
            if gradients != sum(self.sizes):  # a decided change has not taken effect yet
                self._begin()
            elif self._settling:
                self._settling -= 1
            else:
                self._rows.append((timestamp, time_s, samples))
        if len(self._rows) <= LEAST_UPDATES or self._rows[-1][1] - self._rows[0][1] < LEAST_S:
            return None
        update_s: tuple[float, ...] | None = ()
        if self._times is not None:
            update_s = self._times.seconds(self._rows[0][0], self._rows[-1][0])
        if update_s is None:  # rows of mini-batches are on their way
            return None
        found = MeasuredBanks(self.sizes[:1], throughput([row[1:] for row in self._rows]))
        if self._unequal is not None or are_unequal(update_s):
            found = found._replace(sizes=self.sizes, update_s=update_s)
        self._follow(found)
        return found

    def lacks_memory(self, role: int, learners: int) -> bool:
        """Returns whether it is known that the memory of a role's device does not suffice for its present learners.

        Args:
            role: id of the role.
            learners: present number of learners of all devices.
        """
        if self._unequal is not None:
            return (self._bank(role), learners) in self._given_back
        return Measurement(learners // self._devices, 0.0) in self._measured

    def give_back(self, role: int, learners: int) -> MeasuredBanks | None:
        """Returns to a smaller number of learners, because the memory of a role's device does not suffice.

        Args:
            role: id of the role.
            learners: present number of learners of all devices.

        Returns:
            The measurement that says so. None: no smaller number was measured, or the growth did not choose this one.
        """
        sizes, bank = self._chosen.get(learners), self._bank(role)
        if sizes is None or bank is None:
            return None
        if self._unequal is not None:
            known, found = self._unequal.measured(bank), MeasuredBanks(sizes, 0.0, lacking=bank)
        else:
            known, found = self._measured, MeasuredBanks(sizes[:1], 0.0)
        if all(m >= sizes[bank] for m, _ in known):
            return None
        self._given_back.add((bank, learners))
        self._follow(found)
        return found

    @property
    def change(self) -> str:
        """JSON of the change of the job that gives each device its number of learners."""
        active = sum(self.sizes) if self._unequal is None else self.sizes
        return json.dumps({"cluster": {"active_learners": active}})

    @property
    def text(self) -> str:
        """Text for people: number of learners on each device."""
        return str(self.sizes[0]) if self._unequal is None else ", ".join(map(str, self.sizes))

    def _bank(self, role: int) -> int | None:
        """Returns the place of the bank on the rank of a role. None: the rank has no learners."""
        rank = self._rank_of[role]
        return self._ranks.index(rank) if rank in self._ranks else None

    def _begin(self) -> None:
        """Begins a measurement."""
        self._rows, self._settling = [], SETTLING
        if self._times is not None:
            self._times.clear()

    def _follow(self, found: MeasuredBanks) -> None:
        """Takes in a measurement, and chooses the sizes of the banks that are measured next, or stay."""
        self._before = self.sizes
        if found.update_s and self._unequal is None:
            self._unequal = UnequalBanks(self._growth, self._devices, self._most, self._most * self._devices)
        if self._unequal is None:
            self._times = None
            self._measured.append(Measurement(found.sizes[0], found.images_per_s))
            m, self.ended = next_size(self._growth, self._measured, self._most)
            self.sizes = (m,) * self._devices
        else:
            self._unequal.enter(found)
            self.sizes, self.ended = self._unequal.sizes, self._unequal.ended
        self._chosen[sum(self.sizes)] = self.sizes
        self._begin()


class BankTimes:
    """Seconds that each bank takes for its part of an update.

    Args:
        plan: plan with all roles.
    """

    def __init__(self, plan: Plan) -> None:
        self._rows: list[Rows] = []
        ranks = [plan.roles[learner].world_rank for learner in plan.learners]
        self._banks = [np.flatnonzero(np.array(ranks) == rank) for rank in sorted({*ranks})]

    def enter(self, rows: Rows) -> None:
        """Takes in rows of mini-batches."""
        self._rows.append(rows[["learner", "timestamp", "compute_s"]])

    def clear(self) -> None:
        """Forgets all rows."""
        self._rows.clear()

    def seconds(self, first: int, last: int) -> tuple[float, ...] | None:
        """Returns the median of the seconds of each bank. None: there are too few rows yet.

        The learners of a bank begin together, so the slowest of them has the time of the bank.

        Args:
            first: timestamp of the first weights that count.
            last: timestamp after the last weights that count.
        """
        rows = np.concatenate(self._rows) if self._rows else np.empty(0, [("timestamp", "<i8")])
        rows = rows[(rows["timestamp"] >= first) & (rows["timestamp"] < last)]
        if not len(rows):
            return None
        spent = np.zeros((sum(map(len, self._banks)), last - first))
        np.add.at(spent, (rows["learner"], rows["timestamp"] - first), rows["compute_s"])
        found = [spent[bank].max(axis=0) for bank in self._banks]
        if any(np.count_nonzero(each) < LEAST_UPDATES // 2 for each in found):
            return None
        return tuple(float(np.median(each[each > 0])) for each in found)


def throughput(rows: Sequence[tuple[float, int]]) -> float:
    """Returns the median of the samples per second in equal parts of a measurement.

    Args:
        rows: For each update, the time of its beginning in seconds, and its number of samples.
    """
    ends = [place * (len(rows) - 1) // PARTS for place in range(PARTS + 1)]
    return median(sum(samples for _, samples in rows[a:b]) / (rows[b][0] - rows[a][0]) for a, b in pairwise(ends))


def largest_stable(phases: Phases, most: int, devices: int) -> int:
    """Returns the largest size of a bank at which averages do not diverge in any phase.

    If the job gives the elasticity, its bound falls with the number of replicas.

    Args:
        phases: Phases of the run.
        most: Largest size of interest.
        devices: Number of devices.
    """
    for m in range(2, most + 1):
        try:
            for phase in phases:
                phase.job.make_protocol(phase.plan.with_active(m * devices, evenly=True))
        except ValueError:
            return m - 1
    return most
