"""Update rules: torch's optimisers, applied to one flat vector."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rudra.compute.optimizers import check_own, optimizer_of
from rudra.compute.runs import CACHE_LINE, REST, around, kernel_parts, runs_of
from rudra.compute.sliced_steps import SlicedSteps
from rudra.core.state_names import STEP, VELOCITY
from rudra.errors import ConfigError
from rudra.job.changes import MOMENTS
from rudra.job.tables import OPTIMIZERS, OptimizerTable

Rates = Sequence["torch.Tensor"]
"""Memory of a device, float32, with the learning rate of each optimiser group. Empty: the host gives the rate."""

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from rudra.compute.rows import RowFormat, RowGradient
    from rudra.core.layout import Entry


class UpdateRule:
    """Update rule that applies gradients to flat weights in place.

    SGD uses torch's fused kernel and is bitwise identical to plain `torch.optim.SGD` over separate parameters. The
    fused kernel rounds differently only in the elements after the last full cache line. On a CPU these use the plain
    kernel. Adam, AdamW and Adagrad are fused as well, and may differ from their plain forms in the last bit.

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
        self._form, self._size, self._none = table.momentum_form, len(weights), weights[:0].clone()
        self._clipped: float | torch.Tensor = 1.0  # factor of clipping in the last step
        self._sgd, self._torchs = table.name == "sgd", table.name in OPTIMIZERS
        self._places: dict[torch.nn.Parameter, slice] = {}
        self._numbered: dict[int, tuple[torch.nn.Parameter, slice, slice]] = {}  # number -> whole parameter, and slices
        self._factors: list[float] = []  # of each optimiser group
        groups: list[dict[str, Any]] = []
        tail = CACHE_LINE if self._sgd else 1
        runs = runs_of(table.groups, parameters) if parameters else [(REST, slice(0, len(weights)))]
        first = 0 if part is None else part.start
        number = 0
        self._rows, self._row_form = torch.nn.Parameter(weights[:0]), rows
        row_group = REST
        if rows is not None:
            self._rows = torch.nn.Parameter(weights[rows.part].view(rows.features, rows.width))
            runs = list(runs)
            row_group = next(group for group, run in runs if run.start <= rows.start < run.stop)
            runs = around(runs, rows.part)
        for (group, fused), wholes in kernel_parts(runs, tail).items():
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
                flags = {"fused": fused or not weights.is_cpu} if fusible else {}
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
                check_own(lambda trial: cls(trial, lr=table.learning_rate, **options))
            self.optimizer: torch.optim.Optimizer = cls(groups, lr=table.learning_rate, **plain, **options)
        except Exception as error:  # torch checks some options, and fails on others with any exception
            raise ConfigError(f"[optimizer] {table.name}: {' '.join(str(error).split())}") from None
        self._decays = [group.get("weight_decay") for group in self.optimizer.param_groups]
        self._use_form(table.momentum)

    def _use_form(self, momentum: float) -> None:
        """Prepares steps in the form of the table for a momentum."""
        self._caffe = self._form == "caffe" and momentum > 0
        scales = self._caffe or self._clip_norm is not None
        self._scaled = self._none.new_zeros(self._size if scales else 0)  # borrowed gradients are read-only
        self._sliced = SlicedSteps(self.optimizer, self._places, self._set_rates, self._scaled if self._caffe else None)

    def change(self, momentum: float, options: Mapping[str, Any]) -> None:
        """Continues with another momentum and other options.

        The state remains, except the velocity: it is dropped at a momentum of 0, and a momentum after 0 begins without
        velocity.

        Args:
            momentum: New momentum. An optimiser without a momentum ignores it.
            options: Keyword arguments of the optimiser's class. Of `MOMENTS`, omitted ones get their defaults.
        """
        import torch

        takes = inspect.signature(type(self.optimizer)).parameters
        defaults = {key: takes[key].default for key in MOMENTS if key in takes}
        chosen = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
        for group, decay in zip(self.optimizer.param_groups, self._decays, strict=True):
            has_momentum = "momentum" in group
            group |= {**defaults, **chosen}
            if has_momentum:
                group["momentum"] = momentum
            if decay is not None:
                group["weight_decay"] = decay
            for parameter in group["params"] if has_momentum and self._torchs else ():
                state = self.optimizer.state[parameter]
                if not momentum:
                    state.pop(VELOCITY, None)
                elif not self._sgd and state:  # RMSprop expects a velocity in the state of earlier steps
                    state.setdefault(VELOCITY, torch.zeros_like(parameter))
        self._use_form(momentum)
        self.prepare()

    def step(
        self,
        gradient: torch.Tensor,
        learning_rate: float,
        norms: tuple[torch.Tensor, torch.Tensor] | None = None,
        rates: Rates = (),
    ) -> None:
        """Updates the weights.

        Args:
            gradient: (P,) float32, read only, and not needed after this returns.
            learning_rate: Rate of this step, including all modulation.
            norms: Norms of other owners' gradients, as `norms` returns them: for parameters before and after these.
            rates: Memory of the device with the numbers that `rates` returns, float32, in their place. It requires
                `takes_rates`.
        """
        if self._clip_norm is not None:
            gradient = self._clip(gradient, self._clip_norm, norms)
        used = self._set_rates(learning_rate)
        for group, memory in zip(self.optimizer.param_groups, rates, strict=False):
            group["lr"] = memory
        for group, rate in zip(self.optimizer.param_groups, used, strict=True):
            for parameter in group["params"]:
                part = self._places[parameter]
                parameter.grad = self._times(rate, gradient[part], part) if self._caffe else gradient[part]
        if self._torchs:
            self._sliced.step_whole()
        else:
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

    def rates(self, learning_rate: float) -> list[float]:
        """Returns the rate of each optimiser group."""
        return [learning_rate * factor for factor in self._factors]

    @property
    def joins(self) -> bool:
        """Whether rules like this one may step together (`rudra.compute.joined_steps`)."""
        return self._sgd and not self._caffe and self._clip_norm is None

    @property
    def settings(self) -> str:
        """Settings of all groups except the rate, which are part of a recorded step."""
        groups = self.optimizer.param_groups
        return str([{key: value for key, value in group.items() if key not in ("params", "lr")} for group in groups])

    def give(self, gradient: torch.Tensor) -> None:
        """Gives all parameters their parts of a gradient, (P,) float32, for a step by another optimiser."""
        for parameter, part in self._places.items():
            parameter.grad = gradient[part]

    @property
    def takes_rates(self) -> bool:
        """Whether a device may keep the rates: Adam would round them, and Caffe's momentum needs them here."""
        return self._sgd and not self._caffe

    @property
    def repeats(self) -> bool:
        """Whether a device may repeat a recorded step at the same rate: others count their steps in main memory."""
        return self._sgd

    def _set_rates(self, learning_rate: float) -> list[float]:
        """Sets and returns the rate of each optimiser group."""
        rates = self.rates(learning_rate)
        for group, rate, decay in zip(self.optimizer.param_groups, rates, self._decays, strict=True):
            group["lr"] = 1.0 if self._caffe else rate
            if self._caffe:
                group["weight_decay"] = decay * rate
        return rates

    @property
    def sliced(self) -> SlicedSteps | None:
        """Steps in slices, if they are possible now: the state is allocated, and no norm comes first.

        A user's own optimiser steps whole vectors. Optimisers with a count of steps allocate their state at their first
        step.
        """
        possible = self._torchs and self._clip_norm is None and self._sliced.ready
        return self._sliced if possible else None

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
        clips = norm.isfinite() & (scale < 1)
        if norm.is_cpu and not clips:
            self._clipped = 1.0
            return gradient
        self._clipped = torch.where(clips, scale, 1.0)  # a device decides without the host
        return self._times(self._clipped, gradient, slice(None))

    def _times(self, scale: float | torch.Tensor, gradient: torch.Tensor, part: slice) -> torch.Tensor:
        """Returns a part of the gradient at another scale, valid until the next call."""
        import torch

        return torch.mul(gradient, scale, out=self._scaled[part])

    @property
    def clip_factor(self) -> float | torch.Tensor:
        """Factor of the last gradient by clipping. NaN: gradients are not clipped. A device may still compute it."""
        return math.nan if self._clip_norm is None else self._clipped

    def move(self, weights: torch.Tensor) -> None:
        """Continues with weights in other memory, which holds the same values."""
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
                    if VELOCITY not in self.optimizer.state[parameter]:
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
        return self._sgd and bool(self.optimizer.param_groups[0]["momentum"])

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
        fused = {p for group in self.optimizer.param_groups if group.get("fused") for p in group["params"]}
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
            # Torch counts steps in main memory, unless its kernel is fused.
            there = parameter.device if key != STEP or parameter in fused else own.device
            self.optimizer.state[parameter][key] = own.to(there, copy=True)

    def state_bytes(self) -> int:
        """Memory that the optimiser's state occupies now."""
        import torch

        values = (value for state in self.optimizer.state.values() for value in state.values())
        return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))


def numbered_parts(table: OptimizerTable, layout: Sequence[Entry]) -> list[slice]:
    """Returns the part of a model's parameters that each number in the names of `UpdateRule.state` stands for."""
    runs = runs_of(table.groups, layout)
    return [part for parts in kernel_parts(runs, CACHE_LINE if table.name == "sgd" else 1).values() for part in parts]
