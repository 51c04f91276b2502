"""Forward passes that begin while their weights arrive from a server.

A learner that waits for weights knows its next mini-batch. It begins the forward pass when the weights of the first
layers have arrived. Each layer waits for its own weights. The role gets its event only when all weights are there, as
usual. The computation that it then requests adopts the forward pass. If that computation differs from the
prediction, or if the weights do not arrive in time, the pass is dropped, and the computation is performed as usual.
"""

from dataclasses import dataclass

from rudra.compute.arrivals import Arrivals
from rudra.compute.early_forward import ForwardPass
from rudra.compute.gradients import BatchFigures
from rudra.compute.learners import LearnerExecutor
from rudra.compute.vectors import Buffer
from rudra.core.actions import Compute
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

    @property
    def can_pass_early(self) -> bool:
        """Whether forward passes may begin before all their weights are there."""
        plain = self._stage is None and self.row_format is None and not self.direct
        return plain and self.device.type == "cpu" and self.source.can_pass_early

    def prepare_pass(self, weights: Buffer, servers: int, arrivals: Arrivals) -> None:
        """Prepares the forward pass at weights that will arrive, if it can begin early.

        Args:
            weights: buffer that receives the weights.
            servers: number of servers that give a part of the weights.
            arrivals: parts of the weights that have arrived.
        """
        self._pulled, last = None, self._computed
        if last is not None and last.work.stride and self.can_pass_early and self.source.can_pass_early_now:
            version = weights.version + servers
            self._pulled = PulledPass(weights, version, arrivals, last.step + 1, last.work.after(1))

    def pass_early(self) -> None:
        """Performs the prepared forward pass, if the weights of the first layers have arrived."""
        pulled = self._pulled
        if pulled is None or pulled.batch is not None or not pulled.arrivals.begun:
            return
        step, work = pulled.step, pulled.work
        try:
            pulled.batch = self.source.minibatch(step, work)
            pulled.passed = self.source.forward_early(step, work, pulled.batch, pulled.weights.vector, pulled.need)
        except Exception:  # the usual computation begins with all weights, and raises any other exception again
            self._pulled = None

    def _gradient(self, action: Compute, weights: Buffer, gradient: Buffer) -> BatchFigures:
        pulled, self._pulled = self._pulled, None
        self._computed = action
        if pulled is None or not pulled.fits(action, weights):
            return super()._gradient(action, weights, gradient)
        assert pulled.passed is not None
        assert pulled.batch is not None
        about = pulled.passed, action.work, pulled.batch
        return self.source.gradient_of(*about, weights.vector, gradient.vector, self.ready)
