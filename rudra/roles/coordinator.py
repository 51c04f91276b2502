"""The coordinator: a parameter server that also deals the samples out, to whoever asks for work.

Source: Hogbatch (Ma and Rusu 2020), §5.1, Algorithms 1 and 2: `ScheduleWork` is the last gradient of a batch, or the
beginning; `ExecuteWork` is `AssignWork`, which newer weights follow. An epoch ends when no sample is left and all
workers are done, which is when the last gradient is applied; until then who asks for work waits. A gradient of a worker
that has died counts if it is applied by then, else its samples are served again.

Workers may test the weights of each epoch's end, too (§5.2, "loss computation"). All of them are free then, and until
the test is over nothing else happens: no work is given, whoever dies is missed afterwards, a wish to stop waits, and
the clock of the training stands still.
"""

import numpy as np

from rudra.core import records
from rudra.core.events import WEIGHTS, Action, Send
from rudra.core.messages import AssignWork
from rudra.roles.ledger import Ledger
from rudra.roles.server import NO_WEIGHTS, ParameterServer


class Coordinator(ParameterServer):
    """The owner of the weights, and of the order of the samples."""

    def _answer(self, child: int) -> list[Action]:
        """Gives who asks work, if any is left and no update is due; else it waits."""
        ledger = self.ledger
        assert ledger.dealer is not None
        work = None if self._update_due else ledger.dealer.deal(self.plan.roles[child].index)
        if work is None:
            return []
        _, held = self._pulls.pop(child)
        assign = work_for(child, [(work.first, work.count)], ledger)
        if not self._lacks_weights(held):
            return [assign]
        self._lent += 1
        return [assign, Send(child, self._stamp.weights, WEIGHTS)]

    def hold_back(self) -> None:
        """Gives no work to those who wait, until `deal_anew`."""
        self._pulls.clear()

    def deal_anew(self) -> list[Action]:
        """Gives all workers work as if training began here; what they had is served again."""
        assert self.ledger.dealer is not None
        for learner in self.plan.learners:
            self.ledger.dealer.recall(self.plan.roles[learner].index)
        self._pulls = dict.fromkeys(self.membership.children, (self.ledger.timestamp, NO_WEIGHTS))
        return self._answer_all()


def work_for(worker: int, batches: list[tuple[int, int]], ledger: Ledger) -> Send:
    """Assigns batches to a worker, each its first sample and the number of samples."""
    rate, rows = ledger.rate_for(batches[0][1]), np.array(batches, records.WORK)
    return Send(worker, AssignWork(ledger.id, ledger.timestamp, round(ledger.clock.start_time * 1e9), rate, rows))
