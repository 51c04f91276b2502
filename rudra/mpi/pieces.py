"""Large messages in pieces.

Over TCP, Open MPI sends a message of up to 64 KB at once. A larger one waits until the receiver answers, and the answer
comes behind all data that the receiver itself is sending. Two ranks that exchange much data at the same time wait for
many such answers. Pieces need none.
"""

import numpy as np
import numpy.typing as npt

PIECE_BYTES = 60 << 10
"""Largest piece. Together with MPI's own header it is one that Open MPI sends at once."""


def pieces_of(array: npt.NDArray[np.generic]) -> list[npt.NDArray[np.generic]]:
    """Cuts an array into pieces along its first axis. A small array, or one without elements, is one piece."""
    step = PIECE_BYTES * max(len(array), 1) // max(array.nbytes, 1) or 1
    if len(array) <= step:
        return [array]
    return [array[first : first + step] for first in range(0, len(array), step)]
