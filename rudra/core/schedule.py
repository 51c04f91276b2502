"""Learning rates before modulation: what the schedule and the warm-up make of α0."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from rudra.job.tables import OptimizerTable


@dataclass(frozen=True, slots=True)
class Schedule:
    """The learning rate as a function of how far training is, and of nothing else.

    Milestones count all epochs; those of a plateau are told when tests say so (`lowered`). Other schedules give a rate
    for each epoch, or for each update, whose numbers then stand in the place of epochs
    (`rudra.compute.schedule.schedule_of`).

    Attributes:
        table: [optimizer] of the job.
        starts: completed epochs (or updates) from which the rates hold, ascending from 0.
        rates: one for each, after the warm-up.
    """

    table: OptimizerTable
    starts: tuple[int, ...]
    rates: tuple[float, ...]

    @classmethod
    def stepped(cls, table: OptimizerTable, milestones: Sequence[int]) -> Self:
        """The rate is multiplied by the table's factor after each of these epochs."""
        starts = (0, *milestones)
        return cls(
            table, starts, tuple(table.learning_rate * table.decay_factor**count for count in range(len(starts)))
        )

    def drops(self, before: int, now: int) -> bool:
        """Whether the rate has been multiplied by the table's factor after one of these epochs: from, and up to."""
        steps = self.table.schedule in ("step", "plateau")
        return steps and any(before < start <= now for start in self.starts)

    def rate(self, epoch: int, progress: float, update: int = 0) -> float:
        """The rate of an update.

        Args:
            epoch: completed ones before it.
            progress: samples applied by then, its own among them, in epochs.
            update: made before it.
        """
        place = update if self.table.schedule_every == "update" else epoch
        rate = self.rates[bisect_right(self.starts, place) - 1]
        return rate * (progress / self.table.warm_up) if progress < self.table.warm_up else rate
