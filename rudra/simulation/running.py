"""Interface of a simulation for faults and regrouping."""

from collections.abc import Callable
from typing import Any, Protocol

from rudra.core.actions import Action
from rudra.core.events import Event
from rudra.roles import Machine
from rudra.simulation.actor import Actor
from rudra.simulation.costs import CostModel
from rudra.simulation.network import Network
from rudra.simulation.queue import EventQueue
from rudra.simulation.timing_only import Tensors
from topologies import Plan


class RunningSimulation(Protocol):
    """Simulation that `rudra.simulation.driver` runs.

    Attributes:
        actors: Actors by role.
        queue: Future events.
        network: Network between the actors.
        costs: Cost model.
        plan: Roles and their ranks.
        tensors: Carries out the roles' actions on tensors.
        do: Function that carries out each kind of action.
    """

    actors: dict[int, Actor]
    queue: EventQueue
    network: Network
    costs: CostModel
    plan: Plan
    tensors: Tensors
    do: dict[type[Action], Callable[[Actor, Any, float], None]]

    def handler(self, machine: Machine) -> Callable[[Event, float], list[Action]]:
        """Returns the function that passes events to a machine."""

    def tick(self, actor: Actor, _: None) -> None:
        """Notifies a role that time has passed."""

    def follow(self, plan: Plan) -> None:
        """Adopts a new plan."""

    def pay(self, costs: CostModel) -> None:
        """Uses another cost model from now on."""

    def stretch(self, actor: Actor, factor: float) -> None:
        """Multiplies the remaining time of the current computation by `factor`."""
