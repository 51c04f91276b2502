from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rudra.data.sampling import TEST_SPLIT, VALIDATION_SPLIT, Sampler, hold_out, mix
from rudra.errors import DataError


def test_a_pass_draws_every_sample_once_and_each_pass_differs() -> None:
    sampler = Sampler(seed=3, stream=0, population=50)
    passes = [sampler.indices(50 * number, 50) for number in range(4)]
    assert all(sorted(p) == list(range(50)) for p in passes)
    assert len({tuple(p) for p in passes}) == 4


@given(cuts=st.lists(st.integers(0, 40), max_size=6), stream=st.integers(0, 2**31), seed=st.integers(0, 2**63 - 1))
def test_any_split_of_a_walk_gives_the_same_sequence(cuts: list[int], stream: int, seed: int) -> None:
    whole = Sampler(seed, stream, 17).indices(5, sum(cuts))
    sampler, parts, first = Sampler(seed, stream, 17), [], 5
    for count in cuts:
        parts.append((first, count))
        first += count
    drawn = {part: sampler.indices(*part) for part in reversed(parts)}  # out of order, as a replay may ask
    assert whole.dtype == np.int64
    assert [i for part in parts for i in drawn[part].tolist()] == whole.tolist()


def test_the_walk_of_a_job_never_changes() -> None:
    """A result file must replay with every later version."""
    assert Sampler(7, 2, 10).indices(0, 20).tolist() == [6, 7, 8, 4, 0, 1, 5, 3, 9, 2, 8, 4, 0, 7, 6, 5, 3, 1, 2, 9]


@pytest.mark.parametrize("most", [1, 3, 2**64 - 1])
def test_equal_numbers_keep_their_order_in_a_walk(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = np.random.default_rng(0).integers(0, most, 5_000, np.uint64, endpoint=True)
    generator = SimpleNamespace(random_raw=lambda count: numbers[:count])
    monkeypatch.setattr(np.random, "Philox", lambda **_: generator)
    wanted = sorted(range(5_000), key=lambda place: numbers[place])
    assert Sampler(0, 0, 5_000).indices(0, 5_000).tolist() == wanted


def test_learners_and_seeds_walk_differently() -> None:
    walks = [tuple(Sampler(seed, stream, 100).indices(0, 100)) for seed in (0, 1) for stream in (0, 1, 2)]
    assert len(set(walks)) == 6


@pytest.mark.parametrize("population", [0, 2**31])
def test_populations_that_cannot_be_drawn_from_are_refused(population: int) -> None:
    with pytest.raises(DataError, match=f"cannot draw from {population} "):
        Sampler(0, 0, population)


def test_mixed_keys_are_63_bits_and_tell_every_value_and_order_apart() -> None:
    keys = [mix(a, b, c) for a in range(8) for b in range(8) for c in (0, 1, 2**62, 2**64 - 1)]
    keys += [mix(), mix(0), mix(0, 0)]
    assert len(set(keys)) == len(keys)
    assert all(0 <= key < 2**63 for key in keys)
    ones = np.mean([bin(key).count("1") for key in keys])
    assert 30 < ones < 33


@pytest.mark.parametrize(
    ("population", "fraction", "count"), [(2, 0.01, 1), (2, 0.99, 1), (10, 0.25, 2), (1000, 0.1, 100)]
)
def test_held_out_samples_are_a_random_part_of_the_set(population: int, fraction: float, count: int) -> None:
    stay, held = hold_out(7, TEST_SPLIT, population, fraction)
    assert len(held) == count
    assert sorted([*stay, *held]) == list(range(population))
    assert (np.diff(stay) > 0).all()
    assert (np.diff(held) > 0).all()
    again = hold_out(7, TEST_SPLIT, population, fraction)
    assert [part.tolist() for part in again] == [stay.tolist(), held.tolist()]


def test_what_is_held_out_depends_on_seed_and_purpose() -> None:
    parts = {
        tuple(hold_out(seed, purpose, 100, 0.2)[1]) for seed in (0, 1) for purpose in (TEST_SPLIT, VALIDATION_SPLIT)
    }
    assert len(parts) == 4
    counts = np.zeros(20)
    for seed in range(500):
        counts[hold_out(seed, TEST_SPLIT, 20, 0.5)[1]] += 1
    assert counts.sum() == 5000
    assert (np.abs(counts - 250) < 60).all()  # five standard deviations


def test_one_sample_cannot_be_parted() -> None:
    with pytest.raises(DataError, match="cannot hold samples out of 1; there must be 2 at least"):
        hold_out(0, TEST_SPLIT, 1, 0.5)
