"""Cost of the statistics server's evaluations for the training: the same job with and without evaluations."""

import tempfile
from functools import partial
from pathlib import Path

from rudra.api import run as run_job
from rudra.bench.ranks import compared
from rudra.benchmark_report import Report, ratios, spread
from rudra.job.job import Job


def run(*, quick: bool) -> Report:
    """Runs the shipped job `digits` with four learners, in turns."""
    job = Job.load("digits", ["training.epochs=1", "cluster.learners=1", "data.train_limit=160"] if quick else [])
    skipped = []
    with tempfile.TemporaryDirectory(prefix="rudra-bench-") as directory:

        def rate(*, evaluate: bool) -> float:
            chosen = job.with_(training={"evaluate": evaluate})
            with run_job(chosen, output=Path(directory) / "run.h5", force=True, progress="quiet") as results:
                skipped.append(int((results.epochs["evaluated"] == 0).sum()) if evaluate else 0)
                return float(results.summary()["samples_per_s"])

        ways = {"with": partial(rate, evaluate=True), "without": partial(rate, evaluate=False)}
        rates = compared(ways, 0 if quick else 5)
    report = Report([f"digits, {job.learners} learners", "samples per second", "/ without evaluation"])
    report.rows = [
        ("with an evaluation of each epoch", spread(rates["with"]), ratios(rates["with"], rates["without"])),
        ("without", spread(rates["without"]), 1.0),
    ]
    report.notes = [f"epochs that the statistics server had to skip: {sum(skipped)} in {len(skipped) // 2} runs"]
    return report
