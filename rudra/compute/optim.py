"""Update rules: torch's optimisers, applied to one flat vector."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

from rudra import plugins
from rudra.core.state_names import STEP, VELOCITY
from rudra.errors import ConfigError, meant
from rudra.job.tables import OPTIMIZERS, WITH_MOMENTUM, OptimizerTable, ParameterGroup

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from rudra.compute.rows import RowFormat, RowGradient
    from rudra.core.layout import Entry

    Piece = tuple[torch.nn.Parameter, slice, slice]  # slices of the weights, and of the parameter
    Slice = tuple[slice, list[tuple[int, list[Piece]]]]  # slice of the weights, and its pieces in each group
    Settings = tuple[list[float], list[dict[str, Any]]]  # rate and options of each optimiser group

_NOT_OPTIONS = {"params", "lr", "momentum", "weight_decay", "fused", "foreach", "capturable", "differentiable"}
_STEP = ("weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize", "fused")
CACHE_LINE = 16  # elements, the unit in which torch hands a vector to its threads


class UpdateRule:
    """Update rule that applies gradients to flat weights in place.

    SGD uses torch's fused kernel and is bitwise identical to plain `torch.optim.SGD` over separate parameters. The
    fused kernel rounds differently only in the elements after the last full cache line. These use the plain kernel.
    Adam, AdamW and Adagrad are fused as well, and may differ from their plain forms in the last bit.

    Adjacent parameters of the same group of `[optimizer] groups` are stepped as one.

    With `momentum_form = "caffe"` the velocity v ← m v + α g is subtracted from the weights directly, so a new rate
    affects only new gradients. This equals torch's step at rate 1 with the rate moved into the gradient and the weight
    decay. So any rate works, even 0, and the velocity is the only state.

    Args:
        table: Table of the optimiser with its options. Learning rates are given with each step.
        weights: (P,) float32, contiguous. The rule uses this memory for its lifetime.
        layout: Entries of the weights, and perhaps of the values after them. Without it they are one unnamed tensor.
        part: Part of the layout that these weights are (`rudra.compute.parts`). None: they are all.
        rows: Row format of gradients for `step_rows`. Torch's SGD without momentum and weight decay changes only these
            rows.

    Raises:
        ConfigError: No such optimiser, unknown options, or a group of parameters that do not exist.
    """

    def __init__(
        self,
        table: OptimizerTable,
        weights: torch.Tensor,
        layout: Sequence[Entry] = (),
        part: slice | None = None,
        rows: RowFormat | None = None,
    ) -> None:
        import torch

        self.scale_invariant = table.scale_invariant
        cls, options = optimizer_of(table)
        takes = inspect.signature(cls).parameters
        fusible = table.name in OPTIMIZERS and "fused" in takes
        plain = {"foreach": False} if "foreach" in takes else {}
        parameters = [entry for entry in layout if entry.kind == "parameter"]
        self._sizes = [entry.size for entry in parameters] or [len(weights)]
        self._clip_norm = table.clip_norm
        self._caffe = table.momentum_form == "caffe" and table.momentum > 0
        scales = self._caffe or table.clip_norm is not None
        self._scaled = torch.zeros_like(weights if scales else weights[:0])  # borrowed gradients are read-only
        self._weights = weights
        self._sgd = table.name == "sgd"
        self._slices: dict[int, list[Slice]] = {}  # by their largest size
        self._momenta_apart: dict[torch.Tensor, torch.Tensor] = {}
        self._apart: tuple[torch.Tensor, Settings, list[Slice]] = weights[:0], ([], []), []
        self._places: dict[torch.nn.Parameter, slice] = {}
        self._numbered: dict[int, tuple[torch.nn.Parameter, slice, slice]] = {}  # number -> whole parameter, and slices
        self._factors: list[float] = []  # of each optimiser group
        groups: list[dict[str, Any]] = []
        tail = CACHE_LINE if self._sgd else 1
        runs = runs_of(table.groups, parameters) if parameters else [(_REST, slice(0, len(weights)))]
        first = 0 if part is None else part.start
        number = 0
        self._rows, self._row_form = torch.nn.Parameter(weights[:0]), rows
        row_group = _REST
        if rows is not None:
            self._rows = torch.nn.Parameter(weights[rows.part].view(rows.features, rows.width))
            runs = list(runs)
            row_group = next(group for group, run in runs if run.start <= rows.start < run.stop)
            runs = _around(runs, rows.part)
        for (group, fused), wholes in _parts(runs, tail).items():
            made: list[torch.nn.Parameter] = []
            for whole in wholes:
                here = slice(max(whole.start - first, 0), min(whole.stop - first, len(weights)))
                if here.start < here.stop:
                    made.append(parameter := torch.nn.Parameter(weights[here]))
                    self._places[parameter] = here
                    inside = slice(first + here.start - whole.start, first + here.stop - whole.start)
                    self._numbered[number] = parameter, whole, inside
                number += 1
            if made:
                flags = {"fused": fused} if fusible else {}
                own = {} if group.weight_decay is None else {"weight_decay": group.weight_decay}
                groups.append({"params": made, **flags, **own})
                self._factors.append(group.rate_factor)
        self._count = number
        if rows is not None:
            groups.append({"params": [self._rows], "fused": False})
            self._factors.append(row_group.rate_factor)
        try:
            for fused in {fusible, False}:  # an option may be accepted and fail in the first step
                trial = torch.nn.Parameter(torch.zeros(CACHE_LINE))
                trial.grad = torch.zeros(CACHE_LINE)
                flags = {"fused": fused} if fusible else {}
                cls([trial], lr=table.learning_rate, **plain, **flags, **options).step()
            if table.name not in OPTIMIZERS:
                _check_own(lambda trial: cls(trial, lr=table.learning_rate, **options))
            self.optimizer: torch.optim.Optimizer = cls(groups, lr=table.learning_rate, **plain, **options)
        except Exception as error:  # torch checks some options, and fails on others with any exception
            raise ConfigError(f"[optimizer] {table.name}: {' '.join(str(error).split())}") from None
        self._decays = [group.get("weight_decay") for group in self.optimizer.param_groups]

    def step(
        self, gradient: torch.Tensor, learning_rate: float, norms: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> None:
        """Updates the weights.

        Args:
            gradient: (P,) float32, read only, and not needed after this returns.
            learning_rate: Rate of this step, including all modulation.
            norms: Norms of other owners' gradients, as `norms` returns them: for parameters before and after these.
        """
        if self._clip_norm is not None:
            gradient = self._clip(gradient, self._clip_norm, norms)
        for group, rate in zip(self.optimizer.param_groups, self._set_rates(learning_rate), strict=True):
            for parameter in group["params"]:
                part = self._places[parameter]
                parameter.grad = self._times(rate, gradient[part], part) if self._caffe else gradient[part]
        self.optimizer.step()
        for parameter in self._places:
            parameter.grad = None

    def step_rows(self, gradient: RowGradient, learning_rate: float) -> None:
        """Updates the weights as `step` does, with a gradient in rows."""
        import torch

        form, rows = gradient.row_format, gradient.rows
        rate = self._set_rates(learning_rate)[-1]
        for parameter, part in self._places.items():
            before = form.features * form.width if part.start > form.start else 0
            parameter.grad = gradient.rest[part.start - before : part.stop - before]
        if rows is None:
            self._rows.grad = gradient.whole
        else:
            # Equals torch's SGD for these rows, but skips its 30 µs of checks for other work.
            places, shape = rows.indices.long()[None], self._rows.shape
            sparse = torch.sparse_coo_tensor(places, rows.values, shape, check_invariants=False, is_coalesced=True)
            self._rows.data.add_(sparse, alpha=-rate)
        self.optimizer.step()
        for parameter in (*self._places, self._rows):
            parameter.grad = None

    def _set_rates(self, learning_rate: float) -> list[float]:
        """Sets and returns the rate of each optimiser group."""
        rates = [learning_rate * factor for factor in self._factors]
        for group, rate, decay in zip(self.optimizer.param_groups, rates, self._decays, strict=True):
            group["lr"] = 1.0 if self._caffe else rate
            if self._caffe:
                group["weight_decay"] = decay * rate
        return rates

    @property
    def sliceable(self) -> bool:
        """Whether `step_in_slices` is possible now: SGD with allocated momentum, and no norm needed first."""
        state = self.optimizer.state
        moving = [group["params"] for group in self.optimizer.param_groups if self._sgd and group["momentum"]]
        ready = all(state[parameter].get(VELOCITY) is not None for each in moving for parameter in each)
        return self._sgd and self._clip_norm is None and ready

    def step_in_slices(
        self,
        gradient: Callable[[slice], torch.Tensor],
        learning_rate: float,
        most: int,
        after: Callable[[slice], None] | None = None,
    ) -> None:
        """Updates the weights, bitwise identical to `step`, for a caller that computes the gradient during the step.

        Args:
            gradient: Returns a slice of the gradient, read-only and valid until the next call. Slices are requested in
                ascending order. The weights of a slice are not read or changed before its request.
            learning_rate: Rate of this step.
            most: Largest number of elements in a slice.
            after: Called with each slice after its step, while the slice is in the cache.
        """
        settings = self._settings(learning_rate)
        momenta = {parameter: state.get(VELOCITY) for parameter, state in self.optimizer.state.items()}
        for cut in self._slices_of(most):
            self._step_slice(cut, gradient(cut[0]), self._weights, momenta, settings)
            if after is not None:
                after(cut[0])

    def begin_apart(self, weights: torch.Tensor, learning_rate: float, most: int) -> list[slice]:
        """Begins a step whose results go to other memory. Until `adopt`, the weights and the state do not change.

        It needs memory for another momentum. It is bitwise identical to `step`, and needs a rule that is `sliceable`.

        Args:
            weights: (P,) float32, receives the new weights.
            learning_rate: As for `step_in_slices`.
            most: As for `step_in_slices`.

        Returns:
            Slices of the weights in ascending order. `step_apart` needs each of them once, in any order.
        """
        import torch

        for parameter, state in self.optimizer.state.items():
            momentum = state.get(VELOCITY)
            if momentum is not None and parameter not in self._momenta_apart:
                self._momenta_apart[parameter] = torch.zeros_like(momentum)
        self._apart = weights, self._settings(learning_rate), self._slices_of(most)
        return [whole for whole, _ in self._apart[2]]

    def step_apart(self, number: int, gradient: torch.Tensor) -> None:
        """Computes a slice of the new weights from its gradient, which is only read."""
        weights, settings, cuts = self._apart
        whole, groups = cuts[number]
        weights[whole].copy_(self._weights[whole])
        for _, pieces in groups:
            for parameter, _, inside in pieces:
                if parameter in self._momenta_apart:
                    before = self.optimizer.state[parameter][VELOCITY]
                    self._momenta_apart[parameter][inside].copy_(before[inside])
        self._step_slice(cuts[number], gradient, weights, self._momenta_apart, settings)

    def adopt(self) -> None:
        """Continues with the momentum of the step that `begin_apart` began. Call `move` with the new weights."""
        for parameter, momentum in self._momenta_apart.items():
            state = self.optimizer.state[parameter]
            self._momenta_apart[parameter], state[VELOCITY] = state[VELOCITY], momentum

    def _settings(self, learning_rate: float) -> Settings:
        """Returns the rate and the options of each optimiser group."""
        rates = self._set_rates(learning_rate)
        return rates, [{key: group[key] for key in _STEP} for group in self.optimizer.param_groups]

    def _step_slice(
        self,
        cut: Slice,
        given: torch.Tensor,
        into: torch.Tensor,
        momenta: Mapping[torch.Tensor, torch.Tensor | None],
        settings: Settings,
    ) -> None:
        """Steps a slice of some weights.

        Args:
            cut: The slice and its pieces.
            given: Gradient of the slice.
            into: (P,) float32, the weights.
            momenta: Momentum of each parameter that has one.
            settings: Rates and options of the step.
        """
        from torch.optim.sgd import sgd

        (whole, groups), (rates, options) = cut, settings
        for number, pieces in groups:
            weights, gradients, moving = [], [], []
            for parameter, part, inside in pieces:
                here = slice(part.start - whole.start, part.stop - whole.start)
                weights.append(into[part])
                gradients.append(self._times(rates[number], given[here], here) if self._caffe else given[here])
                momentum = momenta.get(parameter) if options[number]["momentum"] else None
                moving.append(None if momentum is None else momentum[inside])
            sgd(weights, gradients, moving, foreach=False, **options[number])

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
            for number, group in enumerate(self.optimizer.param_groups):
                pieces = []
                for parameter in group["params"]:
                    place = self._places[parameter]
                    part = slice(max(place.start, whole.start), min(place.stop, whole.stop))
                    if part.start < part.stop:
                        pieces.append((parameter, part, slice(part.start - place.start, part.stop - place.start)))
                if pieces:
                    groups.append((number, pieces))
            yield whole, groups

    def norms(self, gradient: torch.Tensor) -> torch.Tensor:
        """Returns the norm of each parameter's gradient, (parameters,) float32."""
        import torch

        return torch.stack([torch.linalg.vector_norm(each) for each in torch.split(gradient, self._sizes)])

    def _clip(
        self, gradient: torch.Tensor, most: float, others: tuple[torch.Tensor, torch.Tensor] | None
    ) -> torch.Tensor:
        """Returns the gradient, or a copy scaled to the norm `most`.

        The result equals `clip_grad_norm_` over the parameters. If the norm is not finite, the gradient is not
        scaled, because scaling might make it zero and hide the problem from the next loss.
        """
        import torch

        if others is None:
            norm = torch.nn.utils.get_total_norm(torch.split(gradient, self._sizes))
        else:
            norm = torch.linalg.vector_norm(torch.cat([others[0], self.norms(gradient), others[1]]))
        scale = most / (norm + 1e-6)
        return self._times(scale, gradient, slice(None)) if norm.isfinite() and scale < 1 else gradient

    def _times(self, scale: float | torch.Tensor, gradient: torch.Tensor, part: slice) -> torch.Tensor:
        """Returns a part of the gradient at another scale, valid until the next call."""
        import torch

        return torch.mul(gradient, scale, out=self._scaled[part])

    def move(self, weights: torch.Tensor) -> None:
        """Continues with weights in other memory, which holds the same values."""
        self._weights = weights
        for parameter, part in self._places.items():
            parameter.data = weights[part]
        if (form := self._row_form) is not None:
            self._rows.data = weights[form.part].view(form.features, form.width)

    def reset(self) -> None:
        """Clears the state of the optimiser."""
        self.optimizer.state.clear()
        self.prepare()

    def prepare(self) -> None:
        """Allocates and touches SGD's momentum, so that the first update takes no longer than later ones.

        The first step starts from a velocity of zero. Torch does not apply dampening to that step, so with dampening,
        and in Adam and RMSprop, the first step allocates its own state.
        """
        import torch

        for group in self.optimizer.param_groups:
            if self._sgd and group["dampening"] == 0 and group["momentum"] > 0:
                for parameter in group["params"]:
                    self.optimizer.state[parameter][VELOCITY] = torch.zeros_like(parameter)

    def state(self) -> dict[str, torch.Tensor]:
        """Returns the state tensors of the optimiser by names that identify their parts of the weights."""
        import torch

        found = {}
        for number, (parameter, _, _) in self._numbered.items():
            for key, value in self.optimizer.state[parameter].items():
                if isinstance(value, torch.Tensor):
                    found[f"{key}.{number}"] = value
        return found

    @property
    def has_momentum(self) -> bool:
        """Whether this is SGD with momentum."""
        return self._sgd and bool(self.optimizer.defaults["momentum"])

    def take_over(self, state: Mapping[str, torch.Tensor], first: int = 0) -> None:
        """Takes over state that is given for a whole model, as far as this optimiser has a place for it.

        Args:
            state: Key -> a value for each parameter element of the model, or one value for all.
            first: Element of the model's vector where this rule's layout begins.
        """
        for parameter, whole, inside in self._numbered.values():
            for key, value in state.items():
                if key != VELOCITY or self.has_momentum:
                    own = value[first + whole.start : first + whole.stop][inside] if value.dim() else value
                    self.optimizer.state[parameter][key] = own.to(parameter.device, copy=True)

    def take_over_names(self, state: Mapping[str, NDArray[np.float32]]) -> None:
        """Takes over the momentum in a state with the names of `state`, if this is SGD with momentum."""
        import torch

        if self.has_momentum:
            velocity = {name: value for name, value in state.items() if name.startswith(f"{VELOCITY}.")}
            self.restore({name: torch.from_numpy(value) for name, value in velocity.items()})

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Takes over the state of all weights that `state` returned in any process, even if the rule owns only a part.

        Raises:
            ValueError: The state does not match this optimiser and these weights.
        """
        for name, value in state.items():
            key, _, number = name.rpartition(".")
            if not (number.isdigit() and int(number) < self._count):
                raise ValueError(f"optimiser state {name} does not fit")
            if int(number) not in self._numbered:  # belongs to another part
                continue
            parameter, whole, inside = self._numbered[int(number)]
            if value.numel() not in {1, whole.stop - whole.start}:
                raise ValueError(f"optimiser state {name} does not fit")
            single = value.numel() == 1 and (key == STEP or whole.stop - whole.start > 1)
            own = value.reshape(()) if single else value.reshape(-1)[inside]
            self.optimizer.state[parameter][key] = own.clone()

    def state_bytes(self) -> int:
        """Memory that the optimiser's state occupies now."""
        import torch

        values = (value for state in self.optimizer.state.values() for value in state.values())
        return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))


def optimizer_of(table: OptimizerTable) -> tuple[Any, dict[str, Any]]:
    """Returns the optimiser class of a table, and its keyword arguments except the learning rate.

    Raises:
        ConfigError: There is no such class, or it does not accept them.
    """
    import torch

    if table.name in OPTIMIZERS:
        cls = getattr(torch.optim, OPTIMIZERS[table.name])
        return uncompiled(cls), _options(table, cls)
    cls = plugins.choose("[optimizer] name", table.name, OPTIMIZERS)
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise ConfigError(f"[optimizer] name: {table.name} is not a class that inherits from torch.optim.Optimizer")
    return cls, _options(table, cls)


def _check_own(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    """Checks that a user's optimiser works on parts of a flat vector, and that a checkpoint can hold its state.

    Raises:
        ValueError: It does not, or its state contains other things than tensors.
    """
    import torch

    generator = torch.Generator().manual_seed(0)
    start, *gradients = torch.randn(4, 2 * CACHE_LINE, generator=generator).unbind()
    whole = torch.nn.Parameter(start.clone())
    halves = [torch.nn.Parameter(half.clone()) for half in torch.split(start, CACHE_LINE)]
    optimizers = [make([whole]), make(halves)]
    before = [_held(optimizer) for optimizer in optimizers]
    for gradient in gradients:
        whole.grad = gradient.clone()
        for half, part in zip(halves, torch.split(gradient, CACHE_LINE), strict=True):
            half.grad = part.clone()
        for optimizer in optimizers:
            optimizer.step()
    if not torch.equal(whole.data, torch.cat([half.data for half in halves])):
        raise ValueError(
            "its step for an element depends on other elements, but Rudra steps over parts of a flat vector; valid: "
            "optimisers that treat each element separately"
        )
    for key, value in optimizers[0].state[whole].items():
        known = isinstance(value, torch.Tensor) and value.dtype == torch.float32 and value.numel() in {1, len(whole)}
        if not known:
            raise ValueError(
                f"its state '{key}' is no float32 tensor of one number or of the parameter's shape, which a checkpoint "
                "could hold"
            )
    if [_held(optimizer) for optimizer in optimizers] != before:
        raise ValueError("a step changes more of the optimiser than its `state`, and a checkpoint holds only `state`")


def _held(optimizer: torch.optim.Optimizer) -> list[str]:
    """Describes the attributes of an optimiser outside its state, to detect changes."""
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    own = {key: value for key, value in vars(optimizer).items() if isinstance(value, bool | int | float | str | list)}
    return [repr(groups), repr({key: value for key, value in own.items() if key != "param_groups"})]


def uncompiled(cls: Any) -> Any:
    """Returns an optimiser without torch's compiler wrappers, whose import takes over a second."""
    import torch

    bare = {name: inspect.unwrap(getattr(cls, name)) for name in ("add_param_group", "zero_grad")}
    return type(cls.__name__, (cls,), bare | {"step": torch.no_grad()(inspect.unwrap(cls.step))})


_REST = ParameterGroup(parameters=("*",))


def runs_of(groups: Sequence[ParameterGroup], layout: Sequence[Entry]) -> Iterator[tuple[ParameterGroup, slice]]:
    """Yields the longest possible slices of the flat vector whose parameters belong to one group.

    Raises:
        ConfigError: A group names parameters that do not exist.
    """
    parameters = [entry for entry in layout if entry.kind == "parameter"]
    names = [entry.name for entry in parameters]
    for group in groups:
        for pattern in group.parameters:
            if not any(fnmatchcase(name, pattern) for name in names):
                some = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
                raise ConfigError(f"[optimizer] groups: '{pattern}' matches no parameter; there are {some}")

    def group_of(entry: Entry) -> ParameterGroup:
        fitting = (g for g in groups if any(fnmatchcase(entry.name, pattern) for pattern in g.parameters))
        return next(fitting, _REST)

    for group, run in groupby(parameters, group_of):
        entries = list(run)
        yield group, slice(entries[0].offset, entries[-1].offset + entries[-1].size)


def _around(runs: Iterable[tuple[ParameterGroup, slice]], hole: slice) -> Iterator[tuple[ParameterGroup, slice]]:
    """Yields the runs without the elements in the hole."""
    for group, run in runs:
        for piece in (slice(run.start, min(run.stop, hole.start)), slice(max(run.start, hole.stop), run.stop)):
            if piece.start < piece.stop:
                yield group, piece


def _parts(runs: Iterable[tuple[ParameterGroup, slice]], tail: int) -> dict[tuple[ParameterGroup, bool], list[slice]]:
    """Returns each group's runs: multiples of `tail` for the fused kernel, and the rest for the plain one."""
    parts: dict[tuple[ParameterGroup, bool], list[slice]] = {}
    for group, run in runs:
        middle = run.stop - (run.stop - run.start) % tail
        for part, fused in ((slice(run.start, middle), True), (slice(middle, run.stop), False)):
            if part.start < part.stop:
                parts.setdefault((group, fused), []).append(part)
    return parts


def numbered_parts(table: OptimizerTable, layout: Sequence[Entry]) -> list[slice]:
    """Returns the part of a model's parameters that each number in the names of `UpdateRule.state` stands for."""
    runs = runs_of(table.groups, layout)
    return [part for parts in _parts(runs, CACHE_LINE if table.name == "sgd" else 1).values() for part in parts]


def _options(table: OptimizerTable, cls: Any) -> dict[str, Any]:
    """Returns keyword arguments for the optimiser's class, checked against its signature."""
    valid = [key for key in inspect.signature(cls).parameters if key not in _NOT_OPTIONS]
    for key in table.options:
        if key not in valid:
            hint = meant(key, valid)
            raise ConfigError(f"[optimizer] unknown option '{key}' of {table.name}; valid: {', '.join(valid)}{hint}")
    takes = inspect.signature(cls).parameters
    has_momentum = table.name in WITH_MOMENTUM if table.name in OPTIMIZERS else "momentum" in takes
    decays = [table.weight_decay, *(group.weight_decay for group in table.groups)]
    if any(decays) and "weight_decay" not in takes:
        raise ConfigError(f"[optimizer] weight_decay: {table.name} does not take it; valid: 0")
    if table.momentum and not has_momentum:
        text = f"momentum = {table.momentum:g} is not supported with {table.name}"
        raise ConfigError(f"[optimizer] {text}; use momentum = 0")
    momentum = {"momentum": table.momentum} if has_momentum else {}
    decay = {"weight_decay": table.weight_decay} if "weight_decay" in takes else {}
    return {**decay, **momentum, **table.options}
