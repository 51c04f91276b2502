"""File format of safetensors: eight bytes with the length of the header, the header in JSON, and the tensors."""

import json
import struct
from collections.abc import Mapping, Sequence
from typing import IO, Any, NamedTuple

from numpy.typing import NDArray

LENGTH = struct.Struct("<Q")
_ALIGNED = 64


class Tensor(NamedTuple):
    """Tensor in a file.

    Attributes:
        dtype: Name of the type in safetensors, such as "F32".
        shape: Shape of the tensor.
        data: Bytes of the tensor as a contiguous array of any type.
    """

    dtype: str
    shape: Sequence[int]
    data: NDArray[Any]


def entry(dtype: str, shape: Sequence[int], start: int, end: int) -> dict[str, Any]:
    """Returns the header's entry for a tensor whose bytes are at `start` to `end`."""
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


def write(file: IO[bytes], tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Writes tensors one after the other. Readers expect the types with the largest elements first."""
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, tensor in tensors.items():
        header[name] = entry(tensor.dtype, tensor.shape, end, end + tensor.data.nbytes)
        end += tensor.data.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + LENGTH.size) % _ALIGNED)
    file.write(LENGTH.pack(len(text)) + text)
    for tensor in tensors.values():
        file.write(tensor.data.data)
