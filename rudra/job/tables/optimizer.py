"""Table optimizer: the update rule and its learning rate."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from rudra.errors import unknown
from rudra.job.table import Named, Table, short
from rudra.job.tables.weights_average import WeightsAverageTable
from rudra.plugins import CALLABLE

OPTIMIZERS = {"sgd": "SGD", "adagrad": "Adagrad", "adam": "Adam", "adamw": "AdamW", "rmsprop": "RMSprop"}
"""Name of an optimiser in a job -> name of its class in torch.optim."""

WITH_MOMENTUM = ("sgd", "rmsprop")
"""Names of the optimisers that have a momentum."""


def known_optimizer(value: str | None) -> str | None:
    """Returns the name of an optimiser. Raises ValueError if it is unknown."""
    if value is not None and value not in OPTIMIZERS and ":" not in value:
        raise ValueError(unknown(value, (*OPTIMIZERS, CALLABLE)))
    return value


class ParameterGroup(Table):
    """Parameters with a separate learning rate or weight decay."""

    parameters: tuple[str, ...] = Field(
        (), validate_default=True, description="names of parameters, or patterns such as `*.bias`: one or a list"
    )
    rate_factor: float = Field(1.0, ge=0, description="factor on the learning rate of these parameters")
    weight_decay: float | None = Field(
        None, ge=0, description="weight decay of these parameters. Default: optimizer.weight_decay"
    )

    @field_validator("parameters", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        value = (value,) if isinstance(value, str) else value
        if not value:
            raise ValueError("must be names of parameters or patterns such as '*.bias'")
        return value


class OptimizerTable(Table):
    """Update rule and its learning rate."""

    name: str = Field(
        "sgd",
        description="sgd, adagrad, adam, adamw or rmsprop: torch.optim class that updates the flat weight vector, or "
        "your own torch.optim.Optimizer, package.module:class",
    )
    learning_rate: float = Field(0.01, gt=0, description="α0: learning rate before schedule, warm-up and modulation")
    schedule: Named = Field(
        "step",
        description="schedule of the learning rate: step, cosine, plateau, or package.module:callable that returns a "
        "torch scheduler",
    )
    milestones: tuple[int, ...] = Field(
        (), description="epochs after which schedule step multiplies the learning rate by decay_factor"
    )
    decay_factor: float = Field(
        0.1, gt=0, description="factor on the learning rate at each milestone, or at each plateau"
    )
    schedule_options: dict[str, Any] = Field(
        {}, description="keyword arguments of the torch scheduler. For plateau: patience, in evaluations"
    )
    schedule_every: Literal["epoch", "update"] = Field(
        "epoch", description="interval of the torch scheduler's steps: once an epoch or once an update"
    )
    warm_up: float = Field(
        0.0,
        ge=0,
        description="number of epochs during which the learning rate grows from 0 to its scheduled value, linearly "
        "in applied samples",
    )
    momentum: float = Field(0.0, ge=0, lt=1, description="momentum, only for sgd, rmsprop and your own optimiser")
    momentum_form: Literal["torch", "caffe"] = Field(
        "torch",
        description="torch: a change of the learning rate scales the whole velocity. caffe (as in the papers): it "
        "scales only new gradients",
    )
    momentum_correction: Literal["none", "implicit"] = Field(
        "none",
        description="implicit: subtract the implicit momentum of asynchrony, 1 - 1/g with g = mean staleness + 1, "
        "which is a rule of thumb",
    )
    weight_decay: float = Field(0.0, ge=0, description="L2 penalty, as the torch.optim class applies it")
    groups: tuple[ParameterGroup, ...] = Field(
        (),
        description="tables with parameters (names or patterns), rate_factor and weight_decay, for parameters that "
        "need other settings",
    )
    clip_norm: float | None = Field(
        None,
        gt=0,
        description="largest norm of an update's gradient. A gradient with a larger norm is scaled down to this norm",
    )
    options: dict[str, Any] = Field({}, description="further keyword arguments of the torch.optim class")
    average: WeightsAverageTable = Field(
        WeightsAverageTable(),
        description="table: an average of the weights over time, which is evaluated and exported instead of the last "
        "weights",
    )

    @property
    def state_vectors(self) -> int:
        """Number of vectors of the weights' size that an optimiser of torch keeps as its state."""
        kept = {"adagrad": 1, "adam": 2, "adamw": 2, "rmsprop": 1}.get(self.name, 0)
        return kept + bool(self.momentum) + bool(self.options.get("amsgrad")) + bool(self.options.get("centered"))

    @field_validator("name", mode="before")
    @classmethod
    def _in_any_case(cls, value: Any) -> Any:
        return value.lower() if isinstance(value, str) and ":" not in value else value

    _known = field_validator("name")(known_optimizer)

    @field_validator("momentum_form")
    @classmethod
    def _of_sgd(cls, value: str, info: ValidationInfo) -> str:
        if value != "torch" and (name := info.data.get("name", "sgd")) != "sgd":
            raise ValueError(f"= '{value}' is not supported with name = '{name}'; use 'torch'")
        return value

    @field_validator("schedule")
    @classmethod
    def _known_schedule(cls, value: Named) -> Named:
        shipped = ("step", "cosine", "plateau")
        if isinstance(value, str) and value not in shipped and ":" not in value:
            raise ValueError(unknown(value, (*shipped, CALLABLE)))
        return value

    @field_validator("milestones")
    @classmethod
    def _ascending(cls, value: tuple[int, ...], info: ValidationInfo) -> tuple[int, ...]:
        if any(m < 1 for m in value) or list(value) != sorted(set(value)):
            raise ValueError(f"must be ascending epochs, each >= 1, not {list(value)}")
        if value and (schedule := info.data.get("schedule", "step")) != "step":
            raise ValueError(f"= {list(value)} is not supported with schedule = {short(schedule)}; use 'step'")
        return value

    @field_validator("schedule_options")
    @classmethod
    def _of_torch(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        if value and info.data.get("schedule") == "step":
            raise ValueError("is not supported with schedule = 'step'; use milestones and decay_factor")
        if info.data.get("schedule") == "plateau":
            if unknown := [key for key in value if key != "patience"]:
                raise ValueError(f"has an unknown option '{unknown[0]}' of schedule 'plateau'; use patience")
            patience = value.get("patience", 1)
            if isinstance(patience, bool) or not isinstance(patience, int) or patience < 1:
                raise ValueError(f"patience must be a whole number >= 1, not {short(patience)}")
        return value

    @property
    def plateau(self) -> int | None:
        """Number of evaluations without progress after which the rate drops. None: another schedule."""
        return self.schedule_options.get("patience", 10) if self.schedule == "plateau" else None

    @field_validator("schedule_every")
    @classmethod
    def _steps(cls, value: str, info: ValidationInfo) -> str:
        if value == "update" and (schedule := info.data.get("schedule")) in ("step", "plateau"):
            raise ValueError(f"= 'update' is not supported with schedule = '{schedule}'; use 'epoch'")
        return value

    @field_validator("warm_up")
    @classmethod
    def _of_epochs(cls, value: float, info: ValidationInfo) -> float:
        if value and info.data.get("schedule_every") == "update":
            raise ValueError(f"= {value:g} is not supported with schedule_every = 'update'; use warm_up = 0")
        return value

    def groups_of(self, names: Iterable[str]) -> tuple[ParameterGroup, ...]:
        """Returns the groups that contain some of these parameters, with only the patterns that match."""
        known = tuple(names)
        here = [tuple(p for p in group.parameters if fnmatch.filter(known, p)) for group in self.groups]
        pairs = zip(self.groups, here, strict=True)
        return tuple(group.model_copy(update={"parameters": mine}) for group, mine in pairs if mine)

    @property
    def scale_invariant(self) -> bool:
        """Whether the optimiser's step ignores the scale of its gradients."""
        return self.name in {"adagrad", "adam", "adamw", "rmsprop"}
