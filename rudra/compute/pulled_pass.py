"""Forward passes that begin while their weights arrive from a server.

A learner that waits for weights knows its next mini-batch. It begins the forward pass when the weights of the first
layers have arrived. Each layer waits for its own weights. The role gets its event only when all weights are there, as
usual. The computation that it then requests adopts the forward pass. If that computation differs from the
prediction, or if the weights do not arrive in time, the pass is dropped, and the computation is performed as usual.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from rudra.compute.arrivals import Arrivals
from rudra.compute.device.streams import Pending
from rudra.compute.early_forward import ForwardPass
from rudra.compute.gradients import BatchFigures
from rudra.compute.learners import LearnerExecutor
from rudra.compute.vectors import Buffer
from rudra.compute.waiting import NotInTime
from rudra.core.actions import Compute
from rudra.core.events import Computed
from rudra.core.work import Work
from rudra.data.samples import Batch


@dataclass(slots=True)
class PulledPass:
    """A forward pass at weights that arrive.

    Attributes:
        weights: buffer of the weights.
        version: version of the buffer when all weights are there.
        arrivals: parts of the weights that have arrived.
        step: predicted step of the next gradient.
        work: predicted work of the next gradient.
        batch: mini-batch of the pass, after the pass has begun.
        passed: the pass, after it is complete.
    """

    weights: Buffer
    version: int
    arrivals: Arrivals
    step: int
    work: Work
    batch: Batch | None = None
    passed: ForwardPass | None = None

    def need(self, stretch: slice) -> None:
        """Waits until a slice of the weights is there.

        Raises:
            NotInTime: It has not arrived in time.
        """
        while not self.arrivals.have(stretch):
            self.arrivals.wait(stretch)

    def fits(self, action: Compute, weights: Buffer) -> bool:
        """Whether this is the computation that was predicted, and the pass is complete.

        Args:
            action: the computation.
            weights: buffer of its weights.
        """
        predicted = (action.step, action.work) == (self.step, self.work)
        same = weights is self.weights and weights.version == self.version
        return predicted and same and self.passed is not None


class PullingExecutor(LearnerExecutor):
    """Executor of a learner that waits for weights from servers."""

    _computed: Compute | None = None  # the last computation
    _pulled: PulledPass | None = None
    _coming: tuple[Buffer, int, Arrivals] | None = None  # weights that will arrive, and their version

    @property
    def can_pass_early(self) -> bool:
        """Whether forward passes may begin before all their weights are there. On a device the copies of weights do."""
        plain = self.row_format is None and not self.direct and self.device.type == "cpu"
        return plain and (self._stage is not None or (self.computes_alone and self.source.can_pass_early))

    def prepare_pass(self, weights: Buffer, servers: int, arrivals: Arrivals) -> None:
        """Prepares the forward pass at weights that will arrive, if it can begin early.

        Args:
            weights: buffer that receives the weights.
            servers: number of servers that give a part of the weights.
            arrivals: parts of the weights that have arrived.
        """
        self._pulled, last = None, self._computed
        if self._stage is not None:
            self._coming = weights, weights.version + servers, arrivals
        elif last is not None and last.work.stride and self.can_pass_early and self.source.can_pass_early_now:
            version = weights.version + servers
            self._pulled = PulledPass(weights, version, arrivals, last.step + 1, last.work.after(1))

    def pass_early(self) -> None:
        """Performs the prepared forward pass, or copies, if the weights of the first layers have arrived."""
        if self._coming is not None:
            self._copy_early(*self._coming)
            return
        pulled = self._pulled
        if pulled is None or pulled.batch is not None or not pulled.arrivals.begun:
            return
        step, work = pulled.step, pulled.work
        try:
            pulled.batch = self.source.minibatch(step, work)
            pulled.passed = self.source.forward_early(step, work, pulled.batch, pulled.weights.vector, pulled.need)
        except Exception:  # the usual computation begins with all weights, and raises any other exception again
            self._pulled = None

    def _copy_early(self, weights: Buffer, version: int, arrivals: Arrivals) -> None:
        """Copies each part of the weights to the device, while the next ones arrive."""
        self._coming = None
        assert self._stage is not None
        with suppress(NotInTime):  # the next computation copies all of them
            for part in arrivals.parts:
                while not arrivals.have(part):
                    arrivals.wait(part)
                self._arriving.append(self._copying.submit(partial(self._stage.receive, weights, part)))
            self._stage.received(weights, version)

    def compute(self, action: Compute) -> Iterator[Computed | Pending]:
        self._coming = None
        return super().compute(action)

    def _gradient(self, action: Compute, weights: Buffer, gradient: Buffer, scale: float | None) -> BatchFigures:
        pulled, self._pulled = self._pulled, None
        self._computed = action
        if pulled is None or not pulled.fits(action, weights):
            return super()._gradient(action, weights, gradient, scale)
        assert pulled.passed is not None
        assert pulled.batch is not None
        about = pulled.passed, action.work, pulled.batch
        return self.source.gradient_of(*about, weights.vector, gradient.vector, self.ready)
