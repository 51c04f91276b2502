"""Progress display for users: a bar (or a line for each epoch) during a run, and a table at its end."""

import math
import os
import sys
import threading
import time
from contextlib import suppress
from typing import Any, Literal, TextIO

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from rudra.core.records import TIMES
from rudra.job.job import Job
from rudra.job.simulation import DEFAULTS, UNMEASURED
from rudra.job.table import named
from rudra.log import log
from rudra.results.run_noise import described
from rudra.results.summary import protocol_label, rate_text

_REDRAW_S = 0.1
_SHORTEST_BAR = 10
_FORMAT = "{desc} {percentage:3.0f}%|{bar}| "


class Bar(tqdm):  # type: ignore[misc]
    monitor_interval = 0  # no thread that redraws; `Progress` does


Bar.set_lock(threading.RLock())  # tqdm's own lock is shared between processes and needs system semaphores


class Progress:
    """Progress display of a run. Calling it for every update is cheap.

    Args:
        job: Resolved job.
        training_samples: Number of training samples per epoch.
        mode: "bar" for a terminal, "lines" (one for each finished epoch) for a batch log, or "quiet".
        columns: Width of the terminal, if `file` is a pipe to another process's terminal.
        file: File to write to, by default stderr.
        begun: Number of samples that an earlier part of the run trained on.
    """

    def __init__(
        self,
        job: Job,
        training_samples: int,
        *,
        mode: Literal["bar", "lines", "quiet"],
        columns: int | None = None,
        file: TextIO | None = None,
        begun: int = 0,
    ) -> None:
        self._name, self._epochs, self._mode = job.name, job.training.epochs, mode
        self._file = sys.stderr if file is None else file
        self._samples = begun
        self._rate = 0.0
        self._epoch = 0
        self._staleness = 0.0  # sum over the gradients of this epoch
        self._gradients = 0
        self._tested = ""
        self._drawn = -np.inf
        self._columns = columns or _terminal_columns(self._file)
        self._bar: Any = None
        if mode != "quiet":
            self._say(headline(job, training_samples))
            if text := too_few(job, training_samples):
                log.warning(f"{job.name}: {text}")
        if mode == "bar":
            about = {"total": self._epochs * training_samples, "initial": begun, "desc": job.name}
            self._bar = Bar(**about, file=self._file, ncols=self._columns, bar_format=_FORMAT)

    def updates(self, rows: NDArray[np.void]) -> None:
        """Counts updates, `records.UPDATE`, in order."""
        if not len(rows) or self._mode != "bar":
            return
        last = rows[-1]
        if last["epoch"] != self._epoch:
            rows = rows[rows["epoch"] == last["epoch"]]
            self._epoch, self._staleness, self._gradients = int(last["epoch"]), 0.0, 0
        self._samples += int(rows["samples"].sum())
        staleness: NDArray[np.float64] = rows["mean_staleness"]
        gradients: NDArray[np.int32] = rows["gradients"]
        self._staleness += float(staleness @ gradients)
        self._gradients += int(gradients.sum())
        if last["time_s"] > 0:
            self._rate = self._samples / float(last["time_s"])
        self._draw()

    def epochs(self, rows: NDArray[np.void]) -> None:
        """Counts finished epochs, `records.EPOCH`, and prints them."""
        for row in rows:
            self._tested = tested(row)
            if self._mode == "lines":
                rate = row["samples"] / row["time_s"] if row["time_s"] > 0 else 0.0
                self._say(
                    f"{self._name}: epoch {row['epoch']}/{self._epochs}, {self._tested}, "
                    f"staleness {shown(row['mean_staleness'], '.2f')}, {rate:,.0f} samples/s, "
                    f"{duration(row['time_s'])}"
                )
        if self._mode == "bar" and len(rows):
            self._draw()

    def close(self) -> None:
        """Leaves the last state on the screen."""
        if self._bar is not None:
            self._draw(force=True)
            self._bar.close()
            self._bar = None

    def _say(self, line: str) -> None:
        with suppress(BrokenPipeError):  # the launcher has ended, and this rank will be stopped
            print(line, file=self._file, flush=True)

    def _draw(self, force: bool = False) -> None:
        now = time.monotonic()
        if self._bar is None or not (force or now - self._drawn >= _REDRAW_S):
            return
        self._drawn = now
        self._bar.n = min(self._samples, self._bar.total)
        self._bar.set_description_str(f"epoch {min(self._epoch + 1, self._epochs)}/{self._epochs}", refresh=False)
        self._bar.bar_format = _FORMAT + self._facts()
        self._bar.refresh()

    def _facts(self) -> str:
        """Returns as many facts as fit next to a short bar, the most important first."""
        facts = [self._tested] if self._tested else []
        if self._gradients:
            facts.append(f"staleness {self._staleness / self._gradients:.2f}")
        if self._rate:
            facts.append(f"{self._rate:,.0f} samples/s")
        left = self._bar.format_dict
        if 0 < left["n"] < left["total"]:
            facts.append(duration(left["elapsed"] / left["n"] * (left["total"] - left["n"])) + " left")
        room = self._columns - len(self._bar.desc) - len(" 100%|| ") - _SHORTEST_BAR
        while len(facts) > 1 and len(", ".join(facts)) > room:
            facts.pop()
        return ", ".join(facts)


def headline(job: Job, training_samples: int) -> str:
    """Describes a run before its start, with the learning rate that its protocol derives from α0."""
    protocol, table = job.make_protocol(), job.training
    label = protocol_label({"protocol": named(job.protocol.name), "n": protocol.n})
    factor = protocol.modulation.rate_factor(0.0)
    rate = rate_text(job.optimizer.learning_rate, factor, protocol.modulation.name)
    size = f"λ = {job.learners}, {'' if job.scheduled else f'μ = {table.minibatch_size}, '}α = {rate}"
    return f"{job.name}: {label}, {size}, {job.optimizer.name}, {table.epochs} epochs of {training_samples:,} samples"


def too_few(job: Job, training_samples: int) -> str:
    """Describes the effect if updates have more samples than an epoch, or returns an empty string."""
    if job.scheduled:  # the last batch of such an epoch takes the remaining samples
        return ""
    size = job.training.minibatch_size
    each = job.gradients_per_update(job.plan()) * size
    if each <= training_samples:
        return ""
    about = f"an update is made of {each:,} samples, {each // size} mini-batches, and an epoch has {training_samples:,}"
    return f"{about}: some epochs end without an update of their own, and have no figures (–)"


def duration(seconds: float) -> str:
    """Formats seconds for users: `0.42 s`, `12.3 s`, `3:25 min`, `2:03:20 h`."""
    if seconds < 59.95:
        return f"{seconds:.1f} s" if seconds >= 9.995 else f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02} min" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02}:{rest:02} h"


def shown(value: float | None, form: str) -> str:
    """Formats a number for users, or a dash if there is none."""
    return "–" if value is None or not math.isfinite(value) else format(value, form)


def summary_table(summary: dict[str, Any]) -> str:
    """Returns short tables for the end of a run or for `rudra show`, from `Results.summary()`."""
    facts = [(name, text) for name, text in _facts(summary) if text]
    width = max(len(name) for name, _ in facts)
    lines = [_title(summary), "", *(f"  {name:<{width}}  {text}" for name, text in facts)]
    for table in (epochs := _epochs_table(summary), _learners_table(summary), _workers_table(summary)):
        if table:
            lines += ["", *_aligned(table)]
        if table is epochs and 0 < len(table) - 1 < summary["epochs"]:
            lines.append(f"  {len(table) - 1} of {summary['epochs']} epochs; rudra show --json prints all")
    return "\n".join(lines)


def tested(row: np.void) -> str:
    """Returns the main result of an epoch's evaluation."""
    if not row["evaluated"]:
        return "not evaluated" if np.isfinite(row["mean_staleness"]) else "no update of its own"
    error = row["test_error"]
    return f"test loss {row['test_loss']:.4f}" if np.isnan(error) else f"test error {error:.2%}"


def _title(summary: dict[str, Any]) -> str:
    learners, size = summary["learners"], summary["minibatch_size"]
    where = {"mpi": "MPI", "simulation": "virtual time"}.get(summary["driver"], summary["driver"])
    rate = "" if summary["learning_rate"] is None else f"α = {summary['learning_rate']:.4g}, "
    of_all = "" if summary["workers"] else f"μ = {size}, "
    about = f"{protocol_label(summary)}, λ = {learners}, {of_all}{rate}{where}"
    title = f"{summary['name']}: {about}: {summary['status']}"
    if summary["status"] == "running":
        ago = duration(max(0.0, time.time() - summary["flushed_s"]))
        title += f" (or killed; last written {ago} ago)"
    return title + (f": {summary['reason']}" if summary["reason"] else "")


def _facts(summary: dict[str, Any]) -> list[tuple[str, str]]:
    staleness = "unknown"
    if summary["mean_staleness"] is not None:
        staleness = f"mean {summary['mean_staleness']:.2f}, max {summary['max_staleness']}"
    rate = f", {summary['samples_per_s']:,.0f} samples/s" if summary["samples_per_s"] else ""
    unmeasured = f" ({UNMEASURED})" if summary["costs"] == DEFAULTS else ""
    unused = [f"{summary[name]:,} {name}" for name in ("pending", "discarded", "lost") if summary[name]]
    return [
        *_tests(summary),
        ("target", _target(summary)),
        ("learning rate", _rate(summary)),
        ("correction", summary["correction"]),
        ("active", summary["active_learners"]),
        *(("branch", text) for text in summary["branch"]),
        *(("change", text) for text in summary["changes"]),
        ("banks", _bank_sizes(summary)),
        ("epochs", _epochs(summary)),
        ("training time", duration(summary["wall_time_s"]) + rate + unmeasured),
        ("updates", f"{summary['updates']:,}"),
        ("gradients", ", ".join([f"{summary['gradients']:,} applied", *unused])),
        ("staleness", staleness),
        ("noise scale B", _noise(summary)),
        ("buckets", f"{size / 1e6:.3g} MB" if (size := summary["bucket_bytes"]) else ""),
        ("weights", (summary["weights_sha256"] or "")[:16]),
        ("average", f"{text}: evaluated and kept as the weights" if (text := summary["weights_average"]) else ""),
    ]


def _bank_sizes(summary: dict[str, Any]) -> str:
    sizes = [f"{m}: {f'{speed:,.0f}' if speed else 'no memory'}" for m, speed in summary["bank_sizes"].items()]
    return f"learners on each device: samples/s: {', '.join(sizes)}" if sizes else ""


def _noise(summary: dict[str, Any]) -> str:
    noise, epochs = summary["noise_scale"], summary["epoch_noise_scale"]
    return described(noise, epochs, 1 + summary["earlier_epochs"]) if noise else ""


def _epochs(summary: dict[str, Any]) -> str:
    done, planned, earlier = summary["epochs"], summary["planned_epochs"], summary["earlier_epochs"]
    text = f"{earlier + done}" + (f" of {planned}" if planned not in (None, earlier + done) else "")
    return f"{text}, {earlier} before the first row" if earlier else text


def _tests(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns the results of the evaluations."""
    found = []
    for split in ("test", "validation"):
        for name, form in (("error", ".2%"), ("loss", ".4f")):
            values = summary[f"{split}_{name}"]
            tested = [
                (value, epoch) for epoch, value in enumerate(values, 1 + summary["earlier_epochs"]) if value is not None
            ]
            if tested:
                text = f"{tested[-1][0]:{form}} after epoch {tested[-1][1]}"
                if min(tested)[0] < tested[-1][0]:
                    text += f" (best {min(tested)[0]:{form}} after epoch {min(tested)[1]})"
                found.append((f"{split} {name}", text))
                break
        metrics = summary["metrics"].get(split, {}).items()
        last = {name: [value for value in values if value is not None][-1:] for name, values in metrics}
        text = ", ".join(f"{name} {value:{_metric_form(name)}}" for name, values in last.items() for value in values)
        found.append((f"{split} metrics", text))
    lacking = summary["epochs_without_memory"]
    reasons = {
        "too little memory (use a smaller training.evaluation_batch_size)": lacking,
        "evaluations took too long (training.evaluate = 'always' waits for them)": summary["untested_epochs"] - lacking,
    }
    found += [("not evaluated", f"{n} of {summary['epochs']} epochs: {why}") for why, n in reasons.items() if n]
    return found if any(summary[f"test_{name}"] for name in ("error", "loss")) else [("test error", "not evaluated")]


def _rate(summary: dict[str, Any]) -> str:
    """Returns the learning rate that the protocol derived from α0, and its later values."""
    first, most, last = (summary[f"{which}learning_rate"] for which in ("", "highest_", "last_"))
    if first is None:
        return ""
    text = rate_text(summary["base_learning_rate"], summary["rate_factor"], summary["modulation"])
    text += f", {most:.4g} at most" if most is not None and most > 1.001 * first else ""  # schedulers may raise it
    return text if last is None or math.isclose(first, last, rel_tol=1e-3) else f"{text}, {last:.4g} at the end"


def _target(summary: dict[str, Any]) -> str:
    if summary["target"] is None:
        return ""
    if summary["target_epoch"] is None:
        tests = sum(value is not None for value in summary["test_loss"])
        few = f": that takes the median of {summary['target_window']} tests, and there were {tests}"
        return f"{summary['target']}: not reached" + (few if tests < summary["target_window"] else "")
    window = summary["target_window"]
    median = f" (median of {window} evaluations)" if window > 1 else ""
    reached = f"after {duration(summary['time_to_target_s'])}, epoch {summary['target_epoch']}"
    return f"{summary['target']}{median}: {reached}"


_TESTED = {"test_error": ".2%", "test_loss": ".4f", "validation_error": ".2%"}
_TRAINED = {"train_error": ".2%", "train_loss": ".4f"}
_METRICS = 3
"""Number of an evaluation's metrics that have a column of their own."""


def is_share(metric: str) -> bool:
    """Returns whether one of Rudra's metrics is a fraction, which is formatted as a percentage like errors."""
    return metric == "top5_error" or metric.startswith("precision@")


def _metric_form(name: str) -> str:
    return ".2%" if is_share(name) else ".4g"


def _epochs_table(summary: dict[str, Any], most: int = 11) -> list[list[str]]:
    count, times, first = summary["epochs"], summary["epoch_end_s"], 1 + summary["earlier_epochs"]
    if not count:
        return []
    few = count if count <= most + most // 4 else most  # leaving out a few rows saves nothing
    places = np.unique(np.linspace(0, count - 1, few).round().astype(int))
    metrics = list(summary["metrics"].get("test", {}).items())[:_METRICS]
    columns = {name.replace("_", " "): (summary[name], form) for name, form in _TESTED.items()}
    columns |= {name: (values, _metric_form(name)) for name, values in metrics}
    columns |= {name.replace("_", " "): (summary[name], form) for name, form in _TRAINED.items()}
    columns["staleness"] = summary["epoch_mean_staleness"], ".2f"
    told = {name for name, (values, _) in columns.items() if any(value is not None for value in values)}
    hidden = {"test loss"} if "test error" in told or "test loss" not in told else {"test error"}
    hidden |= {"validation error", "train error"} - told
    chosen = {name: column for name, column in columns.items() if name not in hidden}
    rows = [
        [str(first + i), *(shown(values[i], form) for values, form in chosen.values()), duration(times[i] or 0.0)]
        for i in map(int, places)
    ]
    return [["epoch", *chosen, "time"], *rows]


def _learners_table(summary: dict[str, Any], most: int = 8) -> list[list[str]]:
    learners = summary["learner_times"]
    if not learners:
        return []
    kinds = [name.removesuffix("_s") for name in TIMES]
    shares = [kind for kind in kinds if kind == "compute" or any(row[f"{kind}_share"] for row in learners)]
    if len(learners) <= most:
        rows = [(str(row["learner"]), row) for row in learners]
    else:
        keys = ["pushed", *(f"{share}_share" for share in shares)]
        columns = {key: [row[key] or 0 for row in learners] for key in keys}
        rows = [
            (name, {key: function(column) for key, column in columns.items()})
            for name, function in (("least", np.min), ("mean", np.mean), ("most", np.max))
        ]
    table = [[name, f"{row['pushed']:,.0f}", *(shown(row[f"{s}_share"], ".1%") for s in shares)] for name, row in rows]
    return [["learner", "gradients", *shares], *table]


def _workers_table(summary: dict[str, Any]) -> list[list[str]]:
    """Returns a table of workers that a coordinator assigned samples to. Many workers are grouped by kind."""
    workers = summary["workers"]
    rows = [(str(worker["learner"]), [worker]) for worker in workers]
    if len(workers) > 8:
        kinds = dict.fromkeys(worker["kind"] for worker in workers)
        rows = [(f"all {kind}", [worker for worker in workers if worker["kind"] == kind]) for kind in kinds]
    table = [["worker", "kind", "updates", "of all", "samples", "mean batch", "last batch"]] if rows else []
    for name, them in rows:
        updates, samples = (sum(worker[key] for worker in them) for key in ("updates", "samples"))
        share = sum(worker["updates_share"] or 0.0 for worker in them)
        keys = ("mean_batch", "last_batch")
        batches = (np.mean([w[key] for w in them if w[key] is not None] or [math.nan]) for key in keys)
        sizes = [shown(float(size), ",.0f") for size in batches]
        table.append([name, them[0]["kind"], f"{updates:,}", f"{share:.1%}", f"{samples:,}", *sizes])
    return table


def _aligned(table: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  " + "  ".join(text.rjust(w) for text, w in zip(row, widths, strict=True)) for row in table]


def _terminal_columns(file: TextIO) -> int:
    try:
        return os.get_terminal_size(file.fileno()).columns or 80
    except (OSError, ValueError, AttributeError):
        return 80
