"""Executor of servers that average gradients: tree servers, and with an `OwnerExecutor` parameter servers."""

from functools import cached_property, partial
from typing import Any

import torch

from rudra.compute.averaging import CHUNK
from rudra.compute.executor import Executor, performs
from rudra.compute.rows import RowFormat, alike
from rudra.compute.sparse import SparseRows
from rudra.core.actions import Accumulate


class AveragingExecutor(Executor):
    """Executor of a server that averages gradients."""

    @performs(Accumulate)
    def accumulate(self, action: Accumulate) -> None:
        if not self.lazy_average:
            self._accumulate(action)
            if action.gradient != action.into:
                self._give_back(action.gradient)
            return
        into = self.buffer(action.into).vector
        self._void(action.into)
        gradient = into.__getitem__ if action.into == action.gradient else self.taking(action.gradient)
        if action.into not in self._scratch:
            self._scratch[action.into] = torch.empty(min(CHUNK, self.size), device=self.device)
        scratch = self._scratch[action.into]

        def take(part: slice) -> torch.Tensor:
            out = scratch[: part.stop - part.start]
            self._add(action, into[part], gradient(part), out, max(self.parameters - part.start, 0))
            return out

        self.defer(action.into, take, (action.into, action.gradient), partial(self._accumulate, action))

    @cached_property
    def _scratch(self) -> dict[str, torch.Tensor]:
        """Scratch memory for one slice of each deferred average."""
        return {}

    def _accumulate(self, action: Accumulate) -> None:
        gradient, before = self.buffer(action.gradient), self.buffer(action.into)
        self._void(action.into)
        after = self.spare(action.into) if before.borrowed or before.readers else before
        if self.row_format is None:
            self._add(action, before.vector, gradient.vector, after.vector, self.parameters)
        else:
            self._add_rows(action, before.gradient, gradient.gradient, after.gradient, self.row_format)
        if after is not before:
            self._replace(action.into, after)

    def _add_rows(self, action: Accumulate, into: Any, gradient: Any, out: Any, form: RowFormat) -> None:
        """Averages gradients in rows, bitwise identical to `_add`."""
        self._add(action, into.rest, gradient.rest, out.rest, self.parameters - form.features * form.width)
        indices, mine, its = alike(into, gradient)
        if action.into == action.gradient:
            mine = its = mine.clone()
        flat = mine.reshape(-1)
        self._add(action, flat, flat if mine is its else its.reshape(-1), flat, len(flat))
        if indices is None:
            out.put_whole(mine)
        else:
            out.put(SparseRows(indices, mine))

    def _add(
        self, action: Accumulate, into: torch.Tensor, gradient: torch.Tensor, out: torch.Tensor, parameters: int
    ) -> None:
        """Averages a slice or a whole vector that begins with `parameters` parameters. `out` may be `into`."""
        if action.into == action.gradient:
            torch.mul(into[:parameters], action.scale, out=out[:parameters])
            if out is not into:
                out[parameters:] = into[parameters:]
        elif action.scale == 1.0:
            torch.lerp(into, gradient, action.fraction, out=out)
        else:
            head = torch.mul(into[:parameters], 1 - action.fraction, out=out[:parameters])
            head.add_(gradient[:parameters], alpha=action.fraction * action.scale)
            torch.lerp(into[parameters:], gradient[parameters:], action.fraction, out=out[parameters:])
