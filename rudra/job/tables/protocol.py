"""When weights are updated, and by which gradients: table protocol."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from protocols import MODULATIONS
from rudra.errors import unknown
from rudra.job.table import Named, Table
from rudra.plugins import CALLABLE
from topologies import Plan


class ArgumentsTable(Table):
    """A table whose keys are arguments of a protocol's class, which names the table (`Protocol.table`)."""

    def arguments(self, plan: Plan) -> dict[str, Any]:
        """Keyword arguments of the class, for the learners of a plan."""
        raise NotImplementedError


class ProtocolTable(Table):
    """Which gradients make an update, and how the protocol changes the learning rate."""

    name: Named = Field(
        "softsync",
        description="hardsync, softsync, async; hogbatch, which assigns samples to heterogeneous workers; average, "
        "diloco, easgd, sma, with which learners average replicas; or your own, package.module:class",
    )
    n: int | None = Field(
        None,
        ge=1,
        description="splitting parameter of softsync, 1 <= n <= learners: c = floor(learners / n) gradients make an "
        "update",
    )
    modulation: Literal["auto", "none", "sqrt", "n", "mean_staleness", "gradient_staleness"] | str = Field(
        "auto",
        description="rule by which the protocol changes the learning rate: none, sqrt, n, mean_staleness, "
        "gradient_staleness, or your own, package.module:class; auto: sqrt for hardsync, n for softsync and async, "
        "none for hogbatch",
    )
    reference_batch_size: int = Field(
        128,
        ge=1,
        description="B: batch size that learning_rate was tuned for; sqrt compares it with learners times "
        "minibatch_size",
    )
    options: dict[str, Any] = Field({}, description="keyword arguments of your own protocol")

    @field_validator("modulation")
    @classmethod
    def _known_modulation(cls, value: str) -> str:
        valid = ("auto", *MODULATIONS)
        if value not in valid and ":" not in value:
            raise ValueError(unknown(value, (*valid, CALLABLE)))
        return value
