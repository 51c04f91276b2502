"""Sets of samples in the memory of a device, as they are stored, for example in bytes. The device converts samples."""

import numpy as np
import numpy.typing as npt
import torch

from rudra.data.samples import KINDS, Batch, Samples, Split, indices_of_whole, whole_of
from rudra.data.sources import Rows
from rudra.data.users import UserSplit


class Resident:
    """Copy of a set on a device, for all learners that compute there.

    Args:
        samples: Samples of the set, or a subset of them, with `stored_in_memory`.
        device: Device that keeps the copy.
    """

    def __init__(self, samples: Samples, device: torch.device) -> None:
        whole, stored = whole_of(samples), stored_in_memory(samples)
        assert isinstance(whole, Split | UserSplit)
        assert stored is not None
        # `torch.tensor` copies, and accepts arrays that cannot be written
        self._inputs, self._targets = (torch.tensor(np.ascontiguousarray(array), device=device) for array in stored)
        self._converted = whole.conversion(device)

    def batch(self, indices: torch.Tensor) -> Batch:
        """Returns a mini-batch on the device, bitwise the same as `Samples.batch` gives.

        Args:
            indices: (count,) int64 on the device, which count in the whole set.
        """
        return self._converted(self._inputs.index_select(0, indices), self._targets.index_select(0, indices))


class ResidentSplit:
    """Split whose samples a device gathers for evaluations.

    Args:
        samples: The split.
        resident: Set on the device that has these samples.
        device: That device.
    """

    random = False

    def __init__(self, samples: Samples, resident: Resident, device: torch.device) -> None:
        self._resident = resident
        self._indices = torch.from_numpy(indices_of_whole(samples, np.arange(len(samples)))).to(device)

    def __len__(self) -> int:
        return len(self._indices)

    def batch(self, indices: npt.NDArray[np.int64]) -> Batch:
        """Returns samples on the device. The indices must be adjacent and ascending, as in evaluations."""
        first, count = int(indices[0]), len(indices)
        assert int(indices[-1]) == first + count - 1
        return self._resident.batch(self._indices[first : first + count])


def stored_in_memory(samples: Samples) -> tuple[Rows, Rows] | None:
    """Returns the stored inputs and targets of a set. None: a device cannot gather its samples."""
    whole = whole_of(samples)
    stored = whole.stored() if isinstance(whole, Split | UserSplit) else None
    return stored if stored is not None and all(array.dtype in KINDS for array in stored) else None
