"""The roles of a rank: their state machines, and those that still run."""

from collections.abc import Callable, Iterator, Mapping

from rudra.core.training_state import TrainingState
from rudra.roles import Machine
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
    """

    def __init__(self, machines: dict[int, Machine], make: Make | None) -> None:
        self.machines, self.running = machines, set(machines)
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

    def remake(self, role: int, plan: Plan, position: TrainingState) -> None:
        """Creates the machine of a role again, for training that continues from a position with another plan."""
        assert self._make is not None
        before, self.machines[role] = self.machines[role], self._make(role, plan, position)
        self.machines[role].inherit(before)
