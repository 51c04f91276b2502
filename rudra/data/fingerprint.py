"""Fingerprints of data, which show whether two processes, or two runs, have the same samples.

A fingerprint has the number of samples, and a summary of a fixed selection of them. Whole numbers (labels, tokens) are
compared exactly. Floating-point numbers are compared with a tolerance, because processors and image libraries round
differently. A difference in other samples is not noticed.
"""

import time
import zlib
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from rudra.data.load import Data
from rudra.data.samples import Samples, whole_of
from rudra.data.sampling import seeded
from rudra.data.sparse import is_sparse
from rudra.data.trees import mapped
from rudra.data.users import UserSplit

ITEMS, TWICE = 32, 8
"""Number of samples in a summary, and how many of them are drawn twice."""

LONGEST_S = 0.5
"""Seconds after which no further sample is drawn. Fingerprints are compared for samples that both have."""

TOLERANCE = 0.01

Summary = tuple[int, float, float]
"""CRC-32 of the whole numbers, root mean square of the other numbers, and their product with a fixed pattern."""


class Fingerprint(NamedTuple):
    """Fingerprint of a split.

    Attributes:
        samples: Number of samples.
        targets: Summary of each selected sample's targets, or empty if two draws of a sample differ.
        inputs: Summary of each selected sample's inputs, or empty if two draws of a sample differ.
        repeats: Whether two draws of a sample were equal.
    """

    samples: int
    targets: tuple[Summary, ...]
    inputs: tuple[Summary, ...]
    repeats: bool = True

    def difference(self, other: "Fingerprint") -> str:
        """Describes the difference between two fingerprints, or returns an empty string if they match."""
        if self.samples != other.samples:
            return f"{self.samples:,} samples, not {other.samples:,}"
        for name in ("targets", "inputs"):
            pairs = zip(getattr(self, name), getattr(other, name), strict=False)
            if not all(_alike(*pair) for pair in pairs):
                return f"other {'labels' if name == 'targets' else name}"
        return ""


def fingerprints(data: Data) -> dict[str, Fingerprint]:
    """Returns the fingerprints of the available splits, by "training", "validation" and "test"."""
    splits = {"training": data.training, "validation": data.validation, "test": data.test}
    return {name: fingerprint(samples) for name, samples in splits.items() if samples is not None}


def fingerprint(samples: Samples) -> Fingerprint:
    """Returns the fingerprint of a split. The states of the global random generators are unchanged afterwards."""
    count = min(ITEMS, len(samples))
    order = np.argsort(np.random.Philox(key=0).random_raw(count), kind="stable")  # the first few are also spread
    chosen = (np.linspace(0, len(samples) - 1, count).astype(np.int64)[order]).tolist()
    targets, inputs = _summaries(samples, chosen)
    if not isinstance(whole_of(samples), UserSplit):
        return Fingerprint(len(samples), targets, inputs)
    again = _summaries(samples, chosen[:TWICE])
    pairs = zip((targets, inputs), again, strict=True)
    same = [all(a == b for a, b in zip(*pair, strict=False)) for pair in pairs]  # of samples drawn in time twice
    return Fingerprint(len(samples), targets if same[0] else (), inputs if same[1] else (), all(same))


def plain(found: Mapping[str, Fingerprint]) -> dict[str, Any]:
    """Returns fingerprints as JSON values."""
    return {name: each._asdict() for name, each in found.items()}


def from_plain(found: Mapping[str, Any]) -> dict[str, Fingerprint]:
    """Returns the fingerprints from values of `plain`, without invalid ones."""
    made = {}
    for name, each in found.items():
        try:
            targets, inputs = (
                tuple((int(c), float(s), float(p)) for c, s, p in each[key]) for key in ("targets", "inputs")
            )
            made[name] = Fingerprint(int(each["samples"]), targets, inputs, bool(each["repeats"]))
        except (KeyError, TypeError, ValueError):
            continue
    return made


def unrepeatable(found: Mapping[str, Fingerprint]) -> str:
    """Returns why the samples of a run cannot be drawn again, or an empty string if they can."""
    names = [name for name, each in found.items() if not each.repeats]
    if not names:
        return ""
    why = "it, its collate, or code that they call has a random generator of its own, which Rudra cannot seed"
    return f"[data] the {names[0]} set returns another sample when the same one is drawn again: {why}"


REPEATABLE = "this run cannot be replayed; valid: torch's, NumPy's or Python's own"
"""Rest of the warning: the consequence, and the generators that Rudra seeds."""


def _summaries(samples: Samples, chosen: list[int]) -> tuple[tuple[Summary, ...], tuple[Summary, ...]]:
    """Returns summaries of targets and inputs, up to the first sample that cannot be drawn. Its later use reports the
    error."""
    targets, inputs = list[Summary](), list[Summary]()
    end = time.monotonic() + LONGEST_S
    with seeded(0):
        for index in chosen:
            try:
                of_input, of_target = samples.batch(np.array([index]))
            except Exception:
                break
            targets.append(_summary(of_target))
            inputs.append(_summary(of_input))
            if time.monotonic() > end:
                break
    return tuple(targets), tuple(inputs)


def _summary(tree: Any) -> Summary:
    crc, squares, count, pattern = 0, 0.0, 0, 0.0

    def add(tensor: torch.Tensor) -> None:
        nonlocal crc, squares, count, pattern
        stored = [tensor.col_indices(), tensor.values()] if is_sparse(tensor) else [tensor]
        for part in stored:
            values: npt.NDArray[Any] = part.detach().cpu().contiguous().reshape(-1).numpy()
            if not part.is_floating_point():
                crc = zlib.crc32(values.tobytes(), crc)
                continue
            values = np.nan_to_num(values.astype(np.float64), posinf=1e30, neginf=-1e30)
            squares += float(values @ values)
            pattern += float(values @ _cosines(count, count + len(values)))
            count += len(values)

    mapped(add, tree)
    size = max(1, count) ** 0.5
    return crc, float(f"{squares**0.5 / size:.6g}"), float(f"{pattern / size:.6g}")


@lru_cache(maxsize=8)
def _cosines(first: int, end: int) -> npt.NDArray[np.float64]:
    """Returns the weights of the numbers of a sample, which are the same in all samples of the same shape."""
    return np.cos(np.arange(first, end))


def _alike(one: Summary, other: Summary) -> bool:
    near = TOLERANCE * max(one[1], other[1])
    return one[0] == other[0] and abs(one[1] - other[1]) <= near and abs(one[2] - other[2]) <= near
