"""Gradients that a device computes from recorded graphs, without Python code between its operations.

A small step takes a GPU less time than Python needs to name its operations. A graph names them once.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import numpy.typing as npt
import torch

from rudra.compute.device.devices import kind_of
from rudra.compute.device.graphs import Graph, NotRecordedError
from rudra.compute.device.streams import Number
from rudra.data.trees import leaves, mapped, moved
from rudra.log import log

WARM = 2
"""Mini-batches of a shape that are computed as usual, before one is recorded: libraries try their kernels in these."""

KEPT = 8
"""Most graphs of a model. Each belongs to a vector of weights, a vector for the gradient, and shapes."""


SEEN = 100
"""Most sorts of steps that are counted."""


class Passed(NamedTuple):
    """Results of a pass, in addition to the gradient.

    Attributes:
        loss: Mean loss, a tensor of one element.
        wrong: As `Task.wrong` returns it. In a graph on a device: number of wrong samples.
        output: Output of the model.
    """

    loss: torch.Tensor
    wrong: npt.NDArray[Any] | torch.Tensor | None
    output: Any


class GraphedPass(NamedTuple):
    """Pass that a device repeats.

    Attributes:
        graph: The recorded work.
        inputs: Memory for inputs, which the graph reads.
        target: Memory for targets, which the graph reads.
        passed: Results, which the graph writes.
        vectors: Weights and gradient. The graph knows only their addresses, so they must live as long.
    """

    graph: Graph
    inputs: Any
    target: Any
    passed: Passed
    vectors: tuple[torch.Tensor, torch.Tensor]

    def repeat(self, inputs: Any, target: Any) -> Passed:
        """Computes the gradient of a mini-batch of the same shapes, with the generator's state."""
        for there, given in ((self.inputs, inputs), (self.target, target)):
            for old, new in zip(leaves(there), leaves(given), strict=True):
                old.copy_(new, non_blocking=True)
        self.graph.replay()
        return self.passed


class GraphedPasses:
    """All recorded passes of a model.

    Args:
        device: Device of the model.
        compute: (inputs, target, out) -> what a pass at the bound weights has computed. It seeds no generator.

    Attributes:
        refusal: Why passes of this model cannot be recorded. Empty: they can, or none has been tried.
    """

    def __init__(self, device: torch.device, compute: Callable[[Any, Any, torch.Tensor], Passed]) -> None:
        self._device, self._compute = device, compute
        self._seen: Counter[tuple[Any, ...]] = Counter()
        self._known: dict[tuple[Any, ...], GraphedPass] = {}
        self.refusal = ""

    @property
    def tried(self) -> bool:
        """Whether a pass has been recorded, or could not be."""
        return bool(self._known or self.refusal)

    def of(self, inputs: Any, target: Any, weights: torch.Tensor, out: torch.Tensor) -> GraphedPass | None:
        """Returns the recorded pass for a mini-batch like this one. None: there is none, so compute as usual.

        Args:
            inputs: As for `FlatModel.gradient`.
            target: As for `FlatModel.gradient`.
            weights: (size,) float32, the bound weights.
            out: (size,) float32, receives the gradient.
        """
        shapes = tuple((tensor.shape, tensor.dtype) for tensor in (*leaves(inputs), *leaves(target)))
        key = (*shapes, weights.data_ptr(), out.data_ptr())
        if key in self._known and not self._known[key].graph.is_valid():
            del self._known[key]
        if key not in self._known and not self.refusal:
            self._seen[shapes] += 1
            if self._seen[shapes] > WARM and len(self._known) < KEPT:
                try:
                    self._known[key] = self._recorded(inputs, target, weights, out)
                except NotRecordedError as error:
                    self.refuse(str(error))
        return self._known.get(key)

    def refuse(self, reason: str) -> None:
        """Computes all further passes as usual, and says why."""
        self.refusal = reason
        log.info(f"the step is not recorded as a graph: {reason}")

    def _recorded(self, inputs: Any, target: Any, weights: torch.Tensor, out: torch.Tensor) -> GraphedPass:
        if any(tensor.requires_grad for tensor in leaves(inputs)):
            raise NotRecordedError("the gradient of inputs is needed")
        inputs, target = (mapped(torch.clone, moved(each, self._device)) for each in (inputs, target))
        kind = kind_of(self._device)
        graph, passed = kind.record(self._device, lambda: self._compute(inputs, target, out))
        return GraphedPass(graph, inputs, target, passed, (weights, out))


class GraphedWork(NamedTuple):
    """Work that a device repeats.

    Attributes:
        graph: The recorded work.
        numbers: Its results, which the graph writes.
        tensors: Tensors that it reads and writes. The graph knows only their addresses, so they must live as long.
    """

    graph: Graph
    numbers: tuple[Number, ...]
    tensors: tuple[torch.Tensor, ...]


class GraphedSteps:
    """All recorded steps of an optimiser, with all that belongs to a step.

    Args:
        device: Device of the weights.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._possible = device, kind_of(device).records
        self._seen: Counter[Hashable] = Counter()
        self._known: dict[Hashable, GraphedWork] = {}

    @property
    def count(self) -> int:
        """Number of recorded steps."""
        return len(self._known)

    def forget(self) -> None:
        """Records all steps again, because the optimiser has other settings or tensors."""
        self._known.clear()
        self._seen.clear()

    def do(
        self,
        work: Callable[[], tuple[Number, ...]],
        about: Hashable,
        read: Sequence[torch.Tensor],
        written: Sequence[torch.Tensor],
    ) -> tuple[Number, ...]:
        """Does work, from a record if it has been done a few times.

        Args:
            work: Returns numbers, on the device if it computes them.
            about: Everything that the work depends on, except these tensors.
            read: Tensors that it only reads.
            written: Tensors that it changes.
        """
        if not self._possible:
            return work()
        key = about, *(tensor.data_ptr() for tensor in (*read, *written))
        if key in self._known and not self._known[key].graph.is_valid():
            del self._known[key]
        if key not in self._known:
            if len(self._seen) > SEEN:  # a rate of its own for each step, for instance
                self._seen.clear()
            self._seen[key] += 1
            if self._seen[key] <= WARM or not self._record(key, work, read, written):
                return work()
        found = self._known[key]
        found.graph.replay()
        return found.numbers

    def _record(
        self,
        key: Hashable,
        work: Callable[[], tuple[Number, ...]],
        read: Sequence[torch.Tensor],
        written: Sequence[torch.Tensor],
    ) -> bool:
        """Records work, which changes nothing now. Returns whether that is possible."""
        before = [tensor.clone() for tensor in written]
        while len(self._known) >= KEPT:  # of other rates, for instance
            del self._known[next(iter(self._known))]
        try:
            self._known[key] = GraphedWork(*kind_of(self._device).record(self._device, work), (*read, *written))
        except NotRecordedError as error:
            self._possible = False
            log.info(f"the steps of replicas are not recorded as a graph: {error}")
        for tensor, value in zip(written, before, strict=True):
            tensor.copy_(value)
        return self._possible
