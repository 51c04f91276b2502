"""Table optimizer.average: an average of the weights over time."""

from __future__ import annotations

from pydantic import Field, ValidationInfo, field_validator

from rudra.job.table import Table, interval


class WeightsAverageTable(Table):
    """Average of the weights over time.

    It is evaluated, exported and used for targets instead of the last weights.
    """

    rate: float | None = Field(
        None,
        gt=0,
        le=1,
        description="exponential average: weight of the newest weights in it, which is 1 - decay in torch's swa_utils",
    )
    window: str | None = Field(
        None,
        description="uniform average over each `N epochs` or `N updates`. It begins again after every N",
    )

    @field_validator("window")
    @classmethod
    def _of_updates(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None:
            return value
        found = interval(value)
        if found is None or found[1] == "s":
            raise ValueError(f"= '{value}' is not such an interval; use `N epochs` or `N updates`")
        if info.data.get("rate") is not None:
            raise ValueError(f"= '{value}' is not supported with rate; use one of them")
        return value

    @property
    def given(self) -> bool:
        """Whether the weights are averaged over time."""
        return self.rate is not None or self.window is not None

    @property
    def period(self) -> tuple[int, str] | None:
        """Length of the window, as a number and a unit: updates or epochs. None: the average is exponential."""
        return None if self.window is None else interval(self.window)

    @property
    def text(self) -> str:
        """Text for people."""
        if self.rate is not None:
            return f"over time, exponential, with a share of {self.rate:g} for the newest weights"
        return f"over time, uniform over every {self.window}"
