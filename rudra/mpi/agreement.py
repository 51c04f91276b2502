"""Steps before ranks have roles: rank 0 decides and broadcasts, and every rank reports facts about itself."""

import socket
import sys
from collections.abc import Callable
from typing import TypeVar

from mpi4py import MPI

from rudra.compute.device import devices
from rudra.errors import RudraError
from rudra.job.tables import ClusterTable
from rudra.machine import cores
from rudra.mpi.failures import abort_on_dead_rank
from rudra.mpi.quiet import QuietComm
from rudra.mpi.start import gpu_aware, start_mpi
from rudra.prepare.resolve import RankFacts

T = TypeVar("T")


def found_by_rank0(find: Callable[[], T]) -> T:
    """Evaluates `find` on rank 0 before a run and returns its result on every rank. Other ranks need no key for the
    files.

    Args:
        find: returns an object that can be pickled. It may add directories to `sys.path`, which all ranks then add.

    Raises:
        RudraError: rank 0 raised it.
    """
    start_mpi()
    comm, places = QuietComm(MPI.COMM_WORLD), list[str]()
    found: T | RudraError | None = None
    if comm.rank == 0:
        try:
            found = find()
        except RudraError as error:
            found = error
        places = sys.path
    with abort_on_dead_rank():
        found, places = comm.bcast((found, places))
    if isinstance(found, RudraError):
        raise found
    sys.path += [place for place in places if place not in sys.path]
    agreed: T = found
    return agreed


def facts_of_ranks(comm: MPI.Comm, node: MPI.Comm, cluster: ClusterTable) -> list[RankFacts]:
    """Returns the facts of each rank, such as its host and cores. All ranks call this together.

    Args:
        comm: communicator of the ranks that run a job.
        node: communicator of those on this node.
        cluster: cluster table of the job.
    """
    mine = RankFacts(
        node.bcast(comm.rank),
        socket.gethostname(),
        cores(),
        found := devices.here(cluster.device),
        gpu_aware=(cluster.transport == "mpi" or found > 0) and bool(gpu_aware()),
        threaded=MPI.Query_thread() >= MPI.THREAD_MULTIPLE,
    )
    return [RankFacts(*facts) for facts in comm.allgather(tuple(mine))]
