"""What ranks see of memory that they share."""

import os
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import TensorDataset

SHARED_MB = 96


def memories(comm: Any, directory: Path) -> dict[str, Any]:
    """What a rank sees of memory of all kinds that ranks share, in the end without that of rank 1."""
    kinds = ("arrays", "tensors", "lock", "mapped")
    seen = {what: sharing(comm, directory, what) for what in kinds}
    return seen | {"neighbours": neighbours(comm, directory, None), "alone": neighbours(comm, directory, 1)}


def sharing(comm: Any, directory: Path, what: str) -> dict[str, Any]:
    """Rank 1 shares what it made with all, who write to a page of their own; how much memory that takes each."""
    from rudra.mpi.node_memory import share  # and MPI

    made: Any = None
    if comm.rank == 1:
        big = np.arange(SHARED_MB << 17, dtype=np.int64)
        made = {
            "arrays": {"big": big, "small": np.ones((2, 3), np.float32)},
            "tensors": TensorDataset(torch.from_numpy(big).view(-1, 2)),
            "lock": threading.Lock(),
            "mapped": np.memmap(sys.executable, np.uint8, "r"),
        }[what]
    got = share(comm, 1, made)
    del made
    if got is None or what in ("lock", "mapped"):
        return {"got": got is not None}
    array = got["big"] if what == "arrays" else got.tensors[0].numpy().reshape(-1)
    assert int(array[-1]) == len(array) - 1
    assert int(array.sum()) == len(array) * (len(array) - 1) // 2
    comm.Barrier()
    array[comm.rank] = -5
    comm.Barrier()
    assert [int(x) for x in array[: comm.size]] == [-5 if i == comm.rank else i for i in range(comm.size)]
    shared = {"Private_Dirty": 0, "Pss": 0}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, value = line.partition(":")
        if "-" in line.split()[0]:
            inside = "rudra-data" in line
        elif inside and name in shared:
            shared[name] += int(value.split()[0])
    comm.Barrier()
    return {"private_kb": shared["Private_Dirty"], "share_kb": shared["Pss"]}


def neighbours(comm: Any, directory: Path, forbids: int | None) -> dict[str, Any]:
    """Every rank makes two vectors, one before and one after all have met; what others see of them, and can do."""
    from rudra.compute.vectors import Buffer
    from rudra.mpi.arena import Arena

    arena = Arena()
    if comm.rank == forbids:
        os.memfd_create = lambda name, flags=0: -1  # type: ignore[assignment, misc]
    size = 1000
    first = Buffer(size, 0, memory=arena.allocate)
    first.vector.fill_(comm.rank + 1)
    failure = arena.meet(comm, comm.rank, 1 << 16)
    if failure:
        first.vector.fill_(7.0)
        return {"failure": failure, "neighbours": len(arena.neighbours), "sum": float(first.vector.sum())}
    second = Buffer(size, 0, memory=arena.allocate)
    second.vector.fill_(10.0 * (comm.rank + 1))
    places = comm.allgather([arena.offset(buffer.array) for buffer in (first, second)])
    seen = [[float(arena.floats_at(rank, at, size * 4).mean()) for at in where] for rank, where in enumerate(places)]
    comm.Barrier()
    first.vector.fill_(-1.0)
    comm.Barrier()
    later = [float(arena.floats_at(rank, where[0], size * 4).mean()) for rank, where in enumerate(places)]
    child = os.fork()
    if not child:
        arena.floats_at((comm.rank + 1) % comm.size, places[(comm.rank + 1) % comm.size][0], size * 4).fill_(5.0)
        os._exit(0)
    killed_by = os.waitpid(child, 0)[1]
    try:
        arena.allocate(1 << 20)
        refused = ""
    except MemoryError as error:
        refused = str(error)
    arena.close()
    return {"seen": seen, "later": later, "killed_by": killed_by, "refused": refused}
