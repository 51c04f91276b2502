"""The coordinator: a parameter server that also deals the samples out, to whoever asks for work.

Source: Hogbatch (Ma and Rusu 2020), §5.1, Algorithms 1 and 2: `ScheduleWork` is the last gradient of a batch, or the
beginning; `ExecuteWork` is `Kind.EXECUTE`, which newer weights follow. An epoch ends when no sample is left and all
workers are done, which is when the last gradient is applied; until then who asks for work waits. A gradient of a worker
that has died counts if it is applied by then, else its samples are served again.
"""

import numpy as np

from rudra.core import records
from rudra.core.events import WEIGHTS, Action, Send
from rudra.core.messages import Kind, Message
from rudra.roles.server import ParameterServer, ServerState


class Coordinator(ParameterServer):
    """The owner of the weights, and of the order of the samples."""

    def _begin(self, now: float) -> list[Action]:
        waited = self.state is ServerState.INITIALISING
        actions = super()._begin(now)
        if waited and self.state is ServerState.TRAINING:
            timestamp = self.ledger.timestamp
            self._pulls = dict.fromkeys(self.roll.children, (timestamp, timestamp))
            actions += self._answer_all()
        return actions

    def _answer(self, child: int) -> list[Action]:
        """Gives who asks work, if any is left and no update is due; else it waits."""
        ledger = self.ledger
        assert ledger.dealer is not None
        work = None if self._update_due else ledger.dealer.deal(self.plan.roles[child].index)
        if work is None:
            return []
        _, held = self._pulls.pop(child)
        rows = np.array([(work.first, work.count)], records.WORK)
        execute = Send(child, Message(Kind.EXECUTE, self.id, ledger.timestamp, rows=rows))
        if held in (ledger.timestamp, NO_WEIGHTS):
            return [execute]
        self._lent += 1
        return [execute, Send(child, self._weights, WEIGHTS)]

    def hold_back(self) -> None:
        """Gives no work to those who wait, until `deal_anew`."""
        self._pulls.clear()

    def deal_anew(self) -> list[Action]:
        """Gives all workers work as if training began here; what they had is served again."""
        assert self.ledger.dealer is not None
        for learner in self.plan.learners:
            self.ledger.dealer.recall(self.plan.roles[learner].index)
        self._pulls = dict.fromkeys(self.roll.children, (self.ledger.timestamp, NO_WEIGHTS))
        return self._answer_all()

    def _go_on_without(self, role: int, name: str, now: float) -> list[Action]:
        """The same; first who waits gets work, so that a loss comes between two gradients, as in a replay."""
        free = self.state is ServerState.TRAINING and not self._update_due
        return (self._answer_all() if free else []) + super()._go_on_without(role, name, now)

    def _forget(self, role: int, child: int) -> list[Action]:
        assert self.ledger.dealer is not None
        self.lost += self.buffers.mute(child)
        self.ledger.dealer.recall(self.plan.roles[role].index, dead=True)
        return super()._forget(role, child)


NO_WEIGHTS = -1
"""In the value of a gradient: whoever asks for work with it needs no weights."""
