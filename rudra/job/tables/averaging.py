"""Tables averaging and averaging.outer: how learners average replicas of their own."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator

from rudra.job.table import Table
from rudra.job.tables.optimizer import known_optimizer
from rudra.job.tables.protocol import ArgumentsTable
from topologies import Plan


class OuterTable(Table):
    """The outer optimiser, which updates the weights by the mean difference of all replicas.

    Its keys are those of `[optimizer]`. Keys that are left out are as the protocol has them.
    """

    name: str | None = Field(
        None, description="sgd, adagrad, adam, adamw, rmsprop, or your own, package.module:class; default: sgd"
    )
    learning_rate: float | None = Field(
        None,
        ge=0,
        description="learning rate; default: average 1, diloco 0.7; easgd and sma: averaging.elasticity times learners",
    )
    momentum: float | None = Field(None, ge=0, lt=1, description="momentum; default: 0, diloco and sma 0.9")
    options: dict[str, Any] = Field(
        {},
        description="further keyword arguments of the torch.optim class; default: none, diloco nesterov = true",
    )

    _known = field_validator("name")(known_optimizer)


class AveragingTable(ArgumentsTable):
    """How learners average replicas of their own; keys that are left out are as the protocol has them."""

    period: int | None = Field(
        None,
        ge=1,
        lt=2**20,
        description="τ: number of mini-batches of each learner from one average to the next; default: 1, diloco 50",
    )
    elasticity: float | None = Field(
        None,
        ge=0,
        description="α: part of the way to the weights that a replica goes at each average; default: 1; easgd and sma: "
        "1 / learners, or 1 / (learners + 1) where there is no outer momentum",
    )
    local_elasticity: float | None = Field(
        None,
        ge=0,
        description="part of the way to the reference of its block that a replica goes in every mini-batch, with "
        "topology hierarchical, where elasticity is that of references; default: 1 / (learners of the block + 1)",
    )
    restart: bool | None = Field(
        None,
        description="let all replicas continue from the weights, without momentum, each time the learning rate drops "
        "(schedules step and plateau); default: false, sma true",
    )
    keep_momentum: bool | None = Field(
        None, description="let replicas keep the momentum of their own optimiser at a restart; default: false"
    )
    outer: OuterTable = Field(OuterTable(), description="table: the outer optimiser, which updates the weights")

    def arguments(self, plan: Plan) -> dict[str, Any]:
        found = {**self.non_defaults, "served": plan.averaging and plan.served}
        if "outer" in found:
            found["outer"] = self.outer.non_defaults
        return found | ({"blocks": [*map(len, plan.groups)]} if plan.sharing == "reference" else {})
