"""What faults and regrouping need of the simulation that they happen in."""

from collections.abc import Callable
from typing import Any, Protocol

from rudra.core.events import Action, Event
from rudra.roles import Machine
from rudra.simulation.actor import Actor
from rudra.simulation.costs import CostModel
from rudra.simulation.network import Network
from rudra.simulation.queue import EventQueue
from rudra.simulation.timing_only import Tensors
from topologies import Plan


class RunningSimulation(Protocol):
    """A simulation, as `rudra.simulation.driver` runs it.

    Attributes:
        actors: by role.
        queue: what happens when.
        network: between the actors.
        costs: what takes how long.
        plan: who is who.
        tensors: does what roles want done with tensors.
        do: what carries out each kind of action.
    """

    actors: dict[int, Actor]
    queue: EventQueue
    network: Network
    costs: CostModel
    plan: Plan
    tensors: Tensors
    do: dict[type[Action], Callable[[Actor, Any, float], None]]

    def handler(self, machine: Machine) -> Callable[[Event, float], list[Action]]:
        """What gives events to a machine."""

    def tick(self, actor: Actor, _: None) -> None:
        """Lets a role know that time passes."""

    def follow(self, plan: Plan) -> None:
        """From now on this is who is who."""

    def pay(self, costs: CostModel) -> None:
        """From now on computations take as long as this says."""

    def stretch(self, actor: Actor, factor: float) -> None:
        """What is left of the computation under way takes so much longer."""
