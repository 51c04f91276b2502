"""Norms of gradients, which a job may record (`results.gradient_norms`).

A norm is measured in pieces, in one pass: torch's norm of each piece in float32, and the sum of their squares in
float64. Pieces are short, so the error is near 1e-6 for any number of parameters, and the number of threads does not
change the result. A recorded norm has the precision of float32, and its sum is exact, so its order does not matter.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, pairwise

import torch

from rudra.compute.averaging import CACHE_LINE
from rudra.compute.device.streams import Number
from rudra.compute.final_gradients import Ready
from rudra.compute.parts import pieces_of
from rudra.compute.rows import RowGradient
from rudra.core.buckets import FinalParts
from rudra.core.layout import Entry, Part
from rudra.core.norms import joint_norm, single
from rudra.job.job import Job
from topologies import Plan

PIECE = (1 << 15) - CACHE_LINE
"""Largest number of elements of a piece. Torch divides vectors of 2^15 elements among its threads."""


def pieces_between(ends: Sequence[int]) -> list[slice]:
    """Returns the pieces between ascending places in a vector. No piece contains one of these places."""
    return [
        slice(start, min(start + PIECE, stop)) for first, stop in pairwise(ends) for start in range(first, stop, PIECE)
    ]


class NormMeter:
    """Norms of the gradients of one role.

    Args:
        every: Norms are recorded for each update whose timestamp is a multiple of this number.
        ends: Ascending places in the vector, from 0 to the number of parameters, that pieces do not cross.
        partial: Whether the role has only a part of each gradient.
        multiplies: Whether the gradients of successive updates are multiplied.
        applied_next: Whether the first update of the weights that a gradient is from applies it. Otherwise the
            gradient's update is unknown when it is computed, and each gradient is measured.
    """

    def __init__(
        self,
        every: int,
        ends: Sequence[int],
        *,
        partial: bool = False,
        multiplies: bool = False,
        applied_next: bool = True,
    ) -> None:
        self._every, self._partial, self._applied_next = every, partial, applied_next
        self._parameters = ends[-1]
        self._pieces = pieces_between(ends)
        self._sizes = [piece.stop - piece.start for piece in self._pieces]
        runs = [(size, len(list(equal))) for size, equal in groupby(self._sizes)]
        self._run_sizes = [size * count for size, count in runs]
        self._singles = [number for number, (_, count) in enumerate(runs) if count == 1]
        self._matrices = [(number, (count, size)) for number, (size, count) in enumerate(runs) if count > 1]
        self._multiplies = multiplies
        self._last: tuple[int, torch.Tensor] | None = None  # a kept gradient, and the timestamp of its update
        self._early: dict[int, float] = {}  # piece -> norm, of the gradient that is being computed

    def covers_gradient(self, timestamp: int) -> bool:
        """Returns whether the norm of a gradient at the weights of a timestamp is recorded."""
        return not self._applied_next or self._covers(timestamp + 1)

    def of_update(self, timestamp: int, gradient: Callable[[], torch.Tensor | RowGradient]) -> tuple[Number, Number]:
        """Measures the gradient of an update before the update.

        Args:
            timestamp: Timestamp of the weights after the update.
            gradient: Returns the gradient. It is called only if it is needed.

        Returns:
            Its norm, for `rounded`, and its product with the gradient of the previous update, for `single`. A device
            may still compute them. NaN: it is not recorded.
        """
        measures, keeps = self._covers(timestamp), self._multiplies and self._covers(timestamp + 1)
        if not (measures or keeps):
            return math.nan, math.nan
        present = gradient()
        norm = self.norm(present) if measures else math.nan
        product = self._product(timestamp, present) if measures else math.nan
        if keeps:
            self._keep(timestamp, present)
        return norm, product

    def _covers(self, timestamp: int) -> bool:
        """Returns whether the norm of an update's gradient is recorded."""
        return timestamp % self._every == 0

    def watching(self, gradient: torch.Tensor, ready: Ready) -> Ready:
        """Returns a function that measures final pieces of a gradient before it reports them by `ready`.

        After the report others may overwrite them. Call `norm` once the gradient is complete.
        """
        self._early = {}
        final = FinalParts(self._pieces)

        def measure(piece: slice) -> None:
            complete = final.add(piece)
            if complete:
                found = _norms([gradient[self._pieces[number]] for number in complete])
                self._early.update(zip(complete, found, strict=True))
            ready(piece)

        return measure

    def norm(self, gradient: torch.Tensor | RowGradient) -> Number:
        """Returns the norm of a gradient's parameters, for `rounded`. A device may still compute it."""
        if isinstance(gradient, RowGradient):
            return joint_norm(_norms(list(self._of_rows(gradient))), partial=self._partial)
        early, self._early = self._early, {}
        if not early:
            found = self._norms_of_runs(gradient)
            if not found.is_cpu:
                norm: torch.Tensor = torch.linalg.vector_norm(found, dtype=torch.float64)
                return norm
            return joint_norm(found.tolist(), partial=self._partial)
        left = [piece for number, piece in enumerate(self._split(gradient)) if number not in early]
        return joint_norm([*early.values(), *_norms(left)], partial=self._partial)

    def rounded(self, norm: float) -> float:
        """Returns a norm with the precision of the records, unless it is the norm of a part."""
        return norm if self._partial else single(norm)

    def _norms_of_runs(self, gradient: torch.Tensor) -> torch.Tensor:
        """Returns the norms of all pieces. Neighbours of one size take one call, which does not change their norms."""
        runs = torch.split(gradient[: self._parameters], self._run_sizes)
        found = [torch.linalg.vector_norm(runs[number].view(shape), dim=1) for number, shape in self._matrices]
        if self._singles:
            found.append(torch.stack(torch._foreach_norm([runs[number] for number in self._singles])))
        return torch.cat(found)

    def _split(self, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns the pieces of a gradient's parameters."""
        return torch.split(gradient[: self._parameters], self._sizes)

    def _keep(self, timestamp: int, gradient: torch.Tensor | RowGradient) -> None:
        """Copies the gradient of an update. Gradients in rows are not kept."""
        if isinstance(gradient, RowGradient):
            return
        copy = torch.empty_like(gradient[: self._parameters]) if self._last is None else self._last[1]
        self._last = timestamp, copy.copy_(gradient[: self._parameters])

    def _product(self, timestamp: int, gradient: torch.Tensor | RowGradient) -> Number:
        """Returns the inner product with the gradient of the previous update. NaN: that gradient was not kept."""
        if isinstance(gradient, RowGradient) or self._last is None or self._last[0] != timestamp - 1:
            return math.nan
        pairs = zip(self._split(gradient), self._split(self._last[1]), strict=True)
        products = torch.stack([torch.dot(*pair) for pair in pairs])
        return sum(products.tolist()) if products.is_cpu else products.sum(dtype=torch.float64)

    def _of_rows(self, gradient: RowGradient) -> Iterator[torch.Tensor]:
        form, rows = gradient.row_format, gradient.rows
        yield from torch.split(gradient.rest[: self._parameters - form.features * form.width], PIECE)
        yield from torch.split((gradient.whole if rows is None else rows.values).reshape(-1), PIECE)


def _norms(pieces: list[torch.Tensor]) -> list[float]:
    """Returns the norms of some vectors."""
    return torch.stack(torch._foreach_norm(pieces)).tolist() if pieces else []


def meter_of_learner(job: Job, plan: Plan, layout: Sequence[Entry]) -> NormMeter | None:
    """Returns the meter of a learner's gradients. None: the job records no norms.

    Args:
        job: Resolved job.
        plan: Role assignment.
        layout: Layout of the vector.
    """
    if (every := job.results.norms_every) is None:
        return None
    rules = [its.make_protocol(its_plan) for _, its, its_plan in job.parts(plan)]
    applied_next = all(rule.ordered for rule in rules) and not plan.overlapped
    return NormMeter(every, _ends(job, layout), applied_next=applied_next)


def meter_of_owner(job: Job, plan: Plan, layout: Sequence[Entry], part: Part | None) -> NormMeter | None:
    """Returns the meter of an owner of weights. None: the job records no norms.

    Args:
        job: Resolved job.
        plan: Role assignment.
        layout: Layout of the whole vector.
        part: Part of the vector that the owner has. None: it has all.
    """
    if (every := job.results.norms_every) is None:
        return None
    ends = _ends(job, layout)
    if part is not None:
        own = part.stretches[0]
        ends = [end - own.start for end in ends if own.start <= end <= own.stop]
    return NormMeter(every, ends, partial=part is not None, multiplies=_applies_one_gradient(job, plan))


def _applies_one_gradient(job: Job, plan: Plan) -> bool:
    """Returns whether each update applies one gradient, and one owner has all of it."""
    parts = [(its.make_protocol(its_plan), its_plan) for _, its, its_plan in job.parts(plan)]
    alone = all(rule.gradients_per_update == 1 and len(its.learners) == its.workers for rule, its in parts)
    return alone and not plan.averaging and len(job.make_topology().plan(job.learners).front_owners) == 1


def _ends(job: Job, layout: Sequence[Entry]) -> list[int]:
    """Returns the ends of all parameters and of all owners' parts of them."""
    parameters = [entry.offset + entry.size for entry in layout if entry.kind == "parameter"]
    return sorted({0, *parameters, *(piece.stop for piece in pieces_of(job, layout, parameters[-1], None))})
