"""Simulator of a cluster: runs the same roles in one process and virtual time, with or without real gradients.

A queue of events (`rudra.simulation.queue`) drives the roles. Their messages go through a simulated network
(`rudra.simulation.network`). Real gradients are computed at the virtual time when they would be ready. A cost model
(`rudra.simulation.costs`) gives all durations.
"""

import gc
from collections.abc import Callable, Mapping
from functools import partial
from heapq import heappush
from typing import Any, Protocol

from rudra.compute.device.faults import exhausted
from rudra.core.actions import (
    Action,
    BackpropFirstStage,
    CancelReceive,
    Commit,
    Compute,
    Evaluate,
    ExecutorAction,
    Fail,
    Finish,
    FollowJob,
    Halt,
    Receive,
    Reconfigure,
    Record,
    Reduce,
    RunFirstStage,
    Save,
    Send,
    StoreEpochWeights,
    Sync,
    Update,
    Warn,
)
from rudra.core.events import Committed, Decided, Event, Received, Saved, Started, Stopped, Tick
from rudra.core.training_state import TrainingState
from rudra.core.work import Work
from rudra.errors import RunError
from rudra.roles import Machine
from rudra.roles.learner import Learner
from rudra.roles.machine import States
from rudra.roles.replica import Replica
from rudra.simulation.actor import Actor
from rudra.simulation.costs import CostModel, Crowded
from rudra.simulation.faults import Faults
from rudra.simulation.network import Network
from rudra.simulation.queue import EventQueue, owner
from rudra.simulation.regrouping import Make, SimulatedRegrouping
from rudra.simulation.timing_only import Tensors
from topologies import Plan

Perform = Callable[[int, ExecutorAction, float], Event | None]
"""Function that carries out an action of a role, given the action's virtual seconds, and returns its event."""

Check = Callable[[Machine, States, Event], None]
"""Check that tests run on a machine after each event. It gets the machine's previous state and the event."""


class RowSink(Protocol):
    """Receiver of the statistics server's rows."""

    def record(self, action: Record) -> Decided | None: ...
    def keep(self, role: int, action: StoreEpochWeights) -> None: ...
    def finish(self, role: int, action: Finish) -> None: ...
    def warn(self, name: str, text: str) -> None: ...


class Simulation:
    """Simulation of a whole cluster in one process.

    Args:
        plan: Roles and their ranks.
        machines: Machine of every role of the plan, by id.
        tensors: Carries out the roles' actions on tensors.
        recorder: Receiver of the results.
        costs: Durations.
        size_bytes: Size of one tensor on the wire.
        seed: Seed of all random durations.
        gradient_share: Size of a gradient on the wire, as a fraction of `size_bytes`.
        make: Function that makes a role's machine for a restart, if roles may be lost or the job changes.
        price: Function that gives the cost model at a training state, if costs change.
        save: Function called with a role and its `Save`, to store its part of a checkpoint. None: store nothing.
        check: Function called after every event.
        beside: Simulation of the main job, if this one is a background job. Both share time and the machines' links.

    Attributes:
        plan: Roles and their ranks.
        queue: Future events.
        network: Network between the roles.
        actors: Actors by role.
        do: Function that carries out each kind of action at a given time. Callers may replace functions.
        code: Exit code that the roles agreed on: 0, or a code like `EXIT_STOPPED` for a run that was stopped.
    """

    def __init__(
        self,
        plan: Plan,
        machines: Mapping[int, Machine],
        tensors: Tensors,
        recorder: RowSink,
        costs: CostModel,
        *,
        size_bytes: int,
        seed: int,
        gradient_share: float = 1.0,
        make: Make | None = None,
        price: Callable[[TrainingState], CostModel] | None = None,
        save: Callable[[int, Save], None] | None = None,
        check: Check | None = None,
        beside: "Simulation | None" = None,
    ) -> None:
        self._saver, self._check, self._price = save, check, price
        self.plan, self.tensors, self.costs = plan, tensors, costs
        self.code = 0
        self._sized = bool(costs.paces)
        self._cores, self._pieces = costs.table.cores_per_node, costs.pieces
        self._communication_s = costs.table.communication_s if plan.overlapped and self._cores else 0.0
        self._planned = tensors.planned
        self._performed: Perform = tensors.perform if tensors.lent is None else _attempting(tensors.perform)
        self.actors: dict[int, Actor] = {}
        self._learners_on: dict[int, list[Actor]] = {}  # by node, if its cores may be short
        self._evaluated_until = 0.0  # end of an evaluation that delays learners
        self._beside: list[Simulation] = []
        if beside is not None:
            beside._beside.append(self)
        queue: EventQueue = EventQueue() if beside is None else beside.queue
        there: Network | None = None if beside is None else beside.network
        network = Network(queue, self.actors, costs, tensors, size_bytes, gradient_share, there)
        self.queue: EventQueue = queue
        self.network: Network = network
        self._heap, self._first, self._later = queue.heap, queue.first, queue.later
        self.do: dict[type[Action], Callable[[Actor, Any, float], None]] = {
            Send: network.send,
            Receive: network.receive,
            CancelReceive: network.withdraw,
            Reduce: network.reduce,
            Save: self._save,
            Commit: lambda actor, action, time: self._soon(actor, Committed(action.timestamp)),
            Sync: lambda actor, action, time: None,
            Record: partial(self._record, recorder),
            StoreEpochWeights: lambda actor, action, time: recorder.keep(actor.role, action),
            Finish: lambda actor, action, time: recorder.finish(actor.role, action),
            Warn: lambda actor, action, time: recorder.warn(actor.machine.name, action.text),
            Fail: self._fail,
            Halt: self._halt,
            Reconfigure: SimulatedRegrouping(self, make, price).regroup,
            FollowJob: self._follow_job,
        }
        self._over = self._end
        for role, machine in machines.items():
            serves = plan.roles[role].kind_traits.serves
            message_s = costs.table.message_s if serves else 0.0
            actor = self.actors[role] = Actor(role, machine, serves=serves, message_s=message_s, seed=seed)
            actor.take = self._take if serves else self._handle  # other roles are never busy
            actor.handle = self.handler(machine)
            actor.local_s = costs.local_s(role)
            if role in costs.compute_s:
                actor.compute_s = costs.computation(role, actor.random)
        if tensors.watch is not None:
            tensors.watch(self._next_minibatch)
        for kind in ExecutorAction.__subclasses__():
            free = kind in tensors.idle and not any(kind in actor.local_s for actor in self.actors.values())
            self.do[kind] = _nothing if free else self._begin if kind.long else self._perform
        self._share_ranks()
        if self._cores is not None:
            self._share_cores()
        network.prepare()
        if costs.table.faults or any(machine.tick_s is not None for machine in machines.values()):
            Faults(self, seed)

    def _next_minibatch(self, role: int) -> tuple[int, Work]:
        """Returns step and samples of a learner's next mini-batch."""
        machine = self.actors[role].machine
        assert isinstance(machine, Learner | Replica)
        return machine.log.upcoming

    def _share_ranks(self) -> None:
        """Lets the learners of a rank compute one after another. No effect if each has its own rank."""
        learners = [self.actors[role] for role in self.plan.whole.learners if role in self.actors]
        ranks = [self.plan.roles[actor.role].world_rank for actor in learners]
        if len(set(ranks)) < len(ranks):
            first = dict(zip(reversed(ranks), reversed(learners), strict=True))
            for actor, rank in zip(learners, ranks, strict=True):
                actor.turns = first[rank].turns
            self.do |= dict.fromkeys((Compute, RunFirstStage, BackpropFirstStage), self._begin_in_turn)
            self._over = self._end_turn

    def _share_cores(self) -> None:
        """Lets servers and transfers take the time of cores that learners occupy."""
        self.network.take_core = self._take_core
        node = self.costs.node
        for role in self.costs.compute_s:
            self._learners_on.setdefault(node[role], []).append(self.actors[role])
        for role, actor in self.actors.items():
            if role not in self.costs.compute_s and node[role] in self._learners_on:
                actor.crowds = node[role]

    @property
    def now(self) -> float:
        """Current virtual time in seconds."""
        return self.queue.now

    def run(self) -> float:
        """Runs until every role has halted, then abandons the simulations of background jobs.

        Returns:
            The virtual time at the end, in seconds.

        Raises:
            RunError: A role failed, or all roles wait for each other.
        """
        self.start()
        thresholds = gc.get_threshold()
        if self.tensors.lent is None:  # searching for cycles takes a seventh of the time, and pays only with tensors
            gc.set_threshold(100_000, *thresholds[1:])
        try:
            self.queue.run()
        finally:
            gc.set_threshold(*thresholds)
        stuck = [a.machine for a in self.actors.values() if not a.halted]
        if stuck:
            raise RunError("; ".join(f"{m.name} waits for {m.waiting_for or 'nothing'}" for m in stuck[:4]))
        return self.queue.now

    def handler(self, machine: Machine) -> Callable[[Event, float], list[Action]]:
        """Returns the function that passes events to a machine."""
        return _checked(machine, self._check) if self._check else machine.handle

    def start(self) -> None:
        for actor in self.actors.values():
            self.queue.at(0.0, actor.take, actor, Started())
            if actor.machine.tick_s is not None:
                self._later(actor.machine.tick_s, self.tick, actor, None)
        for other in self._beside:
            other.start()

    def tick(self, actor: Actor, _: None) -> None:
        """Notifies a role that time has passed, and schedules the next notification."""
        actor.take(actor, Tick())
        tick_s = actor.machine.tick_s
        # Only as long as other events are due: if all roles wait for each other, the ticks would never end.
        if tick_s is not None and not actor.halted and self.queue.has(lambda entry: type(owner(entry)) is not Faults):
            self._later(self.queue.now + tick_s, self.tick, actor, None)

    def stop_at(self, time: float) -> None:
        """Requests an orderly stop of the run at a virtual time."""
        actor = self.actors[self.plan.server]
        self._later(time, actor.take, actor, Stopped())

    def tell(self, role: int, event: Event) -> None:
        """Passes an event to a role at once."""
        self._handle(self.actors[role], event)

    def follow(self, plan: Plan) -> None:
        """Adopts a new plan."""
        self.plan = self.network.plan = plan

    def pay(self, costs: CostModel) -> None:
        """Uses another cost model from now on."""
        if costs is not self.costs:
            self.costs = costs
            for role in costs.compute_s:
                self.actors[role].ahead = None
                self.actors[role].compute_s = costs.computation(role, self.actors[role].random)

    def _follow_job(self, actor: Actor, action: FollowJob, time: float) -> None:
        """Uses the costs of the job at a position for a role."""
        if self._price is not None:
            self.costs = self._price(action.position)
            actor.ahead = None
            actor.compute_s = self.costs.computation(actor.role, actor.random)

    def stretch(self, actor: Actor, factor: float) -> None:
        """Multiplies the remaining time of the current computation by `factor`."""
        self.queue.stretch(lambda entry: entry[3] is actor and entry[2] == self._over, factor)

    # Events to roles: one at a time, and none while a role is busy.

    def _take(self, actor: Actor, event: Event) -> None:
        if actor.inbox or actor.busy_until > self.queue.now:
            actor.inbox.append(event)
            if len(actor.inbox) == 1:
                self._later(max(self.queue.now, actor.busy_until), self._take_next, actor, None)
        else:
            self._handle_busily(actor, event)

    def _take_next(self, actor: Actor, _: None) -> None:
        """Passes events from the inbox to a role that is free, one at a time."""
        inbox = actor.inbox
        while actor.busy_until <= self.queue.now:
            self._handle_busily(actor, inbox[0])
            inbox.popleft()
            if not inbox:
                return
        self._later(actor.busy_until, self._take_next, actor, None)

    def _handle(self, actor: Actor, event: Event) -> None:
        handle, do, now = actor.handle, self.do, self.queue.now
        for action in handle(event, now):
            do[type(action)](actor, action, now)

    def _handle_busily(self, actor: Actor, event: Event) -> None:
        """Passes an event to a free server. It takes the time of a message, and then starts the resulting actions."""
        handle, do = actor.handle, self.do
        actor.busy_until = now = self.queue.now
        actions = handle(event, now)
        if actor.message_s and type(event) is Received:
            actor.busy_until = now + actor.message_s
            if actor.crowds is not None:
                self._take_core(actor.crowds, actor.message_s)
        for action in actions:
            do[type(action)](actor, action, actor.busy_until)

    def _take_core(self, node: int, seconds: float) -> None:
        """Takes the time of a core from the learners of a node that compute, if they occupy all cores."""
        busy = [a for a in self._learners_on.get(node, ()) if a.computing]
        if len(busy) >= (self._cores or 0):
            for learner in busy:
                learner.delay_s += seconds / len(busy) * self.costs.crowding.get(node, 1.0)

    # Actions of roles.

    def _perform(self, actor: Actor, action: ExecutorAction, time: float) -> None:
        """Carries out a short action at once. Its result is available when the action's time is over."""
        seconds = actor.local_s.get(type(action), 0.0)
        if actor.ahead is not None and type(action) is Update:
            seconds = 0.0  # an early forward pass has updated the weights
        event = self._performed(actor.role, action, seconds)
        if seconds:
            actor.busy_until = time = time + seconds
            if actor.crowds is not None:
                self._take_core(actor.crowds, seconds)
        if event is not None:
            self._later(time, actor.take, actor, event)

    def _begin(self, actor: Actor, action: ExecutorAction, time: float) -> None:
        """Starts a long action, which is carried out when its time is over."""
        if self._planned:
            self._planned(actor.role, action)
        actor.computing = True
        kind, ahead_s = type(action), 0.0
        if self._communication_s and kind in (Compute, RunFirstStage):
            self._take_core(self.costs.node[actor.role], self._communication_s)
        if kind is Compute:
            if actor.ahead is None:
                seconds = actor.compute_s()
            else:
                (seconds, ahead_s), actor.ahead = actor.ahead, None
            if actor.pulled is None:
                actor.pulled = []
            if self._sized:
                seconds *= self.costs.relative(actor.role, action.work.count)  # type: ignore[attr-defined]
        elif kind in self._pieces:
            seconds = actor.compute_s() * self._pieces[kind]
        else:
            seconds, time = actor.local_s.get(kind, 0.0), max(time, actor.busy_until)  # after an update, for example
            if kind is Evaluate and self.costs.evaluation is not None:
                self._delay_learners(self.costs.evaluation, time)
        if time < self._evaluated_until and kind is not Evaluate:
            seconds = self._among_evaluation(actor, time, seconds)
        if actor.early and kind in (Compute, BackpropFirstStage):
            backward = self.costs.backward if kind is Compute else 1.0
            self.network.push_early(actor, time - ahead_s, seconds + ahead_s, backward)
        heappush(self._heap, (time + seconds, next(self._first), self._over, actor, action))

    def _delay_learners(self, evaluation: Crowded, time: float) -> None:
        """Lets an evaluation that begins delay the learners on its node that compute: half of a mini-batch is left."""
        self._evaluated_until = time + evaluation.seconds
        for learner in self._learners_on.get(evaluation.node, ()):
            if learner.computing:
                rest_s = self.costs.compute_s[learner.role] / 2
                learner.delay_s += min(rest_s * (evaluation.slowdown - 1), evaluation.delay_s)

    def _among_evaluation(self, actor: Actor, time: float, seconds: float) -> float:
        """Returns the time of a computation that begins during an evaluation."""
        evaluation = self.costs.evaluation
        if evaluation is None or self.costs.node[actor.role] != evaluation.node:
            return seconds
        left_s = self._evaluated_until - time
        return min(seconds * evaluation.slowdown, seconds + left_s * evaluation.delay_s / evaluation.seconds)

    def _end(self, actor: Actor, action: ExecutorAction) -> None:
        if actor.delay_s:
            delay_s, actor.delay_s = actor.delay_s, 0.0
            self.queue.at(self.queue.now + delay_s, self._over, actor, action)
            return
        actor.computing = False
        event = self._performed(actor.role, action, actor.local_s.get(type(action), 0.0))
        if event is not None:
            self._handle(actor, event)

    # The same for learners that share a rank: one mini-batch after another, in the order of their requests.

    def _begin_in_turn(self, actor: Actor, action: Compute | RunFirstStage | BackpropFirstStage, time: float) -> None:
        actor.turns.append((actor, action))
        if self._planned:
            self._planned(actor.role, action)
        if len(actor.turns) == 1:
            self._begin(actor, action, time)

    def _end_turn(self, actor: Actor, action: ExecutorAction) -> None:
        if type(action) in (Compute, RunFirstStage, BackpropFirstStage) and not actor.delay_s:
            actor.turns.popleft()
            if actor.turns:
                self._begin(*actor.turns[0], self.queue.now)
        self._end(actor, action)

    def _save(self, actor: Actor, action: Save, time: float) -> None:
        if self._saver is not None:
            self._saver(actor.role, action)
        if actor.role == self.plan.server:  # the server writes the parts of all roles that store something
            self._soon(actor, Saved(action.position.timestamp))

    def _record(self, recorder: RowSink, actor: Actor, action: Record, time: float) -> None:
        if (decided := recorder.record(action)) is not None:
            self._soon(actor, decided)

    def _soon(self, actor: Actor, event: Event) -> None:
        """Passes an event to a role as soon as the role is free."""
        self._later(max(self.queue.now, actor.busy_until), actor.take, actor, event)

    def _fail(self, actor: Actor, action: Fail, time: float) -> None:
        name = actor.machine.name if action.cause is None else self.plan.roles[action.cause].name
        failure = RunError(f"{name}: {action.text}")
        failure.lost = action.lost
        raise failure

    def _halt(self, actor: Actor, action: Halt, time: float) -> None:
        actor.halted = True
        actor.handle = _ignore
        self.code = max(self.code, action.code)
        if self._beside and all(each.halted for each in self.actors.values()):
            self.queue.heap.clear()


def _attempting(perform: Perform) -> Perform:
    """Returns a function that performs actions, and ends one with `MemoryExhausted` if memory does not suffice."""

    def attempt(role: int, action: ExecutorAction, seconds: float) -> Event | None:
        try:
            return perform(role, action, seconds)
        except Exception as error:
            return exhausted(error, action)

    return attempt


def _checked(machine: Machine, check: Check) -> Callable[[Event, float], list[Action]]:
    def handle(event: Event, now: float) -> list[Action]:
        before = machine.state
        actions = machine.handle(event, now)
        check(machine, before, event)
        return actions

    return handle


def _nothing(actor: Actor, action: Action, time: float) -> None: ...


def _ignore(event: Event, now: float) -> list[Action]:
    return []
