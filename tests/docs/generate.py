"""What pages of `docs/` say from the code, and the command that writes it: `python -m tests.docs.generate`.

A page has `<!-- generated: MAKER ARGUMENT -->` and `<!-- end -->` where a table belongs that the code knows. What
stands between the two is made here; all else is written by hand. Tests compare, and never write.
"""

import re
from collections.abc import Callable
from pathlib import Path

from tests.docs import averaging, commands, job, memory, results, roles, shipped

DOCS = Path(__file__).resolve().parents[2] / "docs"

MAKERS: dict[str, Callable[..., list[str]]] = {
    "averaging-pairs": averaging.pairs,
    "job-table": job.table,
    "job-file": job.file,
    "memory-vectors": memory.vectors,
    "models": job.models,
    "commands": commands.sections,
    "objects": results.objects,
    "columns": results.columns,
    "attributes": results.attributes,
    "event-kinds": results.event_kinds,
    "shipped": shipped.sections,
    "state-diagrams": roles.state_diagrams,
}

_MARKED = re.compile(r"<!-- generated: (\S+)(?: ([\w./-]+))? -->\n.*?^<!-- end -->", re.DOTALL | re.MULTILINE)


def filled(text: str) -> str:
    """A page with everything made anew that the code knows."""

    def made(found: re.Match[str]) -> str:
        maker, argument = found.groups()
        lines = MAKERS[maker](*([] if argument is None else [argument]))
        return "\n".join([found[0].partition("\n")[0], "", *lines, "", "<!-- end -->"])

    return _MARKED.sub(made, text)


def marked(text: str) -> list[tuple[str, str | None]]:
    """Maker and argument of all that a page has from the code."""
    return [(found[1], found[2]) for found in _MARKED.finditer(text)]


if __name__ == "__main__":
    for page in sorted(DOCS.glob("*.md")):
        before = page.read_text(encoding="utf-8")
        if (after := filled(before)) != before:
            page.write_text(after, encoding="utf-8")
            print(f"wrote {page.name}")
