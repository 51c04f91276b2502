"""Learners and tree servers that die, and learners that slow down, in virtual time (`[simulation] faults`).

A role that dies is told nothing and tells nothing: its computation ends, and with it all tensors under way to it and
from it, whose ports are free again; learners that share a rank die together. Control messages that it had sent still
arrive. The others notice after a while, all at one moment: receives into which the dead had begun to send are posted
anew, those that were for it alone are gone, everybody gets `Lost`, and who was sending it something gets `Sent`.

Everything is done to what is in the simulation's queue and network, so that a simulation without faults pays nothing.
"""

import random
from collections.abc import Callable, Iterable
from functools import partial
from math import prod

from rudra.core.events import Action, DeclareLost, Event, Halt, Lost, Receive, Reconfigure, Send, Sent
from rudra.data.sampling import mix
from rudra.job.simulation import Fault
from rudra.simulation.actor import Actor
from rudra.simulation.queue import Scheduled, owner
from rudra.simulation.running import RunningSimulation
from topologies.kinds import LEARNER, TREE_SERVER


class Faults:
    """What goes wrong in a simulation.

    Args:
        simulation: before it starts.
        seed: of random times.
    """

    def __init__(self, simulation: RunningSimulation, seed: int) -> None:
        self._sim, self._actors = simulation, simulation.actors
        self._queue, self._network = simulation.queue, simulation.network
        self._detection_s = simulation.costs.table.detection_s
        self._running = len(self._actors)
        self._noticed: dict[int, float] = {}  # role -> when the others notice that it has died
        # Role -> how long it computes as a rule, and the factors of the slow-downs that it is in.
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
        """One role less; after the last one nothing can go wrong any more, and no time passes for it."""
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
        """From now on its computations take so many times as long as ever."""
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
        # Only as long as something else happens: else all wait for each other, and it would never end.
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
        """Who dies with a role: a learner's rank has others, perhaps."""
        roles = self._sim.plan.roles
        if not roles[actor.role].kind_traits.trains:
            return [actor]
        rank = roles[actor.role].world_rank
        return [self._actors[i] for i, role in enumerate(roles) if role.kind_traits.trains and role.world_rank == rank]

    def _drop(self, by: Actor, action: DeclareLost, time: float) -> None:
        """Here who is dropped does nothing any more, which only those that dropped it notice."""
        actor = self._actors[action.role]
        if not actor.halted:
            unsent, _ = self._end(actor, time)
            self._return_later(time, unsent)
            self._forget(actor)
        by.posted = [receive for receive in by.posted if receive.source != action.role]
        self._queue.later(time, by.take, by, Lost(action.role))

    def _end(self, actor: Actor, noticed: float) -> tuple[list[tuple[Actor, Send]], list[tuple[Actor, Receive]]]:
        """A role is no more, nor is what is under way to it and from it (`Network.cut`).

        Tensors for it are given back when that is noticed.
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
        """The others learn of a death."""
        for actor, receive in again:
            if not actor.halted:
                self._network.receive(actor, receive, self._queue.now)
        for actor in self._actors.values():
            if not actor.halted:
                actor.posted = [receive for receive in actor.posted if receive.source != dead.role]
                actor.take(actor, Lost(dead.role))

    # Where all begin anew (`rudra.simulation.regrouping`).

    def _regroup(self, by: Actor, action: Reconfigure, time: float) -> None:
        """Gives back what was on its way to the dead; who is slow stays so."""
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
        if noticed is None or action.buffer is None:  # control messages are lost on the dead
            self._network.send(actor, action, time)
            return
        self._network.lend(actor, action)
        self._return_later(max(time, noticed), [(actor, action)])

    def _return_later(self, time: float, unsent: Iterable[tuple[Actor, Send]]) -> None:
        for sender, send in unsent:
            self._queue.later(time, self._return, sender, send)

    def _return(self, actor: Actor, send: Send) -> None:
        """A tensor that nobody takes any more is its sender's again."""
        assert send.buffer is not None
        self._network.give_back(actor, send)
        actor.take(actor, Sent(send.buffer, send.to))


def _times(compute_s: Callable[[], float], factors: list[float]) -> float:
    return compute_s() * prod(factors)


def _nothing(event: Event, now: float) -> list[Action]:
    return []
