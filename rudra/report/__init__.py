"""`rudra report`: one page about any number of result files, with its figures also as files."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from rudra.errors import ConfigError
from rudra.files import check_output, written
from rudra.report.page import render
from rudra.report.runs import collect
from rudra.report.sections import sections_of
from rudra.report.svg import save


def report(
    files: Sequence[str | Path],
    output: str | Path,
    figures: str | Path | None = None,
    *,
    log: bool = False,
    force: bool = False,
) -> list[Path]:
    """Writes a self-contained page about runs, with the data of each figure as a table.

    Args:
        files: result files and directories of result files. `sweep.json` in a directory describes its points.
        output: page to write.
        figures: directory for each figure as PDF and SVG, and its data as CSV. It is created if it is missing.
        log: logarithmic axes for errors, losses and learning rates.
        force: replace existing files.

    Returns:
        Paths of the written files, the page first.

    Raises:
        ConfigError: there is nothing to report on, a `sweep.json` is damaged, or matplotlib or Jinja is missing.
        ResultsError: a named file is not readable as a result file, or an output exists or cannot be written.
    """
    output = Path(output)
    if output.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"{output}: a report is an .html file, not '{output.suffix}'")
    check_output(output, force)
    studies = collect([Path(file) for file in files])
    check_libraries()
    made = sections_of(studies, log=log)
    page = render(made)
    pictures = [] if figures is None else save(made, Path(figures), force=force)
    with written(output) as file:
        file.write(page.encode(errors="backslashreplace"))  # names of files may be no text
    return [output, *pictures]


def check_libraries() -> None:
    """Raises ConfigError if a library that reports need is missing."""
    for library in ("matplotlib", "jinja2"):
        if find_spec(library) is None:
            raise ConfigError(f"reports need {library}: pip install 'rudra[plot]'")
