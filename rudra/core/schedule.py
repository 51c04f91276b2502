"""Learning rates before modulation: α0 after schedule and warm-up."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from rudra.job.tables import OptimizerTable


@dataclass(frozen=True, slots=True)
class Schedule:
    """Learning rate as a function of the progress of the training only.

    Milestones count all epochs. Schedule `plateau` adds milestones when evaluations do not improve (`lowered`). Other
    schedules give a rate for each epoch, or for each update. The numbers of updates are then in the place of epochs
    (`rudra.compute.schedule.schedule_of`).

    Attributes:
        table: [optimizer] of the job.
        starts: Complete epochs (or updates) at which each rate begins, ascending from 0.
        rates: Rate from each start, after the warm-up.
    """

    table: OptimizerTable
    starts: tuple[int, ...]
    rates: tuple[float, ...]

    @classmethod
    def stepped(cls, table: OptimizerTable, milestones: Sequence[int]) -> Self:
        """Returns a schedule whose rate is multiplied by the table's factor after each of these epochs."""
        starts = (0, *milestones)
        return cls(
            table, starts, tuple(table.learning_rate * table.decay_factor**count for count in range(len(starts)))
        )

    def drops(self, before: int, now: int) -> bool:
        """Returns whether the rate was multiplied by the table's factor after an epoch between two numbers, the second
        included."""
        steps = self.table.schedule in ("step", "plateau")
        return steps and any(before < start <= now for start in self.starts)

    def is_flat(self, progress: float) -> bool:
        """Returns whether the rate stays the same from this progress until the end of the epoch."""
        return self.table.schedule_every == "epoch" and progress >= self.table.warm_up

    def rate(self, epoch: int, progress: float, update: int = 0) -> float:
        """Returns the rate of an update.

        Args:
            epoch: Number of complete epochs before it.
            progress: Samples applied up to and including the update, in epochs.
            update: Number of updates before it.
        """
        place = update if self.table.schedule_every == "update" else epoch
        rate = self.rates[bisect_right(self.starts, place) - 1]
        return rate * (progress / self.table.warm_up) if progress < self.table.warm_up else rate
