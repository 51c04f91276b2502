"""Update rules: torch's optimisers, stepping over one flat vector."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rudra.config import OPTIMIZERS, OptimizerTable
from rudra.errors import ConfigError

if TYPE_CHECKING:
    import torch

_WITH_MOMENTUM = {"sgd", "rmsprop"}
_NOT_OPTIONS = {"params", "lr", "momentum", "weight_decay", "fused", "foreach", "capturable", "differentiable"}
_TAIL = 16  # elements in a cache line, the unit in which torch hands a vector to its threads


class UpdateRule:
    """Applies gradients to flat weights, in place.

    SGD uses torch's fused kernel and equals plain `torch.optim.SGD` over separate parameters bit for bit: the kernel
    rounds differently only in the elements behind the last full cache line, so these go through the plain one.
    Adam, AdamW and Adagrad are fused as well, and may differ from their plain forms in the last bit.

    Args:
        table: which optimiser, with its options; learning rates are given with each step.
        weights: (P,) float32, contiguous, lent for the lifetime of the rule.

    Raises:
        ConfigError: no such optimiser, or options that it does not take.
    """

    def __init__(self, table: OptimizerTable, weights: torch.Tensor) -> None:
        import torch

        self.scale_invariant = table.scale_invariant
        cls: Any = getattr(torch.optim, OPTIMIZERS[table.name])
        options = _options(table, cls)
        aligned = len(weights) - (len(weights) % _TAIL if table.name == "sgd" else 0)
        fusible = "fused" in inspect.signature(cls).parameters
        self._slices: list[slice] = []
        groups: list[dict[str, Any]] = []
        for part, fused in ((slice(0, aligned), True), (slice(aligned, len(weights)), False)):
            if part.start < part.stop:
                self._slices.append(part)
                flags = {"fused": fused} if fusible else {}
                groups.append({"params": [torch.nn.Parameter(weights[part])], **flags})
        try:
            for fused in {fusible, False}:  # an option may be taken, and fail in the first step
                trial = torch.nn.Parameter(torch.zeros(_TAIL))
                trial.grad = torch.zeros(_TAIL)
                flags = {"fused": fused} if fusible else {}
                cls([trial], lr=table.learning_rate, foreach=False, **flags, **options).step()
            self.optimizer: torch.optim.Optimizer = cls(groups, lr=table.learning_rate, foreach=False, **options)
        except Exception as error:  # torch checks some options, and stumbles over others
            raise ConfigError(f"[optimizer] {table.name}: {' '.join(str(error).split())}") from None

    def step(self, gradient: torch.Tensor, learning_rate: float) -> None:
        """Updates the weights.

        Args:
            gradient: (P,) float32; read only, and free again when this returns.
            learning_rate: of this step, with every modulation in it.
        """
        for group, part in zip(self.optimizer.param_groups, self._slices, strict=True):
            group["params"][0].grad = gradient[part]
            group["lr"] = learning_rate
        self.optimizer.step()
        for group in self.optimizer.param_groups:
            group["params"][0].grad = None

    def move(self, weights: torch.Tensor) -> None:
        """Goes on with weights in another place, which hold the same."""
        for group, part in zip(self.optimizer.param_groups, self._slices, strict=True):
            group["params"][0].data = weights[part]

    def prepare(self) -> None:
        """Allocates and touches SGD's momentum, so that the first update takes no longer than the others.

        Velocity of zero is what the first step starts from, except under dampening, which torch does not apply to that
        step; there, and in Adam and RMSprop, the first step allocates.
        """
        import torch

        for group in self.optimizer.param_groups:
            parameter = group["params"][0]
            if group.get("dampening") == 0 and group["momentum"] > 0:
                self.optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

    def state(self) -> dict[str, torch.Tensor]:
        """What the optimiser remembers: its own tensors, by a name that says which part of the weights they are for."""
        import torch

        found = {}
        for place, group in enumerate(self.optimizer.param_groups):
            for key, value in self.optimizer.state[group["params"][0]].items():
                if isinstance(value, torch.Tensor):
                    found[f"{key}.{place}"] = value
        return found

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Goes on from what `state` gave, in this process or another one.

        Raises:
            ValueError: it is not that of this optimiser and these weights.
        """
        sizes = [part.stop - part.start for part in self._slices]
        for name, value in state.items():
            key, _, place = name.rpartition(".")
            if not (place.isdigit() and int(place) < len(sizes) and value.numel() in {1, sizes[int(place)]}):
                raise ValueError(f"optimiser state {name} does not fit")
            parameter = self.optimizer.param_groups[int(place)]["params"][0]
            single = value.numel() == 1 and (key == "step" or sizes[int(place)] > 1)
            self.optimizer.state[parameter][key] = value.reshape(() if single else (-1,)).clone()

    def state_bytes(self) -> int:
        """Memory that the optimiser's state takes now."""
        import torch

        values = (value for state in self.optimizer.state.values() for value in state.values())
        return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))


def _options(table: OptimizerTable, cls: Any) -> dict[str, Any]:
    """Keyword arguments for the optimiser's class, checked against its signature."""
    valid = [key for key in inspect.signature(cls).parameters if key not in _NOT_OPTIONS]
    for key in table.options:
        if key not in valid:
            raise ConfigError(f"[optimizer] unknown option '{key}' of {table.name}; valid: {', '.join(valid)}")
    if table.momentum and table.name not in _WITH_MOMENTUM:
        with_momentum = " and ".join(sorted(_WITH_MOMENTUM))
        raise ConfigError(f"[optimizer] momentum = {table.momentum} is for {with_momentum} only, not {table.name}")
    momentum = {"momentum": table.momentum} if table.name in _WITH_MOMENTUM else {}
    return {"weight_decay": table.weight_decay, **momentum, **table.options}
