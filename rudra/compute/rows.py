"""Gradients in rows: the part of a sparse layer's weight holds only the rows that are not zero.

The format is `[head | all other parts of the flat vector | indices | rows]`. If this would not be shorter, the whole
part follows the others. So a gradient is one piece of memory of variable but bounded length. It is computed, averaged,
sent and applied in this form. The head holds the number of rows.
"""

from typing import NamedTuple

import torch

from rudra.compute.sparse import SparseRows, rows_of

_LINE = 16  # floats of a cache line; each piece begins with a new line
_WHOLE = -1


class RowFormat(NamedTuple):
    """Part of the flat vector that gradients store as rows.

    Attributes:
        start: First element of the part.
        features, width: Number of all rows of the part, and floats in each.
        size: Number of floats in the flat vector.
    """

    start: int
    features: int
    width: int
    size: int

    @property
    def part(self) -> slice:
        """Slice of the flat vector with the part."""
        return slice(self.start, self.start + self.features * self.width)

    @property
    def others(self) -> int:
        """Number of floats in all other parts."""
        return self.size - self.features * self.width

    @property
    def floats(self) -> int:
        """Number of floats in the longest gradient."""
        return _LINE + _padded(self.others) + self.features * self.width


class RowGradient:
    """One gradient, in memory that belongs to the caller.

    Args:
        memory: (form.floats,) float32. For a read-only gradient the first `used` floats suffice.
        form: Row format of the gradient.

    Attributes:
        rest: (form.others,) float32, the flat vector without the part in rows.
    """

    def __init__(self, memory: torch.Tensor, form: RowFormat) -> None:
        self.row_format = form
        self._count = memory[:1].view(torch.int32)
        self.rest = memory[_LINE : _LINE + form.others]
        self._tail = memory[_LINE + _padded(form.others) :]

    @property
    def rows(self) -> SparseRows | None:
        """Rows in place, without a copy. None: the part is whole."""
        count, width = self._count.item(), self.row_format.width
        if count == _WHOLE:
            return None
        first = _padded(int(count))
        values = self._tail[first : first + int(count) * width].view(-1, width)
        return SparseRows(self._tail[: int(count)].view(torch.int32), values)

    @property
    def whole(self) -> torch.Tensor:
        """Returns the part as (count, width): in place if it is whole, else a copy with zeros between the rows."""
        rows = self.rows
        shape = self.row_format.features, self.row_format.width
        return self._tail.view(shape) if rows is None else rows.among(self.row_format.features)

    @property
    def used(self) -> int:
        """Number of floats at the beginning of the memory that hold the gradient."""
        count, form = int(self._count.item()), self.row_format
        behind = form.features * form.width if count == _WHOLE else _padded(count) + count * form.width
        return _LINE + _padded(form.others) + behind

    def put(self, rows: SparseRows) -> None:
        """Stores these rows as the part."""
        count, first = len(rows.indices), _padded(len(rows.indices))
        if first + count * self.row_format.width > self.row_format.features * self.row_format.width:
            self.put_whole(rows.among(self.row_format.features))
            return
        self._count[0] = count
        self._tail[:count].view(torch.int32).copy_(rows.indices)
        self._tail[first : first + count * self.row_format.width].view(-1, self.row_format.width).copy_(rows.values)

    def put_gradient(self, gradient: torch.Tensor | None) -> None:
        """Stores an autograd gradient as the part: a sparse COO matrix, a dense one, or None for zeros."""
        if gradient is None:
            self.put(SparseRows(torch.empty(0, dtype=torch.int32), self._tail.new_empty(0, self.row_format.width)))
        elif gradient.layout is torch.sparse_coo:
            self.put(rows_of(gradient))
        else:
            self.put_whole(gradient)

    def put_whole(self, part: torch.Tensor) -> None:
        """Stores a (count, width) matrix as the part, which may be the result of `whole`."""
        self._count[0] = _WHOLE
        there = self._tail.view(self.row_format.features, self.row_format.width)
        if part.data_ptr() != there.data_ptr():
            there.copy_(part)


def alike(one: RowGradient, other: RowGradient) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Returns the parts of two gradients with the same rows, adding zeros for rows that only one gradient has.

    Returns:
        Indices of the rows of both, or None if the parts are whole, followed by the rows of each gradient.
    """
    mine, its = one.rows, other.rows
    if mine is None or its is None:
        return None, one.whole, other.whole
    if torch.equal(mine.indices, its.indices):
        return mine.indices.clone(), mine.values.clone(), its.values
    union = torch.unique(torch.cat([mine.indices, its.indices]))
    found = []
    for rows in (mine, its):
        places = torch.searchsorted(union, rows.indices)
        found.append(rows.values.new_zeros(len(union), one.row_format.width).index_copy_(0, places, rows.values))
    return union, *found


def _padded(floats: int) -> int:
    return -(-floats // _LINE) * _LINE
