"""Samples that are mostly zeros, and what learns them."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

import rudra
from rudra.compute.sparse import SparseLinear
from rudra.data.sparse import rows_of

WIDTH = 40


def matrix(count: int, seed: int = 0, density: float = 0.1) -> npt.NDArray[np.float32]:
    """Of which most is 0, with some rows in which all is."""
    rng = np.random.default_rng(seed)
    kept = rng.random((count, WIDTH)) < density
    kept[1::5] = False
    return np.where(kept, rng.normal(size=(count, WIDTH)), 0).astype(np.float32)


def compressed(dense: npt.NDArray[np.float32]) -> torch.Tensor:
    starts = np.concatenate([[0], np.cumsum((dense != 0).sum(1))]).astype(np.int32)
    return rows_of(starts, np.nonzero(dense)[1].astype(np.int32), dense[dense != 0], dense.shape[1])


def write_samples(directory: Path) -> Path:
    """48 samples in LIBSVM's format, and Mulan's."""
    dense = matrix(48)
    labels = (dense.sum(1) > 0).astype(int)
    rows = [[(i, row[i]) for i in np.flatnonzero(row)] for row in dense]
    path = directory / "some.svm"
    path.write_text(
        "\n".join(
            " ".join([str(label), *(f"{i + 1}:{value:.9g}" for i, value in row)])
            for label, row in zip(labels, rows, strict=True)
        )
    )
    head = "\n".join([*(f"@attribute x{i} numeric" for i in range(WIDTH)), "@attribute c {0, 1}", "@data"])
    lines = (
        "{" + ", ".join([*(f"{i} {value:.9g}" for i, value in row), f"{WIDTH} {label}"]) + "}"
        for label, row in zip(labels, rows, strict=True)
    )
    (directory / "some.arff").write_text("\n".join(["@relation r", head, *lines]))
    return path


class Twice(nn.Module):
    """Uses its sparse layer twice, and has another one that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.idle, self.last = SparseLinear(WIDTH, 8), SparseLinear(WIDTH, 8), nn.Linear(16, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(torch.cat([self.first(inputs).tanh(), self.first(inputs).sigmoid()], 1))


def job(file: Path, sparse: Any, minibatch_size: int = 4, **tables: Any) -> rudra.Job:
    options = {"hidden": [64], "activation": "sigmoid"}
    return rudra.Job(
        name="sparse",
        model={"name": "mlp", "options": options},
        data={"name": "libsvm", "path": file, "sparse": sparse, **(tables.pop("data", {"test_split": 0.25}))},
        training={"epochs": 1, "minibatch_size": minibatch_size, "seed": 1},
        optimizer={"learning_rate": 0.1, **tables.pop("optimizer", {})},
        protocol={"name": "async", "modulation": "none", **tables.pop("protocol", {})},
        cluster={"learners": 1, "threads_per_rank": 1, **tables.pop("cluster", {})},
        **tables,
    )
