"""What a user gets who installs a wheel, or who has somebody else's packages of our names."""

import configparser
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import rudra
from rudra.bench import BENCHMARKS
from rudra.job import schema
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
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of this checkout, so that no build directory is left in it."""
    source = tmp_path_factory.mktemp("source")
    names = output("git", "ls-files", "-co", "--exclude-standard", cwd=ROOT).splitlines()
    for name in names:
        if (ROOT / name).is_file():  # one that was deleted is still listed
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    return source


def wheel_of(source: Path, place: Path) -> Path:
    """The wheel that pip makes of a directory or an archive."""
    pip = (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation")
    output(*pip, "-w", place, source, cwd=place)
    return next(place.glob("*.whl"))


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wheel_of(source, tmp_path_factory.mktemp("wheel"))


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
    assert "rudra/job/schema.json" in held
    pages = {str(f.relative_to(ROOT)) for f in (ROOT / "rudra" / "report").glob("*.html")}
    assert pages
    assert pages <= held
    presets = {str(f.relative_to(ROOT)) for f in (ROOT / "rudra" / "prepare" / "presets").glob("*.toml")}
    assert presets
    assert presets <= held
    shipped = {name.partition("/share/rudra/jobs/")[2].removesuffix(".toml") for name in held}
    assert shipped - {""} == {
        *shipped_jobs(),
        "rudra/paper",
        "omnivore/paper",
        "crossbow/paper",
        "hogbatch/paper",
        "ralp/paper",
    }
    templates = {name.rpartition("/")[2] for name in held if "/share/rudra/slurm/templates/" in name}
    assert templates == {file.name for file in (ROOT / "slurm" / "templates").iterdir()}


@pytest.mark.slow
def test_the_source_archive_makes_the_same_wheel(source: Path, wheel: Path, tmp_path: Path) -> None:
    code = "import sys; from setuptools import build_meta; print(build_meta.build_sdist(sys.argv[1]))"
    name = output(sys.executable, "-c", code, tmp_path, cwd=source).split()[-1]
    with tarfile.open(tmp_path / name) as archive:
        held = {member.partition("/")[2] for member in archive.getnames()}
    assert {"README.md", "LICENSE", "CHANGELOG.md", "docs/architecture.md", "pyproject.toml", "setup.cfg"} <= held
    again = wheel_of(tmp_path / name, tmp_path)
    first, second = ({i.filename: i.CRC for i in zipfile.ZipFile(each).infolist()} for each in (wheel, again))
    assert first == second


@pytest.mark.slow
def test_an_installed_wheel_trains(installed: Path, tmp_path: Path) -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    rudra = installed / "rudra"
    assert output(rudra, "--version", cwd=tmp_path) == f"rudra {setup['metadata']['version']}\n"
    assert output(rudra, "jobs", "digits", cwd=tmp_path) == (ROOT / "jobs" / "digits.toml").read_text(encoding="utf-8")
    assert output(rudra, "schema", cwd=tmp_path) == schema.text()
    assert output(rudra, "init", "mine.toml", cwd=tmp_path).startswith("wrote mine.toml")
    assert output(rudra, "validate", "mine.toml", cwd=tmp_path).startswith("mine.toml: valid\n")
    said = output(rudra, "simulate", "mine.toml", "--set", "training.epochs=1", "--output", "out.h5", cwd=tmp_path)
    assert "wrote out.h5" in said


@pytest.mark.slow
def test_shipped_jobs_are_found_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    paths = output(installed / "rudra", "jobs", "--paths", cwd=tmp_path).splitlines()
    assert {path.partition("/rudra/jobs/")[2].removesuffix(".toml") for path in paths} == set(shipped_jobs())
    assert all(Path(path).is_relative_to(installed.parent.resolve()) for path in paths)
    for job in ("digits", "rudra/figure4"):
        assert output(installed / "rudra", "validate", "--syntax", job, cwd=tmp_path).startswith(f"{job}: valid\n")


def test_the_wheel_has_the_benchmarks_that_users_need(wheel: Path, installed: Path, tmp_path: Path) -> None:
    assert not {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()} & {"benchmarks", "tests"}
    listed = output(installed / "rudra", "bench", cwd=tmp_path)
    assert re.findall(r"^  (\w+) ", listed, re.M) == list(BENCHMARKS)
    done = run(installed / "rudra", "bench", "sparse", "--quick", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("rudra: benchmark 'sparse' needs a checkout of Rudra; installed: ddp, ")


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
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    released = re.findall(r"^## \[(\d\S*)\]", changes, re.MULTILINE)
    assert released[0] == setup["metadata"]["version"]
    assert max(map(len, changes.splitlines())) <= 120
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert build[0] in setup["options.extras_require"]["test"].split()


def test_public_names_are_listed_before_anybody_asks_for_them() -> None:
    assert set(rudra.__all__) <= set(dir(rudra))
    assert all(getattr(rudra, name) is not None for name in rudra.__all__)
