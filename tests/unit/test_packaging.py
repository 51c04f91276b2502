"""What a user gets who installs a wheel, or who has somebody else's packages of our names."""

import configparser
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import rudra
from rudra.job.jobfiles import shipped_jobs

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("rudra", "protocols", "topologies")


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=100, check=False)


def output(*command: str | Path, cwd: Path) -> str:
    done = run(*command, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of this checkout, built from a copy so that no build directory is left in it."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    names = output("git", "ls-files", "-co", "--exclude-standard", cwd=ROOT).splitlines()
    for name in names:
        if (ROOT / name).is_file():  # one that was deleted is still listed
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    output(
        sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", built, source, cwd=built
    )
    return next(built.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the programs of a new environment that has the wheel, and this environment's libraries."""
    place = tmp_path_factory.mktemp("venv")
    venv.create(place, with_pip=False, symlinks=True)
    python = place / "bin" / "python"
    output(
        sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", wheel, cwd=place
    )
    library = Path(output(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=place).strip())
    # As plain entries at the end, without what *.pth files there say: this checkout may be installed there.
    (library / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n" + sysconfig.get_path("platlib") + "\n")
    return place / "bin"


def test_the_wheel_holds_every_module_job_and_type_marker(wheel: Path) -> None:
    held = set(zipfile.ZipFile(wheel).namelist())
    modules = {str(f.relative_to(ROOT)) for p in PACKAGES for f in (ROOT / p).rglob("*.py")}
    assert modules - held == set(), "list the package in setup.cfg"
    assert {f"{p}/py.typed" for p in PACKAGES} <= held
    presets = {str(f.relative_to(ROOT)) for f in (ROOT / "rudra" / "simulation" / "presets").glob("*.toml")}
    assert presets
    assert presets <= held
    shipped = {name.partition("/share/rudra/jobs/")[2].removesuffix(".toml") for name in held}
    assert shipped - {""} == {*shipped_jobs(), "rudra/paper", "omnivore/paper"}
    templates = {name.rpartition("/")[2] for name in held if "/share/rudra/slurm/templates/" in name}
    assert templates == {file.name for file in (ROOT / "slurm" / "templates").iterdir()}


def test_shipped_jobs_are_found_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    paths = output(installed / "rudra", "jobs", "--paths", cwd=tmp_path).splitlines()
    assert {path.partition("/rudra/jobs/")[2].removesuffix(".toml") for path in paths} == set(shipped_jobs())
    assert all(Path(path).is_relative_to(installed.parent.resolve()) for path in paths)
    for job in ("digits", "rudra/figure4"):
        assert output(installed / "rudra", "validate", "--syntax", job, cwd=tmp_path).startswith(f"{job}: valid\n")


def test_a_batch_script_is_made_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    text = output(installed / "rudra", "slurm", "digits", "--launcher", "srun", "--print", cwd=tmp_path)
    assert f"\nPATH={installed}:$PATH\n" in text
    assert 'rudra run digits --output "$results" --resume' in text


def test_packages_of_our_names_in_the_working_directory_do_no_harm(installed: Path, tmp_path: Path) -> None:
    for name in PACKAGES[1:]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('somebody else')")
    assert output(installed / "python", "-m", "rudra", "validate", "--syntax", "digits", cwd=tmp_path).startswith(
        "digits: valid\n"
    )


def test_packages_of_our_names_that_are_loaded_already_are_refused(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "protocols.py").touch()
    done = run(installed / "python", "-c", "import protocols, rudra", cwd=tmp_path)
    assert done.returncode == 1
    assert re.search(
        r"^ImportError: rudra needs its own package 'protocols' in .*, but .*protocols.py", done.stderr, re.M
    )


def test_what_is_required_has_a_tested_version() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lines = setup["options"]["install_requires"].split()
    for extra in setup["options.extras_require"].values():
        lines += extra.split()
    pins = dict(line.split("==") for line in (ROOT / ".constraints.txt").read_text().splitlines() if "==" in line)
    for line in lines:
        name, _, least = line.partition(">=")
        assert version(pins[name]) >= version(least), line
    assert set(pins) == {line.partition(">=")[0] for line in lines}


def version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def test_versions_agree() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert f"\n## [{setup['metadata']['version']}]" in (ROOT / "CHANGELOG.md").read_text()
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert build[0] in setup["options.extras_require"]["test"].split()


def test_public_names_are_listed_before_anybody_asks_for_them() -> None:
    assert set(rudra.__all__) <= set(dir(rudra))
    assert all(getattr(rudra, name) is not None for name in rudra.__all__)
