"""Views of flat vectors: pieces of a vector, shaped like the tensors of a model."""

from collections.abc import Callable, Sequence

import torch

from rudra.core.layout import Entry

NOWHERE = torch.empty(0)
"""Placeholder for the view of a tensor that is outside the vector."""


class FlatViews:
    """Views of vectors with one layout. It caches the views of the latest vectors.

    Args:
        layout: Entries of a vector, without gaps.
        kept: Number of vectors whose views are cached, which keeps these vectors in memory.
    """

    def __init__(self, layout: Sequence[Entry], kept: int) -> None:
        self._layout, self._kept = layout, kept
        self._views: dict[int, list[torch.Tensor]] = {}  # by address of the vector

    def of(self, vector: torch.Tensor, without: int | None = None) -> list[torch.Tensor]:
        """Returns the views of a vector, one for each entry of the layout.

        Args:
            vector: (size,) float32.
            without: Index of an entry that the vector lacks. Its view is `NOWHERE`.
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

    def reporting(self, report: Callable[[slice], None]) -> Callable[[int, int], None]:
        """Returns a function that reports the slice of the vector between two indices of the layout."""
        ends = [0, *(entry.offset + entry.size for entry in self._layout)]
        return lambda first, stop: report(slice(ends[first], ends[stop]))
