"""Runs in bursts, for tests on ranks (`rudra.mpi.bursts`)."""

from collections.abc import Sequence
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn


def batchnorm() -> nn.Module:
    """Has buffers that training changes, and draws no random numbers."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 50), nn.BatchNorm1d(50), nn.Tanh(), nn.Linear(50, 10))


def burst_runs(
    comm: Any, directory: Path, jobs: dict[str, Any], ways: Sequence[str], together: bool = False
) -> dict[str, Any]:
    """Each rank runs some of the jobs by itself: asked for each step, in bursts, and in bursts that a device records.

    With `together` all ranks take part in each of the jobs. The way "early" is "bursts", but the first learner of each
    rank does not wait for the requests of the others. The way "scarce" is "bursts", but from time to time a gradient in
    a burst finds too little memory.

    Returns for each job and way: the content of the result file that does not depend on the time, the numbers of
    updates and of local steps that this rank made in bursts, how many of them a device recorded, and why not all; the
    number of updates that its learners made in lockstep, how often a lockstep ended, and the number of actions in it
    that a device recorded; how often memory was too little.
    """
    from mpi4py import MPI

    import rudra.mpi.bursts
    from rudra.bench.ranks import train
    from rudra.compute.bank.bursts import BankBursts
    from rudra.compute.bank.recorded import RecordedBursts
    from rudra.compute.bank.recorded_actions import RecordedActions
    from rudra.compute.device.adverse import AdverseDevice
    from rudra.compute.device.devices import DEVICES
    from rudra.compute.gradients import GradientSource
    from rudra.core.actions import Compute, Update
    from rudra.core.bursts import BurstMade
    from rudra.mpi.bursts import Bursts
    from rudra.mpi.lockstep import Lockstep

    plain, makes_bursts, take, holds = DEVICES["cpu"], rudra.mpi.bursts.makes_bursts, Bursts.take, Bursts.holds
    takes_all, end = Lockstep.takes, Lockstep.end
    early: list[str] = []  # the way, if its first request is still to come
    computed, gradient = BankBursts._computed, GradientSource.compute
    numbers, fails = count(1), list[bool]()  # of gradients in bursts; whether one may fail now
    names = ("updates", "local steps", "recorded", "in lockstep", "ends", "gradients", "steps", "moves", "scarce")
    none = dict.fromkeys(names, 0)
    record, begin, seen = RecordedBursts.__init__, RecordedBursts.begin, dict(none)
    made: list[RecordedBursts] = []

    def compute_all(making: BankBursts, *about: Any) -> Any:
        fails[:] = [True] * (way == "scarce")
        try:
            return (yield from computed(making, *about))
        finally:
            fails.clear()

    def compute(source: GradientSource, *about: Any) -> Any:
        if fails and not next(numbers) % 50:
            seen["scarce"] += 1
            raise MemoryError("pretended")
        return gradient(source, *about)

    def taken(bursts: Bursts, event: Any) -> None:
        if isinstance(event, BurstMade):
            seen["updates" if event.burst.averages else "local steps"] += len(event.losses)
        take(bursts, event)

    def takes(lockstep: Lockstep, action: Any, *about: Any) -> bool:
        seen["in lockstep"] += isinstance(action, Update)
        return takes_all(lockstep, action, *about)

    def ends(lockstep: Lockstep, **how: bool) -> None:
        seen["ends"] += lockstep.is_on
        end(lockstep, **how)

    def note(recorded: RecordedBursts, *about: Any, **named: Any) -> None:
        made.append(recorded)
        record(recorded, *about, **named)

    def begun(recorded: RecordedBursts, burst: Any) -> Any:
        if (made := begin(recorded, burst)) is not None:
            seen["recorded"] += made.rounds
        return made

    def hold(bursts: Bursts, role: int, action: Any) -> bool:
        if early and isinstance(action, Compute):
            early.clear()
            return False
        return holds(bursts, role, action)

    def counted(name: str, begin: Any) -> Any:
        def noted(actions: RecordedActions, *about: Any) -> Any:
            made = begin(actions, *about)
            seen[name] += bool(made)
            return made

        return noted

    for name, method in (("gradients", "compute"), ("steps", "step"), ("moves", "approach")):
        setattr(RecordedActions, method, counted(name, getattr(RecordedActions, method)))
    Bursts.holds, Lockstep.takes, Lockstep.end = hold, takes, ends  # type: ignore[method-assign]
    Bursts.take, RecordedBursts.__init__ = taken, note  # type: ignore[method-assign]
    BankBursts._computed, GradientSource.compute = compute_all, compute  # type: ignore[method-assign]
    RecordedBursts.begin = begun  # type: ignore[method-assign]
    found: dict[str, Any] = {}
    for name, job in [*jobs.items()] if together else [*jobs.items()][comm.rank :: comm.size]:
        for way in ways:
            seen |= none
            made[:], early[:] = [], [way] * (way == "early")
            rudra.mpi.bursts.makes_bursts = makes_bursts if way != "asked" else lambda *_: False
            seed = int(way.partition(" ")[2] or 0)
            DEVICES["cpu"] = AdverseDevice(seed) if way.startswith("recorded") else plain
            results = train(job, directory / f"{name} {way}.h5", comm if together else MPI.COMM_SELF)
            with results:
                refusal = made[-1].refusal if made else None
                found[f"{name}: {way}"] = {"content": timeless(results), "refusal": refusal, **seen}
            if together:
                comm.Barrier()  # no rank may begin while another one reads
    DEVICES["cpu"] = plain
    return found


def timeless(results: Any) -> dict[str, str]:
    """Digest of each table of a result file, and of its weights, without what depends on the time."""
    found = {"weights": str(results.summary()["weights_sha256"])}
    for name in ("gradients", "updates", "averages", "minibatches", "epochs", "learners"):
        rows = getattr(results, name)[:]
        kept = [column for column in rows.dtype.names if not column.endswith("_s")]
        if name == "minibatches":  # each learner reports its own
            rows = np.sort(rows, order=["learner", "step"])
        found[name] = sha256(b"".join(np.ascontiguousarray(rows[column]).tobytes() for column in kept)).hexdigest()
    # When a file is written, and another one may be begun, depends on the disk.
    told = [(row["kind"].decode(), int(row["timestamp"])) for row in results.events if row["kind"] != b"checkpoint"]
    return found | {"events": str(sorted(told))}
