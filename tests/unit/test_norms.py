"""Norms of gradients in pieces, and their columns in the rows of a file."""

import numpy as np
import pytest
import torch
from msgspec import structs

from rudra.compute.norms import PIECE, NormMeter
from rudra.compute.rows import RowFormat
from rudra.compute.sparse import SparseRows
from rudra.compute.vectors import RowBuffer
from rudra.core.events import Updated
from rudra.core.messages import OwnerMeasured
from rudra.core.norms import joint_norm
from rudra.core.records import GRADIENT, GRADIENT_NORM
from rudra.results.norms import with_gradient_norms
from rudra.roles.multi_owner import OwnerSteps, stepped

ENDS = [0, 5, PIECE, 3 * PIECE + 7, 3 * PIECE + 8]


def gradient_of(size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(1))


def test_a_norm_is_precise_for_any_size_and_number_of_threads() -> None:
    gradient, threads = gradient_of(3_000_000), torch.get_num_threads()
    meter = NormMeter(1, [0, len(gradient)])
    try:
        found = set()
        for count in (1, 2):
            torch.set_num_threads(count)
            found.add(meter.norm(gradient))
    finally:
        torch.set_num_threads(threads)
    (norm,) = found
    assert norm == pytest.approx(np.linalg.norm(gradient.numpy().astype(np.float64)), rel=3e-7)


def test_a_gradient_that_is_overwritten_while_it_is_computed_has_the_same_norm() -> None:
    """Others may overwrite a parameter as soon as it is reported. The last one is not reported."""
    gradient = gradient_of(ENDS[-1] + 3)  # model buffers follow
    expected, meter = NormMeter(1, ENDS).norm(gradient), NormMeter(1, ENDS)
    reported = []

    def overwrite(piece: slice) -> None:
        reported.append(piece)
        gradient[piece] = torch.nan

    ready = meter.watching(gradient, overwrite)
    pieces = [slice(ENDS[i], ENDS[i + 1]) for i in (2, 0, 1)]
    for piece in pieces:
        ready(piece)
    assert reported == pieces
    assert meter.norm(gradient) == expected
    assert np.isnan(meter.norm(gradient))


def test_the_norm_of_parts_is_the_norm_of_the_whole() -> None:
    gradient = gradient_of(ENDS[-1])
    cut = ENDS[2]
    parts = [
        NormMeter(1, ENDS[:3], partial=True).norm(gradient[:cut]),
        NormMeter(1, [end - cut for end in ENDS[2:]], partial=True).norm(gradient[cut:]),
    ]
    assert joint_norm(parts) == NormMeter(1, ENDS).norm(gradient)


@pytest.mark.parametrize("count", [0, 4, 12])
def test_the_norm_of_a_gradient_in_rows(count: int) -> None:
    """The layer in rows is between others. Two elements behind the parameters are model buffers."""
    form = RowFormat(5, 12, 3, 52)
    gradient = RowBuffer(form, 0).gradient
    gradient.rest.copy_(gradient_of(form.others))
    gradient.put(SparseRows(torch.arange(count, dtype=torch.int32), gradient_of(count * 3).view(-1, 3)))
    whole = torch.cat([gradient.rest[:-2], gradient.whole.flatten()]).double()
    assert NormMeter(1, [0, 50]).norm(gradient) == pytest.approx(float(whole.norm()), rel=1e-6)


def test_the_last_norm_of_a_mini_batch_counts_and_joined_mini_batches_have_none() -> None:
    norms = np.array([(0, 4, 7, 1.0), (1, 4, 7, 2.0), (0, 4, 7, 3.0), (0, 4, 8, 4.0)], GRADIENT_NORM)
    rows = np.zeros(5, GRADIENT)
    rows["learner"], rows["step"], rows["samples"] = [0, 1, 0, 1, 5], [7, 7, 8, 8, 7], [4, 4, 8, 4, 4]
    found = with_gradient_norms(rows, norms)
    assert found["norm"].tolist()[:2] == [3.0, 2.0]
    assert np.isnan(found["norm"][2:]).all()
    assert (found["step"] == rows["step"]).all()
    assert np.isnan(with_gradient_norms(rows, norms[:0])["norm"]).all()
    assert len(with_gradient_norms(rows[:0], norms)) == 0


def test_a_part_without_a_norm_leaves_the_whole_without_one() -> None:
    """The norm of one part is not a number if the training diverges there."""
    steps = OwnerSteps((7, 8))
    event = Updated(1, 0, 0.5, (bytes(4),), 3.0)
    assert steps.here(event) is None
    (message,) = stepped(8, event)
    made = steps.there(message)
    assert made is not None
    assert np.isnan(made.norm)
    assert steps.here(structs.replace(event, timestamp=2)) is None
    steps.measured(OwnerMeasured(8, 2, 4.0))
    made = steps.there(structs.replace(message, timestamp=2))
    assert made is not None
    assert made.norm == 5.0


def test_a_norm_beyond_float32_is_infinite() -> None:
    assert joint_norm([3e38, 3e38]) == np.inf
