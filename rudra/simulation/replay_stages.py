"""Replay of mini-batches that pass through a stage server, in their recorded order.

Learners compute activations from the weights that the record names, and send them to the stage server's own machine,
which answers as in the run. With rule `merged` the order is the order of `/stages`, which is ahead of the order of
gradients at the parameter server. With rule `synchronous` every order gives bitwise identical results.
"""

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from rudra.core.actions import Action, BackpropFirstStage, Copy, Receive, RunFirstStage, Send
from rudra.core.buffer_names import ACTIVATION_GRADIENT, ACTIVATIONS, GRADIENT, WEIGHTS
from rudra.core.events import Computed, Updated
from rudra.core.messages import ActivationGradient, Activations, Rows
from rudra.core.records import Gradient
from rudra.core.work import Work
from rudra.roles.log_follower import Entry
from rudra.roles.machine import Setup
from rudra.roles.multi_owner import LOGGED
from rudra.roles.stage_server import StageServer
from rudra.simulation.driver import Simulation
from rudra.simulation.tensors import RealTensors


class AsRecorded(StageServer):
    """Stage server with rule `merged` that sends its weights at the same timestamps as in the run.

    Args:
        role: Id in the plan.
        setup: Setup of the machine.
        events: Events of the run.
    """

    def __init__(self, role: int, setup: Setup, events: Rows) -> None:
        super().__init__(role, setup)
        told = events[events["kind"] == b"stages"]
        self._then: dict[int, int] = dict(zip(told["timestamp"].tolist(), told["gradients"].tolist(), strict=True))

    def _due(self, entry: Entry) -> list[Action] | None:
        what, _, _, _, number, *_ = entry
        too_early = LOGGED[what] in (Copy, Send) and self.timestamp < self._then.get(number, 0)
        return None if too_early else super()._due(entry)

    def _stepped(self, event: Updated, now: float) -> list[Action]:
        return super()._stepped(event, now) + self._advance(now)


class ThroughStage:
    """Part of a replay that takes mini-batches through the stage server.

    Args:
        simulation: Simulation of the stage server.
        tensors: Carries out the roles' actions on tensors.
        rows: Rows of `/stages`, which give the order. None: each mini-batch runs when its gradient is needed.
        role: Role of each learner, by the learner's number.
        begin: Function that gives a learner the weights of a timestamp, and returns the work of a mini-batch.
        returned: Function that returns the stage server's latest answer to a learner's role.
    """

    def __init__(
        self,
        simulation: Simulation,
        tensors: RealTensors,
        rows: Rows | None,
        role: dict[int, int],
        begin: Callable[[int, int, int], Work],
        returned: Callable[[int], ActivationGradient],
    ) -> None:
        assert simulation.plan.stage is not None
        self._simulation, self._tensors, self._stage = simulation, tensors, simulation.plan.stage
        self._rows = None if rows is None else deque(rows)
        self._role, self._begin, self._returned = role, begin, returned
        self._ahead: dict[tuple[int, int], Computed] = {}  # by learner and step

    def gradient(self, learner: int, step: int, timestamp: int) -> Computed:
        """Computes a learner's gradient from the weights of a timestamp, unless it is already computed.

        The result is in the learner's buffer `ahead` of that step.
        """
        rows = self._rows
        while (learner, step) not in self._ahead:
            if rows is None:
                self._take([(learner, step, timestamp)])
            elif rows:
                self._next(rows)
            else:
                break
        return self._ahead.pop((learner, step), Computed(-1, 0.0, 0.0, 0))

    def finish(self) -> None:
        """Runs mini-batches that the stage server processed but the parameter server never applied."""
        while self._rows:
            self._next(self._rows)

    def _next(self, rows: deque[np.void]) -> None:
        """Runs the next batch. Each learner of a group has a part of it."""
        first = rows[0]["timestamp"]
        batch = []
        while rows and rows[0]["timestamp"] == first:
            batch.append(rows.popleft())
        self._take([(int(row["learner"]), int(row["step"]), int(row["front"])) for row in batch])

    def _take(self, batch: Sequence[tuple[int, int, int]]) -> None:
        for learner, step, timestamp in batch:
            self._ship(learner, step, timestamp)
        self._simulation.queue.run()
        for learner, step, _ in batch:
            self._go_back(learner, step)

    def _ship(self, learner: int, step: int, timestamp: int) -> None:
        role, simulation = self._role[learner], self._simulation
        work = self._begin(role, step, timestamp)
        self._tensors.perform(role, RunFirstStage(step, work, WEIGHTS, ACTIVATIONS), 0.0)
        about = Gradient(-1, learner, work.count, step, work.first, timestamp, -1, 1.0, 0.0, 0.0, work.stream)
        message = Activations(role, timestamp, (about,))
        actor, now = simulation.actors[role], simulation.now
        simulation.network.receive(actor, Receive(ACTIVATION_GRADIENT, self._stage), now)
        simulation.network.send(actor, Send(self._stage, message, ACTIVATIONS), now)

    def _go_back(self, learner: int, step: int) -> None:
        role = self._role[learner]
        (found,) = self._returned(role).gradients
        backward = BackpropFirstStage(
            step, WEIGHTS, ACTIVATION_GRADIENT, ahead(step), found.loss, found.errors, found.samples
        )
        computed = self._tensors.perform(role, backward, 0.0)
        assert isinstance(computed, Computed)
        self._ahead[learner, step] = computed
        self._tensors.posted(role, WEIGHTS)


def ahead(step: int) -> str:
    """Returns the name of a learner's buffer for the gradient of a mini-batch that is not pushed yet."""
    return f"{GRADIENT} of {step}"
