"""Runs of parameters that an optimiser steps together: slices of the flat vector."""

from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import groupby

from rudra.core.layout import Entry
from rudra.errors import ConfigError
from rudra.job.tables import ParameterGroup

CACHE_LINE = 16
"""Number of elements in a cache line, the unit in which torch hands a vector to its threads."""

REST = ParameterGroup(parameters=("*",))
"""Group of the parameters that belong to no group of the job."""


def runs_of(groups: Sequence[ParameterGroup], layout: Sequence[Entry]) -> Iterator[tuple[ParameterGroup, slice]]:
    """Yields the longest possible slices of the flat vector whose parameters belong to one group.

    Raises:
        ConfigError: A group names parameters that do not exist.
    """
    parameters = [entry for entry in layout if entry.kind == "parameter"]
    names = [entry.name for entry in parameters]
    for group in groups:
        for pattern in group.parameters:
            if not any(fnmatchcase(name, pattern) for name in names):
                some = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
                raise ConfigError(f"[optimizer] groups: '{pattern}' matches no parameter; there are {some}")

    def group_of(entry: Entry) -> ParameterGroup:
        fitting = (g for g in groups if any(fnmatchcase(entry.name, pattern) for pattern in g.parameters))
        return next(fitting, REST)

    for group, run in groupby(parameters, group_of):
        entries = list(run)
        yield group, slice(entries[0].offset, entries[-1].offset + entries[-1].size)


def around(runs: Iterable[tuple[ParameterGroup, slice]], hole: slice) -> Iterator[tuple[ParameterGroup, slice]]:
    """Yields the runs without the elements in the hole."""
    for group, run in runs:
        for piece in (slice(run.start, min(run.stop, hole.start)), slice(max(run.start, hole.stop), run.stop)):
            if piece.start < piece.stop:
                yield group, piece


def kernel_parts(
    runs: Iterable[tuple[ParameterGroup, slice]], tail: int
) -> dict[tuple[ParameterGroup, bool], list[slice]]:
    """Returns each group's runs: multiples of `tail` for the fused kernel, and the rest for the plain one."""
    parts: dict[tuple[ParameterGroup, bool], list[slice]] = {}
    for group, run in runs:
        middle = run.stop - (run.stop - run.start) % tail
        for part, fused in ((slice(run.start, middle), True), (slice(middle, run.stop), False)):
            if part.start < part.stop:
                parts.setdefault((group, fused), []).append(part)
    return parts
