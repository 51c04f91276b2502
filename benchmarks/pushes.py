"""A server for the benchmarks `requests` and `shards`, which averages and updates as in a run."""

import numpy as np

from rudra.compute.executor import Executor
from rudra.compute.flat import sha256
from rudra.compute.optim import UpdateRule
from rudra.compute.owners import ServerExecutor
from rudra.compute.vectors import Memory
from rudra.core.layout import Part
from rudra.job.tables import OptimizerTable

RATE, MOMENTUM = 1e-6, 0.9
"""Of updates."""


class UpdatingServer(ServerExecutor):
    """Averages and updates as in a run: SGD with momentum; all weights, or a part of them."""

    def __init__(self, floats: int, memory: Memory | None = None, part: slice | None = None) -> None:
        length = floats if part is None else part.stop - part.start
        Executor.__init__(self, (), length, length, 1, memory=memory)
        self._part, self._of = None if part is None else Part((part,)), floats
        self._first_sha256 = sha256(np.zeros(floats, np.float32))
        table = OptimizerTable(learning_rate=RATE, momentum=MOMENTUM)
        self._rule = UpdateRule(table, self.buffer("weights").vector)
        self.prepare()
