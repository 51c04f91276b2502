"""Parts of `rudra.mpi` on ranks, without a run."""

import time
from pathlib import Path
from typing import Any

import numpy as np

from topologies import sharded


def states_after_a_given_up_checkpoint(comm: Any, directory: Path) -> dict[str, Any]:
    """Rank 0 gives up the first checkpoint, because rank 2 died. Rank 1 gives its state of that update as well."""
    from rudra.mpi.states import FINAL, StateTransfer

    plan = sharded.plan([0] * 4, shards=3)
    first, second, lost = plan.keepers
    found: list[Any] = []
    states = StateTransfer(comm, plan, lambda role: 1000 + role)
    for timestamp in (5, 6, FINAL):
        if comm.rank == plan.roles[first].world_rank:
            states.gather(timestamp, found.append)
            if timestamp == 5:
                states.lose([plan.roles[lost].world_rank])
        elif comm.rank < 3 and (timestamp != 5 or comm.rank == plan.roles[second].world_rank):
            states.give(plan.keepers[comm.rank], timestamp, {"weights": np.full(9, timestamp, np.float32)})
        comm.Barrier()
        if timestamp != 5:
            states.finish()
    return {"found": [parts and [float(part["weights"][0]) for part in parts] for parts in found]}


def clock_origins(comm: Any, directory: Path) -> dict[str, Any]:
    """Where ranks have clocks that are hours apart, and every two ranks make a node: this rank's view of the origin."""
    from rudra.mpi.clock import clock_origin

    def clock() -> float:
        return time.perf_counter() + 3600.0 * (comm.rank // 2)

    origin = clock_origin(comm, 3, [rank // 2 * 2 for rank in range(comm.size)], clock)
    return {"origin": origin - 3600.0 * (comm.rank // 2)}


def quiet_operations(comm: Any, directory: Path) -> dict[str, Any]:
    """What operations that sleep give on this rank beside those of MPI, and the processor time of a wait for rank 0."""
    from mpi4py import MPI

    from rudra.mpi.quiet import QuietComm

    def answers(comm: MPI.Comm) -> list[Any]:
        long = {"rank": comm.rank, "text": "x" * 1000 * comm.rank}
        gathered = comm.allgather(long), comm.gather(long, 1), comm.allgather(None)
        told = comm.bcast(long, 1), comm.bcast(None if comm.rank else "", 0)
        return [*gathered, *told, comm.allreduce(comm.rank + 1), comm.allreduce(comm.rank, MPI.MAX)]

    quiet = QuietComm(comm).Dup()
    found = {
        "quiet": answers(quiet),
        "plain": answers(comm),
        "split": quiet.Split(quiet.rank % 2).allgather(quiet.rank),
    }
    nothing = quiet.Split(MPI.UNDEFINED) == MPI.COMM_NULL
    if not comm.rank:
        time.sleep(0.5)
    began = time.process_time()
    quiet.bcast("told")
    return {**found, "nothing": nothing, "waiting_s": time.process_time() - began}


def says_gpu_aware(comm: Any, directory: Path) -> dict[str, Any]:
    from rudra.mpi.start import gpu_aware

    return {"aware": gpu_aware()}
