"""Averages of a compute group: the order of additions, unequal samples, and slices that give the bits of the whole."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rudra.compute.averaging import average

TENTHS = [0.1, 0.2, 0.3]


def tensors(*values: float) -> list[torch.Tensor]:
    return [torch.tensor([value], dtype=torch.float32) for value in values]


def averaged(gradients: list[torch.Tensor], samples: list[int]) -> torch.Tensor:
    into = torch.full_like(gradients[0], torch.nan)
    average(into, [gradient.clone() for gradient in gradients], samples)
    return into


@pytest.mark.parametrize(
    ("values", "samples", "mean"),
    [
        ([3.0], [4], 3.0),
        ([1.0, 3.0], [4, 4], 2.0),
        ([1.0, 3.0], [1, 3], 2.5),
        ([1.0, 2.0, 6.0], [4, 4, 4], 3.0),
        ([1.0, 2.0, 6.0], [2, 1, 1], 2.5),
        ([5.0, 1.0], [0, 2], 1.0),
    ],
)
def test_the_mean_weighs_by_samples(values: list[float], samples: list[int], mean: float) -> None:
    assert averaged(tensors(*values), samples).tolist() == [mean]


@pytest.mark.parametrize("samples", [[2, 2, 2], [1, 2, 3]])
def test_gradients_are_added_in_their_order(samples: list[int]) -> None:
    """Large numbers that cancel: any other order loses the small one in another way."""
    first, second, third = tensors(2.0**25, 1.0, -(2.0**25))
    in_order = averaged([first, second, third], samples)
    weights = [1, 1, 1] if len(set(samples)) == 1 else samples
    total = (first * weights[0] + second * weights[1]) + third * weights[2]
    expected = total * (1 / (3 if len(set(samples)) == 1 else sum(samples)))
    assert torch.equal(in_order, expected)
    if len(set(samples)) == 1:
        assert not torch.equal(averaged([first, third, second], samples), in_order)


def test_the_result_may_replace_any_of_them() -> None:
    for place in range(3):
        gradients = tensors(*TENTHS)
        expected = averaged(gradients, [1, 2, 4])
        average(gradients[place], gradients, [1, 2, 4])
        assert torch.equal(gradients[place], expected)


def test_gradients_of_equal_samples_are_left_as_they_are() -> None:
    gradients = tensors(*TENTHS)
    average(torch.empty(1), gradients, [8, 8, 8])
    assert [gradient.item() for gradient in gradients] == [torch.tensor(value).item() for value in TENTHS]


@given(
    st.lists(st.integers(1, 64), min_size=1, max_size=6),
    st.integers(1, 300),
    st.lists(st.integers(0, 300), max_size=5),
    st.integers(0, 2**32 - 1),
)
def test_slices_give_the_bits_of_the_whole(samples: list[int], size: int, cuts: list[int], seed: int) -> None:
    """A rank adds its slice alone, a replay the whole vector: rounding must not depend on that."""
    generator = torch.Generator().manual_seed(seed)
    gradients = [torch.randn(size, generator=generator) * 10.0**i for i in range(len(samples))]
    whole = averaged(gradients, samples)
    edges = sorted({0, size, *(min(cut, size) for cut in cuts)})
    parts = [averaged([g[a:b] for g in gradients], samples) for a, b in pairwise(edges)]
    assert torch.equal(torch.cat(parts), whole)
    reference = sum(g.double() * n for g, n in zip(gradients, samples, strict=True)) / sum(samples)
    assert torch.allclose(whole.double(), reference, rtol=1e-4, atol=1e-5 * float(reference.abs().max()))
