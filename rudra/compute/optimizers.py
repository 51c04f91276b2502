"""Torch's optimisers, and users' own ones, as the table of a job names them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rudra import plugins
from rudra.compute.runs import CACHE_LINE
from rudra.errors import ConfigError, meant
from rudra.job.tables import OPTIMIZERS, WITH_MOMENTUM, OptimizerTable

if TYPE_CHECKING:
    import torch

_NOT_OPTIONS = {"params", "lr", "momentum", "weight_decay", "fused", "foreach", "capturable", "differentiable"}


def optimizer_of(table: OptimizerTable) -> tuple[Any, dict[str, Any]]:
    """Returns the optimiser class of a table, and its keyword arguments except the learning rate.

    Raises:
        ConfigError: There is no such class, or it does not accept them.
    """
    import torch

    if table.name in OPTIMIZERS:
        cls = getattr(torch.optim, OPTIMIZERS[table.name])
        return uncompiled(cls), _options(table, cls)
    cls = plugins.choose("[optimizer] name", table.name, OPTIMIZERS)
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise ConfigError(f"[optimizer] name: {table.name} is not a class that inherits from torch.optim.Optimizer")
    return cls, _options(table, cls)


def _options(table: OptimizerTable, cls: Any) -> dict[str, Any]:
    """Returns keyword arguments for the optimiser's class, checked against its signature."""
    valid = [key for key in inspect.signature(cls).parameters if key not in _NOT_OPTIONS]
    for key in table.options:
        if key not in valid:
            hint = meant(key, valid)
            raise ConfigError(f"[optimizer] unknown option '{key}' of {table.name}; valid: {', '.join(valid)}{hint}")
    takes = inspect.signature(cls).parameters
    has_momentum = table.name in WITH_MOMENTUM if table.name in OPTIMIZERS else "momentum" in takes
    decays = [table.weight_decay, *(group.weight_decay for group in table.groups)]
    if any(decays) and "weight_decay" not in takes:
        raise ConfigError(f"[optimizer] weight_decay: {table.name} does not take it; valid: 0")
    if table.momentum and not has_momentum:
        text = f"momentum = {table.momentum:g} is not supported with {table.name}"
        raise ConfigError(f"[optimizer] {text}; use momentum = 0")
    momentum = {"momentum": table.momentum} if has_momentum else {}
    decay = {"weight_decay": table.weight_decay} if "weight_decay" in takes else {}
    return {**decay, **momentum, **table.options}


def check_own(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    """Checks that a user's optimiser works on parts of a flat vector, and that a checkpoint can hold its state.

    Raises:
        ValueError: It does not, or its state contains other things than tensors.
    """
    import torch

    generator = torch.Generator().manual_seed(0)
    start, *gradients = torch.randn(4, 2 * CACHE_LINE, generator=generator).unbind()
    whole = torch.nn.Parameter(start.clone())
    halves = [torch.nn.Parameter(half.clone()) for half in torch.split(start, CACHE_LINE)]
    optimizers = [make([whole]), make(halves)]
    before = [_held(optimizer) for optimizer in optimizers]
    for gradient in gradients:
        whole.grad = gradient.clone()
        for half, part in zip(halves, torch.split(gradient, CACHE_LINE), strict=True):
            half.grad = part.clone()
        for optimizer in optimizers:
            optimizer.step()
    if not torch.equal(whole.data, torch.cat([half.data for half in halves])):
        raise ValueError(
            "its step for an element depends on other elements, but Rudra steps over parts of a flat vector; valid: "
            "optimisers that treat each element separately"
        )
    for key, value in optimizers[0].state[whole].items():
        known = isinstance(value, torch.Tensor) and value.dtype == torch.float32 and value.numel() in {1, len(whole)}
        if not known:
            raise ValueError(
                f"its state '{key}' is no float32 tensor of one number or of the parameter's shape, which a checkpoint "
                "could hold"
            )
    if [_held(optimizer) for optimizer in optimizers] != before:
        raise ValueError("a step changes more of the optimiser than its `state`, and a checkpoint holds only `state`")


def _held(optimizer: torch.optim.Optimizer) -> list[str]:
    """Describes the attributes of an optimiser outside its state, to detect changes."""
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    own = {key: value for key, value in vars(optimizer).items() if isinstance(value, bool | int | float | str | list)}
    return [repr(groups), repr({key: value for key, value in own.items() if key != "param_groups"})]


def uncompiled(cls: Any) -> Any:
    """Returns an optimiser without torch's compiler wrappers, whose import takes over a second."""
    import torch

    bare = {name: inspect.unwrap(getattr(cls, name)) for name in ("add_param_group", "zero_grad")}
    return type(cls.__name__, (cls,), bare | {"step": torch.no_grad()(inspect.unwrap(cls.step))})
