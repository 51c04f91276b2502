"""Gradients as float16 on the wire: what arrives, and that it is what a simulation rounds to."""

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rudra
from rudra.compute import tasks
from rudra.compute.half import from_half, to_half
from rudra.compute.vectors import Buffer
from rudra.core.messages import PushedGradient
from rudra.core.records import Gradient
from rudra.core.wire import tail_bytes
from rudra.job.job import Job

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "sim"))
from clusters import job, train

from rudra.simulation.tensors import RealTensors

GRADIENT = Gradient(-1, 3, 4, 7, 28, 2, -1, 1.0, 0.5, 1, 3)


@pytest.mark.parametrize("size", [1, 17, 64, 1000])
def test_a_tensor_arrives_rounded_and_its_message_whole(size: int) -> None:
    here, there = Buffer(size, tail_bytes(2)), Buffer(size, tail_bytes(2))
    here.vector.copy_(torch.randn(size, generator=torch.Generator().manual_seed(size)))
    before = here.vector.clone()
    message = PushedGradient(5, 2, 2, (GRADIENT,))
    wire = here.write_half(message)
    assert len(wire) < size * 2 + tail_bytes(2)
    there.half[: len(wire)] = wire
    assert there.read_half() == message
    assert torch.equal(here.vector, before), "who sends keeps what it has"
    assert torch.equal(there.vector, before.half().float())


LARGEST = float(torch.finfo(torch.float16).max)


def travelled(*numbers: float) -> tuple[torch.Tensor, int]:
    """What becomes of numbers on the wire, and the exponent that they had there."""
    vector = torch.tensor(numbers)
    half = torch.empty(len(vector), dtype=torch.float16)
    exponent = to_half(vector, half)
    from_half(half, exponent, vector)
    return vector, exponent


@pytest.mark.parametrize("peak", [0.0, 1e-9, 1.0, LARGEST, -LARGEST, 65519.9])
def test_what_has_room_is_rounded_and_no_more(peak: float) -> None:
    vector, exponent = travelled(peak, 0.1, -3.0, 1e-7)
    assert exponent == 0
    assert torch.equal(vector, torch.tensor([peak, 0.1, -3.0, 1e-7]).half().float())


@pytest.mark.parametrize("peak", [65520.0, 65536.0, 1e6, -3e20, 3.4e38])
def test_what_has_no_room_is_divided_by_a_power_of_two_and_keeps_its_bits(peak: float) -> None:
    vector, exponent = travelled(peak, -peak / 3, 0.0, 1.0)
    assert 2 ** (exponent + 14) <= abs(peak) < 2 ** (exponent + 15)
    expected = (torch.tensor([peak, -peak / 3, 0.0, 1.0]).double() * 2.0**-exponent).half().double() * 2.0**exponent
    assert torch.equal(vector.double(), expected)
    assert vector[0].item() == pytest.approx(peak, rel=2**-11)


def test_what_is_no_number_stays_so() -> None:
    assert travelled(math.inf, 1.0)[0].tolist() == [math.inf, 1.0]
    assert travelled(-math.inf, 1.0)[0].tolist() == [-math.inf, 1.0]
    assert math.isnan(travelled(math.nan, 1.0)[0][0])


def test_the_exponent_travels() -> None:
    here, there = Buffer(3, tail_bytes(1)), Buffer(3, tail_bytes(1))
    for numbers in ([1e9, -3.0, 4.0], [1.0, 2.0, 3.0], [-math.inf, 5.0, 6.0]):
        here.vector.copy_(torch.tensor(numbers))
        wire = here.write_half(PushedGradient(5, 2, 2, (GRADIENT,)))
        there.half[: len(wire)] = np.array(wire)
        assert there.read_half().gradients == (GRADIENT,)
        assert there.vector[0].item() == pytest.approx(numbers[0], rel=1e-3)


class Steep(tasks.Classification):
    def loss(self, output: Any, target: Any, reduction: tasks.LossReduction = "mean") -> torch.Tensor:
        return 1e8 * super().loss(output, target, reduction)


def test_steep_gradients_train_in_float16_and_a_replay_repeats_them(tmp_path: Path) -> None:
    job = Job(
        task={"name": Steep},
        data={"name": "digits"},
        model={"name": "mlp"},
        training={"epochs": 4},
        optimizer={"learning_rate": 1e-9},
        protocol={"name": "softsync"},
        cluster={"learners": 2, "threads_per_rank": 1, "gradient_format": "float16"},
    )
    with rudra.simulate(job, output=tmp_path / "run.h5", progress="quiet") as results:
        error = results.summary()["final_test_error"]
    assert error < 0.2
    assert rudra.replay(tmp_path / "run.h5", quiet=True).identical


@pytest.mark.parametrize("topology", [{"name": "base"}, {"name": "adv", "options": {"fan_out": 2}}])
def test_a_simulation_rounds_what_travels(topology: dict[str, object]) -> None:
    tables = {"topology": topology, "training": {"minibatch_size": 32}, "data": {"train_limit": 384}}
    whole, rounded = (
        train(
            job("hardsync", 3, epochs=2, **tables).with_(cluster={"gradient_format": wire}),
            lambda executors, halves=wire == "float16": RealTensors(executors, halves=halves),
        )
        for wire in ("float32", "float16")
    )
    assert not torch.equal(whole.weights, rounded.weights)
    assert torch.allclose(whole.weights, rounded.weights, atol=1e-3)
