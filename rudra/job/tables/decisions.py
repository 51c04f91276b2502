"""Table decisions: user code that changes the job during a run."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from rudra.errors import unknown
from rudra.job.table import Named, Table
from rudra.plugins import CALLABLE


class DecisionsTable(Table):
    """Your own function that decides changes of the job during the run (`rudra.roles.decisions`).

    The record of a run holds what the function decided. So neither a replay nor a resumed run needs the same function.
    """

    decides_weights = False

    call: Named | None = Field(
        None,
        description="package.module:callable that the statistics server calls after each epoch with a rudra.Moment. It "
        "returns None, or the keys of a table [[changes]]",
    )
    options: dict[str, Any] = Field({}, description="keyword arguments of the callable")
    at: Literal["epoch", "update"] = Field(
        "epoch",
        description="when a decided change takes effect: epoch (with the end of the present epoch) or update (with the "
        "next update)",
    )

    @field_validator("call")
    @classmethod
    def _callable(cls, value: Named | None) -> Named | None:
        if isinstance(value, str) and ":" not in value:
            raise ValueError(unknown(value, [CALLABLE]))
        return value

    @property
    def given(self) -> bool:
        """Whether a function decides changes."""
        return self.call is not None
