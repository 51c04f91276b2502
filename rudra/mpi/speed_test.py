"""Measures learner speed before training: all learners compute throw-away gradients at the same time.

So the result includes how much they slow each other down. The executors exist only for this, and leave no trace.
"""

import gc
import time
from collections.abc import Sequence
from statistics import median

import torch

from rudra.compute.device import placement
from rudra.compute.device.streams import finished
from rudra.compute.learners import LearnerExecutor
from rudra.compute.making import make_executors
from rudra.core.actions import Compute
from rudra.core.buffer_names import GRADIENT, WEIGHTS
from rudra.data.load import Data, in_memory
from rudra.job.job import Job
from rudra.job.transports import Transport
from topologies import Plan

SPAN_S = 0.5
"""Shortest time of the measurement, in seconds."""

ROUNDS = 4
"""Approximate number of mini-batches that the slowest learner computes in that time."""


class Trial:
    """The learners of one rank, each with an equal part of a batch.

    Args:
        job: resolved job whose shares will be measured.
        plan: role assignment.
        roles: ids of the rank's roles.
        data: data that the learners need.
        device: device for their computations.
        transport: as for `placement.placing`.

    Attributes:
        round_s: seconds for the second mini-batch of all learners here together. The first one warms up.
        seconds: role -> seconds per mini-batch while all learners compute at the same time.

    Raises:
        ConfigError: as in `make_executors`. Exceptions of the user's own code are not caught.
    """

    def __init__(
        self,
        job: Job,
        plan: Plan,
        roles: Sequence[int],
        data: Data | None,
        device: torch.device,
        transport: Transport | None,
    ) -> None:
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
            placing=placement.placing(device, plan, transport=transport),
        )
        for role, executor in made.items():
            assert isinstance(executor, LearnerExecutor)
            executor.prepare()
            executor.source.model.read_into(executor.buffer(WEIGHTS).vector)
            self._learners[role] = executor
        self._round(0)
        self.round_s = sum(self._round(1).values())

    def measure(self, round_s: float) -> None:
        """Computes while all other learners compute.

        Args:
            round_s: largest `round_s` of all ranks.
        """
        end, step = time.perf_counter() + max(SPAN_S, ROUNDS * round_s), 2
        taken: dict[int, list[float]] = {role: [] for role in self._learners}
        while self._learners and (step == 2 or time.perf_counter() < end):
            for role, seconds in self._round(step).items():
                taken[role].append(seconds)
            step += 1
        # Learners of one rank compute one after the other, so the mini-batch of each takes as long as all of them
        # together.
        self.seconds = {role: len(taken) * median(times) for role, times in taken.items()}

    def _round(self, step: int) -> dict[int, float]:
        """Computes one mini-batch on each learner here, and returns role -> seconds."""
        found = {}
        for role, executor in self._learners.items():
            began = time.perf_counter()
            finished(executor.perform(Compute(step, executor.source.work.after(step), WEIGHTS, GRADIENT)))
            found[role] = time.perf_counter() - began
        return found

    def close(self) -> None:
        """Closes the executors and frees their memory."""
        for executor in self._learners.values():
            executor.close()
        self._learners.clear()
        gc.collect()  # models contain reference cycles
