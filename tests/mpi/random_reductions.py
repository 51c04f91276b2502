"""Reductions of random groups of ranks."""

import itertools
import random
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rudra.compute.executor import Executor
from rudra.core.actions import Reduce
from rudra.core.buffer_names import GRADIENT
from rudra.core.messages import GroupFlags
from rudra.core.records import Gradient


def reductions(comm: Any, directory: Path, seed: int, cases: int) -> dict[str, Any]:
    """Groups of any shape, whose ranks lie on pretended nodes, reduce gradients of noise; what came out wrong.

    Some gradients come in buckets, which become final in any order. A bucket that is not final holds NaN, so one that
    is sent too early shows. In some groups the MPI library adds, which changes the last bits.
    """
    from mpi4py import MPI

    from rudra.compute.averaging import CHUNK, average
    from rudra.core.buckets import MOST, parts
    from rudra.mpi.arena import Arena
    from rudra.mpi.group_reduction import GroupReduction
    from rudra.mpi.libraries import MpiLibrary

    wrong = []
    chance, pace = random.Random(seed), random.Random(seed * comm.size + comm.rank)
    for case in range(cases):
        members = {100 + i: chance.randrange(comm.size) for i in range(chance.randint(1, 2 * comm.size))}
        nodes = [chance.randrange(chance.randint(1, 3)) for _ in range(comm.size)]
        size = chance.choice([1, 15, 300, 5000, 100_000, CHUNK + 17])
        parameters, bucket = size - chance.choice([0, size // 3]), chance.choice([0, 16, 112, 704, 30_000])
        bucket = 0 if bucket >= size else max(bucket, size // 640 * 16)
        samples, to_all = [chance.choice([4, 4, 4, 7]) for _ in members], chance.random() < 0.6
        sums: list[list[int]] = []
        if chance.random() < 0.6:
            its = [nodes[rank] for rank in members.values()]
            sums = [[place for place, node in enumerate(its) if node == of] for of in dict.fromkeys(its)]
        arena = Arena()
        executors = {
            role: Executor((), size, size, 1, memory=arena.allocate)
            for role, rank in members.items()
            if rank == comm.rank
        }
        for executor in executors.values():
            executor.buffer(GRADIENT)
        arena.meet(comm, comm.rank, 1 << 28)
        arena.neighbours = frozenset(i for i in range(comm.size) if nodes[i] == nodes[comm.rank])
        if chance.random() < 0.1:
            arena.neighbours = frozenset()
        adds = chance.random() < 0.2
        library = MpiLibrary(comm.Split(0 if executors else MPI.UNDEFINED)) if adds else None
        if not executors:
            continue
        if library is not None:
            sums = []
        about = (10 + MOST * case, parts(size, parameters, bucket), lambda: None, library, arena, sums)
        reduction = GroupReduction(comm, members, *about, to_all=to_all)
        for step in range(5):
            made = [torch.randn(size, generator=torch.Generator().manual_seed(97 * step + role)) for role in members]
            expected = torch.empty(size)
            average(expected, made, samples, sums=sums)
            for role in executors:
                executors[role].renew(GRADIENT).vector.fill_(torch.nan)
            pause(pace)
            for role in pace.sample(sorted(executors), len(executors)):
                place = list(members).index(role)
                buffer = executors[role].buffer(GRADIENT)
                edges = sorted(pace.sample(range(1, parameters), min(parameters - 1, pace.randint(0, 6))))
                pieces = [slice(*ends) for ends in itertools.pairwise([0, *edges, parameters, size])]
                pace.shuffle(pieces)
                if reduction.buckets and pace.random() < 0.8:  # else the gradient appears as a whole
                    ready = reduction.expect(role, buffer, GRADIENT, samples[place])
                    assert ready is not None
                    for piece in [pieces.pop() for _ in range(pace.randint(0, len(pieces)))]:
                        buffer.vector[piece] = made[place][piece]
                        if piece.stop <= parameters:
                            ready(piece)
                        pause(pace)
                for piece in pieces:
                    buffer.vector[piece] = made[place][piece]
                gradient = Gradient(-1, place, samples[place], step, 0, 0, 0, 1.0, 0.0, 0.0, 0)
                reduction.begin(role, Reduce(GRADIENT, 0, step, gradient, to_all, GroupFlags(role)), executors[role])
            while (reduced := reduction.test()) is None:
                time.sleep(1e-4)
            if [word.digest for word in reduced.words] != list(members):
                wrong.append(f"case {case}, step {step}: words {reduced.words}")
            if [gradient.samples for gradient in reduced.gradients] != samples:
                wrong.append(f"case {case}, step {step}: gradients {reduced.gradients}")
            for role in executors:
                if to_all or role == 100:
                    pause(pace)
                    found = executors[role].buffer(GRADIENT).vector
                    alike = torch.equal if library is None else partial(torch.allclose, atol=1e-6)
                    if not alike(found, expected):
                        wrong.append(f"case {case}, step {step}, role {role}: another sum")
        reduction.abandon()
        reduction.close()
        if any(executor.held("") for executor in executors.values()):
            wrong.append(f"case {case}: still held")
    return {"wrong": wrong}


def pause(pace: random.Random) -> None:
    """Lets the other ranks go ahead, or not."""
    time.sleep(pace.choice([0.0, 0.0, 1e-3, 5e-3]))
