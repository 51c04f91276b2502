"""Stand-ins for the eight networks of the RALP paper: their sizes, and times on its GPU, without their arithmetic.

A stand-in has two layers: `front`, which learners compute in RALP, and `back`, which RALP places. Each has the
parameters, the output size and the share of the time that its part of the network has. Stand-ins are for timing-only
simulations of jobs with `[simulation] costs = "ralp"`. `VGG11` has 1,000 classes, and `VGG11_22k` has the classes of
ImageNet-22K. The names of the other networks work the same way.
"""

from collections import OrderedDict
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn


class StandIn(NamedTuple):
    """Sizes and times of a network that is cut in front of its first fully connected layer.

    Attributes:
        front: parameters of the layers that learners compute.
        outputs: output size of these layers for one sample.
        back: parameters of the other layers.
        part: time of the learners' layers, in millionths of the time of a mini-batch.
    """

    front: int
    outputs: int
    back: int
    part: int


STAND_INS = {  # from the shapes of the networks and the speed of the GPU, in tests/unit/convnets.py
    "AlexNet": StandIn(3_207_104, 9_216, 58_631_144, 933_847),
    "AlexNet_22k": StandIn(3_207_104, 9_216, 144_016_721, 851_786),
    "GoogLeNet": StandIn(5_973_552, 1_024, 1_025_000, 999_390),
    "GoogLeNet_22k": StandIn(5_973_552, 1_024, 22_387_025, 986_846),
    "Inceptionv3": StandIn(21_768_352, 2_048, 2_049_000, 999_651),
    "Inceptionv3_22k": StandIn(21_768_352, 2_048, 44_752_209, 992_424),
    "LeNet": StandIn(53_696, 3_136, 2_119_144, 977_238),
    "LeNet_22k": StandIn(53_696, 3_136, 12_810_577, 877_879),
    "OverFeat": StandIn(15_987_584, 36_864, 129_933_288, 907_166),
    "OverFeat_22k": StandIn(15_987_584, 36_864, 215_318_865, 855_250),
    "ResNet50": StandIn(23_481_472, 2_048, 2_049_000, 999_475),
    "ResNet50_22k": StandIn(23_481_472, 2_048, 44_752_209, 988_655),
    "VGG11": StandIn(9_220_480, 25_088, 123_642_856, 982_947),
    "VGG11_22k": StandIn(9_220_480, 25_088, 209_028_433, 971_576),
    "VGG19": StandIn(20_024_384, 25_088, 123_642_856, 992_961),
    "VGG19_22k": StandIn(20_024_384, 25_088, 209_028_433, 988_188),
}


class _Piece(nn.Module):
    """Some layers of a network.

    Args:
        parameters: number of parameters of these layers.
        outputs: output size for one sample.
        operations: number of multiplications. Both pieces together have a million.
    """

    def __init__(self, parameters: int, outputs: int, operations: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(parameters))  # never touched, so it takes no memory
        self._outputs, self._operations = outputs, operations

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        ones = inputs.new_ones(self._operations)
        told = (ones[None] @ ones[:, None]).reshape(()) + 0 * self.weight[:1].nan_to_num().sum()
        return inputs.new_zeros(len(inputs), self._outputs) + told


def _stand_in(name: str, classes: int) -> nn.Module:
    about = STAND_INS[name]
    front = _Piece(about.front, about.outputs, about.part)
    back = _Piece(about.back, classes, 10**6 - about.part)  # its outputs are not used
    return nn.Sequential(OrderedDict(front=front, back=back))


def __getattr__(name: str) -> Any:
    if name not in STAND_INS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return partial(_stand_in, name)


def __dir__() -> list[str]:
    return [*STAND_INS]
