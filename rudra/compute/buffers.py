"""Buffers of a module, which it may change in place or make anew: where they are, and trying it without a trace."""

from collections.abc import MutableMapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from rudra.data.trees import called


class ModuleBuffer(NamedTuple):
    """A tensor that a module keeps.

    Attributes:
        name: in the whole module.
        kept: by name, what the part of the module has that it belongs to.
        key: its name there.
        tensor: as it was found.
    """

    name: str
    kept: MutableMapping[str, torch.Tensor | None]  # TorchScript's modules have something like a dictionary
    key: str
    tensor: torch.Tensor

    def replaced(self) -> torch.Tensor | None:
        """What the module has put in its place, if it did; the tensor is back there then."""
        found = self.kept[self.key]
        if found is self.tensor:
            return None
        self.kept[self.key] = self.tensor
        return found


def buffers_of(module: nn.Module) -> list[ModuleBuffer]:
    """In the order of `named_buffers`, and once where two parts of the module share one."""
    found: dict[int, ModuleBuffer] = {}
    for path, owner in module.named_modules():
        for key, tensor in owner.named_buffers(recurse=False):
            name = f"{path}.{key}" if path else key
            found.setdefault(id(tensor), ModuleBuffer(name, owner._buffers, key, tensor))
    return list(found.values())


@torch.no_grad()
def tried(module: nn.Module, inputs: Any) -> Any:
    """The output of a module in evaluation, which leaves no trace in the module: not in its buffers either.

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
    """The line that refuses a model which changes this parameter itself."""
    return (
        f"[model] changes {name} in `forward`, as an Embedding with max_norm or `weight.data = …` does; only updates "
        "may change weights; valid: compute with a changed copy"
    )
