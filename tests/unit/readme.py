"""What the README shows, so that tests can run it."""

import re
from pathlib import Path
from typing import Any

TEXT = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")


def blocks(language: str, text: str = TEXT) -> list[str]:
    """All blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def section(title: str) -> str:
    """The text below a heading of the second level."""
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", TEXT, re.DOTALL | re.MULTILINE)
    assert found is not None
    return found.group(1)


def files(text: str = TEXT) -> dict[str, str]:
    """Blocks that begin with a comment that is the name of a file."""
    every = [block for language in ("python", "toml") for block in blocks(language, text)]
    named = [(re.match(r"# ([\w-]+\.\w+)\n", block), block) for block in every]
    return {match.group(1): block for match, block in named if match is not None}


def names_in(file: str) -> dict[str, Any]:
    """What a Python file of the README defines."""
    defined: dict[str, Any] = {"__name__": file.removesuffix(".py")}
    exec(files()[file], defined)
    return defined
