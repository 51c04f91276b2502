"""Table protocol: the gradients of each update, and the modulation of the learning rate."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from protocols import MODULATIONS, corrections, shipped
from rudra.errors import unknown
from rudra.job.table import Named, Table
from rudra.plugins import CALLABLE
from topologies import Plan

_AVERAGE = [name for name, rule in shipped().items() if rule.averages]


class ArgumentsTable(Table):
    """Table whose keys are arguments of a protocol's class, which names the table (`Protocol.table`)."""

    def arguments(self, plan: Plan) -> dict[str, Any]:
        """Returns the keyword arguments of the class, for the learners of a plan."""
        raise NotImplementedError


class ProtocolTable(Table):
    """Gradients of each update, and modulation of the learning rate."""

    name: Named = Field(
        "softsync",
        description="hardsync, softsync or async. hogbatch assigns samples to heterogeneous workers. "
        f"{', '.join(_AVERAGE[:-1])} and {_AVERAGE[-1]} average replicas of the learners. Or your own, "
        "package.module:class",
    )
    n: int | None = Field(
        None,
        ge=1,
        description="splitting parameter of softsync, 1 <= n <= learners: an update takes c = floor(learners / n) "
        "gradients",
    )
    modulation: Literal["auto", "none", "sqrt", "n", "mean_staleness", "gradient_staleness"] | str = Field(
        "auto",
        description="rule that changes the learning rate: none, sqrt, n, mean_staleness, gradient_staleness, or your "
        "own, package.module:class. auto: sqrt for hardsync, n for softsync and async, none for hogbatch",
    )
    reference_batch_size: int = Field(
        128,
        ge=1,
        description="B: batch size for which learning_rate was tuned. sqrt uses learners · minibatch_size / B",
    )
    options: dict[str, Any] = Field({}, description="keyword arguments of your own protocol")
    correction: Named | None = Field(
        None,
        description="rule that changes each gradient before it is averaged: "
        f"{', '.join(corrections())}, or your own, package.module:class",
    )
    correction_options: dict[str, Any] = Field({}, description="keyword arguments of the correction")

    @field_validator("modulation")
    @classmethod
    def _known_modulation(cls, value: str) -> str:
        valid = ("auto", *MODULATIONS)
        if value not in valid and ":" not in value:
            raise ValueError(unknown(value, (*valid, CALLABLE)))
        return value
