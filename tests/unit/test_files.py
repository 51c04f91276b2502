"""Files that commands write: with the user's umask, whole or not at all, and never in another's place unasked."""

import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rudra.cli.main import main
from rudra.errors import ResultsError
from rudra.files import cache_directory, check_output, written
from rudra.studies import calibrate
from tests.unit.report_files import without_layout

TINY = "--set=data.train_limit=32 --set=data.test_limit=16 --set=training.epochs=1 --set=model.name=mlp"
TINY += " --set=cluster.learners=2 --set=cluster.threads_per_rank=1"
COMMANDS = {  # what writes -> its command line, and the files that it makes
    "simulate": (f"simulate digits --output new.h5 {TINY}", ["new.h5", "new.png"]),
    "plot": ("plot run.h5 --output new.svg", ["new.svg"]),
    "plot beside": ("plot run.h5", ["run.png"]),
    "timeline": ("timeline run.h5 -o new.json", ["new.json"]),
    "timeline compressed": ("timeline run.h5 -o new.json.gz", ["new.json.gz"]),
    "replay": ("replay run.h5 --until 1 --quiet", ["run-1.pt"]),
    "replay elsewhere": ("replay run.h5 --until 0 --quiet --output new.pt", ["new.pt"]),
    "calibrate": ("calibrate digits -o new.toml --quiet", ["new.toml"]),
    "profile": (f"profile digits -o new.svg --seconds 0.01 {TINY}", ["new.svg"]),
    "place": (f"place digits -o new.svg --seconds 0.01 {TINY}", ["new.svg"]),
    "report": ("report run.h5", ["report.html"]),
}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("recorded") / "run.h5"
    assert main([*f"simulate digits --quiet --output {path}".split(), *TINY.split()]) == 0
    return path.read_bytes()


@pytest.fixture
def here(tmp_path: Path, recorded: bytes, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with a result file; nothing is measured, pages have no figures, and pictures are not laid out."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rudra.report.page.inline", lambda figure, prefix, *, narrow: "")
    monkeypatch.setattr(calibrate, "calibrate", lambda *_, **__: "nodes = 1\n")
    Path("run.h5").write_bytes(recorded)
    with without_layout():
        yield tmp_path


@pytest.fixture
def umask() -> Iterator[Callable[[int], int]]:
    """Sets it for this test."""
    before = os.umask(0)
    yield os.umask
    os.umask(before)


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.slow
def test_what_a_command_writes_follows_the_umask_and_replaces_a_file_only_with_force(
    here: Path, umask: Callable[[int], int], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line, files = COMMANDS[name]
    umask(0o002)
    assert main(line.split()) == 0
    assert sorted(os.listdir(here)) == sorted(["run.h5", *files])
    assert {stat.S_IMODE((here / file).stat().st_mode) for file in files} == {0o664}
    for file in files:
        (here / file).unlink()
    capsys.readouterr()
    (here / files[0]).write_text("mine")
    assert main(line.split()) == 2
    assert capsys.readouterr().err == f"rudra: {files[0]}: exists; give another name or --force\n"
    assert (here / files[0]).read_text() == "mine"
    assert sorted(os.listdir(here)) == sorted(["run.h5", files[0]])
    umask(0o077)
    assert main([*line.split(), "--force"]) == 0
    assert (here / files[0]).read_bytes()[:4] != b"mine"
    assert {stat.S_IMODE((here / file).stat().st_mode) for file in files} == {0o600}


@pytest.mark.slow
def test_figures_follow_the_umask_too_and_are_only_replaced_with_force(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = os.umask(0o027)
    try:
        assert main(["report", "run.h5", "--figures", "figures"]) == 0
    finally:
        os.umask(before)
    assert stat.S_IMODE(Path("figures").stat().st_mode) == 0o750
    assert {stat.S_IMODE(file.stat().st_mode) for file in Path("figures").iterdir()} == {0o640}
    Path("report.html").unlink()
    capsys.readouterr()
    assert main(["report", "run.h5", "--figures", "figures"]) == 2
    assert re.fullmatch(r"rudra: figures/\S+: exists; give another name or --force\n", capsys.readouterr().err)
    assert not Path("report.html").exists()


def test_an_existing_picture_is_left_alone_by_a_run(here: Path) -> None:
    Path("new.png").write_text("mine")
    assert main(COMMANDS["simulate"][0].split()) == 0
    assert Path("new.png").read_text() == "mine"


@pytest.mark.parametrize(
    "error", [ResultsError("new.png: cannot write: No space left on device"), TypeError("no\nfont")]
)
def test_a_run_whose_picture_cannot_be_drawn_has_succeeded(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("rudra.report.plot.plot", fails)
    assert main(COMMANDS["simulate"][0].split()) == 0
    said = capsys.readouterr()
    assert said.out.endswith("\nwrote new.h5\n")
    assert "rudra: no picture: new.png: " in said.err


def test_a_file_whose_name_is_no_text_is_drawn_and_reported(here: Path) -> None:
    name = os.fsdecode(b"caf\xe9.h5")  # Latin-1 in a UTF-8 locale
    Path("run.h5").rename(name)
    Path("runs").mkdir()
    shutil.copy(name, Path("runs", name))
    shutil.copy(name, "runs/other.h5")  # of the same job, so that only their names tell the runs apart
    assert main(["plot", name, "--output", "picture.png"]) == 0
    assert Path("picture.png").stat().st_size > 0
    assert main(["report", "runs", "--output", "page.html", "--figures", "figures"]) == 0
    assert "caf\\udce9" in Path("page.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["plot", "timeline", "replay elsewhere", "report"])
def test_a_command_that_fails_leaves_what_there_was(here: Path, name: str) -> None:
    line, files = COMMANDS[name]
    (here / files[0]).write_text("mine")
    Path("run.h5").write_bytes(Path("run.h5").read_bytes()[:3000])
    assert main([*line.split(), "--force"]) == 2
    assert (here / files[0]).read_text() == "mine"
    assert sorted(os.listdir(here)) == sorted(["run.h5", files[0]])


def test_what_is_half_written_is_taken_away(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    try:
        with written(path) as file:
            file.write(b"half")
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert path.read_text() == "mine"
    assert os.listdir(tmp_path) == ["file"]


def test_a_link_stays_a_link_and_a_device_a_device(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with pytest.raises(ResultsError, match="link: exists"):
        check_output(tmp_path / "link", False)
    for path in (tmp_path / "link", Path("/dev/null")):
        with written(path) as file:
            file.write(b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "new"
    assert Path("/dev/null").is_char_device()


def test_a_full_disk_is_one_line() -> None:
    with pytest.raises(ResultsError) as raised, written(Path("/dev/full")) as file:
        file.write(bytes(100_000))
    assert str(raised.value) == "/dev/full: cannot write: No space left on device"


def test_a_user_without_a_home_has_a_cache_that_is_empty_and_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", home)
    place = cache_directory()
    assert not (place / "a.toml").is_file()
    with pytest.raises(OSError, match="Not a directory"):
        place.mkdir(parents=True, exist_ok=True)
