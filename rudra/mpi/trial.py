"""How fast the learners are, before training: all of them compute gradients at the same time, which nobody gets.

So what they take from each other is in it. Executors are made for this alone: what is measured leaves no trace.
"""

import gc
import time
from collections.abc import Sequence
from statistics import median

import torch

from rudra.compute import devices
from rudra.compute.learners import LearnerExecutor
from rudra.compute.making import make_executors
from rudra.core.events import GRADIENT, WEIGHTS, Compute
from rudra.data.load import Data, in_memory
from rudra.job.job import Job
from topologies import Plan

SPAN_S = 0.5
"""How long all compute, at least."""

ROUNDS = 4
"""Mini-batches of the slowest learner in that time, about."""


class Trial:
    """The learners of one rank, each with an equal part of a batch.

    Args:
        job: whose shares are to be measured, resolved.
        plan: who is who.
        roles: ids of the rank's roles.
        data: as far as they need it.
        device: where they compute.

    Attributes:
        round_s: how long each learner's second mini-batch took, all together; the first one warms up.
        seconds: role -> seconds for a mini-batch, when all have computed at the same time.

    Raises:
        ConfigError: as of `make_executors`. What the user's own code raises comes through.
    """

    def __init__(self, job: Job, plan: Plan, roles: Sequence[int], data: Data | None, device: torch.device) -> None:
        learners = tuple(role for role in roles if plan.traits(role).trains)
        self.seconds: dict[int, float] = {}
        self.round_s = 0.0
        self._learners: dict[int, LearnerExecutor] = {}
        if not learners:
            return
        assert data is not None
        made = make_executors(
            job.with_(hooks=(), training={"warm_start": None}),
            plan,
            learners,
            data,
            prefetch=not in_memory(data.training),
            device=device,
            placing=devices.placing(device, gpu_aware_mpi=job.cluster.gpu_aware_mpi),
        )
        for role, executor in made.items():
            assert isinstance(executor, LearnerExecutor)
            executor.prepare()
            executor.source.model.read_into(executor.buffer(WEIGHTS).vector)
            self._learners[role] = executor
        self._round(0)
        self.round_s = sum(self._round(1).values())

    def measure(self, round_s: float) -> None:
        """Computes for as long as all others do.

        Args:
            round_s: the longest of any rank's.
        """
        end, step = time.perf_counter() + max(SPAN_S, ROUNDS * round_s), 2
        taken: dict[int, list[float]] = {role: [] for role in self._learners}
        while self._learners and (step == 2 or time.perf_counter() < end):
            for role, seconds in self._round(step).items():
                taken[role].append(seconds)
            step += 1
        # Those of a rank compute one after the other, so that each takes as long as all of them.
        self.seconds = {role: len(taken) * median(times) for role, times in taken.items()}

    def _round(self, step: int) -> dict[int, float]:
        """One mini-batch of each learner here; how long they took."""
        found = {}
        for role, executor in self._learners.items():
            began = time.perf_counter()
            next(executor.perform(Compute(step, executor.source.work.after(step), WEIGHTS, GRADIENT)))
            found[role] = time.perf_counter() - began
        return found

    def close(self) -> None:
        """Gives back what it took."""
        for executor in self._learners.values():
            executor.close()
        self._learners.clear()
        gc.collect()  # models have cycles
