"""Learners and tree servers that die, and learners that slow down, in virtual time (`[simulation] faults`).

A role that dies is told nothing and tells nothing: its computation ends, and with it all tensors under way to it and
from it, whose ports are free again. Control messages that it had sent still arrive. The others notice after a while,
all at one moment: receives into which the dead had begun to send are posted anew, those that were for it alone are
gone, everybody gets `Lost`, and who was sending it something gets `Sent`. Where they then begin anew, all that is under
way between them is gone a latency later; what the statistics server is part of stays.

Everything is done to what is in the simulation's queue, so that a simulation without faults pays nothing for them.
"""

import random
from collections.abc import Callable
from functools import partial
from heapq import heapify
from math import prod
from typing import TYPE_CHECKING, Any

from rudra.core.events import Action, Drop, Event, Halt, Lost, Receive, Regroup, Send, Sent, Started
from rudra.core.messages import Kind
from rudra.core.training_state import TrainingState
from rudra.data.sampling import mix
from rudra.job.simulation import Fault
from rudra.roles import Machine
from rudra.roles.owner import outlasts
from topologies import Plan
from topologies.plan import LEARNER, TREE_SERVER

if TYPE_CHECKING:
    from rudra.simulation.driver import Simulation, _Actor, _Way


class Faults:
    """What goes wrong in a simulation; a friend of it, which changes its queue.

    Args:
        simulation: before it starts.
        seed: of random times.
        make: a role's machine for a new plan.
    """

    def __init__(
        self, simulation: "Simulation", seed: int, make: Callable[[int, Plan, TrainingState], Machine] | None
    ) -> None:
        self._sim, self._actors = simulation, simulation._actors
        self._detection_s = simulation.costs.table.detection_s
        self._running = len(self._actors)
        self._noticed: dict[int, float] = {}  # role -> when the others notice that it has died
        self._factors: dict[int, list[float]] = {}  # role -> of the slow-downs that it is in
        self._halt_as_ever, self._send_as_ever = simulation._do[Halt], simulation._do[Send]
        simulation._do |= {Halt: self._halt, Regroup: self._regroup, Drop: self._drop}
        self._make = make
        plan = simulation.plan
        for place, fault in enumerate(simulation.costs.table.faults):
            kind, index = (LEARNER, fault.learner) if fault.tree_server is None else (TREE_SERVER, fault.tree_server)
            for role, about in enumerate(plan.roles):
                if about.kind == kind and index in {None, about.index}:
                    self._begin(self._actors[role], fault, random.Random(mix(seed, place, role)))

    def _begin(self, actor: "_Actor", fault: Fault, source: random.Random) -> None:
        later = self._sim._later
        if fault.dies_at_s is not None:
            later(fault.dies_at_s, self._die, actor, None)
        elif fault.mean_time_to_failure_s is not None:
            later(source.expovariate(1 / fault.mean_time_to_failure_s), self._die, actor, None)
        elif fault.slows_at_s is not None:
            later(fault.slows_at_s, self._slow, actor, (fault, None))
        else:
            self._slow_later(actor, fault, source)

    def _halt(self, actor: "_Actor", action: Action, time: float) -> None:
        self._halt_as_ever(actor, action, time)
        self._gone()

    def _gone(self) -> None:
        """One role less; after the last one nothing can go wrong any more, and no time passes for it."""
        self._running -= 1
        if not self._running:
            queue = self._sim._queue
            queue[:] = [entry for entry in queue if getattr(entry[2], "__self__", None) is not self]
            heapify(queue)

    # Slow learners.

    def _slow_later(self, actor: "_Actor", fault: Fault, source: random.Random) -> None:
        assert fault.mean_time_to_slowdown_s is not None
        after_s = source.expovariate(1 / fault.mean_time_to_slowdown_s)
        self._sim._later(self._sim.now + after_s, self._slow, actor, (fault, source))

    def _slow(self, actor: "_Actor", what: tuple[Fault, random.Random | None]) -> None:
        fault, _ = what
        assert fault.factor is not None
        assert fault.for_s is not None
        factors = self._factors.setdefault(actor.role, [])
        if not factors:
            actor.compute_s = partial(_times, actor.compute_s, factors)
        factors.append(fault.factor)
        self._stretch(actor, fault.factor)
        self._sim._later(self._sim.now + fault.for_s, self._recover, actor, what)

    def _recover(self, actor: "_Actor", what: tuple[Fault, random.Random | None]) -> None:
        fault, source = what
        assert fault.factor is not None
        factors = self._factors[actor.role]
        factors.remove(fault.factor)
        if not factors:
            assert isinstance(actor.compute_s, partial)
            actor.compute_s = actor.compute_s.args[0]
        self._stretch(actor, 1 / fault.factor)
        others = (entry for entry in self._sim._queue if getattr(entry[2], "__self__", None) is not self)
        if source is not None and any(others):  # else all wait for each other, and it would never end
            self._slow_later(actor, fault, source)

    def _stretch(self, actor: "_Actor", factor: float) -> None:
        """What is left of the computation under way takes so much longer."""
        sim = self._sim
        for place, (time, number, what, whom, about) in enumerate(sim._queue):
            if whom is actor and what == sim._end:
                sim._queue[place] = (sim.now + (time - sim.now) * factor, number, what, whom, about)
                heapify(sim._queue)
                return

    # Roles that die.

    def _die(self, actor: "_Actor", _: None) -> None:
        if actor.halted:
            return
        sim, noticed = self._sim, self._sim.now + self._detection_s
        self._end(actor, noticed)
        unsent, again = self._cut(actor)
        sim._later(noticed, self._notice, actor, again)
        for sender, send in unsent:
            sim._later(noticed, self._return, sender, send)
        self._forget(actor)

    def _drop(self, by: "_Actor", action: Drop, time: float) -> None:
        """Here who is dropped does nothing any more, which only those that dropped it notice."""
        sim, actor = self._sim, self._actors[action.role]
        if not actor.halted:
            self._end(actor, time)
            unsent, _ = self._cut(actor)
            for sender, send in unsent:
                sim._later(time, self._return, sender, send)
            self._forget(actor)
        by.posted = [receive for receive in by.posted if receive.source != action.role]
        sim._later(time, by.take, by, Lost(action.role))

    def _end(self, actor: "_Actor", noticed: float) -> None:
        """A role is no more; tensors for it are given back when that is noticed."""
        self._noticed[actor.role] = noticed
        self._sim._do[Send] = self._send
        actor.halted, actor.handle, actor.computing = True, _nothing, False

    def _forget(self, actor: "_Actor") -> None:
        if self._sim._lost is not None:
            self._sim._lost(actor.role)
        self._gone()

    def _cut(self, actor: "_Actor") -> tuple[list[tuple["_Actor", Send]], list[tuple["_Actor", Receive]]]:
        """Ends all that is under way to a role and from it.

        Returns:
            What others were sending to it, and the receives from anybody into which it was sending.
        """
        sim, role = self._sim, actor.role
        unsent = [(way.sender, send) for of in actor.offered for offers in of.values() for way, send, _ in offers]
        again: list[tuple[_Actor, Receive]] = []
        kept = []
        for entry in sorted(sim._queue):
            time, _, what, whom, about = entry
            if what == sim._deliver and actor in (whom.sender, whom.receiver):
                send, receive = about
                self._free_ports(whom, send, time)
                if whom.receiver is actor:
                    unsent.append((whom.sender, send))
                elif receive.source is None:
                    again.append((whom.receiver, receive))
            elif what == sim._offer and actor in (about[0].sender, about[0].receiver):
                if whom is actor:
                    unsent.append((about[0].sender, about[1]))
            elif whom is not actor and not (what == sim._reduced and role in whom):
                kept.append(entry)
        sim._queue[:] = kept
        actor.posted.clear()
        actor.offered = ({}, {})
        for other in self._actors.values():
            for offered in other.offered:
                offered.pop(role, None)
        for members in sim._reductions.values():  # never complete again
            members.pop(role, None)
        return unsent, again

    def _free_ports(self, way: "_Way", send: Send, end: float) -> None:
        """Lets ports go on which a transfer was the last; what waits behind others keeps its time."""
        sim = self._sim
        seconds = way.transfer_s * (sim._gradient_share if send.message.kind is Kind.GRADIENT else 1.0)
        for port in (way.out, way.into, *way.blocking):
            if port.free_at == end:
                port.free_at = max(sim.now, end - seconds)

    def _notice(self, dead: "_Actor", again: list[tuple["_Actor", Receive]]) -> None:
        """The others learn of a death."""
        sim = self._sim
        for actor, receive in again:
            if not actor.halted:
                sim._receive(actor, receive, sim.now)
        for actor in self._actors.values():
            if not actor.halted:
                actor.posted = [receive for receive in actor.posted if receive.source != dead.role]
                actor.take(actor, Lost(dead.role))

    # A new plan.

    def _regroup(self, owner: "_Actor", action: Regroup, time: float) -> None:
        """Lets all who are left begin anew, but for the statistics server and, as it does so by itself, the owner."""
        assert self._make is not None
        sim, plan = self._sim, action.plan
        sim.plan = plan
        sim._queue[:] = [entry for entry in sorted(sim._queue) if self._still_counts(entry, owner)]
        if owner.inbox:  # of which the first event is being handled
            first, *rest = owner.inbox
            owner.inbox.clear()
            owner.inbox.extend([first, *(event for event in rest if outlasts(event, plan.statistics))])
        sim._reductions.clear()
        for actor in self._actors.values():
            if actor.halted or actor.role == plan.statistics:
                continue
            actor.posted.clear()
            for offers in (offers for offered in actor.offered for offers in offered.values()):
                for way, send, _ in offers:
                    self._give_back(way.sender, send)
            for offered in actor.offered:
                offered.clear()
            if actor is not owner:
                actor.inbox.clear()
                actor.computing, actor.delay_s = False, 0.0
                before, actor.machine = actor.machine, self._make(actor.role, plan, action.position)
                actor.machine.inherit(before)
                actor.handle = sim.handler(actor.machine)
                if sim.hands.regroup is not None:
                    sim.hands.regroup(actor.role, owner.role)
            sim._later(time + sim._table.latency_s, actor.take, actor, Started())

    def _still_counts(self, entry: tuple[Any, ...], owner: "_Actor") -> bool:
        """Whether something in the queue goes on when all begin anew; what does not is given back."""
        sim, (time, _, what, whom, about) = self._sim, entry
        statistics = self._actors[sim.plan.statistics]
        if what in (sim._deliver, sim._offer, self._return):  # tensors under way
            if what == self._return:
                sender, send = whom, about
            else:
                way, send = (whom, about[0]) if what == sim._deliver else about[:2]
                sender = way.sender
            if statistics.role in (sender.role, send.to):
                return True
            if what == sim._deliver:
                self._free_ports(way, send, time)
            self._give_back(sender, send)
            return False
        if getattr(what, "__self__", None) is self or whom is statistics:
            return True
        return whom is owner and outlasts(about, statistics.role)

    def _give_back(self, actor: "_Actor", send: Send) -> None:
        """A tensor will not be sent; nobody is told."""
        if self._sim._sent is not None:
            assert send.buffer is not None
            self._sim._sent(actor.role, send.buffer)

    def _send(self, actor: "_Actor", action: Send, time: float) -> None:
        noticed = self._noticed.get(action.to)
        if noticed is None or action.buffer is None:  # control messages are lost on the dead
            self._send_as_ever(actor, action, time)
            return
        sim = self._sim
        sim.messages += 1
        if sim._lent is not None:
            sim._lent(actor.role, action.buffer)
        sim._later(max(time, noticed), self._return, actor, action)

    def _return(self, actor: "_Actor", send: Send) -> None:
        """A tensor that nobody takes any more is its sender's again."""
        assert send.buffer is not None
        if self._sim._sent is not None:
            self._sim._sent(actor.role, send.buffer)
        actor.take(actor, Sent(send.buffer, send.to))


def _times(compute_s: Any, factors: list[float]) -> float:
    return float(compute_s()) * prod(factors)


def _nothing(event: Event, now: float) -> list[Action]:
    return []
