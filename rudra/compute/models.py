"""Building and checking a job's model.

Weights are a pure function of the seed: every rank builds the same ones without a message.
"""

import itertools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from rudra.compute.buffers import changed, tried
from rudra.compute.device.faults import operations_named
from rudra.compute.networks import MODELS
from rudra.compute.tasks import Task
from rudra.data import trees
from rudra.data.load import DataInfo
from rudra.data.sampling import seeded
from rudra.errors import ConfigError
from rudra.job.tables import ModelTable
from rudra.plugins import call, choose


def build(table: ModelTable, info: DataInfo, seed: int) -> nn.Module:
    """Builds the job's model with its initial weights.

    Args:
        table: Table of the model. A factory receives the table's options. It also receives `input_shape`, `classes` and
            `sparse` of the data if its signature names them. A sample defines the shapes of a user model's lazy layers.
        info: Description of the data.
        seed: Seed of the weights, even if a factory draws them by NumPy.

    Raises:
        ConfigError: The model does not exist or rejects the options, a factory returns no `torch.nn.Module`, or a model
            with lazy layers does not accept the inputs.
    """
    name = table.name if isinstance(table.name, str) else getattr(table.name, "__qualname__", repr(table.name))
    factory = choose("[model] name", table.name, MODELS)
    if not callable(factory):
        raise ConfigError(f"[model] {name} is a {type(factory).__name__} and cannot be called")
    with seeded(seed):
        offered = {"input_shape": info.input_shape, "classes": info.classes, "sparse": info.sparse}
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("error", "Initializing zero-element tensors")  # a layer of no width
                warnings.filterwarnings("ignore", "Lazy modules are a new feature")
                module = call(factory, f"[model] {name}", table.options, offered)
                if isinstance(module, nn.Module) and factory not in MODELS.values():
                    _finish_lazy_layers(module, info)
        except Exception as error:
            if isinstance(error, ConfigError) or factory not in MODELS.values():
                raise  # the user's own exception says best what is wrong
            options = ", ".join(table.options)
            raise ConfigError(f"[model] {name} cannot be made with these options ({options}): {error!r}") from None
    if not isinstance(module, nn.Module):
        raise ConfigError(f"[model] {name} gave a {type(module).__name__}, not a torch.nn.Module")
    return module


def _finish_lazy_layers(module: nn.Module, info: DataInfo) -> None:
    tensors = list(itertools.chain(module.parameters(), module.buffers()))
    if any(is_lazy(tensor) for tensor in tensors):
        with _taking(info):
            tried(module, trees.moved(info.sample[0], tensors[0].device))


@contextmanager
def _taking(info: DataInfo) -> Iterator[None]:
    """Raises ConfigError if a model does not accept the inputs."""
    try:
        with operations_named():
            yield
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        what = " ".join(str(error).split())
        if info.sparse:
            text = f"[data] sparse = true: [model] does not take sparse inputs ({what}); valid: false, or a model that"
            raise ConfigError(f"{text} begins with rudra.SparseLinear") from error
        raise ConfigError(
            f"[model] does not take inputs of shape {info.input_shape} as {info.name} has: {what}"
        ) from error


def check_model_output(module: nn.Module, task: Task, info: DataInfo) -> Any:
    """Checks that model, task and data fit: the model accepts the inputs and gives output that the task can compare.

    The owner updates the weights, so a model that changes its own weights is rejected.

    Returns:
        The model's output for one sample.

    Raises:
        ConfigError: They do not fit. The text has both shapes.
    """
    parameter = next(module.parameters(), None)
    inputs, target = info.sample
    if not task.fits(target):
        shape = tuple(trees.first(target).shape[1:])
        kind = str(trees.first(target).dtype).removeprefix("torch.")
        raise ConfigError(f"[task] {task.name} needs {task.wants}; {info.name} has targets {kind} of shape {shape}")
    there = torch.device("cpu") if parameter is None else parameter.device
    before = [(p.detach(), p._version) for p in module.parameters()]
    with _taking(info):
        output = task.compared(tried(module, trees.moved(inputs, there)))
    for (name, p), (held, version) in zip(module.named_parameters(), before, strict=True):
        if p._version != version or (p.data_ptr() != held.data_ptr() and not torch.equal(p, held)):
            raise ConfigError(changed(name))
    wanted, given = task.output_shape(target), output
    if wanted is None:
        return given
    output = task.matched(output, target)
    if not isinstance(output, torch.Tensor):
        raise ConfigError(f"[model] gives a {type(output).__name__}, not a tensor of shape {wanted}")
    if output.dim() == len(wanted) and output.shape[:-1] == wanted[:-1] and output.shape[-1] != wanted[-1]:
        raise ConfigError(f"[model] has {output.shape[-1]} outputs, and {info.name} has {wanted[-1]} classes")
    if tuple(output.shape) != wanted:
        raise ConfigError(f"[model] gives shape {tuple(output.shape)} for one sample; {info.name} needs {wanted}")
    return given
