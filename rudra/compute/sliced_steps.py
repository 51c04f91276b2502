"""Steps on slices of the weights: while the gradient is computed, and with results in other memory.

The optimisers step each element separately. So a copy of the optimiser that has only the pieces of parameters in a
slice, and views of their state, steps the slice. The count of steps is one number for a whole parameter. Each slice
increases a copy of it.
"""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from rudra.compute.runs import CACHE_LINE

if TYPE_CHECKING:
    import torch

    State = dict[str, torch.Tensor]
    Settings = tuple[list[float], list[dict[str, Any]]]  # rate and options of each optimiser group


class Piece(NamedTuple):
    """The common elements of a slice of the weights and a parameter.

    Attributes:
        parameter: The parameter.
        part: Slice of the weights.
        inside: The same slice, of the parameter.
    """

    parameter: torch.nn.Parameter
    part: slice
    inside: slice


class Slice(NamedTuple):
    """A slice of the weights that is stepped at once.

    Attributes:
        whole: The slice.
        groups: Number of each optimiser group with parameters in it, and their pieces.
    """

    whole: slice
    groups: list[tuple[int, list[Piece]]]


Views = Callable[["Piece"], "tuple[torch.Tensor, State]"]
"""Returns the weights of a piece, and the state of its parameter, from which the step begins."""


class SlicedSteps:
    """Steps of an optimiser on slices of the weights, bitwise identical to its steps on whole vectors.

    Args:
        optimizer: One of torch's optimisers, over parts of one vector.
        places: Slice of the vector for each parameter of the optimiser.
        set_rates: Sets and returns the rate of each optimiser group for a learning rate.
        scaled: (P,) float32, room for gradients that are scaled by these rates first. None: they are not scaled.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        places: Mapping[torch.nn.Parameter, slice],
        set_rates: Callable[[float], list[float]],
        scaled: torch.Tensor | None,
    ) -> None:
        self._optimizer, self._places = optimizer, places
        self._of_slice = copy.copy(optimizer)
        self._of_slice.state, self._of_slice.param_groups = defaultdict(dict), []
        self._step = inspect.unwrap(type(optimizer).step)  # without torch's profiler, which takes longer than a slice
        self._set_rates, self._scaled = set_rates, scaled
        self._slices: dict[int, list[Slice]] = {}  # by their largest size
        self._state_apart: dict[torch.Tensor, State] = {}
        self._apart: tuple[torch.Tensor, Settings, list[Slice]] | None = None

    @property
    def ready(self) -> bool:
        """Whether the optimiser's state is allocated, if it has one."""
        import torch

        plain = isinstance(self._optimizer, torch.optim.SGD)  # it has no state without momentum
        moving = (group["params"] for group in self._optimizer.param_groups if not plain or group["momentum"])
        return all(self._state_of(parameter) for parameters in moving for parameter in parameters)

    def step(
        self,
        gradient: Callable[[slice], torch.Tensor],
        learning_rate: float,
        most: int,
        after: Callable[[slice], None] | None = None,
    ) -> None:
        """Updates the weights, for a caller that computes the gradient during the step.

        Args:
            gradient: Returns a slice of the gradient, read-only and valid until the next call. Slices are requested in
                ascending order. The weights of a slice are not read or changed before its request.
            learning_rate: Rate of this step.
            most: Largest number of elements in a slice.
            after: Called with each slice after its step, while the slice is in the cache.
        """
        settings = self._settings(learning_rate)
        counts: dict[torch.Tensor, State] = {}

        def views(piece: Piece) -> tuple[torch.Tensor, State]:
            state = self._state_of(piece.parameter)
            counts[piece.parameter] = {key: value.clone() for key, value in state.items() if value.dim() == 0}
            return piece.parameter.data[piece.inside], _at(piece, state) | counts[piece.parameter]

        for cut in self._slices_of(most):
            self._step_slice(cut, gradient(cut.whole), views, settings)
            if after is not None:
                after(cut.whole)
        for parameter, state in counts.items():
            for key, value in state.items():
                self._optimizer.state[parameter][key].copy_(value)

    def step_whole(self) -> None:
        """Updates the weights with the gradients in the optimiser's parameters, as its own `step` does."""
        import torch

        with torch.no_grad():
            self._step(self._optimizer)

    def begin_apart(self, weights: torch.Tensor, learning_rate: float, most: int) -> list[slice]:
        """Begins a step whose results go to other memory. Until `adopt`, the weights and the state do not change.

        It needs memory for another state.

        Args:
            weights: (P,) float32, receives the new weights.
            learning_rate: As for `step`.
            most: As for `step`.

        Returns:
            Slices of the weights in ascending order. `step_apart` needs each of them once, in any order.
        """
        import torch

        for parameter in self._places:
            if parameter not in self._state_apart:
                state = self._state_of(parameter)
                self._state_apart[parameter] = {key: torch.zeros_like(value) for key, value in state.items()}
        self._apart = weights, self._settings(learning_rate), self._slices_of(most)
        return self.slices(most)

    def slices(self, most: int) -> list[slice]:
        """Returns the slices, of at most `most` elements, in which the weights are stepped, in ascending order."""
        return [cut.whole for cut in self._slices_of(most)]

    def step_apart(self, number: int, gradient: torch.Tensor) -> None:
        """Computes a slice of the new weights from its gradient, which is only read."""
        assert self._apart is not None
        weights, settings, cuts = self._apart

        def views(piece: Piece) -> tuple[torch.Tensor, State]:
            into = weights[piece.part].copy_(piece.parameter.data[piece.inside])
            state = _at(piece, self._state_apart[piece.parameter])
            for key, before in _at(piece, self._state_of(piece.parameter)).items():
                state[key].copy_(before)
            return into, state

        self._step_slice(cuts[number], gradient, views, settings)

    def adopt(self) -> None:
        """Continues with the state of the step that `begin_apart` began. Then the rule moves to the new weights."""
        for parameter, state in self._state_apart.items():
            own = self._optimizer.state[parameter]
            for key, value in state.items():
                state[key], own[key] = own[key], value

    def _state_of(self, parameter: torch.Tensor) -> State:
        """Returns the tensors in the state of a parameter."""
        state = self._optimizer.state.get(parameter, {})
        return {key: value for key, value in state.items() if value is not None}

    def _settings(self, learning_rate: float) -> Settings:
        """Returns the rate and the options of each optimiser group."""
        rates = self._set_rates(learning_rate)
        return rates, [{**group} for group in self._optimizer.param_groups]

    def _step_slice(self, cut: Slice, given: torch.Tensor, views: Views, settings: Settings) -> None:
        """Steps a slice of some weights.

        Args:
            cut: The slice.
            given: Gradient of the slice.
            views: Returns the weights and the state to step.
            settings: Rates and options of the step.
        """
        import torch

        rates, options = settings
        self._of_slice.state.clear()
        self._of_slice.param_groups.clear()
        for number, pieces in cut.groups:
            parameters = []
            for piece in pieces:
                here = slice(piece.part.start - cut.whole.start, piece.part.stop - cut.whole.start)
                weights, state = views(piece)
                weights.grad = given[here]
                if self._scaled is not None:
                    weights.grad = torch.mul(weights.grad, rates[number], out=self._scaled[here])
                self._of_slice.state[weights] = state
                parameters.append(weights)
            self._of_slice.param_groups.append({**options[number], "params": parameters})
        with torch.no_grad():
            self._step(self._of_slice)

    def _slices_of(self, most: int) -> list[Slice]:
        if most not in self._slices:
            self._slices[most] = list(self._cut(most))
        return self._slices[most]

    def _cut(self, most: int) -> Iterator[Slice]:
        """Yields slices of the weights. As for parts, cuts do not change the arithmetic of the kernels."""
        places = sorted((place.start, place.stop) for place in self._places.values())
        cuts = [0]
        for start, stop in places:
            while stop - cuts[-1] > most:
                cuts.append(start + max(0, cuts[-1] + most - start) // CACHE_LINE * CACHE_LINE)
        cuts.append(places[-1][1])
        for whole in (slice(first, last) for first, last in pairwise(cuts)):
            groups = []
            for number, group in enumerate(self._optimizer.param_groups):
                pieces = []
                for parameter in group["params"]:
                    place = self._places[parameter]
                    part = slice(max(place.start, whole.start), min(place.stop, whole.stop))
                    if part.start < part.stop:
                        pieces.append(Piece(parameter, part, slice(part.start - place.start, part.stop - place.start)))
                if pieces:
                    groups.append((number, pieces))
            yield Slice(whole, groups)


def _at(piece: Piece, state: State) -> State:
    """Returns views of the state of a piece. Counts are whole."""
    return {key: value if value.dim() == 0 else value[piece.inside] for key, value in state.items()}
