"""Probes: marked methods are wrapped for a while, others are not."""

import pytest

from rudra.probe import Method, probed, wrapped


class Thing:
    @probed
    def twice(self, number: int) -> int:
        return 2 * number

    def plain(self) -> None: ...


class Heir(Thing):
    pass


def negative(method: Method) -> Method:
    return lambda thing, number: -method(thing, number)


@pytest.mark.parametrize("owner", [Thing, Heir])
def test_a_probe_is_wrapped_until_the_block_ends(owner: type[Thing]) -> None:
    with wrapped(owner, "twice", negative):
        assert Heir().twice(3) == -6
        assert Thing().twice(3) == (-6 if owner is Thing else 6)
    assert (Thing().twice(3), Heir().twice(3)) == (6, 6)
    assert "twice" not in vars(Heir)


def test_a_method_without_a_mark_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Thing\.plain is no probe; mark it with rudra\.probe\.probed"):
        wrapped(Thing, "plain", negative).__enter__()
