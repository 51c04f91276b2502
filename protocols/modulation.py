"""Modulation of the learning rate by staleness and by the number of learners.

Source: rudra.txt §3.2 (hardsync and softsync factors), eq. 6, and footnote 3 of §5.1. Staleness below one never raises
a rate: every divisor is at least 1.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class Modulation:
    """Dependence of the learning rate on learners and staleness. This class itself changes nothing.

    Attributes:
        name: Class attribute. Name of the modulation in a job (`protocol.modulation`).
        learners: λ, the number of learners, or of compute groups.
        minibatch_size: μ, the number of samples of one gradient, or kμ for a compute group of k learners.
        n: Splitting parameter of n-softsync, or λ under async.
        reference_batch_size: B, the batch size that the learning rate α0 was tuned for.
    """

    name: ClassVar[str] = "none"

    learners: int
    minibatch_size: float
    n: int
    reference_batch_size: int

    def __init_subclass__(cls) -> None:
        """Gives a class without a name the name of the class."""
        if "name" not in vars(cls):
            cls.name = cls.__qualname__

    @property
    def assumed_staleness(self) -> int | None:
        """Mean staleness that the modulation assumes. None: it uses measured staleness, or none."""
        return None

    @property
    def weighs(self) -> bool:
        """Whether the gradients of one update have different weights in their average."""
        return type(self).gradient_weight is not Modulation.gradient_weight

    def rate_factor(self, mean_staleness: float) -> float:
        """Returns the factor on the scheduled learning rate of an update.

        Args:
            mean_staleness: ⟨σ⟩, the mean staleness of the update's gradients.
        """
        return 1.0

    def gradient_weight(self, staleness: int) -> float:
        """Returns the weight of one gradient in the average, before the division by the number of gradients.

        Args:
            staleness: σ, the staleness of the gradient.
        """
        return 1.0


class Sqrt(Modulation):
    """α0 · sqrt(λμ/B): the rate grows with the joint batch (hardsync, §3.2)."""

    name = "sqrt"

    def rate_factor(self, mean_staleness: float) -> float:
        return math.sqrt(self.learners * self.minibatch_size / self.reference_batch_size)


class ByN(Modulation):
    """α0 / n: division by the nominal staleness of n-softsync (eq. 6)."""

    name = "n"

    @property
    def assumed_staleness(self) -> int | None:
        return self.n

    def rate_factor(self, mean_staleness: float) -> float:
        return 1.0 / self.n


class ByMeanStaleness(Modulation):
    """α0 / max(1, ⟨σ⟩): division by the measured staleness of the applied gradients (eq. 6, measured)."""

    name = "mean_staleness"

    def rate_factor(self, mean_staleness: float) -> float:
        return 1.0 / max(1.0, mean_staleness)


class ByGradientStaleness(Modulation):
    """Weight 1 / max(1, σ) of each gradient in the average (§5.1, footnote 3).

    An optimiser whose step does not depend on the gradient's scale would cancel this effect. `make` refuses it.
    """

    name = "gradient_staleness"

    def gradient_weight(self, staleness: int) -> float:
        return 1.0 / max(1, staleness)


MODULATIONS: Mapping[str, type[Modulation]] = MappingProxyType(
    {kind.name: kind for kind in (Modulation, Sqrt, ByN, ByMeanStaleness, ByGradientStaleness)}
)
