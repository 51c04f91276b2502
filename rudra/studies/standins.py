"""Stand-ins for the eight networks of the RALP paper: their sizes, and times on its GPU, without their arithmetic.

A stand-in is two layers: what RALP has learners compute, named `front`, and what it places, named `back`. Each holds as
many parameters as those of the network, gives as many numbers, and takes its part of the time. It is for simulations
of time alone, of jobs with `[simulation] costs = "ralp"`. `VGG11` has 1,000 classes, `VGG11_22k` those of ImageNet-22K,
and so have the others.
"""

from collections import OrderedDict
from functools import partial
from typing import Any

import torch
from torch import nn

from rudra.core.placement import PlacementHardware, choose
from rudra.studies.convnets import NETWORKS, Device, Worked

CLASSES = {"": 1000, "_22k": 21_841}
BYTES_PER_S, STEP_S = 547.7e9, 2e-3  # a TITAN Xp's memory; not in the paper: launches of kernels, and TensorFlow's own
PLAIN = Device(20e12, BYTES_PER_S, STEP_S)
"""1.65 times the peak of a TITAN Xp, as Winograd's convolutions do with fewer multiplications; not in the paper."""
NORMALISED = Device(3.6e12, BYTES_PER_S, STEP_S)
"""BatchNorm and many small convolutions: 153 images/s of ResNet-50, of which the paper's GPUs do 137 at least."""

DEVICES = {name: NORMALISED if name[0] in "GIR" else PLAIN for name in NETWORKS}
NAMES = {f"{name.replace('-', '')}{suffix}": (name, count) for name in NETWORKS for suffix, count in CLASSES.items()}
"""Name of a stand-in -> network and number of classes."""


def timed(name: str) -> tuple[list[Worked], int, int]:
    """The layers of the network that a stand-in is for, the mini-batch of a worker, and how many are in front.

    The cut is that of RALP's rule, for whatever number of workers.
    """
    network, classes = NAMES[name]
    make, size = NETWORKS[network]
    layers = DEVICES[network].timed(make(classes), size)
    cut = choose("ralp", layers, PlacementHardware(1, size)).cut
    assert cut is not None
    return layers, size, cut.index


class _Piece(nn.Module):
    """Some layers of a network.

    Args:
        parameters: that they hold.
        outputs: of one sample.
        part: of a mini-batch's time, as so many operations out of a million.
    """

    def __init__(self, parameters: int, outputs: int, part: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(parameters))  # never touched, so it takes no memory
        self._outputs, self._operations = outputs, max(1, round(part * 1e6))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        ones = inputs.new_ones(self._operations)
        told = (ones[None] @ ones[:, None]).reshape(()) + 0 * self.weight[:1].nan_to_num().sum()
        return inputs.new_zeros(len(inputs), self._outputs) + told


def _stand_in(name: str, classes: int) -> nn.Module:
    layers, _, cut = timed(name)
    whole_s = sum(layer.seconds for layer in layers)
    pieces: OrderedDict[str, nn.Module] = OrderedDict()
    for key, part in (("front", layers[:cut]), ("back", layers[cut:])):
        parameters = sum(layer.parameters_bytes for layer in part) // 4
        seconds = sum(layer.seconds for layer in part)
        outputs = part[-1].output_bytes // 4 if key == "front" else classes  # which go nowhere
        pieces[key] = _Piece(parameters, outputs, seconds / whole_s)
    return nn.Sequential(pieces)


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return partial(_stand_in, name)


def __dir__() -> list[str]:
    return [*NAMES]
