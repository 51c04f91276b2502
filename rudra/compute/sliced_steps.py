"""Steps of SGD on slices of the weights: while the gradient is computed, and with results in other memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from rudra.compute.runs import CACHE_LINE

if TYPE_CHECKING:
    import torch

    Settings = tuple[list[float], list[dict[str, Any]]]  # rate and options of each optimiser group

_OPTIONS = ("weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize", "fused")


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


Views = Callable[["Piece"], "tuple[torch.Tensor, torch.Tensor | None]"]
"""Returns the weights and the momentum of a piece, if there is a momentum."""


class SlicedSteps:
    """Steps of an optimiser on slices of the weights, bitwise identical to its steps on whole vectors.

    Args:
        optimizer: SGD over parts of one vector.
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
        self._set_rates, self._scaled = set_rates, scaled
        self._slices: dict[int, list[Slice]] = {}  # by their largest size
        self._momenta_apart: dict[torch.Tensor, torch.Tensor] = {}
        self._apart: tuple[torch.Tensor, Settings, list[Slice]] | None = None

    @property
    def ready(self) -> bool:
        """Whether the optimiser's momentum is allocated, if it has one."""
        state = self._optimizer.state
        moving = (group["params"] for group in self._optimizer.param_groups if group["momentum"])
        return all(state[parameter].get("momentum_buffer") is not None for each in moving for parameter in each)

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
        for cut in self._slices_of(most):
            self._step_slice(cut, gradient(cut.whole), self._in_place, settings)
            if after is not None:
                after(cut.whole)

    def begin_apart(self, weights: torch.Tensor, learning_rate: float, most: int) -> list[slice]:
        """Begins a step whose results go to other memory. Until `adopt`, the weights and the state do not change.

        It needs memory for another momentum.

        Args:
            weights: (P,) float32, receives the new weights.
            learning_rate: As for `step`.
            most: As for `step`.

        Returns:
            Slices of the weights in ascending order. `step_apart` needs each of them once, in any order.
        """
        import torch

        for parameter, state in self._optimizer.state.items():
            momentum = state.get("momentum_buffer")
            if momentum is not None and parameter not in self._momenta_apart:
                self._momenta_apart[parameter] = torch.zeros_like(momentum)
        cuts = self._slices_of(most)
        self._apart = weights, self._settings(learning_rate), cuts
        return [cut.whole for cut in cuts]

    def step_apart(self, number: int, gradient: torch.Tensor) -> None:
        """Computes a slice of the new weights from its gradient, which is only read."""
        assert self._apart is not None
        weights, settings, cuts = self._apart

        def views(piece: Piece) -> tuple[torch.Tensor, torch.Tensor | None]:
            into = weights[piece.part].copy_(piece.parameter.data[piece.inside])
            if piece.parameter not in self._momenta_apart:
                return into, None
            before = self._optimizer.state[piece.parameter]["momentum_buffer"]
            return into, self._momenta_apart[piece.parameter][piece.inside].copy_(before[piece.inside])

        self._step_slice(cuts[number], gradient, views, settings)

    def adopt(self) -> None:
        """Continues with the momentum of the step that `begin_apart` began. Then the rule moves to the new weights."""
        for parameter, momentum in self._momenta_apart.items():
            state = self._optimizer.state[parameter]
            self._momenta_apart[parameter], state["momentum_buffer"] = state["momentum_buffer"], momentum

    def _in_place(self, piece: Piece) -> tuple[torch.Tensor, torch.Tensor | None]:
        momentum = self._optimizer.state[piece.parameter].get("momentum_buffer")
        return piece.parameter.data[piece.inside], None if momentum is None else momentum[piece.inside]

    def _settings(self, learning_rate: float) -> Settings:
        """Returns the rate and the options of each optimiser group."""
        rates = self._set_rates(learning_rate)
        return rates, [{key: group[key] for key in _OPTIONS} for group in self._optimizer.param_groups]

    def _step_slice(self, cut: Slice, given: torch.Tensor, views: Views, settings: Settings) -> None:
        """Steps a slice of some weights.

        Args:
            cut: The slice.
            given: Gradient of the slice.
            views: Returns the weights and the momentum to step.
            settings: Rates and options of the step.
        """
        import torch
        from torch.optim.sgd import sgd

        rates, options = settings
        for number, pieces in cut.groups:
            weights, gradients, momenta = [], [], []
            for piece in pieces:
                its_weights, momentum = views(piece)
                here = slice(piece.part.start - cut.whole.start, piece.part.stop - cut.whole.start)
                gradient = given[here]
                if self._scaled is not None:
                    gradient = torch.mul(gradient, rates[number], out=self._scaled[here])
                weights.append(its_weights)
                gradients.append(gradient)
                momenta.append(momentum)
            sgd(weights, gradients, momenta, foreach=False, **options[number])

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
