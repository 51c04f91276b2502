"""A model whose ranks check what neighbours lend them; apart, so that what launches them needs no torch."""

from typing import Any

from torch import nn

from rudra.compute.networks import mlp


def network(input_shape: tuple[int, ...], classes: int, **options: Any) -> nn.Module:
    """An mlp; every rank builds it before it sends anything, and from then on places carry checksums."""
    from rudra.mpi import leases

    leases.CHECKED = True
    return mlp(input_shape, classes, **options)
