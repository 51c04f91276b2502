"""A flat vector of four parameters and a buffer, and groups of its parameters."""

from typing import Literal

import torch

from rudra.core.layout import Entry

SHAPES = [(20, 1, 5, 5), (20,), (500, 77), (3,)]
SIZES = [torch.Size(shape).numel() for shape in SHAPES]
SIZE = 39_023  # no multiple of a vector register
NAMES = ["conv.weight", "conv.bias", "fc.weight", "fc.bias"]
NO_DECAY = {"parameters": ["*.bias"], "weight_decay": 0.0}
SLOW = {"parameters": "conv.*", "rate_factor": 0.1}
"""Where both are given, in this order, the first one takes `conv.bias`."""


def layout() -> list[Entry]:
    """Of four parameters, and of a buffer that travels behind them."""
    entries: list[Entry] = []
    for name, shape in [*zip(NAMES, SHAPES, strict=True), ("norm.running_mean", (7,))]:
        offset = entries[-1].offset + entries[-1].size if entries else 0
        kind: Literal["parameter", "buffer"] = "parameter" if name in NAMES else "buffer"
        entries.append(Entry(name, shape, offset, torch.Size(shape).numel(), kind))
    return entries
