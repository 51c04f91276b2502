"""Models with flat vectors: weights and gradients travel as one vector each.

`[parameters | floating-point buffers | counters]`: a gradient has the same layout. After its parameters it holds the
buffers (such as BatchNorm's running statistics) as they were after its mini-batch. A counter is a buffer of one int64
number without dimensions. Counters in weights are whole numbers. Means of gradients may hold fractions.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from rudra.compute.autograd import Autograd, OwnDraws
from rudra.compute.chain import Chain
from rudra.compute.compiled import CompiledStep
from rudra.compute.device.devices import kind_of
from rudra.compute.device.streams import Number
from rudra.compute.direct import LARGE, direct_layers
from rudra.compute.final_gradients import Ready
from rudra.compute.flat_buffers import FlatBuffers
from rudra.compute.graphs import GraphedPass, GraphedPasses, Passed
from rudra.compute.hooks import hooked
from rudra.compute.rows import RowFormat, RowGradient
from rudra.compute.sparse import SparseLinear
from rudra.compute.tasks import Classification, LossReduction, Task, number
from rudra.compute.views import FlatViews
from rudra.core.layout import Entry, EntryKind
from rudra.data.trees import called, mapped, moved
from rudra.errors import ConfigError
from rudra.job.tables import IN_16_BITS

_KEPT = 8  # vectors with cached views for each role: generations of weights and of gradients
_SCALES = 2.0**12, 2.0**8, 2.0**4, 1.0
"""Scales of the loss in float16, which preserve small gradients. A step takes the first one that does not overflow, so
that its result depends on no other step."""


Gradients = Literal["autograd", "direct"]
"""Method of computing gradients: torch.autograd, or faster code if the model allows it (`rudra.compute.shortcuts`)."""


class FlatModel:
    """A module whose parameters, floating-point buffers and counters are in flat vectors that the caller owns.

    Parameters that are not trained, and other integer buffers, stay in the module: every rank builds the same ones.

    Args:
        module: Float32 module on one device. Parameters used at several places are counted once.
        task: Task that defines the loss.
        compiled: Whether compiled code computes gradients. They differ in their last bits.
        roles: Number of roles that share this model, each with its own vectors.
        precision: As in jobs. In 16 bits, torch.autocast selects the operations of forward, loss and backward that use
            them.
        gradients: "direct" is valid only if `rudra.compute.shortcuts.gradients_of` returns it for the model. Its
            results are bitwise identical to "autograd".

    Attributes:
        chain: Faster code than autograd for supported inputs. None: there is none.
        autograd: Gradients of all other inputs.
        graphs: Passes that the device repeats from a record. None: it computes all passes operation by operation.
        views: Views of vectors with the model's layout.
        scales: Scales of the loss that a step tries in turn. One if the loss is not scaled.
        hooked: Whether hooks may observe or change a pass.

    Raises:
        ConfigError: The model has nothing to train, or a tensor that is not float32.
    """

    def __init__(
        self,
        module: nn.Module,
        task: Task | None = None,
        roles: int = 1,
        precision: str = "float32",
        *,
        compiled: bool = False,
        gradients: Gradients = "autograd",
    ) -> None:
        self.module = module
        self.task = task or Classification(0)
        parameters = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        if not parameters:
            raise ConfigError("[model] has no parameter to train")
        self._parameters: list[torch.Tensor] = [p for _, p in parameters]
        self.device = self._parameters[0].device
        self._buffers = FlatBuffers(module, self.device)
        travelling: list[tuple[EntryKind, str, torch.Tensor]] = [
            *(("parameter", name, parameter) for name, parameter in parameters),
            *(("buffer", buffer.name, buffer.tensor) for buffer in self._buffers.floats),
            *(("counter", counter.name, counter.tensor) for counter in self._buffers.counters),
        ]
        for kind, name, tensor in travelling:
            if kind != "counter" and tensor.dtype != torch.float32:
                raise ConfigError(f"[model] {name} is {tensor.dtype}; only torch.float32 is supported")
            if isinstance(tensor, nn.parameter.UninitializedParameter | nn.parameter.UninitializedBuffer):
                raise ConfigError(f"[model] {name} has no shape yet; call the model once where you make it")
        for parameter in self._parameters:
            if not parameter.is_leaf:  # of a copied TorchScript module: autograd would give it no gradient
                parameter.detach_().requires_grad_()
        entries: list[Entry] = []
        for kind, name, tensor in travelling:
            offset = entries[-1].offset + entries[-1].size if entries else 0
            entries.append(Entry(name, tuple(tensor.shape), offset, tensor.numel(), kind))
        self.layout = tuple(entries)
        self.parameter_count = sum(p.numel() for p in self._parameters)
        self.size = entries[-1].offset + entries[-1].size
        places = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        layers = [layer for layer in module.modules() if isinstance(layer, SparseLinear)]
        sparse = (places[id(each.weight)] for each in layers if id(each.weight) in places)
        self._rows = min(sparse, default=None)  # index of the sparse layer's weight
        of_device = kind_of(self.device)
        of_device.set_products(self.device, rounded=precision == "tf32")
        self._generator = of_device.generator(self.device)
        self.scales = _SCALES if precision == "float16" else (1.0,)
        direct = gradients == "direct" and precision not in IN_16_BITS and not compiled
        self.hooked = hooked(module)
        self.chain = Chain.of(module, self._parameters, self.task) if direct else None
        self.compiled = compiled
        self._step = (
            CompiledStep(module, self.task, self._parameters, LARGE if gradients == "direct" else None)
            if compiled
            else None
        )
        self.graphs: GraphedPasses | None = None
        self._weights = torch.empty(0)  # the bound vector
        self._training: bool | None = None
        self.views = FlatViews(self.layout, _KEPT * roles)
        self._views_behind = FlatViews(self.layout[len(self._parameters) :], _KEPT * roles)
        writing = direct_layers(module, self._parameters) if direct else {}
        self.autograd = Autograd(module, self.task, self._parameters, self.layout, self.views, writing, precision)

    def record_passes(self) -> None:
        """Lets the device record passes, and repeat them. Results are bitwise identical."""
        self.graphs = GraphedPasses(self.device, self.pass_to_record)
        if self.hooked:
            self.graphs.refuse("hooks of the model may run Python code in each step")

    def draw_apart(self, *, masks: bool) -> OwnDraws:
        """Seeds a generator of the model's own from now on, because no two models can use the one of a CPU at a time.

        Args:
            masks: Whether the masks of dropout come from it, bitwise the same ones. This makes each layer a little
                slower. Layers that draw other random numbers never use it.
        """
        self._generator = torch.Generator()
        found = OwnDraws(self._generator)
        self.autograd.draws = found if masks else None
        return found

    def draw_as_usual(self) -> None:
        """Seeds the generator of the device again, and draws from it."""
        self._generator = kind_of(self.device).generator(self.device)
        self.autograd.draws = None

    def bind(self, weights: torch.Tensor) -> None:
        """Makes the module compute with these weights, without a copy.

        Args:
            weights: (size,) float32, contiguous. The module reads them until the next `bind`. Evaluation and gradients
                do not change them.
        """
        if weights.data_ptr() != self._weights.data_ptr():
            for parameter, view in zip(self._parameters, self.views.of(weights), strict=False):
                parameter.data = view
            self._weights = weights

    def read_into(self, out: torch.Tensor) -> None:
        """Copies the current parameters, buffers and counters to `out`, (size,) float32."""
        with torch.no_grad():
            tensors = [*self._parameters, *self._buffers.tensors]
            for view, tensor in zip(self.views.of(out), tensors, strict=True):
                view.copy_(tensor)

    @contextmanager
    def changing_buffers(self, behind: torch.Tensor) -> Iterator[None]:
        """Lets a pass change the buffers in a vector. If it fails, its other changes are discarded.

        Args:
            behind: (size - parameter_count,) float32, the values of the buffers before and after the pass.
        """
        if not self._buffers:
            yield
            return
        views = self._views_behind.of(behind)
        self._buffers.place(behind, views)
        try:
            yield
        except BaseException:
            self._buffers.collect()
            raise
        self._buffers.collect(behind, views)

    def forward(self, inputs: Any, seed: int, behind: torch.Tensor) -> Any:
        """Computes the module's output at the bound weights in training mode, for a later `backward`.

        Args:
            inputs: As for `gradient`.
            seed: As for `gradient`.
            behind: (size - parameter_count,) float32, receives the buffers after this mini-batch.
        """
        self.set_mode(training=True)
        behind.copy_(self._weights[self.parameter_count :])
        self.seed(seed)
        with self.changing_buffers(behind):
            return called(self.module, moved(inputs, self.device))

    def backward(
        self, output: torch.Tensor, gradient: torch.Tensor, out: torch.Tensor, ready: Ready | None = None
    ) -> None:
        """Computes the parameter gradient for an output of `forward`. The caller must bind the same weights again.

        Args:
            output: Output of `forward`.
            gradient: Gradient of the loss with respect to the output.
            out: As for `gradient`, but the buffers in it do not change.
            ready: As for `gradient`.
        """
        self.autograd.backward_from(output, gradient, self.views.of(out), ready)

    @property
    def scaled(self) -> bool:
        """Whether the loss is scaled, so that small gradients survive."""
        return len(self.scales) > 1

    @property
    def does_without_autograd(self) -> bool:
        """Whether faster code than autograd computes gradients for supported inputs."""
        return self.chain is not None

    @property
    def row_form(self) -> RowFormat | None:
        """Row format of gradients if the first layer of the model is sparse."""
        if self._rows is None:
            return None
        entry = self.layout[self._rows]
        features, width = entry.shape
        return RowFormat(entry.offset, features, width, self.size)

    def gradient(
        self,
        inputs: Any,
        target: Any,
        out: torch.Tensor | RowGradient,
        seed: int | torch.Tensor,
        ready: Ready | None = None,
        scale: float | None = None,
    ) -> tuple[Number, Number]:
        """Computes the gradient of the mean loss at the bound weights.

        Args:
            inputs: (μ, …), a tensor or several. If a tensor requires a gradient, its `grad` holds it afterwards.
            target: (μ, …), compared with the output by the task.
            out: (size,) float32, contiguous, receives the gradient of every parameter, zero for a parameter not used in
                the output, followed by the buffers after this mini-batch. It may also be a gradient in rows
                (`row_form`), but not with compiled code or another precision.
            seed: Seed of the device's default generator, for dropout and similar layers, or a generator state to
                continue from.
            ready: Called while the gradient is computed, with each part of `out` that is final. It is not called if
                only the whole gradient becomes final, as with compiled code, rows, or the scaled loss of float16.
            scale: One of `scales`, for a caller that tries the next one if the gradient `overflows`. None: the host
                waits for the device, and tries them here.

        Returns:
            Mean loss and number of wrong samples; NaN if the task defines no error. A device may still compute them.

        Raises:
            DataError: A label is outside the model's classes.
        """
        rows = out if isinstance(out, RowGradient) else None
        recorded = ready is None and (scale or self.scales[-1]) == self.scales[0]
        if recorded and isinstance(out, torch.Tensor) and (graphed := self._graphed(inputs, target, out)):
            self.seed(seed)
            loss, wrong, output = graphed.repeat(inputs, target)
            if isinstance(wrong, torch.Tensor):
                return loss, wrong
            return figures(loss, self.task.wrong(output, graphed.target))
        if self.chain is not None and self.chain.takes(inputs):
            views = self.views.of(out) if isinstance(out, torch.Tensor) else self.views.of(out.rest, self._rows)
            self.seed(seed)  # the task's loss may draw random numbers
            weights, reported = self.views.of(self._weights), None if ready is None else self.views.reporting(ready)
            output, loss, found = self.chain.gradient(inputs, target, weights, views, reported)
            if found is not None and rows is not None:
                rows.put(found)
            elif found is not None:
                views[0].zero_().index_add_(0, *found)
            wrong = self.task.wrong(output, target)
        else:
            scales = self.scales if scale is None else (scale,)
            loss, wrong, _ = self._fitting(inputs, target, out, seed, "mean", scales, ready)
        return figures(loss, wrong)

    def overflows(self, gradient: torch.Tensor) -> Number:
        """Returns whether a gradient has infinite numbers or NaN, as 1 or 0. A device may still compute it."""
        return number((~gradient[: self.parameter_count].isfinite().all()).float())

    def _graphed(self, inputs: Any, target: Any, out: torch.Tensor) -> GraphedPass | None:
        """Returns the record of a pass. None: there is none, so its operations run one by one."""
        guarded = self._step is None or not self._step.whole
        if self.graphs is None or (guarded and self.autograd.guard.sums_next):  # the host needs the sum
            return None
        return self.graphs.of(inputs, target, self._weights, out)

    def compiled_difference(self, inputs: Any, target: Any) -> float:
        """Compares the gradients of compiled code and torch at the bound weights.

        Returns:
            The norm of their difference, relative to torch's; NaN if the model draws random numbers, because compiled
            code draws them differently.
        """
        compiled, eager = torch.empty(2, self.size, device=self.device)
        self.gradient(inputs, target, compiled, 0)
        step, self._step = self._step, None
        assert step is not None
        try:
            self.seed(0)
            before = self.random_state
            with step.left_out():
                self.gradient(inputs, target, eager, 0)
        finally:
            self._step = step
        if not torch.equal(before, self.random_state):
            return math.nan
        norm = float(eager[: self.parameter_count].norm())
        return float((compiled - eager)[: self.parameter_count].norm()) / norm if norm else 0.0

    def joint_gradient(
        self, inputs: Any, target: Any, out: torch.Tensor, seed: int
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[Any]]:
        """Computes `gradient` for a batch of several mini-batches. Returns the loss and the error of each sample."""
        losses, wrong, _ = self._fitting(inputs, target, out, seed, "none", self.scales)
        if isinstance(wrong, torch.Tensor):
            wrong = wrong.numpy(force=True)
        return losses.numpy(force=True), np.full(len(losses), np.nan) if wrong is None else wrong

    def seed(self, seed: int | torch.Tensor) -> None:
        """Seeds the generator for dropout and similar layers, or restores a state from `random_state`."""
        if isinstance(seed, int):
            self._generator.manual_seed(seed)
        else:
            self._generator.set_state(seed)

    @property
    def random_state(self) -> torch.Tensor:
        """State of the random generator, uint8."""
        return self._generator.get_state()

    def _fitting(
        self,
        inputs: Any,
        target: Any,
        into: torch.Tensor | RowGradient,
        seed: int | torch.Tensor,
        reduction: LossReduction,
        scales: Sequence[float],
        ready: Ready | None = None,
    ) -> Passed:
        """Computes a gradient at the first of some scales that does not overflow. The last one need not fit."""
        for scale in scales[:-1]:
            found = self._backward(inputs, target, into, seed, reduction, scale)
            if not self.overflows(into.rest if isinstance(into, RowGradient) else into):
                return found
        return self._backward(inputs, target, into, seed, reduction, scales[-1], ready)

    def _backward(
        self,
        inputs: Any,
        target: Any,
        into: torch.Tensor | RowGradient,
        seed: int | torch.Tensor | None,
        reduction: LossReduction,
        scale: float,
        ready: Ready | None = None,
    ) -> Passed:
        """Computes a gradient by autograd or by compiled code. Without a seed it draws from the generator as it is."""
        self.set_mode(training=True)
        target = moved(target, self.device)
        rows = into if isinstance(into, RowGradient) else None
        out = into.rest if isinstance(into, RowGradient) else into
        views = self.views.of(out, None if rows is None else self._rows)
        behind = out[len(out) - self.size + self.parameter_count :]
        behind.copy_(self._weights[self.parameter_count :])
        if seed is not None:
            self.seed(seed)
        compiled = self._step if reduction == "mean" else None
        if compiled is not None and compiled.whole:
            with self.changing_buffers(behind):
                loss, output = compiled(inputs, target, views, self.device)
            return Passed(loss, self.task.wrong(output, target), output)
        if isinstance(inputs, torch.Tensor) and inputs.is_leaf:
            inputs.grad = None
        function = None if compiled is None else compiled.loss
        with self.changing_buffers(behind):
            passed = self.autograd.forward(self._weights, inputs, target, reduction, function)
            loss = passed.loss
            mean = loss if reduction == "mean" else loss.mean()
            reported = ready if compiled is None and rows is None and scale == 1 else None
            mean = mean if scale == 1 else mean * scale
            gradients = self.autograd.backward(passed._replace(loss=mean), self._weights, views, reported)
        if rows is not None:
            assert self._rows is not None
            rows.put_gradient(gradients[self._rows])
        self.autograd.copy(gradients, views)
        if scale != 1:
            out[: self.parameter_count].mul_(1 / scale)
        return Passed(loss.detach(), self.task.wrong(passed.output, target), passed.output)

    def pass_to_record(self, inputs: Any, target: Any, out: torch.Tensor) -> Passed:
        """Computes a gradient for a graph, without a seed. If the error is on the device, so are both figures."""
        with self.autograd.guard.without_sums():
            loss, wrong, output = self._backward(inputs, target, out, None, "mean", self.scales[0])
        if isinstance(wrong, torch.Tensor):
            loss, wrong = torch.stack([loss.double(), wrong.sum(dtype=torch.float32).double()])
        return Passed(loss, wrong, mapped(lambda tensor: tensor.detach(), output))  # no node of autograd lives on

    def evaluate_batch(self, inputs: Any, target: Any) -> tuple[Number, Number, dict[str, Number]]:
        """Evaluates the bound weights on one batch.

        Returns:
            Mean loss, share of wrong samples (NaN if the task defines no error), and other metrics.
        """
        self.set_mode(training=False)
        if self._buffers:
            behind = self._weights[self.parameter_count :]
            self._buffers.place(behind, self._views_behind.of(behind))
        with torch.no_grad():
            there = moved(target, self.device)
            output, loss = self.autograd.loss(self.module, inputs, there)
            metrics = self.task.measure(output, there)
        self._buffers.collect()
        wrong = self.task.wrong(output, there)
        return number(loss), math.nan if wrong is None else _mean(wrong), metrics

    def set_mode(self, *, training: bool) -> None:
        if self._training is not training:  # visiting every submodule takes longer than a small layer
            self.module.train(training)
            self._training = training


def figures(loss: torch.Tensor, wrong: npt.NDArray[Any] | torch.Tensor | None) -> tuple[Number, Number]:
    """Returns the mean loss and the number of wrong samples, which a device may still compute."""
    if wrong is None:
        return number(loss), math.nan
    if isinstance(wrong, torch.Tensor):
        return number(loss), number(wrong.sum(dtype=torch.float32))
    return number(loss), float(np.sum(wrong, dtype=np.float32))


def _mean(wrong: npt.NDArray[Any] | torch.Tensor) -> Number:
    return number(wrong.double().mean()) if isinstance(wrong, torch.Tensor) else float(wrong.mean())
