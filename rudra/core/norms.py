"""Norms of gradients that are in parts."""

import math
from collections.abc import Iterable

import numpy as np


def single(value: float) -> float:
    """Returns a number with the precision of float32."""
    with np.errstate(over="ignore"):
        return float(np.float32(value))


def joint_norm(norms: Iterable[float], *, partial: bool = False) -> float:
    """Returns the norm of a gradient from the norms of its parts.

    It has the precision of float32, so that it is the same for other parts, in any order.

    Args:
        norms: Norms of the parts.
        partial: Whether these parts are only a part of the gradient. Then nothing is rounded yet.
    """
    norm = math.sqrt(math.fsum(norm * norm for norm in norms))
    return norm if partial else single(norm)
