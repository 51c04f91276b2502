"""Faults in virtual time (`[simulation] faults`): learners and servers of a tree that die, and learners that slow down.

A dead role receives and sends nothing. Its computation ends, as do all transfers of tensors to it and from it, and
their ports are free again. Learners that share a rank die together. Control messages that a dead role had already sent
still arrive. All other roles notice a death at the same moment, after a delay. Receives that the dead role had begun to
fill are then posted again, and receives that only this role could fill are removed. Every role gets `Lost`, and every
role that was sending it a tensor gets `Sent`. All of this changes the simulation's queue and network from outside, so a
simulation without faults has no extra cost.
"""

import random
from collections.abc import Callable, Iterable
from functools import partial
from math import prod

from rudra.core.actions import Action, DeclareLost, Halt, Receive, Reconfigure, Send
from rudra.core.events import Event, Lost, Sent
from rudra.data.sampling import mix
from rudra.job.simulation import Fault
from rudra.simulation.actor import Actor
from rudra.simulation.queue import Scheduled, owner
from rudra.simulation.running import RunningSimulation
from topologies.kinds import LEARNER, TREE_SERVER


class Faults:
    """Faults of a simulation.

    Args:
        simulation: Simulation before it starts.
        seed: Seed of random times.
    """

    def __init__(self, simulation: RunningSimulation, seed: int) -> None:
        self._sim, self._actors = simulation, simulation.actors
        self._queue, self._network = simulation.queue, simulation.network
        self._detection_s = simulation.costs.table.detection_s
        self._running = len(self._actors)
        self._noticed: dict[int, float] = {}  # role -> time when the others notice its death
        # Role -> its usual computation time, and the factors of its current slow-downs.
        self._slowed: dict[int, tuple[Callable[[], float], list[float]]] = {}
        self._halt_as_ever, self._regroup_as_ever = simulation.do[Halt], simulation.do[Reconfigure]
        simulation.do |= {Halt: self._halt, Reconfigure: self._regroup, DeclareLost: self._drop}
        plan = simulation.plan
        for place, fault in enumerate(simulation.costs.table.faults):
            kind, index = (LEARNER, fault.learner) if fault.tree_server is None else (TREE_SERVER, fault.tree_server)
            for role, about in enumerate(plan.roles):
                if about.kind == kind and index in {None, about.index}:
                    self._begin(self._actors[role], fault, random.Random(mix(seed, place, role)))

    def _begin(self, actor: Actor, fault: Fault, source: random.Random) -> None:
        later = self._queue.later
        if fault.dies_at_s is not None:
            later(fault.dies_at_s, self._die, actor, None)
        elif fault.mean_time_to_failure_s is not None:
            later(source.expovariate(1 / fault.mean_time_to_failure_s), self._die, actor, None)
        elif fault.slows_at_s is not None:
            later(fault.slows_at_s, self._slow, actor, (fault, None))
        else:
            self._slow_later(actor, fault, source)

    def _halt(self, actor: Actor, action: Action, time: float) -> None:
        self._halt_as_ever(actor, action, time)
        self._gone()

    def _gone(self) -> None:
        """Counts a halted role. After the last one no more faults occur."""
        self._running -= 1
        if not self._running:
            self._queue.remove(lambda entry: owner(entry) is self)

    # Slow learners.

    def _slow_later(self, actor: Actor, fault: Fault, source: random.Random) -> None:
        assert fault.mean_time_to_slowdown_s is not None
        after_s = source.expovariate(1 / fault.mean_time_to_slowdown_s)
        self._queue.later(self._queue.now + after_s, self._slow, actor, (fault, source))

    def _slow(self, actor: Actor, what: tuple[Fault, random.Random | None]) -> None:
        fault, _ = what
        assert fault.factor is not None
        assert fault.for_s is not None
        if actor.role not in self._slowed:
            self._slow_down(actor, [])
        self._slowed[actor.role][1].append(fault.factor)
        self._sim.stretch(actor, fault.factor)
        self._queue.later(self._queue.now + fault.for_s, self._recover, actor, what)

    def _slow_down(self, actor: Actor, factors: list[float]) -> None:
        """Multiplies the time of the learner's computations by the factors from now on."""
        as_ever = self._sim.costs.computation(actor.role, actor.random)
        self._slowed[actor.role] = as_ever, factors
        actor.compute_s = partial(_times, as_ever, factors)

    def _recover(self, actor: Actor, what: tuple[Fault, random.Random | None]) -> None:
        fault, source = what
        assert fault.factor is not None
        as_ever, factors = self._slowed[actor.role]
        factors.remove(fault.factor)
        if not factors:
            actor.compute_s = as_ever
            del self._slowed[actor.role]
        self._sim.stretch(actor, 1 / fault.factor)
        # Only as long as other events are due: if all roles wait for each other, the faults would never end.
        if source is not None and self._queue.has(lambda entry: owner(entry) is not self):
            self._slow_later(actor, fault, source)

    # Roles that die.

    def _die(self, actor: Actor, _: None) -> None:
        if actor.halted:
            return
        noticed = self._queue.now + self._detection_s
        for dead in [other for other in self._with(actor) if not other.halted]:
            unsent, again = self._end(dead, noticed)
            self._queue.later(noticed, self._notice, dead, again)
            self._return_later(noticed, unsent)
            self._forget(dead)

    def _with(self, actor: Actor) -> list[Actor]:
        """Returns the roles that die together with a role, including itself: all learners on a learner's rank."""
        roles = self._sim.plan.roles
        if not roles[actor.role].kind_traits.trains:
            return [actor]
        rank = roles[actor.role].world_rank
        return [self._actors[i] for i, role in enumerate(roles) if role.kind_traits.trains and role.world_rank == rank]

    def _drop(self, by: Actor, action: DeclareLost, time: float) -> None:
        """Ends a role that another role has declared lost. Only the roles that declared it lost notice."""
        actor = self._actors[action.role]
        if not actor.halted:
            unsent, _ = self._end(actor, time)
            self._return_later(time, unsent)
            self._forget(actor)
        by.posted = [receive for receive in by.posted if receive.source != action.role]
        self._queue.later(time, by.take, by, Lost(action.role))

    def _end(self, actor: Actor, noticed: float) -> tuple[list[tuple[Actor, Send]], list[tuple[Actor, Receive]]]:
        """Ends a role, and the transfers to it and from it (`Network.cut`).

        Buffers of tensors for this role are returned to their senders when its death is noticed.
        """
        self._noticed[actor.role] = noticed
        self._sim.do[Send] = self._send
        actor.halted, actor.handle, actor.computing = True, _nothing, False
        actor.turns.clear()
        cut = self._network.cut(actor)
        self._queue.remove(lambda entry: entry[3] is actor)
        return cut

    def _forget(self, actor: Actor) -> None:
        if self._sim.tensors.lost is not None:
            self._sim.tensors.lost(actor.role)
        self._gone()

    def _notice(self, dead: Actor, again: list[tuple[Actor, Receive]]) -> None:
        """Notifies the other roles of a death."""
        for actor, receive in again:
            if not actor.halted:
                self._network.receive(actor, receive, self._queue.now)
        for actor in self._actors.values():
            if not actor.halted:
                actor.posted = [receive for receive in actor.posted if receive.source != dead.role]
                actor.take(actor, Lost(dead.role))

    # Restarts of all roles (`rudra.simulation.regrouping`).

    def _regroup(self, by: Actor, action: Reconfigure, time: float) -> None:
        """Returns the buffers of tensors for dead roles. Slow learners stay slow."""
        statistics = action.plan.statistics

        def abandoned(entry: Scheduled) -> bool:
            return entry[2] == self._return and statistics not in (entry[3].role, entry[4].to)

        for _, _, _, sender, send in self._queue.remove(abandoned):
            self._network.give_back(sender, send)
        self._regroup_as_ever(by, action, time)
        for role, (_, factors) in self._slowed.items():
            self._slow_down(self._actors[role], factors)

    # Tensors for the dead.

    def _send(self, actor: Actor, action: Send, time: float) -> None:
        noticed = self._noticed.get(action.to)
        if noticed is None or action.buffer is None:  # control messages to a dead role are lost
            self._network.send(actor, action, time)
            return
        self._network.lend(actor, action)
        self._return_later(max(time, noticed), [(actor, action)])

    def _return_later(self, time: float, unsent: Iterable[tuple[Actor, Send]]) -> None:
        for sender, send in unsent:
            self._queue.later(time, self._return, sender, send)

    def _return(self, actor: Actor, send: Send) -> None:
        """Returns the buffer of a tensor for a dead role to its sender."""
        assert send.buffer is not None
        self._network.give_back(actor, send)
        actor.take(actor, Sent(send.buffer, send.to))


def _times(compute_s: Callable[[], float], factors: list[float]) -> float:
    return compute_s() * prod(factors)


def _nothing(event: Event, now: float) -> list[Action]:
    return []
