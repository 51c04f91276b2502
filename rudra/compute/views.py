"""Views of flat vectors: pieces of a vector, shaped as the tensors of a model."""

from collections.abc import Sequence

import torch

from rudra.core.layout import Entry

NOWHERE = torch.empty(0)
"""Stands for the view of a tensor that lies outside the vector."""


class FlatViews:
    """Cuts vectors of one layout, and keeps the views of the latest ones.

    Args:
        layout: the entries of a vector, without gaps.
        kept: how many vectors' views are kept, and with them the vectors' memory.
    """

    def __init__(self, layout: Sequence[Entry], kept: int) -> None:
        self._layout, self._kept = layout, kept
        self._views: dict[int, list[torch.Tensor]] = {}  # by address of the vector

    def of(self, vector: torch.Tensor, without: int | None = None) -> list[torch.Tensor]:
        """Returns the views of a vector, one for each entry of the layout.

        Args:
            vector: (size,) float32.
            without: index of an entry that the vector lacks; its view is `NOWHERE`.
        """
        address = vector.data_ptr()
        views = self._views.get(address)
        if views is None:
            there = [entry for index, entry in enumerate(self._layout) if index != without]
            parts = torch.split(vector.detach(), [entry.size for entry in there])
            views = [part.view(entry.shape) for part, entry in zip(parts, there, strict=True)]
            if without is not None:
                views.insert(without, NOWHERE)
            if len(self._views) == self._kept:
                del self._views[next(iter(self._views))]
            self._views[address] = views
        return views
