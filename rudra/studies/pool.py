"""Runs the points of a sweep in worker processes, several at a time, and shows their progress.

A worker process runs one point after the other. It ends with this process. The next sweep repeats its unfinished point.
"""

import multiprocessing
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NamedTuple, TextIO

import numpy as np
from numpy.typing import NDArray

from rudra.errors import ResultsError, RudraError
from rudra.job.job import Job
from rudra.machine import end_with_parent
from rudra.mpi.forkserver import fork_server
from rudra.results.progress import Bar, duration, shown
from rudra.results.reader import open_results
from rudra.studies.sweep import Driver, Point, Sweep

GRACE_S: dict[Driver, float] = {"simulation": 3.0, "mpi": 15.0}
"""How long a worker may take to close its result file when it is stopped."""

_LOOK_S = 1.0  # interval between reads of a result file that is being written
_WINDOW_S = 30.0  # period over which the rate is measured
_GUESS = {"cifar10": 50_000, "idx": 60_000, "digits": 1_437}  # training samples, until a result file has the number

Mode = Literal["bar", "lines", "quiet"]


class Failed(NamedTuple):
    """A point that failed, and the reason."""

    point: Point
    reason: str


def run(sweep: Sweep, directory: Path, done: set[str], *, workers: int, mode: Mode) -> list[Failed]:
    """Runs the points whose files are not in `done`.

    Args:
        sweep: points to run.
        directory: directory of the result files, which the caller has locked.
        done: files of finished points.
        workers: number of points that run at a time.
        mode: "bar" for a terminal, "lines" (one for each point) for a batch log, or "quiet".
    """
    missing = [point for point in sweep.points if point.file not in done]
    failures: list[Failed] = []
    progress = _Progress(sweep, directory, done, mode)
    try:
        with (
            fork_server() if sweep.driver == "mpi" else nullcontext(),
            closing(_ended(missing, directory, sweep.driver, workers, progress)) as ended,
        ):
            for point, reason in ended:
                failures += [] if reason is None else [Failed(point, reason)]
                progress.ended(point, reason)
    finally:
        progress.close()
    return failures


def _ended(
    points: Sequence[Point], directory: Path, driver: Driver, workers: int, progress: "_Progress"
) -> Generator[tuple[Point, str | None], None, None]:
    """Yields every point when it has ended, with the reason if it failed. Closing the generator stops the workers."""
    waiting = deque(points)
    idle: list[_Worker] = []
    busy: dict[Connection, tuple[_Worker, Point]] = {}
    try:
        while waiting or busy:
            while waiting and len(busy) < workers:
                worker = idle.pop() if idle else _Worker(driver)
                point = waiting.popleft()
                busy[worker.connection] = worker, point
                with suppress(OSError):  # the worker reports a bad file, and `answer` a dead worker
                    (directory / point.file).unlink(missing_ok=True)  # left by an unfinished run
                    worker.connection.send((point.job, directory / point.file))
                progress.began(point)
            for connection in wait(list(busy), timeout=0.2):
                assert isinstance(connection, Connection)
                worker, point = busy.pop(connection)
                reason = worker.answer()
                if worker.process.is_alive():
                    idle.append(worker)
                yield point, reason
            progress.look()
    finally:
        for worker in idle + [worker for worker, _ in busy.values()]:
            worker.stop()
        deadline = time.monotonic() + GRACE_S[driver]
        for worker in idle + [worker for worker, _ in busy.values()]:
            worker.join(deadline)


class _Worker:
    """A process that runs points, as its parent sees it."""

    def __init__(self, driver: Driver) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would copy locks that threads hold
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, driver, os.getpid()), daemon=True)
        with _ignored(signal.SIGINT):  # inherited: Ctrl-C at the terminal goes to the parent, which stops workers
            self.process.start()
        theirs.close()

    def answer(self) -> str | None:
        """Returns None if the point finished, and otherwise the reason."""
        try:
            reason: str | None = self.connection.recv()
        except (EOFError, OSError):
            self.process.join()
            code = self.process.exitcode or 0
            memory = "; is there enough memory?" if code == -signal.SIGKILL else ""
            reason = f"its process {f'was killed by signal {-code}{memory}' if code < 0 else f'ended with {code}'}"
        return reason

    def stop(self) -> None:
        self.connection.close()
        self.process.terminate()

    def join(self, deadline: float) -> None:
        self.process.join(max(0.0, deadline - time.monotonic()))
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


@contextmanager
def _ignored(number: int) -> Iterator[None]:
    try:
        before = signal.signal(number, signal.SIG_IGN)
    except ValueError:  # only the main thread can ignore a signal
        yield
        return
    try:
        yield
    finally:
        signal.signal(number, before)


def _work(connection: Connection, driver: Driver, parent: int) -> None:
    """Runs points in a worker process until the connection is closed."""
    end_with_parent()
    if os.getppid() != parent:
        return
    try:
        signal.signal(signal.SIGTERM, _interrupt)
        while True:
            job, file = connection.recv()
            connection.send(_execute(job, file, driver))
    except (KeyboardInterrupt, EOFError, OSError):
        os._exit(1)  # the parent has ended, or stops this process


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _execute(job: Job, file: Path, driver: Driver) -> str | None:
    from rudra import api

    execute = api.run if driver == "mpi" else api.simulate
    try:
        with execute(job, output=file, force=True, progress="quiet"):
            return None
    except RudraError as error:
        return str(error)
    except Exception as error:  # most likely raised by the user's own model or data
        return f"{type(error).__name__}: {' '.join(str(error).split())}"


class _Progress:
    """One bar over all points, each weighted by its number of training samples."""

    def __init__(self, sweep: Sweep, directory: Path, done: set[str], mode: Mode, file: TextIO | None = None) -> None:
        self._sweep, self._directory, self._mode = sweep, directory, mode
        self._file = sys.stderr if file is None else file
        self._samples: dict[str, int] = {}  # data table -> training samples
        self._share = {point.file: float(point.file in done) for point in sweep.points}
        self._running: list[Point] = []
        self._ended = len(done)
        self._failed = 0
        self._before = sum(self._done().values())
        self._began = self._looked = time.monotonic()
        self._window = deque([(self._began, self._before)])
        self._bar: Any = None
        if mode == "bar":
            self._bar = Bar(total=1.0, file=self._file, bar_format="{desc} {percentage:3.0f}%|{bar}| ", desc=sweep.name)

    def began(self, point: Point) -> None:
        self._running.append(point)

    def ended(self, point: Point, reason: str | None) -> None:
        self._running.remove(point)
        self._share[point.file] = 1.0
        self._ended += 1
        self._failed += reason is not None
        text = None
        if reason is not None:
            text = f"rudra: point {point.label} failed: {reason}"
        elif self._mode == "lines":
            error, staleness, time_ = _outcome(self._directory / point.file)
            ours = f"test error {error}, staleness {staleness}, {time_}"
            text = f"{self._sweep.name}: {point.label}: {ours}; {self._facts()}"
        if text:
            if self._bar is not None:
                self._bar.clear()
            print(text, file=self._file, flush=True)
        self._draw()

    def look(self) -> None:
        """Reads the progress of running points from their files, at intervals."""
        now = time.monotonic()
        if now - self._looked < _LOOK_S:
            return
        self._looked = now
        for point in self._running:
            with suppress(ResultsError), open_results(self._directory / point.file) as results:
                samples = int(results.attributes["training_samples"])
                self._samples[_data(point)] = samples
                applied = results.applied_samples()
                self._share[point.file] = min(1.0, applied / (point.job.training.epochs * samples))
        self._draw()

    def close(self) -> None:
        if self._bar is not None:
            self._draw()
            self._bar.close()

    def _done(self) -> dict[str, float]:
        return {point.file: self._share[point.file] * self._weight(point) for point in self._sweep.points}

    def _weight(self, point: Point) -> float:
        data = point.job.data
        guess = _GUESS.get(data.name, 10_000) if isinstance(data.name, str) else 10_000
        samples = self._samples.get(_data(point)) or min(guess, data.train_limit or guess)
        return float(point.job.training.epochs * samples)

    def _draw(self) -> None:
        now, done = time.monotonic(), sum(self._done().values())
        self._window.append((now, done))
        while now - self._window[0][0] > _WINDOW_S and len(self._window) > 2:
            self._window.popleft()
        if self._bar is not None:
            self._bar.n = min(1.0, done / sum(map(self._weight, self._sweep.points)))
            self._bar.bar_format = "{desc} {percentage:3.0f}%|{bar}| " + self._facts()
            self._bar.refresh()

    def _facts(self) -> str:
        done, total = sum(self._done().values()), sum(map(self._weight, self._sweep.points))
        facts = [f"{self._ended}/{len(self._sweep.points)} points"]
        if self._failed:
            facts.append(f"{self._failed} failed")
        (since, before), (until, after) = self._window[0], self._window[-1]
        if after > before:
            facts.append(f"{(after - before) / (until - since):,.0f} samples/s")
        if self._before < done < total:
            elapsed = time.monotonic() - self._began
            facts.append(duration(elapsed / (done - self._before) * (total - done)) + " left")
        return ", ".join(facts)


def _data(point: Point) -> str:
    return repr(point.job.data)


def summary(sweep: Sweep, directory: Path, failures: Sequence[Failed]) -> str:
    """Returns a table of all points, next to the paper's numbers if there are any."""
    reasons = {point.file: "failed" for point, _ in failures}
    head = ["point", "test error", "mean staleness", "virtual time" if sweep.driver == "simulation" else "time"]
    printed = any({"test_error", "time_s"} & row.keys() for row in sweep.paper)
    table = [[*head, *(["paper's error", "time"] if printed else [])]]
    for point in sweep.points:
        ours = [reasons[point.file]] if point.file in reasons else _outcome(directory / point.file)
        table.append([point.label, *ours, *[""] * (len(table[0]) - 1 - len(ours))])
        for row in sweep.paper if printed else ():
            if row["file"] == point.file:
                time = duration(row["time_s"]) if "time_s" in row else "–"
                table[-1][4:] = [shown(row.get("test_error"), ".2%"), time]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in table]
    sizes = {(row["epochs"], row["training_samples"]) for row in sweep.paper if "epochs" in row}
    lines += [f"the paper's are for {epochs} epochs of {samples:,} samples" for epochs, samples in sorted(sizes)]
    return "\n".join(f"  {line}" for line in lines)


def _outcome(file: Path) -> list[str]:
    """Returns test error, mean staleness and training time of a finished run. Only a few rows are read."""
    with open_results(file) as results:
        epochs, totals = results.epochs, results.totals
    tested = epochs["test_error"][epochs["evaluated"] != 0]
    sigma: NDArray[np.float64] = epochs["mean_staleness"]
    applied: NDArray[np.int64] = epochs["samples"]
    samples = np.diff(applied, prepend=0)
    known = np.isfinite(sigma) & (samples > 0)
    staleness = float(np.average(sigma[known], weights=samples[known])) if known.any() else None
    error = tested[-1] if len(tested) else None
    return [shown(error, ".2%"), shown(staleness, ".2f"), duration(float(totals["time_s"][0]))]
