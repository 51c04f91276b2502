"""Delay compensation of stale gradients: DC-ASGD (Zheng et al. 2017).

A stale gradient g was computed at the weights that its learner pulled, but is applied to the present weights w. The
correction is the first term of the Taylor series that leads from one to the other, with the Hessian approximated by the
diagonal of the outer product of gradients: g + λ · g ⊙ g ⊙ (w − w_pulled).

Source: "Asynchronous Stochastic Gradient Descent with Delay Compensation", DC-ASGD-c (constant λ) and DC-ASGD-a
(λ0 / √(mean square + ε), element by element, ε = 10⁻⁷).
"""

from typing import Any

from protocols.correction import Correction, GradientRecord

EPSILON = 1e-7


class DelayCompensation(Correction):
    """DC-ASGD with a constant or an adaptive coefficient.

    Args:
        coefficient: λ, or λ0 if it is adaptive. 0: gradients do not change.
        adaptive: Whether to divide λ0 by the root of a running mean of squared gradients.
        decay: Factor m of the running mean with each gradient, 0 <= m < 1. Only with `adaptive`.
    """

    needs_pulled_weights = True

    def __init__(self, coefficient: float = 0.04, adaptive: bool = False, decay: float = 0.95) -> None:
        if coefficient < 0:
            raise ValueError(f"coefficient = {coefficient}; valid: 0 and more")
        if not 0 <= decay < 1:
            raise ValueError(f"decay = {decay}; valid: 0 <= decay < 1")
        self.coefficient, self.adaptive, self.decay = coefficient, adaptive, decay
        self.mean_square: Any = None

    def correct(self, gradient: Any, weights: Any, pulled_weights: Any, record: GradientRecord) -> None:
        square = gradient * gradient
        compensation = square * (weights - pulled_weights)
        if self.adaptive:
            square *= 1 - self.decay
            self.mean_square = square if self.mean_square is None else square.add_(self.mean_square, alpha=self.decay)
            compensation /= (self.mean_square + EPSILON).sqrt()
        gradient.add_(compensation, alpha=self.coefficient)

    def state(self) -> dict[str, Any]:
        return {} if self.mean_square is None else {"mean_square": self.mean_square}

    def load_state(self, state: dict[str, Any]) -> None:
        self.mean_square = state["mean_square"]


CORRECTION = DelayCompensation
