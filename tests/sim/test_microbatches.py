"""Gradients in parts with everything that computes, sends and applies them: against plain torch, and replayed."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from compiler import needs_compiler
from plain_gradients import first_gradients, flattened, initial
from torch import nn
from users_models import CLASSES, WIDTH, batch

import rudra
from rudra.cli.main import main
from rudra.compute.executor import torch_as_in
from rudra.compute.half import from_half, to_half
from rudra.errors import ConfigError

SIZE, RATE = 8, 0.25  # powers of two, as most shares of parts are: products are exact, and bits can be compared


def points() -> tuple[Any, Any]:
    return (set_ := torch.utils.data.TensorDataset(*batch(4 * SIZE))), set_


def network() -> nn.Module:
    """Its parts depend on each other: by one generator, and by running statistics."""
    layers = nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, CLASSES)
    return nn.Sequential(*layers)


def without_buffers() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.LayerNorm(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, CLASSES))


def without_random_numbers() -> nn.Module:
    """Compiled code draws others."""
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, CLASSES))


def made(parts: int, *, model: Any = network, **tables: Any) -> rudra.Job:
    """A job of one mini-batch for each learner."""
    cluster = {"learners": 2, "threads_per_rank": 1, **tables.pop("cluster", {})}
    return rudra.Job(
        model={"name": model},
        data={"name": points, "classes": CLASSES, "train_limit": cluster["learners"] * SIZE},
        training={
            "epochs": 1,
            "minibatch_size": SIZE,
            "microbatches": parts,
            "seed": 2,
            "evaluate": False,
            **tables.pop("training", {}),
        },
        optimizer={"learning_rate": RATE, "momentum": 0.0},
        protocol={"name": "hardsync", "modulation": "none", **tables.pop("protocol", {})},
        cluster=cluster,
        **tables,
    )


Vectors = Sequence[torch.Tensor]


def mean(vectors: Vectors) -> torch.Tensor:
    """As reductions add."""
    first, *others = vectors
    for vector in others:
        first = first + vector
    return first / len(vectors)


def running(vectors: Vectors) -> torch.Tensor:
    """As servers add: each gradient when it comes."""
    average, *others = vectors
    for count, vector in enumerate(others, 2):
        average = torch.lerp(average, vector, 1 / count)
    return average


def served(weights: torch.Tensor, gradients: Vectors) -> torch.Tensor:
    return weights - RATE * running(gradients)


def reduced(weights: torch.Tensor, gradients: Vectors) -> torch.Tensor:
    return weights - RATE * mean(gradients)


def in_pairs(weights: torch.Tensor, gradients: Vectors) -> torch.Tensor:
    return served(weights, [mean(gradients[:2]), mean(gradients[2:])])


def rounded(weights: torch.Tensor, gradients: Vectors) -> torch.Tensor:
    """Gradients that travel as float16."""
    came = [torch.empty_like(weights) for _ in gradients]
    for gradient, out in zip(gradients, came, strict=True):
        half = torch.empty(len(gradient), dtype=torch.float16)
        from_half(half, to_half(gradient, half), out)
    return served(weights, came)


def averaged(weights: torch.Tensor, gradients: Vectors) -> torch.Tensor:
    return weights - mean([weights - (weights - RATE * gradient) for gradient in gradients])


def met(weights: torch.Tensor, gradients: Vectors) -> torch.Tensor:
    """A replica meets the weights at a server, which go half of the way to it."""
    return weights - 0.5 * (weights - (weights - RATE * gradients[0]))


REPLICAS = {"protocol": {"name": "average"}, "topology": {"name": "replicas"}}
SERVED = {"protocol": {"name": "easgd"}, "topology": {"name": "replicas", "options": {"parameter_server": True}}}
ONE_GROUP, TWO_GROUPS = ({"topology": {"name": "groups", "options": {"groups": groups}}} for groups in (1, 2))
DEALT: dict[str, Any] = {
    "protocol": {"name": "hogbatch", "reference_batch_size": SIZE},
    "hogbatch": {"workers": [{"kind": "large", "min": SIZE, "max": SIZE, "compute_s": 0.1}]},
    "cluster": {"learners": 1},
    "model": without_buffers,
}

CASES: dict[str, tuple[int, dict[str, Any], Callable[[torch.Tensor, Vectors], torch.Tensor], float]] = {
    "server": (2, {}, served, 0),
    "one sample each": (8, {"model": without_buffers}, served, 0),
    "unequal parts": (3, {}, served, 1e-6),
    "compiled": (2, {"model": without_random_numbers, "training": {"compile": True}}, served, 1e-5),
    "float16": (2, {"cluster": {"gradient_format": "float16"}}, rounded, 0),
    "a rank for two": (4, {"cluster": {"learners_per_rank": 2}}, served, 0),
    "one group": (2, ONE_GROUP, reduced, 0),
    "two groups": (
        2,
        {"topology": {"name": "groups", "options": {"groups": 2}}, "cluster": {"learners": 4}},
        in_pairs,
        0,
    ),
    "tree": (2, {"topology": {"name": "adv"}}, served, 0),
    "shards": (2, {"topology": {"name": "sharded"}}, served, 0),
    "replicas": (4, REPLICAS, averaged, 0),
    "replicas, server": (2, {**SERVED, "cluster": {"learners": 1}}, met, 0),
    "hogbatch": (2, DEALT, served, 0),
    "window": (2, {**DEALT, "hogbatch": {**DEALT["hogbatch"], "weights": "shared", "locking": True}}, served, 0),
}
"""Parts, tables of the job, what comes of weights and the learners' gradients, and how far from it, of a step, is
allowed."""


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow, needs_compiler]) if n == "compiled" else n for n in CASES]
)
def test_weights_are_those_of_gradients_added_up_by_hand_and_a_replay_repeats_them(tmp_path: Path, name: str) -> None:
    parts, tables, of, tolerance = CASES[name]
    job = made(parts, **tables)
    before = initial(job)
    with torch_as_in(job.cluster):
        wanted = of(before, [flattened(gradient) for gradient in first_gradients(job, parts)])
    with rudra.simulate(job, output=tmp_path / "run.h5", progress="quiet") as results:
        assert results.updates["learning_rate"].tolist() == [RATE]
        found = torch.from_numpy(results.weights)[: len(before)]
    if tolerance:
        assert float((found - wanted).norm() / (wanted - before).norm()) <= tolerance
    else:
        assert torch.equal(found, wanted)
    assert rudra.replay(tmp_path / "run.h5", job=job, quiet=True).identical


ONE = r"\[training\] microbatches = 8: a part may have one sample: torch cannot compute this model on one sample"


@pytest.mark.parametrize(
    ("parts", "tables", "text"),
    [
        (9, {}, r"microbatches = 9 is more than the samples of a gradient; use 1 to 8"),
        (
            2,
            {"placement": {"cut": 1}},
            r"microbatches = 2 is not supported with \[placement\] cut; use microbatches = 1",
        ),
        (2, {"simulation": {"batching": "vmap"}}, "batching = 'vmap'; use microbatches = 1, or batch"),
        (2, {"simulation": {"batching": "big-batch"}}, "batching = 'big-batch'; use microbatches = 1, or"),
        (8, {}, ONE),
        (8, {"cluster": {"shares": [1, 3]}, "training": {"minibatch_size": 16}}, ONE),
        (
            2,
            {**DEALT, "model": network},
            "name: hogbatch: the last batch of an epoch may be short: torch cannot compute",
        ),
    ],
    ids=["more than samples", "placed", "vmap", "big-batch", "one sample", "one sample of a share", "hogbatch"],
)
def test_what_cannot_be_in_parts_is_refused_in_one_line(
    tmp_path: Path, parts: int, tables: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text) as error:
        rudra.simulate(made(parts, **tables), output=tmp_path / "run.h5", progress="quiet")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("key", ["simulation.batching=big-batch", "placement.cut=1", "training.minibatch_size=1"])
def test_the_command_ends_with_2(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "digits", "--set", "training.microbatches=2", "--set", key]) == 2
    assert capsys.readouterr().err.count("[training] microbatches = 2 is ") == 1
