"""The container of safetensors: eight bytes with the length of a header, the header in JSON, and the tensors."""

import json
import struct
from collections.abc import Mapping, Sequence
from typing import IO, Any, NamedTuple

from numpy.typing import NDArray

LENGTH = struct.Struct("<Q")
_ALIGNED = 64


class Tensor(NamedTuple):
    """What the file holds of a tensor.

    Attributes:
        dtype: as safetensors calls it, such as "F32".
        shape: of the tensor.
        data: its bytes, contiguous; of any type.
    """

    dtype: str
    shape: Sequence[int]
    data: NDArray[Any]


def entry(dtype: str, shape: Sequence[int], start: int, end: int) -> dict[str, Any]:
    """What the header says of a tensor whose bytes are those from `start` to `end`."""
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


def write(file: IO[bytes], tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Writes tensors one after the other; readers want those first whose numbers have most bytes."""
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
