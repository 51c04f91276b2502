"""Runs on devices that finish their work late (`rudra.compute.device.adverse`)."""

import os
import signal
import time
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from pretended_nodes import train_on_nodes
from runs_on_ranks import launch_calls, train_all


def train_placed(comm: Any, directory: Path, placing: str, jobs: dict[str, Any]) -> dict[str, Any]:
    """As `train_all`, with vectors that lie as on a GPU and gradients that are late, as there.

    Returns how often learners and tests used a copy, how often MPI used theirs, how often a gradient was late, and how
    many parts of gradients and weights travelled while others were copied.
    """
    from rudra.compute import learners
    from rudra.compute.device.adverse import AdverseDevice
    from rudra.compute.device.devices import DEVICES
    from rudra.compute.staging import Staging
    from rudra.compute.vectors import DirectBuffer
    from rudra.mpi import setup
    from rudra.mpi.push_buckets import OutgoingPushes

    make, weights, read, copies, direct = setup.make_executors, Staging.weights, DirectBuffer.read, [], []
    push, receive, parts = OutgoingPushes._ready, Staging.receive, Counter[str]()
    learners.STAGED = 64
    device = AdverseDevice(comm.rank)
    DEVICES["cpu"] = device

    def placed(*arguments: Any, **keywords: Any) -> Any:
        return make(*arguments, **{**keywords, "placing": placing})

    def copied(stage: Staging, buffer: Any) -> torch.Tensor:
        copies.append(buffer.version)
        return weights(stage, buffer)

    def push_part(*about: Any) -> None:
        parts["pushed"] += 1
        push(*about)

    def receive_part(*about: Any) -> tuple[()]:
        parts["received"] += 1
        return receive(*about)

    def read_there(buffer: DirectBuffer) -> Any:
        direct.append(buffer.version)
        return read(buffer)

    setup.make_executors, Staging.weights, DirectBuffer.read = placed, copied, read_there  # type: ignore[method-assign]
    OutgoingPushes._ready, Staging.receive = push_part, receive_part  # type: ignore[method-assign]
    train_all(comm, directory, jobs)
    return {"copies": len(copies), "direct": len(direct), "asked": device.asked, **parts}


def train_ahead(comm: Any, directory: Path, jobs: dict[str, Any]) -> dict[str, Any]:
    """Each rank runs one of the jobs by itself, on a device that does steps before the roles ask for them.

    Returns how many steps the roles saw that were done ahead, how often the device went back, and why it did no more.
    """
    from mpi4py import MPI

    from rudra.bench.ranks import train
    from rudra.compute.device.adverse import AdverseDevice
    from rudra.compute.device.devices import DEVICES
    from rudra.compute.speculation import SpeculativeSteps

    made: list[SpeculativeSteps] = []
    begin, roll_back, backs = SpeculativeSteps.__init__, SpeculativeSteps.roll_back, []

    def note(steps: SpeculativeSteps, *about: Any) -> None:
        made.append(steps)
        begin(steps, *about)

    def go_back(steps: SpeculativeSteps) -> None:
        backs.extend(list(steps._bursts)[:1])
        roll_back(steps)

    SpeculativeSteps.__init__, SpeculativeSteps.roll_back = note, go_back  # type: ignore[method-assign]
    DEVICES["cpu"] = AdverseDevice(comm.rank)
    path, job = list(jobs.items())[comm.rank]
    train(job, Path(path), MPI.COMM_SELF).close()
    return {"committed": made[0].committed, "backs": len(backs), "refusal": made[0].refusal}


def train_on_devices(
    comm: Any, directory: Path, transports: tuple[Any, ...], jobs: dict[str, tuple[list[int], Any]]
) -> dict[str, Any]:
    """As `train_on_nodes`, on late devices between which tensors travel by these transports.

    Returns how many copies were read in slots, sent from rooms, and reached a device; how often one was late; how many
    gradients came in buckets; how many vectors a group exchanged in slots, and in main memory; and how often a sum of a
    library was not complete.
    """
    from rudra.compute import learners
    from rudra.compute.device.adverse import AdverseDevice
    from rudra.compute.device.devices import DEVICES
    from rudra.job.transports import Transports
    from rudra.mpi.departures import Departures
    from rudra.mpi.exchange import Exchange
    from rudra.mpi.libraries import _DeviceSum
    from rudra.mpi.push_buckets import IncomingPushes
    from rudra.mpi.transfers import Transfers
    from rudra.prepare import resolve

    learners.STAGED, counts = 64, Counter[str]()
    DEVICES["cpu"], resolve.transports_of = AdverseDevice(comm.rank), lambda *_, **__: Transports(*transports)
    leave, send, land, take = (
        Departures._send,
        Departures._send_message,
        Transfers._poll_landings,
        IncomingPushes.take,
    )

    def leave_slot(*about: Any) -> None:
        counts["left"] += 1
        leave(*about)

    def send_message(*about: Any) -> None:
        counts["sent"] += 1
        send(*about)

    def land_late(transfers: Transfers) -> None:
        before = len(transfers._landing)
        land(transfers)
        counts["landed"] += before - len(transfers._landing)
        counts["late"] += len(transfers._landing)

    def taken(*about: Any) -> Any:
        found = take(*about)
        counts["buckets"] += found is not None
        return found

    copied, test = Exchange.copied, _DeviceSum.Test

    def exchanged(exchange: Exchange, vector: Any) -> Any:
        counts["exchanged in slots" if exchange._near else "exchanged in main memory"] += 1
        return copied(exchange, vector)

    def tested(sum_: _DeviceSum, status: Any = None) -> bool:
        done = test(sum_, status)
        counts["summed" if done else "not summed yet"] += 1
        return done

    Exchange.copied, _DeviceSum.Test = exchanged, tested  # type: ignore[method-assign]
    Departures._send, Departures._send_message = leave_slot, send_message  # type: ignore[method-assign]
    Transfers._poll_landings, IncomingPushes.take = land_late, taken  # type: ignore[method-assign]
    train_on_nodes(comm, directory, jobs)
    return dict(counts)


def train_without_wait(
    comm: Any, directory: Path, missing: str, jobs: dict[str, tuple[list[int], Any]]
) -> dict[str, Any]:
    """As `train_on_devices`, where one wait of reductions is missing."""
    from rudra.compute.device.streams import Done, Stream
    from rudra.mpi.exchange import Exchange
    from rudra.mpi.libraries import DeviceLibrary
    from rudra.mpi.reduction import PartReduction

    copied, taken, init, begin = Exchange.copied, Exchange.taken, PartReduction.__init__, DeviceLibrary.begin

    class Hasty(Stream):
        def __init__(self, stream: Stream) -> None:
            self._late = stream

        def submit(self, work: Any, after: Any = ()) -> Any:
            self._late.submit(work, after)
            return Done([])

    def copy_hastily(exchange: Exchange, vector: Any) -> Any:
        return copied(exchange, vector)[0], Done([])

    def take_hastily(exchange: Exchange, *about: Any) -> Any:
        taken(exchange, *about)
        return Done([])

    def add_hastily(part: PartReduction, *about: Any) -> None:
        init(part, *about)
        part._stream = Hasty(part._stream)

    def sum_hastily(library: DeviceLibrary, vector: Any) -> Any:
        begin(library, vector)._work.done()
        return SimpleNamespace(Test=lambda status=None: True)

    if missing == "copied":
        Exchange.copied = copy_hastily  # type: ignore[assignment]
    elif missing == "taken":
        Exchange.taken = take_hastily  # type: ignore[method-assign]
    elif missing == "added":
        PartReduction.__init__ = add_hastily  # type: ignore[method-assign, assignment]
    else:
        DeviceLibrary.begin = sum_hastily  # type: ignore[method-assign]
    return train_on_devices(comm, directory, ("ipc", "staged", missing == "summed"), jobs)


def launch_on_devices(
    dies: int = -1,
    sends: int = -1,
    fails: int = -1,
    sums: int = -1,
    transports: tuple[Any, ...] = ("ipc", "staged"),
    same: bool = False,
) -> None:
    """Lets tensors travel between ranks on late devices by these transports.

    One rank dies when it has sent this number of tensors' places, or begun this number of sums of a group. Another one
    may have no memory that others read. All ranks may have the same device.
    """
    launch_calls(partial(run_on_devices, dies, sends, fails, sums, transports, same))


def run_on_devices(
    dies: int, sends: int, fails: int, sums: int, transports: tuple[Any, ...], same: bool, payload: dict[str, Any]
) -> int:
    """Runs a rank. The memory of the one that dies is void before its last tensor is read."""
    from mpi4py import MPI

    from rudra.compute.device.adverse import AdverseDevice
    from rudra.compute.device.devices import DEVICES
    from rudra.job.transports import Transports
    from rudra.mpi.departures import Departures
    from rudra.mpi.exchange import Exchange
    from rudra.mpi.group_reduction import GroupReduction
    from rudra.mpi.libraries import DeviceLibrary
    from rudra.mpi.session import run_ranks
    from rudra.mpi.transfers import Transfers
    from rudra.prepare import resolve

    rank, plain, left, begin = MPI.COMM_WORLD.rank, Departures._send, [sends, sums], DeviceLibrary.begin
    DEVICES["cpu"], resolve.transports_of = AdverseDevice(rank), lambda *_, **__: Transports(*transports)
    if same:
        AdverseDevice.identity = lambda *_: "GPU-1"  # type: ignore[method-assign]
        AdverseDevice.takes_turns = lambda _: True  # type: ignore[method-assign]

    def no_region(device: AdverseDevice, *_: Any) -> Any:
        raise RuntimeError("CUDA error: operation not supported\nmore")

    if rank == fails:
        AdverseDevice.region = no_region  # type: ignore[method-assign]

    def send(departures: Departures, slot: Any, *about: Any) -> None:
        plain(departures, slot, *about)
        left[0] -= 1
        if rank == dies and not left[0]:
            slot.memory.fill_(255)
            departures._sent[-1][0].Wait()
            os.kill(os.getpid(), signal.SIGKILL)

    def begin_sum(library: DeviceLibrary, vector: Any) -> Any:
        found = begin(library, vector)
        left[1] -= 1
        if rank == dies and not left[1]:
            time.sleep(0.1)  # others have begun it, too
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    enter = GroupReduction._begin

    def begin_reduction(reduction: GroupReduction, role: int, action: Any, executor: Any, buffer: Any) -> None:
        enter(reduction, role, action, executor, buffer)
        left[1] -= reduction._library is None
        if rank == dies and not left[1]:
            buffer.vector.fill_(torch.nan)
            time.sleep(0.1)  # others have its row
            os.kill(os.getpid(), signal.SIGKILL)

    land, take, seen = Transfers._land, Exchange.taken, Counter[str]()

    def wait_for_the_end(arena: Any, what: str, count: int) -> None:
        """Waits until the memory of the dead is void, where this rank is about to read its last tensor."""
        seen[what] += 1
        while rank != dies and seen[what] == count and dies in arena.neighbours and arena.intact(dies):
            time.sleep(1e-3)

    def land_late(transfers: Transfers, coming: Any) -> None:
        if coming.status.Get_source() == dies:
            wait_for_the_end(transfers._arena, "place", sends)
        land(transfers, coming)

    def take_late(exchange: Exchange, *about: Any) -> Any:
        wait_for_the_end(exchange._arena, "sum", sums)
        return take(exchange, *about)

    Departures._send, DeviceLibrary.begin = send, begin_sum  # type: ignore[method-assign]
    Transfers._land, Exchange.taken = land_late, take_late  # type: ignore[method-assign]
    GroupReduction._begin = begin_reduction  # type: ignore[method-assign]
    return run_ranks(**payload)[0]


def launch_beside_a_cpu(rank: int, free: int | None = None) -> None:
    """Lets a rank compute on a late device, the only one of its kind, and all other ranks on the CPU.

    The device has some bytes of free memory, or knows no limit.
    """
    from rudra.compute.device.devices import DEVICES

    DEVICES["cuda"] = _one_device(1)
    launch_calls(partial(run_beside_a_cpu, rank, free))


def run_beside_a_cpu(rank: int, free: int | None, payload: dict[str, Any]) -> int:
    from mpi4py import MPI

    from rudra.compute.device.devices import DEVICES
    from rudra.mpi import setup
    from rudra.mpi.session import run_ranks

    here = MPI.COMM_WORLD.rank == rank
    DEVICES["cuda"], make = _one_device(int(here), MPI.COMM_WORLD.rank, free), setup.make_executors

    def staged(*arguments: Any, **keywords: Any) -> Any:
        assert keywords["device"].type == "cpu"  # torch has no other
        return make(*arguments, **{**keywords, "placing": "staged"})

    if here:
        DEVICES["cpu"], setup.make_executors = DEVICES["cuda"], staged
    code = run_ranks(**payload)[0]
    device = DEVICES["cuda"]
    assert code or (device.asked > 0) is here, "the other learner uses no device"
    return code


def _one_device(count: int, seed: int = 0, free: int | None = None) -> Any:
    """A late device, of which a process sees this number."""
    from rudra.compute.device.adverse import AdverseDevice

    device = AdverseDevice(seed, free)
    device.count = lambda: count  # type: ignore[method-assign]
    return device
