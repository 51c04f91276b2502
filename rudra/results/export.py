"""Export of a run's weights to a file for torch or safetensors, for `rudra export`."""

from pathlib import Path
from typing import Literal

import torch

from rudra.errors import ConfigError
from rudra.files import check_output, written
from rudra.results import safetensors
from rudra.results.reader import Results

SUFFIXES = (".pt", ".safetensors")

_DTYPES = {
    torch.complex64: "C64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def export(results: Results, output: Path, epoch: int | Literal["best"] | None = None, *, force: bool = False) -> int:
    """Writes the tensors that the model's `load_state_dict` expects, in the model's own types.

    Args:
        results: Results of a run.
        output: Output file for `torch.load` (.pt) or for safetensors (.safetensors). In a .pt file tied names share one
            tensor. safetensors does not support ties, so each name has a copy.
        epoch: One of `results.kept_epochs`, or "best". None: the final weights.
        force: Whether to replace an existing file.

    Returns:
        Number of names.

    Raises:
        RudraError: The weights or the format do not exist, the format lacks a type, or the file cannot be written.
    """
    if output.suffix not in SUFFIXES:
        raise ConfigError(f"{output}: the suffix must say the format; valid: {', '.join(SUFFIXES)}")
    check_output(output, force)
    tensors = results.state_dict(epoch)
    if output.suffix == ".pt":
        save(tensors, output)
    else:
        parts = _parts(tensors, output)
        with written(output) as file:
            safetensors.write(file, parts, {"format": "pt"})
    return len(tensors)


def save(tensors: dict[str, torch.Tensor], output: Path) -> None:
    """Writes a file for `torch.load`.

    Raises:
        ResultsError: The file cannot be written.
    """
    with written(output) as file:
        try:
            torch.save(tensors, file)
        except RuntimeError as error:  # torch raises it instead of the file's error
            raise OSError(f"torch.save failed ({error}); is there room?") from None


def _parts(tensors: dict[str, torch.Tensor], output: Path) -> dict[str, safetensors.Tensor]:
    """Returns the tensors in the form and order of safetensors."""
    parts = {}
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].itemsize):
        if tensor.dtype not in _DTYPES:
            raise ConfigError(f"{output}: {name} is {tensor.dtype}, which safetensors does not have; a .pt file does")
        numbers = tensor.reshape(-1).view(torch.uint8).numpy()
        parts[name] = safetensors.Tensor(_DTYPES[tensor.dtype], tensor.shape, numbers)
    return parts
