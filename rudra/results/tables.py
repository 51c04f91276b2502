"""Interface of a run's results for summaries."""

from typing import Any, Protocol

from rudra.core.messages import Rows


class RunTables(Protocol):
    """Tables of a result file, as `rudra.results.reader` reads them.

    Attributes:
        attributes: Attributes of the file.
        live: Whether the file was open for writing.
    """

    attributes: dict[str, Any]
    live: bool

    @property
    def job(self) -> dict[str, Any]:
        """The job as it was run."""

    @property
    def state(self) -> dict[str, Any]:
        """The row of `/state`."""

    @property
    def updates(self) -> Rows:
        """Table `/updates`."""

    @property
    def gradients(self) -> Rows:
        """Table `/gradients`."""

    @property
    def epochs(self) -> Rows:
        """Table `/epochs`."""

    @property
    def totals(self) -> Rows:
        """Table `/totals`."""

    @property
    def metrics(self) -> Rows:
        """Table `/metrics`."""

    @property
    def learners(self) -> Rows:
        """Table `/learners`."""

    @property
    def events(self) -> Rows:
        """Table `/events`."""
