"""Checks whether torch supports a job, by trying it on one mini-batch before training."""

import re
import warnings

import torch
from torch import nn
from torch.overrides import resolve_name

from rudra.compute.bank.fused import Operations, fused_gradients
from rudra.compute.device.faults import operations_named
from rudra.compute.flat import FlatModel
from rudra.compute.together import put_together
from rudra.data.samples import Batch
from rudra.data.sparse import is_sparse, joined
from rudra.errors import ConfigError
from rudra.job.tables import TrainingTable

_SLOWLY = re.compile("batching rule for ([a-z_:0-9]+)")
"""Text in torch's warning about an operation that vmap computes one by one, with its name."""


def check_batching(batching: str, model: FlatModel, weights: torch.Tensor, sample: Batch) -> None:
    """Checks by a trial that the gradients of a model can be computed together.

    Args:
        batching: "big-batch" or "vmap".
        model: Model to check.
        weights: (size,) float32, weights for the trial.
        sample: Batch of one sample.

    Raises:
        ConfigError: The gradients cannot be computed together. The text says why.
    """
    where, instead = f"[simulation] batching = '{batching}'", "valid for this model: none"
    if batching == "vmap":
        check_fused(where, instead, model, weights, sample)
        return
    norms = [name for name, m in model.module.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    if norms:
        raise ConfigError(f"{where}: BatchNorm ({norms[0]}) depends on which samples share a batch; {instead}")
    if model.hooked:
        raise ConfigError(f"{where}: the model has hooks, which see each gradient by itself; {instead}")
    if len(weights) > model.parameter_count:
        out = torch.empty_like(weights)
        model.bind(weights)
        model.gradient(*put_together(joined, [sample, sample]), out, 0)
        if not torch.equal(out[model.parameter_count :], weights[model.parameter_count :]):
            raise ConfigError(f"{where}: the model changes its buffers while it learns; {instead}")


def check_fused(where: str, instead: str, model: FlatModel, weights: torch.Tensor, sample: Batch) -> None:
    """Checks by a trial that the gradients of several learners can be computed by `fused_gradients`.

    Args:
        where: Key and value that want it, for a message.
        instead: Valid value, for a message.
        model: Model to check.
        weights: (size,) float32, weights for the trial.
        sample: Batch of one sample.

    Raises:
        ConfigError: They cannot be computed together. The text names the operation that is not supported.
    """
    if is_sparse(sample[0]):
        raise ConfigError(f"{where}: the inputs are sparse; {instead}")
    if model.hooked:
        raise ConfigError(f"{where}: the model has hooks, which see each gradient by itself; {instead}")
    seeds = [0, 1]
    operations = Operations(seeds, model.device)
    inputs, target = put_together(torch.stack, [put_together(joined, [sample, sample])] * 2)
    outs = [*torch.empty(2, len(weights), device=weights.device)]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "There is a performance drop", UserWarning)
            fused_gradients(model, [weights, weights], inputs, target, outs, seeds, operations)
    except Exception as error:  # torch and the user's own layers may raise any exception here
        slow, what = _SLOWLY.search(str(error)), " ".join(str(error).split())
        name = slow[1] if slow else resolve_name(operations.latest) or "its forward pass"
        raise ConfigError(
            f"{where}: torch.func.vmap does not support {name} of this model ({what[:200]}); {instead}"
        ) from error


def check_gradient(table: TrainingTable, model: FlatModel, sample: Batch, *, single: tuple[str, str] | None) -> None:
    """Checks by a trial that torch can compute a model's gradients in a precision, and from one sample.

    Args:
        table: Training table with the precision.
        model: Model for that precision. It cannot be used afterwards.
        sample: Batch of one sample.
        single: Reason why a mini-batch may have one sample, and a valid setting instead. None: all are larger.

    Raises:
        ConfigError: Torch cannot compute them. The text says why.
    """
    weights, out = torch.zeros(2, model.size, device=model.device)
    model.read_into(weights)
    model.bind(weights)
    try:
        with operations_named():
            model.gradient(*(sample if single else put_together(joined, [sample, sample])), out, 0)
    except (RuntimeError, TypeError, ValueError) as error:
        what = " ".join(str(error).split()).partition(". ")[0][:200]  # advice for developers may follow
        if single is not None and isinstance(error, ValueError):  # raised by BatchNorm
            where, valid = single
            raise ConfigError(
                f"{where}: torch cannot compute this model on one sample ({what}); valid: {valid}"
            ) from error
        if not table.in_16_bits:
            raise
        where = f"[training] precision = '{table.precision}'"
        raise ConfigError(
            f"{where}: torch does not support it for this model on this {model.device.type} ({what}); valid: float32"
        ) from error
