"""Updates of a bank whose learners compute by themselves, bitwise as they do without the others.

Learners of the form `graphs` have several lanes, so that they compute at the same time. Those of a loop have one.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from rudra.compute.averaging import average
from rudra.compute.bank.recording import Do, Notes
from rudra.compute.device.streams import Number
from rudra.compute.learners import OwningLearnerExecutor
from rudra.compute.replicas import AveragerExecutor
from rudra.core.actions import StepReplica
from rudra.core.buffer_names import GRADIENT, REPLICA, WEIGHTS


class LaneUpdates:
    """How these learners make an update (`Updates`).

    Args:
        learners: Executors of the learners, in learner order. The first one owns the weights.
        replicas: The same executors, if they have replicas. Otherwise empty.
        sums: Order of addition (`Plan.partial_sums`).
        lanes: Number of lanes. Learners of different lanes have models of their own.
    """

    def __init__(
        self,
        learners: Sequence[OwningLearnerExecutor],
        replicas: Sequence[AveragerExecutor],
        sums: Sequence[Sequence[int]],
        lanes: int,
    ) -> None:
        self._learners, self._replicas, self._sums = learners, replicas, sums
        self.lanes = range(1, 1 + min(lanes, len(learners)))

    def _lane(self, place: int) -> int:
        return self.lanes[place % len(self.lanes)]

    @property
    def _central(self) -> torch.Tensor:
        return self._learners[0].buffer(WEIGHTS).vector

    def gradients(self, do: Do, notes: Notes, step: int) -> None:
        after = () if self._replicas else (0,)
        for place, executor in enumerate(self._learners):
            do(self._lane(place), partial(self._gradient, executor, notes, place, step), after)

    def _gradient(self, executor: OwningLearnerExecutor, notes: Notes, place: int, step: int) -> None:
        number, source = notes.step(step), executor.source
        inputs, target = source.gathered(notes.rows[:, notes.places[place]].index_select(0, number)[0])
        source.model.bind(executor.buffer(REPLICA).vector if self._replicas else self._central)
        loss, wrong, _ = source.model.pass_to_record(inputs, target, executor.buffer(GRADIENT).vector)
        notes.losses[:, place].index_copy_(0, number, notes.row_of(loss, wrong)[None])

    def steps(self, do: Do, notes: Notes, action: StepReplica, step: int) -> None:
        first = self._learners[0].buffer(action.weights).vector if action.difference else None
        for place, executor in enumerate(self._replicas):
            work = executor.stepping(action, first, partial(notes.rates_of, step))
            if action.difference:
                do(self._lane(place), partial(self._noting, work, notes, place, step), (0,))
            else:
                do(self._lane(place), work, ())

    def _noting(self, work: Callable[[], tuple[Number, ...]], notes: Notes, place: int, step: int) -> None:
        """Makes a step, and notes the square of the distance."""
        (squares,) = work()
        assert isinstance(squares, torch.Tensor)
        notes.squares[:, place].index_copy_(0, notes.round_of(step), squares.reshape(1))

    def average(self, name: str, samples: Sequence[int]) -> None:
        vectors = [executor.buffer(name).vector for executor in self._learners]
        average(vectors[0], vectors, samples, sums=self._sums)

    def approach(self, do: Do, elasticity: float) -> None:
        for place, executor in enumerate(self._replicas):
            do(self._lane(place), partial(executor.approach_to, self._central, REPLICA, elasticity), (0,))
