"""Several tensors as one: tuples, lists and dictionaries of them, however deep."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch


def mapped(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """The same structure, with what the function makes of each tensor, and of those in its place in other trees."""
    if isinstance(tree, Mapping):
        return {key: mapped(function, value, *(other[key] for other in others)) for key, value in tree.items()}
    if isinstance(tree, Sequence) and not isinstance(tree, str):
        return tuple(mapped(function, *values) for values in zip(tree, *others, strict=True))
    return function(tree, *others)


def moved(tree: Any, device: torch.device) -> Any:
    """The tensors on a device."""
    return tree.to(device) if isinstance(tree, torch.Tensor) else mapped(lambda tensor: tensor.to(device), tree)


def as_tensor(value: Any) -> Any:
    """A list of numbers, as job files and Hugging Face's sets have it, is one tensor; anything else stays as it is."""
    first = value
    while isinstance(first, list) and first:
        first = first[0]
    return torch.tensor(value) if first is not value and isinstance(first, int | float) else value


def first(tree: Any) -> Any:
    """The first tensor."""
    while not isinstance(tree, torch.Tensor):
        tree = next(iter(tree.values() if isinstance(tree, Mapping) else tree))
    return tree


def named(tree: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors, with a name for people, such as `input['mask']`."""
    if isinstance(tree, torch.Tensor):
        yield name, tree
        return
    for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
        yield from named(value, f"{name}[{key!r}]" if name else str(key))


def called(module: Callable[..., Any], inputs: Any) -> Any:
    """The output of a model: of one tensor, of several in order, or of several by name."""
    args, keywords = arguments(inputs)
    return module(*args, **keywords)


def arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a model is called with."""
    if isinstance(inputs, dict):
        return (), inputs
    return (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs), {}
