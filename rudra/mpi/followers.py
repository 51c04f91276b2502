"""Several runs in one launch, which rank 0 chooses one after the other while the other ranks follow."""

import traceback
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar, cast

from mpi4py import MPI

from rudra.errors import EXIT_STOPPED, RudraError
from rudra.log import log
from rudra.mpi import failures
from rudra.mpi.failures import abort_on_dead_rank, end_everybody
from rudra.mpi.quiet import QuietComm
from rudra.mpi.start import start_mpi

T = TypeVar("T")

Task = Callable[[], int]
"""Part of a rank in a run. It returns the exit code of the run, the same on every rank."""

LOST = "died; the same command continues"
"""End of a line that names ranks which died."""


class _Ended(NamedTuple, Generic[T]):
    """End of the launch: a result for every rank, or an exception."""

    result: T | None
    error: BaseException | None = None


def led_by_rank0(lead: Callable[[Callable[[Task], int]], T]) -> T:
    """Calls a function on rank 0, and returns its result on every rank. Every rank of the launch must call this.

    If a rank dies, the others end with exit code 3, because the same command continues. Without ULFM mpirun ends them,
    with a code of its own.

    Args:
        lead: Gets a function that executes a task on all ranks, and returns its exit code. Tasks and the result must
            be picklable.

    Raises:
        RudraError: Rank 0 raised it.
        KeyboardInterrupt: Rank 0 raised it.
    """
    start_mpi()
    world = MPI.COMM_WORLD
    failures.code_if_lost = EXIT_STOPPED
    with abort_on_dead_rank(LOST):
        ended = _led(world, lead) if world.rank == 0 else _followed(world)
    if ended.error is not None:
        raise ended.error
    return cast("T", ended.result)


def _led(world: MPI.Comm, lead: Callable[[Callable[[Task], int]], T]) -> _Ended[T]:
    def call(task: Task) -> int:
        _tell(world, task)
        return _done(task)

    try:
        ended = _Ended(lead(call))
    except (RudraError, KeyboardInterrupt) as error:
        ended = _Ended(None, error)
    except (MPI.Exception, _RankLost):
        raise
    except Exception as error:  # the other ranks must not wait
        log.error(f"rank 0 failed: {type(error).__name__}: {error}\n{traceback.format_exc()}")
        end_everybody(world, 1)
    _tell(world, ended)
    return ended


def _followed(world: MPI.Comm) -> _Ended[T]:
    while True:
        told = _tell(world)
        if isinstance(told, _Ended):
            return told
        _done(told)


def _tell(world: MPI.Comm, what: Any = None) -> Any:
    """Returns on every rank what rank 0 gives. The others wait without keeping the core busy."""
    return QuietComm(world).bcast(what)


class _RankLost(Exception):
    """A rank has died, and this one has outlived it."""


def _done(task: Task) -> int:
    code = task()
    if failures.outlived:
        raise _RankLost
    return code
