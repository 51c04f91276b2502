"""Nothing that stands in a file is run: no call anywhere that could, but for the few that say why."""

import ast
from collections.abc import Iterator

import pytest

from tests.structure import ROOT, SOURCES, parsed

FORBIDDEN = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "os.chmod", "yaml.load"}
MODULES = {"marshal", "shelve", "dill", "joblib", "runpy"}
ONLY_IN = {
    "pickle.load": {"rudra/worker.py"},  # what the launcher of the same run wrote, for this user alone
    "pickle.loads": {
        "rudra/mpi/node_memory.py",  # what another rank of the same run and node has in memory
        "protocols/probe.py",  # what the same function has just written
    },
    "pickle.Unpickler": set[str](),
    "pickle._Unpickler": {"rudra/data/readers/cifar.py"},  # which finds no class but stand-ins
    "os.umask": {"rudra/mpi/forkserver.py"},  # a rank's is its proxy's
    "tempfile.mkstemp": {"rudra/mpi/launch.py"},  # the same; others follow the umask
    "importlib.import_module": {
        "rudra/plugins.py",  # package.module:callable
        "rudra/__init__.py",
        "rudra/package_check.py",
        "rudra/bench/__init__.py",
        "benchmarks/links.py",  # what the benchmark that starts it names
        "rudra/cli/main.py",
        "rudra/data/readers/__init__.py",
        "rudra/tuning/strategies/__init__.py",
        "rudra/tuning/strategies/bayes.py",  # optuna, which is optional
        "protocols/making.py",
        "topologies/fitting.py",
    },
}


def violations(tree: ast.AST, file: str) -> Iterator[str]:
    """What a module does that it must not do."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module in {"pickle", "os", "torch", "numpy", *MODULES}:
            risky = {"load", "loads", "Unpickler", "system", "popen"} if node.module not in MODULES else set()
            yield from (alias.name for alias in node.names if not risky or alias.name in risky)
        elif isinstance(node, ast.Attribute) and file not in ONLY_IN.get(ast.unparse(node), {file}):
            yield ast.unparse(node)
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            right = {
                "torch.load": given.get("weights_only") == "True",
                "np.load": given.get("allow_pickle", "False") == "False",
                "numpy.load": given.get("allow_pickle", "False") == "False",
                "cloudpickle.load": False,
                "cloudpickle.loads": False,
            }
            if name in FORBIDDEN or not right.get(name, True) or given.get("shell", "False") != "False":
                yield name


def test_modules_run_nothing_that_stands_in_a_file() -> None:
    found = {}
    for file in SOURCES:
        name = str(file.relative_to(ROOT))
        found[name] = list(violations(parsed(file), name))
    assert {name: calls for name, calls in found.items() if calls} == {}


@pytest.mark.parametrize(
    "text",
    [
        "pickle.load(file)",
        "f = pickle.load",
        "pickle.loads(content)",
        "from pickle import loads",
        "import marshal",
        "class U(pickle.Unpickler): pass",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "eval(text)",
        "subprocess.run(text, shell=True)",
        "importlib.import_module(name)",
        "tempfile.mkstemp()",
        "os.umask(0)",
    ],
)
def test_violations_of_a_risky_call_are_found(text: str) -> None:
    assert list(violations(ast.parse(text), "rudra/new.py"))


def test_violations_of_a_safe_call_are_none() -> None:
    text = "torch.load(path, weights_only=True); np.load(path); module.eval(); re.compile(text); json.load(file)"
    assert list(violations(ast.parse(text), "rudra/new.py")) == []
