"""Who may import what, and what `import rudra` does not start."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STANDARD = set(sys.stdlib_module_names)
OURS = {"rudra", "protocols", "topologies"}
CORE = STANDARD | OURS | {"numpy", "pydantic", "pydantic_core", "cloudpickle", "tqdm", "msgspec"}
LEARNING = CORE | {"torch", "sklearn"}

RULES = {  # file or directory -> what it may import; the longest name that fits counts
    "protocols": STANDARD | {"numpy", "protocols"},
    "topologies": STANDARD | {"topologies"},
    "rudra": CORE,
    "rudra/data/load.py": LEARNING,
    "rudra/readers": CORE | {"h5py", "PIL", "pandas", "zstandard"},
    "rudra/results/journals.py": LEARNING,
    "rudra/data/sources.py": CORE | {"h5py", "PIL"},
    "rudra/compute/models.py": LEARNING,
    "rudra/compute/tasks.py": LEARNING,
    "rudra/data/augmentation.py": LEARNING,
    "rudra/mpi/node_memory.py": LEARNING | {"mpi4py"},
    "rudra/compute/compiled.py": LEARNING,
    "rudra/data/trees.py": LEARNING,
    "rudra/compute/buffers.py": LEARNING,
    "rudra/data/sampling.py": LEARNING,
    "rudra/compute/networks.py": LEARNING,
    "rudra/compute/flat.py": LEARNING,
    "rudra/compute/half.py": LEARNING,
    "rudra/compute/optim.py": LEARNING,
    "rudra/compute/schedule.py": LEARNING,
    "rudra/compute/gradients.py": LEARNING,
    "rudra/compute/executor.py": LEARNING,
    "rudra/compute/devices.py": LEARNING,
    "rudra/results/recorder.py": LEARNING,
    "rudra/simulation/replay.py": LEARNING,
    "rudra/simulation/tensors.py": LEARNING,
    "rudra/results/export.py": LEARNING,
    "rudra/mpi/forkserver.py": STANDARD,
    "rudra/results/frame.py": CORE | {"pandas"},
    "rudra/api.py": LEARNING,
    "rudra/mpi/driver.py": LEARNING | {"mpi4py"},
    "rudra/mpi/regroup.py": CORE | {"mpi4py"},
    "rudra/mpi/comm_threads.py": CORE | {"mpi4py"},
    "rudra/mpi/failures.py": CORE | {"mpi4py"},
    "rudra/mpi/standstill.py": CORE | {"mpi4py"},
    "rudra/mpi/transfers.py": LEARNING | {"mpi4py"},
    "rudra/mpi/reduction.py": LEARNING | {"mpi4py"},
    "rudra/mpi/session.py": LEARNING | {"mpi4py"},
    "rudra/worker.py": CORE | {"mpi4py"},
    "rudra/mpi/start.py": CORE | {"mpi4py"},
    "rudra/results/reader.py": CORE | {"h5py", "torch"},
    "rudra/results/writer.py": CORE | {"h5py"},
    "rudra/results/validation.py": CORE | {"h5py"},
    "rudra/report": CORE | {"h5py", "matplotlib", "jinja2"},
    "rudra/report/analysis.py": CORE | {"h5py", "matplotlib", "pandas"},
    "rudra/bench": LEARNING | {"mpi4py", "h5py"},
    "rudra/studies/calibrate.py": LEARNING,
    "rudra/cli/doctor.py": LEARNING | {"h5py"},
}
ONLY_INSIDE_FUNCTIONS = {"matplotlib", "sklearn", "jinja2", "pandas", "PIL", "zstandard"}
SOURCES = sorted(file for package in OURS for file in (ROOT / package).rglob("*.py"))


def imports(tree: ast.AST) -> set[str]:
    """Top-level names of everything that is imported anywhere below."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(str(node.module).partition(".")[0])
    return found


def allowed(name: str) -> set[str]:
    return RULES[max((rule for rule in RULES if name == rule or name.startswith(rule.removesuffix(".py"))), key=len)]


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: str(file.relative_to(ROOT)))
def test_imports_stay_inside_the_layer(file: Path) -> None:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    assert imports(tree) - allowed(str(file.relative_to(ROOT))) == set()
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    inside = {n for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for n in ast.walk(f)}
    at_import = set().union(*(imports(node) for node in statements if node not in inside))
    assert at_import & ONLY_INSIDE_FUNCTIONS == set()


def test_relative_imports_are_not_used() -> None:
    """They would slip through the table above."""
    trees = {file: ast.parse(file.read_text(encoding="utf-8")) for file in SOURCES}
    relative = [f for f, tree in trees.items() for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.level]
    assert relative == []


def test_importing_rudra_starts_no_mpi_and_loads_no_pictures() -> None:
    code = "import sys, rudra; print([m for m in ('mpi4py', 'h5py', 'matplotlib') if m in sys.modules])"
    seen = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert seen.stdout.strip() == "[]"
