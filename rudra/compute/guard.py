"""Detection of models that change their own weights in a pass."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from rudra.compute.buffers import changed
from rudra.core.layout import Entry
from rudra.errors import ConfigError


class Untouched(NamedTuple):
    """The state of the parameters before a pass.

    Attributes:
        versions: Torch's version counter of each parameter. In-place changes that autograd sees increase it.
        checksum: Sum over the bit patterns of all parameters, or None. It detects changes through `weight.data`.
    """

    versions: list[int]
    checksum: int | None


class WeightsGuard:
    """A check that a pass does not change the parameters.

    Args:
        layout: Entries of the vector that holds the parameters.
        parameters: Parameters of the module, in the order of the layout's first entries.
        parameter_count: Number of floats in the parameters.

    Attributes:
        racing: Whether other workers may write to the weights during a pass.
    """

    def __init__(self, layout: Sequence[Entry], parameters: Sequence[torch.Tensor], parameter_count: int) -> None:
        self._layout, self._parameters, self._count = layout, parameters, parameter_count
        self._passes = 0
        self._sums = True
        self.racing = False

    @property
    def sums_next(self) -> bool:
        """Whether the next pass computes the checksum, so that all weights must be known before it."""
        return self._sums and not self.racing and not (self._passes + 1) & self._passes

    @contextmanager
    def without_sums(self) -> Iterator[None]:
        """Skips the checksums of passes, because the host waits for each of them."""
        self._sums = False
        try:
            yield
        finally:
            self._sums = True

    def before(self, weights: torch.Tensor) -> Untouched:
        """Records the state of the parameters.

        The checksum reads all parameters, so only passes 1, 2, 4, 8, … compute it.
        """
        seldom = self.sums_next
        self._passes += 1
        return Untouched([each._version for each in self._parameters], self._sum_of_bits(weights) if seldom else None)

    def check(self, before: Untouched, weights: torch.Tensor, views: Sequence[torch.Tensor]) -> None:
        """Compares the parameters with their state before the pass.

        Args:
            before: Recorded state.
            weights: Bound vector, (size,) float32.
            views: Views of that vector.

        Raises:
            ConfigError: The model assigns or changes a parameter in `forward`, without the knowledge of the weights'
                owner.
        """
        for entry, parameter, view, version in zip(
            self._layout, self._parameters, views, before.versions, strict=False
        ):
            if parameter.data_ptr() != view.data_ptr():
                if self.racing or not torch.equal(parameter, view):
                    raise ConfigError(changed(entry.name))
                parameter.data = view  # same values in other memory, as after LSTM.flatten_parameters
            elif parameter._version != version:
                raise ConfigError(changed(entry.name))
        if before.checksum is not None and before.checksum != self._sum_of_bits(weights):
            raise ConfigError(changed("a parameter"))

    def _sum_of_bits(self, weights: torch.Tensor) -> int:
        return int(weights[: self._count].view(torch.int32).sum())
