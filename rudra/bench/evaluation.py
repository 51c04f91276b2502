"""What the statistics server's tests cost the training: the same job with them and without."""

import tempfile
from pathlib import Path

from rudra.api import run as run_job
from rudra.findings import Report, ratios, spread
from rudra.job.job import Job


def run(*, quick: bool) -> Report:
    """Runs the shipped job `digits`, four learners, in turns."""
    job = Job.load("digits", ["training.epochs=1", "cluster.learners=1", "data.train_limit=160"] if quick else [])
    rates: dict[bool, list[float]] = {True: [], False: []}
    skipped = []
    with tempfile.TemporaryDirectory(prefix="rudra-bench-") as directory:
        for turn in range(1 if quick else 5):
            for evaluate in (True, False) if turn % 2 else (False, True):
                chosen = job.with_(training={"evaluate": evaluate})
                with run_job(chosen, output=Path(directory) / "run.h5", force=True, progress="quiet") as results:
                    rates[evaluate].append(float(results.summary()["samples_per_s"]))
                    if evaluate:
                        skipped.append(int((results.epochs["evaluated"] == 0).sum()))
    report = Report([f"digits, {job.learners} learners", "samples per second", "/ without tests"])
    report.rows = [
        ("with a test of each epoch", spread(rates[True]), ratios(rates[True], rates[False])),
        ("without", spread(rates[False]), 1.0),
    ]
    report.notes = [f"epochs that the statistics server had to skip: {sum(skipped)} in {len(skipped)} runs"]
    return report
