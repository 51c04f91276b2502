"""Shared window of weights in virtual time: several workers read it and write to it at the same time.

Under `[simulation] race_slices = N` racing accesses are split into N slices. A worker that computes in place reads the
slices one after the other during the computation. A worker that makes a copy reads them during the copy. An update
reads and writes them one after the other during the update. Other workers access the window in between. Their order is
always the same, so races can be studied and are reproducible. With one slice, reads and writes are atomic, as under a
lock. In a locked window they always are.
"""

from collections import deque
from collections.abc import Generator
from typing import Any, TypeVar

import torch

from rudra.compute.gradients import BatchResult
from rudra.compute.hogwild import HogwildExecutor, give_window, layout_of, made_of, manner, window_here
from rudra.compute.window import Contribution
from rudra.core.actions import FindUpdates, ReadShared, TrainInPlace, WriteShared
from rudra.core.events import AppliedGradient, SharedRead, TrainedInPlace, UpdatesFound
from rudra.core.work import Work
from rudra.job.job import Job
from rudra.simulation.actor import Actor
from rudra.simulation.driver import Simulation
from topologies import Plan

T = TypeVar("T")

LOCK = -1.0
"""Yielded instead of seconds: wait for the lock."""

Steps = Generator[float, None, AppliedGradient]
"""Steps of one thread of a worker: yields seconds until the next step, and returns the update that it made."""

Thread = tuple[Steps, list[AppliedGradient | None], int]
"""Steps of a thread, updates made by the batch's threads, and the thread's index among them."""


class SimulatedWindows:
    """Shared window of a simulation.

    Args:
        simulation: Simulation whose roles use the window.
        job: Resolved job.
        plan: Roles and their ranks.
    """

    def __init__(self, simulation: Simulation, job: Job, plan: Plan) -> None:
        self._simulation, self._queue, self._costs = simulation, simulation.queue, simulation.costs
        executors = simulation.tensors.executors
        owner = executors.get(plan.server)
        size = 1 if owner is None else owner.size
        shape = layout_of(job, plan, size)
        nodes = {plan.roles[role].node for role in plan.learners}
        windows = {node: window_here(shape) for node in nodes}
        node_of = {role: plan.roles[role].node for role in plan.learners} | {plan.server: min(nodes)}
        self._windows = {role: windows[node] for role, node in node_of.items()}
        for node, window in windows.items():
            give_window({role: e for role, e in executors.items() if node_of.get(role) == node}, window)
        self._executors = {role: e for role, e in executors.items() if isinstance(e, HogwildExecutor)}
        self._workers = {role: plan.roles[role].index for role in plan.learners}
        self._manners = {role: manner(job, plan, role) for role in plan.learners}
        self._slices = min(size, job.simulation.race_slices)
        self._holder: Actor | None = None  # of the lock
        self._queued: deque[tuple[Actor, Thread]] = deque()
        if owner is None:
            simulation.do[WriteShared] = self._publish
            simulation.do[FindUpdates], simulation.do[ReadShared] = self._look, self._fetch
        simulation.do[TrainInPlace] = self._train

    def _publish(self, actor: Actor, action: WriteShared, time: float) -> None:
        self._windows[actor.role].fill(torch.zeros(1), action.timestamp)

    def _look(self, actor: Actor, action: FindUpdates, time: float) -> None:
        window = self._windows[actor.role]
        entries = window.entries(self._workers[action.role], action.after)
        found = UpdatesFound(action.role, tuple(made_of(entry, window.update) for entry in entries))
        self._queue.later(time, actor.take, actor, found)

    def _fetch(self, actor: Actor, action: ReadShared, time: float) -> None:
        self._queue.later(time, actor.take, actor, SharedRead(self._windows[actor.role].surviving))

    def _train(self, actor: Actor, action: TrainInPlace, time: float) -> None:
        """Starts all threads of a batch. The action is over when the last thread ends."""
        executor = self._executors.get(actor.role)
        batches = executor.batches(action.step, action.works) if executor else [None] * len(action.works)
        made: list[AppliedGradient | None] = [None] * len(action.works)
        actor.computing = True
        for place, (work, rate, batch) in enumerate(zip(action.works, action.rates, batches, strict=True)):
            steps = self._steps(actor, action.step + place, work, rate, batch)
            self._queue.later(time, self._continue, actor, (steps, made, place))

    def _continue(self, actor: Actor, what: Thread) -> None:
        """Runs the next step of a thread."""
        steps, made, place = what
        if actor.halted:
            steps.close()
            return
        try:
            wait_s = next(steps)
        except StopIteration as end:
            made[place] = end.value
            if None not in made:
                actor.computing = False
                self._simulation.tell(actor.role, TrainedInPlace(tuple(each for each in made if each is not None)))
            return
        if wait_s == LOCK:
            self._queued.append((actor, what))
            self._give_lock()
        else:
            self._queue.later(self._queue.now + wait_s, self._continue, actor, what)

    def _give_lock(self) -> None:
        """Gives a free lock to the first thread that waits for it."""
        while self._queued and self._holder is None:
            actor, what = self._queued.popleft()
            if not actor.halted:
                self._holder = actor
                self._continue(actor, what)

    def _release(self) -> None:
        self._holder = None
        self._give_lock()

    def _seconds(self, actor: Actor, work: Work) -> float:
        """Returns the seconds that one thread takes for a gradient."""
        pace = self._costs.paces[actor.role]
        return actor.compute_s() * self._costs.relative(actor.role, work.count) * pace.threads

    def _steps(self, actor: Actor, step: int, work: Work, rate: float, batch: Any) -> Steps:
        window, worker = self._windows[actor.role], self._workers[actor.role]
        copies, overwrites = self._manners[actor.role]
        own, gradient = torch.empty(window.size), torch.zeros(window.size)
        read_s, write_s = (
            self._costs.table.copy_s_per_byte * self._costs.size_bytes,
            self._costs.local_seconds(TrainInPlace),
        )
        compute_s = self._seconds(actor, work)
        locked, slices = window.update == "locked", self._slices
        if locked:
            yield from self._locked(read_s)
            reading = window.copy(worker, own)
            self._release()
        elif slices == 1:
            reading = window.copy(worker, own)
            yield read_s if copies else 0.0
        else:
            reading = yield from _spread(
                window.copy_in_slices(worker, own, slices), (read_s if copies else compute_s) / slices
            )
        if copies or slices == 1:
            yield compute_s
        executor = self._executors.get(actor.role)
        if executor is None:
            result = BatchResult(0.0, 0.0, work.count)
        else:
            result = executor.gradient_at(step, work, batch, own, gradient)
        of = Contribution(worker, step, work.first, result.samples, result.loss, result.errors, rate)
        instead = own if overwrites else None
        if locked:
            yield from self._locked(write_s)
            entry = window.add(of, reading, gradient, instead)
            self._release()
        elif slices == 1:
            yield write_s
            entry = window.add(of, reading, gradient, instead)
        else:
            adding = window.add_in_slices(of, reading, gradient, instead, slices)
            entry = yield from _spread(adding, write_s / slices)
        return made_of(entry, window.update, write_s)

    def _locked(self, seconds: float) -> Generator[float, None, None]:
        """Waits for the lock, and holds it for `seconds`. The caller's next step runs before the lock is released."""
        yield LOCK
        try:
            yield seconds
        except GeneratorExit:
            self._release()  # the worker has died
            raise


def _spread(slices: Generator[None, None, T], seconds: float) -> Generator[float, None, T]:
    """Runs slices one by one. Each takes `seconds`."""
    while True:
        try:
            next(slices)
        except StopIteration as end:
            result: T = end.value
            return result
        yield seconds
