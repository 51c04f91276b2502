"""Ranks that die while all set up together: what the others make of it."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from rudra.errors import DataError
from rudra.mpi import failures


class MpiError(Exception):
    """As mpi4py's."""

    def Get_error_class(self) -> int:
        return int(self.args[0])


@pytest.fixture
def dead(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Ranks that are dead, of three; this one is 1."""
    ranks: set[int] = set()
    world = SimpleNamespace(size=3, rank=1)
    stub = SimpleNamespace(Exception=MpiError, ERR_PROC_FAILED=75, COMM_WORLD=world)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", stub)
    monkeypatch.setattr("mpi4py.MPI", stub, raising=False)
    found = SimpleNamespace(dead=ranks, noticed=lambda _: bool(ranks))
    monkeypatch.setattr(failures, "Losses", lambda _: found)
    monkeypatch.setattr(failures, "SPEAKS_S", 0.0)

    def end(_: Any, code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(failures, "end_everybody", end)
    return ranks


# What half an object gave, in runs whose ranks were killed while all told each other of their start.
HALVES = [ValueError("unsupported pickle protocol: 215"), EOFError(), KeyError(3), MpiError(75)]


@pytest.mark.parametrize("error", HALVES, ids=lambda error: type(error).__name__)
def test_whatever_comes_of_a_dying_rank_is_one_line(
    error: Exception, dead: set[int], capsys: pytest.CaptureFixture[str]
) -> None:
    dead.add(0)
    with pytest.raises(SystemExit) as end, failures.abort_on_dead_rank():
        raise error
    assert end.value.code == 1
    assert "rank 0 died before training began" in capsys.readouterr().err


@pytest.mark.parametrize("error", HALVES[:3], ids=lambda error: type(error).__name__)
def test_where_nobody_died_the_error_is_what_it_is(error: Exception, dead: set[int]) -> None:
    assert not dead
    with pytest.raises(type(error)), failures.abort_on_dead_rank():
        raise error


@pytest.mark.parametrize("error", [DataError("no such file"), MpiError(1)])
def test_an_error_that_says_what_it_is_stays(error: Exception, dead: set[int]) -> None:
    dead.add(0)
    with pytest.raises(type(error)), failures.abort_on_dead_rank():
        raise error
