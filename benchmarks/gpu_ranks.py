"""Row of `rudra bench gpu`: a large vector from one rank to another on the same device, by "ipc" and by "staged"."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.gpu_rows import CheckFailed, Figures, Setting
from rudra.bench.ranks import LEARNER, SERVER, TAG, in_turns, on_ranks
from rudra.benchmark_report import ratios, spread
from rudra.compute.device.devices import DEVICES, finish
from rudra.compute.executor import Executor
from rudra.compute.staging import Staging
from rudra.core.buffer_names import WEIGHTS
from rudra.core.messages import Weights

if TYPE_CHECKING:
    from mpi4py import MPI

    from rudra.mpi.arena import Arena


def exchanged(setting: Setting, size: int) -> Figures:
    """Measures both transports in turns."""
    rounds, count = setting.sized((3, 10), (1, 5), (0, 2))
    ranks = on_ranks(_measured, device=setting.machine.in_jobs, size=size, rounds=rounds, count=count)
    if not ranks[LEARNER]["equal"]:
        raise CheckFailed("the other rank has other numbers; right: the same")
    figures: dict[str, list[float]] = ranks[LEARNER]["seconds"]
    shown = {f"{way} GB/s": spread(4 * size / taken / 1e9 for taken in figures[way]) for way in ("ipc", "staged")}
    return {"MB": 4 * size / 1e6, **shown, "ipc / staged": ratios(figures["staged"], figures["ipc"])}


def _measured(comm: "MPI.Comm", directory: Path, *, device: str, size: int, rounds: int, count: int) -> dict[str, Any]:
    """Sends vectors from the server's rank to the learner's. Returns seconds for each, and whether they are equal."""
    from rudra.mpi.arena import Arena
    from rudra.mpi.device_arena import DeviceArena

    pair = comm.Split(int(comm.rank in (SERVER, LEARNER)), comm.rank)
    if comm.rank not in (SERVER, LEARNER):
        return {}
    its = DEVICES[device].device(0)
    region, memory = DeviceArena(its), Arena()
    region.make_slots(2, 4 * size)
    locks = DEVICES[device].page_locks
    there = Executor((), size, size, 1, its)
    stage = Staging(size, its)
    here = Executor((), size, size, 1, stage=stage if locks else None, memory=memory.allocate)
    for arena, executor in ((region, there), (memory, here)):
        executor.buffer(WEIGHTS)
        if failure := arena.meet(pair, pair.rank, 16 * size):
            raise RuntimeError(failure)
    vector = there.buffer(WEIGHTS).vector
    vector.copy_(torch.arange(size, device=its) * (1.0 - pair.rank))
    ways: dict[str, Callable[[], torch.Tensor]] = {
        "ipc": _Way(pair, region, there).carry,
        "staged": partial(_staged, _Way(pair, memory, here), vector, stage),
    }
    figures: dict[str, list[float]] = {}
    equal = True
    for turn in in_turns(rounds, figures):
        for way, carry in ways.items():
            carry()
            pair.Barrier()
            began = time.perf_counter()
            for _ in range(count):
                came = carry()
            turn[way] = (time.perf_counter() - began) / count
            equal &= bool((came == torch.arange(size, device=its)).all())
    region.close()
    pair.Barrier()
    return {"seconds": figures, "equal": equal}


class _Way:
    """Transfers of the first rank's weights to the second, as in a run.

    Args:
        pair: communicator of the two ranks.
        arena: memory that the other rank reads.
        executor: executor with the weights.
    """

    def __init__(self, pair: "MPI.Comm", arena: "Arena", executor: Executor) -> None:
        from rudra.mpi.failures import Losses
        from rudra.mpi.transfers import Transfers

        self.rank, self.executor, self._over, self._pair = pair.rank, executor, 0, pair
        done = self._end
        self._transfers = Transfers(pair, Losses(pair), {pair.rank: executor}, done, done, arena)

    def _end(self, *_: object) -> None:
        self._over += 1

    def carry(self) -> torch.Tensor:
        """Carries the weights once. Returns them, after the device has finished its work."""
        from rudra.mpi.leases import Going
        from rudra.mpi.transfers import Wanted

        self._over = 0
        if self.rank:
            self._transfers.receive(Wanted(1, WEIGHTS, 0, TAG, halves=False, near=True))
        else:
            self._transfers.lend(Going(0, WEIGHTS, 1), Weights(0, 0), 1, TAG, halves=False, most=2)
        while not self._over:
            self._transfers.poll()
        if not self.rank:
            self.executor.sent(WEIGHTS)
        self._pair.Barrier()  # a turn begins when the other rank has ended the last one
        vector = self.executor.buffer(WEIGHTS).vector
        finish(vector.device)
        return vector


def _staged(way: _Way, vector: torch.Tensor, stage: Staging) -> torch.Tensor:
    """Carries a vector on the device: to main memory, to the other rank, and to its device."""
    if not way.rank:
        way.executor.renew(WEIGHTS).vector.copy_(vector)
    came = way.carry()
    if way.rank:
        came = stage.copied(came)
        finish(came.device)
    return came
