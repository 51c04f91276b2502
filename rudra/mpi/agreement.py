"""What ranks find out together before they have roles: what rank 0 decides, and what each says of itself."""

import socket
import sys
import time
from collections.abc import Callable
from typing import TypeVar

from mpi4py import MPI

from rudra.compute import devices
from rudra.errors import RudraError
from rudra.job.tables import ClusterTable
from rudra.machine import cores
from rudra.mpi.failures import abort_on_dead_rank
from rudra.mpi.start import gpu_aware, start_mpi
from rudra.prepare.resolve import RankFacts

T = TypeVar("T")


def rest(comm: MPI.Comm) -> None:
    """Waits for all ranks, and leaves the core to those that work meanwhile."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(1e-3)


def found_by_rank0(find: Callable[[], T]) -> T:
    """What rank 0 finds in files, on every rank, before a run; other ranks need no key to trust the files.

    Args:
        find: returns something that can be pickled, and may add directories to `sys.path`, also for the other ranks.

    Raises:
        RudraError: rank 0 raised it.
    """
    start_mpi()
    comm, places = MPI.COMM_WORLD, list[str]()
    found: T | RudraError | None = None
    if comm.rank == 0:
        try:
            found = find()
        except RudraError as error:
            found = error
        places = sys.path
    with abort_on_dead_rank():
        rest(comm)
        found, places = comm.bcast((found, places))
    if isinstance(found, RudraError):
        raise found
    sys.path += [place for place in places if place not in sys.path]
    agreed: T = found
    return agreed


def facts_of_ranks(comm: MPI.Comm, cluster: ClusterTable) -> list[RankFacts]:
    """What each rank says of itself; all ranks call this together.

    Args:
        comm: of the ranks that run a job.
        cluster: of the job.
    """
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    place = node.bcast(comm.rank)
    node.Free()
    mine = RankFacts(
        place,
        socket.gethostname(),
        cores(),
        0 if cluster.device == "cpu" else devices.gpus_here(),
        gpu_aware=cluster.gpu_aware_mpi and bool(gpu_aware()),
        threaded=MPI.Query_thread() >= MPI.THREAD_MULTIPLE,
    )
    return [RankFacts(*facts) for facts in comm.allgather(tuple(mine))]


def sum_on_node(comm: MPI.Comm, value: int) -> int:
    """Sum over the ranks of this node; all ranks call this together, so never in a step that may fail on one."""
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    total: int = node.allreduce(value)
    node.Free()
    return total
