"""`rudra report`: one page, and the figures in it as files, of any number of result files."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from rudra.errors import ConfigError
from rudra.report.page import render
from rudra.report.runs import collect
from rudra.report.sections import sections_of
from rudra.report.svg import save


def report(files: Sequence[str | Path], output: str | Path, figures: str | Path | None = None) -> list[Path]:
    """Writes a self-contained page about runs, with every figure's data as a table.

    Args:
        files: result files, and directories of them; `sweep.json` in a directory says what its points are.
        output: page to write, and to replace.
        figures: directory for each figure as PDF and SVG, and its data as CSV; made if it is missing.

    Returns:
        What was written, the page first.

    Raises:
        ConfigError: nothing to report on, a damaged `sweep.json`, an output that cannot be written, or matplotlib or
            Jinja is missing.
        ResultsError: a file that was named is not readable as a result file.
    """
    output = Path(output)
    if output.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"{output}: a report is an .html file, not '{output.suffix}'")
    studies = collect([Path(file) for file in files])
    for library in ("matplotlib", "jinja2"):
        if find_spec(library) is None:
            raise ConfigError(f"reports need {library}: pip install 'rudra[plot]'")
    made = sections_of(studies)
    try:
        output.write_text(render(made), encoding="utf-8")
        return [output, *(save(made, Path(figures)) if figures is not None else ())]
    except OSError as error:
        raise ConfigError(f"{error.filename or output}: cannot write: {error.strerror or error}") from None
