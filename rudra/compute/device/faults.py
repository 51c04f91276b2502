"""Deterministic operations, and what to say about errors that torch raises because of a device or its settings."""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from rudra.compute.device.devices import DEVICES
from rudra.core.actions import ComputeEvaluationPart, Evaluate, ExecutorAction
from rudra.core.buffer_names import WEIGHTS
from rudra.core.events import MemoryExhausted
from rudra.errors import ConfigError

_NOT_DETERMINISTIC = re.compile(r"(\S+) does not have a deterministic implementation|not deterministic .* uses CuBLAS")
"""Text in torch's errors about an operation, with its name unless it is a product of matrices."""

_SMALLER_STEPS = (
    "a smaller training.minibatch_size, more training.microbatches, or fewer learners on this device "
    "(cluster.learners_per_device)"
)
_SMALLER_EVALUATIONS = "a smaller training.evaluation_batch_size"


def set_deterministic(wanted: bool) -> Callable[[], None]:
    """Sets whether torch uses only operations with bitwise identical results each time, in this process.

    It must be called before the process computes on a GPU, because cuBLAS reads its variable only once.

    Returns:
        A function that restores the previous settings.
    """
    cudnn, before = torch.backends.cudnn, torch.get_deterministic_debug_mode()
    searched = cudnn.benchmark
    torch.set_deterministic_debug_mode("error" if wanted else "default")
    if wanted:
        cudnn.benchmark = False
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"

    def restore() -> None:
        torch.set_deterministic_debug_mode(before)
        cudnn.benchmark = searched

    return restore


@contextmanager
def operations_named() -> Iterator[None]:
    """Raises ConfigError if torch has no deterministic form of an operation, instead of torch's error."""
    try:
        yield
    except RuntimeError as error:
        if (text := _deterministic_text(error)) is None:
            raise
        raise ConfigError(text) from error


def _deterministic_text(error: BaseException) -> str | None:
    """Returns what to say about an operation without a deterministic form. None: it is another error."""
    found = _NOT_DETERMINISTIC.search(str(error))
    if found is None or not isinstance(error, RuntimeError):
        return None
    has = f"torch has no deterministic form of {found[1] or 'a product of matrices by cuBLAS'}"
    return f"[cluster] deterministic = true: {has}; use another operation, or deterministic = false"


def fault_text(error: BaseException) -> str | None:
    """Returns what to say about an error that torch raised because of a device or its settings. None: another error."""
    return memory_text(error) or _deterministic_text(error)


def loss_text(error: BaseException) -> str | None:
    """Returns what to say about an error after which this process cannot use its device. None: another error."""
    kind = next((kind for kind in DEVICES.values() if kind.lost(error)), None)
    return None if kind is None else f"its {kind.noun} is lost: {str(error).splitlines()[0].strip()}"


def memory_text(error: BaseException, instead: str = _SMALLER_STEPS) -> str | None:
    """Returns the message for an error that reports exhausted memory, of the machine or a GPU. None: another error.

    Args:
        error: The error.
        instead: What to use instead.
    """
    _, of_cpu, about = str(error).partition("DefaultCPUAllocator: ")  # a plain RuntimeError
    if not isinstance(error, MemoryError | torch.OutOfMemoryError) and not of_cpu:
        return None
    what = ". ".join(" ".join((about or str(error)).split()).split(". ")[:2]).removesuffix(".") or "none is left"
    return f"too little memory: {what}; use {instead}"


def exhausted(error: Exception, action: ExecutorAction) -> MemoryExhausted:
    """Returns the event of an action that raised an error, if memory was exhausted. Raises any other error again."""
    evaluates = isinstance(action, Evaluate | ComputeEvaluationPart)
    if (text := memory_text(error, _SMALLER_EVALUATIONS if evaluates else _SMALLER_STEPS)) is None:
        raise error
    return MemoryExhausted(text, any(getattr(action, field) == WEIGHTS for field in action.changes))
