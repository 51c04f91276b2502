"""Sources against plain indexing of the same arrays, wherever they lie and however their rows are asked for."""

import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from PIL import Image

from rudra.data.sources import Dense, Images, Source, Sparse, Stored, TokenWindows
from rudra.errors import DataError

Rows = np.ndarray[Any, Any]
RNG = np.random.default_rng(0)
MATRIX = (RNG.random((37, 5, 3)) * 100).astype(np.float32)


def dense(array: Rows) -> Callable[[Path], Source]:
    return lambda place: Dense(array)


def mapped(array: Rows) -> Callable[[Path], Source]:
    def make(place: Path) -> Source:
        np.save(place / "a.npy", array)
        return Dense(np.load(place / "a.npy", mmap_mode="r"))

    return make


def stored(array: Rows, cache_bytes: int = 1 << 20, **options: Any) -> Callable[[Path], Source]:
    def make(place: Path) -> Source:
        with h5py.File(place / "a.h5", "w", **options.pop("file", {})) as file:
            file.create_dataset("group/a", data=array, **options)
        return Stored(place / "a.h5", "group/a", cache_bytes=cache_bytes)

    return make


def compact(array: Rows, place: Path) -> Source:
    """Numbers that lie in the data set's header."""
    layout = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    layout.set_layout(h5py.h5d.COMPACT)
    with h5py.File(place / "a.h5", "w") as file:
        file.create_dataset("a", data=array, dcpl=layout)
    return Stored(place / "a.h5", "a")


def unwritten(shape: tuple[int, ...], place: Path) -> Source:
    with h5py.File(place / "a.h5", "w") as file:
        file.create_dataset("a", shape, "f4")
    return Stored(place / "a.h5", "a")


def sparse_of(matrix: Rows) -> Sparse:
    """The same matrix in compressed rows."""
    rows, columns = np.nonzero(matrix)
    starts = np.searchsorted(rows, np.arange(len(matrix) + 1))
    return Sparse(matrix[rows, columns].astype(np.float32), columns.astype(np.int32), starts, matrix.shape[1])


THIN = np.where(RNG.random((37, 11)) < 0.2, RNG.random((37, 11)), 0).astype(np.float32)
THIN[[0, 5, 6, 36]] = 0  # empty rows
TEXT = RNG.integers(0, 60, 37 * 4 + 3).astype(np.uint8)

CASES: dict[str, tuple[Rows, Callable[[Path], Source]]] = {
    "dense": (MATRIX, dense(MATRIX)),
    "strided": (MATRIX.transpose(0, 2, 1), dense(MATRIX.transpose(0, 2, 1))),
    "labels": (np.arange(37), dense(np.arange(37))),
    "one sample": (MATRIX[:1], dense(MATRIX[:1])),
    "mapped": (MATRIX, mapped(MATRIX)),
    "sparse": (THIN, lambda _: sparse_of(THIN)),
    "nothing stored": (np.zeros((3, 4), np.float32), lambda _: sparse_of(np.zeros((3, 4)))),
    "windows": (TEXT[:148].reshape(37, 4).astype(np.int64), lambda _: TokenWindows(TEXT, 4)),
    "later windows": (TEXT[1:149].reshape(37, 4).astype(np.int64), lambda _: TokenWindows(TEXT, 4, 1)),
    "fewer windows": (TEXT[3:43].reshape(10, 4).astype(np.int64), lambda _: TokenWindows(TEXT, 4, 3, 10)),
    "contiguous": (MATRIX, stored(MATRIX)),
    "behind a user's block": (MATRIX, stored(MATRIX, file={"userblock_size": 1024})),
    "big-endian": (MATRIX.astype(">f4"), stored(MATRIX.astype(">f4"))),
    "truths": (MATRIX > 50, stored(MATRIX > 50)),
    "compact": (np.arange(9), lambda place: compact(np.arange(9), place)),
    "never written": (np.zeros((9, 2), "f4"), lambda place: unwritten((9, 2), place)),
    "chunks": (MATRIX, stored(MATRIX, chunks=(8, 5, 3))),
    "chunks of parts of rows": (MATRIX, stored(MATRIX, chunks=(8, 2, 2), compression="gzip")),
    "a chunk for each row": (MATRIX, stored(MATRIX, chunks=(1, 5, 3), compression="lzf", shuffle=True)),
    "one chunk": (MATRIX, stored(MATRIX, chunks=(37, 5, 3), compression="gzip", fletcher32=True)),
    "no room for chunks": (MATRIX, stored(MATRIX, 0, chunks=(8, 5, 3), compression="gzip")),
    "room for two chunks": (MATRIX, stored(MATRIX, 1000, chunks=(8, 5, 3), compression="gzip")),
    "growing": (MATRIX, stored(MATRIX, maxshape=(None, 5, 3))),
}


@pytest.mark.parametrize("case", CASES)
def test_rows_are_those_of_the_array(case: str, tmp_path: Path) -> None:
    array, make = CASES[case]
    source = make(tmp_path)
    assert (source.shape, source.dtype) == (array.shape, array.dtype)
    n, rng = len(array), np.random.default_rng(1)
    asked = [np.arange(n), np.arange(n)[::-1], np.zeros(0, np.int64), np.array([n - 1, 0, n - 1, n - 1])]
    asked += [rng.integers(0, n, 16) for _ in range(20)]
    for indices in asked:
        rows = source.rows(indices)
        np.testing.assert_array_equal(rows, array[indices])
        assert rows.flags.c_contiguous
        assert rows.flags.writeable
        rows[...] = 0  # a caller's own
    np.testing.assert_array_equal(source.rows(np.arange(n)), array)


@pytest.mark.parametrize("case", ["dense", "sparse", "windows", "contiguous", "no room for chunks", "chunks"])
def test_sources_travel_and_serve_many_threads(case: str, tmp_path: Path) -> None:
    array, make = CASES[case]
    source: Source = pickle.loads(pickle.dumps(make(tmp_path)))
    wanted = [np.random.default_rng(seed).integers(0, len(array), 9) for seed in range(200)]
    with ThreadPoolExecutor(8) as pool:
        for indices, rows in zip(wanted, pool.map(source.rows, wanted), strict=True):
            np.testing.assert_array_equal(rows, array[indices])


def test_a_chunk_is_decoded_once_a_batch_and_kept_while_there_is_room(tmp_path: Path) -> None:
    source = stored(MATRIX, 2 * 8 * 60, chunks=(8, 5, 3), compression="gzip")(tmp_path)
    assert isinstance(source, Stored)
    data, read = source._data, []

    class Counted:
        shape = data.shape

        def __getitem__(self, part: slice) -> Any:
            read.append(part.start // 8)
            return data[part]

    source._data = Counted()
    source.rows(np.array([0, 30, 1, 31, 0, 2]))
    assert sorted(read) == [0, 3]
    source.rows(np.array([3, 24]))
    assert sorted(read) == [0, 3]
    source.rows(np.array([8]))  # now the one that was used longest ago has to go: rows 0 to 7
    source.rows(np.array([24, 9]))
    assert read[2:] == [1]
    source.rows(np.array([0]))
    assert read[3:] == [0]


def test_stored_rows_can_have_another_shape(tmp_path: Path) -> None:
    stored(MATRIX, chunks=(8, 5, 3))(tmp_path)
    source = Stored(tmp_path / "a.h5", "group/a", sample_shape=(1, 15))
    assert source.shape == (37, 1, 15)
    np.testing.assert_array_equal(source.rows(np.array([9, 2])), MATRIX[[9, 2]].reshape(2, 1, 15))
    assert pickle.loads(pickle.dumps(source)).shape == (37, 1, 15)


def other_files(place: Path, what: str) -> None:
    with h5py.File(place / "b.h5", "w") as other:
        other["a"] = MATRIX
    with h5py.File(place / "a.h5", "w") as file:
        file["group/b"] = 1.0
        if what == "virtual":
            layout = h5py.VirtualLayout(MATRIX.shape, "f4")
            layout[...] = h5py.VirtualSource(place / "b.h5", "a", MATRIX.shape)
            file.create_virtual_dataset("a", layout)
        elif what == "external":
            file.create_dataset("a", (4,), "f4", external=[(place / "b.h5", 0, 16)])
        else:
            file["a"] = h5py.ExternalLink(place / "b.h5", "a")


def h5(place: Path, **data: Any) -> None:
    with h5py.File(place / "a.h5", "w") as file:
        for name, value in data.items():
            file[name] = value


def damaged_chunk(place: Path) -> None:
    with h5py.File(place / "a.h5", "w") as file:
        data = file.create_dataset("a", data=MATRIX, chunks=(8, 5, 3), compression="gzip", fletcher32=True)
        at = data.id.get_chunk_info(2).byte_offset
    content = bytearray((place / "a.h5").read_bytes())
    content[at + 20] ^= 0xFF
    (place / "a.h5").write_bytes(content)


def huge(place: Path) -> None:
    with h5py.File(place / "a.h5", "w") as file:
        file.create_dataset("a", (2**40, 10), "f4", chunks=(1000, 10))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: h5(p, b=1.0, c=2), "a.h5: a: there is no such data set"),
        (lambda p: h5(p, **{"a/b": 1.0}), "a.h5: a: there is no such data set"),
        (lambda p: h5(p, a=1.0), "has no rows of numbers, but float64 of shape ()"),
        (lambda p: h5(p, a=h5py.Empty("f4")), "has no rows of numbers, but float32 of shape None"),
        (lambda p: h5(p, a=["x", "y"]), "has no rows of numbers, but object"),
        (lambda p: h5(p, a=np.zeros(3, "i4,f4")), "has no rows of numbers"),
        (lambda p: other_files(p, "virtual"), "its values are in other files"),
        (lambda p: other_files(p, "external"), "its values are in other files"),
        (lambda p: other_files(p, "link"), "its values are in other files"),
        (huge, "claims 43,980,465,111,040 bytes, in a file of"),
        (damaged_chunk, "a.h5: a: rows 16 to 23 cannot be read, perhaps damaged"),
        (lambda p: (p / "a.h5").write_bytes(b"no HDF5"), "a.h5: a: cannot be read, perhaps damaged"),
        (lambda p: None, "a.h5: a: cannot be read"),
    ],
)
def test_what_is_wrong_with_an_hdf5_file_is_named(make: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    make(tmp_path)
    with pytest.raises(DataError) as raised:
        Stored(tmp_path / "a.h5", "a").rows(np.arange(30))
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def picture(place: Path, name: str, size: tuple[int, int], mode: str = "RGB", **options: Any) -> str:
    """A file that is red on its left, green in the middle square and blue on the right, or so from top to bottom."""
    width, height = size
    side, pixels = min(size), np.zeros((height, width, 3), np.uint8)
    first, along = (max(size) - side) // 2, pixels if width > height else pixels.transpose(1, 0, 2)
    along[:, :first, 0] = 255
    along[:, first : first + side, 1] = 255
    along[:, first + side :, 2] = 255
    Image.fromarray(pixels).convert(mode).save(place / name, **options)
    return str(place / name)


GREEN = {"RGB": (0, 255, 0), "L": (150, 150, 150), "1": (255, 255, 255)}


@pytest.mark.parametrize(
    ("name", "size", "mode"),
    [
        ("a.png", (40, 20), "RGB"),
        ("a.png", (21, 60), "RGBA"),
        ("a.png", (30, 30), "L"),
        ("a.png", (7, 9), "P"),
        ("a.gif", (33, 8), "P"),
        ("a.bmp", (5, 3), "RGB"),
        ("a.jpg", (400, 200), "RGB"),
        ("a.jpeg", (100, 390), "CMYK"),
        ("a.webp", (64, 32), "RGB"),
    ],
)
def test_pictures_are_scaled_and_cropped_to_the_middle(
    name: str, size: tuple[int, int], mode: str, tmp_path: Path
) -> None:
    file = picture(tmp_path, name, size, mode)
    (pixels,) = Images([file], 16).rows(np.zeros(1, np.int64))
    assert (pixels.shape, pixels.dtype) == ((3, 16, 16), np.uint8)
    inside = pixels[:, 2:-2, 2:-2].astype(int)  # the border mixes with what was cropped
    assert np.abs(inside - np.reshape(GREEN.get(mode, GREEN["RGB"]), (3, 1, 1))).max() <= 25


def test_a_transparent_palette_is_no_cause_for_warnings(tmp_path: Path) -> None:
    image = Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8)).convert("P")
    image.save(tmp_path / "a.png", transparency=bytes(range(64)))
    assert Images([str(tmp_path / "a.png")], 8).rows(np.array([0])).shape == (1, 3, 8, 8)


@pytest.mark.parametrize("threads", [1, 4])
def test_pictures_come_in_the_order_that_was_asked_for(threads: int, tmp_path: Path) -> None:
    files = []
    for number in range(12):
        files.append(str(tmp_path / f"{number}.png"))
        Image.fromarray(np.full((9, 9, 3), number, np.uint8)).save(files[-1])
    source: Images = pickle.loads(pickle.dumps(Images(files, 8, threads)))
    wanted = np.array([3, 11, 3, 0, 7])
    assert source.shape == (12, 3, 8, 8)
    assert source.rows(wanted)[:, 1, 4, 4].tolist() == wanted.tolist()


def cut(file: str) -> None:
    content = Path(file).read_bytes()
    Path(file).write_bytes(content[: len(content) // 2])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut, "truncated"),
        (lambda file: Path(file).write_bytes(b"no picture"), "cannot identify image file"),
        (lambda file: Path(file).write_bytes(b""), "cannot identify image file"),
        (lambda file: Path(file).unlink(), "no such file"),
        (lambda file: Image.fromarray(np.zeros((4, 4), np.uint16)).save(file), "its pixels are I;16, not 8 bits"),
    ],
)
@pytest.mark.parametrize("threads", [1, 3])
def test_a_damaged_picture_is_named_when_it_is_drawn(
    damage: Callable[[str], object], message: str, threads: int, tmp_path: Path
) -> None:
    files = [picture(tmp_path, f"{number}.png", (40, 30)) for number in range(3)]
    damage(files[1])
    source = Images(files, 8, threads)
    assert len(source.rows(np.array([0, 2]))) == 2
    with pytest.raises(DataError) as raised:
        source.rows(np.array([0, 1, 2]))
    assert str(raised.value).startswith(f"{files[1]}: cannot be decoded, perhaps damaged: ")
    assert message in str(raised.value)


def test_a_text_that_is_too_short_has_no_such_windows() -> None:
    with pytest.raises(ValueError, match="9 characters have no 3 windows of 3 from 1"):
        TokenWindows(np.zeros(9, np.uint8), 3, 1, 3)
    assert TokenWindows(np.zeros(2, np.uint8), 3).shape == (0, 3)
