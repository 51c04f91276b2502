"""Summary of a run in numbers, for `rudra show --json`, and the name of its protocol for users."""

import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocols import rule_of
from rudra.core.decisions import measurements
from rudra.core.messages import Rows
from rudra.core.records import TIMES
from rudra.errors import printable
from rudra.job.changes import active_text
from rudra.job.table import checked, named
from rudra.job.tables import HogbatchTable
from rudra.job.tables.weights_average import WeightsAverageTable
from rudra.job.target import WINDOW, Best, Target, Watch
from rudra.results.run_noise import noise_of
from rudra.results.tables import RunTables


def summarise(results: RunTables, target: str | None = None, window: int | None = None) -> dict[str, Any]:
    """See `Results.summary`."""
    attributes, job, state = results.attributes, results.job, results.state
    updates, gradients, epochs, totals = results.updates, results.gradients, results.epochs, results.totals
    account = {name: int(totals[0][name]) for name in ("pushed", "pending", "discarded", "lost")} if len(totals) else {}
    samples = int(totals[0]["samples"]) if len(totals) else int(updates["samples"].sum())
    time_s = _time_s(updates, totals)
    events, learners = results.events, results.learners
    applied = int(totals[0]["applied"]) if len(totals) else len(gradients)
    staleness = gradients["staleness"]
    test_error = _numbers(epochs, "test_error")
    tested = [error for error in test_error if error is not None]
    metrics = _metrics(results.metrics, epochs["epoch"])
    if target is not None:
        _check_target(target, results)
    untested, lacked_memory = _untested(job, epochs), bool(np.any(events["kind"] == b"memory"))
    target = target or job.get("training", {}).get("target")
    window = window or job.get("training", {}).get("target_window", WINDOW)
    return {
        "name": attributes.get("name"),
        "driver": attributes.get("driver"),
        "costs": attributes.get("costs"),
        "status": state["status"],
        "reason": state["reason"] or None,
        "live": results.live,
        "flushed_s": state["flushed_s"],
        "protocol": attributes.get("protocol"),
        "n": attributes.get("n"),
        "correction": correction_text(job.get("protocol", {})),
        "topology": attributes.get("topology"),
        "learners": attributes.get("learners"),
        "active_learners": active_text(job),
        **_rates(job.get("optimizer", {}).get("learning_rate"), attributes, updates, epochs),
        "minibatch_size": attributes.get("minibatch_size"),
        "bucket_bytes": attributes.get("bucket_bytes"),  # missing in older files
        "branch": _told(events, b"branch"),
        "changes": _told(events, b"change"),
        "bank_sizes": {found.size: found.images_per_s for found in measurements(events)},
        "learners_per_device": _bank(job.get("cluster", {}), attributes.get("learners"), updates),
        "planned_epochs": job.get("training", {}).get("epochs"),
        "untested_epochs": int(untested.sum()),
        "epochs_without_memory": int((untested & (epochs["weights_sha256"] != b"")).sum()) if lacked_memory else 0,
        "epochs": len(epochs),
        "earlier_epochs": max(0, int(epochs["epoch"][0]) - 1) if len(epochs) else 0,
        "updates": int(totals[0]["timestamp"]) if len(totals) else len(updates),
        "gradients": applied,
        "samples": samples,
        "wall_time_s": time_s,
        "samples_per_s": samples / time_s if time_s > 0 else None,
        "test_error": test_error,
        "final_test_error": tested[-1] if tested else None,
        "test_loss": _numbers(epochs, "test_loss"),
        "validation_error": _numbers(epochs, "validation_error"),
        "validation_loss": _numbers(epochs, "validation_loss"),
        "metrics": metrics,
        "target": target,
        "target_window": window,
        **_time_to_target(target, window, epochs, metrics),
        "train_error": _numbers(epochs, "train_error"),
        "train_loss": _numbers(epochs, "train_loss"),
        "epoch_end_s": _numbers(epochs, "time_s"),
        "epoch_mean_staleness": _numbers(epochs, "mean_staleness"),
        "mean_staleness": float(staleness.mean()) if len(staleness) else None,
        "max_staleness": int(staleness.max()) if len(staleness) else None,
        "staleness_histogram": np.bincount(staleness).tolist(),
        "pushed": account.get("pushed"),
        "applied": applied,
        "pending": account.get("pending"),
        "discarded": account.get("discarded"),
        "lost": account.get("lost"),
        **_noise(results),
        "learner_times": [_times(row, time_s) for row in learners],
        "workers": _workers(results, gradients, time_s),
        "overlap": _overlap(learners),
        "initial_weights_sha256": attributes.get("initial_weights_sha256"),
        "weights_sha256": state["weights_sha256"] or None,
        "weights_average": _average(job.get("optimizer", {}).get("average", {})),
    }


def _bank(cluster: dict[str, Any], learners: Any, updates: Rows) -> int | None:
    """Returns the number of learners on each device, in the mean of the last update. None: there are no banks."""
    m = cluster.get("learners_per_device")
    if m != "auto":
        return m if m is None else int(m)
    most = cluster.get("most_learners_per_device")
    return int(updates["gradients"][-1]) * int(most) // int(learners) if len(updates) and most and learners else None


def _noise(results: RunTables) -> dict[str, Any]:
    """Returns the gradient noise scale of the run and of each epoch. None: the run has no norms."""
    if (noise := noise_of(results)) is None:
        return {"noise_scale": None, "epoch_noise_scale": None}
    epochs = [noise.of_epoch(int(epoch)).figures for epoch in results.epochs["epoch"]]
    return {"noise_scale": noise.figures, "epoch_noise_scale": epochs}


def _average(table: dict[str, Any]) -> str | None:
    """Returns how the weights were averaged over time, or None if they were not."""
    average = checked(WeightsAverageTable, table, "optimizer", "average")
    return average.text if average.given else None


def _told(events: Rows, kind: bytes) -> list[str]:
    """Returns the texts of all events of a kind."""
    return [printable(text.decode("utf-8", "replace")) for text in events["text"][events["kind"] == kind]]


def correction_text(protocol: Mapping[str, Any]) -> str:
    """Returns the correction of gradients and its options, from the table `[protocol]`. Empty: there is none."""
    if (name := protocol.get("correction")) is None:
        return ""
    options = ", ".join(f"{key} = {value}" for key, value in protocol.get("correction_options", {}).items())
    return printable(f"{named(name)} ({options})" if options else named(name))


def protocol_label(summary: dict[str, Any]) -> str:
    """Returns the protocol's name as in the paper, such as `2-softsync`."""
    name = str(summary["protocol"] or "unknown protocol")
    return rule_of(name).label(name, summary["n"])


def rate_text(base: float, factor: float, modulation: str) -> str:
    """Returns a learning rate and its derivation, such as `0.025 = α0 x 0.5 (modulation sqrt)`."""
    return f"{base * factor:.4g} = α0 x {factor:.4g} (modulation {modulation})"


def _rates(
    base: float | None, attributes: dict[str, Any], updates: NDArray[np.void], epochs: NDArray[np.void]
) -> dict[str, Any]:
    """Returns α0, the protocol's modulation of α0 at staleness 0, the highest rate, and the last epoch's final rate."""
    factor = attributes.get("rate_factor")  # missing in older files
    all_, ends = (rows["learning_rate"][np.isfinite(rows["learning_rate"])] for rows in (updates, epochs))
    return {
        "base_learning_rate": base,
        "modulation": attributes.get("modulation"),
        "rate_factor": factor,
        "learning_rate": None if factor is None or base is None else base * factor,
        "highest_learning_rate": float(all_.max()) if len(all_) else None,
        "last_learning_rate": float(ends[-1]) if len(ends) else None,
    }


def _numbers(rows: NDArray[np.void], name: str) -> list[float | None]:
    """Returns a column for JSON, which has no NaN. Errors and losses of epochs without an evaluation are None."""
    valid = rows["evaluated"] != 0 if name.startswith(("test_", "validation_")) else np.ones(len(rows), bool)
    return [float(x) if ok and math.isfinite(x) else None for x, ok in zip(rows[name], valid, strict=True)]


def _metrics(rows: NDArray[np.void], epochs: NDArray[np.int32]) -> dict[str, dict[str, list[float | None]]]:
    """Returns split -> metric -> value in each epoch."""
    found: dict[str, dict[str, list[float | None]]] = {}
    places = {int(epoch): place for place, epoch in enumerate(epochs)}
    for epoch, _, split, name, value in rows.tolist():
        split, name = (printable(text.decode("utf-8", "replace")) for text in (split, name))
        series = found.setdefault(split, {}).setdefault(name, [None] * len(epochs))
        if epoch in places and math.isfinite(value):
            series[places[epoch]] = value
    return found


def _untested(job: dict[str, Any], epochs: NDArray[np.void]) -> NDArray[np.bool_]:
    """Returns which epochs with updates of their own were not evaluated: the previous evaluation was still running, or
    memory did not suffice."""
    found: NDArray[np.bool_] = (epochs["evaluated"] == 0) & np.isfinite(epochs["mean_staleness"])
    return found & bool(job.get("training", {}).get("evaluate", True))


def _check_target(target: str, results: RunTables) -> None:
    """Raises ConfigError if the run's evaluations, if any, do not measure the target's metric."""
    epochs = results.epochs
    measured: dict[str, list[str]] = {}
    for split, name in ((split, name) for split in ("test", "validation") for name in ("loss", "error")):
        if any(value is not None for value in _numbers(epochs, f"{split}_{name}")):
            measured.setdefault(split, []).append(name)
    for split, metrics in _metrics(results.metrics, epochs["epoch"]).items():
        measured.setdefault(split, []).extend(metrics)
    if measured:
        wanted = Target.parse(target)
        wanted.check(measured.get(wanted.split, measured["test"]), measured)


def _time_to_target(
    target: str | None, window: int, epochs: NDArray[np.void], metrics: dict[str, dict[str, list[float | None]]]
) -> dict[str, Any]:
    """Returns the seconds of training and the epoch when the target was reached, or None for both."""
    if target is not None:
        watch = Watch(Target.parse(target), window)
        for epoch, scores in zip(epochs, _tests(watch.target.split, epochs, metrics), strict=True):
            if watch.reached(watch.target.of(scores)):
                return {"time_to_target_s": float(epoch["time_s"]), "target_epoch": int(epoch["epoch"])}
    return {"time_to_target_s": None, "target_epoch": None}


def tests(results: RunTables, split: str, epochs: int | None) -> dict[int, dict[str, float | None]]:
    """Returns the evaluations of a split: epoch -> "loss", "error" and metrics.

    Values that were not measured are None. Epochs that were not evaluated are missing.

    Args:
        results: Results of the run.
        split: "test" or "validation".
        epochs: Number of first epochs to return. None: all.
    """
    rows = results.epochs
    rows = rows if epochs is None else rows[rows["epoch"] <= epochs]
    found = _tests(split, rows, _metrics(results.metrics, rows["epoch"]))
    return {int(row["epoch"]): scores for row, scores in zip(rows, found, strict=True) if row["evaluated"]}


def best_epoch(results: RunTables, among: Collection[int] | None = None) -> int | None:
    """See `Results.best_epoch`."""
    best, number = Best(results.job.get("training", {}).get("target")), None
    for epoch, scores in tests(results, best.split, None).items():
        if (among is None or epoch in among) and best.improved(scores):
            number = epoch
    return number


def _tests(
    split: str, epochs: NDArray[np.void], metrics: dict[str, dict[str, list[float | None]]]
) -> list[dict[str, float | None]]:
    columns = {name: _numbers(epochs, f"{split}_{name}") for name in ("loss", "error")}
    columns |= metrics.get(split, {})
    return [{name: column[place] for name, column in columns.items()} for place in range(len(epochs))]


def _overlap(learners: NDArray[np.void]) -> float | None:
    """Returns the fraction of time that learners compute instead of pushing, waiting and pulling (Rudra, Table 1)."""
    compute_s, *rest_s = (float(learners[name].sum()) for name in TIMES)
    whole_s = compute_s + sum(rest_s)
    return compute_s / whole_s if whole_s > 0 else None


def _workers(results: RunTables, gradients: Rows, time_s: float) -> list[dict[str, Any]]:
    """Returns a description and totals of each worker that a coordinator assigned samples to. Otherwise empty.

    The share of busy time is given only if known. Batch sizes are sums over all threads of a worker.
    """
    learners = results.attributes.get("learners")
    if not results.attributes.get("scheduled") or not learners:
        return []
    table = checked(HogbatchTable, results.job.get("hogbatch", {}), "hogbatch")
    found = []
    busy = {int(row["learner"]): _times(row, time_s)["compute_share"] for row in results.learners}
    for learner, worker in enumerate(table.team(learners)):
        mine = gradients["samples"][gradients["learner"] == learner]
        about = {"learner": learner, "kind": worker.kind, "threads": worker.threads, "updates": len(mine)}
        share = {"updates_share": len(mine) / len(gradients) if len(gradients) else None, "samples": int(mine.sum())}
        sizes: dict[str, Any] = {"mean_batch": None, "last_batch": None}
        if len(mine):
            sizes = {"mean_batch": float(mine.mean()) * worker.threads, "last_batch": int(mine[-1]) * worker.threads}
        found.append({**about, **share, **sizes, "busy_share": busy.get(learner)})
    return found


def _time_s(updates: Rows, totals: Rows) -> float:
    """Returns the current seconds of training."""
    return float(totals[0]["time_s"]) if len(totals) else float(updates["time_s"][-1]) if len(updates) else 0.0


def _times(row: np.void, time_s: float) -> dict[str, Any]:
    """Returns where a learner's time went: seconds, and shares of the run's training time. The rest is Rudra's
    overhead."""
    times = {name: float(row[name]) for name in TIMES}
    whole = max(time_s, sum(times.values()))
    shares = {name.removesuffix("_s") + "_share": (t / whole if whole > 0 else None) for name, t in times.items()}
    counts = {name: int(row[name]) for name in ("learner", "world_rank", "pushed", "samples", "pulls", "skipped_pulls")}
    return counts | times | shares
