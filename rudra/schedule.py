"""Learning rates before modulation: what the schedule and the warm-up make of α0."""

import math
from bisect import bisect_right

from rudra.config import find
from rudra.errors import ConfigError
from rudra.tables import OptimizerTable


class Schedule:
    """The learning rate as a function of how far training is, and of nothing else.

    Milestones count all epochs. Cosine and torch's other schedulers are stepped once an epoch, and begin with the first
    epoch that the warm-up has no part in.

    Args:
        table: [optimizer] of the job.
        epochs: of the job.

    Attributes:
        starts: completed epochs from which the rates hold, ascending from 0.
        rates: one for each, after the warm-up.

    Raises:
        ConfigError: the schedule is not there, does not take its options, or gives no rates.
    """

    def __init__(self, table: OptimizerTable, epochs: int) -> None:
        self._warm_up = table.warm_up
        if table.schedule == "step":
            self.starts = (0, *table.milestones)
            self.rates = tuple(table.learning_rate * table.factor**count for count in range(len(self.starts)))
            return
        first = min(math.ceil(table.warm_up), epochs - 1)
        self.rates = tuple(_stepped(table, epochs - first))
        self.starts = (0, *range(first + 1, epochs))

    def rate(self, epoch: int, progress: float) -> float:
        """The rate of an update.

        Args:
            epoch: completed ones before it.
            progress: samples applied by then, its own among them, in epochs.
        """
        rate = self.rates[bisect_right(self.starts, epoch) - 1]
        return rate * (progress / self._warm_up) if progress < self._warm_up else rate


def _stepped(table: OptimizerTable, epochs: int) -> list[float]:
    """What one of torch's schedulers gives for each epoch."""
    import torch  # takes a second, and milestones need none

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=table.learning_rate)
    make, options = find("[optimizer] schedule", table.schedule), table.schedule_options
    if table.schedule == "cosine":
        make, options = torch.optim.lr_scheduler.CosineAnnealingLR, {"T_max": epochs, **options}
    try:
        scheduler = make(optimizer, **options)
        rates = [float(optimizer.param_groups[0]["lr"])]
        while len(rates) < epochs:
            optimizer.step()  # torch warns of a scheduler that is ahead of its optimiser
            scheduler.step()
            rates.append(float(optimizer.param_groups[0]["lr"]))
    except Exception as error:  # the scheduler may be anybody's
        raise ConfigError(f"[optimizer] schedule: {' '.join(str(error).split())}") from error
    for epoch, rate in enumerate(rates):
        if not (math.isfinite(rate) and rate >= 0):
            raise ConfigError(f"[optimizer] schedule: gives a rate of {rate} after {epoch} epochs; valid: >= 0")
    return rates
