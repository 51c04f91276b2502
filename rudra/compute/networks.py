"""Networks that Rudra ships.

Each factory receives the shape of one input, the number of classes, and the options of the job.
"""

import itertools
import math
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from rudra.compute.sparse import SparseLinear
from rudra.errors import ConfigError

_ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "sigmoid": nn.Sigmoid, "tanh": nn.Tanh}


def mlp(
    input_shape: Sequence[int],
    classes: int,
    hidden: Sequence[int] = (128,),
    activation: str = "relu",
    biases: bool = True,
    initialisation: str = "auto",
    sparse: bool = False,
) -> nn.Module:
    """Fully connected layers with relu, sigmoid or tanh between them.

    Args:
        input_shape: Shape of a sample. The network flattens it.
        classes: Number of outputs.
        hidden: Width of each hidden layer.
        activation: Activation after each hidden layer.
        biases: Whether all layers have a bias.
        initialisation: "auto", torch's for relu and Xavier's for the others; "fan-in", normal with deviation 1/√n for
            n inputs of a layer; or "hogbatch", normal with variance 2 d / (inputs + outputs of the layer), where d is
            ⌊√(inputs + outputs of the first layer)⌋ + 1. With the last two, biases start at 0.
        sparse: Whether the first layer is a `SparseLinear`, for sparse inputs. The initial weights do not depend on it.

    Hogbatch's networks have sigmoids, layers of 512 and no biases: covtype's 1,339,392 parameters (54 inputs, six
    hidden layers, 2 classes), delicious' 2,070,016 (500 inputs, six, 983 labels).

    Source: Ma & Rusu, Heterogeneous CPU+GPU SGD, Table 2. Glorot & Bengio 2010 for the initialisation of sigmoid and
    tanh. Ma & Rusu print a standard deviation equal to the number of units, which would saturate every sigmoid. Their
    code has "hogbatch", which keeps the size of signals through layers of 512 sigmoids, unlike "fan-in".
    """
    if activation not in _ACTIVATIONS:
        raise ConfigError(f"[model] mlp has no activation {activation!r}; valid: {', '.join(_ACTIVATIONS)}")
    if initialisation not in ("auto", *_NORMAL):
        valid = ", ".join(("auto", *_NORMAL))
        raise ConfigError(f"[model] mlp has no initialisation {initialisation!r}; valid: {valid}")
    if initialisation == "auto" and activation == "sigmoid" and not biases:
        raise ConfigError(f"[model] mlp: Xavier's sigmoids need biases; valid: initialisation {' or '.join(_NORMAL)}")
    sizes = [math.prod(input_shape), *hidden, classes]
    linear = [nn.Linear(inputs, outputs, biases) for inputs, outputs in itertools.pairwise(sizes)]
    if initialisation != "auto":
        _normal(linear, _NORMAL[initialisation])
    elif activation != "relu":
        _xavier(linear, sigmoid=activation == "sigmoid")
    layers: list[nn.Module] = [nn.Flatten()]
    for layer in linear[:-1]:
        layers += [layer, _ACTIVATIONS[activation]()]
    model = nn.Sequential(*layers, linear[-1])
    if sparse:
        model[0], model[1] = nn.Identity(), SparseLinear.like(linear[0])  # no layer's name changes
    return model


_NORMAL: dict[str, Callable[[nn.Linear, nn.Linear], float]] = {
    "fan-in": lambda layer, first: 1 / layer.in_features,
    "hogbatch": lambda layer, first: (
        2 * (math.isqrt(first.in_features + first.out_features) + 1) / (layer.in_features + layer.out_features)
    ),
}
"""Variance of a layer's weights for each initialisation. It may depend on the first layer."""


def _normal(layers: Sequence[nn.Linear], variance: Callable[[nn.Linear, nn.Linear], float]) -> None:
    for layer in layers:
        nn.init.normal_(layer.weight, std=math.sqrt(variance(layer, layers[0])))
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)


def _xavier(layers: Sequence[nn.Linear], *, sigmoid: bool) -> None:
    """Initialises the layers with Xavier's weights, which keep the size of signals from one tanh to the next.

    With sigmoids, the network starts equal to a network of tanh by σ(x) = 1/2 + tanh(x / 2) / 2: twice the weights
    before a sigmoid, twice the weights after it, and biases that cancel the 1/2. With torch's weights or Xavier's own,
    networks of four or more sigmoid layers hardly learn.
    """
    for index, layer in enumerate(layers):
        behind, before = sigmoid and index > 0, sigmoid and index < len(layers) - 1
        nn.init.xavier_normal_(layer.weight, (1 + behind) * (1 + before))
        with torch.no_grad():
            if layer.bias is not None:
                layer.bias.copy_(layer.weight.sum(1) * (-0.5 if behind else 0))


def lenet(
    input_shape: Sequence[int], classes: int, channels: tuple[int, int] = (20, 50), hidden: int = 500
) -> nn.Module:
    """Caffe's LeNet: 431,080 parameters on 28x28x1 and ten classes.

    Inputs below 20x20 get 3x3 convolutions that keep the size, and only one pooling, after the second convolution.
    Channels (32, 64) and 1024 hidden units give the size of CROSSBOW's LeNet (1,111,946 parameters, 4.24 MiB). CROSSBOW
    also has ReLU after the convolutions, and dropout.
    """
    depth, height, width = _image("lenet", input_shape, least=4)
    small = min(height, width) < 20
    kernel, padding = (3, 1) if small else (5, 0)
    first_pool: nn.Module = nn.Identity() if small else nn.MaxPool2d(2, ceil_mode=True)
    convolutions = nn.Sequential(
        nn.Conv2d(depth, channels[0], kernel, padding=padding),
        first_pool,
        nn.Conv2d(channels[0], channels[1], kernel, padding=padding),
        nn.MaxPool2d(2, ceil_mode=True),
        nn.Flatten(),
    )
    features = _features(convolutions, input_shape)
    model = nn.Sequential(*convolutions, nn.Linear(features, hidden), nn.ReLU(inplace=True), nn.Linear(hidden, classes))
    for layer in model:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            bound = math.sqrt(3 / layer.weight[0].numel())  # Caffe's "xavier": depends only on a neuron's inputs
            nn.init.uniform_(layer.weight, -bound, bound)
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    return model


class _LocalNorm(nn.Module):
    """Caffe's response normalisation within each channel: x / (1 + alpha * mean of x² around it) ** 0.75."""

    def __init__(self, size: int = 3, alpha: float = 5e-5) -> None:
        super().__init__()
        self.size, self.alpha = size, alpha

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        # A depthwise convolution takes a third of the time of torch's pooling, and two roots take less than a power.
        channels = inputs.shape[1]
        weight = inputs.new_full((channels, 1, self.size, self.size), self.alpha / self.size**2)
        root = torch.rsqrt(1 + functional.conv2d(inputs * inputs, weight, padding=self.size // 2, groups=channels))
        return inputs * root * root.sqrt()


def cifar10_full(input_shape: Sequence[int], classes: int) -> nn.Module:
    """Caffe's cifar10_full: 89,578 parameters on 32x32x3 and ten classes.

    It expects inputs of 0…255 minus the mean, because its initial weights are tiny.

    Source: Rudra §4.2, which names the network without details. The details are Caffe's.
    """
    depth, _, _ = _image("cifar10_full", input_shape, least=16)
    convolutions = nn.Sequential(
        nn.Conv2d(depth, 32, 5, padding=2),
        nn.MaxPool2d(3, 2, ceil_mode=True),
        nn.ReLU(),
        _LocalNorm(),
        nn.Conv2d(32, 32, 5, padding=2),
        nn.ReLU(inplace=True),
        nn.AvgPool2d(3, 2, ceil_mode=True),
        _LocalNorm(),
        nn.Conv2d(32, 64, 5, padding=2),
        nn.ReLU(inplace=True),
        nn.AvgPool2d(3, 2, ceil_mode=True),
        nn.Flatten(),
    )
    model = nn.Sequential(*convolutions, nn.Linear(_features(convolutions, input_shape), classes))
    layers = [layer for layer in model if isinstance(layer, nn.Conv2d | nn.Linear)]
    for layer, deviation in zip(layers, (1e-4, 1e-2, 1e-2, 1e-2), strict=True):
        nn.init.normal_(layer.weight, std=deviation)
        nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    return model


def alexnet(input_shape: Sequence[int], classes: int, width: int = 4616, dropout: float = 0.5) -> nn.Module:
    """AlexNet: five convolutions, three fully connected layers, dropout after the first two fully connected layers.

    72,221,944 parameters (288.9 MB) with 1000 classes, for any input of 3x63x63 or more. 3x224x224 is usual.

    Source: Rudra §4.3, which gives about 72 M parameters and 289 MB but no widths. The convolutions here are the
    published ones in one group. `width`, of the fully connected layers, is chosen for that size instead of 4096.
    """
    depth, _, _ = _image("alexnet", input_shape, least=63)
    return nn.Sequential(
        nn.Conv2d(depth, 96, 11, stride=4, padding=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2),
        nn.Conv2d(96, 256, 5, padding=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2),
        nn.Conv2d(256, 384, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(384, 384, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(384, 256, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2),
        nn.AdaptiveAvgPool2d(6),
        nn.Flatten(),
        nn.Linear(256 * 6 * 6, width),
        nn.ReLU(inplace=True),
        nn.Dropout(dropout),
        nn.Linear(width, width),
        nn.ReLU(inplace=True),
        nn.Dropout(dropout),
        nn.Linear(width, classes),
    )


def vgg16(
    input_shape: Sequence[int], classes: int, width: int = 64, batch_norm: bool = True, dropout: float = 0.5
) -> nn.Module:
    """VGG-16 for small images: 15,038,116 parameters (57.37 MiB) on 32x32x3 and 100 classes.

    Args:
        input_shape: (channels, height, width), 8x8 or more.
        classes: Number of outputs.
        width: Channels of the first stage. The others have 2, 4, 8 and 8 times as many. The hidden layer has 8 times.
        batch_norm: Whether BatchNorm follows every ReLU. It needs mini-batches of two samples or more.
        dropout: Dropout before the linear layers; 0.6 times this between convolutions of the first stage, else 0.8
            times.

    Source: CROSSBOW, Table 1, with the layers of its code and of github.com/geifmany/cifar-vgg. He's initialisation.
    """
    inputs, rows, columns = _image("vgg16", input_shape, least=8)
    layers: list[nn.Module] = []
    for count, factor in ((2, 1), (2, 2), (3, 4), (3, 8), (3, 8)):
        outputs = factor * width
        for index in range(count):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(inplace=True)]
            layers += [nn.BatchNorm2d(outputs, eps=1e-3)] if batch_norm else []
            between = nn.Dropout((0.6 if factor == 1 else 0.8) * dropout)
            layers.append(between if index < count - 1 else nn.MaxPool2d(2, ceil_mode=True))
            inputs = outputs
    features = inputs * math.ceil(rows / 32) * math.ceil(columns / 32)
    layers += [nn.Flatten(), nn.Dropout(dropout), nn.Linear(features, inputs), nn.ReLU(inplace=True)]
    layers += [nn.BatchNorm1d(inputs, eps=1e-3)] if batch_norm else []
    return _he(nn.Sequential(*layers, nn.Dropout(dropout), nn.Linear(inputs, classes)))


def resnet32(input_shape: Sequence[int], classes: int, blocks: int = 5, width: int = 16) -> nn.Module:
    """ResNet for small images: 464,154 parameters on 32x32x3 and ten classes.

    Args:
        input_shape: (channels, height, width), 8x8 or more.
        classes: Number of outputs.
        blocks: Number of blocks in each of the three stages: 5 for ResNet-32, 3 for ResNet-20 (269,722 parameters).
        width: Channels of the first stage. The others have twice and four times as many.

    Source: He et al. 2015, Deep Residual Learning, §4.2. CROSSBOW's code has projections in two shortcuts instead.
    """
    depth, _, _ = _image("resnet32", input_shape, least=8)
    if blocks < 1:
        raise ConfigError(f"[model] resnet32 needs blocks of 1 or more, not {blocks}")
    stem = {"conv1": _convolution(depth, width, 3), "bn1": nn.BatchNorm2d(width), "relu": nn.ReLU(inplace=True)}
    return _residual(stem, _Basic, [blocks] * 3, width, classes)


def resnet50(input_shape: Sequence[int], classes: int) -> nn.Module:
    """ResNet-50 v1.5: 25,557,032 parameters (97.49 MiB) with 1000 classes, for 32x32 or more (3x224x224 is usual).

    Parameters and buffers have the names and shapes of torchvision's `resnet50`, so that its weights can be loaded.

    Source: He et al. 2015, Deep Residual Learning, §4.1. v1.5 has its strides in 3x3 convolutions. CROSSBOW, Table 1.
    """
    depth, _, _ = _image("resnet50", input_shape, least=32)
    stem = {"conv1": _convolution(depth, 64, 7, 2), "bn1": nn.BatchNorm2d(64), "relu": nn.ReLU(inplace=True)}
    return _residual(stem | {"maxpool": nn.MaxPool2d(3, 2, 1)}, _Bottleneck, [3, 4, 6, 3], 64, classes)


class _Basic(nn.Module):
    """Two 3x3 convolutions. The shortcut takes every other pixel and has zeros in the new channels (option A)."""

    expansion = 1  # output channels / width

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _convolution(inputs, width, 3, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _convolution(width, width, 3)
        self.bn2 = nn.BatchNorm2d(width)
        self.stride = stride

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.bn1(self.conv1(inputs)), inplace=True)
        x = self.bn2(self.conv2(x))
        if self.stride > 1:
            new = x.shape[1] - inputs.shape[1]
            inputs = functional.pad(inputs[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, new))
        return functional.relu(x + inputs, inplace=True)


class _Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions. If the shape changes, the shortcut is a projection (option B)."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = self.expansion * width
        self.conv1 = _convolution(inputs, width, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _convolution(width, width, 3, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = _convolution(width, outputs, 1)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.downsample: nn.Module = nn.Identity()
        if inputs != outputs:
            self.downsample = nn.Sequential(_convolution(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.bn1(self.conv1(inputs)), inplace=True)
        x = functional.relu(self.bn2(self.conv2(x)), inplace=True)
        return functional.relu(self.bn3(self.conv3(x)) + self.downsample(inputs), inplace=True)


def _residual(
    stem: Mapping[str, nn.Module], block: type[_Basic | _Bottleneck], blocks: Sequence[int], width: int, classes: int
) -> nn.Module:
    """Returns the stem and stages of `blocks` blocks. Each stage but the first halves pixels and doubles channels."""
    layers = OrderedDict(stem)
    inputs = width
    for stage, count in enumerate(blocks):
        made = []
        for index in range(count):
            made.append(block(inputs, width << stage, 2 if stage and not index else 1))
            inputs = (width << stage) * block.expansion
        layers[f"layer{stage + 1}"] = nn.Sequential(*made)
    layers |= {"avgpool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten(), "fc": nn.Linear(inputs, classes)}
    return _he(nn.Sequential(layers))


def lstm(input_shape: Sequence[int], classes: int, hidden: int = 128, layers: int = 2) -> nn.Module:
    """LSTM that predicts the next characters: 280,897 parameters with 65 characters.

    Its inputs are (samples, T) int64, its outputs (samples, T, classes), for any T. Every batch starts with a state of
    zeros.

    Args:
        input_shape: (T,).
        classes: Number of different characters.
        hidden: Number of units in each layer, and size of the embedding.
        layers: Number of stacked LSTMs.

    Source: github.com/karpathy/char-rnn, its default network, with an embedding in front.
    """
    if len(input_shape) != 1:
        raise ConfigError(f"[model] lstm takes sequences of shape (T,), not inputs of shape {tuple(input_shape)}")
    made: OrderedDict[str, nn.Module] = OrderedDict(embedding=nn.Embedding(classes, hidden))
    made["lstm"] = _Hidden(hidden, hidden, layers, batch_first=True)
    made["fc"] = nn.Linear(hidden, classes)
    return nn.Sequential(made)


class _Hidden(nn.LSTM):
    """LSTM that returns only the hidden states of all steps."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        if inputs.device.type == "cpu":
            return super().forward(inputs)[0]
        with warnings.catch_warnings():  # cuDNN copies weights of a larger vector together, and warns of it
            warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")
            return super().forward(inputs)[0]


MODELS: dict[str, Callable[..., Any]] = {
    factory.__name__: factory for factory in (mlp, lenet, cifar10_full, alexnet, vgg16, resnet32, resnet50, lstm)
}


def _image(name: str, input_shape: Sequence[int], least: int) -> tuple[int, int, int]:
    if len(input_shape) != 3 or min(input_shape[1:]) < least:
        wanted = f"(channels, height, width) of {least}x{least} or more"
        raise ConfigError(f"[model] {name} takes images {wanted}, not inputs of shape {tuple(input_shape)}")
    depth, height, width = input_shape
    return depth, height, width


def _features(layers: nn.Module, input_shape: Sequence[int]) -> int:
    """Returns the number of outputs of the layers for one sample."""
    with torch.no_grad():
        return int(layers(torch.zeros(1, *input_shape)).shape[1])


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    """Returns a convolution that keeps the size except for the stride. BatchNorm follows, so it has no bias."""
    return nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)


def _he(model: nn.Module) -> nn.Module:
    """Initialises convolutions with He's normal weights, which keep the size of signals after ReLUs."""
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return model
