"""Actions of all learners of a rank in lockstep (`rudra.mpi.lockstep`) that a device repeats from recorded graphs.

There is one graph for the gradients of all learners, one for their steps, and one for their moves towards the weights.
Averages with other ranks are made in between. So the host submits three graphs for an average, for any number of
learners.
"""

import time
from collections.abc import Iterator, Sequence
from functools import partial
from math import isfinite

import numpy as np
from msgspec import structs

from rudra.compute.bank.recording import BankRecorder, HostNotes, Memory, Notes, Updates
from rudra.compute.device.graphs import Graph
from rudra.compute.device.streams import Pending, until_done
from rudra.core.actions import Compute, StepReplica
from rudra.core.buffer_names import GRADIENT, REPLICA, WEIGHTS
from rudra.core.bursts import BankDone
from rudra.core.events import Computed, ReplicaStepped
from rudra.probe import probed

Doing = Iterator[BankDone | Pending]
"""Yields work of the device as long as it is not done, then the events of all learners."""


class RecordedActions:
    """Actions of all learners, from graphs. The first one has the weights, and the reference of their block.

    Args:
        recorder: Graphs of the bank.
    """

    def __init__(self, recorder: BankRecorder) -> None:
        self._recorder = recorder
        self._learners = recorder.learners
        self._memory: Memory | None = None  # of the last gradients
        self._moves: Pending | None = None

    @probed
    def compute(self, actions: Sequence[Compute]) -> Doing | None:
        """Begins a gradient of each learner, at its replica or at the weights. None: they are computed as usual."""
        recorder, batches = self._recorder, [(action.step, action.work) for action in actions]
        if recorder.refusal or not recorder.is_warm("gradients"):
            return None
        at = actions[0].weights
        read = [each.buffer(at).vector.data_ptr() for each in (self._learners if at == REPLICA else self._learners[:1])]
        written = [executor.renew(GRADIENT).vector for executor in self._learners]
        try:
            self._memory = memory = recorder.memory(batches, 1)
            graph = recorder.graph(("gradients", *read), written, self._gradients, memory.notes)
        except Exception as error:
            recorder.note(error)
            return None
        slot = memory.slots.popleft()
        recorder.draw(memory, slot, batches, 1)
        return self._computed(actions, memory, slot, recorder.submit(partial(_compute, memory.notes, slot, graph)))

    def _gradients(self, ways: Updates, notes: Notes) -> None:
        lanes = self._recorder.lanes(ways)
        ways.gradients(lanes.do, notes, 0)
        lanes.join()

    def _computed(self, actions: Sequence[Compute], memory: Memory, slot: HostNotes, pending: Pending) -> Doing:
        yield from until_done(pending)
        pending.numbers()
        noted = slot.losses[0].tolist()
        memory.slots.append(slot)
        for place, (action, (loss, _)) in enumerate(zip(actions, noted, strict=True)):
            if not isfinite(loss):
                self._recorder.blame(place, action.step, action.work, loss)
        found = zip(actions, noted, strict=True)
        yield BankDone(tuple(Computed(each.step, loss, wrong, each.work.count) for each, (loss, wrong) in found))

    @probed
    def step(self, action: StepReplica) -> Doing | None:
        """Begins a step of all replicas. None: it must be made as usual."""
        recorder, memory, rate = self._recorder, self._memory, action.learning_rate
        if recorder.refusal or memory is None:
            return None
        frequent, about, keeps = recorder.is_frequent((rate,)), (False, recorder.settings), False
        try:
            keeps = recorder.keeps_rates(about, rate, averages=False)
            if not (keeps or frequent):
                return None
            memory.notes.keeps_rates = keeps
            written = recorder.written(*([action.difference] if action.difference else ()), averages=False)
            numbers = structs.replace(action, learning_rate=0.0 if keeps else rate)
            of = "step", numbers, keeps, recorder.settings, *self._read(action.weights or WEIGHTS)
            graph = recorder.graph(of, written, partial(self._steps, action), memory.notes)
        except Exception as error:
            recorder.note(error, about if keeps else None)
            return None
        slot, began = memory.slots.popleft(), time.perf_counter()
        if keeps:
            recorder.enter_rates(slot, [rate], ())
        pending = recorder.submit(partial(_step, memory.notes, slot, graph, takes_rates=keeps))
        self._count_steps()
        return self._stepped(action, memory, slot, pending, began)

    def _read(self, weights: str) -> list[int]:
        """Returns the places of the vectors that an action reads, and does not change."""
        gradients = (executor.buffer(GRADIENT).vector.data_ptr() for executor in self._learners)
        return [self._learners[0].buffer(weights).vector.data_ptr(), *gradients]

    def _steps(self, action: StepReplica, ways: Updates, notes: Notes) -> None:
        lanes = self._recorder.lanes(ways)
        ways.steps(lanes.do, notes, action, 0)
        lanes.join()

    def _stepped(self, action: StepReplica, memory: Memory, slot: HostNotes, pending: Pending, began: float) -> Doing:
        yield from until_done(pending)
        pending.numbers()
        distances = np.sqrt(slot.squares[0].numpy()) if action.difference else np.full(len(self._learners), np.nan)
        memory.slots.append(slot)
        seconds = time.perf_counter() - began
        yield BankDone(tuple(ReplicaStepped(seconds, distance) for distance in distances.tolist()))

    @probed
    def approach(self, elasticity: float) -> bool:
        """Moves all replicas towards the weights, by a fraction of the distance. Returns whether it does so."""
        recorder, memory = self._recorder, self._memory
        if recorder.refusal or memory is None or not recorder.is_warm("moves"):
            return False
        written = [executor.buffer(REPLICA).vector for executor in self._learners]
        try:
            of = "moves", elasticity, *self._read(WEIGHTS)
            graph = recorder.graph(of, written, partial(self._approach, elasticity), memory.notes)
        except Exception as error:
            recorder.note(error)
            return False
        self._moves = recorder.submit(partial(_repeat, graph))
        self._count_steps()
        return True

    def _approach(self, elasticity: float, ways: Updates, notes: Notes) -> None:
        lanes = self._recorder.lanes(ways)
        ways.approach(lanes.do, elasticity)
        lanes.join()

    def _count_steps(self) -> None:
        for executor in self._learners:
            executor.buffer(REPLICA).version += 1

    def settle(self) -> None:
        """Waits for moves, before others use the replicas."""
        if self._moves is not None:
            self._moves.numbers()
            self._moves = None


def _compute(notes: Notes, slot: HostNotes, graph: Graph) -> tuple[()]:
    notes.rows[:1].copy_(slot.rows[:1], non_blocking=True)
    notes.number.zero_()
    graph.replay()
    slot.losses[:1].copy_(notes.losses[:1], non_blocking=True)
    return ()


def _step(notes: Notes, slot: HostNotes, graph: Graph, *, takes_rates: bool) -> tuple[()]:
    if takes_rates:
        notes.rates[:1].copy_(slot.rates[:1], non_blocking=True)
    notes.number.zero_()
    graph.replay()
    slot.squares[:1].copy_(notes.squares[:1], non_blocking=True)
    return ()


def _repeat(graph: Graph) -> tuple[()]:
    graph.replay()
    return ()
