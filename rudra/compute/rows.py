"""Gradients of which one layer's part is rows: those of a sparse layer's weight that are not zero.

`[head | all other parts of the flat vector | indices | rows]`, or, where that would not be shorter, the whole part
behind the others. So a gradient is one piece of memory of any length up to a bound, as it is computed, averaged, sent
and applied. The head says how many rows there are.
"""

from typing import NamedTuple

import torch

from rudra.compute.sparse import SparseRows, rows_of

_LINE = 16  # floats of a cache line, with which each piece begins
_WHOLE = -1


class RowForm(NamedTuple):
    """Which part of the flat vector is rows.

    Attributes:
        start: its first element.
        features, width: rows that it has in all, and floats of each.
        size: of the flat vector.
    """

    start: int
    features: int
    width: int
    size: int

    @property
    def part(self) -> slice:
        """Where it lies in the flat vector."""
        return slice(self.start, self.start + self.features * self.width)

    @property
    def others(self) -> int:
        """Floats of all other parts."""
        return self.size - self.features * self.width

    @property
    def floats(self) -> int:
        """Of the longest gradient."""
        return _LINE + _padded(self.others) + self.features * self.width


class RowGradient:
    """One gradient, in memory that its owner lends.

    Args:
        memory: (form.floats,) float32; for one that is only read, `used` floats of it will do.
        form: which part is rows.

    Attributes:
        rest: (form.others,) float32, the flat vector without that part.
    """

    def __init__(self, memory: torch.Tensor, form: RowForm) -> None:
        self.form = form
        self._count = memory[:1].view(torch.int32)
        self.rest = memory[_LINE : _LINE + form.others]
        self._behind = memory[_LINE + _padded(form.others) :]

    @property
    def rows(self) -> SparseRows | None:
        """The rows, where they lie; None: the part is whole."""
        count, width = self._count.item(), self.form.width
        if count == _WHOLE:
            return None
        first = _padded(int(count))
        values = self._behind[first : first + int(count) * width].view(-1, width)
        return SparseRows(self._behind[: int(count)].view(torch.int32), values)

    @property
    def whole(self) -> torch.Tensor:
        """(count, width): the part where it lies if it is whole, else a copy with zeros between the rows."""
        rows = self.rows
        shape = self.form.features, self.form.width
        return self._behind.view(shape) if rows is None else rows.among(self.form.features)

    @property
    def used(self) -> int:
        """Floats of the memory, from its beginning, that hold the gradient."""
        count, form = int(self._count.item()), self.form
        behind = form.features * form.width if count == _WHOLE else _padded(count) + count * form.width
        return _LINE + _padded(form.others) + behind

    def put(self, rows: SparseRows) -> None:
        """Takes these rows for the part."""
        count, first = len(rows.indices), _padded(len(rows.indices))
        if first + count * self.form.width > self.form.features * self.form.width:
            self.put_whole(rows.among(self.form.features))
            return
        self._count[0] = count
        self._behind[:count].view(torch.int32).copy_(rows.indices)
        self._behind[first : first + count * self.form.width].view(-1, self.form.width).copy_(rows.values)

    def put_gradient(self, gradient: torch.Tensor | None) -> None:
        """Takes for the part what autograd gave for it: a sparse COO matrix, a dense one, or None for zeros."""
        if gradient is None:
            self.put(SparseRows(torch.empty(0, dtype=torch.int32), self._behind.new_empty(0, self.form.width)))
        elif gradient.layout is torch.sparse_coo:
            self.put(rows_of(gradient))
        else:
            self.put_whole(gradient)

    def put_whole(self, part: torch.Tensor) -> None:
        """Takes this (count, width) for the part, which may be what `whole` gave."""
        self._count[0] = _WHOLE
        there = self._behind.view(self.form.features, self.form.width)
        if part.data_ptr() != there.data_ptr():
            there.copy_(part)


def alike(one: RowGradient, other: RowGradient) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """The parts of two gradients, with zeros where only the other has a row.

    Returns:
        Indices of the rows of both; None: they are whole. Then the rows of each.
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
        found.append(rows.values.new_zeros(len(union), one.form.width).index_copy_(0, places, rows.values))
    return union, *found


def _padded(floats: int) -> int:
    return -(-floats // _LINE) * _LINE
