"""Timeline of a run in the Trace Event Format of Chrome, which https://ui.perfetto.dev shows.

Each rank is a process, and each of its roles a thread. Times are microseconds since the server started training, on one
clock. Rows are read and written piece by piece, so a long run needs no more memory than a short one.
"""

import gzip
import io
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from rudra.core.records import TIMES
from rudra.files import check_output, written
from rudra.job.tables.cluster import ClusterTable
from rudra.results.reader import Results
from topologies import Plan

TraceEvent = dict[str, Any]
Times = NDArray[np.float64]


def write_timeline(
    results: Results, output: Path, progress: Callable[[int], object] = lambda rows: None, *, force: bool = False
) -> int:
    """Writes the timeline of a run, which may still be running.

    Args:
        results: Results of `rudra run` or `rudra simulate`.
        output: JSON file, compressed if its name ends in .gz, which Perfetto also reads.
        progress: Function called with the number of processed rows.
        force: Whether to replace an existing file.

    Returns:
        Number of events.

    Raises:
        ResultsError: The file exists or cannot be written, or the run's file is damaged.
    """
    check_output(output, force)
    about = {name: results.attributes[name] for name in ("name", "driver", "protocol", "learners", "started")}
    plan, count = results.plan(), 0
    with written(output) as raw, _text(raw, compressed=output.suffix == ".gz") as file:
        file.write('{"displayTimeUnit": "ms", "otherData": ' + json.dumps(about) + ', "traceEvents": [')
        for event in events(results, plan, progress):
            file.write((",\n" if count else "\n") + json.dumps(event, allow_nan=False))
            count += 1
        file.write("\n]}\n")
    return count


def _text(file: IO[bytes], *, compressed: bool) -> io.TextIOWrapper:
    stream = gzip.GzipFile("", "wb", fileobj=file) if compressed else file
    return io.TextIOWrapper(stream, "utf-8")


_SPANS = tuple(name.removesuffix("_s") for name in TIMES)


def events(results: Results, plan: Plan, progress: Callable[[int], object]) -> Iterator[TraceEvent]:
    """Yields names of ranks and roles, and then the spans of each role, in order of time and without overlap."""
    threads = {id_: _Thread(role.world_rank, id_) for id_, role in enumerate(plan.roles)}
    yield from _names(plan, _streams(plan, ClusterTable.model_validate(results.job["cluster"])))
    learners = plan.learners
    for rows in results.pieces("minibatches"):
        time_s: NDArray[np.float64] = rows["time_s"]
        compute_s: NDArray[np.float64] = rows["compute_s"]
        computed = time_s - compute_s
        parts = _moments(computed, *(rows[name] for name in TIMES))
        for row, marks in zip(rows, parts, strict=True):
            about = {name: _finite(row[name]) for name in ("step", "timestamp", "loss")}
            yield from threads[learners[row["learner"]]].spans(_SPANS, marks, about)
        progress(len(rows))
    for rows in results.pieces("updates"):
        for row, marks in zip(rows, _moments(rows["time_s"], rows["update_s"]), strict=True):
            names = ("timestamp", "epoch", "gradients", "learning_rate", "mean_staleness")
            (span,) = threads[plan.server].spans(("update",), marks, {name: _finite(row[name]) for name in names})
            yield span
            value = {"mean staleness": _finite(row["mean_staleness"])}
            yield {"ph": "C", "name": "mean staleness", "pid": span["pid"], "ts": span["ts"], "args": value}
        progress(len(rows))
    if plan.stage is not None:
        yield from _stages(results, plan, threads, progress)
    for rows in results.pieces("epochs"):
        began_s: NDArray[np.float64] = rows["evaluation_began_s"]
        tested = rows[np.isfinite(began_s)]
        for row, marks in zip(tested, _moments(tested["evaluation_began_s"], tested["evaluation_s"]), strict=True):
            about = {name: _finite(row[name]) for name in ("epoch", "timestamp", "test_error", "test_loss")}
            yield from threads[plan.statistics].spans(("evaluation",), marks, about)


def _stages(
    results: Results, plan: Plan, threads: Mapping[int, "_Thread"], progress: Callable[[int], object]
) -> Iterator[TraceEvent]:
    """Yields mini-batches at the stage server, with an arrow from their learner on arrival, and back when done."""
    assert plan.stage is not None
    names = ("learner", "step", "timestamp", "front", "staleness", "wait_s")
    number = 0
    for rows in _by_update(results.pieces("stages")):
        ordered = rows[np.argsort(rows["time_s"], kind="stable")]  # as computed: rows of an update are in learner order
        came = np.rint((ordered["time_s"] - ordered["wait_s"]) * 1e9).astype(np.int64).tolist()
        for row, there, marks in zip(ordered, came, _moments(ordered["time_s"], ordered["compute_s"]), strict=True):
            (span,) = threads[plan.stage].spans(("conclude",), marks, {name: _finite(row[name]) for name in names})
            yield span
            learner = threads[plan.learners[row["learner"]]].place
            stage, end = threads[plan.stage].place, span["ts"] + span["dur"]
            for name, begin, source, stop, to in (
                ("activations", there / 1e3, learner, span["ts"], stage),
                ("returned", end, stage, end, learner),
            ):
                yield {"ph": "s", "name": name, "cat": name, "id": number, **source, "ts": begin}
                yield {"ph": "f", "bp": "e", "name": name, "cat": name, "id": number, **to, "ts": max(begin, stop)}
                number += 1
        progress(len(rows))


def _by_update(pieces: Iterable[NDArray[np.void]]) -> Iterator[NDArray[np.void]]:
    """Splits rows into pieces of whole updates."""
    left: NDArray[np.void] | None = None
    for piece in pieces:
        rows = piece if left is None else np.concatenate([left, piece])
        last = int(np.searchsorted(rows["timestamp"], rows["timestamp"][-1])) if len(rows) else 0
        yield rows[:last]
        left = rows[last:]
    if left is not None:
        yield left


class _Thread:
    """Timeline of one role."""

    def __init__(self, rank: int, role: int) -> None:
        self.place = {"pid": rank, "tid": role}
        self._end = 0

    def spans(self, names: Sequence[str], marks: Sequence[int], about: dict[str, Any]) -> Iterator[TraceEvent]:
        """Yields spans that follow each other. Empty ones are left out, except the first.

        Spans that would overlap earlier ones start at the end of those. Two updates may have started at one moment, and
        the last digits of floats, or the clocks of two nodes, may disagree.

        Args:
            names: Names of the spans.
            marks: Starts of all spans, and the end of the last one, in nanoseconds.
            about: Arguments to show with the spans.
        """
        late = max(0, self._end - marks[0])
        for name, begin, end in zip(names, marks, marks[1:], strict=False):
            if end > begin or name == names[0]:
                times = {"ts": (begin + late) / 1e3, "dur": (end - begin) / 1e3}
                yield {"ph": "X", "name": name, "cat": name, **self.place, **times, "args": about}
        self._end = marks[-1] + late


def _moments(began_s: Times, *spans_s: Times) -> list[list[int]]:
    """Returns for each row, in nanoseconds, the start and the ends of consecutive spans."""
    moments = np.cumsum(np.stack([began_s, *spans_s]), axis=0).T
    rounded: list[list[int]] = np.rint(moments * 1e9).astype(np.int64).tolist()
    return rounded


def _names(plan: Plan, streams: Mapping[int, str]) -> Iterator[TraceEvent]:
    for rank in sorted({role.world_rank for role in plan.roles}):
        here = plan.on_rank(rank)
        name = f"rank {rank}: {plan.names_on(rank)}"
        yield {"ph": "M", "name": "process_name", "pid": rank, "tid": here[0], "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": here[0], "args": {"sort_index": rank}}
        for id_ in here:
            text = plan.roles[id_].name + streams.get(id_, "")
            yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": id_, "args": {"name": text}}


def _streams(plan: Plan, cluster: ClusterTable) -> dict[int, str]:
    """Returns the stream of each learner, as text, if the learners of a rank compute on several streams."""
    if not cluster.graphed:
        return {}
    count = cluster.streams_of_bank(recorded=cluster.accelerated)
    ranks = ([id_ for id_ in plan.on_rank(rank) if id_ in plan.learners] for rank in sorted(plan.ranks_with_learners))
    return {id_: f" (stream {place % count})" for here in ranks for place, id_ in enumerate(here)}


def _finite(value: Any) -> float | None:
    """Returns a number for JSON, which has neither NaN nor infinity."""
    number: float = value.item()
    return number if math.isfinite(number) else None
