"""Data sets of other people's, where they are installed, and a file in MNIST's format."""

import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

REAL = Path(os.environ.get("RUDRA_DATA") or Path(__file__).resolve().parents[3] / "shared" / "data")
needs_real_data = pytest.mark.skipif(not REAL.is_dir(), reason=f"no data sets in {REAL}; RUDRA_DATA can name the place")


def idx(array: np.ndarray[Any, Any], magic: int) -> bytes:
    return struct.pack(f">{1 + array.ndim}I", magic, *array.shape) + array.astype(np.uint8).tobytes()
