"""Restart of roles in virtual time, with another plan or another job (`rudra.core.actions.Reconfigure`).

All messages between the roles are discarded after one latency, except messages to and from the statistics server.
"""

from collections.abc import Callable

from rudra.core.actions import Reconfigure
from rudra.core.events import Started
from rudra.core.training_state import TrainingState
from rudra.roles import Machine
from rudra.roles.ledger import outlasts
from rudra.simulation.actor import Actor
from rudra.simulation.costs import CostModel
from rudra.simulation.queue import Scheduled, owner
from rudra.simulation.running import RunningSimulation
from topologies import Plan

Make = Callable[[int, Plan, TrainingState], Machine]
"""Function that makes the machine of a role of a plan for a training state."""


class SimulatedRegrouping:
    """Restart of a simulation's roles.

    Args:
        simulation: Simulation of the roles.
        make: Function that makes a role's machine for a restart.
        price: Function that gives the cost model at a training state, or None if costs do not change.
    """

    def __init__(
        self, simulation: RunningSimulation, make: Make | None, price: Callable[[TrainingState], CostModel] | None
    ) -> None:
        self._sim, self._make, self._price = simulation, make, price

    def regroup(self, by: Actor, action: Reconfigure, time: float) -> None:
        """Restarts all remaining roles except the statistics server, and the owner of the weights, which restarts by
        itself."""
        assert self._make is not None
        sim, plan, position = self._sim, action.plan, action.position
        before, stay = sim.plan, action.replicas_stay
        sim.follow(plan)
        if self._price is not None:
            sim.pay(self._price(position))
        sim.network.abandon(plan.statistics)
        for actor in sim.actors.values():
            if not actor.halted and actor.role != plan.statistics:
                handled = [actor.inbox.popleft()] if actor is by and actor.inbox else []  # the current event
                keeps = actor.role in plan.owners
                waiting = [event for event in actor.inbox if keeps and outlasts(event, plan.statistics)]
                actor.inbox.clear()
                actor.inbox.extend([*handled, *waiting])
        sim.queue.remove(lambda entry: not self._still_counts(entry))
        for actor in sim.actors.values():
            if actor.halted or actor.role == plan.statistics:
                continue
            actor.turns.clear()
            actor.ahead_s = None
            if actor is not by:
                actor.computing, actor.delay_s = False, 0.0
                machine, actor.machine = actor.machine, self._make(actor.role, plan, position)
                actor.machine.inherit(machine)
                actor.handle = sim.handler(actor.machine)
                has_state = actor.role in plan.followers or (stay and actor.role in before.learners)
                if sim.tensors.regroup is not None and not has_state:
                    sim.tensors.regroup(actor.role, by.role, before.keepers if stay else ())
            sim.queue.later(time + sim.costs.table.latency_s, actor.take, actor, Started())

    def _still_counts(self, entry: Scheduled) -> bool:
        """Returns whether a queue entry remains: it is not an event of a role, or an owner still needs it."""
        sim = self._sim
        statistics = sim.actors[sim.plan.statistics]
        _, _, what, whom, about = entry
        if owner(entry) is not sim or what == sim.tick or whom is statistics:
            return True
        if whom.role not in sim.plan.owners:
            return False
        return bool(whom.inbox) if about is None else outlasts(about, statistics.role)  # None: it starts waiting events
