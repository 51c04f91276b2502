import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from rudra.cli.main import main
from rudra.errors import ResultsError
from rudra.report.watch import Curve, Watched, plotted, watch
from rudra.results.reader import Results, open_results
from tests.unit.results_files import write_run
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]
WRITER = """
import sys, time
from pathlib import Path
from rudra.core.records import UPDATE
from tests.unit.results_files import new_writer, rows
with new_writer(Path(sys.argv[1])) as writer:
    for i in range(int(sys.argv[2])):
        writer.append("updates", rows(UPDATE, timestamp=i + 1, time_s=0.1 * i, mean_staleness=1.5, gradients=2))
        time.sleep(0.05)
    writer.fail("interrupted", "that was all")
"""


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that goes on writing `run.h5` for half a minute."""
    process = subprocess.Popen([sys.executable, "-c", WRITER, tmp_path / "run.h5", "600"], cwd=ROOT)
    yield process
    process.kill()
    process.wait()


def has(path: Path, updates: int) -> bool:
    with suppress(ResultsError), open_results(path) as results:
        return len(results.updates) >= updates
    return False


def wait_for(path: Path, updates: int) -> None:
    assert eventually(lambda: has(path, updates), 60), f"{path} never had {updates} updates"


class Terminal:
    """`rudra watch` on a pseudo-terminal of 24 lines with 80 columns."""

    def __init__(self, *arguments: str | Path) -> None:
        self._master, slave = pty.openpty()
        environment = {**os.environ, "COLUMNS": "80", "LINES": "24"}
        command = [sys.executable, "-m", "rudra", "watch", *arguments]
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=slave, stdout=slave, stderr=slave)
        os.close(slave)
        self.text = ""

    def until(self, pattern: str, seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while not re.search(pattern, self.text):
            if not select.select([self._master], [], [], max(0.0, end - time.monotonic()))[0]:
                pytest.fail(f"{pattern!r} was not shown: {self.text[-2000:]!r}")
            try:
                self.text += os.read(self._master, 65536).decode()
            except OSError:
                pytest.fail(f"{pattern!r} was not shown before the end: {self.text[-2000:]!r}")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


@pytest.mark.timeout(150)
def test_follows_a_run_until_it_is_interrupted(tmp_path: Path, writer: subprocess.Popen[bytes]) -> None:
    terminal = Terminal(tmp_path / "run.h5", "--wait")
    try:
        terminal.until(r"(?s)running\x1b\[K.*[1-9]\d* updates")
        first = int(re.findall(r"(\d+) updates", terminal.text)[-1])
        terminal.until(rf"(?s)\x1b\[\d+A.* (?!{first} )[1-9]\d* updates")  # in place, and more of them
        assert writer.poll() is None
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.process.wait(30) == 0
        terminal.until(r"\x1b\[\?25h")  # the cursor is back
    finally:
        terminal.close()
    assert writer.poll() is None  # and the run goes on


@pytest.mark.timeout(150)
@pytest.mark.slow
def test_ends_with_the_run(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", WRITER, tmp_path / "run.h5", "40"], cwd=ROOT):
        terminal = Terminal(tmp_path / "run.h5", "--wait")
        try:
            terminal.until("(?s)interrupted: that was all.*40 updates")
            assert terminal.process.wait(30) == 0
        finally:
            terminal.close()


@pytest.mark.timeout(150)
def test_a_killed_writer_is_told_by_its_silence(tmp_path: Path, writer: subprocess.Popen[bytes]) -> None:
    wait_for(tmp_path / "run.h5", 3)
    writer.kill()
    writer.wait()
    with open_results(tmp_path / "run.h5") as results:
        watched = Watched(results)
        watched.read()
        assert watched.frame(80, 24, time.time())[1] == "running"
        later = watched.frame(120, 24, time.time() + 70)
    assert re.fullmatch(r"running, but silent for 1:1\d min: a long step, or it was killed", later[1])


@pytest.mark.timeout(150)
def test_reads_only_what_is_new(
    tmp_path: Path, writer: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.h5"
    wait_for(path, 3)
    starts = []
    pieces = Results.pieces
    monkeypatch.setattr(Results, "pieces", lambda *a, **k: (starts.append((a[1], k["start"])), pieces(*a, **k))[1])
    with open_results(path) as results:
        watched = Watched(results)
        watched.read()
        first = updates_in(watched)
        wait_for(path, first + 3)
        starts.clear()
        watched.read()
        assert starts == [("minibatches", 0), ("updates", first)]
        assert updates_in(watched) >= first + 3
        assert "160 samples/s, ⟨σ⟩ 1.50" in watched.frame(80, 24, time.time())[2]  # 16 in every 0.1 s


def updates_in(watched: Watched) -> int:
    found = re.search(r"(\d+) updates", watched.frame(80, 24, time.time())[2])
    return int(found[1])


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 60), (40, 12), (20, 5), (9, 2)])
@pytest.mark.parametrize(("updates", "epochs"), [(0, 0), (1, 0), (500, 3)])
def test_a_frame_fits_the_terminal(tmp_path: Path, width: int, height: int, updates: int, epochs: int) -> None:
    write_run(tmp_path / "run.h5", updates=updates, epochs=epochs, staleness=1, finish=epochs > 0)
    with open_results(tmp_path / "run.h5") as results:
        watched = Watched(results)
        watched.read()
        lines = watched.frame(width, height, time.time())
    assert len(lines) <= height
    assert max(map(len, lines)) <= width


def test_once_prints_plain_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run.h5", updates=500, epochs=3, staleness=2)
    assert main(["watch", str(tmp_path / "run.h5"), "--once"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("digits: 2-softsync, λ = 4, μ = 16, MPI\nfinished\nepoch 3 of 10, 500 updates")
    assert "mean staleness ⟨σ⟩" in shown
    assert "\x1b" not in shown
    watch(tmp_path / "run.h5")  # no terminal: the same
    assert capsys.readouterr().out == shown


def test_a_missing_file_is_a_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(tmp_path / "run.h5"), "--once"]) == 2
    assert "no such result file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("x", "y", "picture"),
    [
        ([0, 1], [1, 1], ["⠉⠉⠉⠉", "⠀⠀⠀⠀"]),
        ([-5, 1], [1, 1], ["⠉⠉⠉⠉", "⠀⠀⠀⠀"]),  # before the beginning
        ([0, 1], [0, 1], ["⠀⠀⣠⠞", "⣠⠞⠁⠀"]),
        ([1], [2], ["⠀⠀⠀⠈", "⠀⠀⠀⠀"]),
        ([0, 1, np.nan], [np.nan, 3, 4], ["⠀⠀⠀⠈", "⠀⠀⠀⠀"]),
        ([], [], None),
        ([0], [np.inf], None),
    ],
)
def test_curves(x: list[float], y: list[float], picture: list[str] | None) -> None:
    lines = plotted(Curve("loss", np.array(x, float), np.array(y, float), "s"), 14, 2)
    if picture is None:
        assert lines == ["loss: nothing yet"]
    else:
        assert [line[-4:] for line in lines[1:3]] == picture
