"""Which room may import which, and what `import rudra` does not start."""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from rudra.compute.making import EXECUTORS
from rudra.roles import MACHINES
from tests import forks
from tests.structure import ROOT, SOURCES, Trees, attributes, circles, classes, depths, imports, parsed, trees
from topologies.kinds import Variant

ABOVE = {
    "rudra/__init__.py",
    "rudra/__main__.py",
    "rudra/api.py",
    "rudra/doctor.py",
    "rudra/preflight.py",
    "rudra/worker.py",
}
"""Beside the ground, on which all stand: what stands on all."""

OF_JOB = {"numpy", "pydantic", "pydantic_core", "protocols", "topologies"}
WITH_TORCH = OF_JOB | {"torch", "msgspec", "tqdm", "cloudpickle"}
RULES: dict[str, tuple[str, set[str]]] = {  # room -> rooms that it may import beside itself, and libraries
    "protocols": ("", {"numpy"}),
    "topologies": ("", set()),
    "ground": ("", set()),
    "job": ("ground", OF_JOB),
    "core": ("ground job", OF_JOB | {"msgspec"}),
    "data": ("ground job", OF_JOB | {"torch", "h5py", "PIL", "pandas", "zstandard"}),
    "compute": ("ground job core data", WITH_TORCH),
    "roles": ("ground job core", OF_JOB | {"msgspec"}),
    "results": ("ground job core data compute", WITH_TORCH | {"h5py", "pandas"}),
    "prepare": ("ground job core data compute results", WITH_TORCH),
    "mpi": ("ground job core data compute roles results prepare", WITH_TORCH | {"mpi4py"}),
    "simulation": ("ground job core data compute roles results prepare", WITH_TORCH),
    "explain": ("ground job core results prepare simulation", OF_JOB),
    "report": ("ground job core results prepare explain", OF_JOB | {"matplotlib", "jinja2"}),
    "studies": ("ground job core data compute results prepare mpi simulation above report", WITH_TORCH),
    "tuning": ("ground job core results prepare mpi simulation above report studies", OF_JOB),
    "above": (
        "ground job core data compute roles results prepare mpi simulation tuning cli",
        WITH_TORCH | {"mpi4py", "h5py"},
    ),
    "bench": (
        "ground job core data compute roles results prepare mpi simulation above studies",
        WITH_TORCH | {"mpi4py"},
    ),
    "benchmarks": (
        "ground job core data compute roles results prepare mpi simulation above explain report studies tuning bench",
        WITH_TORCH | {"mpi4py", "h5py"},
    ),
    "cli": (
        "ground job core data compute results prepare mpi simulation above explain report studies tuning bench",
        WITH_TORCH | {"h5py", "argcomplete"},
    ),
}
ONLY_INSIDE_FUNCTIONS = {"argcomplete", "matplotlib", "jinja2", "pandas", "PIL", "zstandard"}


def room_of(file: Path) -> str:
    place = file.relative_to(ROOT)
    if str(place) in ABOVE:
        return "above"
    if place.parts[0] != "rudra":
        return place.parts[0]
    return place.parts[1] if len(place.parts) > 2 else "ground"


def imported(tree: ast.AST) -> set[str]:
    """Modules that are imported anywhere below; of Rudra's own, their rooms, such as `rudra: job`."""
    found = set()
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert not node.level, "relative imports would slip through"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        found |= {*map(origin, names)}
    return found


@cache
def origin(name: str) -> str:
    """The library of an imported name; of Rudra's own, the room."""
    first = name.partition(".")[0]
    if first != "rudra":
        return first
    path = ROOT.joinpath(*name.split("."))
    while path != ROOT and not (path.is_dir() or path.with_suffix(".py").is_file()):
        path = path.parent  # a name in a module
    return f"rudra: {room_of(path / '__init__.py' if path.is_dir() else path.with_suffix('.py'))}"


def test_each_variant_of_a_role_has_a_state_machine_and_an_executor() -> None:
    assert MACHINES.keys() == EXECUTORS.keys() == {*Variant}


def test_only_the_module_of_devices_and_that_of_a_benchmark_know_cuda() -> None:
    knows = {
        str(file.relative_to(ROOT))
        for file in SOURCES
        if "cuda" in file.read_text(encoding="utf-8")
        for node in ast.walk(parsed(file))
        if (isinstance(node, ast.Attribute) and node.attr in ("cuda", "is_cuda"))
        or (
            isinstance(node, ast.Compare)
            and any(isinstance(n, ast.Constant) and n.value == "cuda" for n in ast.walk(node))
        )
    }
    assert knows == {"rudra/compute/device/cuda.py", "benchmarks/gpu_device.py"}


def test_protocols_and_topologies_name_nothing_of_rudra_in_a_string() -> None:
    for file in (file for file in SOURCES if file.relative_to(ROOT).parts[0] in ("protocols", "topologies")):
        nodes = ast.walk(parsed(file))
        texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        assert not [text for text in texts if re.fullmatch(r"rudra(\.\w+)+(:\w+)?", text)], file


def at_import(node: ast.AST) -> Iterator[ast.AST]:
    """Statements that import something when their module is imported."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef):
            yield from at_import(child)


def test_imports_of_a_module_stay_inside_its_room_and_those_below() -> None:
    wrong = {}
    for file in SOURCES:
        tree, room = parsed(file), room_of(file)
        rooms, libraries = RULES[room]
        allowed = {f"rudra: {name}" for name in (room, *rooms.split())} | libraries | {room}
        foreign = imported(tree) - set(sys.stdlib_module_names) - allowed
        slow = set().union(*map(imported, at_import(tree))) & ONLY_INSIDE_FUNCTIONS
        if foreign | slow:
            wrong[str(file.relative_to(ROOT))] = foreign | slow
    assert wrong == {}


def test_tests_do_not_import_each_other() -> None:
    every = [*(ROOT / "tests").rglob("*.py")]
    names = {file.stem for file in every if file.stem.startswith("test_")}
    files = [file for file in every if re.search(r"\b(from|import)\b.*\btest_", file.read_text(encoding="utf-8"))]
    found = {
        (file.stem, module)
        for file in files
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        for module in (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else []
        )
        if module.rpartition(".")[2] in names
    }
    assert found == set()


@pytest.mark.parametrize(
    ("code", "unneeded"),
    [
        ("import rudra", {"mpi4py", "h5py", "matplotlib"}),
        ("import rudra.api, rudra.mpi.launch; rudra.Job.load('digits').plan()", {"torch"}),  # as who starts ranks
    ],
)
def test_nothing_is_imported_before_it_is_needed(code: str, unneeded: set[str]) -> None:
    command = [sys.executable, "-c", f"import sys; {code}; print(*sys.modules)"]
    seen = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert not unneeded & set(seen.stdout.split())


def test_first_gradient_of_an_uncompiled_model_loads_no_compiler(tmp_path: Path) -> None:
    (tmp_path / "tried.py").write_text(
        "import sys\nfrom rudra.cli.main import main\n"
        "code = main(['validate', 'digits'])\nprint(code, 'torch._dynamo' in sys.modules)\n"
    )
    seen = subprocess.run(
        forks.script("tried.py"), cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )
    assert seen.stdout.splitlines()[-1] == "0 False"


@pytest.mark.parametrize(
    "text", ["README.md", "docs/architecture.md", "docs/contributing.md", ".github/CONTRIBUTING.md"]
)
def test_files_that_texts_name_are_there(text: str) -> None:
    content = (ROOT / text).read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:rudra|benchmarks|tests|protocols|topologies)/[a-z_/]+\.py)`", content))
    assert {name for name in named if not (ROOT / name).is_file()} == set()
    if text == "docs/architecture.md":
        assert {room for room in RULES.keys() - {"above"} if room not in content} == set()


def test_modules_import_each_other_in_no_circle() -> None:
    """Neither in functions nor for type checking alone."""
    assert circles(imports(trees())) == []


def test_circles_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]


def test_no_public_class_has_the_name_of_another() -> None:
    names = [node.name for _, node in classes(trees()) if not node.name.startswith("_")]
    assert [name for name, count in Counter(names).items() if count > 1] == []


def roles() -> Trees:
    """Those of the package of roles."""
    return {name: tree for name, tree in trees().items() if name.startswith("rudra.roles")}


def test_no_role_edits_what_another_one_decided() -> None:
    """`Machine.handle` is the only way from an event to actions."""
    found = {
        node.name
        for _, node in classes(roles())
        for each in node.body
        if isinstance(each, ast.FunctionDef) and each.name == "handle"
    }
    assert found == {"Machine"}


def test_roles_are_at_most_two_levels_below_the_machine() -> None:
    deeper = {name for name, depth in depths(trees(), "Machine").items() if depth > 2}
    assert deeper == set()


def test_classes_of_roles_have_few_attributes() -> None:
    assert {node.name: found for _, node in classes(roles()) if len(found := attributes(node)) > 22} == {}
