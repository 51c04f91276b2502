"""Updates of a bank that makes each of them by a handful of operations, for all learners at once.

Each list of vectors is one (m, size) matrix for torch's operations on lists. The form `fused`
computes the gradients. The last bits may differ from the results of a learner by itself.
"""

from collections.abc import Sequence
from functools import partial

import torch

from rudra.compute.averaging import average
from rudra.compute.bank.fused import Operations, fused_gradients
from rudra.compute.bank.recording import Do, Notes
from rudra.compute.joined_steps import JoinedSteps
from rudra.compute.learners import OwningLearnerExecutor
from rudra.compute.replicas import AveragerExecutor
from rudra.core.actions import StepReplica
from rudra.core.buffer_names import GRADIENT, REPLICA, WEIGHTS
from rudra.data.trees import mapped


class MatrixUpdates:
    """How all learners of a fused bank make an update (`Updates`).

    Args:
        learners: Executors of the learners, in learner order. The first one owns the weights. Their mini-batches have
            the same size, and the states of their optimisers exist.
        replicas: The same executors, if they have replicas. Otherwise empty.
        sums: Order of addition of gradients (`Plan.partial_sums`).
        joint: Whether the mean gradient of all learners replaces the gradient of each, as for `Bank`.
    """

    lanes = range(1, 2)

    def __init__(
        self,
        learners: Sequence[OwningLearnerExecutor],
        replicas: Sequence[AveragerExecutor],
        sums: Sequence[Sequence[int]],
        *,
        joint: bool,
    ) -> None:
        self._learners, self._first, self._replicas = learners, learners[0], replicas
        self._sums, self._joint = sums, joint
        self._joined = JoinedSteps([each.rules[REPLICA] for each in replicas]) if replicas else None

    def _vectors(self, name: str) -> list[torch.Tensor]:
        return [each.buffer(name).vector for each in self._learners]

    def _trained(self, name: str) -> list[torch.Tensor]:
        return [vector[: self._first.parameters] for vector in self._vectors(name)]

    def _of_first(self, name: str) -> list[torch.Tensor]:
        return [self._first.buffer(name).vector[: self._first.parameters]] * len(self._learners)

    def gradients(self, do: Do, notes: Notes, step: int) -> None:
        do(1, partial(self._gradients, notes, step), () if self._replicas else (0,))

    def _gradients(self, notes: Notes, step: int) -> None:
        m, number, source = len(self._learners), notes.step(step), self._first.source
        batch = source.gathered(notes.rows.index_select(0, number)[0])
        inputs, target = (mapped(lambda tensor: tensor.unflatten(0, (m, -1)), each) for each in batch)
        own = Operations([0] * m, source.model.device)
        outs, rows = self._vectors(GRADIENT), 1 if self._joint else m
        noted = fused_gradients(source.model, self._weights, inputs, target, outs[:rows], [0] * m, own)
        if own.drew:
            raise RuntimeError("the model draws random numbers")
        if outs[rows:]:
            torch._foreach_copy_(outs[rows:], [outs[0]] * (m - rows))
        notes.losses.index_copy_(0, number, torch.stack([notes.row_of(*each) for each in noted])[None])

    @property
    def _weights(self) -> list[torch.Tensor]:
        """Weights of each learner. A single vector applies to all."""
        rows = 1 if self._joint else len(self._learners)
        return self._vectors(REPLICA) if self._replicas else [self._first.buffer(WEIGHTS).vector] * rows

    def steps(self, do: Do, notes: Notes, action: StepReplica, step: int) -> None:
        do(1, partial(self._step, notes, action, step), (0,) if action.difference else ())

    def _step(self, notes: Notes, action: StepReplica, step: int) -> None:
        """Steps all replicas as `ElasticExecutor.step` does."""
        early = action.elasticity is not None
        if action.difference and early:
            self._differ(notes, action, step)
        assert self._joined is not None
        self._joined.step(self._vectors(GRADIENT), action.learning_rate, notes.rates_of(step))
        if action.difference and not early:
            self._differ(notes, action, step)
        elif action.elasticity:
            torch._foreach_add_(self._trained(REPLICA), self._trained(action.difference), alpha=action.elasticity)
        if self._first.size > self._first.parameters:
            gradients = self._behind(GRADIENT)
            for name in (REPLICA, *([action.difference] if action.difference else [])):
                torch._foreach_copy_(self._behind(name), gradients)

    def _behind(self, name: str) -> list[torch.Tensor]:
        """Returns the buffers of the models, behind their parameters."""
        return [vector[self._first.parameters :] for vector in self._vectors(name)]

    def _differ(self, notes: Notes, action: StepReplica, step: int) -> None:
        """Computes the differences between the first learner's weights and all replicas, and notes their squares."""
        differences = self._trained(action.difference)
        torch._foreach_copy_(differences, self._of_first(action.weights))
        torch._foreach_sub_(differences, self._trained(REPLICA))
        squares = torch.stack(torch._foreach_norm(differences)).double().square()
        notes.squares.index_copy_(0, notes.round_of(step), squares[None])

    def average(self, name: str, samples: Sequence[int]) -> None:
        vectors = self._vectors(name)  # added in the plan's order: torch's mean has an order of its own
        average(vectors[0], vectors, samples, sums=self._sums)

    def approach(self, do: Do, elasticity: float) -> None:
        do(1, partial(self._approach, elasticity), (0,))

    def _approach(self, elasticity: float) -> None:
        torch._foreach_lerp_(self._trained(REPLICA), self._of_first(WEIGHTS), elasticity)
