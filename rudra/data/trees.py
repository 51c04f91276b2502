"""Nested tuples, lists and dictionaries of tensors."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch


def mapped(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Applies a function to each tensor, with the tensors at its place in other trees. Returns the same structure."""
    if isinstance(tree, Mapping):
        return {key: mapped(function, value, *(other[key] for other in others)) for key, value in tree.items()}
    if isinstance(tree, Sequence) and not isinstance(tree, str):
        return tuple(mapped(function, *values) for values in zip(tree, *others, strict=True))
    return function(tree, *others)


def moved(tree: Any, device: torch.device) -> Any:
    """Returns the tensors on a device."""
    return tree.to(device) if isinstance(tree, torch.Tensor) else mapped(lambda tensor: tensor.to(device), tree)


def as_tensor(value: Any) -> Any:
    """Converts a list of numbers, as in job files and Hugging Face's sets, to a tensor. Other values are unchanged."""
    first = value
    while isinstance(first, list) and first:
        first = first[0]
    return torch.tensor(value) if first is not value and isinstance(first, int | float) else value


def first(tree: Any) -> Any:
    """Returns the first tensor."""
    while not isinstance(tree, torch.Tensor):
        tree = next(iter(tree.values() if isinstance(tree, Mapping) else tree))
    return tree


def named(tree: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yields all tensors, with names for users such as `input['mask']`."""
    if isinstance(tree, torch.Tensor):
        yield name, tree
        return
    for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
        yield from named(value, f"{name}[{key!r}]" if name else str(key))


def leaves(tree: Any) -> Iterator[torch.Tensor]:
    """Yields all tensors, in order."""
    return (tensor for _, tensor in named(tree))


def called(module: Callable[..., Any], inputs: Any) -> Any:
    """Returns the output of a model for one tensor, several in order, or several by name."""
    args, keywords = arguments(inputs)
    return module(*args, **keywords)


def arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of a model's call."""
    if isinstance(inputs, dict):
        return (), inputs
    return (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs), {}
