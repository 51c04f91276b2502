"""Reports, during a backward pass of torch.autograd, which gradients are final.

A backward pass finishes the parameters one after the other, usually the last layers first. Final gradients can be sent
while the pass computes the others.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from rudra.errors import RunError

Ready = Callable[[slice], None]
"""Called with a part of a gradient that is final."""


class FinalGradients:
    """Watches the parameters of a model while a pass is reported.

    Args:
        parameters: Trained parameters.
        places: Place of each parameter in the vector.
        copy: Copies the gradient of a parameter to its place in the vector.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        places: Sequence[slice],
        copy: Callable[[torch.Tensor | None, torch.Tensor], None],
    ) -> None:
        self._places, self._copy = places, copy
        self._ready: Ready | None = None
        for index, parameter in enumerate(parameters):
            parameter.register_post_accumulate_grad_hook(partial(self._take, index))  # type: ignore[no-untyped-call]

    def begin(self, ready: Ready, views: Sequence[torch.Tensor]) -> None:
        """Begins to report a pass whose gradients go to `views`."""
        self._ready, self._views, self._final = ready, views, [False] * len(self._places)

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
        self._ready(self._places[index])
