"""Learning rates before modulation: what the schedule and the warm-up make of α0."""

import inspect
import math
from bisect import bisect_right
from collections.abc import Sequence

from protocols import Protocol
from rudra.errors import ConfigError
from rudra.job.job import Job, find
from rudra.job.tables import OptimizerTable
from topologies import Plan


class Schedule:
    """The learning rate as a function of how far training is, and of nothing else.

    Milestones count all epochs; those of a plateau are told when tests say so (`lower`). Cosine and torch's other
    schedulers are stepped once an epoch, and begin with the first epoch that the warm-up has no part in; or once an
    update, whose numbers then stand in the place of epochs.

    Args:
        table: [optimizer] of the job.
        epochs: of the job.
        updates: that these will take; None: nobody can tell.

    Attributes:
        starts: completed epochs (or updates) from which the rates hold, ascending from 0.
        rates: one for each, after the warm-up.

    Raises:
        ConfigError: the schedule is not there, does not take its options, or gives no rates.
    """

    def __init__(self, table: OptimizerTable, epochs: int, updates: int | None = None) -> None:
        self._warm_up = table.warm_up
        self._by_update = table.schedule_every == "update"
        self._table = table
        if table.schedule in ("step", "plateau"):
            self.lower(table.milestones)
            return
        if self._by_update:
            steps = updates or table.schedule_options.get("total_steps")
            if not isinstance(steps, int) or steps < 1:
                where = (
                    "[optimizer] schedule_every = 'update': how many updates the protocol makes of an epoch is its own"
                )
                raise ConfigError(f"{where}; schedule_options.total_steps must say how many there are in all")
            self.rates = tuple(_stepped(table, steps))
            self.starts = tuple(range(steps))
            return
        first = min(math.ceil(table.warm_up), epochs - 1)
        self.rates = tuple(_stepped(table, epochs - first))
        self.starts = (0, *range(first + 1, epochs))

    def lower(self, milestones: Sequence[int]) -> None:
        """The rate is multiplied by the job's factor after each of these epochs, and of no others."""
        self.starts = (0, *milestones)
        self.rates = tuple(self._table.learning_rate * self._table.factor**count for count in range(len(self.starts)))

    def rate(self, epoch: int, progress: float, update: int = 0) -> float:
        """The rate of an update.

        Args:
            epoch: completed ones before it.
            progress: samples applied by then, its own among them, in epochs.
            update: made before it.
        """
        rate = self.rates[bisect_right(self.starts, update if self._by_update else epoch) - 1]
        return rate * (progress / self._warm_up) if progress < self._warm_up else rate


def expected_updates(job: Job, plan: Plan, training_samples: int) -> int | None:
    """Updates of a run in which every update is of c gradients; None where the protocol decides that otherwise."""
    protocol = job.make_protocol(plan)
    if type(protocol).update_due is not Protocol.update_due:
        return None
    samples = protocol.gradients_per_update * job.training.minibatch_size * len(plan.learners) // plan.workers
    return -(-job.training.epochs * training_samples // samples)


def _stepped(table: OptimizerTable, epochs: int) -> list[float]:
    """What one of torch's schedulers gives for each epoch, or each update."""
    import torch  # takes a second, and milestones need none

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=table.learning_rate)
    make, options = find("[optimizer] schedule", table.schedule), table.schedule_options
    if table.schedule == "cosine":
        make, options = torch.optim.lr_scheduler.CosineAnnealingLR, {"T_max": epochs, **options}
    try:
        takes = inspect.signature(make).parameters if callable(make) else ()
        if "total_steps" in takes and not options.keys() & {"total_steps", "epochs"}:
            options = {"total_steps": epochs, **options}
        scheduler = make(optimizer, **options)
        rates = [float(optimizer.param_groups[0]["lr"])]
        while len(rates) < epochs:
            optimizer.step()  # torch warns of a scheduler that is ahead of its optimiser
            scheduler.step()
            rates.append(float(optimizer.param_groups[0]["lr"]))
    except Exception as error:  # the scheduler may be anybody's
        raise ConfigError(f"[optimizer] schedule: {' '.join(str(error).split())}") from error
    for step, rate in enumerate(rates):
        if not (math.isfinite(rate) and rate >= 0):
            after = f"{step} {table.schedule_every}s"
            raise ConfigError(f"[optimizer] schedule: gives a rate of {rate} after {after}; valid: >= 0")
    return rates
