"""The eight networks of the RALP paper as lists of layers, computed from the shapes of their layers, and their times.

Each convolution, pooling and fully connected layer is one; biases count, BatchNorm does not. Where branches run beside
each other, they follow one another in the order of the columns, and the model can be cut only behind the last.

Source: Park et al., RALP, §3 and Table 1, whose TensorFlow benchmarks these are: its skewness follows from them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rudra.core.placement import Layer, PlacementHardware, choose

_FLOAT = 4


@dataclass(frozen=True, slots=True)
class Worked(Layer):
    """A layer, and what it has to do for one sample on the way forward.

    Attributes:
        operations: multiplications and additions.
        input_bytes: that it reads.
    """

    operations: int = 0
    input_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Device:
    """What computes, and how fast.

    Attributes:
        operations_per_s: that it reaches.
        bytes_per_s: that its memory moves.
        step_s: of each mini-batch, whatever its size.
    """

    operations_per_s: float
    bytes_per_s: float
    step_s: float = 0.0

    def timed(self, layers: Sequence[Worked], minibatch_size: int) -> list[Worked]:
        """The layers with their times: arithmetic or memory, whichever takes longer; backward twice as long as forward.

        What a mini-batch takes whatever it is belongs to the first.
        """
        found: list[Worked] = []
        for layer in layers:
            moved = layer.parameters_bytes + minibatch_size * (layer.input_bytes + layer.output_bytes)
            seconds = max(minibatch_size * layer.operations / self.operations_per_s, moved / self.bytes_per_s)
            fixed_s = 0.0 if found else self.step_s
            found.append(replace(layer, forward_s=seconds + fixed_s, backward_s=2 * seconds))
        return found


class _Net:
    """Layers one after the other.

    Args:
        side: pixels of the input's rows and columns.
    """

    def __init__(self, side: int, channels: int = 3) -> None:
        self.layers: list[Worked] = []
        self.channels, self.rows, self.columns = channels, side, side

    def convolution(
        self, outputs: int, kernel: int | tuple[int, int], stride: int = 1, *, same: bool = True, cut: bool = True
    ) -> "_Net":
        high, wide = (kernel, kernel) if isinstance(kernel, int) else kernel
        given, parameters = self._output_bytes(), (high * wide * self.channels + 1) * outputs
        self._shape(outputs, high, wide, stride, same=same)
        return self._add("convolution", parameters, given, 2 * parameters * self.rows * self.columns, cut=cut)

    def pool(self, kernel: int = 2, stride: int = 2, *, same: bool = False, cut: bool = True) -> "_Net":
        given = self._output_bytes()
        self._shape(self.channels, kernel, kernel, stride, same=same)
        return self._add("pool", 0, given, cut=cut)

    def mean(self) -> "_Net":
        given = self._output_bytes()
        self.rows = self.columns = 1
        return self._add("pool", 0, given)

    def linear(self, *outputs: int) -> "_Net":
        for count in outputs:
            given, parameters = self._output_bytes(), (self.channels * self.rows * self.columns + 1) * count
            self.channels, self.rows, self.columns = count, 1, 1
            self._add("linear", parameters, given, 2 * parameters)
        return self

    def branches(self, *columns: Sequence[tuple[str, int, int | tuple[int, int], int, bool]]) -> "_Net":
        """Columns of (kind, outputs, kernel, stride, same) beside each other, whose outputs become one."""
        given = self.channels, self.rows, self.columns
        outputs = 0
        for column in columns:
            self.channels, self.rows, self.columns = given
            for kind, count, kernel, stride, same in column:
                if kind == "pool":
                    assert isinstance(kernel, int)
                    self.pool(kernel, stride, same=same, cut=False)
                elif kind == "conv":
                    self.convolution(count, kernel, stride, same=same, cut=False)
                else:  # shares what the column before has made
                    self.channels = count
            outputs += self.channels
        self.channels = outputs
        return self._joined()

    def _joined(self) -> "_Net":
        """Makes the last layer one that all of the model's data cross."""
        self.layers[-1] = replace(self.layers[-1], output_bytes=self._output_bytes(), cut=True)
        return self

    def _shape(self, channels: int, high: int, wide: int, stride: int, *, same: bool) -> None:
        self.channels = channels
        rows, columns = (self.rows, self.columns) if same else (self.rows - high + 1, self.columns - wide + 1)
        self.rows, self.columns = -(-rows // stride), -(-columns // stride)

    def _add(self, kind: str, parameters: int, given: int, operations: int = 0, *, cut: bool = True) -> "_Net":
        name, made = f"{kind}{sum(layer.kind == kind for layer in self.layers) + 1}", self._output_bytes()
        about = {"cut": cut, "operations": operations, "input_bytes": given}
        self.layers.append(Worked(name, kind, _FLOAT * parameters, made, **about))  # type: ignore[arg-type]
        return self

    def _output_bytes(self) -> int:
        return _FLOAT * self.channels * self.rows * self.columns


def alexnet(classes: int) -> list[Worked]:
    net = _Net(227).convolution(64, 11, 4, same=False).pool(3).convolution(192, 5).pool(3)  # 224, padded
    net.convolution(384, 3).convolution(384, 3).convolution(256, 3).pool(3)
    return net.linear(4096, 4096, classes).layers


def lenet(classes: int) -> list[Worked]:
    return _Net(28).convolution(32, 5).pool().convolution(64, 5).pool().linear(512, classes).layers


def overfeat(classes: int) -> list[Worked]:
    net = _Net(231).convolution(96, 11, 4, same=False).pool().convolution(256, 5, same=False).pool()
    net.convolution(512, 3).convolution(1024, 3).convolution(1024, 3).pool()
    return net.linear(3072, 4096, classes).layers


def _vgg(counts: Sequence[int]) -> Callable[[int], list[Worked]]:
    def layers(classes: int) -> list[Worked]:
        net = _Net(224)
        for count, outputs in zip(counts, (64, 128, 256, 512, 512), strict=True):
            for _ in range(count):
                net.convolution(outputs, 3)
            net.pool()
        return net.linear(4096, 4096, classes).layers

    return layers


def resnet50(classes: int) -> list[Worked]:
    """The convolution of a short cut stands before those of its block."""
    net = _Net(224).convolution(64, 7, 2).pool(3, same=True)
    for stage, count in enumerate((3, 4, 6, 3)):
        width = 64 << stage
        for block in range(count):
            stride = 2 if stage and not block else 1
            main = [("conv", width, 1, stride, True), ("conv", width, 3, 1, True), ("conv", 4 * width, 1, 1, True)]
            short = [("conv", 4 * width, 1, stride, True)]
            net.branches(*([main] if block else [short, main]))
            net.channels = 4 * width  # they are added up
            net._joined()
    return net.mean().linear(classes).layers


def googlenet(classes: int) -> list[Worked]:
    net = _Net(224).convolution(64, 7, 2).pool(3, same=True).convolution(64, 1).convolution(192, 3).pool(3, same=True)
    modules = (
        *((64, 96, 128, 16, 32, 32), (128, 128, 192, 32, 96, 64), None),
        *((192, 96, 208, 16, 48, 64), (160, 112, 224, 24, 64, 64), (128, 128, 256, 24, 64, 64)),
        *((112, 144, 288, 32, 64, 64), (256, 160, 320, 32, 128, 128), None),
        *((256, 160, 320, 32, 128, 128), (384, 192, 384, 48, 128, 128)),
    )
    for module in modules:
        if module is None:
            net.pool(3, same=True)
            continue
        one, less3, three, less5, five, pooled = module
        net.branches(
            [("conv", one, 1, 1, True)],
            [("conv", less3, 1, 1, True), ("conv", three, 3, 1, True)],
            [("conv", less5, 1, 1, True), ("conv", five, 5, 1, True)],
            [("pool", 0, 3, 1, True), ("conv", pooled, 1, 1, True)],
        )
    return net.mean().linear(classes).layers


def inception3(classes: int) -> list[Worked]:
    net = _Net(299).convolution(32, 3, 2, same=False).convolution(32, 3, same=False).convolution(64, 3)
    net.pool(3).convolution(80, 1).convolution(192, 3, same=False).pool(3)
    for pooled in (32, 64, 64):
        net.branches(
            _column((64, 1)), _column((48, 1), (64, 5)), _column((64, 1), (96, 3), (96, 3)), _pooled((pooled, 1))
        )
    net.branches([("conv", 384, 3, 2, False)], [*_column((64, 1), (96, 3)), ("conv", 96, 3, 2, False)], [_HALVED])
    for n in (128, 160, 160, 192):
        net.branches(
            _column((192, 1)),
            _column((n, 1), (n, (1, 7)), (192, (7, 1))),
            _column((n, 1), (n, (7, 1)), (n, (1, 7)), (n, (7, 1)), (192, (1, 7))),
            _pooled((192, 1)),
        )
    net.branches(
        [*_column((192, 1)), ("conv", 320, 3, 2, False)],
        [*_column((192, 1), (192, (1, 7)), (192, (7, 1))), ("conv", 192, 3, 2, False)],
        [_HALVED],
    )
    for _ in range(2):
        net.branches(
            _column((320, 1)),
            _column((384, 1), (384, (1, 3))),
            [("shared", 384, 1, 1, True), *_column((384, (3, 1)))],
            _column((448, 1), (384, 3), (384, (1, 3))),
            [("shared", 384, 1, 1, True), *_column((384, (3, 1)))],
            _pooled((192, 1)),
        )
    return net.mean().linear(classes).layers


_Entry = tuple[str, int, int | tuple[int, int], int, bool]
_HALVED: _Entry = ("pool", 0, 3, 2, False)


def _column(*convolutions: tuple[int, int | tuple[int, int]]) -> list[_Entry]:
    return [("conv", outputs, kernel, 1, True) for outputs, kernel in convolutions]


def _pooled(*convolutions: tuple[int, int | tuple[int, int]]) -> list[_Entry]:
    return [("pool", 0, 3, 1, True), *_column(*convolutions)]


NETWORKS: dict[str, tuple[Callable[[int], list[Worked]], int]] = {
    "AlexNet": (alexnet, 512),
    "GoogLeNet": (googlenet, 32),
    "Inception-v3": (inception3, 32),
    "LeNet": (lenet, 32),
    "OverFeat": (overfeat, 32),
    "ResNet-50": (resnet50, 64),
    "VGG11": (_vgg((1, 1, 2, 2, 2)), 64),
    "VGG19": (_vgg((2, 2, 4, 4, 4)), 64),
}
"""Name -> layers for so many classes, and the mini-batch of a worker: of AlexNet, Inception-v3 and VGG11 it follows
from the paper's Table 2, of the others it is that of TensorFlow's benchmarks."""

CLASSES = {"": 1000, "_22k": 21_841}
BYTES_PER_S, STEP_S = 547.7e9, 2e-3  # a TITAN Xp's memory; not in the paper: launches of kernels, and TensorFlow's own
PLAIN = Device(20e12, BYTES_PER_S, STEP_S)
"""1.65 times the peak of a TITAN Xp, as Winograd's convolutions do with fewer multiplications; not in the paper."""
NORMALISED = Device(3.6e12, BYTES_PER_S, STEP_S)
"""BatchNorm and many small convolutions: 153 images/s of ResNet-50, of which the paper's GPUs do 137 at least."""

DEVICES = {name: NORMALISED if name[0] in "GIR" else PLAIN for name in NETWORKS}
NAMES = {f"{name.replace('-', '')}{suffix}": (name, count) for name in NETWORKS for suffix, count in CLASSES.items()}
"""Name of a stand-in (`rudra.studies.standins`) -> network and number of classes."""


def timed(name: str) -> tuple[list[Worked], int, int]:
    """The layers of the network that a stand-in is for, the mini-batch of a worker, and how many are in front.

    The cut is that of RALP's rule, for whatever number of workers.
    """
    network, classes = NAMES[name]
    make, size = NETWORKS[network]
    layers = DEVICES[network].timed(make(classes), size)
    cut = choose("ralp", layers, PlacementHardware(1, size)).cut
    return layers, size, cut.index
