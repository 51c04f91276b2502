"""Counts places in prose that are hard to read: `python -m tests.docs.plain_words [PATH …]`.

Reads Markdown without its code, and docstrings, comments and messages of Python files. Without paths: one line for each
page and module, the worst first. With paths: their places. A place is worth a second look; it may be right.
"""

import ast
import re
import sys
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
READ = ("README.md", "docs", "rudra", "protocols", "topologies", "jobs", "benchmarks")

_START = r"(?:^|(?<=[.:!?] )|(?<=\"\"\")|(?<=\| )|(?<=- ))"
PATTERNS = {
    "a clause as a subject": rf"{_START}(?:What|Who(?:se|ever)?|Where)\b(?![^.]*\?)",
    "who or whose without a noun": r"\bwhoever\b|\b(?:for|to|by|of|than|from|and) who(?:se)? \w+",
    "where for if or when": r"\b(?:only|except) where\b",
    "a pronoun for a noun": r"\b(?:that|those) of\b",
    "a test that is an evaluation": (
        r"\b(?:server|workers?|learners?) tests?\b|\btests? (?:of|beside|by) \w+|\b(?:is|are) tested\b"
    ),
    "beside, alone, anew": r"\bbesides?\b|\balone\b|\banew\b|\bmeanwhile\b|\bas ever\b",
    "go on for continue": r"\bgo(?:es|ing)? on\b|\bwent on\b",
    "an attribute's text that needs its name": (
        r"^\s*\w+: (?:of|as given|likewise|by|with|where|who|what|its|their|to|the same)\b"
    ),
    "told, hears": r"\btold\b|\btells?\b|\bhears?\b|\bheard\b",
    "bits": r"\b(?:same|other|its|their|the|has the|no) bits?\b",
    "nobody, but for": r"\b(?:but for|all but|nothing but|nobody|none of)\b",
    "in which, by which": r"\b(?:in|by|to|from|of|with|at|on|for) which\b",
    "so many, so much": r"\bso (?:many|much|often|long|large|few|far)\b(?! that| as)",
    "stands, lies": r"\bstands?\b|\blies?\b",
    "comes to, goes by": r"\bcomes? (?:to|of)\b|\bcame (?:to|of)\b|\bgo(?:es)? by\b",
    "too at the end": r", too\b",
    "is to, are to": r"\b(?:is|are) to (?!the\b)\w+",
    "that there are": r"\bthat there (?:is|are)\b",
    "an odd word": (
        r"\bforetold\b|\bheats?\b|\bcontestants?\b|\bstrikes?\b|\blent\b|\bin vain\b|\bwho is who\b"
        r"|\bunlike workers\b|\bdeal(?:s|t)? out\b|\bbeforehand\b|\bhalf through\b"
    ),
}
_RULES = {name: re.compile(rule) for name, rule in PATTERNS.items()}


class Count(NamedTuple):
    """Counts of a file.

    Attributes:
        words: Number of words.
        places: Number of places that match a pattern.
        semicolons: Number of semicolons.
    """

    words: int
    places: int
    semicolons: int


def files(paths: tuple[str, ...] = READ) -> list[Path]:
    """Returns all pages, modules and jobs below some paths."""
    tops = [ROOT / path for path in paths]
    found = [top.rglob("*") if top.is_dir() else [top] for top in tops]
    return sorted(file for some in found for file in some if file.suffix in {".md", ".py", ".toml"})


def prose(file: Path) -> Iterator[tuple[int, str]]:
    """Yields the lines that people read, each with its number."""
    lines = _of_code(file) if file.suffix == ".py" else _of_text(file)
    for number, line in lines:
        yield number, re.sub(r"`[^`]*`", "`x`", line)


@cache
def count(file: Path) -> Count:
    """Counts the words, places and semicolons of a file."""
    lines = [line for _, line in prose(file)]
    words = sum(len(line.split()) for line in lines)
    places = sum(len(rule.findall(line)) for rule in _RULES.values() for line in lines)
    return Count(words, places, sum(line.count("; ") for line in lines))


def sentences(page: Path) -> list[int]:
    """Returns the number of words of each sentence of a page, without its tables and headings."""
    kept = [line for _, line in prose(page) if not line.startswith(("#", "|", "!", "<"))]
    text = re.sub(r"^\s*(?:- |\d+\. )", "\n\n", "\n".join(kept), flags=re.MULTILINE)
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)
    found = (each.split() for part in re.split(r"\n\s*\n", text) for each in re.split(r"(?<=[.?!:]) ", part))
    return [len(words) for words in found if len(words) > 1]


def _of_text(file: Path) -> Iterator[tuple[int, str]]:
    """Yields a page without its blocks of code, or the comments of a job."""
    in_code = False
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        elif not in_code and (file.suffix == ".md" or line.startswith("#")):
            yield number, line


def _of_code(file: Path) -> Iterator[tuple[int, str]]:
    """Yields docstrings, comments, and strings of at least four words."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    expressions = (node.value for node in _statements(tree) if isinstance(node, ast.Expr))
    docstrings = {value.lineno for value in expressions if isinstance(value, ast.Constant)}
    with file.open("rb") as stream:
        for token in tokenize.tokenize(stream.readline):
            first, text = token.start[0], token.string
            if token.type == tokenize.COMMENT:
                yield first, text.lstrip("# ")
            elif token.type == tokenize.STRING and (first in docstrings or text.count(" ") >= 3):
                yield from enumerate(text.splitlines(), first)


def _statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Yields all statements, at any depth."""
    left = [tree]
    while left:
        node = left.pop()
        yield node
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            left += getattr(node, name, ())


def main(paths: list[str]) -> None:
    """Prints the places of some files, or the rates of all."""
    if paths:
        for file in files(tuple(paths)):
            for number, line in prose(file):
                for name in (name for name, rule in _RULES.items() if rule.search(line)):
                    print(f"{file.relative_to(ROOT)}:{number}: {name}: {line.strip()}")
        return
    found = sorted(((count(file), file) for file in files()), key=lambda each: -each[0].places)
    for counts, file in found:
        if counts.places:
            print(f"{1000 * counts.places / counts.words:5.1f} {counts.places:4} {file.relative_to(ROOT)}")
    words, places, semicolons = (sum(column) for column in zip(*(counts for counts, _ in found), strict=True))
    print(f"{places} places and {semicolons} semicolons in {words:,} words")
    print(f"{1000 * places / words:.1f} and {1000 * semicolons / words:.1f} in a thousand words")


if __name__ == "__main__":
    main(sys.argv[1:])
