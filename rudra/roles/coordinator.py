"""The coordinator: a parameter server that also assigns samples to workers that request work.

Source: Hogbatch (Ma and Rusu 2020), §5.1, Algorithms 1 and 2. `ScheduleWork` is the last gradient of a batch, or the
beginning. `ExecuteWork` is `AssignWork`, and newer weights follow it. An epoch ends when no sample is left and the last
gradient is applied. Until then a worker that requests work waits. If a worker dies, its gradients count if they are
applied already. Otherwise their samples are assigned again.

Workers may also evaluate the weights at the end of each epoch (§5.2, "loss computation"). All workers are free at that
time. During the evaluation nothing else happens: no work is assigned, and deaths and a request to stop are handled
afterwards. The training clock is paused.
"""

import numpy as np

from rudra.core import records
from rudra.core.actions import Action, Send
from rudra.core.messages import AssignWork
from rudra.roles.ledger import Ledger
from rudra.roles.server import ParameterServer
from rudra.roles.weight_requests import NO_WEIGHTS


class Coordinator(ParameterServer):
    """Owner of the weights that also decides the order of the samples."""

    def _answer(self, child: int) -> list[Action]:
        """Assigns work to a worker that requested it, if any is left and no update is due. Else the worker waits."""
        ledger = self.ledger
        assert ledger.dealer is not None
        work = None if self._update_due else ledger.dealer.deal(self.plan.roles[child].index)
        if work is None:
            return []
        held = self._requests.remove(child)
        assign = work_for(child, [(work.first, work.count)], ledger)
        return [assign, self._requests.send(child)] if self._lacks_weights(held) else [assign]

    def hold_back(self) -> None:
        """Assigns no work to waiting workers until `deal_anew`."""
        self._requests.waiting.clear()

    def deal_anew(self) -> list[Action]:
        """Assigns work to all workers as if training began here. Their earlier samples are assigned again."""
        assert self.ledger.dealer is not None
        for learner in self.plan.learners:
            self.ledger.dealer.recall(self.plan.roles[learner].index)
        self._requests.waiting = dict.fromkeys(self.membership.children, (self.ledger.timestamp, NO_WEIGHTS))
        return self._answer_all()


def work_for(worker: int, batches: list[tuple[int, int]], ledger: Ledger) -> Send:
    """Assigns batches to a worker, each with its first sample and its number of samples."""
    rate, rows = ledger.rate_for(batches[0][1]), np.array(batches, records.WORK)
    return Send(worker, AssignWork(ledger.id, ledger.timestamp, round(ledger.clock.start_time * 1e9), rate, rows))
