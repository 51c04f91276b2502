"""Models with flat vectors: weights and gradients travel as one vector each.

`[parameters | floating-point buffers | counters]`: a gradient has the same layout. After its parameters it holds the
buffers (such as BatchNorm's running statistics) as they were after its mini-batch. A counter is a buffer of one int64
number without dimensions. Counters in weights are whole numbers. Means of gradients may hold fractions.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from rudra.compute.chain import Chain
from rudra.compute.compiled import CompiledStep
from rudra.compute.devices import kind_of
from rudra.compute.direct import LARGE, DirectLinear, direct_layers
from rudra.compute.final_gradients import FinalGradients, Ready
from rudra.compute.flat_buffers import FlatBuffers
from rudra.compute.guard import Untouched, WeightsGuard
from rudra.compute.hooks import hooked
from rudra.compute.rows import RowFormat, RowGradient
from rudra.compute.sparse import SparseLinear, rows_of
from rudra.compute.statedict import StateEntry
from rudra.compute.tasks import Classification, LossReduction, Task
from rudra.compute.views import NOWHERE, FlatViews
from rudra.compute.waiting import Needs, NotInTime, Waiting
from rudra.core.layout import Entry, EntryKind
from rudra.data.trees import called, moved
from rudra.errors import ConfigError

_KEPT = 8  # vectors with cached views for each role: generations of weights and of gradients
_SCALE, _LESS = 2.0**12, 2.0**-4
"""Scale of the loss in float16, which preserves small gradients, and its factor when large gradients overflow. A step
tries 2^12, 2^8, 2^4 and 1. Each step starts from 2^12, so that its result depends on no other step."""


Gradients = Literal["autograd", "direct"]
"""Method of computing gradients: torch.autograd, or faster code if the model allows it (`rudra.compute.shortcuts`)."""


class ForwardPass(NamedTuple):
    """A forward pass whose backward pass follows later.

    Attributes:
        seen: Input of each layer and the output, if the model needs no autograd. Otherwise the output.
        loss: Mean loss, unless the model needs no autograd.
        random_state: State of the random generator after the pass.
        untouched: State of the parameters before the pass.
    """

    seen: Any
    loss: torch.Tensor | None
    random_state: torch.Tensor
    untouched: Untouched


class FlatModel:
    """A module whose parameters, floating-point buffers and counters are in flat vectors that the caller owns.

    Parameters that are not trained, and other integer buffers, stay in the module: every rank builds the same ones.

    Args:
        module: Float32 module on one device. Parameters used at several places are counted once.
        task: Task that defines the loss.
        compiled: Whether compiled code computes gradients. They differ in their last bits.
        roles: Number of roles that share this model, each with its own vectors.
        precision: "bfloat16" or "float16": torch.autocast selects the operations of forward, loss and backward that use
            it.
        gradients: "direct" is valid only if `rudra.compute.shortcuts.gradients_of` returns it for the model. Its
            results are bitwise identical to "autograd".

    Attributes:
        guard: Checks that a pass does not change the weights.

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
        self._generator = kind_of(self.device).generator(self.device)
        mixed = precision != "float32"
        self._autocast = torch.autocast(self.device.type, getattr(torch, precision)) if mixed else None
        self._scale = _SCALE if precision == "float16" else 1.0
        direct = gradients == "direct" and not mixed and not compiled
        self._all_in_torch = not hooked(module) and all(_of_torch(layer) for layer in module.modules())
        self._chain = Chain.of(module, self._parameters, self.task) if direct else None
        self._direct: dict[int, DirectLinear] = direct_layers(module, self._parameters) if direct else {}
        self.compiled = compiled
        self._step = (
            CompiledStep(module, self.task, self._parameters, LARGE if gradients == "direct" else None)
            if compiled
            else None
        )
        self._weights = torch.empty(0)  # the bound vector
        self._training: bool | None = None
        self._final: FinalGradients | None = None  # made at its first use: it adds hooks to all parameters
        self._views = FlatViews(self.layout, _KEPT * roles)
        self.guard = WeightsGuard(self.layout, self._parameters, self.parameter_count)

    def bind(self, weights: torch.Tensor) -> None:
        """Makes the module compute with these weights, without a copy.

        Args:
            weights: (size,) float32, contiguous. The module reads them until the next `bind`. Evaluation and gradients
                do not change them.
        """
        if weights.data_ptr() != self._weights.data_ptr():
            for parameter, view in zip(self._parameters, self._views.of(weights), strict=False):
                parameter.data = view
            self._weights = weights

    def read_into(self, out: torch.Tensor) -> None:
        """Copies the current parameters, buffers and counters to `out`, (size,) float32."""
        with torch.no_grad():
            tensors = [*self._parameters, *self._buffers.tensors]
            for view, tensor in zip(self._views.of(out), tensors, strict=True):
                view.copy_(tensor)

    def state_dict(self) -> tuple[StateEntry, ...]:
        """Returns the entries of the module's `state_dict`, except additions by its own hooks and extra states.

        Tensors that are not in the flat vector have their current values. Parameters are not copied.
        """
        flat = {entry.name for entry in self.layout}
        tensors = [*self.module.named_parameters(), *self.module.named_buffers()]
        own = {id(tensor): name for name, tensor in tensors if tensor.layout is torch.strided}
        return tuple(
            StateEntry(
                name, own[id(t)], str(t.dtype).removeprefix("torch."), None if own[id(t)] in flat else _values(t)
            )
            for name, t in self.module.state_dict(keep_vars=True).items()
            if id(t) in own
        )

    def forward(self, inputs: Any, seed: int, behind: torch.Tensor) -> Any:
        """Computes the module's output at the bound weights in training mode, for a later `backward`.

        Args:
            inputs: As for `gradient`.
            seed: As for `gradient`.
            behind: (size - parameter_count,) float32, receives the buffers after this mini-batch.
        """
        self._mode(training=True)
        views: list[torch.Tensor] = []
        if self._buffers:
            behind.copy_(self._weights[self.parameter_count :])
            entries = self.layout[len(self._parameters) :]
            parts = torch.split(behind, [entry.size for entry in entries])
            views = [part.view(entry.shape) for part, entry in zip(parts, entries, strict=True)]
            self._buffers.place(behind, views)
        self.seed(seed)
        output = called(self.module, moved(inputs, self.device))
        self._buffers.collect(behind, views)
        return output

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
        self._release()
        views = self._views.of(out)
        with self._reported(ready, views):
            torch.autograd.backward(output, gradient)
        self._copy(self._taken(), views)

    @property
    def does_without_autograd(self) -> bool:
        """Whether faster code than autograd computes gradients for supported inputs."""
        return self._chain is not None

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
    ) -> tuple[float, float]:
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

        Returns:
            Mean loss and number of wrong samples; NaN if the task defines no error.

        Raises:
            DataError: A label is outside the model's classes.
        """
        rows = out if isinstance(out, RowGradient) else None
        if self._chain is not None and self._chain.takes(inputs):
            views = self._views.of(out) if isinstance(out, torch.Tensor) else self._views.of(out.rest, self._rows)
            self.seed(seed)  # the task's loss may draw random numbers
            output, loss, found = self._chain.gradient(
                inputs, target, self._views.of(self._weights), views, None if ready is None else self._reporting(ready)
            )
            if found is not None and rows is not None:
                rows.put(found)
            elif found is not None:
                views[0].zero_().index_add_(0, *found)
            wrong = self.task.wrong(output, target)
        else:
            loss, wrong = self._backward(inputs, target, out, seed, "mean", self._scale, ready)
        return _figures(loss, wrong)

    @property
    def can_begin_early(self) -> bool:
        """Whether `forward_early` is possible now.

        All layers must be torch's own or Rudra's, without hooks: a user's code might read weights in another way than
        by torch's functions. There must be no buffers, sparse rows, compiled code, scaled loss or GPU. A pass that
        checks whether the model changes its weights needs all of them at its beginning.
        """
        plain = self._all_in_torch and not self._buffers and self._rows is None
        usual = self._step is None and self._scale == 1 and self.device.type == "cpu"
        return plain and usual and (self._chain is not None or not self.guard.sums_next)

    def forward_early(self, inputs: Any, target: Any, seed: int, needs: Needs) -> ForwardPass:
        """Computes output and loss at the bound weights, which need not be complete, for a later `gradient_of`.

        The state of the random generator does not change.

        Args:
            inputs: As for `gradient`.
            target: As for `gradient`.
            seed: As for `gradient`.
            needs: Called with each slice of the weights before the pass reads it.

        Raises:
            NotInTime: The pass must begin with complete weights. Exceptions of `needs` propagate.
        """
        before = self.random_state
        self.seed(seed)
        try:
            if self._chain is not None and self._chain.takes(inputs):
                views, wait = self._views.of(self._weights), self._reporting(needs)
                seen, loss = self._chain.forward(inputs, views, wait), None
                untouched = Untouched([], None)
            else:
                if self.guard.sums_next:
                    raise NotInTime
                self._mode(training=True)
                self._let_write()
                self._release()
                untouched = self.guard.before(self._weights)
                with Waiting(self._weights, needs):
                    seen, loss = self._forward(self.module, inputs, moved(target, self.device))
            return ForwardPass(seen, loss, self.random_state, untouched)
        finally:
            self.seed(before)

    def gradient_of(
        self, passed: ForwardPass, inputs: Any, target: Any, out: torch.Tensor, ready: Ready | None = None
    ) -> tuple[float, float]:
        """Computes what `gradient` computes, after `forward_early`. The caller must bind the same weights again."""
        views = self._views.of(out)
        self.seed(passed.random_state)
        if passed.loss is None:
            assert self._chain is not None
            reported = None if ready is None else self._reporting(ready)
            weights = self._views.of(self._weights)
            output, loss, _ = self._chain.gradient(inputs, target, weights, views, reported, passed.seen)
        else:
            output, loss = passed.seen, passed.loss
            self._release()
            self._backward_from(loss, passed.untouched, views, ready)
            self._copy(self._taken(), views)
        return _figures(loss.detach(), self.task.wrong(output, target))

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
        losses, wrong = self._backward(inputs, target, out, seed, "none", self._scale)
        return losses.numpy(force=True), np.full(len(losses), np.nan) if wrong is None else wrong

    def mapped_gradients(
        self, weights: Sequence[torch.Tensor], inputs: Any, target: Any, outs: Sequence[torch.Tensor]
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Computes several gradients at once by `torch.func.vmap`. They may differ from `gradient` in the last bits.

        Args:
            weights: Weights for each gradient, (size,) float32. A single vector applies to all.
            inputs: (gradients, μ, …), a tensor or several.
            target: (gradients, μ, …).
            outs: (size,) float32 each, filled as by `gradient`. Their buffers are copies of the weights' buffers.

        Returns:
            Mean loss and number of wrong samples for each gradient.

        Raises:
            RuntimeError, ValueError: vmap does not support this model.
        """
        self._mode(training=True)
        shared = len(weights) == 1
        vectors = weights[0][None] if shared else torch.stack(list(weights))
        parts = [
            v.view(-1, *e.shape)
            for v, e in zip(torch.split(vectors, [e.size for e in self.layout], 1), self.layout, strict=True)
        ]
        count = len(self._parameters)
        there = len(self.layout) - len(self._buffers.counters)  # without counters: gradients do not change them
        values = {e.name: part[0] if shared else part for part, e in zip(parts[:there], self.layout, strict=False)}
        trained = {e.name: values.pop(e.name) for e in self.layout[:count]}

        def loss(
            trained: dict[str, torch.Tensor],
            values: dict[str, torch.Tensor],
            inputs: Any,
            target: Any,
        ) -> tuple[torch.Tensor, torch.Tensor]:
            def module(*args: Any, **keywords: Any) -> Any:
                return torch.func.functional_call(self.module, {**trained, **values}, args, keywords)

            output, mean = self._forward(module, inputs, target)
            return mean, output

        place = None if shared else 0
        one = torch.func.grad_and_value(loss, has_aux=True)
        all_ = torch.func.vmap(one, in_dims=(place, place, 0, 0), randomness="different")
        found, (losses, output) = all_(trained, values, moved(inputs, self.device), moved(target, self.device))
        for index, out in enumerate(outs):
            torch._foreach_copy_(self._views.of(out)[:count], [gradient[index] for gradient in found.values()])
            out[self.parameter_count :] = vectors[0 if shared else index, self.parameter_count :]
        wrong = [self.task.wrong(*pair) for pair in zip(output, target, strict=True)]
        sums = [np.nan if each is None else each.sum() for each in wrong]
        return losses.numpy(force=True), np.array(sums, np.float32)

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

    def _forward(
        self, module: Callable[..., Any], inputs: Any, target: Any, reduction: LossReduction = "mean"
    ) -> tuple[Any, torch.Tensor]:
        """Computes output and loss, float32 in any precision."""
        if self._autocast is None:
            output = self.task.compared(called(module, moved(inputs, self.device)))
            return output, self.task.loss(output, target, reduction)
        with self._autocast:
            output = self.task.compared(called(module, moved(inputs, self.device)))
            output = output.float() if isinstance(output, torch.Tensor) else output
            return output, self.task.loss(output, target, reduction).float()

    def _backward(
        self,
        inputs: Any,
        target: Any,
        into: torch.Tensor | RowGradient,
        seed: int | torch.Tensor,
        reduction: LossReduction,
        scale: float,
        ready: Ready | None = None,
    ) -> tuple[torch.Tensor, npt.NDArray[Any] | None]:
        self._mode(training=True)
        rows = into if isinstance(into, RowGradient) else None
        out = into.rest if isinstance(into, RowGradient) else into
        views = self._views.of(out, None if rows is None else self._rows)
        buffers = views[len(self._parameters) :]
        if self._buffers:
            out[len(out) - self.size + self.parameter_count :] = self._weights[self.parameter_count :]
            self._buffers.place(out, buffers)
        self.seed(seed)
        compiled = self._step if reduction == "mean" else None
        if compiled is not None and compiled.whole:
            loss, output = compiled(inputs, target, views, self.device)
            self._buffers.collect(out, buffers)
            return loss, self.task.wrong(output, target)
        self._let_write()
        self._release()
        if isinstance(inputs, torch.Tensor) and inputs.is_leaf:
            inputs.grad = None
        before = self.guard.before(self._weights)
        if compiled is not None:
            loss, output = compiled.loss(moved(inputs, self.device), moved(target, self.device))
        else:
            output, loss = self._forward(self.module, inputs, moved(target, self.device), reduction)
        mean = loss if reduction == "mean" else loss.mean()
        reported = ready if compiled is None and rows is None and scale == 1 else None
        self._backward_from(mean if scale == 1 else mean * scale, before, views, reported)
        loss = loss.detach()
        gradients = self._taken()
        if rows is not None:
            assert self._rows is not None
            rows.put_gradient(gradients[self._rows])
        self._copy(gradients, views)
        self._buffers.collect(out, buffers)
        if scale != 1:
            scaled_gradient = out[: self.parameter_count]
            if not scaled_gradient.isfinite().all():
                return self._backward(inputs, target, into, seed, reduction, scale * _LESS)
            scaled_gradient.mul_(1 / scale)
        return loss, self.task.wrong(output, target)

    def _backward_from(
        self, loss: torch.Tensor, before: Untouched, views: Sequence[torch.Tensor], ready: Ready | None
    ) -> None:
        """Computes the gradients of a loss. Large linear layers write theirs to `views`."""
        for index, layer in self._direct.items():
            layer.target = views[index]
        with self._reported(ready, views):
            loss.backward()  # type: ignore[no-untyped-call]
        self.guard.check(before, self._weights, self._views.of(self._weights))

    def _let_write(self) -> None:
        """Lets the next pass write the gradients of large linear layers to their places."""
        for layer in self._direct.values():
            layer.writes = True

    def evaluate_batch(self, inputs: Any, target: Any) -> tuple[float, float, dict[str, float]]:
        """Evaluates the bound weights on one batch.

        Returns:
            Mean loss, share of wrong samples (NaN if the task defines no error), and other metrics.
        """
        self._mode(training=False)
        if self._buffers:
            self._buffers.place(self._weights, self._views.of(self._weights)[len(self._parameters) :])
        with torch.no_grad():
            there = moved(target, self.device)
            output, loss = self._forward(self.module, inputs, there)
            metrics = self.task.measure(output, there)
        self._buffers.collect()
        wrong = self.task.wrong(output, target)
        return loss.item(), math.nan if wrong is None else float(wrong.mean()), metrics

    def _release(self) -> None:
        """Clears gradients of an earlier pass, so that the next pass does not add to them."""
        for parameter in self._parameters:
            parameter.grad = None

    def _taken(self) -> list[torch.Tensor | None]:
        """Takes the gradient of each parameter. The parameter no longer holds it."""
        found = [parameter.grad for parameter in self._parameters]
        self._release()
        return found

    def _copy(self, gradients: Sequence[torch.Tensor | None], views: Sequence[torch.Tensor]) -> None:
        """Copies gradients to views of the flat vector, except gradients that were computed there."""
        sources, targets = [], []
        for gradient, view in zip(gradients, views, strict=False):
            if view is NOWHERE:
                continue
            if gradient is None:
                view.zero_()
            elif gradient.layout is torch.sparse_coo:
                view.zero_().index_add_(0, *rows_of(gradient))
            elif gradient.data_ptr() != view.data_ptr():
                sources.append(gradient)
                targets.append(view)
        if sources:
            torch._foreach_copy_(targets, sources)

    def _reporting(self, ready: Ready) -> Callable[[int, int], None]:
        """Returns a function that reports the parameters between two places in the layout."""
        ends = [0, *(entry.offset + entry.size for entry in self.layout)]
        return lambda first, stop: ready(slice(ends[first], ends[stop]))

    @contextmanager
    def _reported(self, ready: Ready | None, views: Sequence[torch.Tensor]) -> Iterator[None]:
        """Reports final gradients during a backward pass."""
        if ready is None:
            yield
            return
        if self._final is None:
            trained = self.layout[: len(self._parameters)]
            places = [slice(entry.offset, entry.offset + entry.size) for entry in trained]
            self._final = FinalGradients(self._parameters, places, lambda g, view: self._copy([g], [view]))
        self._final.begin(ready, views)
        try:
            yield
        finally:
            self._final.end()

    def _mode(self, *, training: bool) -> None:
        if self._training is not training:  # visiting every submodule takes longer than a small layer
            self.module.train(training)
            self._training = training


def _of_torch(layer: nn.Module) -> bool:
    """Whether a layer's code is torch's or Rudra's, and in Python."""
    of = type(layer).__module__
    return of.startswith(("torch.nn.", "rudra.")) and not isinstance(layer, torch.jit.ScriptModule)


def _figures(loss: torch.Tensor, wrong: npt.NDArray[Any] | None) -> tuple[float, float]:
    """Returns the mean loss and the number of wrong samples."""
    return loss.item(), math.nan if wrong is None else float(np.sum(wrong, dtype=np.float32))


def _values(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Converts a tensor to NumPy. Types that NumPy lacks, such as bfloat16, become float32."""
    found = tensor.detach().cpu()
    try:
        values: npt.NDArray[Any] = found.numpy()
    except TypeError:
        values = found.float().numpy()
    return values if isinstance(tensor, nn.Parameter) else values.copy()


def sha256(vector: npt.NDArray[np.float32]) -> str:
    """Returns the SHA-256 of a flat vector, over its values as little-endian float32."""
    return hashlib.sha256(np.ascontiguousarray(vector, dtype="<f4").data).hexdigest()
