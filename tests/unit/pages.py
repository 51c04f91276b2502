"""What README and the pages of `docs/` show, so that tests can run it."""

import re
import shlex
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def page(name: str) -> str:
    """The text of a page: `README.md`, or a path below `docs/`."""
    return (ROOT / name if name == "README.md" else ROOT / "docs" / name).read_text(encoding="utf-8")


def section(text: str, title: str) -> str:
    """The text below a heading of the second level."""
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    return found.group(1)


def blocks(language: str, text: str) -> list[str]:
    """All blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def files(text: str) -> dict[str, str]:
    """Blocks that begin with a comment that is the name of a file."""
    every = [block for language in ("python", "toml") for block in blocks(language, text)]
    named = [(re.match(r"# ([\w-]+\.\w+)\n", block), block) for block in every]
    return {match.group(1): block for match, block in named if match is not None}


def shown(text: str) -> list[tuple[list[str], list[str]]]:
    """Commands with what they print: the words after `$ rudra` and the lines below, in each block `console`."""
    every = [block.removeprefix("$ rudra ").splitlines() for block in blocks("console", text)]
    return [(shlex.split(asked), lines) for asked, *lines in every]


def names_in(text: str, file: str) -> dict[str, Any]:
    """What a Python file that a page shows defines."""
    defined: dict[str, Any] = {"__name__": file.removesuffix(".py")}
    exec(files(text)[file], defined)
    return defined
