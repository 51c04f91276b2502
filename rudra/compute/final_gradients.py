"""Reports, during a backward pass of torch.autograd, which gradients are final.

A backward pass finishes the last parameters of a model first. Gradients that are final can be sent while the pass
computes the others.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from rudra.errors import RunError

Ready = Callable[[int], None]
"""Called with the first final element of a gradient: it and all later gradients of parameters are final."""


class FinalGradients:
    """Watches the parameters of a model while a pass is reported.

    Args:
        parameters: Trained parameters, in the order of the vector.
        offsets: First element of each parameter in the vector.
        copy: Copies the gradient of a parameter to its place in the vector.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        offsets: Sequence[int],
        copy: Callable[[torch.Tensor | None, torch.Tensor], None],
    ) -> None:
        self._offsets, self._copy = offsets, copy
        self._ready: Ready | None = None
        for index, parameter in enumerate(parameters):
            parameter.register_post_accumulate_grad_hook(partial(self._take, index))  # type: ignore[no-untyped-call]

    def begin(self, ready: Ready, views: Sequence[torch.Tensor]) -> None:
        """Begins to report a pass whose gradients go to `views`."""
        self._ready, self._views = ready, views
        self._final, self._first = [False] * len(self._offsets), len(self._offsets)

    def end(self) -> None:
        """Ends the report of a pass."""
        self._ready = None

    def _take(self, index: int, parameter: torch.Tensor) -> None:
        if self._ready is None:
            return
        if self._final[index]:
            raise RunError(
                "[cluster] buckets: a backward pass added to a gradient twice, for example by checkpointing with "
                "use_reentrant = True; use buckets = 'off'"
            )
        self._copy(parameter.grad, self._views[index])
        parameter.grad = self._views[index]  # so that it is not copied again
        self._final[index] = True
        first = self._first
        while first and self._final[first - 1]:
            first -= 1
        if first < self._first:
            self._first = first
            self._ready(self._offsets[first])
