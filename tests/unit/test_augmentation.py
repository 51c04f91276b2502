"""Images are moved and mirrored as they should be, and alike for the same key."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from rudra.data.augmentation import Augmentation
from rudra.errors import ConfigError
from rudra.job.tables import AugmentTable

IMAGES = torch.arange(1, 64 * 2 * 5 * 4 + 1, dtype=torch.float32).reshape(64, 2, 5, 4)


def places(image: np.ndarray, changed: np.ndarray, crop: int) -> list[tuple[int, int, bool]]:
    """Every shift and mirroring that makes one image of the other."""
    padded = np.pad(image, ((0, 0), (crop, crop), (crop, crop)))
    height, width = image.shape[1:]
    ways = itertools.product(range(2 * crop + 1), range(2 * crop + 1), (False, True))

    def moved(down: int, right: int, mirrored: bool) -> np.ndarray:
        window = padded[:, down : down + height, right : right + width]
        return window[:, :, ::-1] if mirrored else window

    return [way for way in ways if np.array_equal(moved(*way), changed)]


@pytest.mark.parametrize(("crop", "flip"), [(2, True), (1, False), (0, True), (5, False)])
def test_every_image_is_moved_and_mirrored_by_itself(crop: int, flip: bool) -> None:
    changed = Augmentation(AugmentTable(crop=crop, flip=flip))(IMAGES, 7)
    seen = [places(a.numpy(), b.numpy(), crop) for a, b in zip(IMAGES, changed, strict=True)]
    assert all(seen)
    chosen = {each[0] for each in seen if len(each) == 1}  # an image that is moved out of sight fits many places
    if crop <= 2:
        assert {down for down, _, _ in chosen} == {right for _, right, _ in chosen} == set(range(2 * crop + 1))
    assert {mirrored for _, _, mirrored in chosen} == ({False, True} if flip else {False})


def moved_one_by_one(images: torch.Tensor, crop: int, flip: bool, key: int) -> torch.Tensor:
    """Returns what a loop over the images gives, with a generator of its own."""
    count, _, height, width = images.shape
    draws = np.random.Philox(key=key).random_raw(3 * count).reshape(count, 3).tolist()
    padded = np.pad(images.numpy(), ((0, 0), (0, 0), (crop, crop), (crop, crop)))
    result = torch.empty_like(images)
    for place, (one, two, three) in enumerate(draws):
        down, right = ((draw >> 32) * (2 * crop + 1) >> 32 for draw in (one, two))
        window = padded[place, :, down : down + height, right : right + width]
        result.numpy()[place] = window[:, :, ::-1] if flip and three >> 63 else window
    return result


@pytest.mark.parametrize("crop", range(5))
@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("shape", [(16, 3, 8, 8), (7, 1, 5, 9), (1, 2, 1, 3), (3, 4, 6, 1)])
def test_images_are_moved_as_in_a_loop(crop: int, flip: bool, shape: tuple[int, ...]) -> None:
    images = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    change = Augmentation(AugmentTable(crop=crop, flip=flip))
    keys = [0, 5, 2**63 - 1, 77]
    shifts = torch.split(torch.from_numpy(change.shifts(keys, len(images))), len(images))
    for key, of_step in zip(keys, shifts, strict=True):
        wanted = moved_one_by_one(images, crop, flip, key)
        assert torch.equal(change.moved(images, of_step), wanted), "as a gather"
        assert torch.equal(change(images, key), wanted), "in main memory"


def test_the_key_decides_and_the_original_stays() -> None:
    before = IMAGES.clone()
    change = Augmentation(AugmentTable(crop=2, flip=True))
    assert torch.equal(change(IMAGES, 1), change(IMAGES, 1))
    assert not torch.equal(change(IMAGES, 1), change(IMAGES, 2))
    assert torch.equal(IMAGES, before)
    assert Augmentation(AugmentTable()).idle
    assert not change.idle


def noisy(inputs: torch.Tensor, generator: torch.Generator, size: float = 1.0) -> torch.Tensor:
    return inputs + size * torch.rand(inputs.shape, generator=generator)


@pytest.mark.parametrize("name", [noisy, f"{__name__}:noisy"])
def test_a_callable_of_ones_own_draws_from_its_own_generator(name: Any) -> None:
    change = Augmentation(AugmentTable(name=name, options={"size": 0.5}))
    state = torch.get_rng_state()
    changed = change(IMAGES, 3)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(changed, IMAGES + 0.5 * torch.rand(IMAGES.shape, generator=torch.Generator().manual_seed(3)))


@pytest.mark.parametrize("inputs", [torch.zeros(4, 3), (torch.zeros(4, 1, 2, 2), torch.zeros(4))])
def test_only_images_can_be_moved(inputs: Any) -> None:
    with pytest.raises(ConfigError, match=r"\[augment\] crop, flip: for images \(channels, height, width\), not"):
        Augmentation(AugmentTable(flip=True))(inputs, 0)


@pytest.mark.parametrize(
    ("name", "said"),
    [("hardsync", "'hardsync' is unknown; valid: package"), ("math:pi", "math:pi is a float and cannot be called")],
)
def test_what_cannot_be_called_is_refused(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"^\[augment\] name: {said}"):
        Augmentation(AugmentTable(name=name))
