"""Choice of the number of learners on a device while the run trains (`cluster.learners_per_device = "auto"`).

The statistics server measures the throughput from the rows of updates. Each update counts the replicas that were
averaged, so the rows show when another number of learners has begun. All devices are equal: they have the same number.

Source: crossbow.txt §3.4 and §4.4.
"""

import json
from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import median

from rudra.core.messages import Rows
from rudra.core.phases import Phases
from rudra.roles.growth import Measurement, NextSize, next_size
from rudra.roles.machine import Setup

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
        learners: m, the number of learners on each device that take part, or will.
        ended: Whether m stays: the measurements say so, or the job or a loss has changed the number of learners.
    """

    def __init__(self, setup: Setup) -> None:
        cluster, plan = setup.job.cluster, setup.plan
        self._growth, self._devices = cluster.growth, len(plan.whole.ranks_with_learners)
        self.learners = max(1, len(plan.learners) // self._devices)
        self._most = largest_stable(setup.all_phases, cluster.bank_size or 1, self._devices)
        self.ended = self.learners >= self._most
        self._before = self.learners
        self._measured: list[Measurement] = []
        self._rows: list[tuple[float, int]] = []  # for each update by all of these learners: time and samples
        self._settling = SETTLING

    def recall(self, measured: Iterable[tuple[int, float]]) -> None:
        """Takes note of measurements from before the checkpoint that the run resumes from."""
        self._measured += (Measurement(*found) for found in measured)
        if self._measured:
            self._follow(next_size(self._growth, self._measured, self._most))

    def enter(self, rows: Rows) -> Measurement | None:
        """Takes in rows of updates, in their order.

        Returns:
            The measurement that they complete. None: they complete none.
        """
        if self.ended:
            return None
        for gradients, samples, time_s in rows[["gradients", "samples", "time_s"]].tolist():
            learners, rest = divmod(gradients, self._devices)
            if learners not in (self.learners, self._before) or rest:
                self.ended = True
                return None
            if learners != self.learners:  # a decided change has not taken effect yet
                self._begin()
            elif self._settling:
                self._settling -= 1
            else:
                self._rows.append((time_s, samples))
        if len(self._rows) <= LEAST_UPDATES or self._rows[-1][0] - self._rows[0][0] < LEAST_S:
            return None
        measured = Measurement(self.learners, throughput(self._rows))
        self._measured.append(measured)
        self._follow(next_size(self._growth, self._measured, self._most))
        return measured

    def lacks_memory(self, learners: int) -> bool:
        """Returns whether it is known that memory does not suffice for this number of learners of all devices."""
        return Measurement(learners // self._devices, 0.0) in self._measured

    def give_back(self, learners: int) -> Measurement | None:
        """Returns to a smaller number of learners, because memory does not suffice for the present one.

        Args:
            learners: present number of learners of all devices.

        Returns:
            The measurement that says so. None: no smaller number was measured, or the growth did not choose this one.
        """
        m, rest = divmod(learners, self._devices)
        if rest or m not in (self.learners, self._before) or all(each.learners >= m for each in self._measured):
            return None
        self._measured.append(found := Measurement(m, 0.0))
        self._follow(next_size(self._growth, self._measured, self._most))
        return found

    @property
    def change(self) -> str:
        """JSON of the change of the job that gives each device its number of learners."""
        return json.dumps({"cluster": {"active_learners": self.learners * self._devices}})

    def _begin(self) -> None:
        """Begins a measurement."""
        self._rows, self._settling = [], SETTLING

    def _follow(self, found: NextSize) -> None:
        self._before = self.learners
        self.learners, self.ended = found
        self._begin()


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
