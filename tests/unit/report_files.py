"""A made-up study for the tests of reports: a grid of runs whose times and errors follow simple laws."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rudra.core.records import EPOCH, GRADIENT, LEARNER, TOTALS, UPDATE
from rudra.job.job import Job
from rudra.results import plan_rows
from rudra.results.reader import ResultsWriter
from tests.unit.results_files import LAYOUT, SIZE, WEIGHTS, rows, sha256

TITLE = 'Tradeoff <script>alert("σ")</script> & more'


def write_point(
    path: Path,
    *,
    protocol: str,
    n: int | None,
    mu: int,
    lam: int,
    epochs: int = 6,
    status: str = "finished",
    topology: str = "base",
    options: dict[str, Any] | None = None,
    seed: int = 1,
    learning_rate: float = 0.01,
    modulation: str = "auto",
    known_error: bool = True,
    optimizer: dict[str, Any] | None = None,
    **about: Any,
) -> None:
    """One simulated run whose time falls with λ and rises with small μ, and whose error rises with μλ."""
    job = Job(
        name="grid",
        protocol={"name": protocol, "reference_batch_size": 64, "modulation": modulation} | ({"n": n} if n else {}),
        training={"minibatch_size": mu, "epochs": epochs, "seed": seed},
        optimizer={"learning_rate": learning_rate} | (optimizer or {}),
        cluster={"learners": lam},
        topology={"name": topology, "options": options or {}},
    ).resolved(learners=lam, threads_per_rank=1)
    plan = job.plan([i * 2 // lam for i in range(lam)])
    known = {"name": "grid", "job": job.to_json(), "driver": "simulation", "protocol": protocol, "topology": topology}
    known |= {"learners": lam, "minibatch_size": mu, "epochs": epochs, "training_samples": 3200, "hosts": ["köln"]}
    made = job.make_protocol(plan)
    known |= {"gradients_per_update": made.gradients_per_update, **plan_rows.about(plan)}
    known |= {"modulation": made.modulation.name, "rate_factor": made.modulation.rate_factor(0.0)}
    about = known | ({"n": n} if n else {}) | about
    cost = {"hardsync": 1.4, "softsync": 1.0 + 0.01 * (n or 0)}[protocol]
    time_s = cost * 20 * epochs * (1 + 4 / mu) / lam**0.9
    last = 100 * (0.12 + 0.02 * np.log2(1 + mu * lam / 64) + (0.01 if protocol == "softsync" else 0))
    number = np.arange(epochs) + 1
    last *= 1 + 0.05 * (seed - 1)
    error = (last + (90 - last) * np.exp(-number / 1.5)) / 100
    updates, sigma = 40 * epochs, n or 0
    stale = np.random.default_rng(mu).binomial(2 * sigma, 0.5, (updates, 2)) if lam > 1 else np.zeros((updates, 2), int)
    times = np.linspace(0, time_s, updates)
    extra = {"size": SIZE, "learners": lam, "flush_s": 0.0, "overwrite": False, "roles": plan_rows.rows_of(plan)}
    with ResultsWriter(path, attributes=about, layout=LAYOUT, **extra) as writer:
        stamps, rate = np.arange(updates) + 1, {"learning_rate": learning_rate}
        common = {"timestamp": stamps, "time_s": times, "mean_staleness": stale.mean(1), "gradients": 2}
        writer.append("updates", rows(UPDATE, updates, **common, samples=80, update_s=0.1 * time_s / updates, **rate))
        writer.append("gradients", rows(GRADIENT, 2 * updates, update=stamps.repeat(2), staleness=stale.ravel()))
        ended: dict[str, Any] = {
            "epoch": number,
            "evaluated": 1,
            "test_error": error if known_error else np.nan,
            "test_loss": 3 * error,
            "train_error": 0.9 * error if known_error else np.nan,
            "train_loss": 2.5 * error,
            "time_s": number * time_s / epochs,
        }
        writer.append("epochs", rows(EPOCH, epochs, **ended, **rate, evaluation_s=0.02 * time_s))
        if status != "finished":
            writer.fail("failed", "learner 1 <b>died</b>")
            return
        totals = rows(TOTALS, timestamp=updates, samples=3200 * epochs, pushed=2 * updates, applied=2 * updates)
        totals["time_s"] = time_s
        shares = {"compute_s": 0.7 * time_s, "push_s": 0.1 * time_s, "wait_s": 0.1 * time_s, "pull_s": 0.05 * time_s}
        writer.finish(totals, rows(LEARNER, lam, learner=range(lam), **shares), WEIGHTS, sha256(WEIGHTS))


def write_study(directory: Path, mus=(4, 16, 64), lambdas=(1, 2, 10, 30), *, holes: bool = True) -> Path:
    """A directory as `rudra sweep` leaves it; with `holes` a point failed, one is missing, and one is damaged."""
    directory.mkdir()
    points = []
    for mu, lam in product(mus, lambdas):
        for protocol, n in (("hardsync", None), ("softsync", 1), *([("softsync", lam)] if lam > 1 else ())):
            overrides = {"protocol.name": protocol, "training.minibatch_size": mu, "cluster.learners": lam}
            overrides |= {"protocol.n": n} if n else {}
            name = f"{protocol}-{n}-{mu}-{lam}.h5"
            write_point(directory / name, protocol=protocol, n=n, mu=mu, lam=lam)
            points.append({"file": name, "overrides": overrides, "label": f"{protocol} n = {n}, μ = {mu}, λ = {lam}"})
    if holes:
        write_point(directory / "failed.h5", protocol="softsync", n=1, mu=8, lam=2, epochs=2, status="failed")
        (directory / "damaged.h5").write_bytes(b"not HDF5")
        points += [{"file": f"{name}.h5", "overrides": {}, "label": name} for name in ("failed", "damaged", "gone")]
    whole = {"source": "Table 2", "epochs": 140, "training_samples": 50000}
    paper = [
        {**whole, "sigma": 0, "minibatch_size": 64, "learners": 1, "test_error": 0.179, "time_s": 22392}
        | {"file": "hardsync-None-64-1.h5"},
        {**whole, "sigma": 1, "minibatch_size": 4, "learners": 30, "test_error": 0.1809, "time_s": 1573, "file": None},
        {"source": "Figure 4", "sigma": 30, "learners": 30, "mean_staleness": 30, "staleness_max": 60}
        | {"beyond_max": 0.0001, "file": "softsync-30-4-30.h5"},
        {"source": "Figure 8", "sigma": 1, "minibatch_size": 64, "learners": 10, "speed_up": 8.78}
        | {"file": "softsync-1-64-10.h5"},
    ]
    index = {"format": 1, "title": TITLE, "job": "grid", "quick": False, "figure": "tradeoff"}
    (directory / "sweep.json").write_text(json.dumps({**index, "grid": {}, "points": points, "paper": paper}))
    return directory


@contextmanager
def without_layout() -> Iterator[None]:
    """Figures are drawn, but not laid out, which takes half of their time: for tests of what is in them."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("matplotlib.layout_engine.ConstrainedLayoutEngine.execute", lambda engine, figure: None)
        yield
