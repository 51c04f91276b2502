"""Vectors as float16, for the wire: rounded, and divided by a power of two where they would overflow."""

import math

import torch

OVERFLOWS = 65520.0
"""The smallest number that float16 rounds to infinity."""


def to_half(vector: torch.Tensor, out: torch.Tensor) -> int:
    """Writes a vector as float16.

    If the largest number exceeds float16's range, the vector is divided by a power of two first, so that it keeps its
    direction. The smallest numbers may then become zero.

    Args:
        vector: (size,) float32. Infinite values and NaN do not change.
        out: (size,) float16.

    Returns:
        The exponent of that power, for `from_half`, or 0 if all numbers fit.
    """
    low, high = torch.aminmax(vector)
    peak = max(-low.item(), high.item())
    exponent = math.frexp(peak)[1] - 15 if OVERFLOWS <= peak < math.inf else 0
    out.copy_(vector * 2.0**-exponent if exponent else vector)
    return exponent


def from_half(half: torch.Tensor, exponent: int, out: torch.Tensor) -> None:
    """Reverses `to_half`, into `out`, (size,) float32."""
    out.copy_(half)
    if exponent:
        out.mul_(2.0**exponent)
