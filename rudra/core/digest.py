"""A digest of a sample of the weights: enough to tell weights of one timestamp from others, at hardly any cost."""

import hashlib

SAMPLED = 128
"""Elements in the sample: enough to catch what differs, few enough to cost nothing. Result files depend on it: another
number is another `FORMAT_VERSION`."""


def sample(timestamp: int, size: int, first: int = 0) -> slice:
    """Which elements are sampled, at equal distances; each timestamp has others, so that all have their turn.

    Args:
        timestamp: of the weights.
        size: of the whole vector.
        first: where the part of it begins whose elements are asked for.
    """
    stride = max(1, size // SAMPLED)
    return slice((timestamp - first) % stride, None, stride)


def digest_of(sampled: bytes) -> int:
    """64 bits of a sample's float32."""
    return int.from_bytes(hashlib.blake2b(sampled, digest_size=8).digest(), "little")
