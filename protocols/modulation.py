"""Learning-rate modulation: what staleness and the number of learners do to the rate.

Source: rudra.txt §3.2 (hardsync and softsync factors), eq. 6, and footnote 3 of §5.1. Staleness below
one never raises a rate: every divisor is at least 1.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class Modulation:
    """How the learning rate depends on learners and staleness. This class itself changes nothing.

    Attributes:
        name: class attribute. Name of the modulation in a job (`protocol.modulation`).
        learners: λ, the number of learners; of compute groups where there are any.
        minibatch_size: μ, the samples of one gradient; kμ for a compute group of k learners.
        n: splitting parameter of n-softsync; λ under async.
        reference_batch_size: B, the batch size that the learning rate α0 was tuned for.
    """

    name: ClassVar[str] = "none"

    learners: int
    minibatch_size: float
    n: int
    reference_batch_size: int

    def __init_subclass__(cls) -> None:
        """Names a class that has no name of its own as the code does."""
        if "name" not in vars(cls):
            cls.name = cls.__qualname__

    @property
    def assumed_staleness(self) -> int | None:
        """Mean staleness that the modulation takes for granted; None: it goes by measured staleness, or by none."""
        return None

    @property
    def weighs(self) -> bool:
        """Whether the gradients of one update have different weights in their average."""
        return type(self).gradient_weight is not Modulation.gradient_weight

    def rate_factor(self, mean_staleness: float) -> float:
        """Factor on the scheduled learning rate of an update.

        Args:
            mean_staleness: ⟨σ⟩, the mean staleness of the update's gradients.
        """
        return 1.0

    def gradient_weight(self, staleness: int) -> float:
        """Weight of one gradient in the average, before the division by the number of gradients.

        Args:
            staleness: σ, the staleness of the gradient.
        """
        return 1.0


class Sqrt(Modulation):
    """α0 · sqrt(λμ/B): the larger the joint batch, the larger the rate (hardsync, §3.2)."""

    name = "sqrt"

    def rate_factor(self, mean_staleness: float) -> float:
        return math.sqrt(self.learners * self.minibatch_size / self.reference_batch_size)


class ByN(Modulation):
    """α0 / n: the nominal staleness of n-softsync (eq. 6)."""

    name = "n"

    @property
    def assumed_staleness(self) -> int | None:
        return self.n

    def rate_factor(self, mean_staleness: float) -> float:
        return 1.0 / self.n


class ByMeanStaleness(Modulation):
    """α0 / max(1, ⟨σ⟩): the measured staleness of the very gradients that are applied (eq. 6, measured)."""

    name = "mean_staleness"

    def rate_factor(self, mean_staleness: float) -> float:
        return 1.0 / max(1.0, mean_staleness)


class ByGradientStaleness(Modulation):
    """Each gradient enters the average with weight 1 / max(1, σ) (§5.1, footnote 3).

    An optimiser whose step does not depend on the gradient's scale would undo this: `make` refuses it.
    """

    name = "gradient_staleness"

    def gradient_weight(self, staleness: int) -> float:
        return 1.0 / max(1, staleness)


MODULATIONS: Mapping[str, type[Modulation]] = MappingProxyType(
    {kind.name: kind for kind in (Modulation, Sqrt, ByN, ByMeanStaleness, ByGradientStaleness)}
)
