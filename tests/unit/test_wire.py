"""Gradients as float16 on the wire: what arrives, and that it is what a simulation rounds to."""

import sys
from pathlib import Path

import pytest
import torch

from rudra.executor import Buffer
from rudra.messages import Kind, Message, tail_bytes
from rudra.records import Gradient

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "sim"))
from clusters import job, train

from rudra.hands import TensorHands

GRADIENT = Gradient(-1, 3, 4, 7, 2, -1, 1.0, 0.5, 1)


@pytest.mark.parametrize("size", [1, 17, 64, 1000])
def test_a_tensor_arrives_rounded_and_its_message_whole(size: int) -> None:
    here, there = Buffer(size, tail_bytes(2)), Buffer(size, tail_bytes(2))
    here.vector.copy_(torch.randn(size, generator=torch.Generator().manual_seed(size)))
    before = here.vector.clone()
    message = Message(Kind.GRADIENT, 5, 2, 2, None, (GRADIENT,))
    wire = here.write_half(message)
    assert len(wire) < size * 2 + tail_bytes(2)
    there.half[: len(wire)] = wire
    assert there.read_half() == message
    assert torch.equal(here.vector, before), "who sends keeps what it has"
    assert torch.equal(there.vector, before.half().float())


@pytest.mark.parametrize("topology", [{"name": "base"}, {"name": "adv", "options": {"fan_out": 2}}])
def test_a_simulation_rounds_what_travels(topology: dict[str, object]) -> None:
    tables = {"topology": topology, "training": {"minibatch_size": 32}, "data": {"train_limit": 384}}
    whole, rounded = (
        train(
            job("hardsync", 3, epochs=2, **tables).with_(cluster={"wire": wire}),
            lambda executors, halves=wire == "float16": TensorHands(executors, halves=halves),
        )
        for wire in ("float32", "float16")
    )
    assert not torch.equal(whole.weights, rounded.weights)
    assert torch.allclose(whole.weights, rounded.weights, atol=1e-3)
