"""Buffers of a module: finding them if the module replaces them, and running a module without changing them."""

from collections.abc import MutableMapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from rudra.data.trees import called


class ModuleBuffer(NamedTuple):
    """A buffer of a module.

    Attributes:
        name: Name in the whole module.
        kept: Dictionary that holds the buffer in its part of the module.
        key: Name in this dictionary.
        tensor: Tensor that was found.
    """

    name: str
    kept: MutableMapping[str, torch.Tensor | None]  # TorchScript's modules have a similar object
    key: str
    tensor: torch.Tensor

    def replaced(self) -> torch.Tensor | None:
        """Returns the tensor that the module put in the buffer's place, if any, and restores the original one."""
        found = self.kept[self.key]
        if found is self.tensor:
            return None
        self.kept[self.key] = self.tensor
        return found


def buffers_of(module: nn.Module) -> list[ModuleBuffer]:
    """Returns the buffers in the order of `named_buffers`. A buffer shared by two parts of the module appears once."""
    found: dict[int, ModuleBuffer] = {}
    for path, owner in module.named_modules():
        for key, tensor in owner.named_buffers(recurse=False):
            name = f"{path}.{key}" if path else key
            found.setdefault(id(tensor), ModuleBuffer(name, owner._buffers, key, tensor))
    return list(found.values())


@torch.no_grad()
def tried(module: nn.Module, inputs: Any) -> Any:
    """Returns the output of a module in evaluation mode, without changes to the module or its buffers.

    Only lazy layers change: they get their shapes and initial weights.
    """
    kept = [buffer for buffer in buffers_of(module) if not is_lazy(buffer.tensor)]
    training, before = module.training, [(buffer, buffer.tensor.clone()) for buffer in kept]
    module.eval()
    try:
        return called(module, inputs)
    finally:
        module.train(training)
        for buffer, values in before:
            buffer.replaced()
            buffer.tensor.copy_(values)


def changed(name: str) -> str:
    """Returns the message for a model that changes this parameter itself."""
    return (
        f"[model] changes {name} in `forward`, as an Embedding with max_norm or `weight.data = …` does; only updates "
        "may change weights; valid: compute with a changed copy"
    )
