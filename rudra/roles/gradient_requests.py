"""Requests for the gradient of a mini-batch, for the whole model or for its first layers.

A learner has a request as a member. The request returns the action that begins a mini-batch. The mini-batch ends with
the event `Computed` for both kinds of requests.
"""

from typing import Any

from rudra.core.actions import Action, BackpropFirstStage, Compute, Receive, RunFirstStage, Send
from rudra.core.buffer_names import ACTIVATION_GRADIENT, ACTIVATIONS
from rudra.core.events import ActivationsReady, Received, Sent
from rudra.core.messages import ActivationGradient, Activations
from rudra.core.records import Gradient
from rudra.errors import ProtocolError
from topologies import Plan

NAN = float("nan")


class WholeModel:
    """Request of a learner that has all layers: one action computes the gradient."""

    __slots__ = ()

    waiting_for = ""

    def begin(self, compute: Compute) -> Action:
        """Returns the action that begins a mini-batch."""
        return compute

    def take(self, event: Any) -> list[Action]:
        """Returns the actions after an event between the beginning of a mini-batch and its gradient."""
        raise ProtocolError(f"a learner with all layers cannot take {type(event).__name__} of a mini-batch")


class SplitCompute:
    """Request of a learner that has only the first layers (`rudra.roles.stage_server` has the last ones).

    The learner computes the activations of its layers and sends them to the stage server. The stage server returns
    their gradient, with loss and errors. The learner then computes the gradient of its own layers.

    Args:
        role: id of the learner.
        plan: roles of the run and their connections.
    """

    def __init__(self, role: int, plan: Plan) -> None:
        self._role, self._learner = role, plan.roles[role].index
        self._stage = plan.stage_of(role)
        self._name = plan.roles[self._stage].name
        self._wanted: Compute | None = None
        self._forwarded = self._shipped = False
        self._outcome: Gradient | None = None

    @property
    def waiting_for(self) -> str:
        return f"the {self._name} to return the gradient of its activations" if self._forwarded else ""

    def begin(self, compute: Compute) -> Action:
        """Returns the action that begins a mini-batch."""
        self._wanted, self._outcome = compute, None
        self._forwarded = self._shipped = False
        return RunFirstStage(compute.step, compute.work, compute.weights, ACTIVATIONS)

    def take(self, event: ActivationsReady | Sent | Received[ActivationGradient]) -> list[Action]:
        """Returns the actions after an event between the beginning of a mini-batch and its gradient."""
        assert self._wanted is not None
        if isinstance(event, ActivationsReady):
            return self._ship(self._wanted)
        if isinstance(event, Sent):
            self._shipped = True
        else:
            (self._outcome,) = event.message.gradients
        return self._go_back(self._wanted)

    def _ship(self, wanted: Compute) -> list[Action]:
        self._forwarded = True
        work = wanted.work
        about = (self._learner, work.count, wanted.step, work.first, wanted.timestamp)
        gradient = Gradient(-1, *about, -1, 1.0, NAN, NAN, work.stream)
        message = Activations(self._role, wanted.timestamp, (gradient,))
        return [Receive(ACTIVATION_GRADIENT, self._stage), Send(self._stage, message, ACTIVATIONS)]

    def _go_back(self, wanted: Compute) -> list[Action]:
        """Computes the gradient of the learner's layers once it has the gradient of the activations.

        The activations must have been delivered, because their memory is overwritten.
        """
        found = self._outcome
        if found is None or not self._shipped:
            return []
        self._wanted, self._forwarded = None, False
        outcome = (found.loss, found.errors, found.samples)
        return [
            BackpropFirstStage(
                wanted.step,
                wanted.weights,
                ACTIVATION_GRADIENT,
                wanted.gradient,
                *outcome,
                wanted.timestamp,
                wanted.time_s,
            )
        ]


_WHOLE_MODEL = WholeModel()


def request_of(role: int, plan: Plan) -> WholeModel | SplitCompute:
    """Returns the request of a learner, which depends on whether the plan has a stage server."""
    return _WHOLE_MODEL if plan.stage is None else SplitCompute(role, plan)
