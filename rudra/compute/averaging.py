"""Means of gradients, and slices of long vectors that fit into a processor's cache."""

from collections.abc import Iterator, Sequence

import torch

CACHE_LINE = 64

CHUNK = 1 << 20
"""Number of elements in a slice: few enough to fit into a processor's cache, enough to hide the cost of a call."""


Addends = tuple[Sequence[torch.Tensor], Sequence[int]]
"""Vectors to add, and the factor of each."""


def slices(start: int, stop: int, most: int) -> Iterator[slice]:
    """Yields slices from `start` to `stop` of at most `most` elements."""
    for first in range(start, stop, most):
        yield slice(first, min(first + most, stop))


def average(
    into: torch.Tensor,
    gradients: Sequence[torch.Tensor],
    samples: Sequence[int],
    total: torch.Tensor | None = None,
    sums: Sequence[Sequence[int]] = (),
) -> None:
    """Computes the mean of gradients, weighted by samples, added in order.

    All operations are elementwise and round deterministically: a slice is bitwise identical to that slice of the whole.

    Args:
        into: (size,) float32. It may be one of the gradients. The other gradients do not change.
        gradients: (size,) float32 each.
        samples: Number of samples of each gradient.
        total: (size,) float32, scratch memory for the sum, separate from the gradients. It may be `into`.
        sums: Positions of gradients that are added first, as in `Plan.partial_sums`. By default these are all.
    """
    factors = factors_of(samples)
    places = sums or [range(len(gradients))]
    finish_mean(
        into,
        [([gradients[i] for i in of], [factors[i] for i in of]) for of in places],
        sum(factors),
        torch.empty_like(into) if total is None else total,
    )


def factors_of(samples: Sequence[int]) -> Sequence[int]:
    """Returns the factor of each gradient before the sum, or none if all have the same number of samples."""
    return [1] * len(samples) if len(set(samples)) == 1 else samples


def added(addends: Addends, room: torch.Tensor) -> torch.Tensor:
    """Computes a sum, added in order.

    Args:
        addends: Vectors and factors. A single vector without a factor is returned itself.
        room: Scratch memory for the sum, separate from the vectors.
    """
    (first, *others), factors = addends
    if any(factor != 1 for factor in factors):
        torch.mul(first, factors[0], out=room)
        for vector, factor in zip(others, factors[1:], strict=True):
            room.add_(vector * factor)
    elif others:
        torch.add(first, others[0], out=room)
        for vector in others[1:]:
            room.add_(vector)
    else:
        return first
    return room


def finish_mean(into: torch.Tensor, sums: Sequence[Addends], divisor: int, total: torch.Tensor) -> None:
    """Adds partial sums in order, and scales once: the last step of `average`, with its arguments."""
    first, *others = sums
    whole = added(first, total)
    for of in others:
        whole = torch.add(whole, added(of, torch.empty_like(into)), out=total)
    if divisor != 1 or whole.data_ptr() != into.data_ptr():
        torch.mul(whole, 1 / divisor, out=into)
