"""Means of gradients, and the slices in which a processor's cache has room for long vectors."""

from collections.abc import Iterator, Sequence

import torch

CACHE_LINE = 64

CHUNK = 1 << 20
"""Elements of a slice: few enough that a processor's cache has room for them, enough to hide what a call costs."""


def slices(start: int, stop: int, most: int) -> Iterator[slice]:
    """Of these elements, so many at most each."""
    for first in range(start, stop, most):
        yield slice(first, min(first + most, stop))


def average(
    into: torch.Tensor, gradients: Sequence[torch.Tensor], samples: Sequence[int], total: torch.Tensor | None = None
) -> None:
    """The mean of gradients, weighted by samples, added in order.

    Only operations on single elements that round in one way: a slice gives the bits that the whole gives.

    Args:
        into: (size,) float32; may be one of the gradients, the others are left as they are.
        gradients: (size,) float32 each.
        samples: of each.
        total: (size,) float32, room for the sum, and none of the gradients; may be `into`.
    """
    if total is None:
        total = torch.empty_like(into)
    (first, *others), (count, *counts) = gradients, samples
    alike = all(other == count for other in counts)
    if not alike:
        torch.mul(first, count, out=total)
        for gradient, count in zip(others, counts, strict=True):
            total.add_(gradient * count)
    elif others:
        torch.add(first, others[0], out=total)
        for gradient in others[1:]:
            total.add_(gradient)
    else:
        total = first
    torch.mul(total, 1 / (len(samples) if alike else sum(samples)), out=into)
