"""Digests of weights: of all of them, and of a sample, which detects different weights at almost no cost."""

import hashlib

import numpy as np
from numpy.typing import NDArray

SAMPLED = 128
"""Number of elements in the sample: enough to detect differences, few enough to cost nothing. Result files depend on
it. Another number requires another `FORMAT_VERSION`."""


def sha256(vector: NDArray[np.float32]) -> str:
    """Returns the SHA-256 of a flat vector, over its values as little-endian float32."""
    return hashlib.sha256(np.ascontiguousarray(vector, dtype="<f4").data).hexdigest()


def sample(timestamp: int, size: int, first: int = 0) -> slice:
    """Returns the sampled elements, at equal distances. They differ between timestamps, so that every element is
    sampled at some time.

    Args:
        timestamp: Timestamp of the weights.
        size: Size of the whole vector.
        first: First element of the part whose sampled elements are requested.
    """
    stride = max(1, size // SAMPLED)
    return slice((timestamp - first) % stride, None, stride)


def sample_length(size: int, length: int) -> int:
    """Returns the largest number of sampled elements of a stretch.

    Args:
        size: Size of the whole vector.
        length: Size of the stretch.
    """
    return -(-length // max(1, size // SAMPLED))


def digest_of(sampled: bytes) -> int:
    """Returns a digest of 64 bits of the floats of a sample."""
    return int.from_bytes(hashlib.blake2b(sampled, digest_size=8).digest(), "little")
