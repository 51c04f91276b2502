"""Digest of a sample of the weights. It detects different weights of one timestamp at almost no cost."""

import hashlib

SAMPLED = 128
"""Number of elements in the sample: enough to detect differences, few enough to cost nothing. Result files depend on
it. Another number requires another `FORMAT_VERSION`."""


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


def digest_of(sampled: bytes) -> int:
    """Returns a digest of 64 bits of the floats of a sample."""
    return int.from_bytes(hashlib.blake2b(sampled, digest_size=8).digest(), "little")
