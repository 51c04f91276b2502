"""Interface of a run's results for summaries."""

from typing import Any, Protocol

from rudra.core.messages import Rows


class RunTables(Protocol):
    """Tables and attributes of a result file: those members of `rudra.results.reader.Results` that a summary needs."""

    attributes: dict[str, Any]
    live: bool

    @property
    def job(self) -> dict[str, Any]: ...
    @property
    def state(self) -> dict[str, Any]: ...
    @property
    def updates(self) -> Rows: ...
    @property
    def gradients(self) -> Rows: ...
    @property
    def epochs(self) -> Rows: ...
    @property
    def totals(self) -> Rows: ...
    @property
    def metrics(self) -> Rows: ...
    @property
    def learners(self) -> Rows: ...
    @property
    def events(self) -> Rows: ...
