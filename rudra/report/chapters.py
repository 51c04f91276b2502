"""Parts of a page that is not about result files: sentences, figures and tables under a heading."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rudra.report.panels import Figure
from rudra.report.tables import ReportTable


@dataclass(frozen=True)
class Chapter:
    """A part of a page.

    Attributes:
        title: Heading.
        lines: Sentences below it.
        figures: Figures after the sentences.
        tables: Tables after the figures. Empty ones are not shown.
        collapsed: Whether a reader opens each table to see it.
    """

    title: str
    lines: Sequence[str] = ()
    figures: Sequence[Figure] = ()
    tables: Sequence[ReportTable] = ()
    collapsed: bool = False

    @property
    def slug(self) -> str:
        """Name for links and ids."""
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")
