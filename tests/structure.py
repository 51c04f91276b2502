"""Counts what makes code hard to follow: import circles, depth of inheritance, attributes, names that occur twice.

`python -m tests.structure` prints the counts for the three packages of this checkout.
"""

import ast
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("rudra", "protocols", "topologies")
SOURCES = sorted(file for place in (*PACKAGES, "benchmarks") for file in (ROOT / place).rglob("*.py"))
"""Of all code but the tests."""

MANY = 20
"""Attributes of a class beyond which it probably has a second duty."""

Trees = Mapping[str, ast.Module]


@cache
def parsed(file: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(file.read_text(encoding="utf-8"))


@cache
def trees() -> Trees:
    """Module -> its syntax tree."""
    found = {}
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            parts = file.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = parsed(file)
    return found


def imports(modules: Trees) -> dict[str, set[str]]:
    """Module -> modules that it imports anywhere, also in functions and for type checking alone.

    A package that is imported for a module of its own does not count.
    """
    found: dict[str, set[str]] = {name: set() for name in modules}
    for name, tree in modules.items():
        for node in ast.walk(tree):
            wanted = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                wanted = [f"{node.module}.{alias.name}" for alias in node.names]
                wanted = [each if each in modules else node.module for each in wanted]
            found[name] |= {each for each in wanted if each in modules and each != name}
    return found


def circles(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of modules of which each reaches each other (Tarjan's strongly connected components of two or more)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(edges[node]):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            place = stack.index(node)
            group = stack[place:]
            del stack[place:]
            if len(group) > 1:
                found.append(sorted(group))

    for node in sorted(edges):
        if node not in index:
            visit(node)
    return found


def classes(modules: Trees) -> Iterator[tuple[str, ast.ClassDef]]:
    """Each class with its module."""
    for name, tree in modules.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                yield name, node


def attributes(node: ast.ClassDef) -> set[str]:
    """Names that the methods of a class assign on `self`."""
    return {
        target.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)
        for target in [each]
        if isinstance(target.value, ast.Name) and target.value.id == "self"
    }


def depths(modules: Trees, base: str) -> dict[str, int]:
    """Class below `base` -> how many classes lie between, itself included."""
    bases = {node.name: [b.id for b in node.bases if isinstance(b, ast.Name)] for _, node in classes(modules)}

    def depth(name: str) -> int:
        if name == base:
            return 0
        above = [depth(each) for each in bases.get(name, ())]
        return 1 + max(above) if above and max(above) >= 0 else -1

    return {name: found for name in bases if (found := depth(name)) > 0}


def main() -> None:
    modules = trees()
    found = circles(imports(modules))
    print(f"import circles: {len(found)}")
    for group in found:
        print(f"  {' <-> '.join(group)}")
    below = depths(modules, "Machine")
    print(f"depth of inheritance below Machine: {max(below.values())}")
    for name, depth in sorted(below.items(), key=lambda item: -item[1]):
        if depth > 2:
            print(f"  {depth} {name}")
    large = {f"{name}.{node.name}": len(attributes(node)) for name, node in classes(modules)}
    print(f"classes with more than {MANY} attributes: {sum(count > MANY for count in large.values())}")
    for name, count in sorted(large.items(), key=lambda item: -item[1]):
        if count > MANY:
            print(f"  {count} {name}")
    names = Counter(node.name for _, node in classes(modules) if not node.name.startswith("_"))
    twice = sorted(name for name, count in names.items() if count > 1)
    print(f"public classes of one name: {len(twice)} ({', '.join(twice)})")


if __name__ == "__main__":
    main()
