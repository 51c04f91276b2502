"""The page of a report: sections in a template, without any external resources."""

import base64
from collections.abc import Sequence
from datetime import UTC, datetime

from rudra.report.sections import Section
from rudra.report.svg import inline
from rudra.report.tables import SHOWN_ROWS, ReportTable


def render(sections: Sequence[Section]) -> str:
    """Returns the whole page as text. All names that users gave are escaped."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("rudra.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html").render(
        sections=sections,
        title=" · ".join(s.title for s in sections) if len(sections) <= 3 else f"{len(sections)} studies",
        now=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        inline=inline,
        download=_download,
        shown_rows=SHOWN_ROWS,
    )


def _download(table: ReportTable) -> str:
    """Returns the table as a CSV link. The mark at the start makes spreadsheets read it as UTF-8."""
    content = table.csv().encode("utf-8-sig")
    return "data:text/csv;charset=utf-8;base64," + base64.b64encode(content).decode()
