"""Finds models that change their own weights in a pass."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from rudra.compute.buffers import changed
from rudra.core.layout import Entry
from rudra.errors import ConfigError


class Untouched(NamedTuple):
    """The state of the parameters before a pass.

    Attributes:
        versions: the counter of each parameter, which torch raises for changes in place that autograd sees.
        checksum: the sum of the bits of all parameters, or None. It finds changes through `weight.data`.
    """

    versions: list[int]
    checksum: int | None


class WeightsGuard:
    """Makes sure that a pass leaves the parameters as they were.

    Args:
        layout: the entries of the vector that holds the parameters.
        parameters: the module's, in the order of the layout's first entries.
        parameter_count: how many numbers they are.

    Attributes:
        racing: whether other workers may write to the weights during a pass.
    """

    def __init__(self, layout: Sequence[Entry], parameters: Sequence[torch.Tensor], parameter_count: int) -> None:
        self._layout, self._parameters, self._count = layout, parameters, parameter_count
        self._passes = 0
        self.racing = False

    def before(self, weights: torch.Tensor) -> Untouched:
        """Notes the state of the parameters.

        The checksum reads all of them, so passes 1, 2, 4, 8, … have one.
        """
        self._passes += 1
        seldom = not self.racing and not self._passes & (self._passes - 1)
        return Untouched([each._version for each in self._parameters], self._sum_of_bits(weights) if seldom else None)

    def check(self, before: Untouched, weights: torch.Tensor, views: Sequence[torch.Tensor]) -> None:
        """Compares the parameters with their state before the pass.

        Args:
            before: that state.
            weights: the bound vector, (size,) float32.
            views: of that vector.

        Raises:
            ConfigError: the model assigns or changes a parameter in `forward`. The weights' owner would not know.
        """
        for entry, parameter, view, version in zip(
            self._layout, self._parameters, views, before.versions, strict=False
        ):
            if parameter.data_ptr() != view.data_ptr():
                if self.racing or not torch.equal(parameter, view):
                    raise ConfigError(changed(entry.name))
                parameter.data = view  # the same values in other memory, as LSTM.flatten_parameters places them
            elif parameter._version != version:
                raise ConfigError(changed(entry.name))
        if before.checksum is not None and before.checksum != self._sum_of_bits(weights):
            raise ConfigError(changed("a parameter"))

    def _sum_of_bits(self, weights: torch.Tensor) -> int:
        return int(weights[: self._count].view(torch.int32).sum())
