"""Means of gradients, and the slices in which a processor's cache has room for long vectors."""

from collections.abc import Iterator, Sequence

import torch

CACHE_LINE = 64

CHUNK = 1 << 20
"""Elements of a slice: few enough that a processor's cache has room for them, enough to hide what a call costs."""


Addends = tuple[Sequence[torch.Tensor], Sequence[int]]
"""Vectors that are added, and what each is multiplied with."""


def slices(start: int, stop: int, most: int) -> Iterator[slice]:
    """Of these elements, so many at most each."""
    for first in range(start, stop, most):
        yield slice(first, min(first + most, stop))


def average(
    into: torch.Tensor,
    gradients: Sequence[torch.Tensor],
    samples: Sequence[int],
    total: torch.Tensor | None = None,
    sums: Sequence[Sequence[int]] = (),
) -> None:
    """The mean of gradients, weighted by samples, added in order.

    Only operations on single elements that round in one way: a slice gives the bits that the whole gives.

    Args:
        into: (size,) float32; may be one of the gradients, the others are left as they are.
        gradients: (size,) float32 each.
        samples: of each.
        total: (size,) float32, room for the sum, and none of the gradients; may be `into`.
        sums: places of the gradients that are added first, as `Plan.partial_sums` has them; by default all.
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
    """What each gradient is multiplied with before they are added: nothing where all are of as many samples."""
    return [1] * len(samples) if len(set(samples)) == 1 else samples


def added(addends: Addends, room: torch.Tensor) -> torch.Tensor:
    """A sum, added in order.

    Args:
        addends: of which a single one that is not multiplied is the sum itself.
        room: for the sum; none of the vectors.
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
    """Adds partial sums in order, and scales once: the last step of `average`, whose arguments these are."""
    first, *others = sums
    whole = added(first, total)
    for of in others:
        whole = torch.add(whole, added(of, torch.empty_like(into)), out=total)
    torch.mul(whole, 1 / divisor, out=into)
