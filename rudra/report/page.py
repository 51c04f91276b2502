"""Pages: sections or chapters in a template, without any external resources."""

import base64
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from rudra.report.chapters import Chapter
from rudra.report.sections import Section
from rudra.report.svg import inline
from rudra.report.tables import SHOWN_ROWS, ReportTable


def render(sections: Sequence[Section]) -> str:
    """Returns the whole page as text. All names that users gave are escaped."""
    title = " · ".join(s.title for s in sections) if len(sections) <= 3 else f"{len(sections)} studies"
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return _rendered("page.html", title=title, sections=sections, now=now)


def render_chapters(title: str, chapters: Sequence[Chapter]) -> str:
    """Returns a page of chapters as text. Equal chapters give identical pages. All names that users gave are escaped.

    Args:
        title: Heading of the page.
        chapters: Parts of the page, in order.
    """
    return _rendered("chapters.html", title=title, chapters=chapters)


def _rendered(template: str, **values: Any) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("rudra.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    helpers = {"inline": inline, "download": _download, "shown_rows": SHOWN_ROWS}
    return environment.get_template(template).render(**helpers, **values)


def _download(table: ReportTable) -> str:
    """Returns the table as a CSV link. The mark at the start makes spreadsheets read it as UTF-8."""
    content = table.csv().encode("utf-8-sig", "backslashreplace")  # names of files may be no text
    return "data:text/csv;charset=utf-8;base64," + base64.b64encode(content).decode()
