"""Periods of averaging learners: their mini-batches, learning rates, and what each period contributes to an average."""

from protocols import Averaging
from rudra.core.records import Gradient
from rudra.core.schedule import Schedule


class MadeMinibatches:
    """Mini-batches of a replica since the last average, which count as one gradient.

    `first` is the first sample of the first mini-batch. With shares, samples of other learners are in between.

    Attributes:
        count: number of mini-batches.
        samples: number of their samples.
        first: first sample of the first one.
        loss: sum of their losses, each multiplied by its number of samples.
        errors: sum of their wrong samples.
        last: the last one that its learner computed by itself.
    """

    __slots__ = ("count", "errors", "first", "last", "loss", "samples")

    def __init__(self) -> None:
        self.count = self.samples = self.first = 0
        self.loss = self.errors = 0.0
        self.last: Gradient

    def add(self, gradient: Gradient) -> None:
        """Adds the next mini-batch."""
        self.last = gradient
        self.extend(
            1,
            gradient.samples,
            gradient.first,
            self.loss + gradient.loss * gradient.samples,
            self.errors + gradient.errors,
        )

    def extend(self, count: int, samples: int, first: int, loss: float, errors: float) -> None:
        """Adds the next mini-batches.

        Args:
            count: number of mini-batches.
            samples: number of their samples.
            first: first sample of the first one.
            loss, errors: new values of these attributes.
        """
        if not self.count:
            self.first = first
        self.count += count
        self.samples += samples
        self.loss, self.errors = loss, errors

    def joined(self, timestamp: int) -> Gradient:
        """Returns all mini-batches as one gradient: step of the last one, samples of all.

        Args:
            timestamp: timestamp of the weights that corrected the replica last.
        """
        about = (self.first, timestamp, -1, 1.0, self.loss / self.samples, self.errors, self.last.stream)
        return Gradient(-1, self.last.learner, self.samples, self.last.step, *about)


def joined(made: list[Gradient], timestamp: int) -> Gradient:
    """Joins a replica's mini-batches of a period into one gradient, as `MadeMinibatches.joined`."""
    whole = MadeMinibatches()
    for gradient in made:
        whole.add(gradient)
    return whole.joined(timestamp)


class AveragingPeriods:
    """Mini-batches of a replica, counted in periods. Each period ends with an average.

    Args:
        rule: averaging rule.
        together: number of samples in one mini-batch of all learners together.
        training_samples: number of samples in an epoch.
        number: number of averages begun.
        samples: number of samples of all learners in these averages.

    Attributes:
        number: number of averages begun.
        made: mini-batches of this period.
    """

    def __init__(self, rule: Averaging, together: int, training_samples: int, number: int, samples: int) -> None:
        self._length, self._together, self._training_samples = rule.period, together, training_samples
        self.number, self._samples = number, samples
        self.made = MadeMinibatches()

    @property
    def is_complete(self) -> bool:
        return self.made.count == self._length

    @property
    def is_last(self) -> bool:
        """Whether the next mini-batch ends the period."""
        return not self.local_steps

    @property
    def local_steps(self) -> int:
        """Number of mini-batches before the one that ends the period."""
        return self._length - 1 - self.made.count

    def rate(self, schedule: Schedule, made: int) -> float:
        """Returns the learning rate of the replica's step by the last of `made` mini-batches of this period."""
        samples, of_epoch = self._samples, self._training_samples
        progress = (samples + self._together * made) / of_epoch
        return schedule.rate(samples // of_epoch, progress, self.number)

    @property
    def epoch(self) -> int:
        """Number of epochs that are complete with the averages begun."""
        return self._samples // self._training_samples

    def end(self) -> Gradient:
        """Ends the period and returns its mini-batches as one gradient."""
        self._samples += self._together * self._length
        gradient, self.made = self.made.joined(self.number), MadeMinibatches()
        self.number += 1
        return gradient

    def follow(self, other: "AveragingPeriods", made: MadeMinibatches) -> None:
        """Takes over the periods of a learner that did the same, with the learner's own mini-batches of this period."""
        self.number, self._samples, self.made = other.number, other._samples, made

    def skip(self, periods: int) -> None:
        """Ends periods whose mini-batches were made elsewhere."""
        self._samples += periods * self._together * self._length
        self.number += periods

    def rates(self, schedule: Schedule, steps: int, after: int) -> list[float]:
        """Returns the learning rate of some steps in this epoch, after the next steps."""
        samples, of_epoch, length, together = self._samples, self._training_samples, self._length, self._together
        before = self.made.count + after
        epoch, places = samples // of_epoch, range(before + 1, before + steps + 1)
        progress = (samples + together * places[0]) / of_epoch
        if schedule.is_flat(progress):
            return [schedule.rate(epoch, progress, self.number + before // length)] * steps
        return [
            schedule.rate(epoch, (samples + together * made) / of_epoch, self.number + (made - 1) // length)
            for made in places
        ]

    def epoch_after(self, samples: int, periods: int) -> int:
        """Returns the number of complete epochs when `periods` more periods follow `samples` samples."""
        return (samples + periods * self._together * self._length) // self._training_samples
