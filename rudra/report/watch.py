"""`rudra watch`: a run's curves and rates in a terminal, read from its result file while the run writes it."""

import os
import shutil
import sys
import textwrap
import time
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
from numpy.typing import NDArray

from rudra.errors import ResultsError
from rudra.results.progress import duration
from rudra.results.progress import tested as described
from rudra.results.reader import Results, open_results
from rudra.results.run_noise import noise_of, plus_minus
from rudra.results.summary import protocol_label

_REFRESH_S = 1.0
_SILENT_S = 10.0  # a writer that has flushed nothing for this long is in a long step, or dead
_PATIENCE = 5  # successive reads that may fail while the writer is writing
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # dots of a braille character by row and column

Numbers = NDArray[np.float64]


class Curve(NamedTuple):
    """A picture: y over x, both of shape (points,)."""

    title: str
    x: Numbers
    y: Numbers
    unit: str


class Watched:
    """Data read from a run. Every `read` adds only the new rows."""

    def __init__(self, results: Results) -> None:
        self._results = results
        self._seen = {"minibatches": 0, "updates": 0}
        self._loss = self._staleness = (np.zeros(0), np.zeros(0))
        self._samples, self._gradients, self._sigma = 0, 0, 0.0
        self._recent: list[tuple[float, int]] = []
        self._noise, self._noise_again = "", 0.0

    def read(self) -> None:
        """Reads the rows that were written since the last call.

        Raises:
            ResultsError: the file is damaged, or a write was in progress.
        """
        for piece in self._results.pieces("minibatches", start=self._seen["minibatches"]):
            self._seen["minibatches"] += len(piece)
            self._loss = _joined(self._loss, piece["time_s"], piece["loss"])
        for piece in self._results.pieces("updates", start=self._seen["updates"]):
            self._seen["updates"] += len(piece)
            self._staleness = _joined(self._staleness, piece["time_s"], piece["mean_staleness"])
            self._samples += int(piece["samples"].sum())
            staleness: NDArray[np.float64] = piece["mean_staleness"]
            gradients: NDArray[np.int32] = piece["gradients"]
            self._gradients += int(gradients.sum())
            self._sigma += float(staleness @ gradients)
            if len(piece):
                self._recent.append((float(piece["time_s"][-1]), self._samples))
        del self._recent[:-10]
        if self._results.has_norms:
            self._read_noise()

    def _read_noise(self) -> None:
        """Estimates the gradient noise scale from all rows, in at most a tenth of the time."""
        began = time.monotonic()
        if began < self._noise_again:
            return
        noise = noise_of(self._results)
        if noise is not None and not (scale := noise.scale).needed:
            self._noise = f"B {plus_minus(scale.samples, scale.error)}"
        self._noise_again = began + 10 * (time.monotonic() - began)

    def frame(self, width: int, height: int, now: float) -> list[str]:
        """Returns the lines of one picture.

        Args:
            width: maximum number of characters in a line.
            height: maximum number of lines.
            now: wall clock, seconds since 1970.
        """
        results, state, epochs = self._results, self._results.state, self._results.epochs
        attributes = results.attributes
        unit = "virtual time" if attributes.get("driver") == "simulation" else "time"
        loss = (*self._loss, f"s of {unit}")
        if not len(self._loss[0]):  # not recorded
            loss = (epochs["time_s"], epochs["train_loss"], f"s of {unit}")
        tested = epochs[epochs["evaluated"] != 0]
        test: tuple[str, NDArray[np.float64]] = "test error (%)", 100 * tested["test_error"]
        if len(tested) and np.isnan(test[1]).all():  # the task has no error
            test = "test loss", tested["test_loss"]
        curves = [
            Curve("training loss", *loss),
            Curve(test[0], tested["time_s"], test[1], f"s of {unit}"),
            Curve("mean staleness ⟨σ⟩", *self._staleness, f"s of {unit}"),
        ]
        head = [part for line in self._head(attributes, state, epochs, now) for part in textwrap.wrap(line, width)]
        rows = (height - len(head)) // len(curves) - 3
        lines = head[:]
        for curve in curves if rows >= 2 else []:
            lines += ["", *plotted(curve, width, min(rows, 9))]
        return lines[:height]

    def _head(
        self, attributes: dict[str, Any], state: dict[str, Any], epochs: NDArray[np.void], now: float
    ) -> list[str]:
        where = {"mpi": "MPI", "simulation": "virtual time"}.get(attributes["driver"], attributes["driver"])
        about = f"λ = {attributes['learners']}, μ = {attributes['minibatch_size']}"
        status, silent_s = str(state["status"]), now - state["flushed_s"]
        if status == "running" and silent_s > _SILENT_S:
            status = f"running, but silent for {duration(silent_s)}: a long step, or it was killed"
        planned = attributes.get("epochs") or self._results.job.get("training", {}).get("epochs")
        done = float(self._staleness[0][-1]) if len(self._staleness[0]) else 0.0
        facts = [
            f"epoch {epochs['epoch'][-1] if len(epochs) else 0} of {planned}",
            f"{self._seen['updates']:,} updates",
            duration(done),
        ]
        if len(self._recent) > 1 and self._recent[-1][0] > self._recent[0][0]:
            (before_s, before), (after_s, after) = self._recent[0], self._recent[-1]
            facts.append(f"{(after - before) / (after_s - before_s):,.0f} samples/s")
        elif done > 0:
            facts.append(f"{self._samples / done:,.0f} samples/s")
        if self._gradients:
            facts.append(f"⟨σ⟩ {self._sigma / self._gradients:.2f}")
        facts += [self._noise] if self._noise else []
        tested = epochs[epochs["evaluated"] != 0]
        if len(tested):
            facts.append(described(tested[-1]))
        reason = f": {state['reason']}" if state["reason"] else ""
        return [
            f"{attributes['name']}: {protocol_label(attributes)}, {about}, {where}",
            f"{status}{reason}",
            ", ".join(facts),
        ]


def watch(path: Path, *, once: bool = False, wait: bool = False, out: TextIO | None = None) -> None:
    """Shows a run until it ends. If the output is no terminal, shows it once.

    Args:
        path: result file.
        once: only show the current state.
        wait: wait for the file to appear.
        out: output stream, by default stdout.

    Raises:
        ResultsError: the file is missing (without `wait`), damaged, or no result file.
    """
    out = sys.stdout if out is None else out
    try:
        with _opened(path, wait) as results:
            if once or not out.isatty():
                watched = Watched(results)
                watched.read()
                print("\n".join(watched.frame(*shutil.get_terminal_size((80, 40)), time.time())), file=out)
            else:
                _follow(results, out)
    except KeyboardInterrupt:  # the usual way to stop watching
        pass


def _opened(path: Path, wait: bool) -> Results:
    while True:
        try:
            return open_results(path)
        except ResultsError:  # a new file may be incomplete
            if not wait or (os.path.exists(path) and time.time() - path.stat().st_mtime > _SILENT_S):
                raise
        time.sleep(_REFRESH_S / 4)


def _follow(results: Results, out: TextIO) -> None:
    watched = Watched(results)
    drawn = failed = 0
    out.write("\x1b[?25l")  # hides the cursor
    try:
        while True:
            began = time.monotonic()
            try:
                results.refresh()
                watched.read()
                running = results.status == "running"
                width, height = shutil.get_terminal_size()
                lines = watched.frame(width - 1, height - 1, time.time())
                failed = 0
            except ResultsError:
                failed += 1
                if failed == _PATIENCE:
                    raise
                running, lines = True, []
            if lines:
                up = f"\x1b[{drawn}A" if drawn else ""
                out.write(up + "".join(f"\r{line}\x1b[K\n" for line in lines) + "\x1b[J")
                out.flush()
                drawn = len(lines)
            if not running:
                return
            time.sleep(max(0.05, _REFRESH_S - (time.monotonic() - began)))
    finally:
        out.write("\x1b[?25h")
        out.flush()


def plotted(curve: Curve, width: int, height: int) -> list[str]:
    """Returns a curve in braille, with its title above and its scales at the left and below.

    Args:
        curve: curve to draw. Points that are not finite are left out.
        width: width of every line, in characters.
        height: height of the picture without title and scale, in characters.
    """
    finite = np.isfinite(curve.x) & np.isfinite(curve.y)
    x, y = curve.x[finite], curve.y[finite]
    if not len(x):
        return [f"{curve.title}: nothing yet"]
    columns, dots = 2 * (width - 10), 4 * height
    if columns < 8:
        return [f"{curve.title}: {y[-1]:.4g}"[:width]]
    right = max(float(x.max()), 1e-12)
    column = np.clip((x / right * (columns - 1)).round(), 0, columns - 1).astype(int)
    count = np.bincount(column, minlength=columns)
    filled = np.flatnonzero(count)
    means = np.bincount(column, y, minlength=columns)[filled] / count[filled]
    low, high = float(min(means.min(), 0.0)), float(means.max())
    high = high if high > low else low + 1.0
    level = np.interp(np.arange(filled[0], filled[-1] + 1), filled, means)
    row = ((high - level) / (high - low) * (dots - 1)).round().astype(int)
    cells = np.zeros((height, columns // 2), int)
    last = int(row[0])
    for c, r in zip(range(filled[0], filled[-1] + 1), row.tolist(), strict=True):
        for between in range(min(last, r), max(last, r) + 1):  # a steep step becomes a line, not two dots
            cells[between // 4, c // 2] |= _DOTS[between % 4][c % 2]
        last = r
    scale = [f"{high:8.3g}", *[" " * 8] * (height - 2), f"{low:8.3g}"]
    lines = ["".join(chr(0x2800 + cell) for cell in cells[i]) for i in range(height)]
    end = f"{right:,.3g} {curve.unit}"
    return [
        f"{curve.title}: {y[-1]:.4g}",
        *(f"{scale[i]} ┤{line}" for i, line in enumerate(lines)),
        f"{'0':>10}{end:>{columns // 2}}"[:width],
    ]


def _joined(curve: tuple[Numbers, Numbers], x: NDArray[Any], y: NDArray[Any]) -> tuple[Numbers, Numbers]:
    return np.append(curve[0], x), np.append(curve[1], y)
