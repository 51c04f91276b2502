"""A skipped test fails where CI is set, unless it needs another machine; what a module sets up is set up once."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forks

SKIPS = """
import pytest
@pytest.mark.skip(reason="no data")
def test_skipped(): pass
@pytest.mark.gpu
@pytest.mark.skip(reason="no GPU")
def test_gpu(): pass
@pytest.mark.golden
@pytest.mark.skip(reason="other arithmetic")
def test_golden(): pass
@pytest.mark.xfail(reason="known")
def test_known(): raise AssertionError
"""
MODULE = "import pytest\npytest.skip('no library', allow_module_level=True)\n"


@pytest.mark.parametrize(
    ("ci", "code", "failed"),
    [("true", 1, {"test_module.py: no library", "test_some.py::test_skipped: no data"}), ("", 0, set())],
)
@pytest.mark.slow
def test_skips(tmp_path: Path, ci: str, code: int, failed: set[str]) -> None:
    shutil.copy(Path(__file__).resolve().parents[1] / "conftest.py", tmp_path)
    (tmp_path / "test_some.py").write_text(SKIPS)
    (tmp_path / "test_module.py").write_text(MODULE)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n gpu: x\n golden: x\n")
    options = ["-q", "-p", "no:cacheprovider", "--continue-on-collection-errors", "."]
    command = [*forks.rudra("import pytest; sys.exit(pytest.main(sys.argv[1:]))"), *options]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False, env={**os.environ, "CI": ci}
    )
    assert done.returncode == code, done.stdout
    said = re.findall(r"^(test_\S+): skipped, where every test must run: Skipped: (.*)", done.stdout, re.MULTILINE)
    assert {f"{test}: {reason}" for test, reason in said} == failed


SHARES = """
import os
from pathlib import Path
import pytest
@pytest.fixture(scope="module")
def shared():
    Path("shared-" + os.environ["PYTEST_XDIST_WORKER"]).touch()
@pytest.fixture(scope="module")
def other():
    Path("other-" + os.environ["PYTEST_XDIST_WORKER"]).touch()
@pytest.mark.parametrize("i", range(8))
def test_shared(shared, i): pass
@pytest.mark.parametrize("i", range(8))
def test_other(other, i): pass
def test_both(shared, other): pass
"""


STUBS = {
    "torch.py": "class cuda: is_available = None",
    "hypothesis.py": "class settings: register_profile = load_profile = staticmethod(lambda *args, **options: None)",
    **dict.fromkeys(("rudra/__init__.py", "rudra/prepare/__init__.py"), ""),
    "rudra/prepare/cost_files.py": "MEASURED = None",
}
"""In place of what conftest.py imports for other hooks: three processes import it here."""


@pytest.mark.slow
def test_tests_that_share_what_their_module_sets_up_go_to_one_process(tmp_path: Path) -> None:
    shutil.copy(Path(__file__).resolve().parents[1] / "conftest.py", tmp_path)
    (tmp_path / "test_some.py").write_text(SHARES)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    for name, text in STUBS.items():
        (tmp_path / "stubs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "stubs" / name).write_text(text)
    options = ["-n", "2", "--dist", "loadgroup", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", "."]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options], cwd=tmp_path, capture_output=True, text=True, timeout=250,
        check=False, env={**env, "PYTHONPATH": str(tmp_path / "stubs")},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    for fixture in ("shared", "other"):
        assert len(list(tmp_path.glob(f"{fixture}-gw*"))) == 1, "a test uses both"
