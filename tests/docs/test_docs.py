"""README and the pages of `docs/`: links, examples, tables that the code writes, and the site that they make."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import h5py
import pytest
from pages import ROOT, blocks, files

import rudra
from rudra.job.job import Job
from rudra.job.jobfiles import shipped_jobs
from rudra.results.recorder import ATTRIBUTES
from rudra.results.writer import NORMS, NORMS_EVERY, OBJECTS
from rudra.studies import sweep
from tests.docs import commands, job, results
from tests.docs.generate import DOCS, filled, marked

PAGES = sorted(DOCS.glob("*.md"))
TEXTS = {str(file.relative_to(ROOT)): file for file in (*PAGES, ROOT / "README.md", ROOT / ".github/CONTRIBUTING.md")}
every_text = pytest.mark.parametrize("name", sorted(TEXTS))


@cache
def text_of(file: Path) -> str:
    return file.read_text(encoding="utf-8")


def prose(text: str) -> str:
    """A page with empty lines in place of its blocks of code."""
    return re.sub(r"^( *)(```+).*?^\1\2$", lambda m: "\n" * m[0].count("\n"), text, flags=re.DOTALL | re.MULTILINE)


@cache
def anchors(file: Path) -> set[str]:
    """What links into a page may name, as code hosts and the site make it of the headings."""
    headings = re.findall(r"^#+ (.*)$", prose(text_of(file)), re.MULTILINE)
    words = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", text).replace(" ", "-") for text in words}


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", ".mkdocs.yml", "-d", tmp_path]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False, env=env)
    assert done.returncode == 0, done.stderr
    for page in PAGES:
        built = (tmp_path / page.name).with_suffix(".html").read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|iframe)[^>]* src=\"?([^\" >]+)", built)
        loaded += re.findall(r"<link[^>]* rel=\"?(?:stylesheet|icon|preconnect)\"?[^>]* href=\"?([^\" >]+)", built)
        assert [place for place in loaded if "//" in place] == [], "a page loads nothing from elsewhere"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_the_code_says_is_on_the_page(page: Path) -> None:
    assert text_of(page) == filled(text_of(page)), "python -m tests.docs.generate"


def test_every_table_of_a_job_and_of_a_result_file_is_on_a_page() -> None:
    assert {("job-table", name) for name in job.tables()} <= {*marked(text_of(DOCS / "job-reference.md"))}
    assert {("columns", name) for name in results.with_columns()} <= {*marked(text_of(DOCS / "results.md"))}


@every_text
def test_links_lead_somewhere(name: str) -> None:
    file = TEXTS[name]
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", prose(text_of(file)))):
        if re.match(r"[a-z]+:", target):
            continue
        place, _, anchor = target.partition("#")
        to = (file.parent / place).resolve() if place else file
        if not to.exists() or (anchor and anchor not in anchors(to)):
            broken.append(target)
    assert broken == []


@every_text
def test_lines_are_short(name: str) -> None:
    lines = [re.sub(r"\]\([^)\s]+\)", "]", line) for line in prose(text_of(TEXTS[name])).split("\n")]
    assert [line for line in lines if len(line) > 120 and not line.startswith("|")] == []


@every_text
def test_commands_that_a_page_shows_are_possible(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They parse; and jobs that are shipped or shown may be changed as they say."""
    monkeypatch.chdir(tmp_path)
    parsers, shown = commands.parsers(), files(text_of(TEXTS[name]))
    with _importable(shown, tmp_path):
        for line in _lines(text_of(TEXTS[name])):
            words = shlex.split(line, comments=True)[1:]
            if not words or words[0].startswith("-"):
                continue
            with _not_refused(line):
                arguments = parsers[words[0]].parse_args(words[1:])
            named = getattr(arguments, "job", "")
            if named in shipped_jobs() or named in shown:
                overrides = list(getattr(arguments, "overrides", ()))
                overrides += [f"cluster.learners={n}" for n in (getattr(arguments, "learners", None),) if n]
                Job.load(named, overrides)
                if getattr(arguments, "grid", None):
                    sweep.plan(named, grid=sweep.parse_grid(arguments.grid), overrides=overrides)


@every_text
def test_jobs_that_a_page_shows_are_valid(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = text_of(TEXTS[name])
    with _importable(files(text), tmp_path):
        for block in blocks("toml", text):
            tables = tomllib.loads(block)
            if tables.keys() & Job.model_fields.keys():
                Job.of(Path(name), tables)


@pytest.mark.slow
def test_the_examples_that_read_results(tmp_path: Path) -> None:
    """The Python page's example, simulated and shorter, and then what the results page does with its file."""
    example = files(text_of(DOCS / "python.md"))["spirals.py"].replace("rudra.run(", "rudra.simulate(")
    assert '"epochs": 5' in example
    reading = blocks("python", text_of(DOCS / "results.md"))
    (tmp_path / "all.py").write_text("\n".join([example.replace('"epochs": 5', '"epochs": 2'), *reading]))
    norms = {"results": {"gradient_norms": "every 1"}, "model": {"name": "mlp"}, "training": {"epochs": 1}}
    rudra.simulate(rudra.Job.load("digits").with_(**norms), output=tmp_path / "norms.h5", progress="quiet").close()
    line, env = [sys.executable, "-W", "error", "all.py"], {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False, env=env)
    assert done.returncode == 0, done.stderr
    with h5py.File(tmp_path / "spirals.h5") as file:
        # runs on ranks, branches without the rows before, and runs with norms
        of_others = {"mpi_library", "cores_per_node", "begins_at", NORMS_EVERY}
        assert ATTRIBUTES.keys() - file.attrs.keys() == of_others
        assert file.attrs.keys() <= ATTRIBUTES.keys()
        assert {name for name in OBJECTS if name not in file} == set(NORMS)


def _lines(text: str) -> Iterator[str]:
    """Commands of Rudra in the blocks that a reader types into a shell."""
    for line in re.sub(r" *\\\n *", " ", "".join(blocks("sh", text))).splitlines():
        if found := re.match(r"(?:\$ )?(?:(?:mpirun|srun) [^#]*? )?(?:\.venv/bin/)?(rudra(?: [^#]*)?)", line):
            yield re.split(r" (?:\||>>?|&&?|;)(?: |$)", found[1])[0]


@contextmanager
def _not_refused(line: str) -> Iterator[None]:
    """Names the line that a parser refuses."""
    try:
        yield
    except SystemExit as ended:
        raise AssertionError(line) from ended


@contextmanager
def _importable(shown: dict[str, str], directory: Path) -> Iterator[None]:
    """The files that a page shows, as modules and jobs in the working directory."""
    for file, content in shown.items():
        (directory / file).write_text(content, encoding="utf-8")
    sys.path.append(str(directory))
    try:
        yield
    finally:
        sys.path.remove(str(directory))
        for file in shown:
            with suppress(KeyError):
                del sys.modules[Path(file).stem]


def test_glossary_is_in_alphabetical_order() -> None:
    rows = [line for line in text_of(DOCS / "glossary.md").splitlines() if line.startswith("| ")][1:]
    terms = [re.sub(r"[^a-z0-9* ]", "", row.strip("| ").split(" | ")[0].lower()) for row in rows]
    assert terms == sorted(terms)
    assert len(terms) == len(set(terms))
