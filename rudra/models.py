"""How a job's model is built and checked.

Weights are a pure function of the seed: every rank builds the same ones without a message.
"""

import warnings

import torch
from torch import nn

from rudra.config import ModelTable
from rudra.data import DataInfo
from rudra.errors import ConfigError
from rudra.networks import MODELS
from rudra.plugins import call, resolve


def build(table: ModelTable, info: DataInfo, seed: int) -> nn.Module:
    """The job's model with its initial weights.

    Args:
        table: which model. A factory gets the table's options, and `input_shape` and `classes` of the data where its
            signature names them.
        info: the data that it must fit.
        seed: of the weights; torch's default generator is left as it was.

    Raises:
        ConfigError: no such model, options that it does not take, or a factory that gives no `torch.nn.Module`.
    """
    name = table.name if isinstance(table.name, str) else getattr(table.name, "__qualname__", repr(table.name))
    factory: object = table.name
    if isinstance(table.name, str):
        if ":" not in table.name and table.name not in MODELS:
            valid = f"{', '.join(MODELS)} or package.module:callable"
            raise ConfigError(f"[model] unknown name '{table.name}'; valid: {valid}")
        factory = MODELS.get(table.name) or resolve(table.name)
    if not callable(factory):
        raise ConfigError(f"[model] {name} is a {type(factory).__name__} and cannot be called")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        offered = {"input_shape": info.input_shape, "classes": info.classes}
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("error", "Initializing zero-element tensors")  # a layer of no width
                module = call(factory, f"[model] {name}", table.options, offered)
        except Exception as error:
            if isinstance(error, ConfigError) or factory not in MODELS.values():
                raise  # the user's own code says best itself what is wrong
            options = ", ".join(table.options)
            raise ConfigError(f"[model] {name} cannot be made with these options ({options}): {error!r}") from None
    if not isinstance(module, nn.Module):
        raise ConfigError(f"[model] {name} gave a {type(module).__name__}, not a torch.nn.Module")
    return module


def check_output(module: nn.Module, info: DataInfo) -> None:
    """Makes sure that the model takes the data's inputs and gives one number per class.

    Raises:
        ConfigError: it does not; the text has both shapes.
    """
    training = module.training
    module.eval()
    try:
        with torch.no_grad():
            parameter = next(module.parameters(), None)
            output = module(torch.zeros(1, *info.input_shape, device=None if parameter is None else parameter.device))
    except (RuntimeError, ValueError, IndexError) as error:
        what = " ".join(str(error).split())
        shape = tuple(info.input_shape)
        raise ConfigError(f"[model] does not take inputs of shape {shape} as {info.name} has: {what}") from error
    finally:
        module.train(training)
    if not isinstance(output, torch.Tensor):
        raise ConfigError(f"[model] gives a {type(output).__name__}, not a tensor of shape (samples, {info.classes})")
    if output.dim() == 2 and len(output) == 1 and output.shape[1] != info.classes:
        raise ConfigError(f"[model] has {output.shape[1]} outputs, and {info.name} has {info.classes} classes")
    if tuple(output.shape) != (1, info.classes):
        wanted = f"(1, {info.classes})"
        raise ConfigError(f"[model] gives shape {tuple(output.shape)} for one sample; {info.name} needs {wanted}")
