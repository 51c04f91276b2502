"""Interface of a correction: a rule that changes each gradient before the owner of the weights uses it.

A protocol sees counts, never gradients. A correction sees the gradients. It is the place for delay compensation,
clipping of single gradients, noise, or any other rule about the gradients themselves.
"""

from typing import Any, NamedTuple

Vector = Any
"""One-dimensional torch tensor, float32. This package does not import torch, so the methods of the tensor must do."""


class GradientRecord(NamedTuple):
    """Facts about the gradient that is corrected.

    Attributes:
        learner: Number of the learner, from 0. With compute groups, the gradient is the mean of a group, and this is
            the number of the group.
        step: Number of the learner's mini-batch, from 0.
        timestamp: Timestamp of the weights that the gradient was computed from.
        staleness: Number of updates of the weights since then.
        samples: Number of samples of the gradient.
    """

    learner: int
    step: int
    timestamp: int
    staleness: int
    samples: int


class Correction:
    """Base class of all corrections. A subclass defines `correct`. Its keyword arguments are the job's
    `protocol.correction_options`.

    A correction with tensors that change during a run has a state, and defines `state` and `load_state`.

    Attributes:
        needs_pulled_weights: Whether `correct` needs the weights that the gradient was computed from. The server then
            keeps one copy for each learner.
    """

    needs_pulled_weights: bool = False

    def correct(self, gradient: Vector, weights: Vector, pulled_weights: Vector, record: GradientRecord) -> None:
        """Changes a gradient in place.

        All vectors have the same shape, (parameters,) float32. If several servers hold parts of the weights, each has
        a correction of its own, and the vectors are its part.

        Args:
            gradient: Gradient to change. If a server averages replicas, it is the weights minus the replica.
            weights: Present weights. They must not be changed.
            pulled_weights: Weights that the gradient was computed from. They must not be changed. None: the correction
                does not need them.
            record: Facts about the gradient.
        """
        raise NotImplementedError

    def state(self) -> dict[str, Vector]:
        """Returns the tensors that a checkpoint must keep, by name. Each is one-dimensional, float32."""
        return {}

    def load_state(self, state: dict[str, Vector]) -> None:
        """Continues from the state of a checkpoint.

        Args:
            state: Tensors that `state` returned. The correction may keep and change them.

        Raises:
            ValueError: It is no state of this correction.
        """
        raise ValueError("the correction has no state; define state() and load_state()")
