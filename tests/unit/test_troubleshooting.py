"""docs/troubleshooting.md knows every message: what the code raises or warns of, and nothing else."""

import ast
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from pages import ROOT, page

from tests.structure import parsed

RAISED = {
    *("ConfigError", "DataError", "TopologyError", "ProtocolError", "ResultsError", "ReplayError", "LaunchError"),
    *("RunError", "HookError", "CheckpointError", "ValueError"),
}
TOLD = {"warning", "Warn", "Fail"}
Names = dict[str, list[ast.expr]]


def test_every_message_has_a_row_and_every_row_a_message() -> None:
    known = [phrase for row in rows() for phrase in re.findall(r"`(.+?)`(?=[,| ]|$)", row)]
    matches = {phrase: re.compile(".*".join(map(re.escape, phrase.strip("…").split("…")))) for phrase in known}
    seen, missing = set(), []
    for place, texts in messages():
        found = {phrase for phrase, match in matches.items() for text in texts if match.search(text)}
        seen |= found
        if not found:
            missing.append(f"{place}: {' | '.join(sorted(texts))}")
    assert missing == []
    assert {phrase for phrase in known if phrase not in seen} - elsewhere() == set()


def rows() -> Iterator[str]:
    """The first column of the tables of messages."""
    for line in page("troubleshooting.md").partition("\n## ")[2].splitlines():
        if line.startswith("| `"):
            yield line.split(" | ")[0][2:]


def elsewhere() -> set[str]:
    """Phrases that are put together in several places of the code, but are there."""
    code = " ".join(path.read_text(encoding="utf-8") for path in sources())
    phrases = {phrase for row in rows() for phrase in re.findall(r"`(.+?)`(?=[,| ]|$)", row)}
    return {phrase for phrase in phrases if all(part.strip() in code for part in phrase.split("…"))}


def sources() -> list[Path]:
    places = [path for room in ("rudra", "protocols", "topologies") for path in (ROOT / room).rglob("*.py")]
    return sorted(path for path in places if "bench" not in path.relative_to(ROOT).parts)


def messages() -> Iterator[tuple[str, set[str]]]:
    """Place -> what is said there, with `…` for what a run fills in; each text in all its variants."""
    phrases = assigned(ast.parse((ROOT / "rudra/job/rules/phrases.py").read_text(encoding="utf-8")))
    for path in sources():
        tree = parsed(path)
        constants = assigned(ast.Module([node for node in tree.body if isinstance(node, ast.Assign)], []))
        if path.parent.name == "rules":
            constants |= phrases
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef):
                names = constants | assigned(function)
                for node in ast.walk(function):
                    if (text := told(node, rules=path.parent.name == "rules")) is not None:
                        texts = {" ".join(text.split()) for text in variants(text, names)}
                        if texts := {text for text in texts if len(re.findall(r"[a-z]", text)) > 7}:
                            yield f"{path.relative_to(ROOT)}:{node.lineno}", texts


def told(node: ast.AST, *, rules: bool) -> ast.expr | None:
    """What a call says to users, or what a rule of jobs yields."""
    if isinstance(node, ast.Call) and node.args and said(node.func):
        return node.args[0]
    return node.value if rules and isinstance(node, ast.Yield) else None


def said(function: ast.expr) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in RAISED | TOLD


def assigned(function: ast.AST) -> Names:
    names: Names = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            names.setdefault(node.targets[0].id, []).append(node.value)
        elif isinstance(node, ast.NamedExpr):
            names.setdefault(node.target.id, []).append(node.value)
    return names


def variants(node: ast.expr, names: Names, depth: int = 0) -> list[str]:
    """The texts that an expression may give."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.JoinedStr):
        parts = [
            variants(part.value if isinstance(part, ast.FormattedValue) else part, names, depth + 1)
            for part in node.values
        ]
        return ["".join(each) for each in list(product(*parts))[:64]]
    if isinstance(node, ast.IfExp):
        return variants(node.body, names, depth + 1) + variants(node.orelse, names, depth + 1)
    if isinstance(node, ast.Name) and node.id in names and depth < 4:
        return [text for value in names[node.id] for text in variants(value, names, depth + 1)]
    return ["…"]
