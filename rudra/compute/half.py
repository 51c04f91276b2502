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


def round_to(vector: torch.Tensor, out: torch.Tensor, exponent: torch.Tensor) -> None:
    """Does the same as `to_half` without a wait for a device.

    Args:
        vector: (size,) float32.
        out: (size,) float16.
        exponent: (1,) int16, receives the exponent.
    """
    low, high = torch.aminmax(vector)
    peak = torch.maximum(-low, high)
    fits = (peak < OVERFLOWS) | ~peak.isfinite()
    exponent.copy_(torch.where(fits, 0, torch.frexp(peak).exponent - 15).reshape(1))
    out.copy_(torch.ldexp(vector, -exponent))


def unrounded(half: torch.Tensor, exponent: torch.Tensor, out: torch.Tensor) -> None:
    """Reverses `round_to`, into `out`, (size,) float32."""
    torch.ldexp(half.float(), exponent, out=out)


def from_half(half: torch.Tensor, exponent: int, out: torch.Tensor) -> None:
    """Reverses `to_half`, into `out`, (size,) float32."""
    out.copy_(half)
    if exponent:
        out.mul_(2.0**exponent)
