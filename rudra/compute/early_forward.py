"""Forward passes that begin before their weights are complete."""

from typing import Any, NamedTuple

import torch

from rudra.compute.autograd import Forward
from rudra.compute.device.streams import Number
from rudra.compute.final_gradients import Ready
from rudra.compute.flat import FlatModel, figures
from rudra.compute.plain_code import is_plain
from rudra.compute.tasks import TASKS
from rudra.compute.waiting import Needs, NotInTime, Waiting


class ForwardPass(NamedTuple):
    """A forward pass whose backward pass follows later.

    Attributes:
        seen: Input of each layer and the output, if the model needs no autograd. Otherwise the pass by autograd.
        random_state: State of the random generator after the pass.
    """

    seen: list[torch.Tensor] | Forward
    random_state: torch.Tensor


class EarlyForward:
    """Forward passes of a model at weights that arrive during the pass, and gradients of these passes.

    Args:
        model: Model that computes.

    Attributes:
        possible: Whether `forward` is possible for this model. All layers must be torch's own, or users' layers
            of plain code (`rudra.compute.plain_code`), without hooks. The task must be one of Rudra's. There must be no
            sparse rows, compiled code, scaled loss or GPU.
    """

    def __init__(self, model: FlatModel) -> None:
        self._model = model
        plain = not model.hooked and type(model.task) in TASKS.values() and all(map(is_plain, model.module.modules()))
        usual = not model.compiled and not model.scaled and model.device.type == "cpu" and model.row_form is None
        self.possible = plain and usual
        self._behind = torch.empty(model.size - model.parameter_count)

    @property
    def possible_now(self) -> bool:
        """Whether the next pass may be one.

        A pass that checks whether the model changes its weights needs all of them at its beginning.
        """
        return self.possible and (self._model.chain is not None or not self._model.autograd.guard.sums_next)

    def forward(self, inputs: Any, target: Any, weights: torch.Tensor, seed: int, needs: Needs) -> ForwardPass:
        """Computes output and loss for a later `gradient`.

        If there is none, nothing has changed: the random generator keeps its state, and the model's buffers after the
        pass are in memory of their own. The pass waits for all buffers before it begins.

        Args:
            inputs: As for `FlatModel.gradient`.
            target: As for `FlatModel.gradient`.
            weights: (size,) float32, which need not be complete.
            seed: As for `FlatModel.gradient`.
            needs: Called with each slice of the weights before the pass reads it.

        Raises:
            NotInTime: The pass must begin with complete weights. Exceptions of `needs` propagate.
        """
        model = self._model
        model.bind(weights)
        before = model.random_state
        model.seed(seed)
        try:
            seen: list[torch.Tensor] | Forward
            if model.chain is not None and model.chain.takes(inputs):
                seen = model.chain.forward(inputs, model.views.of(weights), model.views.reporting(needs))
            else:
                if model.autograd.guard.sums_next:
                    raise NotInTime
                model.set_mode(training=True)
                if len(self._behind):
                    needs(slice(model.parameter_count, model.size))
                    self._behind.copy_(weights[model.parameter_count :])
                with Waiting(weights, needs), model.changing_buffers(self._behind):
                    seen = model.autograd.forward(weights, inputs, target)
            return ForwardPass(seen, model.random_state)
        finally:
            model.seed(before)

    def gradient(
        self,
        passed: ForwardPass,
        inputs: Any,
        target: Any,
        weights: torch.Tensor,
        out: torch.Tensor,
        ready: Ready | None = None,
    ) -> tuple[Number, Number]:
        """Computes what `FlatModel.gradient` computes, after `forward`, whose weights are complete now."""
        model = self._model
        model.bind(weights)
        model.seed(passed.random_state)
        views = model.views.of(out)
        if isinstance(passed.seen, Forward):
            output, loss = passed.seen.output, passed.seen.loss.detach()
            model.set_mode(training=True)  # layers whose outputs were not kept are computed again
            model.autograd.release()
            with model.changing_buffers(self._behind):
                gradients = model.autograd.backward(passed.seen, weights, views, ready)
            model.autograd.copy(gradients, views)
            out[model.parameter_count :] = self._behind
        else:
            assert model.chain is not None
            reported = None if ready is None else model.views.reporting(ready)
            there = model.views.of(weights)
            output, loss, _ = model.chain.gradient(inputs, target, there, views, reported, passed.seen)
        return figures(loss, model.task.wrong(output, target))
