"""Beginning anew in virtual time, by another plan or another job (`rudra.core.events.Regroup`).

All that is under way between the roles is gone a latency later; what the statistics server is part of stays.
"""

from collections.abc import Callable

from rudra.core.events import Reconfigure, Started
from rudra.core.training_state import TrainingState
from rudra.roles import Machine
from rudra.roles.ledger import outlasts
from rudra.simulation.actor import Actor
from rudra.simulation.costs import CostModel
from rudra.simulation.queue import Scheduled, owner
from rudra.simulation.running import RunningSimulation
from topologies import Plan

Make = Callable[[int, Plan, TrainingState], Machine]
"""Makes the machine of a role of a plan, for a beginning there."""


class SimulatedRegrouping:
    """Lets the roles of a simulation begin anew.

    Args:
        simulation: in which they are.
        make: a role's machine for a new beginning.
        price: what things cost from a position on; None: what they cost at first.
    """

    def __init__(
        self, simulation: RunningSimulation, make: Make | None, price: Callable[[TrainingState], CostModel] | None
    ) -> None:
        self._sim, self._make, self._price = simulation, make, price

    def regroup(self, by: Actor, action: Reconfigure, time: float) -> None:
        """Has all who are left begin anew, but for the statistics server and, as it does so by itself, the owner."""
        assert self._make is not None
        sim, plan, position = self._sim, action.plan, action.position
        sim.follow(plan)
        if self._price is not None:
            sim.pay(self._price(position))
        sim.network.abandon(plan.statistics)
        for actor in sim.actors.values():
            if not actor.halted and actor.role != plan.statistics:
                handled = [actor.inbox.popleft()] if actor is by and actor.inbox else []  # at this moment
                keeps = actor.role in plan.owners
                waiting = [event for event in actor.inbox if keeps and outlasts(event, plan.statistics)]
                actor.inbox.clear()
                actor.inbox.extend([*handled, *waiting])
        sim.queue.remove(lambda entry: not self._still_counts(entry))
        for actor in sim.actors.values():
            if actor.halted or actor.role == plan.statistics:
                continue
            actor.turns.clear()
            if actor is not by:
                actor.computing, actor.delay_s = False, 0.0
                before, actor.machine = actor.machine, self._make(actor.role, plan, position)
                actor.machine.inherit(before)
                actor.handle = sim.handler(actor.machine)
                if sim.tensors.regroup is not None and actor.role != plan.stage:  # which has its own weights
                    sim.tensors.regroup(actor.role, by.role)
            sim.queue.later(time + sim.costs.table.latency_s, actor.take, actor, Started())

    def _still_counts(self, entry: Scheduled) -> bool:
        """Whether something in the queue goes on: it is none of the roles' own, or an owner needs it all the same."""
        sim = self._sim
        statistics = sim.actors[sim.plan.statistics]
        _, _, what, whom, about = entry
        if owner(entry) is not sim or what == sim.tick or whom is statistics:
            return True
        if whom.role not in sim.plan.owners:
            return False
        return bool(whom.inbox) if about is None else outlasts(about, statistics.role)  # None: it takes what waits
