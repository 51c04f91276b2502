"""The roles of a rank: their state machines, those that still run, and the events that wait for them."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Set

from rudra.core.events import Event, Lost, Started
from rudra.core.training_state import TrainingState
from rudra.roles import Machine
from rudra.roles.ledger import outlasts
from topologies import Plan

Make = Callable[[int, Plan, TrainingState], Machine]
"""Creates a role's machine for a restart, and prepares its executor."""


class HostedRoles:
    """The roles of a rank.

    Args:
        machines: role id -> state machine of the role.
        make: creates the machine of a role that restarts, or None if no role restarts.

    Attributes:
        machines: role id -> current state machine, replaced when the rank regroups.
        running: ids of the roles that have not halted.
        events: events that wait for roles, each with the id of its role.
    """

    def __init__(self, machines: dict[int, Machine], make: Make | None) -> None:
        self.machines, self.running = machines, set(machines)
        self.events: deque[tuple[int, Event]] = deque((role, Started()) for role in machines)
        self._make = make
        self._ticked = dict.fromkeys(machines, 0.0)

    def ticks(self, now: float) -> Iterator[int]:
        """Yields the roles that must now be notified that time has passed."""
        for role in list(self.running):
            tick_s = self.machines[role].tick_s
            if tick_s is not None and now - self._ticked[role] >= tick_s:
                self._ticked[role] = now
                yield role

    def waits(self) -> Mapping[int, str]:
        """Returns, for each running role, a text about its current wait."""
        return {role: self.machines[role].waiting_for for role in self.running}

    def abandon(self, plan: Plan, position: TrainingState) -> None:
        """Drops events of roles that restart from a position with another plan."""
        roles = self.running - {plan.statistics}
        for role in roles.intersection(plan.followers):  # they continue with the others' parts in their logs
            self._remake(role, plan, position)

        def counts(role: int, event: Event) -> bool:
            return role not in roles or (role in plan.owners and outlasts(event, plan.statistics))

        self.events = deque((role, event) for role, event in self.events if counts(role, event))

    def restart(self, plan: Plan, position: TrainingState, lost: Set[int]) -> None:
        """Starts the roles again, for training that continues from a position.

        Args:
            plan: new role assignment.
            position: position in the training.
            lost: ranks that have died. The plan may not know all of them.
        """
        unknown = [i for i, role in enumerate(plan.roles) if role.world_rank in lost and i not in plan.gone]
        for role in sorted(self.running - {plan.statistics}):
            self.events.append((role, Started()))
            if role not in (plan.server, *plan.followers):  # these have the plan already
                self._remake(role, plan, position)
            if role != plan.server:  # the server knows the dead already
                self.events.extend((role, Lost(other)) for other in unknown)

    def _remake(self, role: int, plan: Plan, position: TrainingState) -> None:
        """Creates the machine of a role again."""
        assert self._make is not None
        before, self.machines[role] = self.machines[role], self._make(role, plan, position)
        self.machines[role].inherit(before)
